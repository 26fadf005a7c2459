"""The demo through the real server, engine, trainer and store, with a tiny model in place of SmolLM2."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from cli_store import make_model
from rich.console import Console

from art_sky import demo
from art_sky.cli import demo as cli_demo
from art_sky.cli import main as cli_main
from art_sky.cli.steps import describe_steps
from art_sky.errors import LeaseLost
from art_sky.store import open_store
from art_sky.store.model_store import ModelStore, list_models


def run(*args: str) -> int:
    with pytest.raises(SystemExit) as exit:
        cli_main.main(["demo", *args])
    assert isinstance(exit.value.code, int)
    return exit.value.code


@pytest.fixture
def small(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ART_SKY_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(demo, "SMOLLM2", str(tiny_model))
    for name, value in {"GROUPS": 2, "SAMPLES": 4, "VALIDATION_SAMPLES": 1, "MAX_TOKENS": 3}.items():
        monkeypatch.setattr(demo, name, value)
    # An untrained model says nothing that would earn a real reward.
    monkeypatch.setattr(demo, "score", lambda text: (sum(map(ord, text or "")) % 7) / 7)


def test_trains_and_goes_on(
    small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--steps", "2", "--json") == 0
    out, err = capsys.readouterr()
    first = json.loads(out)
    assert set(first) == {"base_model", "steps", "validation", "seconds", "head"}
    assert set(first["steps"][0]) == {
        "step", "reward", "seconds", "tokens_sampled", "tokens_trained", "loss", "grad_norm", "skipped",
    }  # fmt: skip
    assert [s["step"] for s in first["steps"]] == [1, 2] and not first["steps"][0]["skipped"]
    assert 8 <= first["steps"][0]["tokens_sampled"] <= 24 and first["steps"][0]["grad_norm"] > 0
    assert first["validation"]["samples"] == 8 and first["head"]["step"] == 2
    assert "validation at step 0" in err

    # It goes on from HEAD, and what was measured before is not measured again. Now nothing has a spread.
    monkeypatch.setattr(demo, "score", lambda text: 0.25)
    assert run("--steps", "3") == 0
    out = capsys.readouterr().out
    assert "going on from step 2" in out and "3   0.250" in out
    assert "skipped (no spread)" in out
    assert f"{first['validation']['before']:.3f} before, 0.250 after" in out
    assert (tmp_path / ".art-sky" / "yes-no-maybe-0.png").is_file()
    steps = describe_steps(ModelStore(open_store(".art-sky"), "demo", "yes-no-maybe-0"))
    assert [s["updates"] for s in steps] == [0, 1, 1, 0]
    assert [s["loss"] for s in steps[1:3]] == [s["loss"] for s in first["steps"]]


def test_fresh_forgets_this_seed_and_no_other(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    for seed in (0, 1):
        make_model(tmp_path, "demo", f"yes-no-maybe-{seed}", 2)
    options = demo.DemoOptions(store=str(tmp_path), seed=0)
    with ModelStore(store, "demo", options.name).open_writer("a server"), pytest.raises(LeaseLost):
        demo.forget(options)
    demo.forget(options)
    demo.forget(options)
    assert list_models(store) == [("demo", "yes-no-maybe-1")]
    assert make_model(tmp_path, "demo", options.name, 1).head().step == 1


def test_ctrl_c_says_how_to_go_on(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(options: demo.DemoOptions, report: demo.Report) -> demo.DemoResult:
        report.step(demo.StepRow(4, 0.5, 1.0, 10, 10, 0.1, 1.0, False))
        raise KeyboardInterrupt

    monkeypatch.setattr(cli_demo, "run_demo", interrupted)
    assert run("--json") == 130
    out, err = capsys.readouterr()
    assert out == "" and "step 4 is committed; the same command without --fresh goes on from there" in err


def test_prompts_and_rewards() -> None:
    assert len(demo.TRAINING_PROMPTS) == len(set(demo.TRAINING_PROMPTS)) == 3 * 3 * 12
    assert len(demo.VALIDATION_PROMPTS) * demo.VALIDATION_SAMPLES == 128
    assert not set(demo.VALIDATION_PROMPTS) & set(demo.TRAINING_PROMPTS)
    assert [demo.score(t) for t in ("maybe", " Yes. ", "NO!", "maybe not", "", None)] == [1.0, 0.75, 0.5, 0, 0, 0]
    assert demo._seed(0, "train", 1, 2, 3) == demo._seed(0, "train", 1, 2, 3) != demo._seed(1, "train", 1, 2, 3)


@pytest.mark.parametrize(("in_bytes", "shown"), [(True, True), (False, False)])
def test_a_download_shows_bytes_and_steps_do_not(in_bytes: bool, shown: bool) -> None:
    out = io.StringIO()
    with cli_demo._Report(Console(file=out, force_terminal=True, width=120)) as report:
        report.phase("download the model", 5 << 20, 90 << 20, in_bytes=in_bytes)
    assert ("5.0 MiB of 90.0 MiB" in out.getvalue()) == shown
