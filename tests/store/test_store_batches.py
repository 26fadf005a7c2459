"""The file format of batches and logged trajectories: everything comes back, and nothing else is accepted."""

from __future__ import annotations

import io
import json
import random
import shutil
import struct
import subprocess
from array import array
from pathlib import Path
from typing import Any

import pytest
import zstandard
from hypothesis import example, given, settings
from hypothesis import strategies as st

from art_sky.errors import CorruptObject, InvalidInput
from art_sky.store import batches, number_lists
from art_sky.store.batches import decode_batch, encode_batch
from art_sky.trajectories import plain as to_lists

# --- what comes back ---

token = st.integers(0, 2**31 - 1) | st.integers(0, 300)
logprob = st.floats(max_value=0, width=32, allow_nan=False, allow_infinity=False)
plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5) | st.just("at"), inner, max_size=3),
    max_leaves=5,
)
numbers = (
    st.lists(token, min_size=1, max_size=6)
    | st.lists(logprob, max_size=6)
    | st.lists(token | st.booleans() | st.floats(allow_nan=False, allow_infinity=False) | plain, max_size=4)
    | plain
)
choice = st.fixed_dictionaries(
    {"message": st.just({"role": "assistant", "content": "hi"}), "index": st.just(0)},
    optional={"prompt_token_ids": numbers, "token_ids": numbers, "token_logprobs": numbers, "other": plain},
)
items = st.lists(choice | st.fixed_dictionaries({"role": st.text(max_size=4)}) | plain, max_size=4) | plain
history = st.fixed_dictionaries({"messages_and_choices": items, "tools": plain}) | plain
trajectory = st.fixed_dictionaries(
    {"messages_and_choices": items, "reward": st.floats(-1, 1)},
    optional={"additional_histories": st.lists(history, max_size=2) | plain},
)
group = st.fixed_dictionaries({"trajectories": st.lists(trajectory | plain, max_size=3), "metadata": plain})


@settings(max_examples=300, deadline=None)
@given(st.lists(group, max_size=3))
@example([{"trajectories": [{"messages_and_choices": [{"token_ids": {"at": [0, 1]}}, {"token_ids": [True, 1]}]}]}])
@example([{"trajectories": [{"messages_and_choices": [{"token_logprobs": [1.7e308, -0.0]}, {"token_ids": [1.0]}]}]}])
def test_everything_comes_back(groups: list[dict[str, Any]]) -> None:
    before = json.dumps(groups)
    # As text, because == takes 1, 1.0 and True for the same.
    assert json.dumps(read_lists(encode_batch(groups))) == before == json.dumps(groups)


def a_choice(prompt: list[int], answer: list[int], logprobs: list[float] | None = None) -> dict[str, Any]:
    return {
        "index": 0,
        "message": {"role": "assistant", "content": "é\ud800"},
        "prompt_token_ids": prompt,
        "token_ids": answer,
        "token_logprobs": logprobs or [-0.5] * len(answer),
    }


def a_group(*histories: list[Any]) -> dict[str, Any]:
    return {"trajectories": [{"messages_and_choices": h, "reward": 0.5} for h in histories]}


def header(data: bytes) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(lines(data)[0])
    return found


def lines(data: bytes) -> list[bytes]:
    return zstandard.ZstdDecompressor().decompress(data).splitlines()


def read_lists(data: bytes) -> list[dict[str, Any]]:
    read: list[dict[str, Any]] = to_lists(decode_batch(data))
    return read


def test_shared_tokens_are_stored_once() -> None:
    prompt = list(range(50))
    turns = [a_choice(prompt, [100, 101]), {"role": "user"}, a_choice([*prompt, 100, 101, 7], [102])]
    siblings = [[a_choice(prompt, [200 + i])] for i in range(3)]
    unlike = [a_choice([*prompt[:-1], 999], [300])]
    data = encode_batch([a_group(turns, *siblings, unlike)])
    assert header(data)["ids"][0] == 50 + 2 + 1 + 1 + 3 + 51
    assert read_lists(data) == [a_group(turns, *siblings, unlike)]
    other_group = encode_batch([a_group(turns)] * 2)
    assert header(other_group)["ids"][0] == 2 * 54
    first, second = decode_batch(other_group)[0]["trajectories"][0]["messages_and_choices"][0::2]
    first["prompt_token_ids"].append(1)  # the lists are nevertheless each one's own
    assert second["prompt_token_ids"][:51].tolist() == [*prompt, 100]


def test_a_second_turn_on_a_shared_prompt_is_pieced_together() -> None:
    prompt = list(range(40))
    histories = [[a_choice(prompt, [n]), a_choice([*prompt, n, 8], [n + 1]), a_choice([1], [n])] for n in (60, 70)]
    data = encode_batch([a_group(*histories)])
    assert header(data)["ids"][0] == 40 + 2 * 4 + 1
    assert b'"at":[0,40,' in lines(data)[1]
    assert read_lists(data) == [a_group(*histories)]


