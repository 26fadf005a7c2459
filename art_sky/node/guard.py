"""The guard: a root-owned timer that ends the machine when nothing above it does.

One file of the standard library, so that it runs as a copy outside the home folder whatever happens to the package.
`arm FOLDER` installs it as a systemd timer that ticks once a minute, also after a reboot; `tick` is what the timer
runs. Each tick decides from a state file and CLOCK_BOOTTIME alone: no step of the wall clock moves it, missed ticks
count when the next one comes, and a reboot adds to what was counted before.

What cannot be read counts against the machine: without its own state the guard ends it at once, without the
watchdog's file it takes the watchdog for dead, without node.json the limits read last go on.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

TICK_SECONDS = 60.0
SILENT_SECONDS = 300.0  # a watchdog whose heartbeat is older is dead
NO_WATCHDOG_SECONDS = 600.0  # from arming, or from a boot, until the first heartbeat
TEARDOWN_SECONDS = 600.0  # for SkyPilot's own teardown after the watchdog has ended
PROVISION_SECONDS = 1800.0  # the longest between the launch and the first boot
AGE_MARGIN_SECONDS = 780.0  # over max_hours and the flush: the watchdog's own end, and SkyPilot's, come first

LIBRARY = "usr/local/lib/art-sky/guard.py"
STATE = "var/lib/art-sky/guard.json"
UNITS = "etc/systemd/system"
# For cloud-init, as root at the first boot: on a machine where by then nobody has armed the guard, nothing else would.
FIRST_BOOT_MINUTES = 30
FIRST_BOOT = (
    f"systemd-run --unit=art-sky-first-boot --on-active={FIRST_BOOT_MINUTES}min "
    f"sh -c 'test -e /{STATE} || systemctl poweroff'"
)
LAMBDA_API = "https://cloud.lambdalabs.com/api/v1"

_SERVICE = """[Unit]
Description=art-sky guard: ends this machine when its watchdog does not

[Service]
Type=oneshot
ExecStart={python} /{library} tick
TimeoutStartSec=55s
"""
_TIMER = """[Unit]
Description=art-sky guard, once a minute

[Timer]
OnBootSec=1min
OnActiveSec=1min
OnUnitActiveSec=1min
AccuracySec=1s
Unit=art-sky-guard.service

[Install]
WantedBy=timers.target
"""
# Each is tried when the one before it failed, or left the machine running until the next tick.
_POWER_OFF = (
    ("systemctl", "poweroff"),
    ("systemctl", "poweroff", "--force"),
    ("poweroff", "-f"),
    ("sh", "-c", "echo 1 > /proc/sys/kernel/sysrq; echo o > /proc/sysrq-trigger"),
)


@dataclass(frozen=True)
class Moment:
    """A point on one machine's clock that counts sleep and that nobody can set."""

    boot_id: str
    boottime: float


@dataclass(frozen=True)
class Heartbeat:
    """What the guard needs of the watchdog's file."""

    boot_id: str
    boottime: float
    ending_boottime: float | None = None
    ended: bool = False
    poweroff: bool = False  # SkyPilot will not tear this machine down


@dataclass(frozen=True)
class GuardState:
    folder: str
    boot_id: str
    boottime: float  # of this tick
    age: float  # seconds since the machine is billed
    silent: float  # seconds without a living watchdog
    max_age: float  # seconds, from max_hours and the budget; without flush and margin
    flush: float  # seconds
    cloud: str
    node: str
    tries: int = 0  # to end the machine
    reason: str | None = None  # once set, the machine is being ended


def aged(age: float, then: Moment, now: Moment) -> float:
    """What `age` has become. A boot counts whole, with one tick for what its predecessor had left unrecorded."""
    if then.boot_id == now.boot_id:
        return age + max(now.boottime - then.boottime, 0.0)
    return age + now.boottime + TICK_SECONDS


