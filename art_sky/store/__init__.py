"""The durable truth of a run: objects in a folder or a bucket, and the commits built from them."""

from __future__ import annotations

import gc as collector  # `gc` is a module of this package
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING
from urllib.parse import unquote

from art_sky.errors import InvalidConfig

if TYPE_CHECKING:
    from art_sky.store.protocol import Store

__all__ = ["open_store"]


def open_store(url: str) -> Store:
    """The store behind `file:///absolute`, `file://relative`, a plain path or `s3://bucket/prefix`.

    Nothing is created by opening it. In a URL `%20` and the like are decoded; a plain path is taken as it is. The
    options of a bucket are those of `art_sky.store.s3_location`. Raises InvalidConfig for any other scheme and for
    a URL that is not usable, StoreError when the path is something else than a folder.
    """
    scheme, separator, rest = url.partition("://")
    if not separator:
        path = url
    elif scheme == "file":
        path = unquote(rest)
    elif scheme == "s3":
        return _open_bucket(url)
    else:
        raise InvalidConfig(
            f"store {url!r}: unknown scheme {scheme!r}; use file:///folder, a plain path or s3://bucket"
        )
    if not path.strip() or "\0" in path:
        raise InvalidConfig(f"store {url!r} names no folder; use file:///folder or a plain path")
    # Not before it is asked for: clients import this package for its batch format and own no store.
    from art_sky.store.folder import FolderStore

    return FolderStore(path)


def _open_bucket(url: str) -> Store:
    try:
        with _no_garbage_collection():
            from art_sky.store.s3 import S3Store

            return S3Store(url)
    except ModuleNotFoundError as e:
        if (e.name or "").partition(".")[0] not in ("boto3", "botocore", "urllib3"):
            raise
        raise InvalidConfig("a store in a bucket needs boto3: pip install 'art-sky[s3]'") from e


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """botocore loads a hundred thousand objects that all stay: to look for garbage among them takes a third of it."""
    was_on = collector.isenabled()
    collector.disable()
    try:
        yield
    finally:
        if was_on:
            collector.enable()
