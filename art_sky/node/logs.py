"""`python -m art_sky.node.logs FOLDER`: keeps this machine's logs in the store, where they outlive it.

At its start, every ten minutes and when the watchdog closes its stdin, the newest part of each log goes to
`_clusters/<cluster>/logs/<node>`. Exit code 0 means that the last push went well. It needs the installed package.

`python3 -m art_sky.node.logs show` prints the newest part of the node's own log. The controller keeps that of a machine
on which the installation failed.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from art_sky.node import credentials, records
from art_sky.node.ledger import stdin_closed

if TYPE_CHECKING:
    from art_sky.store.protocol import Store

EVERY_SECONDS = 600.0
RETRY_SECONDS = 60.0
NODE_LOG = Path("logs", "node.log")  # of watchdog, installation, server and their other children
FILES = (str(NODE_LOG), "state/logs/*.log")  # the latter of engine and trainer
MAX_FILE_BYTES = 2 << 20
MAX_BYTES = 8 << 20


def main(argv: list[str]) -> int:
    if argv == ["show"]:
        sys.stdout.buffer.write(shown(records.FOLDER.expanduser()))
        return 0
    from art_sky.store import open_store

    folder = Path(argv[0])
    config = records.read(folder / "node.json", records.NodeConfig)
    return 0 if keep(folder, config, lambda: open_store(config.store), stdin_closed) else 1


def keep(
    folder: Path, config: records.NodeConfig, connect: Callable[[], Store], closed: Callable[[float], bool]
) -> bool:
    """Pushes, waits with `closed(seconds)`, and so on; once more when that is True. Says whether the last push went
    well; one that fails is told and tried again with a new connection."""
    from art_sky.errors import ArtSkyError
    from art_sky.store.packs import push_folder

    last = False
    while True:
        pushed = False
        try:
            with tempfile.TemporaryDirectory(prefix="art-sky-logs-") as scratch:
                collect(folder, Path(scratch))
                push_folder(connect(), records.logs_prefix(config.cluster, config.node), scratch)
            pushed = True
        except (ArtSkyError, OSError, ValueError) as e:
            print(f"art-sky: the logs could not be pushed: {e}", flush=True)
        if last:
            return pushed
        last = closed(EVERY_SECONDS if pushed else RETRY_SECONDS)


def collect(folder: Path, target: Path) -> None:
    """Copies the logs in `folder` to `target`: of each file MAX_FILE_BYTES from its end, of all MAX_BYTES of those
    written last, and `***` wherever one of the secrets stands. Raises OSError, and ValueError when the secrets are not
    known."""
    hidden = credentials.values(records.read(folder / "secrets.json", records.Secrets))
    files = [file for pattern in FILES for file in folder.glob(pattern) if file.is_file()]
    room = MAX_BYTES
    for file in sorted(files, key=lambda file: file.stat().st_mtime_ns, reverse=True):
        data = _tail(file, max(min(room, MAX_FILE_BYTES), 0), hidden)
        room -= len(data)
        (target / file.name).write_bytes(data)


def shown(folder: Path) -> bytes:
    """The log of watchdog and installation as `collect` takes it. Before secrets have come, none can stand in it.

    Raises OSError, ValueError.
    """
    secrets = folder / "secrets.json"
    hidden = credentials.values(records.read(secrets, records.Secrets)) if secrets.exists() else []
    return _tail(folder / NODE_LOG, MAX_FILE_BYTES, hidden)


def _tail(path: Path, limit: int, hidden: list[bytes]) -> bytes:
    with path.open("rb") as file:
        skipped = max(file.seek(0, 2) - limit, 0)
        file.seek(skipped)
        data = file.read(limit)
    for value in hidden:
        data = data.replace(value, b"***")
    if skipped:
        # Without the rest of a secret that was cut in two, and from the start of a line on.
        data = data[max(map(len, hidden), default=0) :]
        data = b"[the lines before these were not kept]\n" + data[data.find(b"\n") + 1 :]
    return data


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
