"""From conversations to what is trained in supervised fine-tuning: exact tokens of every assistant's turn.

A turn is rendered as the model would meet it in use: the prompt with which it would be asked, and behind it what it
would have to write, its token that ends the turn included. Where a template does not write the prompt's beginning
again in front of the reply, what would be trained is not what is sampled later, and the batch is refused.

A trained turn becomes a choice with `prompt_token_ids` and `token_ids`, like a sampled one but without comparable
logprobs. Choices that carry their tokens keep them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from art_sky.config import SFTConfig
from art_sky.errors import InvalidBody, InvalidInput, Unsupported
from art_sky.server.render import ChatTemplate, encode
from art_sky.server.vocabulary import Vocabulary
from art_sky.store.batches import Group, is_choice
from art_sky.training.choices import check_examples, histories, is_assistant


def as_examples(
    groups: Sequence[Mapping[str, Any]], template: ChatTemplate, vocabulary: Vocabulary, config: SFTConfig
) -> list[Group]:
    """The batch with a choice for every turn to be trained, and messages for all others.

    Raises InvalidInput naming group, trajectory and message of the first turn that cannot be rendered exactly.
    """
    check_examples(groups)
    renderer = _Renderer(template, vocabulary, config.assistant_turns == "last")
    made: list[Group] = []
    for g, group in enumerate(groups):
        trajectories = []
        for t, trajectory in enumerate(group["trajectories"]):
            tools = [trajectory.get("tools"), *(h.get("tools") for h in trajectory.get("additional_histories") or [])]
            main, *others = [
                {"messages_and_choices": renderer.history(items, own, f"group {g}, trajectory {t}{where}")}
                for (where, items), own in zip(histories(trajectory), tools, strict=True)
            ]
            trajectories.append({**main, "additional_histories": others})
        made.append({"trajectories": trajectories})
    return made


@dataclass
class _Running:
    """The text of a turn and of all before it, and its ids."""

    text: str
    marker: str
    ids: list[int]


class _Renderer:
    def __init__(self, template: ChatTemplate, vocabulary: Vocabulary, last_only: bool) -> None:
        self._template, self._vocabulary, self._last_only = template, vocabulary, last_only
        self._ends = {vocabulary.token_text(id): id for id in template.end_ids}

    def history(
        self, items: Sequence[Mapping[str, Any]], tools: list[dict[str, Any]] | None, where: str
    ) -> list[Mapping[str, Any]]:
        messages = [_message(item) for item in items]
        turns = [m for m, item in enumerate(items) if is_assistant(item)]
        chosen = set(turns[-1:] if self._last_only else turns)
        made: list[Mapping[str, Any]] = []
        running: _Running | None = None
        for m, item in enumerate(items):
            if m not in chosen:
                made.append(messages[m])
            elif item.get("prompt_token_ids") and item.get("token_ids"):
                made.append(_choice(item["prompt_token_ids"], item["token_ids"]))
                running = None
            else:
                try:
                    choice, running = self._turn(messages[: m + 1], tools, running)
                except (InvalidInput, InvalidBody, Unsupported) as e:
                    raise InvalidInput(f"{where}, message {m}: {e.message}") from e
                made.append(choice)
        return made

    def _turn(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, running: _Running | None
    ) -> tuple[dict[str, Any], _Running]:
        prompt, reply = self._template.turn(messages, tools)
        at, end = min(((at, end) for end in self._ends if (at := reply.text.find(end)) >= 0), default=(-1, ""))
        if at < 0 or reply.text[at + len(end) :].strip():
            raise InvalidInput(
                "the chat template writes no token that ends the turn right behind the reply, so the model would not "
                "learn to stop; give a template that does by the option `chat_template`"
            )
        said = reply.text[:at]
        self._whole(messages[-1], said, reply.marker)
        before, rest = [], prompt.text
        # As in use: a prompt that extends an earlier turn has its ids, and only the rest is tokenised.
        if running is not None and running.marker == prompt.marker and rest.startswith(running.text):
            before, rest = running.ids, rest[len(running.text) :]
        ids = [*before, *encode(self._vocabulary, rest, prompt.marker)]
        answer = [*encode(self._vocabulary, said, prompt.marker), self._ends[end]]
        return _choice(ids, answer), _Running(prompt.text + said + end, prompt.marker, [*ids, *answer])

    def _whole(self, message: Mapping[str, Any], said: str, marker: str) -> None:
        """Raises InvalidInput when the template left out something that the message says."""
        content = message.get("content")
        parts = [content] if isinstance(content, str) else [p.get("text") or "" for p in content or []]
        calls = [call["function"]["name"] for call in message.get("tool_calls") or []]
        for what, texts in (
            ("content", parts),
            ("reasoning", [message.get("reasoning_content") or ""]),
            ("tool calls", calls),
        ):
            for text in texts:
                if _squeezed(self._template.neutral(text, marker)) not in _squeezed(said):
                    raise InvalidInput(
                        f"the chat template leaves out the {what} of this message, so it could not be learned; give a "
                        f"template that writes it by the option `chat_template`, or leave it out of the message"
                    )


def _message(item: Mapping[str, Any]) -> dict[str, Any]:
    if not is_choice(item):
        message = dict(item)
    else:
        message = {k: v for k, v in item["message"].items() if v is not None} | {"role": "assistant"}
    if message.get("role") == "assistant" and message.get("reasoning") and not message.get("reasoning_content"):
        message["reasoning_content"] = message["reasoning"]  # vLLM's and OpenRouter's name for it
    return message


def _choice(prompt: Sequence[int], ids: Sequence[int]) -> dict[str, Any]:
    return {
        "message": {"role": "assistant"},
        "prompt_token_ids": list(prompt),
        "token_ids": list(ids),
        "token_logprobs": [0.0] * len(ids),
        "sampling": {"temperature": 1.0, "comparable": False},
    }


def _squeezed(text: str) -> str:
    """Templates strip and indent; what is compared is what is not white space."""
    return "".join(text.split())
