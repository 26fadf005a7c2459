"""SkyPilot's autodown as its node agent has it. It is dropped silently when the boot time changes: after a reboot, and
when the wall clock is stepped. It is read back, and armed again where it is lost, by SkyPilot's own Python."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from contextlib import suppress
from pathlib import Path

from art_sky.node.clock import Clock

EVERY_SECONDS = 60.0
_DEADLINE_SECONDS = 50.0
_LONGEST_MINUTES = 5

# sky.skylet.autostop_lib of SkyPilot 0.14.1: StopEvent acts only while boot_time is the machine's own.
_SCRIPT = f"""
import json, psutil
from sky.skylet import autostop_lib
JOBS = autostop_lib.AutostopWaitFor.JOBS
def armed():
    c = autostop_lib.get_autostop_config()
    return (0 <= c.autostop_idle_minutes <= {_LONGEST_MINUTES} and c.down and c.wait_for == JOBS
            and c.boot_time == psutil.boot_time())
before = armed()
if not before:
    autostop_lib.set_autostop(1, 'cloudvmray', JOBS, True)
print(json.dumps({{'before': before, 'after': armed()}}))
"""


class Autostop:
    """One check a minute, each a child process that is never waited for."""

    def __init__(self, clock: Clock, python: Path | None) -> None:
        self.failures = 0  # in a row
        self._clock, self._python = clock, python
        self._child: subprocess.Popen[str] | None = None
        self._began = clock.now().boottime - EVERY_SECONDS

    @property
    def present(self) -> bool:
        """Whether SkyPilot runs this machine at all."""
        return self._python is not None

    def step(self) -> None:
        if self._python is None:
            return
        now = self._clock.now().boottime
        if self._child is None:
            if now - self._began >= EVERY_SECONDS:
                self._began = now
                self._start(self._python)
            return
        code = self._child.poll()
        if code is None and now - self._began < _DEADLINE_SECONDS:
            return
        if code is None:
            with suppress(ProcessLookupError):
                os.killpg(self._child.pid, signal.SIGKILL)
        output, _ = self._child.communicate()
        self._child = None
        self._judge(code, output)

    def close(self) -> None:
        if self._child is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._child.pid, signal.SIGKILL)
            self._child.communicate()
            self._child = None

    def _start(self, python: Path) -> None:
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        try:
            self._child = subprocess.Popen(
                ["nice", str(python), "-c", _SCRIPT],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                cwd=Path.home(),
                env=environment,
                start_new_session=True,
            )
        except OSError as e:
            self._failed(str(e))

    def _judge(self, code: int | None, output: str) -> None:
        try:
            answer = json.loads(output.strip().rpartition("\n")[2])
            before, after = answer["before"], answer["after"]
        except (ValueError, LookupError, TypeError):
            self._failed(f"exit code {code}: {output.strip()[-300:]}" if code is not None else "no answer in time")
            return
        if not after:
            self._failed("it does not keep the setting")
            return
        self.failures = 0
        if not before:
            print("art-sky: SkyPilot had lost its autodown setting; it is armed again", flush=True)

    def _failed(self, why: str) -> None:
        self.failures += 1
        print(f"art-sky: SkyPilot's autodown cannot be armed ({self.failures}): {why}", flush=True)


def skypilot_python() -> Path | None:
    """Where SkyPilot keeps its own Python on a machine that it runs (SKY_PYTHON_CMD of its skylet/constants.py)."""
    runtime = Path(os.environ.get("SKY_RUNTIME_DIR") or Path.home())
    with suppress(OSError):
        named = Path((runtime / ".sky" / "python_path").read_text().strip())
        if named.is_file():
            return named
    usual = runtime / "skypilot-runtime" / "bin" / "python"
    return usual if usual.is_file() else None
