"""The OpenAI dialect: one chat completion from its body to the recorded reply."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from array import array
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from art_sky.errors import Busy, PromptTooLong, Unsupported
from art_sky.inference.protocol import Engine, GenerateEnd, GenerateRequest, TokenDelta
from art_sky.schemas import AdapterRef, Exchange, Sampling
from art_sky.server.activity import Activity
from art_sky.server.connection import POLL_SECONDS, Handover
from art_sky.server.detokenize import StopStrings
from art_sky.server.exchange_log import ExchangeLog
from art_sky.server.models import Registry, ServedModel
from art_sky.server.openai_fields import ChatRequest, check_fields
from art_sky.server.render import Rendered, encode
from art_sky.server.reply import Reply, sampling_of
from art_sky.server.rollouts import Rollout
from art_sky.server.splice import Recorded, SpliceIndex
from art_sky.server.tools import Part, ReplyParser

HEARTBEAT_SECONDS = 15.0
LEAVING_SECONDS = 5.0  # the list of a rollout's calls waits so long for a reply that nobody reads


@dataclass
class Plan:
    """Everything about one request that is settled before the first token."""

    body: ChatRequest
    model: ServedModel
    model_name: str  # name@step
    rollout: Rollout | None
    rendered: Rendered
    prompt_ids: list[int]
    requests: list[GenerateRequest]
    replies: list[Reply]
    warnings: list[str]
    completion_id: str = field(default_factory=lambda: "chatcmpl-" + secrets.token_hex(16))
    created: float = field(default_factory=time.time)

    @property
    def top(self) -> int | None:
        return (self.body.top_logprobs or 0) if self.body.logprobs else None

    @property
    def usage_wanted(self) -> bool:
        return bool(self.body.stream_options and self.body.stream_options.include_usage)

    def sampling(self, index: int) -> Sampling:
        return sampling_of(self.requests[index], self.completion_id, self.model_name)

    def choices(self) -> list[dict[str, Any]]:
        return [r.choice(i, self.prompt_ids, self.sampling(i), self.top) for i, r in enumerate(self.replies)]

    def usage(self) -> dict[str, Any]:
        prompt, sampled = len(self.prompt_ids), sum(len(r.token_ids) for r in self.replies)
        cached = [r.cached_tokens for r in self.replies if r.cached_tokens is not None]
        return {
            "prompt_tokens": prompt,
            "completion_tokens": sampled,
            "total_tokens": prompt + sampled,
            "prompt_tokens_details": {"cached_tokens": min(cached, default=0)},
        }


@dataclass(frozen=True)
class Progress:
    """New parts of choice `index`; `index` None is a heartbeat while nothing comes."""

    index: int | None
    parts: list[Part] = field(default_factory=list)


class Gateway:
    """`first_token_seconds` covers waiting for a place in the batch, `token_seconds` the time between tokens."""

    def __init__(
        self,
        registry: Registry,
        log: ExchangeLog,
        activity: Activity,
        *,
        first_token_seconds: float = 600.0,
        token_seconds: float = 120.0,
    ) -> None:
        self._registry, self._log, self._activity = registry, log, activity
        self._first_token_seconds, self._token_seconds = first_token_seconds, token_seconds
        self.index = SpliceIndex()
        self.replies = 0
        self._leaving: Counter[str] = Counter()  # rollout -> replies of which a part may still be in this process

    @contextlib.asynccontextmanager
    async def plan(self, body: ChatRequest, rollout: Rollout | None) -> AsyncIterator[Plan]:
        """Checks and resolves everything; the adapter's files stay in place until the context ends."""
        warnings = check_fields(body)
        model, step = await self._registry.resolve(body.model, rollout)
        tools = _check_tools(body, model)
        rendered, prompt_ids = await asyncio.to_thread(self._prompt, model, body, rollout)
        room = self._registry.context_length - len(prompt_ids)
        if room < 1:
            raise PromptTooLong(
                f"the prompt has {len(prompt_ids)} tokens and the context {self._registry.context_length}, with room "
                "for at least one new token; shorten the messages",
                prompt_tokens=len(prompt_ids),
                context_length=self._registry.context_length,
            )
        limit = body.token_limit
        if limit is not None and limit > room:
            warnings.append(f"max_tokens was cut from {limit} to {room} by the context length")
        async with self._registry.adapter(model, step) as adapter:
            n = body.n or 1
            plan = Plan(
                body=body,
                model=model,
                model_name=f"{model.name}@{step}",
                rollout=rollout,
                rendered=rendered,
                prompt_ids=prompt_ids,
                requests=[
                    _request(body, i, prompt_ids, adapter, min(limit or room, room), model.template.end_ids)
                    for i in range(n)
                ],
                replies=[self._reply(body, model, rendered, tools) for _ in range(n)],
                warnings=warnings,
            )
            yield plan

    async def run(self, plan: Plan) -> AsyncGenerator[Progress, None]:
        """Samples all choices; when it ends, the exchange is on record. Closing it cancels the sampling."""
        queue: asyncio.Queue[Progress | BaseException | None] = asyncio.Queue()
        engine = self._registry.engine
        tasks = [asyncio.create_task(self._sample(engine, plan, i, queue)) for i in range(len(plan.replies))]
        left = len(tasks)
        try:
            while left:
                try:
                    async with asyncio.timeout(HEARTBEAT_SECONDS):
                        item = await queue.get()
                except TimeoutError:
                    item = Progress(None)
                if isinstance(item, BaseException):
                    raise item
                if item is None:
                    left -= 1
                else:
                    yield item
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        await self._record(plan)

    async def begun_again(self, rollout: Rollout, body: ChatRequest) -> None:
        """The agent's client repeats a call of this rollout whose reply it never got."""
        await self._log.withdraw_alike(rollout.id, body.messages, body.tools)

    async def delivered(self, plan: Plan, handover: Handover) -> None:
        """The last of a reply was sent: it is part of its rollout once all of it has left this process."""
        if plan.rollout is None:
            return
        id = plan.rollout.id
        self._leaving[id] += 1
        try:
            if await handover.whole():
                await self._log.delivered(plan.completion_id, id)
        finally:
            self._leaving[id] -= 1
            if not self._leaving[id]:
                del self._leaving[id]

    async def exchanges_of(self, rollout: str) -> tuple[list[Exchange], bool]:
        """Calls whose reply the agent got, in the order in which they ended; and whether they are all that it got."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LEAVING_SECONDS):
                # An agent that has read its reply may ask before we know that.
                while rollout in self._leaving:  # noqa: ASYNC110
                    await asyncio.sleep(POLL_SECONDS)
        return await self._log.of_rollout(rollout)

    def stats(self) -> dict[str, int]:
        return {"replies": self.replies, "prompts_spliced": self.index.spliced, "prompts_split": self.index.split}

    async def _sample(
        self, engine: Engine, plan: Plan, i: int, queue: asyncio.Queue[Progress | BaseException | None]
    ) -> None:
        reply, seconds = plan.replies[i], self._first_token_seconds
        try:
            events = aiter(engine.generate(plan.requests[i]))
            async with contextlib.aclosing(events):  # type: ignore[type-var]  # engines write generators
                while True:
                    try:
                        async with asyncio.timeout(seconds):
                            event = await anext(events)
                    except TimeoutError:
                        raise Busy(
                            f"the engine gave no token within {seconds:.0f} s; send fewer requests at once"
                        ) from None
                    if isinstance(event, TokenDelta):
                        seconds = self._token_seconds
                        self._activity.touch()
                        queue.put_nowait(Progress(i, reply.push(event)))
                        if reply.stopped:
                            queue.put_nowait(Progress(i, reply.finish("stop")))
                            break
                    elif isinstance(event, GenerateEnd):
                        if event.finish_reason == "abort":
                            raise Busy("the engine gave this request up; send it again")
                        reply.cached_tokens = event.cached_tokens
                        queue.put_nowait(Progress(i, reply.finish(event.finish_reason)))
                        break
            queue.put_nowait(None)
        except StopAsyncIteration:
            queue.put_nowait(Busy("the engine ended this request without a result; send it again"))
        except Exception as e:
            queue.put_nowait(e)

    async def _record(self, plan: Plan) -> None:
        """Writes the exchange before anything that ends the reply is released, then remembers it for splicing."""
        model = plan.model
        await self._log.append(
            Exchange(
                completion_id=plan.completion_id,
                created=plan.created,
                project=model.project,
                model=plan.model_name,
                rollout=plan.rollout.id if plan.rollout else None,
                messages=plan.body.messages,
                tools=plan.body.tools,
                choices=plan.choices(),
            )
        )
        self.replies += 1
        for reply in plan.replies:
            if reply.stopped:
                continue  # the tokens hold the stop string, which the text of a next turn does not
            text = plan.rendered.text + model.template.neutral(reply.text, plan.rendered.marker)
            sampled = reply.token_ids[:-1] if reply.end_id is not None else reply.token_ids
            self.index.add(
                _scopes(model, plan.rollout), text, Recorded(array("i", plan.prompt_ids + sampled), reply.end_id)
            )

    def _prompt(self, model: ServedModel, body: ChatRequest, rollout: Rollout | None) -> tuple[Rendered, list[int]]:
        vocabulary, template = self._registry.vocabulary, model.template
        rendered = template.render(body.messages, body.tools, body.chat_template_kwargs)
        ends = {text: id for text, id in vocabulary.specials.items() if id in template.end_ids}
        splice = self.index.find(_scopes(model, rollout), rendered.text, ends)
        if splice is None and any(m.get("role") == "assistant" for m in body.messages):
            self.index.split += 1
        ids, done = (splice.ids, splice.length) if splice else ([], 0)
        return rendered, ids + encode(vocabulary, rendered.text[done:], rendered.marker)

    def _reply(self, body: ChatRequest, model: ServedModel, rendered: Rendered, tools: bool) -> Reply:
        think = model.record.options.reasoning_parser == "think"
        parser = ReplyParser(tools=tools, think=think, inside=rendered.text.rstrip().endswith("<think>"))
        ends = frozenset(model.template.end_ids)
        return Reply(self._registry.vocabulary, parser, StopStrings(body.stops), ends)


def _scopes(model: ServedModel, rollout: Rollout | None) -> list[str]:
    mine = f"model {model.project}/{model.name}"
    return [f"rollout {rollout.id}", mine] if rollout else [mine]


def _request(
    body: ChatRequest, i: int, prompt_ids: list[int], adapter: AdapterRef, max_tokens: int, end_ids: list[int]
) -> GenerateRequest:
    return GenerateRequest(
        prompt_ids=prompt_ids,
        adapter=adapter,
        max_tokens=max_tokens,
        temperature=1.0 if body.temperature is None else body.temperature,
        top_p=1.0 if body.top_p is None else body.top_p,
        top_k=max(body.top_k or 0, 0),
        min_p=body.min_p or 0.0,
        seed=None if body.seed is None else (body.seed + i) % 2**63,
        stop_token_ids=end_ids,
        top_logprobs=body.top_logprobs or 0,
    )


def _check_tools(body: ChatRequest, model: ServedModel) -> bool:
    """Whether the reply is to be parsed for calls. Raises Unsupported where tools cannot be shown or read."""
    if not body.tools:
        return False
    if not model.template.takes_tools:
        raise Unsupported(
            f"the chat template of {model.name} has no place for tools; register the model with the options "
            "chat_template (one that uses `tools`) and tool_parser",
            field="tools",
        )
    if model.record.options.tool_parser is None and not model.template.writes_hermes_calls:
        raise Unsupported(
            f"how {model.name} writes tool calls is not known; register the model with the option tool_parser",
            field="tools",
        )
    return bool(body.tool_choice != "none")
