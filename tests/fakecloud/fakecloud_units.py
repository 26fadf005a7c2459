"""The service manager of a simulated host: the part of systemd that a machine needs to look after itself.

Units live in /etc/systemd/system and are managed through `systemctl` (fakecloud_systemctl.py), which talks to this
process over a Unix socket. Supported are services of type simple, exec and oneshot with Restart=, monotonic timers,
and enabling over a reboot; an option whose effect is missing here refuses the unit. Standard library only.
"""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import re
import select
import shlex
import signal
import socket
import struct
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

POWEROFF, REBOOT = 10, 11  # exit codes of process 1, which the cloud acts on
UNITS = Path("/etc/systemd/system")
TRANSIENT = Path("/run/systemd/transient")  # of systemd-run; gone after a boot
SOCKET = "/run/init.sock"
LOGS = Path("/var/log/units")  # what a unit printed
# What systemd gives a service that sets nothing.
DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
MARK = "FAKECLOUD_UNIT"  # in the environment of a unit's processes; stands in for its control group
SUPPORTED = {
    "Unit": "Description Documentation After Before Wants Requires DefaultDependencies StartLimitIntervalSec",
    "Service": "Type ExecStart ExecStartPre Restart RestartSec User Group WorkingDirectory Environment EnvironmentFile "
    "TimeoutStartSec TimeoutStopSec KillMode RemainAfterExit StandardOutput StandardError SyslogIdentifier "
    "OOMScoreAdjust Nice",
    "Timer": "OnBootSec OnStartupSec OnActiveSec OnUnitActiveSec OnUnitInactiveSec Unit AccuracySec",
    "Install": "WantedBy",
}
UNIT_SECONDS = {"": 1, "ms": 0.001, "s": 1, "sec": 1, "m": 60, "min": 60, "h": 3600, "hr": 3600, "d": 86400}


class UnitError(Exception):
    """What systemctl prints, and its exit code."""

    def __init__(self, message: str, code: int = 1) -> None:
        super().__init__(message)
        self.code = code


class UnitFile:
    """A unit as written; refused when it holds an option whose effect is missing here. Repeated keys are all kept.

    `ssh.service` is part of every host and has no file.
    """

    def __init__(self, name: str) -> None:
        self.values: dict[tuple[str, str], list[str]] = {}
        if name == "ssh.service" and not (UNITS / name).exists():
            text = "[Service]\nExecStart=/usr/sbin/sshd -D -e\nRestart=always\n"
        else:
            try:
                folder = TRANSIENT if (TRANSIENT / name).exists() else UNITS
                text = (folder / name).read_text()
            except OSError as e:
                raise UnitError(f"Unit {name} not found.", 5) from e
        section = ""
        for line in text.replace("\\\n", " ").splitlines():
            line = line.strip()
            if line.startswith("["):
                section = line.strip("[]")
            elif line and line[0] not in "#;":
                key, _, value = line.partition("=")
                if key.strip() not in SUPPORTED.get(section, "").split():
                    raise UnitError(f"{name}: {key.strip()}= in [{section}] is not supported by the simulated host")
                self.values.setdefault((section, key.strip()), []).append(value.strip())

    def all(self, section: str, key: str) -> list[str]:
        return self.values.get((section, key), [])

    def last(self, section: str, key: str, default: str = "") -> str:
        return self.values.get((section, key), [default])[-1]

    def yes(self, section: str, key: str) -> bool:
        return self.last(section, key).lower() in ("yes", "true", "on", "1")

    def span(self, section: str, key: str, default: str = "") -> float | None:
        """A time span in seconds (`90`, `5min`, `1h 30s`, `infinity`); None when the key is not there."""
        text = self.last(section, key, default)
        if not text:
            return None
        if text == "infinity":
            return float("inf")
        parts = re.findall(r"(\d+(?:\.\d+)?)\s*([a-z]*)", text)
        if not parts or any(unit not in UNIT_SECONDS for _, unit in parts):
            raise UnitError(f"{key}={text} is no time span that the simulated host reads")
        return sum(float(number) * UNIT_SECONDS[unit] for number, unit in parts)


@dataclass
class Service:
    """state: inactive, activating (ExecStartPre, a oneshot at work, or waiting for a restart), active, failed."""

    name: str
    state: str = "inactive"
    pid: int = 0
    commands: list[str] = field(default_factory=list)  # left to run
    may_fail: bool = False  # the running command was written with "-"
    activated: float | None = None  # times are monotonic seconds
    deactivated: float | None = None
    stopping: bool = False
    kill_at: float | None = None
    restart_at: float | None = None


@dataclass
class Timer:
    file: UnitFile
    unit: str
    started: float
    fired: float | None = None


