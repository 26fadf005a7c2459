"""The server's side of the trainer process."""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncGenerator, Mapping
from pathlib import Path
from typing import Any, Literal

from art_sky.config import TrainerConfig
from art_sky.schemas import InitTask, TrainOutcome, TrainTask
from art_sky.server.child import Child


class TrainerProcess:
    """One trainer for one base model. It starts at the first call and comes back when it dies (ChildDied).

    `base_model` is a folder, as `art_sky.base_models.resolve` returns it. `threads` is part of what makes a run
    repeat bit for bit.
    """

    def __init__(
        self,
        base_model: Path,
        dtype: Literal["bfloat16", "float32"],
        threads: int,
        log_file: Path,
        environment: Mapping[str, str] | None = None,
        settings: TrainerConfig | None = None,
    ) -> None:
        """`environment` is set beside this process's own, e.g. which GPUs the trainer may see."""
        arguments = ["--base-model", str(base_model), "--dtype", dtype, "--threads", str(threads)]
        settings = settings or TrainerConfig()
        arguments += ["--processes", str(settings.processes), "--kind", settings.kind]
        arguments += ["--optimizer", settings.optimizer, "--quantization", settings.quantization]
        # Threads that wait must not spin: beside other work on the same cores that was five times slower (measured).
        waiting = os.environ.get("OMP_WAIT_POLICY", "PASSIVE")
        env = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_WAIT_POLICY": waiting}
        # Pings are answered by a thread of their own, which waits for the interpreter while weights are unpacked.
        self.child = Child(
            "trainer",
            "art_sky.training.worker",
            arguments,
            log_file,
            env=env | dict(environment or {}),
            silent_seconds=120.0,
        )

    def start(self) -> None:
        """Begins to start the process, so that the first call need not wait for it."""
        self.child.start()

    async def init(self, task: InitTask) -> None:
        """Writes the files of step 0 into `task.out_dir`. Raises InvalidConfig for LoRA targets that do not exist."""
        await self.child.result("init", task.model_dump())

    async def train(self, task: TrainTask) -> AsyncGenerator[dict[str, Any] | TrainOutcome, None]:
        """Yields `{"micro_batch": done, "of": all}` as it goes, and the TrainOutcome last.

        Closing the iterator cancels the call between two micro-batches. Raises TrainFailed, MissingTokens,
        InvalidReward, InvalidInput, BaseMismatch, CorruptObject, NoDiskSpace; ChildDied and Busy are retryable.
        """
        # Closed explicitly: that is what sends the cancel, and the garbage collector may take its time.
        async with contextlib.aclosing(self.child.call("train", task.model_dump())) as messages:
            async for message in messages:
                if "result" in message:
                    yield TrainOutcome.model_validate(message["result"])
                else:
                    yield message["event"]

    async def close(self) -> None:
        await self.child.stop()
