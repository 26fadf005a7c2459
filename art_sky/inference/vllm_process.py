"""The server's side of a vLLM process: start, health, death noticed within a second, start again."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import psutil

from art_sky.errors import Busy, ChildDied
from art_sky.inference import vllm_keeper
from art_sky.inference.vllm_client import VllmClient
from art_sky.inference.vllm_install import clean_environment
from art_sky.tasks import end_task

_POLL_SECONDS = 0.25
_HEALTH_SECONDS = 1.0
_GONE_SECONDS = 10.0
_LAST_LINES = 40  # of the log, searched for the reason when vLLM does not start

State = Literal["stopped", "starting", "ready", "dead"]


class VllmProcess:
    """Supervises one vLLM. `command` gives its arguments for a socket's path.

    It listens on a Unix socket in a folder that only this user can enter: so no port is open and every route is
    guarded, those included that vLLM's API key does not cover.

    `start_seconds`: until it answers; `silent_seconds`: how long it may leave the health check without an answer.
    """

    def __init__(
        self,
        command: Callable[[Path], list[str]],
        env: dict[str, str],
        log_file: Path,
        *,
        start_seconds: float,
        silent_seconds: float = 60.0,
    ) -> None:
        self.state: State = "stopped"
        self.restarts = 0
        self.generation = 0  # counts the processes that became ready: what one had loaded, the next has not
        self.client: VllmClient | None = None
        self._command, self._env, self._log_file = command, env, log_file
        self._start_seconds, self._silent_seconds = start_seconds, silent_seconds
        self._pid: int | None = None
        self._ready = asyncio.Event()
        self._may_run = asyncio.Event()
        self._may_run.set()
        self._failed = asyncio.Event()  # the last start came to nothing
        self._reason = ""
        self._runner: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        """Of the process group's leader, while it lives."""
        return self._pid

    def start(self) -> None:
        if self._runner is None:
            self._runner = asyncio.create_task(self._keep_running(), name="supervise vLLM")

    async def stop(self) -> None:
        await end_task(self._runner)
        self._runner = None
        self.state = "stopped"

    async def ready(self) -> VllmClient:
        """Waits for vLLM. Raises ChildDied when it ends while it starts, Busy when it takes longer than the start's
        deadline.
        """
        if self.client is not None and not self.client.dead:
            return self.client
        self._ready.clear()  # until the next health check, which ends it or clears it of the suspicion
        waits = [asyncio.create_task(e.wait()) for e in (self._ready, self._failed)]
        try:
            await asyncio.wait(waits, timeout=self._start_seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        if self.client is not None and not self.client.dead:
            return self.client
        if self._failed.is_set():
            raise ChildDied(f"vLLM does not start: {self._reason}; mend it, then call again")
        raise Busy(
            f"vLLM was not ready within {self._start_seconds:.0f} s; its log is {self._log_file}; call again when "
            "the machine is less busy"
        )

    def kill(self) -> None:
        """SIGKILL; the supervisor notices and starts it again."""
        if self._pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._pid, signal.SIGKILL)

    def hold(self) -> None:
        """No new process is started until `release`."""
        self._may_run.clear()

    def release(self) -> None:
        self._may_run.set()

    async def _keep_running(self) -> None:
        quick_deaths = 0
        while True:
            await self._may_run.wait()
            was_ready = self.generation
            await self._run_once()
            self.restarts += 1
            quick_deaths = quick_deaths + 1 if self.generation == was_ready else 0
            if quick_deaths:
                self._failed.set()
                await asyncio.sleep(min(30.0, 0.5 * 2**quick_deaths))

    async def _run_once(self) -> None:
        folder = Path(tempfile.mkdtemp(prefix="art-sky-vllm-"))  # mode 0700; a short path, as sockets need
        socket = folder / "socket"
        self._log_file.parent.mkdir(parents=True, exist_ok=True)
        theirs, ours = os.pipe()
        keeper: asyncio.subprocess.Process | None = None
        self.state = "starting"
        self._failed.clear()
        client = VllmClient(socket, str(self._log_file))
        kind = False
        try:
            with self._log_file.open("ab") as log:
                at = log.seek(0, os.SEEK_END)
                keeper = await asyncio.create_subprocess_exec(
                    sys.executable,
                    "-I",  # by its file, as vLLM's environment knows nothing of this package
                    vllm_keeper.__file__,
                    str(theirs),
                    str(folder),
                    *self._command(socket),
                    pass_fds=[theirs],
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                    # Sockets between vLLM's own processes go into the same folder.
                    env={**clean_environment(), **self._env, "VLLM_RPC_BASE_PATH": str(folder)},
                )
            self._pid = keeper.pid
            self._reason = await self._watch(keeper, client, at)
        except asyncio.CancelledError:
            kind = True
            raise
        except OSError as e:
            self._reason = f"it could not be started ({e})"
        finally:
            self._ready.clear()
            self.state, self.client = "dead", None
            os.close(theirs)
            os.close(ours)  # the keeper ends vLLM
            if keeper is not None:
                await asyncio.shield(_end(keeper, vllm_keeper.KIND_SECONDS + 1 if kind else 0.0))
            self._pid = None
            await client.close()
            shutil.rmtree(folder, ignore_errors=True)

    async def _watch(self, keeper: asyncio.subprocess.Process, client: VllmClient, log_start: int) -> str:
        """Until it is dead or silent; the reason."""
        exited = asyncio.create_task(keeper.wait())
        began = heard = time.monotonic()
        try:
            while True:
                await asyncio.wait({exited}, timeout=_POLL_SECONDS)
                if exited.done():
                    return f"{_ending(exited.result())}{self._last_words(log_start)}; its log is {self._log_file}"
                healthy = await client.healthy(_HEALTH_SECONDS)
                now = time.monotonic()
                if healthy:
                    heard = now
                    client.dead = False
                    if self.state == "starting":
                        self.generation += 1
                        self.client, self.state = client, "ready"
                    self._ready.set()
                elif self.state == "starting":
                    if now - began > self._start_seconds:
                        return f"it was not ready within {self._start_seconds:.0f} s; its log is {self._log_file}"
                elif healthy is False or now - heard > self._silent_seconds:
                    return f"its engine is dead; its log is {self._log_file}"
        finally:
            exited.cancel()

    def _last_words(self, log_start: int) -> str:
        """The last error line of the log since this start."""
        try:
            with self._log_file.open("rb") as log:
                log.seek(log_start)
                lines = log.read().decode(errors="replace").splitlines()[-_LAST_LINES:]
        except OSError as e:
            return f" ({e.strerror} when its log was read)"
        errors = [line.strip() for line in lines if "Error" in line]
        return f" after {errors[-1][:300]!r}" if errors else ""


async def _end(keeper: asyncio.subprocess.Process, kind_seconds: float) -> None:
    """Reaps the keeper, kills what is left of its group, and waits until the group's memory is free for the next."""
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(keeper.wait(), kind_seconds)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(keeper.pid, signal.SIGKILL)
    await keeper.wait()
    await asyncio.to_thread(_wait_gone, keeper.pid)


def _wait_gone(group: int) -> None:
    deadline = time.monotonic() + _GONE_SECONDS
    while _lives(group) and time.monotonic() < deadline:
        time.sleep(0.05)


def _lives(group: int) -> bool:
    """Whether a process of the group has not ended; zombies have."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, ProcessLookupError):
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                return True
    return False


def _ending(code: int) -> str:
    if code > 128:
        code = 128 - code
    return f"it was ended by signal {-code}" if code < 0 else f"it ended with exit code {code}"
