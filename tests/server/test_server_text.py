"""Text as it streams: whole characters, stop strings, tool calls, reasoning. Pieces never change the result."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from server_fakes import CHATML_TOOLS, Harness, assembled

from art_sky.errors import InvalidBody, InvalidConfig, InvalidInput
from art_sky.server.detokenize import Detokenizer, StopStrings
from art_sky.server.render import ChatTemplate, encode
from art_sky.server.tools import Part, ReplyParser, parse_call
from art_sky.server.vocabulary import Vocabulary
from art_sky.server.wire_json import loads

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "x"}}\n</tool_call>'
TOOL = {"type": "function", "function": {"name": "add", "description": "adds", "parameters": {"type": "object"}}}


@pytest.fixture(scope="session")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Vocabulary:
    """A tokenizer whose tokens are single bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tok = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tok.decoder = decoders.ByteLevel()
    tok.add_special_tokens(["<|end|>"])
    folder = tmp_path_factory.mktemp("bytes")
    tok.save(str(folder / "tokenizer.json"))
    return Vocabulary(folder)


@given(text=st.text(max_size=60))
def test_detokenizer_gives_whole_characters(byte_level: Vocabulary, text: str) -> None:
    detokenizer = Detokenizer(byte_level)
    ids = byte_level.encode(text)
    assert [b for i in ids for b in byte_level.token_bytes(i)] == list(text.encode())
    pieces = [detokenizer.push(i) for i in ids]
    assert "".join(pieces) + detokenizer.finish() == text
    assert all("\ufffd" not in p for p in pieces) or "\ufffd" in text


@given(ids=st.lists(st.integers(0, 256), max_size=40))
def test_detokenizer_takes_any_tokens(byte_level: Vocabulary, ids: list[int]) -> None:
    detokenizer = Detokenizer(byte_level)
    "".join(detokenizer.push(i) for i in ids) + detokenizer.finish()


@given(
    text=st.text("ab<", max_size=20),
    stops=st.lists(st.text("ab<", min_size=1, max_size=4), max_size=3),
    cuts=st.lists(st.integers(1, 4), max_size=20),
)
def test_stop_strings_do_not_depend_on_pieces(text: str, stops: list[str], cuts: list[int]) -> None:
    def run(pieces: list[str]) -> tuple[str, int | None]:
        finder, shown = StopStrings(stops), ""
        for piece in pieces:
            shown += finder.push(piece)
            if finder.end is not None:
                return shown, finder.end
        return shown + finder.finish(), None

    pieces, rest = [], text
    for cut in cuts:
        pieces, rest = [*pieces, rest[:cut]], rest[cut:]
    whole = run([text])
    assert run([*pieces, rest]) == whole == run(list(text))
    if whole[1] is None:
        assert whole[0] == text and not any(s in text for s in stops)
    else:
        assert any(text[: whole[1]] == whole[0] + s for s in stops)


def run_parser(pieces: list[str], **how: Any) -> tuple[str, str, list[dict[str, str] | None]]:
    parser = ReplyParser(**how)
    parts: list[Part] = []
    for piece in pieces:
        parts += parser.push(piece)
    parts += parser.finish()
    text = {k: "".join(p.text for p in parts if p.kind == k) for k in ("content", "reasoning_content")}
    return text["content"], text["reasoning_content"], [p.call for p in parts if p.kind == "tool_call"]


@pytest.mark.parametrize(
    ("text", "content", "names"),
    [
        ("just text ", "just text ", []),
        (CALL, "", ["add"]),
        (f"Let me see.\n{CALL}\n{CALL}\n", "Let me see.", ["add", "add"]),
        (CALL.removesuffix("</tool_call>"), "", ["add"]),
        ("<tool_call>{broken}</tool_call>", "<tool_call>{broken}</tool_call>", []),
        ("a <tool_call>{1} </tool_call> b ", "a <tool_call>{1} </tool_call> b ", []),
        (
            '<tool_call>{"name": 3, "arguments": {}}</tool_call>',
            '<tool_call>{"name": 3, "arguments": {}}</tool_call>',
            [],
        ),
        ('<tool_call>{"name": "f"}</tool_call>', "", ["f"]),
        ("<tool_call>", "<tool_call>", []),
        ("1 < 2 <tool", "1 < 2 <tool", []),
    ],
)
def test_hermes_calls(text: str, content: str, names: list[str]) -> None:
    for pieces in ([text], list(text), [text[i : i + 3] for i in range(0, len(text), 3)]):
        found = run_parser(pieces, tools=True, think=False)
        assert found[0] == content
        assert [c["name"] for c in found[2] if c] == names


@given(text=st.text(st.sampled_from('<>/tolca_{}" \n:,1'), max_size=40), size=st.integers(1, 5))
def test_parsers_do_not_depend_on_pieces(text: str, size: int) -> None:
    pieces = [text[i : i + size] for i in range(0, len(text), size)]
    for how in ({"tools": True, "think": False}, {"tools": True, "think": True}):
        assert run_parser(pieces, **how) == run_parser([text], **how)


