"""The server's side of a child process: start, talk, notice its death at once, start it again.

A call that was waiting when the child died fails with ChildDied (retryable); a call made while the child
starts waits for it, with a deadline. See `art_sky.worker` for the frames.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import struct
import sys
import time
from collections.abc import AsyncGenerator, Mapping
from pathlib import Path
from typing import Any, Literal

from art_sky.errors import Busy, ChildDied, from_wire
from art_sky.tasks import end_task
from art_sky.worker import Message, pack

State = Literal["stopped", "starting", "ready", "dead"]
_LENGTH = struct.Struct(">I")
_END = object()


class Child:
    """Supervises `python -m <module> --fd N <args>`.

    `start_seconds` is how long it may take to say that it is ready; `silent_seconds` how long it may leave a
    ping unanswered before it is killed and started again.
    """

    def __init__(
        self,
        name: str,
        module: str,
        args: list[str],
        log_file: Path,
        *,
        env: Mapping[str, str] | None = None,
        start_seconds: float = 180.0,
        silent_seconds: float = 30.0,
    ) -> None:
        self.name = name
        self.state: State = "stopped"
        self.info: Message = {}
        self.restarts = 0
        self.pid: int | None = None
        self.beat = 0
        self._module, self._args, self._log_file = module, args, log_file
        self._env = dict(env or {})
        self._start_seconds, self._silent_seconds = start_seconds, silent_seconds
        self._next_id = 0
        self._waiting: dict[int, asyncio.Queue[Any]] = {}
        self._ready = asyncio.Event()
        self._runner: asyncio.Task[None] | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._heard = 0.0
        self._last_exit = ""

    def start(self) -> None:
        """Begins to start the child and keeps it running until `stop`."""
        if self._runner is None:
            self._runner = asyncio.create_task(self._keep_running(), name=f"supervise {self.name}")

    async def stop(self) -> None:
        await end_task(self._runner)
        self._runner = None
        self.state = "stopped"

    async def call(
        self, method: str, params: Message, *, wait_ready: float | None = None
    ) -> AsyncGenerator[Message, None]:
        """Yields `{"event": ...}` messages, then `{"result": ...}`; raises the child's typed error or ChildDied.

        Closing the iterator cancels the call in the child.
        """
        await self.wait_ready(wait_ready)
        self._next_id += 1
        id = self._next_id
        inbox: asyncio.Queue[Any] = asyncio.Queue()
        self._waiting[id] = inbox
        done = False
        try:
            self._send({"id": id, "method": method, "params": params})
            while True:
                message = await inbox.get()
                if message is _END:
                    done = True
                    raise ChildDied(
                        f"the {self.name} ended while it worked on this ({self._last_exit}); it is being started "
                        f"again, call again; its log is {self._log_file}"
                    )
                if "error" in message:
                    done = True
                    raise from_wire(message)
                if "result" in message:
                    done = True
                    yield message
                    return
                yield message
        finally:
            self._waiting.pop(id, None)
            if not done:
                self._send({"id": id, "cancel": True})

    async def result(self, method: str, params: Message, *, wait_ready: float | None = None) -> Message:
        """The result of a call whose events are of no interest."""
        async for message in self.call(method, params, wait_ready=wait_ready):
            if "result" in message:
                return dict(message["result"])
        raise AssertionError("a call ends with a result or an error")

    async def wait_ready(self, seconds: float | None = None) -> None:
        """Raises Busy when the child is not ready within `seconds` (default: its own start deadline)."""
        self.start()
        if self._ready.is_set():
            return
        seconds = self._start_seconds if seconds is None else seconds
        try:
            await asyncio.wait_for(self._ready.wait(), seconds)
        except TimeoutError:
            last = f"; it last ended with {self._last_exit}" if self._last_exit else ""
            raise Busy(
                f"the {self.name} was not ready within {seconds:.0f} s{last}; see {self._log_file}, then call again"
            ) from None

    def kill(self) -> None:
        """SIGKILL; the supervisor notices and starts the child again."""
        if self.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, 9)

    def _send(self, message: Message) -> None:
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(pack(message))

    async def _keep_running(self) -> None:
        quick_deaths = 0
        while True:
            began = time.monotonic()
            await self._run_once()
            self.restarts += 1
            quick_deaths = quick_deaths + 1 if time.monotonic() - began < 60 else 0
            await asyncio.sleep(min(30.0, 0.25 * 2**quick_deaths) if quick_deaths > 1 else 0.0)

    async def _run_once(self) -> None:
        ours, theirs = socket.socketpair()
        self.state, self.info = "starting", {}
        log = None
        process: asyncio.subprocess.Process | None = None
        try:
            self._log_file.parent.mkdir(parents=True, exist_ok=True)
            log = self._log_file.open("ab")
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                self._module,
                "--fd",
                str(theirs.fileno()),
                *self._args,
                pass_fds=[theirs.fileno()],
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **self._env},
            )
            self.pid = process.pid
            theirs.close()
            reader, self._writer = await asyncio.open_unix_connection(sock=ours)
            self._heard = time.monotonic()
            async with asyncio.TaskGroup() as group:
                watch = group.create_task(self._watch_silence(process))
                try:
                    await self._read(reader)
                finally:
                    watch.cancel()
        except OSError as e:
            self._last_exit = f"could not start: {e}"
        finally:
            self._ready.clear()
            self.state = "dead"
            theirs.close()
            if self._writer is not None:
                self._writer.close()
                self._writer = None
            else:
                ours.close()
            if process is not None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                code = await asyncio.shield(process.wait())
                self._last_exit = f"signal {-code}" if code < 0 else f"exit code {code}"
            self.pid = None
            if log is not None:
                log.close()
            for inbox in self._waiting.values():
                inbox.put_nowait(_END)

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
                frame = json.loads(await reader.readexactly(length))
                self._heard = time.monotonic()
                for message in frame if isinstance(frame, list) else [frame]:
                    if "ready" in message:
                        self.info, self.state = message["ready"], "ready"
                        self._ready.set()
                    elif "pong" in message:
                        self.beat = message["beat"]
                    elif (inbox := self._waiting.get(message["id"])) is not None:
                        inbox.put_nowait(message)
        except (asyncio.IncompleteReadError, ConnectionError):
            return  # the child is gone; the caller reaps it

    async def _watch_silence(self, process: asyncio.subprocess.Process) -> None:
        n = 0
        while True:
            await asyncio.sleep(self._silent_seconds / 3)
            n += 1
            self._send({"ping": n})
            limit = self._silent_seconds if self._ready.is_set() else self._start_seconds
            if time.monotonic() - self._heard > limit:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                return
