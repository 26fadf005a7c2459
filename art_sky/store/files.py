"""The files of a step on a local disk: what they hash to, and putting them into a folder."""

from __future__ import annotations

import hashlib
import shutil
import uuid
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from art_sky.schemas import FileRef
from art_sky.store.os_errors import reported


def file_ref(data: bytes | Path) -> FileRef:
    """Hash and size of bytes or of a file."""
    if isinstance(data, bytes):
        return FileRef(sha256=hashlib.sha256(data).hexdigest(), size=len(data))
    with reported("read a file", data), data.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return FileRef(sha256=digest, size=file.tell())


def unpack(wanted: Mapping[str, FileRef], blocks: Callable[[FileRef], Iterable[bytes]], folder: Path) -> Path:
    """Puts each file at `folder/<name>`, its checked bytes from `blocks`, and returns `folder`.

    A new folder appears whole. In one that exists, files with the right hash stay untouched, so that others may read
    them meanwhile, and each other file is replaced in one step. Raises what `blocks` raises.
    """
    with reported("unpack a checkpoint", folder):
        missing = {n: ref for n, ref in wanted.items() if not _holds(folder / n, ref)}
        if not missing and folder.is_dir():
            return folder
        scratch = folder.parent / f".{folder.name[:80]}.{uuid.uuid4().hex}"
        try:
            scratch.mkdir(parents=True)
            for name, ref in missing.items():
                (scratch / name).parent.mkdir(parents=True, exist_ok=True)
                with (scratch / name).open("wb") as out:
                    out.writelines(blocks(ref))
            if len(missing) < len(wanted) or not _renamed(scratch, folder):
                for name in missing:
                    (folder / name).parent.mkdir(parents=True, exist_ok=True)
                    (scratch / name).replace(folder / name)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)  # best effort: what stays is only in the way
    return folder


def _holds(path: Path, ref: FileRef) -> bool:
    return path.is_file() and path.stat().st_size == ref.size and file_ref(path).sha256 == ref.sha256


def _renamed(scratch: Path, folder: Path) -> bool:
    """False when `folder` exists and is not empty."""
    try:
        scratch.rename(folder)
    except OSError:
        if folder.is_dir():
            return False
        raise
    return True
