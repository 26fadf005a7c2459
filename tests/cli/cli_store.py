"""A model with a few steps, committed without a server."""

from __future__ import annotations

from pathlib import Path

import pytest

from art_sky.cli import main as cli_main
from art_sky.config import LoRAConfig
from art_sky.schemas import ModelRecord
from art_sky.store import open_store
from art_sky.store.model_store import ModelStore


def make_model(folder: Path, project: str, name: str, steps: int) -> ModelStore:
    model = ModelStore(open_store(str(folder)), project, name)
    model.create(
        ModelRecord(
            project=project, name=name, base_model="tiny", lora=LoRAConfig(), created=1.0, created_by="art-sky test"
        )
    )
    with model.open_writer("test") as writer:
        for step in range(steps + 1):
            skipped = step == 2
            writer.commit(
                step=step,
                request=f"r{step}",
                files={"adapter/adapter_config.json": model.put_blob(b"{}")},
                updates=int(step > 0 and not skipped),
                reason="no group had a spread of rewards" if skipped else None,
                metrics={"loss": -0.5, "data/tokens_trained": 120.0, "time/train_seconds": 3.0} if step else {},
            )
            model.log_row(1, step, "train", {"reward": step / 10})
    model.log_row(1, steps, "val", {"reward": 0.75})
    return model


def run(*args: str) -> int:
    """The exit code of the command line."""
    with pytest.raises(SystemExit) as exit:
        cli_main.main(args)
    assert isinstance(exit.value.code, int)
    return exit.value.code
