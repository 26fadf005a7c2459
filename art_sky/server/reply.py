"""One choice of a reply: from sampled tokens to an OpenAI Choice that carries them (rule R1)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from art_sky.inference.protocol import GenerateRequest, TokenDelta
from art_sky.schemas import Sampling
from art_sky.server.detokenize import Detokenizer, StopStrings
from art_sky.server.tools import Part, ReplyParser, new_call_id
from art_sky.server.vocabulary import Vocabulary

_LOWEST = -9999.0  # what OpenAI writes for a probability of 0

Finish = Literal["stop", "length", "tool_calls"]


@dataclass
class Reply:
    """Collects one sequence. `push` and `finish` return the parts of the message that became sure."""

    vocabulary: Vocabulary
    parser: ReplyParser
    stops: StopStrings
    end_ids: frozenset[int]
    token_ids: list[int] = field(default_factory=list)
    token_logprobs: list[float] = field(default_factory=list)
    text: str = ""  # raw, up to a stop string
    end_id: int | None = None  # the end-of-turn token, when one was sampled
    finish_reason: Finish | None = None
    cached_tokens: int | None = None
    calls: list[dict[str, Any]] = field(default_factory=list)
    content: str = ""
    reasoning: str = ""

    def __post_init__(self) -> None:
        self._tops: list[list[tuple[int, float]]] = []
        self._starts: list[int] = []  # characters that were sure before each token
        self._sure = 0
        self._detokenizer = Detokenizer(self.vocabulary)

    @property
    def stopped(self) -> bool:
        """A stop string is complete: nothing more is wanted."""
        return self.stops.end is not None

    def push(self, delta: TokenDelta) -> list[Part]:
        self.token_ids.append(delta.token_id)
        self.token_logprobs.append(delta.logprob)
        self._tops.append(delta.top)
        self._starts.append(self._sure)
        if delta.token_id in self.end_ids:
            self.end_id = delta.token_id
            return []
        return self._parts(self._detokenizer.push(delta.token_id))

    def finish(self, reason: Literal["stop", "length"]) -> list[Part]:
        parts = [] if self.stopped else self._parts(self._detokenizer.finish())
        if self.stopped:
            self._drop_tokens_after_stop()
            reason = "stop"
        else:
            parts += self._parse(self.stops.finish())
        parts += self._take(self.parser.finish())
        self.finish_reason = "tool_calls" if self.calls and reason == "stop" else reason
        return parts

    def choice(self, index: int, prompt_ids: list[int], sampling: Sampling, top: int | None) -> dict[str, Any]:
        """The OpenAI Choice. `top`: None without logprobs, else how many alternatives a token."""
        message: dict[str, Any] = {
            "role": "assistant",
            "content": None if self.calls and not self.content else self.content,
            "refusal": None,
        }
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.calls:
            message["tool_calls"] = self.calls
        return {
            "index": index,
            "message": message,
            "finish_reason": self.finish_reason,
            "logprobs": self.logprobs(0, top),
            **self.capture(prompt_ids, sampling),
        }

    def capture(self, prompt_ids: list[int], sampling: Sampling) -> dict[str, Any]:
        """The four extra fields of a Choice."""
        return {
            "prompt_token_ids": prompt_ids,
            "token_ids": self.token_ids,
            "token_logprobs": self.token_logprobs,
            "sampling": sampling.model_dump(),
        }

    def logprobs(self, start: int, top: int | None) -> dict[str, Any] | None:
        """OpenAI's `logprobs` for the tokens from `start` on."""
        if top is None:
            return None
        content = []
        for i in range(start, len(self.token_ids)):
            entry = self._entry(self.token_ids[i], self.token_logprobs[i])
            entry["top_logprobs"] = [self._entry(id, logprob) for id, logprob in self._tops[i][:top]]
            content.append(entry)
        return {"content": content, "refusal": None}

    def _entry(self, id: int, logprob: float) -> dict[str, Any]:
        text, raw = self.vocabulary.token_text(id), self.vocabulary.token_bytes(id)
        return {"token": text, "logprob": max(logprob, _LOWEST), "bytes": raw}

    def _parts(self, sure: str) -> list[Part]:
        self._sure += len(sure)
        return self._parse(self.stops.push(sure))

    def _parse(self, shown: str) -> list[Part]:
        self.text += shown
        return self._take(self.parser.push(shown))

    def _take(self, parts: list[Part]) -> list[Part]:
        for i, part in enumerate(parts):
            if part.kind == "content":
                self.content += part.text
            elif part.kind == "reasoning_content":
                self.reasoning += part.text
            elif part.call is not None:
                id = new_call_id()
                parts[i] = part._replace(text=id)
                self.calls.append({"id": id, "type": "function", "function": part.call})
        return parts

    def _drop_tokens_after_stop(self) -> None:
        end = self.stops.end
        assert end is not None
        keep = next((i for i, start in enumerate(self._starts) if start >= end), len(self.token_ids))
        del self.token_ids[keep:], self.token_logprobs[keep:], self._tops[keep:]


def sampling_of(request: GenerateRequest, completion_id: str, model: str) -> Sampling:
    return Sampling(
        completion_id=completion_id, model=model, temperature=request.temperature, comparable=request.comparable
    )
