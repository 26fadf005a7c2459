"""The command line's words for the engine become its settings, and wrong ones are one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from art_sky.cli import demo, serve
from art_sky.cli.server_options import server_config
from art_sky.demo import DemoOptions
from art_sky.errors import InvalidConfig


def test_serve_writes_what_was_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.execv", lambda *_: None)
    words = "--engine vllm --vllm-python /opt/vllm/bin/python --max-lora-rank 32 --dtype float32 --allow-untested"
    done = CliRunner().invoke(serve.command, [*words.split(), "--state-dir", str(tmp_path), "--store", str(tmp_path)])
    assert done.exit_code == 0, done.output
    config = json.loads((tmp_path / "config.json").read_text())
    engine = {k: config["engine"][k] for k in ("kind", "vllm_python", "max_lora_rank", "dtype")}
    assert engine == {
        "kind": "vllm", "vllm_python": "/opt/vllm/bin/python", "max_lora_rank": 32, "dtype": "float32",
    }  # fmt: skip
    assert config["allow_untested"] is True


def test_an_option_that_the_engine_ignores_is_refused() -> None:
    with pytest.raises(InvalidConfig, match="the cpu engine has no vllm_python"):
        server_config({"vllm_python": "python3"}, state_dir="state")


def test_the_demo_takes_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[DemoOptions] = []

    def run(options: DemoOptions, _: Any) -> Any:
        seen.append(options)
        raise InvalidConfig("enough; stop here")

    monkeypatch.setattr(demo, "run_demo", run)
    CliRunner().invoke(demo.command, ["--engine", "vllm", "--allow-untested", "--json"])
    assert (seen[0].engine, seen[0].allow_untested) == ("vllm", True)
