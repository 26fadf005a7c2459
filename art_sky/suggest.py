"""Near names, for errors about names that do not exist."""

from __future__ import annotations

from collections.abc import Iterable


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`did you mean 'local'?`, or the known names when none is near, or that there are none."""
    from difflib import get_close_matches  # only ever needed on the way to an error

    names = sorted(known)
    near = get_close_matches(name, names, n=1)
    if near:
        return f"did you mean {near[0]!r}?"
    shown = ", ".join(names[:10]) + (", ..." if len(names) > 10 else "")
    return f"known: {shown}" if names else "there is none yet"
