"""What is refused when a base model is loaded."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from inference_engines import MakeScheduler

from art_sky.errors import InvalidConfig, Unsupported


def changed(model: Path, folder: Path, **values: object) -> Path:
    shutil.copytree(model, folder)
    config = folder / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), **values}))
    return folder


def test_sliding_windows_bound_the_context(tiny_model: Path, engine: MakeScheduler, tmp_path: Path) -> None:
    windows = {"use_sliding_window": True, "sliding_window": 64, "layer_types": ["sliding_attention"] * 4}
    folder = changed(tiny_model, tmp_path / "windows", **windows)
    with pytest.raises(Unsupported, match="at most 64"):
        engine(folder)
    assert engine(folder, context_length=64).model.context_length == 64


def test_positions_that_depend_on_the_batch_are_refused(
    tiny_llama: Path, engine: MakeScheduler, tmp_path: Path
) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    with pytest.raises(Unsupported, match="dynamic"):
        engine(changed(tiny_llama, tmp_path / "dynamic", rope_parameters=rope))


def test_a_folder_without_a_model_is_named(engine: MakeScheduler, tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match=str(tmp_path)):
        engine(tmp_path)


def test_lengths_that_cannot_be(engine: MakeScheduler, tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match="at most 512"):
        engine(context_length=1000)


def test_the_context_is_the_models_by_default(engine: MakeScheduler) -> None:
    assert engine().model.context_length == 512
