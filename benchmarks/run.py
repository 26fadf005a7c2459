"""Runs every benchmark of this folder in turn and writes what they print to results/<date>.jsonl.

A benchmark prints one JSON line a case on stdout: `bench`, `case`, `ours`, `peers`, `ratio`, `notes`. One that
fails is told at the end, and the others run all the same.

    python benchmarks/run.py [NAME ...]
"""

from __future__ import annotations

import argparse
import datetime
import json
import subprocess
import sys
from pathlib import Path
from typing import TextIO

HERE = Path(__file__).parent
KEYS = {"bench", "case", "ours", "peers", "ratio", "notes"}


def main() -> int:
    known = sorted(f.stem for f in HERE.glob("*.py") if f.stem != Path(__file__).stem and not f.stem.startswith("_"))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"default: all of {', '.join(known)}")
    names = parser.parse_args().names or known
    if unknown := sorted(set(names) - set(known)):
        parser.error(f"no benchmark {', '.join(unknown)}; there are {', '.join(known)}")
    results = HERE / "results" / f"{datetime.date.today().isoformat()}.jsonl"
    results.parent.mkdir(exist_ok=True)
    failed = []
    with results.open("a") as out:
        for name in names:
            print(f"--- {name}", file=sys.stderr, flush=True)
            process = subprocess.Popen([sys.executable, str(HERE / f"{name}.py")], stdout=subprocess.PIPE, text=True)
            assert process.stdout is not None
            bad = [line for line in process.stdout if not keep(line, out)]
            if process.wait() != 0 or bad:
                failed.append(name)
    print(f"written to {results}", file=sys.stderr)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return int(bool(failed))


def keep(line: str, out: TextIO) -> bool:
    """Shows and stores a line; False when it is not a result."""
    print(line, end="", flush=True)
    try:
        result = json.loads(line)
    except ValueError:
        result = None
    if not isinstance(result, dict) or not result.keys() >= KEYS:
        print(f"not a result: {line.rstrip()}", file=sys.stderr)
        return False
    out.write(line)
    out.flush()
    return True


if __name__ == "__main__":
    sys.exit(main())
