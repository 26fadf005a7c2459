"""From what the server recorded to what is trained: lost tokens found again, rollouts by address put together."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from art_sky.client.summary import check_metrics
from art_sky.errors import MissingTokens, NotFound
from art_sky.schemas import Exchange
from art_sky.training.choices import check_examples, check_groups, choices
from art_sky.trajectories import (
    WITH_ARRAYS,
    History,
    MessageOrChoice,
    MessagesAndChoices,
    Trajectory,
    TrajectoryGroup,
    choice_from_json,
    message_of,
)

CAPTURED = ("prompt_token_ids", "token_ids", "token_logprobs", "sampling")
_LOOKUPS_AT_ONCE = 16

Find = Callable[[str], Awaitable[Exchange]]


async def prepare(
    groups: Sequence[TrajectoryGroup], find: Find | None, *, examples: bool = False
) -> list[dict[str, Any]]:
    """The JSON form of the groups for `art_sky.store.batches`, with arrays, checked for training.

    A choice that lost what the server put on it is found again by its completion's id through `find`. With
    `find=None` the model is not trained and choices may be anybody's; `examples` are for supervised fine-tuning.

    Raises MissingTokens, InvalidReward or InvalidInput naming group, trajectory and message.
    """
    check_metrics(groups)
    for group in groups:
        len(group)  # refuses rollouts that have not run
    # In threads: millions of token ids take a while, and rollouts may be running.
    written = await asyncio.to_thread(lambda: [group.model_dump(context=WITH_ARRAYS) for group in groups])
    if find is not None:
        await _restore(written, find)
        await asyncio.to_thread(check_groups, [*written])
    if examples:
        check_examples(written)
    return written


async def _restore(groups: list[dict[str, Any]], find: Find) -> None:
    lost = [
        (f"group {g}, trajectory {t}{where}", choice, id)
        for g, group in enumerate(groups)
        for t, trajectory in enumerate(group["trajectories"])
        for where, choice in choices(trajectory, "")
        if any(choice.get(name) is None for name in CAPTURED) and (id := _completion_id(choice)) is not None
    ]
    slots = asyncio.Semaphore(_LOOKUPS_AT_ONCE)

    async def one(where: str, choice: Any, id: str) -> None:
        async with slots:
            try:
                exchange = await find(id)
            except NotFound as e:
                raise MissingTokens(f"{where}: the choice lost its tokens, and {e}") from e
        for recorded in exchange.choices:
            if recorded.get("index") == choice.get("index", 0):
                choice.update({name: recorded.get(name) for name in CAPTURED})
                return
        raise MissingTokens(
            f"{where}: the completion {id} on record has no choice {choice.get('index')}; append the Choice as the "
            "client returned it"
        )

    for failure in await asyncio.gather(*(one(*place) for place in lost), return_exceptions=True):
        if failure is not None:
            raise failure


def _completion_id(choice: Mapping[str, Any]) -> str | None:
    sampling = choice.get("sampling")
    id = choice.get("completion_id") or (sampling.get("completion_id") if isinstance(sampling, Mapping) else None)
    return id if isinstance(id, str) else None


# --- rollouts by address ----------------------------------------------------------------------------------


def trajectory_of(exchanges: Sequence[Exchange]) -> Trajectory:
    """The trajectory of a rollout's calls, in the order in which they began.

    A call whose messages extend an earlier conversation, its answer included, goes on with it; any other begins a
    history of its own. Each sampled choice stands in exactly one history as a Choice.
    """
    conversations: list[_Conversation] = []
    for exchange in sorted(exchanges, key=lambda e: e.created):
        if not exchange.choices:
            continue
        conversation = max((c for c in conversations if c.extended_by(exchange)), key=len, default=None)
        if conversation is None:
            conversation = _Conversation([], exchange.tools)
            conversations.append(conversation)
        before = list(conversation.messages)
        news: MessagesAndChoices = [dict(m) for m in exchange.messages[len(before) :]]
        first, *others = [choice_from_json(c) for c in exchange.choices]
        conversation.add([*news, first])
        # Each other choice of the call is a conversation whose past is context: that is trained once already.
        conversations += [_Conversation([*before, *news, other], exchange.tools) for other in others]
    histories = [History(messages_and_choices=c.items, tools=c.tools) for c in conversations]
    main = histories[0] if histories else History()
    return Trajectory(
        messages_and_choices=main.messages_and_choices, tools=main.tools, additional_histories=histories[1:]
    )


class _Conversation:
    def __init__(self, items: Sequence[MessageOrChoice], tools: list[dict[str, Any]] | None) -> None:
        self.items: list[MessageOrChoice] = []
        self.messages: list[dict[str, Any]] = []
        self.tools = tools
        self.add(items)

    def __len__(self) -> int:
        return len(self.items)

    def add(self, items: Sequence[MessageOrChoice]) -> None:
        self.items += items
        self.messages += [message_of(item) for item in items]

    def extended_by(self, exchange: Exchange) -> bool:
        return (
            len(exchange.messages) > len(self.messages)
            and (exchange.tools or None) == (self.tools or None)
            and all(_meaning(a) == _meaning(b) for a, b in zip(self.messages, exchange.messages, strict=False))
        )


def _meaning(message: Mapping[str, Any]) -> tuple[Any, ...]:
    """What two records of one message agree in, whatever a client library dropped or filled in on its way back."""
    calls = [
        (call.get("id"), function.get("name"), function.get("arguments"))
        for call in message.get("tool_calls") or []
        if isinstance(call, Mapping)
        for function in [call.get("function") or {}]
    ]
    return (message.get("role"), _text(message.get("content")), calls, message.get("tool_call_id"))


def _text(content: Any) -> Any:
    """Null, an empty text and no text parts are the same; text parts are the text that they make together."""
    if isinstance(content, list) and all(isinstance(p, Mapping) and p.get("type") == "text" for p in content):
        content = "".join(str(p.get("text", "")) for p in content)
    return content or ""