def first_age(now: Moment, unix: float, billed_from_unix: float) -> float:
    """Age of a machine seen for the first time: the wall clock is believed as far as the time since boot allows."""
    return min(max(unix - billed_from_unix, 0.0), now.boottime + PROVISION_SECONDS)


def decide(state: GuardState, now: Moment, beat: Heartbeat | None) -> GuardState:
    """The state after this tick; a `reason` in it means: end the machine now."""
    living = beat is not None and beat.boot_id == now.boot_id and beat.boottime <= now.boottime
    if living:
        assert beat is not None
        silent = now.boottime - beat.boottime
    elif state.boot_id == now.boot_id:
        silent = state.silent + max(now.boottime - state.boottime, 0.0)
    else:
        silent = state.silent + now.boottime
    then = Moment(state.boot_id, state.boottime)
    state = dataclasses.replace(
        state, boot_id=now.boot_id, boottime=now.boottime, age=aged(state.age, then, now), silent=silent
    )
    if state.reason is not None:
        return state
    for reason, holds in RULES:
        if holds(state, beat if living else None):
            return dataclasses.replace(state, reason=reason)
    return state


RULES: tuple[tuple[str, Callable[[GuardState, Heartbeat | None], bool]], ...] = (
    (
        "the machine is older than its limits allow",
        lambda s, w: s.age >= s.max_age + s.flush + AGE_MARGIN_SECONDS,
    ),
    (
        "no watchdog came up",
        lambda s, w: w is None and s.silent >= NO_WATCHDOG_SECONDS,
    ),
    (
        "the watchdog does not beat any more",
        lambda s, w: w is not None and not w.ended and s.silent >= SILENT_SECONDS,
    ),
    (
        "the watchdog has ended and asked the guard for the rest",
        lambda s, w: w is not None and w.ended and w.poweroff,
    ),
    (
        "the watchdog has ended and the cluster was not torn down",
        lambda s, w: w is not None and w.ended and s.silent >= TEARDOWN_SECONDS,
    ),
    (
        "the last flush takes too long",
        lambda s, w: (
            w is not None
            and not w.ended
            and w.ending_boottime is not None
            and s.boottime - w.ending_boottime >= s.flush + TEARDOWN_SECONDS
        ),
    ),
)


def main(argv: Sequence[str]) -> int:
    if argv[:1] == ["arm"] and len(argv) == 2:
        return arm(Path(argv[1]), Path("/"), run_command)
    if argv == ["tick"]:
        if Path(__file__).resolve() != Path("/", LIBRARY):
            # Without a state file a tick ends the machine: no one should run into that by hand.
            print(f"error: only the installed /{LIBRARY} ticks; run `guard arm FOLDER` as root first", file=sys.stderr)
            return 2
        return tick(Path("/"), run_command)
    print("usage: guard arm FOLDER | guard tick", file=sys.stderr)
    return 2


def arm(folder: Path, root: Path, run: Callable[[Sequence[str]], bool]) -> int:
    """Installs the timer and starts it. Exit code 0 only when the machine is guarded; 1 with one line otherwise.

    The timer comes first: a node.json that cannot be read leaves a guard without limits, which ends the machine.
    """
    try:
        (root / LIBRARY).parent.mkdir(parents=True, exist_ok=True)
        (root / LIBRARY).write_bytes(_own_source())
        python = "/usr/bin/python3" if Path("/usr/bin/python3").exists() else sys.executable
        (root / UNITS).mkdir(parents=True, exist_ok=True)
        (root / UNITS / "art-sky-guard.service").write_text(_SERVICE.format(python=python, library=LIBRARY))
        (root / UNITS / "art-sky-guard.timer").write_text(_TIMER)
        for leftover in ("watchdog.json", "end"):  # of an earlier job
            with contextlib.suppress(FileNotFoundError):
                (folder / leftover).unlink()
    except OSError as e:
        return _fail(f"the guard cannot be installed: {e}; run it as root")
    problem = None
    try:
        write_state(root / STATE, _armed(folder, root))
    except (OSError, ValueError) as e:
        problem = f"{e}; launch again with a valid node.json"
    for command in (
        ("systemctl", "daemon-reload"),
        ("systemctl", "enable", "--now", "art-sky-guard.timer"),
        ("systemctl", "restart", "art-sky-guard.timer"),  # also where an older one runs
        ("systemctl", "is-active", "--quiet", "art-sky-guard.timer"),
    ):
        if not run(command):
            return _fail(f"`{' '.join(command)}` failed: nothing guards this machine; use an image with systemd")
    if problem is not None:
        return _fail(f"the guard has no limits and ends this machine in a minute: {problem}")
    print("art-sky guard: armed", flush=True)
    return 0


