"""The logs that a rented machine left in its cluster's store (art_sky.node.logs), for when it is gone. Those of one
whose installation failed are put there by the controller."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from art_sky.config import home
from art_sky.controller.logs import LogTail
from art_sky.errors import NotFound, ObjectNotFound
from art_sky.node.logs import NODE_LOG
from art_sky.node.records import logs_prefix
from art_sky.whole_file import write_whole

if TYPE_CHECKING:
    from art_sky.store.protocol import Store


def pull_logs(store_url: str, cluster: str, node: str) -> tuple[Path, float]:
    """A folder with the logs as `node` pushed them last, and the Unix time of that.

    What was pulled before is not read again. Raises NotFound when there is none, StoreError.
    """
    from art_sky.store import open_store
    from art_sky.store.packs import MANIFEST, pull_folder

    store, prefix, folder = open_store(store_url), logs_prefix(cluster, node), _folder(node)
    try:
        pull_folder(store, prefix, folder)
        return folder, store.info(f"{prefix}/{MANIFEST}").modified
    except ObjectNotFound as e:
        kept = folder / NODE_LOG.name
        if kept.exists():
            return folder, kept.stat().st_mtime
        raise NotFound(
            f"{node} left no log in {store_url}: it ended before it could be asked for it, or could not write there; "
            "see `art-sky status --all` for how it ended"
        ) from e


def keep_log(store: Store, cluster: str, node: str, text: str) -> None:
    """Where `pull_logs` finds it. Raises StoreError, after it was written on this computer."""
    from art_sky.store.packs import push_folder

    folder = _folder(node)
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / NODE_LOG.name, text, 0o600)
    push_folder(store, logs_prefix(cluster, node), folder)


def last_lines(folder: Path, lines: int) -> Iterator[tuple[str, str]]:
    """(name, its last lines) of each log, that of watchdog and server last."""
    for file in sorted(folder.glob("*.log"), key=lambda file: (file.name == "node.log", file.name)):
        tail = LogTail(file, lines)
        try:
            yield file.name, tail.read()
        finally:
            tail.close()


def _folder(node: str) -> Path:
    return home() / "logs" / node
