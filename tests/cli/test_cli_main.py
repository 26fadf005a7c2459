"""The frame of the command line: help, errors, exit codes, and what is not imported."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys

import click
import pytest
from cli_store import run

import art_sky
from art_sky.cli import main as cli_main
from art_sky.cli.output import duration
from art_sky.errors import Conflict

HEAVY = {"torch", "transformers", "peft", "sky", "boto3", "botocore", "wandb", "fastapi", "matplotlib"}


def modules_after(code: str) -> set[str]:
    script = f"import json, sys\n{code}\nprint(json.dumps(sorted(sys.modules)))"
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(json.loads(out.stdout.splitlines()[-1]))


@pytest.mark.parametrize("code", ["import art_sky", "import art_sky.cli.main"])
def test_start_imports_nothing_heavy(code: str) -> None:
    loaded = modules_after(code)
    assert not loaded & HEAVY
    assert not loaded & {"pydantic", "rich", "openai", "httpx", "asyncio"}, "not even these"


@pytest.mark.parametrize("name", cli_main.COMMANDS)
def test_a_commands_help_imports_nothing_heavy(name: str) -> None:
    code = (
        f"import art_sky.cli.main as m\ntry: m.main(['{name}', '--help'])\nexcept SystemExit as e: assert e.code == 0"
    )
    assert not modules_after(code) & HEAVY


def test_help_needs_no_command_module() -> None:
    code = "import art_sky.cli.main as m\ntry: m.main(['--help'])\nexcept SystemExit: pass"
    assert not [m for m in modules_after(code) if m.startswith("art_sky.cli.") and m != "art_sky.cli.main"]


def test_help_lines_are_those_of_the_commands() -> None:
    for name, (module, line) in cli_main.COMMANDS.items():
        command = importlib.import_module(module).command
        assert isinstance(command, click.Command)
        assert (command.help or "").split("\n\n")[0] == line, name


def test_read_commands_take_json() -> None:
    for name in ("status", "models", "steps"):
        command = importlib.import_module(cli_main.COMMANDS[name][0]).command
        assert "--json" in {o for p in command.params for o in p.opts}


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--version") == 0
    assert capsys.readouterr().out == f"art-sky {art_sky.__version__}\n"


def test_near_names(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("lanch") == 2
    assert "no command 'lanch'; did you mean 'launch'?" in capsys.readouterr().err
    assert run("status", "--jsn") == 2
    assert "--json" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (Conflict("taken;\nuse another"), 1, "error: taken; use another\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
        (OSError(28, "No space left on device", "/disk/x"), 1, "error: [Errno 28] No space left on device: '/disk/x'"),
        (ModuleNotFoundError("No module named 'torch'", name="torch"), 1, "pip install 'art-sky[local]'"),
    ],
)
def test_errors_are_one_line(
    error: BaseException, code: int, line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    @click.command()
    def fails() -> None:
        raise error

    monkeypatch.setattr(cli_main.LazyGroup, "get_command", lambda self, ctx, name: fails)
    assert run("status") == code
    out, err = capsys.readouterr()
    assert out == "" and line in err and err.strip().count("\n") == 0


def test_a_bug_shows_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    @click.command()
    def buggy() -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(cli_main.LazyGroup, "get_command", lambda self, ctx, name: buggy)
    with pytest.raises(ZeroDivisionError):
        cli_main.main(["status"])


@pytest.mark.parametrize(
    ("seconds", "text"), [(None, "-"), (0, "0s"), (59.9, "59s"), (185, "3m 05s"), (7620, "2h 07m"), (356400, "4d 03h")]
)
def test_duration(seconds: float | None, text: str) -> None:
    assert duration(seconds) == text
