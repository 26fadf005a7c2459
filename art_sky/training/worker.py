"""The trainer process: `python -m art_sky.training.worker --fd N --base-model DIR --dtype D --threads N`.

Methods: `init` (schemas.InitTask -> {}) and `train` (schemas.TrainTask -> schemas.TrainOutcome, with an event
`{"micro_batch": done, "of": all}` before and after each micro-batch). The base model is loaded at the first call
and kept; adapter and optimizer are read from the parent step's files each time, so that a restart changes nothing.
Every error is typed and leaves the process ready for the next call.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from art_sky.config import SFTConfig
from art_sky.errors import Cancelled, InvalidInput, NoDiskSpace, StoreError, TrainFailed
from art_sky.schemas import InitTask, TrainOutcome, TrainTask
from art_sky.store.batches import decode_batch
from art_sky.store.failpoints import failpoint
from art_sky.worker import Call, Channel

if TYPE_CHECKING:
    from art_sky.training.model import Dtype, Policy


class Worker:
    def __init__(self, base_model: Path, dtype: Dtype, threads: int) -> None:
        self._base_model, self._dtype, self._threads = base_model, dtype, threads
        self._policy: Policy | None = None

    def init(self, call: Call) -> dict[str, Any]:
        from art_sky.training import state

        task = InitTask.model_validate(call.params)
        with _typed():
            policy = self._load()
            config = policy.new_adapter(task.lora, task.base_model)
            state.save(state.TrainerState.fresh(config, policy.adapter()), Path(task.out_dir))
        return {}

    def train(self, call: Call) -> dict[str, Any]:
        from art_sky.training import sft, state, trainer
        from art_sky.training.sequences import build_batch, build_examples

        task = TrainTask.model_validate(call.params)

        def progress(done: int, of: int) -> None:
            call.channel.beat += 1
            call.event({"micro_batch": done, "of": of})
            if call.cancelled.is_set():
                raise Cancelled("the train call was cancelled and committed nothing; train again if it is still wanted")
            if done:
                failpoint("trainer-mid-step")

        began = time.monotonic()
        with _typed():
            policy = self._load()
            groups = decode_batch(Path(task.batch_path).read_bytes())
            limits = {"vocab_size": policy.vocab_size, "context_length": policy.context_length}
            if isinstance(task.config, SFTConfig):
                batch = build_examples(groups, task.config, **limits)
                reason = batch.reason()
            else:
                batch = build_batch(groups, task.config, **limits)
                reason = batch.reason(task.config.kl_penalty_coef > 0)
            if reason is not None:
                metrics = {**trainer.describe(batch), "time/train_seconds": time.monotonic() - began}
                return TrainOutcome(updates=0, reason=reason, metrics=metrics).model_dump()
            step = state.load(Path(task.parent_dir))
            reference = state.load(Path(task.reference_dir)) if task.reference_dir else None
            before = step.updates
            if isinstance(task.config, SFTConfig):
                metrics = sft.train(policy, step, batch, task.config, progress)
            else:
                metrics = trainer.train(policy, step, batch, task.config, progress, reference)
            state.save(step, Path(task.out_dir))
        metrics["time/train_seconds"] = time.monotonic() - began
        return TrainOutcome(updates=step.updates - before, metrics=metrics).model_dump()

    def _load(self) -> Policy:
        if self._policy is None:
            import torch

            from art_sky.training.model import Policy

            torch.set_num_threads(self._threads)
            self._policy = Policy(self._base_model, self._dtype)
        return self._policy


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--fd", required=True)  # read by Channel.from_argv
    parser.add_argument("--base-model", required=True, type=Path)
    parser.add_argument("--dtype", required=True, choices=["bfloat16", "float32"])
    parser.add_argument("--threads", required=True, type=int)
    args = parser.parse_args()
    channel = Channel.from_argv()
    channel.ready({"pid": os.getpid(), "dtype": args.dtype, "threads": args.threads})
    worker = Worker(args.base_model, args.dtype, args.threads)
    channel.serve({"init": worker.init, "train": worker.train})


@contextlib.contextmanager
def _typed() -> Iterator[None]:
    """Gives a name and a mend to what the disk or the memory says."""
    import errno

    try:
        yield
    except OSError as e:
        if e.errno in (errno.ENOSPC, errno.EDQUOT):
            raise NoDiskSpace(f"no disk space for the step's files ({e.filename}); free some, then train again") from e
        raise StoreError(f"the trainer cannot use its files: {e}; check the server's state folder") from e
    except (MemoryError, RuntimeError) as e:
        if isinstance(e, MemoryError) or "not enough memory" in str(e) or "allocate memory" in str(e):
            raise TrainFailed("not enough memory for a micro-batch; lower micro_batch_tokens, then train again") from e
        raise
    except ImportError as e:
        raise InvalidInput(f"{e}; this machine lacks what trains models: `pip install 'art-sky[local]'`") from e


if __name__ == "__main__":
    main()
