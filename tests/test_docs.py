"""README, docs and infra name commands, options, links and files that exist."""

from __future__ import annotations

import re
from pathlib import Path

import click
import pytest

from art_sky.cli.main import COMMANDS, LazyGroup

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "infra/README.md"]
pages = pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
CONTEXT = click.Context(LazyGroup("art-sky"))


def options(name: str) -> set[str]:
    command = LazyGroup("art-sky").get_command(CONTEXT, name)
    assert command is not None
    return {opt for param in command.params for opt in (*param.opts, *param.secondary_opts)} | {"--help"}


ALL_OPTIONS = {option for name in COMMANDS for option in options(name)} | {"--version"}
BENCHMARKS = "".join(file.read_text() for file in (ROOT / "benchmarks").glob("*.py"))
# Of other programs.
FOREIGN = {"--tokens-only", "--no-deps", "--wheel-dir", "--logprobs-mode"}


@pages
def test_commands_and_their_options_exist(page: Path) -> None:
    for line in re.findall(r"`(art-sky [^`]+)`|^ +(art-sky .*)$", page.read_text(), re.MULTILINE):
        words = (line[0] or line[1]).partition("  ")[0].partition("#")[0].split()[1:]
        if not words or not words[0].isalpha():
            continue
        assert words[0] in COMMANDS, words
        given = {word.partition("=")[0].strip("`,.") for word in words[1:] if word.startswith("--")}
        assert given <= options(words[0]), f"{page.name}: art-sky {words[0]} has no {given - options(words[0])}"


@pages
def test_options_that_stand_alone_exist(page: Path) -> None:
    for text in re.findall(r"`([^`]+)`", page.read_text()):
        if text.startswith("--"):
            option = re.split(r"[ =]", text)[0]
            assert option in ALL_OPTIONS | FOREIGN or f'"{option}"' in BENCHMARKS, f"{page.name}: {option}"


@pages
def test_links_and_files_exist(page: Path) -> None:
    text = page.read_text()
    for target in re.findall(r"\]\(([^)#]+)", text):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name}: {target}"
    folders = "art_sky|tests|docs|infra|examples|benchmarks|sky"
    for path in re.findall(rf"`((?:{folders})/[\w./-]+)`", text):
        assert list(ROOT.glob(path.rstrip("/"))), f"{page.name}: {path}"


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_the_help_that_the_list_shows(name: str) -> None:
    command = LazyGroup("art-sky").get_command(CONTEXT, name)
    assert command is not None and command.help is not None
    assert command.help.splitlines()[0] == COMMANDS[name][1]
    assert all(p.help for p in command.params if isinstance(p, click.Option)), name
