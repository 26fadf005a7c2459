"""`python3 -m art_sky.node.receive secrets | extend | end | flush`: how the controller and SkyPilot's hooks talk to a
node. Records come on stdin, never in an argv, and lie in files of mode 0600."""

from __future__ import annotations

import sys
from pathlib import Path

from art_sky.node import credentials, records
from art_sky.node.clock import Clock

_SEEN_SECONDS = 60.0  # a watchdog whose heartbeat is older is not waited for


def main(argv: list[str]) -> int:
    folder = records.FOLDER.expanduser()
    programs = {"secrets": _secrets, "extend": _extend, "end": _end, "flush": _flush}
    if len(argv) != 1 or argv[0] not in programs:
        print(f"usage: python3 -m art_sky.node.receive {' | '.join(programs)}", file=sys.stderr)
        return 2
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return programs[argv[0]](folder)
    except (OSError, ValueError) as e:
        print(f"error: {e}; nothing was changed, send it again", file=sys.stderr)
        return 1


def receive_secrets(folder: Path, text: str) -> None:
    """Raises ValueError, which repeats nothing of the text."""
    try:
        secrets = records.parse(text, records.Secrets, "stdin")
    except ValueError:
        raise ValueError("stdin cannot be read as Secrets") from None
    credentials.check(secrets)
    records.write(folder / "secrets.json", secrets, 0o600)


def receive_limits(folder: Path, text: str) -> None:
    """Raises ValueError."""
    limits = records.parse(text, records.NodeLimits, "stdin")
    records.check_limits(limits)
    records.write(folder / "extend.json", limits, 0o600)


def wait_until_ended(folder: Path, clock: Clock) -> str:
    """Waits for the watchdog's end, at most its flush and a minute; returns a line about it."""
    began = clock.now().boottime
    limit = _SEEN_SECONDS + _flush_minutes(folder) * 60
    while True:
        now = clock.now()
        try:
            state = records.read(folder / "watchdog.json", records.WatchdogState)
        except (OSError, ValueError):
            return "no watchdog runs here"
        if state.phase == "ended":
            left = f"; not flushed: {', '.join(state.not_flushed)}" if state.not_flushed else ""
            return f"the watchdog has ended: {records.REASONS.get(state.ending or '', 'without a reason')}{left}"
        if state.boot_id != now.boot_id or now.boottime - state.boottime > _SEEN_SECONDS:
            return "the watchdog does not beat any more; the guard ends this machine"
        if now.boottime - began > limit:
            return f"the watchdog is still {state.phase} after {limit:.0f} s"
        clock.sleep(1.0)


def _secrets(folder: Path) -> int:
    receive_secrets(folder, sys.stdin.read())
    return 0


def _extend(folder: Path) -> int:
    receive_limits(folder, sys.stdin.read())
    return 0


def _end(folder: Path) -> int:
    (folder / "end").touch()
    return 0


def _flush(folder: Path) -> int:
    _end(folder)
    print(f"art-sky: {wait_until_ended(folder, Clock())}", flush=True)
    return 0


def _flush_minutes(folder: Path) -> float:
    for name in ("extend.json", "node.json"):
        try:
            text = (folder / name).read_text()
            if name == "extend.json":
                return records.parse(text, records.NodeLimits, name).flush_minutes
            return records.parse(text, records.NodeConfig, name).limits.flush_minutes
        except (OSError, ValueError):
            continue
    return 5.0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
