"""What an installation on a node consists of, beside the wheel; also what a prepared image holds (`image`)."""

from __future__ import annotations

import pkgutil
from pathlib import Path

from art_sky.whole_file import write_whole

VLLM_VERSION = "0.32.0"
VLLM = (f"vllm=={VLLM_VERSION}",)  # in an environment of its own; it names the exact torch that it needs


def server(*, bitsandbytes: bool) -> str:
    """The wheel's own extras, as pip takes them."""
    return f"art-sky[local,s3{',bnb' if bitsandbytes else ''}]"


def write_constraints(folder: Path) -> Path:
    """constraints.txt in `folder`, out of the wheel that this runs from. Raises OSError."""
    text = pkgutil.get_data("art_sky.node", "constraints.txt")
    assert text is not None
    file = folder / "constraints.txt"
    write_whole(file, text.decode())
    return file