class Init:
    """The loop of process 1: reaps children, restarts services, fires timers, answers systemctl."""

    def __init__(self, environment: dict[str, str]) -> None:
        self.environment = environment
        self.services: dict[str, Service] = {}
        self.timers: dict[str, Timer] = {}
        self.shutdown: tuple[float, int] | None = None

    def run(self) -> None:
        wake, alarm = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(alarm)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(SOCKET)
        Path(SOCKET).chmod(0o666)
        listener.listen(32)
        self.start("ssh.service")
        for link in sorted(UNITS.glob("*.target.wants/*")):
            self._try_start(link.name)
        while True:
            wait = min(self._deadlines(), default=float("inf")) - time.monotonic()
            ready, _, _ = select.select([wake, listener], [], [], max(0.0, min(wait, 60.0)))
            if wake in ready:
                os.read(wake, 4096)
            self._reap()
            if listener in ready:
                self._answer(listener)
            self._act()

    # What systemctl asks for. Each raises UnitError with what systemd would print.

    def start(self, name: str) -> None:
        unit = UnitFile(name)
        if name.endswith(".timer"):
            target = unit.last("Timer", "Unit", name.removesuffix(".timer") + ".service")
            timer = Timer(unit, target, time.monotonic())
            self._due(timer)  # refuses a span that cannot be read
            self.timers.setdefault(name, timer)
            return
        service = self.services.setdefault(name, Service(name))
        if service.pid:
            return
        service.commands = unit.all("Service", "ExecStartPre") + unit.all("Service", "ExecStart")
        if not unit.all("Service", "ExecStart"):
            raise UnitError(f"{name}: Service has no ExecStart= setting. Refusing.")
        service.restart_at, service.stopping, service.activated = None, False, time.monotonic()
        self._next_command(service, unit)

    def stop(self, name: str) -> None:
        if name.endswith(".timer"):
            UnitFile(name)
            self.timers.pop(name, None)
        elif name not in self.services:
            UnitFile(name)  # an unknown unit is an error
        else:
            service = self.services[name]
            service.restart_at = None
            if service.pid:
                service.stopping = True
                self._signal(service, signal.SIGTERM)
                service.kill_at = time.monotonic() + (UnitFile(name).span("Service", "TimeoutStopSec", "90s") or 0)
            elif service.state != "failed":
                service.state = "inactive"

    def exit(self, code: int, *, force: bool = False) -> None:
        """Ends the host: TERM to every process, KILL to what is left after 2 s (systemd waits 90)."""
        print(f"init: {'power off' if code == POWEROFF else 'reboot'}", flush=True)
        if not force:
            self.services.clear()
            with contextlib.suppress(ProcessLookupError):
                os.kill(-1, signal.SIGTERM)
            end = time.monotonic() + 2
            while time.monotonic() < end and len(list(Path("/proc").glob("[0-9]*"))) > 1:
                with contextlib.suppress(ChildProcessError):
                    while os.waitpid(-1, os.WNOHANG)[0]:
                        pass
                time.sleep(0.05)
        os._exit(code)

    # The loop's parts.

    def _deadlines(self) -> list[float]:
        services = list(self.services.values())
        times = [s.restart_at for s in services] + [s.kill_at for s in services]
        times += [self._due(timer) for timer in self.timers.values()]
        times.append(self.shutdown[0] if self.shutdown else None)
        return [t for t in times if t is not None]

    def _act(self) -> None:
        now = time.monotonic()
        if self.shutdown and now >= self.shutdown[0]:
            self.exit(self.shutdown[1])
        for service in list(self.services.values()):
            if service.kill_at is not None and now >= service.kill_at:
                service.kill_at = None
                self._signal(service, signal.SIGKILL)
            if service.restart_at is not None and now >= service.restart_at:
                service.restart_at = None
                self._try_start(service.name)
        for timer in list(self.timers.values()):
            due = self._due(timer)
            if due is not None and now >= due:
                timer.fired = now
                self._try_start(timer.unit)

    def _try_start(self, name: str) -> None:
        try:
            self.start(name)
        except UnitError as e:
            print(f"init: {e}", flush=True)

    def _due(self, timer: Timer) -> float | None:
        """When the timer fires next. A moment that has passed counts once, as with systemd's monotonic timers."""
        service = self.services.get(timer.unit)
        bases = {
            "OnBootSec": 0.0,  # the host's clock began with its boot
            "OnStartupSec": 0.0,
            "OnActiveSec": timer.started,
            "OnUnitActiveSec": service.activated if service else None,
            "OnUnitInactiveSec": service.deactivated if service else None,
        }
        due = []
        for key, base in bases.items():
            span = timer.file.span("Timer", key)
            if span is not None and base is not None and (timer.fired is None or base + span > timer.fired):
                due.append(base + span)
        # A unit that still runs is not started again; its next moment is found when it has ended.
        return None if service and service.pid else min(due, default=None)

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                for service in list(self.services.values()):
                    if service.pid == pid:
                        self._ended(service, os.waitstatus_to_exitcode(status))

    def _ended(self, service: Service, code: int) -> None:
        service.pid, service.kill_at = 0, None
        try:
            unit = UnitFile(service.name)
        except UnitError as e:
            print(f"init: {service.name} ended with {code}: {e}", flush=True)
            service.state = "failed" if code else "inactive"
            return
        if (code == 0 or service.may_fail) and service.commands and not service.stopping:
            self._next_command(service, unit)
            return
        service.deactivated = time.monotonic()
        if unit.last("Service", "KillMode") not in ("process", "none"):
            self._signal(service, signal.SIGKILL)  # what the main process left behind
        failed = code != 0 and not service.may_fail
        restart = unit.last("Service", "Restart", "no")
        if service.stopping:
            service.state, service.stopping = "inactive", False
        elif restart == "always" or (restart == "on-failure" and failed):
            service.state = "activating"
            service.restart_at = time.monotonic() + (unit.span("Service", "RestartSec", "100ms") or 0)
        elif failed:
            service.state = "failed"
        else:
            service.state = "active" if unit.yes("Service", "RemainAfterExit") else "inactive"
        print(f"init: {service.name} ended with {code}, now {service.state}", flush=True)

    def _next_command(self, service: Service, unit: UnitFile) -> None:
        line = service.commands.pop(0)
        service.may_fail = line.startswith("-")
        argv = shlex.split(line.lstrip("-+!:@"))
        user = pwd.getpwnam(unit.last("Service", "User", "root"))
        env = {"PATH": DEFAULT_PATH, "USER": user.pw_name, "HOME": user.pw_dir, **self.environment, MARK: service.name}
        for assignment in (a for line in unit.all("Service", "Environment") for a in shlex.split(line)):
            key, _, value = assignment.partition("=")
            env[key] = value
        try:
            for path in unit.all("Service", "EnvironmentFile"):
                env |= _environment_file(path)
            LOGS.mkdir(parents=True, exist_ok=True)
            with (LOGS / service.name).open("ab") as log:
                service.pid = subprocess.Popen(
                    [re.sub(r"\$\{(\w+)\}", lambda m: env.get(m[1], ""), word) for word in argv],
                    env=env,
                    cwd=unit.last("Service", "WorkingDirectory", "/").lstrip("-"),
                    user=user.pw_uid,
                    group=user.pw_gid,
                    extra_groups=os.getgrouplist(user.pw_name, user.pw_gid),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                ).pid
        except OSError as e:
            print(f"init: {service.name}: {e}", flush=True)
            self._ended(service, 203)  # systemd's EXIT_EXEC
            return
        last = not service.commands
        service.state = "active" if last and unit.last("Service", "Type", "simple") != "oneshot" else "activating"

    def _signal(self, service: Service, number: int) -> None:
        """To all processes of the unit: its main one, and those with its mark in their environment."""
        mark = f"{MARK}={service.name}".encode()
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                pid = int(folder.name)
                # sshd writes its title over its environment.
                if pid != 1 and (pid == service.pid or mark in (folder / "environ").read_bytes().split(b"\0")):
                    os.kill(pid, number)

    def _answer(self, listener: socket.socket) -> None:
        """One request: a JSON list of words, then the answer {"code", "text"}. Only root may change anything."""
        connection, _ = listener.accept()
        with (
            connection,
            contextlib.suppress(OSError, ValueError, TypeError),
        ):  # a caller that talks nonsense gets no answer
            connection.settimeout(5)
            _, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
            words = json.loads(connection.makefile().readline())
            try:
                if words[0] not in ("state", "pid", "timers") and uid != 0:
                    raise UnitError("Interactive authentication required.")
                answer: dict[str, Any] = {"code": 0, "text": self._command(*words)}
            except UnitError as e:
                answer = {"code": e.code, "text": str(e)}
            connection.sendall(json.dumps(answer).encode())

    def _command(self, verb: str, name: str = "", value: str = "") -> str:
        if verb == "start":
            self.start(name)
        elif verb == "stop":
            self.stop(name)
        elif verb == "kill":
            self._signal(self.services.get(name, Service(name)), int(value))
        elif verb == "state":
            if name.endswith(".timer"):
                return "active" if name in self.timers else "inactive"
            return self.services[name].state if name in self.services else "inactive"
        elif verb == "pid":
            return str(self.services[name].pid if name in self.services else 0)
        elif verb == "timers":
            return "\n".join(f"{name} {timer.unit}" for name, timer in self.timers.items())
        elif verb in ("poweroff", "reboot"):
            code = POWEROFF if verb == "poweroff" else REBOOT
            # A moment later, so that the caller gets its answer first.
            self.shutdown = (time.monotonic() + float(name or 0.1), code)
            if value == "force":
                self.exit(code, force=True)
        elif verb == "cancel":
            self.shutdown = None
        return ""


def _environment_file(path: str) -> dict[str, str]:
    if path.startswith("-") and not Path(path[1:]).exists():
        return {}
    lines = (line.strip() for line in Path(path.lstrip("-")).read_text().splitlines())
    pairs = (line.partition("=") for line in lines if line and line[0] not in "#;")
    return {key: value.strip("\"'") for key, _, value in pairs}
