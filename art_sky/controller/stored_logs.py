"""The logs that a rented machine left in its cluster's store (art_sky.node.logs), for when it is gone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from art_sky.config import home
from art_sky.controller.logs import LogTail
from art_sky.errors import NotFound, ObjectNotFound
from art_sky.node.records import logs_prefix


def pull_logs(store_url: str, cluster: str, node: str) -> tuple[Path, float]:
    """A folder with the logs as `node` pushed them last, and the Unix time of that.

    What was pulled before is not read again. Raises NotFound when it pushed none, StoreError.
    """
    from art_sky.store import open_store
    from art_sky.store.packs import MANIFEST, pull_folder

    store, prefix, folder = open_store(store_url), logs_prefix(cluster, node), home() / "logs" / node
    try:
        pull_folder(store, prefix, folder)
        return folder, store.info(f"{prefix}/{MANIFEST}").modified
    except ObjectNotFound as e:
        raise NotFound(
            f"{node} left no log in {store_url}: it ended before its server was started, or could not write there; "
            "see `art-sky status --all` for how it ended"
        ) from e


def last_lines(folder: Path, lines: int) -> Iterator[tuple[str, str]]:
    """(name, its last lines) of each log, that of watchdog and server last."""
    for file in sorted(folder.glob("*.log"), key=lambda file: (file.name == "node.log", file.name)):
        tail = LogTail(file, lines)
        try:
            yield file.name, tail.read()
        finally:
            tail.close()
