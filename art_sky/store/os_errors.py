"""Errors of the operating system as typed store errors: one clear line and the next step."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from art_sky.errors import NoDiskSpace, StoreError

_NEXT_STEP = {
    errno.EACCES: "run as the user who owns it, or change its permissions",
    errno.EPERM: "run as the user who owns it, or change its permissions",
    errno.EROFS: "mount it writable, or choose another folder",
    errno.EXDEV: "keep a store on one file system: move it, instead of linking parts of it elsewhere",
    errno.ENAMETOOLONG: "choose a folder with a shorter path",
    errno.EEXIST: "one key is the folder of another: choose another name",
    errno.ENOTDIR: "one key is the folder of another: choose another name",
    errno.EISDIR: "one key is the folder of another: choose another name",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
    errno.ENOLCK: "this file system has no locks: choose a folder on a local disk",
    errno.EOPNOTSUPP: "this file system has no locks: choose a folder on a local disk",
    errno.ESTALE: "mount the file system again",
    errno.EIO: "check the disk",
}


def full_disk(error: BaseException) -> NoDiskSpace | None:
    """What to say where that is what is wrong."""
    if not isinstance(error, OSError) or error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return None
    where = f" ({error.filename})" if error.filename else ""
    return NoDiskSpace(f"the disk of the server is full{where}: free some space, then try again; nothing was changed")


def store_error(error: OSError, what: str, where: Path) -> StoreError:
    """`what` was being done in the folder `where`."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return NoDiskSpace(f"no space left to {what} in {where}: free some, then try again; nothing was changed")
    step = _NEXT_STEP.get(error.errno or 0, "mend that, then try again")
    named = f" ({error.filename})" if error.filename and str(error.filename) != str(where) else ""
    return StoreError(f"cannot {what} in {where}: {error.strerror or error}{named}; {step}")


@contextmanager
def reported(what: str, where: Path) -> Iterator[None]:
    """Turns every OSError of the block into a StoreError; store errors pass through."""
    try:
        yield
    except OSError as e:
        raise store_error(e, what, where) from e