def tick(root: Path, run: Callable[[Sequence[str]], bool], lambda_api: str = LAMBDA_API) -> int:
    """One look at the machine, and its end where one is due. Exit code 0 unless ending it failed."""
    now = this_moment()
    try:
        state = read_state(root / STATE)
    except (OSError, ValueError, TypeError) as e:
        print(f"art-sky guard: its state cannot be read ({e}), so the machine ends", flush=True)
        return 0 if power_off(0, run) else 1
    folder = Path(state.folder)
    try:
        max_age, flush, _ = read_limits(folder)
        state = dataclasses.replace(state, max_age=max_age, flush=flush)
    except (OSError, ValueError) as e:
        print(f"art-sky guard: {e}; the limits read last stay in force", flush=True)
    state = decide(state, now, read_heartbeat(folder))
    ended = True
    if state.reason is not None:
        print(f"art-sky guard: {state.reason}, so the machine ends (try {state.tries + 1})", flush=True)
        ended = _end(state, run, lambda_api)
        state = dataclasses.replace(state, tries=state.tries + 1)
    try:
        write_state(root / STATE, state)
    except OSError as e:  # a full disk: within one boot the next tick counts from the last state just as well
        print(f"art-sky guard: its state cannot be written ({e})", flush=True)
    return 0 if ended else 1


def power_off(tries: int, run: Callable[[Sequence[str]], bool]) -> bool:
    return any(run(command) for command in _POWER_OFF[min(tries, len(_POWER_OFF) - 1) :])


def end_on_lambda(node: str, key_file: Path, api: str) -> bool:
    """Terminates the machines of this node by Lambda's own API: there, power-off ends no bill. False where it
    failed, with a printed line. Machines have the node's name with SkyPilot's additions."""
    try:
        lines = [line.partition("=") for line in key_file.read_text().splitlines()]
        key = {name.strip(): value.strip() for name, _, value in lines}["api_key"]
        machines = _lambda_call(f"{api}/instances", key)["data"]
        ours = [m["id"] for m in machines if str(m.get("name", "")).startswith(f"{node}-")]
        if not ours:
            raise ValueError(f"none of {len(machines)} machines is named {node}-...")
        _lambda_call(f"{api}/instance-operations/terminate", key, {"instance_ids": ours})
    except (OSError, ValueError, LookupError, TypeError) as e:
        print(f"art-sky guard: Lambda did not end {node}: {type(e).__name__}: {e}; next try in a minute", flush=True)
        return False
    return True


def run_command(command: Sequence[str]) -> bool:
    try:
        return subprocess.run(list(command), timeout=15, stdin=subprocess.DEVNULL).returncode == 0
    except (OSError, subprocess.TimeoutExpired) as e:
        print(f"art-sky guard: {' '.join(command)}: {e}", flush=True)
        return False


def this_moment() -> Moment:
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return Moment(boot_id, time.clock_gettime(time.CLOCK_BOOTTIME))


