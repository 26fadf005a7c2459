"""The durable truth of a run: objects in a folder or a bucket, and the commits built from them."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import unquote

from art_sky.errors import InvalidConfig

if TYPE_CHECKING:
    from art_sky.store.protocol import Store

__all__ = ["open_store"]


def open_store(url: str) -> Store:
    """The store behind `file:///absolute`, `file://relative` or a plain path; nothing is created by opening it.

    In a `file://` URL `%20` and the like are decoded; a plain path is taken as it is. Raises InvalidConfig for
    any other scheme, StoreError when the path is something else than a folder.
    """
    scheme, separator, rest = url.partition("://")
    if not separator:
        path = url
    elif scheme == "file":
        path = unquote(rest)
    elif scheme == "s3":
        raise InvalidConfig(f"store {url!r}: buckets arrive with a later release; use file:///folder until then")
    else:
        raise InvalidConfig(f"store {url!r}: unknown scheme {scheme!r}; use file:///folder or a plain path")
    if not path.strip() or "\0" in path:
        raise InvalidConfig(f"store {url!r} names no folder; use file:///folder or a plain path")
    # Not before it is asked for: clients import this package for its batch format and own no store.
    from art_sky.store.folder import FolderStore

    return FolderStore(path)
