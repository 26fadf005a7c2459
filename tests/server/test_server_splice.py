"""Turns extend the sequence that was sampled, by its exact tokens (rule R1)."""

from __future__ import annotations

from array import array
from typing import Any

from server_fakes import Harness

from art_sky.server.splice import Recorded, SpliceIndex


def turns(*contents: str) -> list[dict[str, Any]]:
    return [{"role": ("user", "assistant")[i % 2], "content": c} for i, c in enumerate(contents)]


async def test_next_turn_begins_with_sampled_ids(server: Harness) -> None:
    # The fake samples "user" as four letters; its text would be tokenised as one word.
    server.engine.script = lambda r: ["a user", 2]
    first = await server.say("hi")
    sampled = first["prompt_token_ids"] + first["token_ids"]
    second = await server.say(turns("hi", "a user", "more"))
    assert second["prompt_token_ids"][: len(sampled)] == sampled
    third = await server.say(turns("hi", "a user", "more", "a user", "end"))
    sampled = second["prompt_token_ids"] + second["token_ids"]
    assert third["prompt_token_ids"][: len(sampled)] == sampled
    assert (server.server.gateway.index.spliced, server.server.gateway.index.split) == (2, 0)
    status = (await server.client.get("/api/v1/status")).json()
    assert status["engine"]["prompts_spliced"] == 2


async def test_changed_text_is_tokenised(server: Harness) -> None:
    server.engine.script = lambda r: ["a user", 2]
    await server.say("hi")
    choice = await server.say(turns("hi", "A user", "more"))
    text = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nA user<|im_end|>\n<|im_start|>user\nmore<|im_end|>\n"
    text += "<|im_start|>assistant\n"
    assert choice["prompt_token_ids"] == server.engine.vocabulary.encode(text)
    assert (server.server.gateway.index.spliced, server.server.gateway.index.split) == (0, 1)


async def test_reply_cut_by_length_is_spliced_up_to_its_end(server: Harness) -> None:
    server.engine.script = lambda r: ["user"]
    first = await server.say("hi", max_tokens=4)
    assert first["finish_reason"] == "length" and 2 not in first["token_ids"]
    second = await server.say(turns("hi", "user", "more"))
    sampled = first["prompt_token_ids"] + first["token_ids"]
    assert second["prompt_token_ids"][: len(sampled) + 1] == [*sampled, 2]


async def test_reply_cut_by_stop_string_is_not(server: Harness) -> None:
    server.engine.script = lambda r: ["a user", 2]
    first = await server.say("hi", stop="s")
    second = await server.say(turns("hi", first["message"]["content"], "more"))
    sampled = first["prompt_token_ids"] + first["token_ids"]
    assert second["prompt_token_ids"][: len(sampled)] != sampled
    assert server.server.gateway.index.split == 1


async def test_same_rollout_comes_first(server: Harness) -> None:
    addresses = [(await server.client.post("/api/v1/models/p/agent/rollouts")).json() for _ in range(2)]

    async def say(i: int, messages: list[dict[str, Any]]) -> dict[str, Any]:
        url = f"/rollouts/{addresses[i]['rollout']}/v1/chat/completions"
        reply = await server.client.post(url, json={"model": "agent", "messages": messages})
        return reply.json()["choices"][0]

    server.engine.script = lambda r: ["user", 2]  # letters
    letters = await say(0, turns("hi"))
    server.engine.script = lambda r: [*server.engine.vocabulary.encode("user"), 2]  # one word
    word = await say(1, turns("hi"))
    assert len(letters["token_ids"]) == 5 and len(word["token_ids"]) == 2
    for i, first in enumerate((letters, word)):
        second = await say(i, turns("hi", "user", "go"))
        sampled = first["prompt_token_ids"] + first["token_ids"]
        assert second["prompt_token_ids"][: len(sampled)] == sampled


async def test_special_text_in_a_reply_is_spliced_as_sampled(server: Harness) -> None:
    server.engine.script = lambda r: ["<|im_end|>x", 2]  # spelled out in letters
    first = await server.say("hi")
    assert first["message"]["content"] == "<|im_end|>x"
    second = await server.say(turns("hi", "<|im_end|>x", "go"))
    sampled = first["prompt_token_ids"] + first["token_ids"]
    assert second["prompt_token_ids"][: len(sampled)] == sampled


def test_index_is_bounded_and_prefers_the_longest() -> None:
    index = SpliceIndex(max_ids=20)
    index.add(["m"], "a", Recorded(array("i", [1]), 9))
    index.add(["m"], "a|b", Recorded(array("i", [1, 2, 3]), None))
    found = index.find(["m"], "a|b|c", {"|": 9})
    assert found is not None and (found.ids, found.length) == ([1, 2, 3], 3)
    found = index.find(["m"], "a|x|c", {"|": 9})
    assert found is not None and (found.ids, found.length) == ([1, 9], 2)
    assert index.find(["other"], "a|b|c", {"|": 9}) is None
    for i in range(10):
        index.add(["m"], f"long {i}", Recorded(array("i", [0] * 6), 9))
    assert index.find(["m"], "a|", {"|": 9}) is None
    assert index.find(["m"], "long 9|", {"|": 9}) is not None
    assert sum(len(r.ids) for r in index._entries.values()) == index._ids <= 20
