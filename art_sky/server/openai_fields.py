"""What each field of an OpenAI chat completion request does here: the one table, and the request's type.

Unknown fields are accepted with a warning, so that newer clients keep working; a known field that would change
the answer and is not supported is refused by name (rule R6).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from art_sky.errors import Unsupported

_VLLM = "start the server with `--engine vllm` for it"
_TOOLS = "use tools and tool_choice"


@dataclass(frozen=True)
class Rule:
    """`refused` fields may still be sent with a `neutral` value (or null), which asks for nothing."""

    kind: Literal["supported", "no effect", "refused"]
    instead: str = "leave it out"
    neutral: tuple[Any, ...] = ()


_SUPPORTED = Rule("supported")
_NO_EFFECT = Rule("no effect")

FIELDS: dict[str, Rule] = {
    "model": _SUPPORTED,
    "messages": _SUPPORTED,
    "stream": _SUPPORTED,
    "stream_options": _SUPPORTED,
    "n": _SUPPORTED,
    "stop": _SUPPORTED,
    "seed": _SUPPORTED,
    "temperature": _SUPPORTED,
    "top_p": _SUPPORTED,
    "max_tokens": _SUPPORTED,
    "max_completion_tokens": _SUPPORTED,
    "logprobs": _SUPPORTED,
    "top_logprobs": _SUPPORTED,
    "tools": _SUPPORTED,
    # Extras that vLLM takes too:
    "top_k": _SUPPORTED,
    "min_p": _SUPPORTED,
    "chat_template_kwargs": _SUPPORTED,
    # What the answer does not depend on:
    "user": _NO_EFFECT,
    "metadata": _NO_EFFECT,
    "store": _NO_EFFECT,
    "service_tier": _NO_EFFECT,
    "safety_identifier": _NO_EFFECT,
    "prompt_cache_key": _NO_EFFECT,
    "prompt_cache_retention": _NO_EFFECT,
    "prediction": _NO_EFFECT,  # a hint for speed
    # What would change it:
    "tool_choice": Rule("refused", _VLLM, ("auto", "none")),
    "response_format": Rule("refused", _VLLM, ({"type": "text"},)),
    "parallel_tool_calls": Rule("refused", _VLLM, (True,)),
    "frequency_penalty": Rule("refused", neutral=(0,)),
    "presence_penalty": Rule("refused", neutral=(0,)),
    "repetition_penalty": Rule("refused", neutral=(1,)),
    "logit_bias": Rule("refused", neutral=({},)),
    "modalities": Rule("refused", neutral=(["text"],)),
    "audio": Rule("refused"),
    "functions": Rule("refused", _TOOLS),
    "function_call": Rule("refused", _TOOLS),
    "reasoning_effort": Rule("refused", "use chat_template_kwargs if the template has a switch"),
    "verbosity": Rule("refused"),
    "web_search_options": Rule("refused"),
    "moderation": Rule("refused"),
    "best_of": Rule("refused", "use n", (1,)),
    "use_beam_search": Rule("refused", neutral=(False,)),
    "ignore_eos": Rule("refused", neutral=(False,)),
    "min_tokens": Rule("refused", neutral=(0,)),
    "structured_outputs": Rule("refused", _VLLM),
    "guided_json": Rule("refused", _VLLM),
    "guided_regex": Rule("refused", _VLLM),
    "guided_choice": Rule("refused", _VLLM),
    "guided_grammar": Rule("refused", _VLLM),
}

StopText = Annotated[str, Field(min_length=1, max_length=1024)]


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)
    include_usage: bool | None = None


class ChatRequest(BaseModel):
    """The fields that are supported; null means the default, as in OpenAI's API."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)
    model: str
    messages: list[dict[str, Any]] = Field(min_length=1)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = Field(None, ge=1, le=128)
    stop: StopText | Annotated[list[StopText], Field(max_length=16)] | None = None
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=2**31)
    min_p: float | None = Field(None, ge=0, le=1)
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def token_limit(self) -> int | None:
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens


def check_fields(request: ChatRequest) -> list[str]:
    """Returns warnings for unknown fields; raises Unsupported for the refused ones."""
    warnings = []
    given = {name: getattr(request, name, None) for name in request.model_fields_set}
    for name, value in (given | (request.model_extra or {})).items():
        rule = FIELDS.get(name)
        if rule is None:
            warnings.append(f"unknown field {name[:80]!r} was ignored")
        elif rule.kind == "refused" and value is not None and not any(_same(value, n) for n in rule.neutral):
            raise Unsupported(f"{name} is not supported by this engine; {rule.instead}", field=name)
    if request.top_logprobs and not request.logprobs:
        raise Unsupported("top_logprobs needs logprobs: true; set both", field="top_logprobs")
    return warnings


def _same(value: Any, neutral: Any) -> bool:
    """Equal and of the same kind: 0 and 0.0 are the same, 0 and False are not."""
    return bool(value == neutral) and isinstance(value, bool) == isinstance(neutral, bool)
