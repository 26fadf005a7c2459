"""`python3 -m art_sky.node.watchdog`: the foreground process of the node's job, from the installation to the end.

It runs the server and ends with exit code 0 whatever happened, because the end of the job is what makes SkyPilot tear
the machine down; why it ended stands in its last log line and in watchdog.json. What the phases are, how long each may
take and why a node ends are the tables of `rules`. One thread, and nothing in its loop waits longer than a few
seconds: the guard takes a watchdog whose heartbeat is 5 minutes old for dead.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import traceback
from contextlib import suppress
from pathlib import Path
from types import FrameType

from art_sky.node import credentials, guard, install, records, rules
from art_sky.node.autostop import Autostop, skypilot_python
from art_sky.node.clock import Clock
from art_sky.node.logs import NODE_LOG
from art_sky.node.metadata import NOTICE_SECONDS, Metadata
from art_sky.node.output import also_in
from art_sky.node.server_process import ServerProcess, ServerView
from art_sky.node.side_program import SideProgram, kill_group
from art_sky.whole_file import write_whole

TICK_SECONDS = 1.0
HEARTBEAT_SECONDS = 10.0
POLL_SECONDS = 5.0  # of the server and of the metadata service
HUNG_SECONDS = 90.0  # without an answer
RESTART_PAUSE_SECONDS = 5.0
GRACE_SECONDS = 30.0  # of the flush, for the server's own end after its train jobs
RESERVE_BYTES = 16 << 20  # of the disk, given free when this ends: for its last words and the last push of the logs


def main() -> int:
    folder = records.FOLDER.expanduser()
    with also_in(folder / NODE_LOG):
        return _run(Watchdog(folder, Clock(), Autostop(Clock(), skypilot_python())))


def _run(watchdog: Watchdog) -> int:
    def stop(_: int, __: FrameType | None) -> None:
        watchdog.stopped = True

    for sign in (signal.SIGTERM, signal.SIGINT):
        signal.signal(sign, stop)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    watchdog.run()
    return 0


class Watchdog:
    def __init__(
        self,
        folder: Path,
        clock: Clock,
        autostop: Autostop,
        metadata: Metadata | None = None,
        guard_state: Path = Path("/", guard.STATE),
        install_command: list[str] | None = None,
    ) -> None:
        """`install_command` replaces the installation in tests; it must leave python.json behind."""
        self.stopped = False
        self._folder, self._clock, self._autostop, self._metadata = folder, clock, autostop, metadata
        self._guard_state = guard_state
        self._install_command = install_command or [sys.executable, "-m", "art_sky.node.install", str(folder)]
        self._phase, self._phase_began = "installing", 0.0
        self._installer: subprocess.Popen[bytes] | None = None
        self._install_failed = False
        self._server: ServerProcess | None = None
        self._server_starts = 0
        self._started = self._start_after = 0.0
        self._failures: list[float] = []  # of the server, by their time
        self._served = False
        self._answered = self._serving_since = 0.0
        self._view = ServerView(0.0, [])
        self._last_work = 0.0
        self._beat: object = None
        self._beat_seen = 0.0
        self._notice: float | None = None
        self._reason: str | None = None
        self._ending: float | None = None
        self._flush_seconds = 0.0
        self._terminated = False
        self._not_flushed: list[str] = []
        self._logs = SideProgram("art_sky.node.logs")
        self._beside = (SideProgram("art_sky.node.ledger"), self._logs)
        self._told = False
        self._due: dict[str, float] = {}
        self._unwritten: float | None = None  # since when the disk takes no heartbeat
        self._age = self._price = 0.0
        self._aged_at: guard.Moment = clock.now()
        self._extended: object = None

    def run(self) -> None:
        """Until the phase is `ended`."""
        try:
            self._config = records.read(self._folder / "node.json", records.NodeConfig)
            records.check_limits(self._config.limits)
        except (OSError, ValueError) as e:
            self._say(f"{e}; launch again with a valid node.json")
            self._abandon("setup")
            return
        try:
            self._begin()
            while self._phase != "ended":
                phase = self._phase
                self._tick()
                if self._phase == phase:
                    self._clock.sleep(TICK_SECONDS)
        except Exception:
            traceback.print_exc()
            self._abandon("watchdog")
        finally:
            self._autostop.close()

    # --- one look at the world, one step of the phase ---

    def _begin(self) -> None:
        self._limits, self._price = self._config.limits, self._config.price_per_hour
        self._aged_at = self._clock.now()
        self._age = self._first_age()
        if self._metadata is None:
            self._metadata = Metadata(self._config.cloud, self._clock)
        now = self._aged_at.boottime
        self._phase_began = self._beat_seen = now
        self._beat = self._beat_sign()
        self._say(f"{self._config.node} on {self._config.cloud}, ${self._config.price_per_hour:.2f}/h")
        self._make_reserve()
        self._installer = self._spawn(self._install_command)
        self._heartbeat()

    def _tick(self) -> None:
        moment = self._clock.now()
        self._age = guard.aged(self._age, self._aged_at, moment)
        self._aged_at = moment
        now = moment.boottime
        self._read_limits()
        self._renew_credentials()
        self._observe(now)
        if self._reason is None:
            reason = rules.reason_to_end(self._facts(now), self._limits)
            if reason is not None:
                self._begin_end(reason, now)
        steps = {
            "installing": self._installing,
            "waiting for secrets": self._waiting,
            "starting": self._starting,
            "serving": self._serving,
            "flushing": self._flushing,
        }
        steps[self._phase](now)
        if self._phase != "ended" and self._is_due("heartbeat", HEARTBEAT_SECONDS, now):
            self._heartbeat()

    def _observe(self, now: float) -> None:
        beat = self._beat_sign()
        if beat != self._beat:
            self._beat, self._beat_seen = beat, now
        self._autostop.step()
        if self._config.spot and self._notice is None and self._config.cloud in NOTICE_SECONDS:
            assert self._metadata is not None
            if self._is_due("notice", POLL_SECONDS, now):
                self._notice = self._metadata.notice()
        every = POLL_SECONDS if self._phase == "serving" else TICK_SECONDS
        if self._server is not None and self._is_due("server", every, now):
            view = self._server.view()
            if view is not None:
                self._answered, self._view = now, view
                # Progress since the server came up; that it came up is none.
                if self._phase == "serving" and now - view.idle_seconds > self._serving_since:
                    self._last_work = max(self._last_work, now - view.idle_seconds)
        if self._server_starts and self._reason is None:
            for program in self._beside:
                program.tend(now, self._start_beside)

    def _facts(self, now: float) -> rules.Facts:
        recent = [t for t in self._failures if now - t < rules.RESTART_WINDOW_SECONDS]
        return rules.Facts(
            phase=self._phase,
            in_phase=now - self._phase_began,
            age=self._age,
            spent=self._spent,
            idle=self._idle(now),
            silence=now - self._beat_seen,
            pending=len(self._view.pending),
            served=self._served,
            install_failed=self._install_failed,
            failures=len(recent),
            autostop_failures=self._autostop.failures,
            unwritten=0.0 if self._unwritten is None else now - self._unwritten,
            preempted=self._notice is not None,
            asked=(self._folder / "end").exists(),
            stopped=self.stopped,
        )

    # --- phases ---

    def _installing(self, now: float) -> None:
        assert self._installer is not None
        code = self._installer.poll()
        if code == 0:
            self._python = install.read_python(self._folder)
            self._move("waiting for secrets", now)
        elif code is not None:
            self._install_failed = True

    def _waiting(self, now: float) -> None:
        try:
            self._secrets = records.read(self._folder / "secrets.json", records.Secrets)
            credentials.check(self._secrets)
            state = self._folder / "state"
            state.mkdir(mode=0o700, exist_ok=True)
            write_whole(state / "token", self._secrets.token + "\n", 0o600)
            config = {**self._config.server, "store": self._config.store, "state_dir": str(state)}
            write_whole(state / "server-config.json", json.dumps(config))
        except (OSError, ValueError):
            return  # not there yet, as `receive` writes it whole and checks it first; or the disk is full
        self._move("starting", now)

    def _starting(self, now: float) -> None:
        if self._server is None:
            if now >= self._start_after:
                self._start_server(now)
        elif self._server.exit_code is not None:
            self._server_failed(f"it ended with exit code {self._server.exit_code}", now)
        elif self._answered > self._started:
            self._serving_since = now
            if not self._served:
                self._served, self._last_work = True, now
            self._move("serving", now)
        elif self._served and now - self._started >= rules.RESTART_SECONDS:
            self._server_failed(f"it did not come up within {rules.RESTART_SECONDS:.0f} s", now)

    def _serving(self, now: float) -> None:
        assert self._server is not None
        if self._server.exit_code is not None:
            self._server_failed(f"it ended with exit code {self._server.exit_code}", now)
        elif now - self._answered >= HUNG_SECONDS:
            self._server_failed(f"it did not answer for {HUNG_SECONDS:.0f} s", now)

    def _flushing(self, now: float) -> None:
        assert self._ending is not None
        since = now - self._ending
        if self._server is not None and self._server.exit_code is None and since < self._flush_seconds:
            if not self._terminated and since >= self._flush_seconds - self._grace:
                self._terminated = True
                self._server.terminate()
            return
        if self._server is not None:
            left = self._server.unfinished()
            self._not_flushed = self._view.pending if left is None else left
            self._server.kill()
            self._server = None
        if not self._told:
            self._told = True
            self._tell_end()  # before the log is pushed for the last time, so that it says how it went
        if self._beside_over():
            self._move("ended", now)

    # --- the server ---

    def _start_server(self, now: float) -> None:
        state = self._folder / "state"
        command = [self._python.executable, "-m", "art_sky.server", "--config", str(state / "server-config.json")]
        self._server_starts += 1
        self._started = now
        try:
            environment = self._environment()
            if self._python.vllm is not None:
                environment["ART_SKY_VLLM_PYTHON"] = self._python.vllm
            self._server = ServerProcess(command, environment, state, self._secrets.token, self._clock)
        except OSError as e:
            self._server_failed(f"it cannot be started: {e}", now)

    def _server_failed(self, why: str, now: float) -> None:
        self._say(f"the server failed: {why}")
        if self._server is not None:
            self._server.kill()
            self._server = None
        self._failures.append(now)
        self._start_after = now + RESTART_PAUSE_SECONDS
        if self._phase == "serving":
            self._move("starting", now)

    def _renew_credentials(self) -> None:
        """A store credential that the controller sent anew reaches the running server, ledger and logs through its
        file, in the last flush too."""
        if not self._server_starts:
            return
        with suppress(OSError, ValueError):
            secrets = records.read(self._folder / "secrets.json", records.Secrets)
            if secrets.store_env != self._secrets.store_env:
                credentials.check(secrets)
                credentials.environment(secrets, self._folder, {})
                self._secrets = dataclasses.replace(self._secrets, store_env=secrets.store_env)
                self._say("has a fresh credential for the store")

    def _start_beside(self, module: str) -> subprocess.Popen[bytes]:
        command = [self._python.executable, "-m", module, str(self._folder)]
        return self._spawn(command, self._environment(), stdin=subprocess.PIPE)

    def _environment(self) -> dict[str, str]:
        environment = credentials.environment(self._secrets, self._folder, os.environ)
        if self._python.path is not None:
            environment["PYTHONPATH"] = self._python.path
        return environment

    # --- the end ---

    def _begin_end(self, reason: str, now: float) -> None:
        self._reason, self._ending = reason, now
        self._say(f"ends: {records.REASONS[reason]}")
        if self._installer is not None:
            kill_group(self._installer)
        self._flush_seconds = self._limits.flush_minutes * 60
        if reason == "preempted":
            self._flush_seconds = min(self._flush_seconds, NOTICE_SECONDS[self._config.cloud])
        self._grace = min(GRACE_SECONDS, self._flush_seconds / 3)
        self._not_flushed = self._view.pending
        if self._server is not None and not self._server.drain(self._flush_seconds - self._grace):
            self._terminated = True
            self._server.terminate()
            # One that does not answer will not flush either.
            self._flush_seconds = min(self._flush_seconds, self._grace)
        self._reserve.unlink(missing_ok=True)
        self._move("flushing", now)

    def _beside_over(self) -> bool:
        """Whether ledger and logs had their last word, once it is True; both are asked at the same time."""
        now = self._clock.now().boottime
        over = [program.over(now) for program in self._beside]
        if not all(over):
            return False
        if not self._logs.succeeded:
            self._not_flushed = [*self._not_flushed, "the end of its log"]
            self._say("not flushed: the end of its log")
        return True

    def _tell_end(self) -> None:
        assert self._reason is not None
        left = f"; not flushed: {', '.join(self._not_flushed)}" if self._not_flushed else "; all is in the store"
        self._say(f"ended after {self._age / 3600:.2f} h and ${self._spent:.2f}: {records.REASONS[self._reason]}{left}")

    def _abandon(self, reason: str) -> None:
        """It cannot go on: what it started ends with it, and its end is told as any other."""
        if self._installer is not None:
            kill_group(self._installer)
        if self._server is not None:
            self._server.kill()
        self._reserve.unlink(missing_ok=True)
        self._not_flushed = self._view.pending
        self._reason = self._reason or reason
        self._ending = self._ending or self._clock.now().boottime
        self._phase = "flushing"
        self._heartbeat()
        self._say(f"ended: {records.REASONS[self._reason]}")
        while not self._beside_over():
            self._clock.sleep(TICK_SECONDS)
        self._phase = "ended"
        self._heartbeat()

    # --- state ---

    @property
    def _spent(self) -> float:
        return self._age / 3600 * self._price

    def _idle(self, now: float) -> float:
        return now - self._last_work if self._served else 0.0

    def _first_age(self) -> float:
        """What an earlier watchdog or the guard counted; else since the launch, as far as the clock can be believed."""
        now, counted = self._clock.now(), []
        with suppress(OSError, ValueError, TypeError):
            state = records.read(self._folder / "watchdog.json", records.WatchdogState)
            counted.append(guard.aged(state.age_seconds, guard.Moment(state.boot_id, state.boottime), now))
        with suppress(OSError, ValueError, TypeError):
            seen = guard.read_state(self._guard_state)
            counted.append(guard.aged(seen.age, guard.Moment(seen.boot_id, seen.boottime), now))
        return max(counted) if counted else guard.first_age(now, self._clock.unix(), self._config.billed_from_unix)

    def _read_limits(self) -> None:
        """An extension that cannot be understood leaves the limits as they were."""
        file = self._folder / "extend.json"
        try:
            sign = file.stat().st_mtime_ns
        except OSError:
            return
        if sign == self._extended:
            return
        self._extended = sign
        try:
            limits = records.read(file, records.NodeLimits)
            records.check_limits(limits)
        except (OSError, ValueError) as e:
            self._say(f"{e}; the limits stay")
            return
        self._limits = limits
        budget = "" if limits.budget is None else f", ${limits.budget:.2f}"
        self._say(f"limits are now {limits.max_hours:g} h{budget}, idle {limits.idle_minutes:g} min")

    def _beat_sign(self) -> object:
        """Its changes are what counts: the times of files move with the wall clock."""
        try:
            return (self._folder / "beat").stat().st_mtime_ns
        except OSError:
            return None

    def _move(self, phase: str, now: float) -> None:
        if phase not in rules.TRANSITIONS[self._phase]:
            raise AssertionError(f"the watchdog cannot go from {self._phase} to {phase}")
        self._phase, self._phase_began = phase, now
        self._heartbeat()

    def _heartbeat(self) -> None:
        now = self._clock.now()
        state = records.WatchdogState(
            boot_id=now.boot_id,
            boottime=now.boottime,
            pid=os.getpid(),
            phase=self._phase,
            server_url=self._server.url if self._server is not None and self._phase == "serving" else None,
            server_starts=self._server_starts,
            age_seconds=self._age,
            spent=self._spent,
            idle_seconds=self._idle(now.boottime),
            ending=self._reason,
            ending_boottime=self._ending,
            not_flushed=self._not_flushed,
            preemption_unix=self._notice,
            poweroff=not self._autostop.present or self._autostop.failures > 0,
        )
        try:
            records.write(self._folder / "watchdog.json", state)
        except OSError as e:  # a full disk; if it lasts, a rule ends this, or else the guard the machine
            self._unwritten = now.boottime if self._unwritten is None else self._unwritten
            self._say(f"no heartbeat: {e}")
        else:
            self._unwritten = None

    @property
    def _reserve(self) -> Path:
        return self._folder / "reserve"

    def _make_reserve(self) -> None:
        try:
            with self._reserve.open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, RESERVE_BYTES)
        except OSError as e:
            self._say(f"no room for its last words could be put aside: {e}")

    def _is_due(self, what: str, every: float, now: float) -> bool:
        if now < self._due.get(what, 0.0):
            return False
        self._due[what] = now + every
        return True

    def _spawn(
        self, command: list[str], environment: dict[str, str] | None = None, stdin: int = subprocess.DEVNULL
    ) -> subprocess.Popen[bytes]:
        return subprocess.Popen(command, env=environment, stdin=stdin, start_new_session=True)

    def _say(self, text: str) -> None:
        print(f"art-sky: {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