def test_any_float_is_exact_and_float32_takes_four_bytes() -> None:
    draw = random.Random(1)
    wide = [-draw.expovariate(1) for _ in range(4000)]
    single = [struct.unpack("f", struct.pack("f", x))[0] for x in wide]
    data = {n: encode_batch([a_group([a_choice([1], [2] * 4000, v)])]) for n, v in (("64", wide), ("32", single))}
    assert [g["trajectories"][0]["messages_and_choices"][0]["token_logprobs"] for g in read_lists(data["64"])] == [wide]
    assert read_lists(data["32"]) == [a_group([a_choice([1], [2] * 4000, single)])]
    assert len(data["32"]) < 4 * 4000 < len(data["64"]) < 8 * 4000


@pytest.mark.skipif(shutil.which("zstdcat") is None, reason="no zstd here")
def test_zstdcat_shows_the_lines_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl.zst"
    path.write_bytes(encode_batch([a_group([a_choice([1], [2])])]))
    shown = subprocess.run(["zstdcat", path], capture_output=True, check=True).stdout
    assert shown.splitlines() == lines(path.read_bytes()) and json.loads(shown.splitlines()[1])


def test_a_decompressor_that_reads_all_frames_passes_over_the_numbers() -> None:
    data = encode_batch([a_group([a_choice([1], [2])])])
    shown = zstandard.ZstdDecompressor().stream_reader(io.BytesIO(data), read_across_frames=True).read()
    assert shown.splitlines() == lines(data)


def test_the_same_groups_give_the_same_bytes() -> None:
    assert encode_batch([a_group([a_choice([1], [2])])]) == encode_batch(iter([a_group([a_choice([1], [2])])]))


def test_arrays_and_lists_give_the_same_bytes() -> None:
    ids, logprobs = [1, 2**31 - 1, -(2**31), 0], [-0.5, 0.1, -1e300, 0.0]
    as_lists = encode_batch([a_group([a_choice(ids, ids, logprobs)])])
    as_arrays = encode_batch([a_group([{**a_choice([], []), **{
        "prompt_token_ids": array("i", ids), "token_ids": array("i", ids), "token_logprobs": array("d", logprobs)
    }}])])  # fmt: skip
    assert as_lists == as_arrays
    (read,) = decode_batch(as_lists)[0]["trajectories"][0]["messages_and_choices"]
    assert (read["token_ids"], read["token_logprobs"]) == (array("i", ids), array("d", logprobs))


@pytest.mark.parametrize(
    ("field", "value"),
    [("token_logprobs", array("d", [float("nan")])), ("token_ids", array("d", [1.0])), ("token_ids", array("i"))],
)
def test_arrays_that_are_no_column_are_refused(field: str, value: Any) -> None:
    with pytest.raises(InvalidInput, match="group 1 cannot be written"):
        encode_batch([a_group(), a_group([{**a_choice([1], [2]), field: value}])])


@given(st.lists(st.integers(-(2**31), 2**31 - 1)), st.lists(st.floats(-1e299, 1e299)))
def test_arrays_hold_what_the_lists_held(ids: list[int], floats: list[float]) -> None:
    cases: list[tuple[list[Any], number_lists.Kind]] = [(ids, "i"), (floats, "d")]
    for values, kind in cases:
        made = number_lists.to_array(values, kind)
        assert made == array(kind, values)
        assert number_lists.decompress(number_lists.compress(made), kind, len(values)) == made
    assert number_lists.are_token_ids(ids) == all(i >= 0 for i in ids)


def test_format_1_is_read() -> None:
    groups = [a_group([a_choice([1, 2], [3])])]
    assert decode_batch(written({"format": 1, "kind": batches.KIND}, *groups)) == groups


# --- what is refused ---


def written(*values: Any, tail: bytes = b"") -> bytes:
    return zstandard.ZstdCompressor().compress(b"".join(json.dumps(v).encode() + b"\n" for v in values)) + tail


@pytest.mark.parametrize("value", [{1, 2}, float("nan"), [float("inf")], object(), b"x"])
def test_what_json_cannot_say_is_refused(value: Any) -> None:
    for field in ("other", "token_ids", "token_logprobs"):
        bad = a_group([{**a_choice([1], [2]), field: value}])
        with pytest.raises(InvalidInput, match="group 1 cannot be written"):
            encode_batch([a_group(), bad])


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf")])
def test_logprobs_are_finite(wrong: float) -> None:
    with pytest.raises(InvalidInput, match="group 0"):
        encode_batch([a_group([a_choice([1], [2, 3], [-0.5, wrong])])])


