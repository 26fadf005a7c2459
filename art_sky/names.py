"""Project, model and run names: checked before they touch a path, a key or a URL."""

from __future__ import annotations

import re

from art_sky.errors import InvalidName

_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,62}[A-Za-z0-9])?")
# Names that mean something to a file system, whatever their extension.
_RESERVED = {"con", "prn", "aux", "nul", *(f"{d}{n}" for d in ("com", "lpt") for n in range(1, 10))}


def check_name(kind: str, name: object) -> str:
    """Returns `name` when it is 1-64 of letters, digits, `.`, `_`, `-`, begins and ends with a letter or digit.

    Raises InvalidName naming the offending value and a near name that would do.
    """
    if isinstance(name, str) and _NAME.fullmatch(name) and ".." not in name and not _is_reserved(name):
        return name
    shown = repr(name if len(str(name)) <= 80 else str(name)[:77] + "...")
    raise InvalidName(
        f"{kind} {shown} is not a valid name: use 1 to 64 letters, digits, '.', '_' or '-', beginning and "
        f"ending with a letter or digit, for example {_suggest(str(name))!r}"
    )


def split_step(name: str) -> tuple[str, int | None]:
    """`"agent@7"` -> `("agent", 7)`; `"agent"` -> `("agent", None)`. A step that is no number stays in the name."""
    base, at, step = name.rpartition("@")
    if at and step.isascii() and step.isdigit() and len(step) <= 12:
        return base, int(step)
    return name, None


def _is_reserved(name: str) -> bool:
    return name.split(".")[0].lower() in _RESERVED


def _suggest(name: str) -> str:
    near = re.sub(r"\.{2,}", ".", re.sub(r"[^A-Za-z0-9._-]+", "-", name))[:64].strip("._-")
    if not near or _is_reserved(near):
        return "my-agent"
    return near
