"""Files of a step, written where a user can load them."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
from pathlib import Path, PurePosixPath

from art_sky.errors import CorruptObject, InvalidInput, NoDiskSpace
from art_sky.schemas import FileRef


def write_file(folder: Path, name: str, data: bytes, ref: FileRef) -> None:
    """Writes one file whole or not at all. Raises CorruptObject when the bytes are not those of the manifest."""
    if len(data) != ref.size or hashlib.sha256(data).hexdigest() != ref.sha256:
        raise CorruptObject(f"{name} arrived damaged (its hash is not the manifest's); download the checkpoint again")
    if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
        raise CorruptObject(f"the manifest names {name!r}, outside its folder; do not trust this store")
    target = folder / name
    partial = target.with_name(f"{target.name}.{os.getpid()}.part")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        partial.write_bytes(data)
        partial.replace(target)
    except OSError as e:
        with contextlib.suppress(OSError):  # the first error is the one to tell
            partial.unlink()
        kind = NoDiskSpace if e.errno in (errno.ENOSPC, errno.EDQUOT) else InvalidInput
        raise kind(f"{target} cannot be written: {e.strerror}; give another folder") from e
