"""`python3 -m art_sky.node.beat`: what the tunnel's SSH session runs. Each line on stdin is the controller's beat; the
answer is the watchdog's state, one line of JSON, `{}` while there is none. Ends with stdin, or with its silence."""

from __future__ import annotations

import os
import select
import sys
from pathlib import Path

from art_sky.node import records

SILENT_SECONDS = 120.0  # a connection that is broken without a word may stay open for hours


def main() -> int:
    folder = records.FOLDER.expanduser()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    pending = b""
    while select.select([0], [], [], SILENT_SECONDS)[0]:
        data = os.read(0, 4096)
        if not data:
            break
        *lines, pending = (pending + data).split(b"\n")
        if lines:
            (folder / "beat").touch()
            _answer(folder / "watchdog.json")
    return 0


def _answer(file: Path) -> None:
    try:
        text = " ".join(file.read_text().split())
    except OSError:
        text = "{}"
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
