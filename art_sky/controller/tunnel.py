"""The way to a node: one ssh, a child of the controller, opened again whenever it breaks.

It has a session channel (plain `ssh -N -L` was measured to add 44 ms to every request, see benchmarks/tunnel.py),
and that runs `beat` on the node: a line every 15 s tells the node that its controller lives, and the answer is the
watchdog's state. The channel's stdin is a pipe, so that ssh ends with the controller, however that ends.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

from art_sky.controller.link import LinkStatus
from art_sky.controller.provider import Machine
from art_sky.controller.ssh import changed_key, is_changed_key, last_line, no_ssh, ssh_command
from art_sky.node.records import WatchdogState, parse
from art_sky.node.task import node_command
from art_sky.tasks import end_task

log = logging.getLogger("art_sky.controller")

BEAT_SECONDS = 15.0
QUICK_SECONDS = 1.0  # while something is awaited: the server's start, a flush
SILENT_SECONDS = 60.0  # an ssh whose beats are not answered is ended
FIRST_WAIT, LONGEST_WAIT = 0.5, 15.0  # between attempts, doubled
LASTED_SECONDS = 30.0  # a connection that held so long makes the next attempt come soon


class Tunnel:
    """Lives in one event loop; `status`, `watchdog` and `socket` may be read from any thread.

    `socket` is the private Unix socket behind which the node's server is, while the status is `open` and the
    watchdog knows the server's address.
    """

    def __init__(
        self,
        machine: Machine,
        socket: Path,
        hosts: Path,
        *,
        command: Callable[..., list[str]] = ssh_command,
        beat: str | None = None,
        beat_seconds: float = BEAT_SECONDS,
    ) -> None:
        """`command` and `beat` are what tests replace."""
        self.machine, self.socket = machine, socket
        self.status = LinkStatus("connecting")
        self.quick = False
        self._hosts, self._command, self._beat_seconds = hosts, command, beat_seconds
        self._beat = beat if beat is not None else node_command("beat")
        self._watchdog: WatchdogState | None = None
        self._heard = float("-inf")  # time.monotonic of the last answer
        self._port: int | None = None  # of the server on the node, which is forwarded
        self._task = asyncio.get_running_loop().create_task(self._run(), name=f"tunnel to {machine.node}")

    @property
    def watchdog(self) -> WatchdogState | None:
        """As the node said within the last minute; None when it did not."""
        return self._watchdog if time.monotonic() - self._heard < SILENT_SECONDS else None

    async def close(self) -> None:
        await end_task(self._task)
        self.status = LinkStatus("closed")
        self.socket.unlink(missing_ok=True)

    async def _run(self) -> None:
        wait = FIRST_WAIT
        while True:
            began = time.monotonic()
            again_at_once = await self._connection()
            if again_at_once:
                continue
            wait = FIRST_WAIT if time.monotonic() - began > LASTED_SECONDS else min(wait * 2, LONGEST_WAIT)
            log.info("tunnel to %s: %s; again in %.1f s", self.machine.node, self.status.problem, wait)
            await asyncio.sleep(wait)

    async def _connection(self) -> bool:
        """One ssh from its start to its end; True when another is wanted at once, to another port."""
        options = ["-T"]
        if self._port is not None:
            options += ["-L", f"{self.socket}:127.0.0.1:{self._port}"]
        try:
            process = await asyncio.create_subprocess_exec(
                *self._command(self.machine, self._hosts, *options),
                self._beat,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                start_new_session=True,  # Ctrl-C is not meant for it
            )
        except OSError as e:
            self.status = LinkStatus("connecting", no_ssh(e).message)
            return False
        assert process.stderr is not None
        errors = asyncio.create_task(process.stderr.read())
        talk = asyncio.create_task(self._talk(process))
        try:
            await asyncio.wait({talk, asyncio.create_task(process.wait())}, return_when=asyncio.FIRST_COMPLETED)
            moved = talk.done() and not talk.cancelled() and talk.exception() is None and talk.result()
        finally:
            talk.cancel()
            await asyncio.gather(talk, return_exceptions=True)
            if process.returncode is None:
                process.kill()
            stderr = (await errors).decode(errors="replace")
            await process.wait()
        if moved:
            return True
        if is_changed_key(stderr):
            self.status = LinkStatus("refused", changed_key(self.machine, self._hosts))
        else:
            self.status = LinkStatus("connecting", f"the tunnel is down: {last_line(stderr)}")
        return False

    async def _talk(self, process: asyncio.subprocess.Process) -> bool:
        """Beats and hears; True when the server listens elsewhere than what is forwarded, False at the end."""
        assert process.stdin is not None and process.stdout is not None
        hear = asyncio.create_task(self._hear(process.stdout))
        began, beat = time.monotonic(), float("-inf")
        try:
            while not hear.done():
                if self.quick or self._port is None or time.monotonic() - beat >= self._beat_seconds:
                    process.stdin.write(b"\n")
                    beat = time.monotonic()
                await asyncio.wait({hear}, timeout=min(QUICK_SECONDS, self._beat_seconds))
                if time.monotonic() - max(self._heard, began) > SILENT_SECONDS:
                    log.warning("tunnel to %s: no answer for %.0f s", self.machine.node, SILENT_SECONDS)
                    return False
            return hear.result()
        finally:
            hear.cancel()
            await asyncio.gather(hear, return_exceptions=True)

    async def _hear(self, stdout: asyncio.StreamReader) -> bool:
        while line := await stdout.readline():
            self._heard = time.monotonic()
            if line.strip() != b"{}":
                self._take(line)
            port = self._announced()
            if port is not None and port != self._port:
                self._port = port
                return True
            self.status = LinkStatus("open")
        return False

    def _take(self, line: bytes) -> None:
        try:
            self._watchdog = parse(line.decode(), WatchdogState, "the watchdog's state")
        except ValueError as e:
            log.warning("tunnel to %s: %s", self.machine.node, e)

    def _announced(self) -> int | None:
        if self._watchdog is None or self._watchdog.server_url is None:
            return None
        return urlsplit(self._watchdog.server_url).port
