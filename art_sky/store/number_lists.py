"""Lists of numbers as arrays, and arrays as compressed columns, without a Python step for each number.

A column is what zstd makes of *byte planes*: the first bytes of all values (little-endian), then all second bytes,
and so on. The high bytes of token ids are zeros, and those of logprobs are few, so that planes compress to less than
the values side by side would, and faster. Arrays and columns hold int32 or float64: the low bytes of a float32 that
was widened to float64 are zeros, so logprobs take no more room than as float32, and any other float survives as well.
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


def to_array(values: Any, kind: Kind) -> array[Any] | None:
    """An array of the same numbers: `values` itself if it is one. None unless it is a list or array of nothing but
    ints of 32 bits ("i"), or floats of a sane size ("d"): neither NaN nor infinite nor over 1e300."""
    if type(values) is array and values.typecode == kind:
        found = values
    elif type(values) is list and (planes := _planes_of_list(values, kind)) is not None:
        found = _from_planes(planes, kind)
    else:
        return None
    return None if kind == "d" and any(byte in _high_bytes(found) for byte in _HUGE) else found


def are_token_ids(values: Any) -> bool:
    """Whether it is a list or array of ints from 0 to 2**31 - 1."""
    found = to_array(values, "i")
    return found is not None and _high_bytes(found).isascii()  # a negative number has the high bit set


def compress(values: array[Any]) -> bytes:
    """The column of an array of one of the kinds."""
    data, size = _little_endian(values).tobytes(), values.itemsize
    planes = b"".join(data[i::size] for i in range(size))
    return zstandard.ZstdCompressor(level=1, write_checksum=True).compress(planes)


def decompress(column: bytes, kind: Kind, count: int) -> array[Any]:
    """The `count` values of a column. Raises ValueError or zstandard.ZstdError when it does not hold so many."""
    if count < 0 or zstandard.frame_content_size(column) != count * _SIZE[kind]:
        raise ValueError("a column of another length than its header says")
    return _from_planes(zstandard.ZstdDecompressor().decompress(column), kind)


def _planes_of_list(values: list[Any], kind: Kind) -> bytes | None:
    try:
        written = marshal.dumps(values, _MARSHAL)
    except ValueError:
        return None  # something that is no number at all
    step = 1 + _SIZE[kind]
    if len(written) != _LIST_HEAD + step * len(values) or written[_LIST_HEAD::step] != _CODE[kind] * len(values):
        return None
    return b"".join(written[_LIST_HEAD + i :: step] for i in range(1, step))


def _from_planes(planes: bytes, kind: Kind) -> array[Any]:
    size = _SIZE[kind]
    count = len(planes) // size
    data = bytearray(len(planes))
    for i in range(size):
        plane = planes[i * count : (i + 1) * count]
        if plane.count(0) < count:  # else it is there already
            data[i::size] = plane
    values = array(kind)
    values.frombytes(data)
    return _little_endian(values)


def _high_bytes(values: array[Any]) -> bytes:
    return _little_endian(values).tobytes()[values.itemsize - 1 :: values.itemsize]


def _little_endian(values: array[Any]) -> array[Any]:
    """The values in the byte order of columns, or back: the same array except on big-endian machines."""
    if sys.byteorder == "little":
        return values
    swapped = values[:]
    swapped.byteswap()
    return swapped
