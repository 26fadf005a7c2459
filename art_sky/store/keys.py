"""Which keys every store accepts: those that a folder on any POSIX file system and a bucket can both hold."""

from __future__ import annotations

from art_sky.errors import InvalidInput

MAX_KEY_BYTES = 1024  # S3's limit
MAX_PART_BYTES = 255  # that of most file systems


def check_key(key: str) -> str:
    r"""Returns `key` when it is relative, `/`-separated and safe as a path; spaces and Unicode are fine.

    Raises InvalidInput for empty, `.` or `..` parts, a leading or trailing `/`, `\` (some servers take it for `/`),
    control characters (NUL among them), text that is not UTF-8, parts over 255 bytes and keys over 1024.
    """
    reason = _objection(key)
    if reason is None:
        return key
    raise InvalidInput(f"key {ascii(key)[:120]} {reason}; use a relative path such as 'blobs/ab12'")


def check_prefix(prefix: str) -> str:
    """Like `check_key`, for the beginning of a key: it may be empty or end with `/`."""
    if prefix:
        check_key(prefix.removesuffix("/"))
    return prefix


def _objection(key: str) -> str | None:
    try:
        size = len(key.encode())
    except UnicodeEncodeError:
        return "cannot be written as UTF-8"
    if size > MAX_KEY_BYTES:
        return f"is {size} bytes long, over {MAX_KEY_BYTES}"
    if any(ord(c) < 32 or ord(c) == 127 for c in key):
        return "holds a control character"
    if "\\" in key:
        return "holds a backslash"
    for part in key.split("/"):
        if part in ("", ".", ".."):
            return f"has the part {part!r}"
        if len(part.encode()) > MAX_PART_BYTES:
            return f"has a part over {MAX_PART_BYTES} bytes"
    return None


def is_key(name: str) -> bool:
    """Whether an object that somebody else put into a store has a name that could be asked for."""
    try:
        check_key(name)
    except InvalidInput:
        return False
    return True