def test_call_keeps_the_text_of_its_arguments() -> None:
    assert parse_call('{"arguments": {"b":2,  "a": [1.50]}, "name": "f"}') == {
        "name": "f",
        "arguments": '{"b":2,  "a": [1.50]}',
    }
    assert parse_call('{"name": "f", "arguments": "{\\"a\\": 1}"}') == {"name": "f", "arguments": '{"a": 1}'}
    for bad in ('{"name": "f", "arguments": {"a": NaN}}', "", "{", '{"name"}', "[1]", '{"name": "f"} x', "[" * 9999):
        assert parse_call(bad) is None


@pytest.mark.parametrize(
    ("text", "inside", "content", "reasoning"),
    [
        ("<think>\nhm</think>\n\nyes", False, "yes", "\nhm"),
        ("hm</think>yes", True, "yes", "hm"),
        ("yes", False, "yes", ""),
        ("<think>never ends", False, "", "never ends"),
        ("<thin", False, "<thin", ""),
    ],
)
def test_reasoning(text: str, inside: bool, content: str, reasoning: str) -> None:
    for pieces in ([text], list(text)):
        assert run_parser(pieces, tools=False, think=True, inside=inside)[:2] == (content, reasoning)


async def test_tools_round_trip(bare: Harness) -> None:
    assert (await bare.register(options={"chat_template": CHATML_TOOLS})).status_code == 200
    bare.engine.script = lambda r: [f"ok\n{CALL}", 2]
    ask = [{"role": "user", "content": "add"}]
    choice = await bare.say(ask, tools=[TOOL])
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] == "ok"
    (call,) = choice["message"]["tool_calls"]
    assert call["function"] == {"name": "add", "arguments": '{"a": 1, "b": "x"}'} and call["type"] == "function"
    made, _ = assembled((await bare.chat(ask, tools=[TOOL], stream=True)).text)
    assert made[0]["message"]["content"] == "ok" and made[0]["last"]["finish_reason"] == "tool_calls"
    assert made[0]["tool_calls"][0]["function"] == call["function"]
    # Sent back as received: content None, arguments a string.
    bare.engine.script = lambda r: [CALL, 2]
    choice = await bare.say(ask, tools=[TOOL])
    message = choice["message"]
    assert message["content"] is None
    again = await bare.say([*ask, message, {"role": "tool", "tool_call_id": call["id"], "content": "2"}], tools=[TOOL])
    sampled = choice["prompt_token_ids"] + choice["token_ids"]
    assert again["prompt_token_ids"][: len(sampled)] == sampled
    # With tool_choice none, and for text that is no call, text stays text.
    assert (await bare.say(ask, tools=[TOOL], tool_choice="none"))["message"]["content"] == CALL
    bare.engine.script = lambda r: ["<tool_call>{oops}</tool_call>", 2]
    assert (await bare.say(ask, tools=[TOOL]))["message"]["content"] == "<tool_call>{oops}</tool_call>"
    bad = await bare.chat(ask, tools=[{"function": {}}])
    assert bad.status_code == 422


def test_templates(tiny_model: Path) -> None:
    vocabulary = Vocabulary(tiny_model)
    assert vocabulary.specials == {"<|endoftext|>": 0, "<|im_start|>": 1, "<|im_end|>": 2}
    template = ChatTemplate(vocabulary, None)
    assert template.end_ids == [2] and not template.takes_tools
    with pytest.raises(InvalidConfig, match="compiled"):
        ChatTemplate(vocabulary, "{% if %}")
    refusing = ChatTemplate(vocabulary, "{{ raise_exception('only users') }}")
    with pytest.raises(InvalidInput, match="only users"):
        refusing.render([{"role": "user", "content": "x"}], None)
    with pytest.raises(InvalidBody, match="messages"):
        template.render([{"role": "user", "content": "x"}], None, {"messages": []})
    switch = ChatTemplate(
        vocabulary, "{% generation %}{{ 1 if think else 2 }}{% endgeneration %}{{ {'é': 1} | tojson }}"
    )
    assert switch.render([{"role": "user", "content": "x"}], None, {"think": True}).text == '1{"é": 1}'
    unsafe = ChatTemplate(vocabulary, "{{ ''.__class__.__mro__ }}{{ messages.__class__ }}")
    with pytest.raises(InvalidInput):
        unsafe.render([{"role": "user", "content": "x"}], None)


@given(text=st.text(st.sampled_from("<|im_end>start\U000f0000\ud800x"), max_size=60))
def test_no_text_becomes_a_control_token(tiny_model: Path, text: str) -> None:
    vocabulary = _tiny(tiny_model)
    rendered = ChatTemplate(vocabulary, None).render([{"role": "user", "content": text}], None)
    ids = encode(vocabulary, rendered.text, rendered.marker)
    assert [i for i in ids if i < 3] == [1, 2, 1]


_made: dict[Path, Vocabulary] = {}


def _tiny(folder: Path) -> Vocabulary:
    return _made.setdefault(folder, Vocabulary(folder))


@given(
    data=st.binary(max_size=60) | st.text(st.sampled_from('[]{}":,1eE+-.NaInfity \\ud8'), max_size=60).map(str.encode)
)
def test_json_is_read_or_refused(data: bytes) -> None:
    with contextlib.suppress(InvalidBody):
        loads(data)
