"""The SkyPilot task of a node, and how its small programs are called over SSH."""

from __future__ import annotations

import shlex
from pathlib import Path

_PACKAGED = Path(__file__).parent / "server.yaml"  # where a wheel has it
_CHECKOUT = Path(__file__).parents[2] / "sky" / "server.yaml"


def task_yaml() -> str:
    """The text of sky/server.yaml. Whoever launches replaces its resources, name and file mounts."""
    return (_PACKAGED if _PACKAGED.exists() else _CHECKOUT).read_text()


def node_command(program: str, *arguments: str) -> str:
    """A line for the node's shell that runs `art_sky.node.<program>` straight from the wheel there.

    `beat` (stdin: a line every 15 s), `receive secrets`, `receive extend` (stdin: the record), `receive end`,
    `receive flush` and `logs show`.
    """
    words = " ".join(shlex.quote(a) for a in arguments)
    wheel = '"$(ls -t ~/.art-sky-node/*.whl | head -1)"'
    return f"exec env PYTHONPATH={wheel} python3 -m art_sky.node.{program} {words}".rstrip()