def read_limits(folder: Path) -> tuple[float, float, dict[str, object]]:
    """(maximum age, flush), seconds, and node.json. Raises OSError or ValueError that names the file."""
    config = _read_object(folder / "node.json")
    limits = config.get("limits")
    if (folder / "extend.json").exists():
        limits = _read_object(folder / "extend.json")
    try:
        if not isinstance(limits, dict):
            raise TypeError("no limits")
        hours = [_positive(limits["max_hours"])]
        if limits.get("budget") is not None:
            price = float(config["price_per_hour"])  # type: ignore[arg-type]
            hours += [_positive(limits["budget"], zero=True) / price] if price > 0 else []
        return min(hours) * 3600, _positive(limits["flush_minutes"]) * 60, config
    except (LookupError, TypeError, ValueError) as e:
        raise ValueError(f"the limits in {folder} cannot be understood ({type(e).__name__}: {e})") from e


def read_heartbeat(folder: Path) -> Heartbeat | None:
    """None where there is none or it cannot be understood."""
    try:
        found = _read_object(folder / "watchdog.json")
        ending = found.get("ending_boottime")
        return Heartbeat(
            boot_id=str(found["boot_id"]),
            boottime=float(found["boottime"]),  # type: ignore[arg-type]
            ending_boottime=None if ending is None else float(ending),  # type: ignore[arg-type]
            ended=found.get("phase") == "ended",
            poweroff=found.get("poweroff") is True,
        )
    except (OSError, ValueError, LookupError, TypeError):
        return None


def read_state(file: Path) -> GuardState:
    found = _read_object(file)
    state = GuardState(**found)  # type: ignore[arg-type]
    numbers = (state.boottime, state.age, state.silent, state.max_age, state.flush, float(state.tries))
    if not all(math.isfinite(n) and n >= 0 for n in numbers):
        raise ValueError(f"{file} holds numbers that make no sense")
    return state


def write_state(file: Path, state: GuardState) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    scratch = file.with_suffix(".new")
    with scratch.open("w") as f:
        json.dump(dataclasses.asdict(state), f)
        f.flush()
        os.fsync(f.fileno())
    scratch.replace(file)


def _armed(folder: Path, root: Path) -> GuardState:
    """A fresh state. What an earlier arming counted goes on."""
    now = this_moment()
    max_age, flush, config = read_limits(folder)
    try:
        before = read_state(root / STATE)
        age = aged(before.age, Moment(before.boot_id, before.boottime), now)
    except (OSError, ValueError, TypeError):
        age = first_age(now, time.time(), float(config["billed_from_unix"]))  # type: ignore[arg-type]
    return GuardState(
        folder=str(folder),
        boot_id=now.boot_id,
        boottime=now.boottime,
        age=age,
        silent=0.0,
        max_age=max_age,
        flush=flush,
        cloud=str(config["cloud"]),
        node=str(config["node"]),
    )


def _end(state: GuardState, run: Callable[[Sequence[str]], bool], lambda_api: str) -> bool:
    key = Path(state.folder).parent / ".lambda_cloud" / "lambda_keys"
    if state.cloud == "lambda" and key.exists():
        return end_on_lambda(state.node, key, lambda_api)  # powered off it could not try again
    return power_off(state.tries, run)


def _lambda_call(url: str, key: str, body: object = None) -> dict[str, list[dict[str, object]]]:
    data = None if body is None else json.dumps(body).encode()
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json", "User-Agent": "art-sky"}
    with urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=20) as answer:
        found: dict[str, list[dict[str, object]]] = json.load(answer)
    return found


def _own_source() -> bytes:
    loader = globals()["__loader__"]  # reads from within a wheel, too
    source: bytes = loader.get_data(loader.get_filename(globals()["__spec__"].name))
    return source


def _read_object(file: Path) -> dict[str, object]:
    try:
        found = json.loads(file.read_text())
    except (ValueError, RecursionError) as e:
        raise ValueError(f"{file} is not JSON: {e}") from e
    if not isinstance(found, dict):
        raise ValueError(f"{file} is not a JSON object")
    return found


def _positive(value: object, zero: bool = False) -> float:
    number = float(value)  # type: ignore[arg-type]
    if not math.isfinite(number) or number < 0 or (number == 0 and not zero):
        raise ValueError(f"{value!r} is no limit")
    return number


def _fail(message: str) -> int:
    print(f"error: {message}", file=sys.stderr, flush=True)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