def test_endless_nesting_is_refused() -> None:
    nested: dict[str, Any] = {}
    nested["trajectories"] = [nested]
    with pytest.raises(InvalidInput, match="group 0"):
        encode_batch([nested])


SAMPLE = encode_batch([a_group([a_choice(list(range(20)), [1, 2, 3]), a_choice([5], [6])]), a_group([])])


def test_cut_short_is_corrupt() -> None:
    for end in range(len(SAMPLE)):
        with pytest.raises(CorruptObject):
            decode_batch(SAMPLE[:end])


def test_a_flipped_bit_is_corrupt() -> None:
    whole = decode_batch(SAMPLE)
    for bit in range(8 * len(SAMPLE)):
        damaged = bytearray(SAMPLE)
        damaged[bit // 8] ^= 1 << bit % 8
        try:
            # A few bits of a frame's header mean nothing (reserved ones, and how large a window to keep).
            assert decode_batch(bytes(damaged)) == whole
        except CorruptObject:
            continue


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=80))
def test_noise_is_corrupt(data: bytes) -> None:
    for noise in (data, SAMPLE[:4] + data, zstandard.ZstdCompressor().compress(data)):
        with pytest.raises(CorruptObject):
            decode_batch(noise)


COLUMNS = number_lists.compress(array("i", [1, 1, 1])), number_lists.compress(array("d"))
SIDECAR = b"".join((bytes.fromhex("502a4d18"), sum(map(len, COLUMNS)).to_bytes(4, "little"), *COLUMNS))
HEAD = {"format": 2, "kind": batches.KIND, "ids": [3, len(COLUMNS[0])], "logprobs": [0, len(COLUMNS[1])]}


def referring(value: Any, **head: Any) -> bytes:
    return written({**HEAD, **head}, a_group([{"message": {}, "token_ids": value}]), tail=SIDECAR)


def test_a_batch_made_by_hand_is_read() -> None:
    (read,) = read_lists(referring({"at": [0, 3, 1, 1]}))
    assert read["trajectories"][0]["messages_and_choices"][0]["token_ids"] == [1, 1, 1, 1]


@pytest.mark.parametrize(
    "at",
    [[0, 4], [3, 1], [-1, 1], [0, -1], [1, -1], [0], [0, 1, 2], [2**70, 1], [0, 2**70], [0.0, 1.0], ["0", "1"],
     [None, 1], None, 3, "ab", {}, [[0, 1]], {"a": 1}],
)  # fmt: skip
def test_hostile_references_are_corrupt(at: Any) -> None:
    with pytest.raises(CorruptObject):
        decode_batch(referring({"at": at}))


@pytest.mark.parametrize("value", [{}, {"att": [0, 1]}, {"ids": 1}])
def test_dicts_that_are_no_references_are_corrupt(value: Any) -> None:
    with pytest.raises(CorruptObject):
        decode_batch(referring(value))


@pytest.mark.parametrize("field", ["ids", "logprobs"])
@pytest.mark.parametrize(
    "value", [None, 3, [], [3], [3, 3, 3], [2, 21], [-3, -21], [2**60, 21], [3, 2**40], ["3", "21"], [3.0, 21.0], {}]
)
def test_hostile_headers_are_corrupt(field: str, value: Any) -> None:
    with pytest.raises(CorruptObject):
        decode_batch(referring([1], **{field: value}))


@pytest.mark.parametrize("head", [{"format": 3}, {"format": "2"}, {"kind": "zip"}])
def test_other_formats_say_what_to_install(head: dict[str, Any]) -> None:
    with pytest.raises(CorruptObject, match="install the art-sky that wrote it"):
        decode_batch(referring([1], **head))


def test_overlapping_pieces_cannot_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "MAX_NUMBERS", 1000)
    assert decode_batch(referring({"at": [0, 3] * 300}))
    with pytest.raises(CorruptObject):
        decode_batch(referring({"at": [0, 3] * 400}))
    with pytest.raises(InvalidInput, match="send fewer groups"):
        encode_batch([a_group([a_choice([1], [2] * 600)])])


def test_bombs_are_refused_before_they_go_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "MAX_BYTES", 1 << 20)
    bomb = zstandard.ZstdCompressor().compress(b" " * (2 << 20))
    assert len(bomb) < 1000
    with pytest.raises(CorruptObject, match="over"):
        decode_batch(bomb)
    unsized = zstandard.ZstdCompressor(write_content_size=False).compress(b" " * (2 << 20))
    with pytest.raises(CorruptObject):
        decode_batch(unsized)
    column = zstandard.ZstdCompressor().compress(bytes(4 << 20))
    with pytest.raises(ValueError, match="another length"):
        number_lists.decompress(column, "i", 3)
