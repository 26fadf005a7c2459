"""One node on this machine: the real watchdog with real children, on a clock that runs fast."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from art_sky.node import records
from art_sky.node.autostop import Autostop
from art_sky.node.clock import Clock
from art_sky.node.guard import Moment
from art_sky.node.metadata import Metadata
from art_sky.node.watchdog import Watchdog
from art_sky.whole_file import write_whole

SECRETS = records.Secrets(token="the-token")


class FastClock(Clock):
    """`factor` seconds pass in one; sockets get at least a second of real time."""

    def __init__(self, factor: float) -> None:
        self.factor, self._began, self.boot_id = factor, time.monotonic(), "boot"
        self.skew = 0.0  # of the wall clock
        self.skipped = 0.0

    def now(self) -> Moment:
        return Moment(self.boot_id, 100.0 + self.skipped + (time.monotonic() - self._began) * self.factor)

    def unix(self) -> float:
        return 1e9 + self.now().boottime + self.skew

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds / self.factor)

    def timeout(self, seconds: float) -> float:
        return max(seconds / self.factor, 1.0)


class Node:
    def __init__(self, folder: Path, factor: float = 100.0, **changes: Any) -> None:
        self.folder, self.clock = folder, FastClock(factor)
        limits = {"idle_minutes": 1000, "max_hours": 100, "orphan_minutes": 1000, "flush_minutes": 2}
        limits |= {"setup_minutes": 20, **changes.pop("limits", {})}
        self.config = records.NodeConfig(
            cluster="artsky-00c0ffee", node="artsky-00c0ffee-1", cloud="aws", price_per_hour=2.0, spot=False,
            store=f"file://{folder / 'store'}", limits=records.NodeLimits(**limits), wheel="w.whl", version="0.1.0",
            packages=[], server={"engine": {"factor": factor}}, billed_from_unix=self.clock.unix(),
        )  # fmt: skip
        self.config = dataclasses.replace(self.config, **changes)
        self.state = folder / "state"
        self.state.mkdir(parents=True)
        self.autostop = Autostop(self.clock, None)
        self.metadata: Metadata | None = None
        self.guard_state = folder / "guard.json"
        self.install = "true"  # a line for the shell
        self.watchdog: Watchdog
        self._thread: threading.Thread | None = None
        python = folder / "python"
        python.write_text(f'#!/bin/sh\nexec {sys.executable} {Path(__file__).parent / "fake_node_server.py"} "$@"\n')
        python.chmod(0o755)
        records.write(folder / "node.json", self.config)
        write_whole(folder / "python.json", json.dumps({"executable": str(python), "path": None, "vllm": None}))

    def send_secrets(self, secrets: records.Secrets = SECRETS) -> Node:
        records.write(self.folder / "secrets.json", secrets, 0o600)
        return self

    def control(self, **values: Any) -> Node:
        write_whole(self.state / "control.json", json.dumps(values))
        return self

    def start(self) -> Node:
        self.watchdog = Watchdog(
            self.folder, self.clock, self.autostop, self.metadata, self.guard_state, ["sh", "-c", self.install]
        )
        self._thread = threading.Thread(target=self.watchdog.run, daemon=True)
        self._thread.start()
        return self

    def seen(self) -> records.WatchdogState:
        return records.read(self.folder / "watchdog.json", records.WatchdogState)

    def until(self, condition: Callable[[records.WatchdogState], Any], seconds: float = 30.0) -> records.WatchdogState:
        deadline = time.monotonic() + seconds
        while True:
            try:
                state = self.seen()
                if condition(state):
                    return state
            except (OSError, ValueError):
                state = None  # type: ignore[assignment]
            assert time.monotonic() < deadline, f"it stays at {state}"
            time.sleep(0.005)

    def serving(self) -> int:
        """Waits until it serves; the server's process id."""
        self.until(lambda s: s.phase == "serving")
        pid: int = json.loads((self.state / "server.json").read_text())["pid"]
        return pid

    def ended(self) -> records.WatchdogState:
        """Waits for the end; nothing may be left running."""
        assert self._thread is not None
        self._thread.join(30.0)
        assert not self._thread.is_alive(), f"it stays at {self.seen()}"
        state = self.seen()
        assert state.phase == "ended"
        return state

    def close(self) -> None:
        if self._thread is not None and self._thread.is_alive():
            self.control(finishes=True, jobs=[])
            self.watchdog.stopped = True
            self._thread.join(30.0)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
