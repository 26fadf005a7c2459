"""Data-parallel training: N processes hold the same model, each computes a share of every update's sequences.

The trainer's process is rank 0. It starts the others with the same entry point and hands them the tasks that it gets;
each of them reads the same files, so that only sums travel: gradients, and the logprobs that losses and metrics need of
all tokens. Every rank then makes the same update. A rank that fails fails the call, and the others are started anew
with the next one. On CPUs the ranks talk by gloo over the loopback interface, on GPUs by NCCL.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from art_sky.errors import ArtSkyError, TrainFailed, from_wire
from art_sky.schemas import TrainTask

# The longest that one rank may have more to do than another between two sums.
_WAIT = datetime.timedelta(hours=1)
# Between a rank's end and that of a call which still waits for it: by then each sum with it has failed.
_GRACE_SECONDS = 10.0


class Ranks:
    """This process among `count`; the sums are over all. By default it is alone."""

    def __init__(self, rank: int = 0, count: int = 1, device: str = "cpu") -> None:
        self.rank, self.count, self._device = rank, count, device

    @classmethod
    def join(cls, rank: int, count: int, meeting: Path, gpu: bool) -> Ranks:
        """Waits until all `count` processes have come to the file `meeting`."""
        os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = "lo"  # no open ports
        backend = "nccl" if gpu else "gloo"
        # So NCCL need not guess from the rank which GPU is meant: each process sees its own as the first.
        device = torch.device("cuda", 0) if gpu else None
        dist.init_process_group(
            backend, f"file://{meeting}", timeout=_WAIT, rank=rank, world_size=count, device_id=device
        )
        return cls(rank, count, "cuda" if gpu else "cpu")

    def sum(self, values: Tensor) -> Tensor:
        """The sum over all ranks, in place; every rank gets the same bits."""
        if self.count > 1:
            there = values.to(self._device)
            dist.all_reduce(there)
            values.copy_(there)
        return values

    def sum_gradients(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Replaces each `.grad` by the sum over all ranks, in float32."""
        if self.count == 1:
            return
        parameters = list(parameters)
        flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in parameters])
        self.sum(flat)
        at = 0
        for p in parameters:
            p.grad = flat[at : at + p.numel()].view_as(p)
            at += p.numel()

    def check_equal(self, tensors: Mapping[str, Tensor]) -> None:
        """Raises TrainFailed unless all ranks hold the same bytes."""
        if self.count == 1:
            return
        digest = hashlib.sha256()
        for name in sorted(tensors):
            digest.update(tensors[name].detach().cpu().numpy().tobytes())
        own = torch.tensor(
            list(digest.digest()),
            dtype=torch.float32,
        )
        if not torch.equal(self.sum(own.clone()), own * self.count):
            raise TrainFailed("the trainer's processes came to different weights; train again, or with processes=1")


ALONE = Ranks()


class Followers:
    """Ranks 1 to `count` - 1, as rank 0 sees them. `command` starts one when `--rank` and `--meeting` are added."""

    def __init__(self, command: Sequence[str], count: int, gpu: bool) -> None:
        self._stopping = threading.Event()
        self._error: ArtSkyError | None = None
        self._ended = threading.Event()
        self._folder = tempfile.TemporaryDirectory(prefix="art-sky-ranks-")
        meeting = Path(self._folder.name) / "meeting"
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        environments = {rank: own_gpu(rank, visible) if gpu else {} for rank in range(1, count)}
        self._processes = [
            subprocess.Popen(
                [*command, "--rank", str(rank), "--meeting", str(meeting)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=os.environ | environment,
            )
            for rank, environment in environments.items()
        ]
        for process in self._processes:
            threading.Thread(target=self._watch, args=(process,), daemon=True).start()
        self.ranks = Ranks.join(0, count, meeting, gpu)

    def send(self, task: TrainTask) -> None:
        line = json.dumps(task.model_dump()).encode() + b"\n"
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(line)
            process.stdin.flush()

    def failure(self) -> ArtSkyError | None:
        """Why a rank has ended, where that is what made this one fail."""
        if not self._ended.wait(_GRACE_SECONDS / 2):
            return None
        return self._error or TrainFailed(
            "one of the trainer's processes ended while it computed; see the trainer's log, then train again"
        )

    def stop(self) -> None:
        self._stopping.set()
        for process in self._processes:
            process.kill()
            process.wait()
        if dist.is_initialized():
            dist.destroy_process_group()
        self._folder.cleanup()

    def _watch(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            self._error = from_wire(json.loads(line))
        process.wait()
        if self._stopping.is_set():
            return
        self._ended.set()
        if not self._stopping.wait(_GRACE_SECONDS):
            # This rank waits where nothing tells it, such as for one that never came. The server starts it again.
            print(f"a rank ended with exit code {process.returncode}, and this one with it", file=sys.stderr)
            os._exit(1)


def own_gpu(rank: int, visible: str) -> dict[str, str]:
    """The environment in which a follower sees one GPU: of those in rank 0's CUDA_VISIBLE_DEVICES the one at its rank.
    Rank 0 sees them all and computes on the first, which is its current one.

    Raises TrainFailed where there are fewer GPUs than ranks: two on one GPU would wait for each other for ever.
    """
    gpus = [gpu for gpu in visible.split(",") if gpu]
    if rank >= len(gpus):
        raise TrainFailed(f"there is no GPU for process {rank + 1} of the trainer, only {len(gpus)}; lower processes")
    return {"CUDA_VISIBLE_DEVICES": gpus[rank]}


def tasks_of_rank_0() -> Iterable[TrainTask]:
    """The tasks that a follower gets on its standard input. When rank 0 ends, so does this process."""
    import queue

    waiting: queue.Queue[bytes] = queue.Queue()

    def read() -> None:
        for line in sys.stdin.buffer:
            waiting.put(line)
        os._exit(0)

    threading.Thread(target=read, daemon=True).start()
    while True:
        yield TrainTask.model_validate_json(waiting.get())


def tell_rank_0(error: ArtSkyError, stdout: int) -> None:
    os.write(stdout, json.dumps(error.to_wire()).encode() + b"\n")
