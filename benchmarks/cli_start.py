"""How long the command line takes to say anything, against bare Python and other command lines.

Each case runs both commands in turn, round after round, each in a new process, and takes the median of wall time
and of CPU time (user + system, of that process alone). `ratio` is the peer's time over ours: above 1 we are
faster; against bare Python it says how much of our time is Python's own. Prints one JSON line a case.

    python benchmarks/cli_start.py [--rounds 15]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from importlib import metadata
from pathlib import Path

LIMIT_CPU_MS = 150.0  # of `art-sky --help`
SCRIPTS = Path(sys.executable).parent
PYTHON = [sys.executable, "-c", "pass"]
OURS_HELP = [str(SCRIPTS / "art-sky"), "--help"]
CASES = {
    "art-sky --help / python -c pass": (OURS_HELP, PYTHON),
    "import art_sky / python -c pass": ([sys.executable, "-c", "import art_sky"], PYTHON),
    "art-sky --help / wandb --help": (OURS_HELP, [str(SCRIPTS / "wandb"), "--help"]),
    "art-sky --help / hf --help": (OURS_HELP, [str(SCRIPTS / "hf"), "--help"]),
}
PACKAGES = {"wandb": "wandb", "hf": "huggingface_hub"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    too_slow = False
    for case, (ours, peer) in CASES.items():
        if not Path(peer[0]).exists():
            print(f"skipped: {case} ({peer[0]} is not installed)", file=sys.stderr)
            continue
        for command in (ours, peer):
            run(command)  # files into the cache, bytecode written
        both = [(run(ours), run(peer)) for _ in range(rounds)]
        (our_wall, our_cpu), (peer_wall, peer_cpu) = (medians([pair[i] for pair in both]) for i in (0, 1))
        peer_name = Path(peer[0]).name
        version = metadata.version(PACKAGES[peer_name]) if peer_name in PACKAGES else sys.version.split()[0]
        line = {
            "bench": "cli_start",
            "case": case,
            "ours": {"wall_ms": our_wall, "cpu_ms": our_cpu},
            "peers": {f"{case.split(' / ')[1]} ({version})": {"wall_ms": peer_wall, "cpu_ms": peer_cpu}},
            "ratio": {"wall": round(peer_wall / our_wall, 2), "cpu": round(peer_cpu / our_cpu, 2)},
            "notes": f"medians of {rounds} interleaved rounds, new processes, warm file cache",
        }
        print(json.dumps(line), flush=True)
        too_slow |= ours is OURS_HELP and our_cpu > LIMIT_CPU_MS
    if too_slow:
        print(f"art-sky --help takes over {LIMIT_CPU_MS:g} ms of CPU time", file=sys.stderr)
    return int(too_slow)


def run(command: list[str]) -> tuple[float, float]:
    """(wall, CPU) in seconds."""
    began = time.perf_counter()
    with open(os.devnull, "w") as nowhere:  # noqa: PTH123
        files = [(os.POSIX_SPAWN_DUP2, nowhere.fileno(), 1)]
        pid = os.posix_spawn(command[0], command, os.environ, file_actions=files)
    _, status, used = os.wait4(pid, 0)
    wall = time.perf_counter() - began
    if status != 0:
        raise SystemExit(f"{' '.join(command)} ended with status {status}")
    return wall, used.ru_utime + used.ru_stime


def medians(times: list[tuple[float, float]]) -> tuple[float, float]:
    """In milliseconds."""
    wall, cpu = (round(statistics.median(values) * 1000, 1) for values in zip(*times, strict=True))
    return wall, cpu


if __name__ == "__main__":
    sys.exit(main())
