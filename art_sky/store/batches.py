"""How the groups of one train call become one immutable object, and back.

The object is zstd over JSON lines: a header, then one group a line, in the JSON form of
`art_sky.trajectories.TrajectoryGroup`. JSON is written in ASCII, so that lone surrogates survive, and NaN or
infinity cannot be written. The trainer works on this form and needs no client classes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

import zstandard

from art_sky.errors import CorruptObject, InvalidInput

FORMAT = 1
MAX_BYTES = 4 << 30  # of JSON; a stop against decompression bombs


def encode_batch(groups: Iterable[Mapping[str, Any]]) -> bytes:
    """Raises InvalidInput naming the group that holds something JSON cannot say."""
    lines = [json.dumps({"format": FORMAT, "kind": "art-sky.groups"}).encode()]
    for i, group in enumerate(groups):
        try:
            lines.append(json.dumps(group, allow_nan=False, separators=(",", ":")).encode())
        except (TypeError, ValueError) as e:
            raise InvalidInput(f"group {i} cannot be written as JSON: {e}; give plain values") from e
    return zstandard.ZstdCompressor(level=3).compress(b"\n".join(lines) + b"\n")


def decode_batch(data: bytes) -> list[dict[str, Any]]:
    """Raises CorruptObject for anything that `encode_batch` does not write."""
    try:
        reader = zstandard.ZstdDecompressor().stream_reader(data)
        text = reader.read(MAX_BYTES + 1)
        if len(text) > MAX_BYTES:
            raise CorruptObject(f"the batch is over {MAX_BYTES >> 30} GiB; send fewer groups a step")
        header, *lines = text.splitlines()
        head = json.loads(header)
        if head.get("kind") != "art-sky.groups" or head.get("format") != FORMAT:
            raise CorruptObject(f"not a batch of this release: {head}; install the art-sky that wrote it")
        groups = [json.loads(line) for line in lines]
    except (zstandard.ZstdError, ValueError, AttributeError, RecursionError) as e:
        raise CorruptObject(f"the batch cannot be read: {e}; send it again") from e
    if not all(isinstance(g, dict) and isinstance(g.get("trajectories"), list) for g in groups):
        raise CorruptObject("the batch holds something that is not a group; send it again")
    return groups


def is_choice(item: Mapping[str, Any]) -> bool:
    """Whether an entry of `messages_and_choices` is an OpenAI Choice (trained), not a message (context)."""
    return "role" not in item and isinstance(item.get("message"), Mapping)
