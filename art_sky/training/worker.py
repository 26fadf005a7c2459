"""The trainer process: `python -m art_sky.training.worker --fd N --base-model DIR --dtype D --threads N`.

Methods: `init` (schemas.InitTask -> {}) and `train` (schemas.TrainTask -> schemas.TrainOutcome, with an event
`{"micro_batch": done, "of": all}` before and after each micro-batch). The base model is loaded at the first call
and kept; adapter and optimizer are read from the parent step's files each time, so that a restart changes nothing.
Every error is typed and leaves the process ready for the next call.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from art_sky.config import SFTConfig, TrainConfig, TrainerConfig
from art_sky.errors import ArtSkyError, Cancelled, InvalidInput, NoDiskSpace, StoreError, TrainFailed
from art_sky.schemas import InitTask, TrainOutcome, TrainTask
from art_sky.store.batches import decode_batch
from art_sky.store.failpoints import failpoint
from art_sky.worker import Call, Channel

if TYPE_CHECKING:
    from art_sky.training.model import Dtype, Policy
    from art_sky.training.ranks import Followers, Ranks
    from art_sky.training.sequences import Batch
    from art_sky.training.state import TrainerState
    from art_sky.training.trainer import Progress


class Worker:
    """The model and the calls. `command` starts the processes that compute beside this one, `processes` in all."""

    def __init__(
        self,
        base_model: Path,
        dtype: Dtype,
        threads: int,
        settings: TrainerConfig | None = None,
        command: Sequence[str] = (),
    ) -> None:
        self._base_model, self._dtype, self._threads = base_model, dtype, threads
        self._settings = settings = settings or TrainerConfig()
        self._command, self._processes, self._kind = command, settings.processes, settings.kind
        self._policy: Policy | None = None
        self._followers: Followers | None = None

    def init(self, call: Call) -> dict[str, Any]:
        self._load()
        from art_sky.training import state

        task = InitTask.model_validate(call.params)
        with _typed():
            policy = self._load()
            config = policy.new_adapter(task.lora, task.base_model)
            state.save(state.TrainerState.fresh(config, policy.adapter()), Path(task.out_dir))
        return {}

    def train(self, call: Call) -> dict[str, Any]:
        self._load()  # first: Unsloth has to be imported before what it changes
        from art_sky.training import sft, state, trainer

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
            batch = self._batch(task)
            reason = batch.reason(isinstance(task.config, TrainConfig) and task.config.kl_penalty_coef > 0)
            if reason is not None:
                describe = sft.describe if isinstance(task.config, SFTConfig) else trainer.describe
                metrics = {**describe(batch), "time/train_seconds": time.monotonic() - began}
                return TrainOutcome(updates=0, reason=reason, metrics=metrics).model_dump()
            step = state.load(Path(task.parent_dir))
            before = step.updates
            with self._others(task) as ranks:
                metrics = self._update(task, step, batch, progress, ranks)
            state.save(step, Path(task.out_dir))
        metrics["time/train_seconds"] = time.monotonic() - began
        return TrainOutcome(updates=step.updates - before, metrics=metrics).model_dump()

    def follow(self, rank: int, meeting: Path) -> None:
        """Computes a share of every call, as one of the processes beside rank 0."""
        from art_sky.training import ranks, state

        stdout = os.dup(1)
        os.dup2(2, 1)  # what libraries print goes into the log
        policy = self._load()
        group = ranks.Ranks.join(rank, self._processes, meeting, policy.device.type == "cuda")
        for task in ranks.tasks_of_rank_0():
            try:
                with _typed():
                    step = state.load(Path(task.parent_dir))
                    self._update(task, step, self._batch(task), lambda *_: failpoint("follower-mid-step"), group)
            except ArtSkyError as e:
                ranks.tell_rank_0(e, stdout)
                raise SystemExit(1) from e

    def _batch(self, task: TrainTask) -> Batch:
        from art_sky.training.sequences import build_batch, build_examples

        policy = self._load()
        groups = decode_batch(Path(task.batch_path).read_bytes())
        limits = {"vocab_size": policy.vocab_size, "context_length": policy.context_length}
        if isinstance(task.config, SFTConfig):
            return build_examples(groups, task.config, **limits)
        return build_batch(groups, task.config, **limits)

    def _update(
        self, task: TrainTask, step: TrainerState, batch: Batch, progress: Progress, ranks: Ranks
    ) -> dict[str, float | None]:
        from art_sky.training import device, sft, state, trainer

        policy = self._load()
        step.optimizer = self._settings.optimizer
        device.begin_peak(policy.device)
        with device.memory_given_back():
            if isinstance(task.config, SFTConfig):
                metrics = sft.train(policy, step, batch, task.config, progress, ranks)
            elif self._kind == "trl":
                from art_sky.training import trl

                metrics = trl.train(policy, step, batch, task.config, progress)
            else:
                reference = state.load(Path(task.reference_dir)) if task.reference_dir else None
                metrics = trainer.train(policy, step, batch, task.config, progress, reference, ranks)
        return {**metrics, "memory/peak_mib": device.peak_mib(policy.device)}

    @contextlib.contextmanager
    def _others(self, task: TrainTask) -> Iterator[Ranks]:
        """The other processes, which have got the task too. Where the block fails they end, and so does their wait."""
        from art_sky.training.ranks import ALONE, Followers

        if self._processes == 1:
            yield ALONE
            return
        try:
            if self._followers is None:
                gpu = self._load().device.type == "cuda"
                self._followers = Followers(self._command, self._processes, gpu)
            self._followers.send(task)
            yield self._followers.ranks
        except BaseException as e:
            followers, self._followers = self._followers, None
            try:
                if isinstance(e, (RuntimeError, OSError)) and followers is not None and (why := followers.failure()):
                    raise why from e
            finally:
                if followers is not None:
                    followers.stop()
            raise

    def _load(self) -> Policy:
        if self._policy is None:
            from art_sky.training import quantization, unsloth

            nf4 = self._settings.quantization == "nf4"
            if self._kind == "unsloth":
                unsloth.prepare()  # before anything else imports transformers
            import torch

            from art_sky.training.device import choose_device

            device = choose_device()
            quantization.check_bitsandbytes(self._settings, self._dtype, device.type == "cuda")
            from art_sky.training.model import Load, Policy

            torch.set_num_threads(self._threads)
            load: Load | None = None
            if self._kind == "unsloth":
                load = functools.partial(unsloth.load, nf4=nf4)
            elif nf4:
                load = functools.partial(quantization.load, device=device)
            self._policy = Policy(self._base_model, self._dtype, load)
        return self._policy


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--fd")  # read by Channel.from_argv
    parser.add_argument("--base-model", required=True, type=Path)
    parser.add_argument("--dtype", required=True, choices=["bfloat16", "float32"])
    parser.add_argument("--threads", required=True, type=int, help="of all processes together")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--kind", default="native")
    parser.add_argument("--optimizer", default="adamw")
    parser.add_argument("--quantization", default="none")
    parser.add_argument("--rank", type=int, help="of a process that computes beside the one with the channel")
    parser.add_argument("--meeting", type=Path)
    args = parser.parse_args()
    own = ["--base-model", str(args.base_model), "--dtype", args.dtype, "--threads", str(args.threads)]
    own += ["--processes", str(args.processes), "--optimizer", args.optimizer, "--quantization", args.quantization]
    command = [sys.executable, "-m", "art_sky.training.worker", *own]
    threads = max(args.threads // args.processes, 1)
    names = TrainerConfig.model_fields
    settings: TrainerConfig = TrainerConfig.parse({k: v for k, v in vars(args).items() if k in names})
    worker = Worker(args.base_model, args.dtype, threads, settings, command)
    if args.rank is not None:
        worker.follow(args.rank, args.meeting)
        return
    channel = Channel.from_argv()
    channel.ready({"pid": os.getpid(), "dtype": args.dtype, "threads": args.threads})
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
        said = ("not enough memory", "allocate memory", "out of memory")  # by torch, on a CPU and on a GPU
        if isinstance(e, MemoryError) or any(words in str(e) for words in said):
            raise TrainFailed("not enough memory for a micro-batch; lower micro_batch_tokens, then train again") from e
        raise
    except ImportError as e:
        raise InvalidInput(f"{e}; this machine lacks what trains models: `pip install 'art-sky[local]'`") from e


if __name__ == "__main__":
    main()
