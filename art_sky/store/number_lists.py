"""Long lists of numbers as compressed columns, without a Python step for each number.

A column is what zstd makes of *byte planes*: the first bytes of all values (little-endian), then all second bytes,
and so on. The high bytes of token ids are zeros, and those of logprobs are few, so that planes compress to less than
the values side by side would, and faster. Columns hold int32 or float64: the low bytes of a float32 that was widened
to float64 are zeros, so logprobs take no more room than as float32, and any other float survives as well.
"""

from __future__ import annotations

import marshal
import sys
from array import array
from typing import Any, Literal

import zstandard

Kind = Literal["i", "d"]  # int32 and float64, as `array` calls them
# `marshal` writes a list as '[', its length, and for each value a type code and the value. Only floats have the code
# 'g' and only ints of 32 bits the code 'i' (a bool has another), so that the codes prove what the values are.
_MARSHAL = 2  # its version: the newest that writes every value in full
_LIST_HEAD = 5
_CODE: dict[Kind, bytes] = {"i": b"i", "d": b"g"}
_SIZE: dict[Kind, int] = {"i": 4, "d": 8}
_HUGE = (b"\x7f", b"\xff")  # the sign and the high exponent bits of what is over 1e300, infinite or NaN


def to_items(values: list[Any], kind: Kind) -> bytes | None:
    """The list as items of `item_size(kind)` bytes, for `compress`; None unless all are ints of 32 bits ("i") or all
    are floats of a sane size ("d"): neither NaN nor infinite nor over 1e300."""
    try:
        written = marshal.dumps(values, _MARSHAL)
    except ValueError:
        return None  # something that is no number at all
    step = item_size(kind)
    if len(written) != _LIST_HEAD + step * len(values):
        return None
    if written[_LIST_HEAD::step] != _CODE[kind] * len(values):
        return None
    if kind == "d":
        high = written[_LIST_HEAD + step - 1 :: step]
        if any(byte in high for byte in _HUGE):
            return None
    return written[_LIST_HEAD:]


def item_size(kind: Kind) -> int:
    return 1 + _SIZE[kind]


def compress(items: bytes, kind: Kind) -> bytes:
    """A column of items that `to_items` gave."""
    step = item_size(kind)
    planes = b"".join(items[i::step] for i in range(1, step))
    return zstandard.ZstdCompressor(level=1, write_checksum=True).compress(planes)


def decompress(column: bytes, kind: Kind, count: int) -> list[Any]:
    """The `count` values of a column. Raises ValueError or zstandard.ZstdError when it does not hold so many."""
    size = _SIZE[kind]
    if count < 0 or zstandard.frame_content_size(column) != count * size:
        raise ValueError("a column of another length than its header says")
    planes = zstandard.ZstdDecompressor().decompress(column)
    items = bytearray(len(planes))
    for i in range(size):
        items[i::size] = planes[i * count : (i + 1) * count]
    values = array(kind)
    values.frombytes(items)
    if sys.byteorder == "big":
        values.byteswap()
    return values.tolist()
