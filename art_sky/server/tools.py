"""Raw reply text to what OpenAI's API calls content, reasoning_content and tool_calls, as it streams in.

Whole replies are parsed by the same code fed with one piece, so that streamed and whole answers agree.
"""

from __future__ import annotations

import json
import secrets
from typing import Any, Literal, NamedTuple

from art_sky.server.detokenize import overlap

_CALL, _END_CALL = "<tool_call>", "</tool_call>"
_THINK, _END_THINK = "<think>", "</think>"


class Part(NamedTuple):
    """A piece of the reply. `call` is {"name", "arguments"}, with the arguments as the model wrote them."""

    kind: Literal["content", "reasoning_content", "tool_call"]
    text: str = ""
    call: dict[str, str] | None = None


class ReplyParser:
    """`tools`: parse hermes calls. `think`: split reasoning off; `inside`: the prompt has opened it already."""

    def __init__(self, *, tools: bool, think: bool, inside: bool = False) -> None:
        self._hermes = _Hermes() if tools else None
        self._think = _Think(inside) if think else None

    def push(self, text: str) -> list[Part]:
        if self._think is None:
            return self._content(text)
        reasoning, content = self._think.push(text)
        return _reasoning(reasoning) + self._content(content)

    def finish(self) -> list[Part]:
        parts: list[Part] = []
        if self._think is not None:
            reasoning, content = self._think.finish()
            parts = _reasoning(reasoning) + self._content(content)
        return parts + (self._hermes.finish() if self._hermes else [])

    def _content(self, text: str) -> list[Part]:
        if self._hermes is not None:
            return self._hermes.push(text)
        return [Part("content", text)] if text else []


def new_call_id() -> str:
    return "call_" + secrets.token_hex(12)


def parse_call(text: str) -> dict[str, str] | None:
    """The call in the text between hermes tags, or None when it is malformed."""
    try:
        items = _object_items(text.strip())
    except (ValueError, IndexError, RecursionError):
        return None
    name, arguments = items.get("name", (None, ""))[0], items.get("arguments", ({}, "{}"))
    if isinstance(arguments[0], str):  # some models write the arguments as a JSON string
        try:
            arguments = (_DECODER.decode(arguments[0]), arguments[0])
        except (ValueError, RecursionError):
            return None
    if not isinstance(name, str) or not name or not isinstance(arguments[0], dict):
        return None
    return {"name": name, "arguments": arguments[1]}


class _Hermes:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, any number of them, between text.

    A call is held back until it is whole. White space around calls is layout and dropped; a malformed call stays
    text with everything around it.
    """

    def __init__(self) -> None:
        self._buffer = ""  # text not yet decided on
        self._space = ""  # white space that is content unless a call stands next to it
        self._in_call = False
        self._after_call = False

    def push(self, text: str) -> list[Part]:
        self._buffer += text
        parts: list[Part] = []
        while True:
            if self._in_call:
                body, end, rest = self._buffer.partition(_END_CALL)
                if not end:
                    return parts
                parts += self._close(body, end)
                self._buffer = rest
            else:
                before, tag, rest = self._buffer.partition(_CALL)
                if not tag:
                    keep = overlap(self._buffer, _CALL)
                    cut = len(self._buffer) - keep
                    parts += self._text(self._buffer[:cut])
                    self._buffer = self._buffer[cut:]
                    return parts
                parts += self._text(before)
                self._buffer, self._in_call = rest, True

    def finish(self) -> list[Part]:
        parts = self._close(self._buffer, "") if self._in_call else self._text(self._buffer)
        if self._space and not self._after_call:
            parts.append(Part("content", self._space))
        self._buffer = self._space = ""
        return parts

    def _text(self, text: str) -> list[Part]:
        whole = self._space + text
        body = whole.rstrip()
        self._space = whole[len(body) :]
        if not body:
            return []
        if self._after_call:
            body, self._after_call = body.lstrip(), False
        return [Part("content", body)]

    def _close(self, body: str, end: str) -> list[Part]:
        self._in_call = False
        call = parse_call(body)
        if call is None:
            return self._text(_CALL + body + end)
        self._space, self._after_call = "", True
        return [Part("tool_call", call=call)]


class _Think:
    """`<think>reasoning</think>content`, at the beginning of a reply only."""

    def __init__(self, inside: bool) -> None:
        self._state: Literal["start", "inside", "after", "content"] = "inside" if inside else "start"
        self._buffer = ""

    def push(self, text: str) -> tuple[str, str]:
        self._buffer += text
        reasoning = ""
        if self._state == "start":
            begun = self._buffer.lstrip()
            if _THINK.startswith(begun) and len(begun) < len(_THINK):
                return "", ""
            if begun.startswith(_THINK):
                self._state, self._buffer = "inside", begun[len(_THINK) :]
            else:
                self._state = "content"
        if self._state == "inside":
            before, tag, rest = self._buffer.partition(_END_THINK)
            if tag:
                reasoning, self._buffer, self._state = before, rest, "after"
            else:
                cut = len(self._buffer) - overlap(self._buffer, _END_THINK)
                reasoning, self._buffer = self._buffer[:cut], self._buffer[cut:]
                return reasoning, ""
        if self._state == "after":
            self._buffer = self._buffer.lstrip("\n")
            if self._buffer:
                self._state = "content"
        content, self._buffer = self._buffer, ""
        return reasoning, content

    def finish(self) -> tuple[str, str]:
        rest, self._buffer = self._buffer, ""
        return (rest, "") if self._state == "inside" else ("", rest)


def _reasoning(text: str) -> list[Part]:
    return [Part("reasoning_content", text)] if text else []


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_no_constant)


def _object_items(text: str) -> dict[str, tuple[Any, str]]:
    """The members of a JSON object with the text of each value. Raises ValueError or IndexError if it is none."""
    items: dict[str, tuple[Any, str]] = {}
    at = _expect(text, 0, "{")
    if text[at] == "}":
        at = _expect(text, at, "}")
    else:
        while True:
            key, end = _DECODER.raw_decode(text, at)
            start = _expect(text, _skip(text, end), ":")
            value, end = _DECODER.raw_decode(text, start)
            if not isinstance(key, str):
                raise ValueError("a key is no string")
            items[key] = (value, text[start:end])
            at = _skip(text, end)
            if text[at] == "}":
                at = _skip(text, at + 1)
                break
            at = _expect(text, at, ",")
    if at != len(text):
        raise ValueError("text after the object")
    return items


def _expect(text: str, at: int, character: str) -> int:
    if text[at] != character:
        raise ValueError(f"no {character}")
    return _skip(text, at + 1)


def _skip(text: str, at: int) -> int:
    while at < len(text) and text[at] in " \t\r\n":
        at += 1
    return at
