"""Sampled tokens to text as they come: whole characters only, and nothing past a stop string."""

from __future__ import annotations

from art_sky.server.vocabulary import Vocabulary

_UNSURE = "\ufffd"  # at the end of decoded text: perhaps the first bytes of a longer character
_MAX_HELD = 8  # tokens that may wait for the rest of a character; more are no text


class Detokenizer:
    """Text of a growing list of tokens. Each token costs the decoding of a few neighbours."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._context: list[int] = []  # tokens whose text is out, so that the next ones join on rightly
        self._held: list[int] = []
        self._out = 0  # characters of `_held` that are out

    def push(self, id: int) -> str:
        """The text that is sure now."""
        self._held.append(id)
        text = self._new_text()
        sure = text.rstrip(_UNSURE)
        if len(sure) == len(text) or len(self._held) > _MAX_HELD:
            return self._release(text)
        delta, self._out = sure[self._out :], max(self._out, len(sure))
        return delta

    def finish(self) -> str:
        """What was held back: the bytes of a character that never became whole, as U+FFFD."""
        return self._release(self._new_text())

    def _new_text(self) -> str:
        before = self._vocabulary.decode(self._context) if self._context else ""
        return self._vocabulary.decode(self._context + self._held)[len(before) :]

    def _release(self, text: str) -> str:
        delta = text[self._out :]
        self._context, self._held, self._out = self._held or self._context, [], 0
        return delta


class StopStrings:
    """Cuts text at the first stop string that becomes complete, and holds back what may be the start of one."""

    def __init__(self, stops: list[str]) -> None:
        self._stops = stops
        self._buffer = ""
        self._released = 0
        self.end: int | None = None  # characters up to and with the match, once there is one

    def push(self, text: str) -> str:
        """The text that may be shown; `end` is set when a stop string is complete, and the text ends there."""
        self._buffer += text
        found = min(((at + len(s), at) for s in self._stops if (at := self._buffer.find(s)) >= 0), default=None)
        if found is not None:
            end, start = found
            self.end = self._released + end
            shown, self._buffer = self._buffer[:start], ""
            return shown
        keep = max((n for s in self._stops if (n := overlap(self._buffer, s))), default=0)
        shown = self._buffer[: len(self._buffer) - keep]
        self._buffer = self._buffer[len(shown) :]
        self._released += len(shown)
        return shown

    def finish(self) -> str:
        shown, self._buffer = self._buffer, ""
        return shown


def overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a beginning of `stop`."""
    for n in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:n]):
            return n
    return 0
