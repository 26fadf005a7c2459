"""The OpenAI dialect: what goes in, what comes out, and what is refused."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from server_fakes import JSON, Harness, assembled, chunks

from art_sky.errors import ChildDied
from art_sky.server.openai_fields import FIELDS


async def test_reply_carries_tokens_and_step(server: Harness) -> None:
    reply = (await server.chat("hi", temperature=0.7, seed=5)).json()
    assert reply["model"] == "agent@0" and reply["object"] == "chat.completion"
    choice = reply["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": "hello", "refusal": None}
    assert choice["finish_reason"] == "stop" and choice["logprobs"] is None
    request = server.engine.requests[0]
    assert choice["prompt_token_ids"] == request.prompt_ids
    assert choice["token_ids"] == [*server.engine.ids("hello"), 2]
    assert len(choice["token_logprobs"]) == 6
    expected = {"completion_id": reply["id"], "model": "agent@0", "temperature": 0.7, "comparable": True}
    assert choice["sampling"] == expected
    assert reply["usage"]["prompt_tokens"] == len(request.prompt_ids)
    assert reply["usage"]["completion_tokens"] == 6
    assert reply["usage"]["prompt_tokens_details"] == {"cached_tokens": 3}
    assert (request.seed, request.temperature, request.stop_token_ids) == (5, 0.7, [2])


async def test_prompt_is_the_rendered_template(server: Harness) -> None:
    await server.chat([{"role": "system", "content": "be"}, {"role": "user", "content": "hi"}])
    text = "<|im_start|>system\nbe<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert server.engine.requests[0].prompt_ids == server.engine.vocabulary.encode(text)


async def test_defaults_and_limits(server: Harness) -> None:
    await server.chat("hi")
    request = server.engine.requests[0]
    assert (request.temperature, request.top_p, request.seed) == (1.0, 1.0, None)
    assert request.max_tokens == 512 - len(request.prompt_ids)
    reply = await server.chat("hi", max_completion_tokens=2, max_tokens=400, top_p=0.5)
    choice = reply.json()["choices"][0]
    assert choice["finish_reason"] == "length" and choice["message"]["content"] == "he"
    assert len(choice["token_ids"]) == 2 and choice["sampling"]["comparable"] is False
    cut = await server.chat("hi", max_tokens=5000)
    assert "cut from 5000" in cut.headers["x-art-sky-warning"]


async def test_n_gives_each_choice_a_seed(server: Harness) -> None:
    server.engine.script = lambda r: [f"s{r.seed}", 2]
    reply = (await server.chat("hi", n=3, seed=7)).json()
    assert [c["message"]["content"] for c in reply["choices"]] == ["s7", "s8", "s9"]
    assert [c["index"] for c in reply["choices"]] == [0, 1, 2]
    assert all(c["token_ids"] for c in reply["choices"])
    assert len({tuple(r.prompt_ids) for r in server.engine.requests}) == 1


async def test_logprobs_in_openai_shape(server: Harness) -> None:
    choice = await server.say("hi", logprobs=True, top_logprobs=2)
    content = choice["logprobs"]["content"]
    assert [c["token"] for c in content] == [*"hello", "<|im_end|>"]
    assert content[0]["bytes"] == [104] and len(content[0]["top_logprobs"]) == 2
    assert content[0]["top_logprobs"][1]["logprob"] == -9999.0
    assert [c["logprob"] for c in content] == choice["token_logprobs"]


@pytest.mark.parametrize("stop", [None, "lo", ["w w", "ell"], "zzz", "o world!"])
async def test_stream_equals_whole_reply(server: Harness, stop: Any) -> None:
    server.engine.script = lambda r: ["hello world!", 2]
    fields = {"n": 2, "stop": stop, "logprobs": True, "top_logprobs": 1}
    whole = (await server.chat("hi", **fields)).json()
    reply = await server.chat("hi", **fields, stream=True, stream_options={"include_usage": True})
    assert reply.headers["content-type"].startswith("text/event-stream")
    made, values = assembled(reply.text, 2)
    for choice, streamed in zip(whole["choices"], made, strict=True):
        assert streamed["message"].get("content", "") == choice["message"]["content"]
        assert streamed["logprobs"] == choice["logprobs"]["content"]
        last = streamed["last"]
        for key in ("finish_reason", "prompt_token_ids", "token_ids", "token_logprobs"):
            assert last[key] == choice[key]
        assert last["sampling"]["completion_id"] == values[0]["id"]
    assert values[-1]["choices"] == [] and values[-1]["usage"] == whole["usage"]
    assert all(v["usage"] is None for v in values[:-1])
    assert values[0]["choices"][0]["delta"]["role"] == "assistant"


async def test_stop_string_spans_tokens(server: Harness) -> None:
    server.engine.script = lambda r: ["abcSTOPdef", 2]
    choice = await server.say("hi", stop=["STOP"])
    assert choice["message"]["content"] == "abc" and choice["finish_reason"] == "stop"
    assert choice["token_ids"] == server.engine.ids("abcSTOP")  # the match is kept, what follows is not
    assert len(choice["token_logprobs"]) == 7
    assert server.engine.cancelled == 1


async def test_stream_ends_with_typed_error_when_engine_dies(server: Harness) -> None:
    died = ChildDied("the engine ended; call again")
    server.engine.script = lambda r: ["he", died]
    values = chunks((await server.chat("hi", stream=True)).text)
    assert values[-1]["error"]["code"] == "child_died" and values[-1]["error"]["retryable"] is True
    assert "[DONE]" not in values
    server.engine.script = lambda r: [died]
    for stream in (False, True):
        reply = await server.chat("hi", stream=stream)
        assert reply.status_code == 503 and reply.json()["error"]["code"] == "child_died"


async def test_engine_that_stays_silent_is_an_error(server: Harness) -> None:
    server.server.gateway._first_token_seconds = 0.05
    server.engine.gate = asyncio.Event()
    reply = await server.chat("hi")
    assert reply.status_code == 503 and reply.json()["error"]["code"] == "busy"


async def test_one_failing_choice_cancels_its_siblings(server: Harness) -> None:
    server.engine.script = lambda r: [ChildDied("gone; again")] if r.seed == 1 else ["x" * 400, 2]
    assert (await server.chat("hi", n=2, seed=0)).status_code == 503
    assert server.engine.cancelled == 2


@pytest.mark.parametrize(
    ("fields", "status", "code", "says"),
    [
        ({"model": "nobody"}, 404, "not_found", "agent"),
        ({"model": "agent@9"}, 404, "not_found", "0 to 0"),
        ({"model": "\ud800"}, 404, "not_found", "agent"),
        ({"messages": []}, 422, "invalid_body", "messages"),
        ({"messages": "hi"}, 422, "invalid_body", "messages"),
        ({"messages": [{"content": "x"}]}, 422, "invalid_body", "role"),
        ({"messages": [{"role": "user", "content": 5}]}, 422, "invalid_body", "content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "unsupported", "image_url"),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, 422, "invalid_body", "tool_calls"),
        ({"temperature": -1}, 422, "invalid_body", "temperature"),
        ({"temperature": "1"}, 422, "invalid_body", "temperature"),
        ({"seed": 2**80}, 422, "invalid_body", "seed"),
        ({"n": 0}, 422, "invalid_body", "n:"),
        ({"max_tokens": 0}, 422, "invalid_body", "max_tokens"),
        ({"stop": ""}, 422, "invalid_body", "stop"),
        ({"top_logprobs": 3}, 400, "unsupported", "logprobs"),
        ({"response_format": {"type": "json_object"}}, 400, "unsupported", "--engine vllm"),
        ({"tool_choice": "required"}, 400, "unsupported", "--engine vllm"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, 400, "unsupported", "chat_template"),
        ({"messages": [{"role": "user", "content": "x" * 600}]}, 400, "prompt_too_long", "512"),
    ],
)
async def test_refusals(server: Harness, fields: dict[str, Any], status: int, code: str, says: str) -> None:
    reply = await server.chat("hi", **fields)
    assert (reply.status_code, reply.json()["error"]["code"]) == (status, code), reply.text
    assert says in reply.json()["error"]["message"]
    assert server.engine.requests == []


async def test_prompt_too_long_names_both_numbers(server: Harness) -> None:
    error = (await server.chat("x" * 600)).json()["error"]
    assert error["details"]["context_length"] == 512 and str(error["details"]["prompt_tokens"]) in error["message"]


@pytest.mark.parametrize("name", sorted(n for n, rule in FIELDS.items() if rule.kind == "refused"))
async def test_refused_fields_name_themselves(server: Harness, name: str) -> None:
    reply = await server.chat("hi", **{name: {"odd": 1}})
    assert reply.status_code == 400 and reply.json()["error"]["details"] == {"field": name}
    for neutral in (None, *FIELDS[name].neutral):
        assert (await server.chat("hi", **{name: neutral})).status_code == 200


@pytest.mark.parametrize("name", sorted(n for n, rule in FIELDS.items() if rule.kind == "no effect"))
async def test_fields_without_effect_pass_silently(server: Harness, name: str) -> None:
    reply = await server.chat("hi", **{name: "x"})
    assert reply.status_code == 200 and "x-art-sky-warning" not in reply.headers


async def test_unknown_fields_warn(server: Harness) -> None:
    reply = await server.chat("hi", **{"new_thing": 1, "b\r\n\u20ac": 2})
    assert reply.status_code == 200
    assert "new_thing" in reply.headers["x-art-sky-warning"]


async def test_content_parts_are_joined(server: Harness) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    await server.chat([{"role": "user", "content": parts}])
    await server.chat("a\nb")
    assert server.engine.requests[0].prompt_ids == server.engine.requests[1].prompt_ids


async def test_special_text_stays_text(server: Harness) -> None:
    tricks = ["<|im_end|>", "<|im_<|im_end|>end|>", "\U000f0000<|im_start|>", "<|<|im_end|>im_end|>"]
    for content in tricks:
        await server.chat([{"role": "user", "content": content}, {"role": "tool", "content": content}])
        ids = server.engine.requests[-1].prompt_ids
        assert (ids.count(1), ids.count(2)) == (3, 2), content
        assert 0 not in ids
    await server.chat([{"role": "user<|im_end|>", "content": "x"}])
    assert server.engine.requests[-1].prompt_ids.count(2) == 1


async def test_lone_surrogates_do_no_harm(server: Harness) -> None:
    reply = await server.chat("a\ud800b", metadata={"k": "\udfff"})
    assert reply.status_code == 200
    exchange = (await server.client.get(f"/api/v1/exchanges/{reply.json()['id']}")).json()
    assert exchange["messages"][0]["content"] == "a\ud800b"
    assert server.engine.vocabulary.decode(server.engine.requests[0].prompt_ids).count("a") >= 1


async def test_bodies_that_are_no_json(server: Harness) -> None:
    deep = b'{"model":"agent","messages":' + b"[" * 5000 + b"]" * 5000 + b"}"
    bodies = [b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"a":NaN}', b'{"a":1e999}', b'{"a":' + b"9" * 5000 + b"}", deep]
    for body in bodies:
        reply = await server.client.post("/v1/chat/completions", content=body, headers=JSON)
        assert reply.status_code == 422 and reply.json()["error"]["code"] == "invalid_body", (body[:30], reply.text)


async def test_models_are_listed(server: Harness) -> None:
    await server.chat("hi")
    listed = (await server.client.get("/v1/models")).json()["data"]
    assert [m["id"] for m in listed] == ["agent", "agent@0"]
    assert (await server.client.get("/v1/models/agent@0")).json()["id"] == "agent@0"
    assert (await server.client.get("/v1/models/x")).status_code == 404


async def test_names_of_two_projects(server: Harness) -> None:
    assert (await server.register(project="q")).json()["inference_name"] == "q/agent"
    reply = await server.chat("hi")
    assert reply.status_code == 400 and "p/agent or q/agent" in reply.json()["error"]["message"]
    assert (await server.chat("hi", model="q/agent")).json()["model"] == "agent@0"
    assert (await server.chat("hi", model="p/agent@0")).status_code == 200


async def test_sixty_four_streams_at_once(server: Harness) -> None:
    server.engine.script = lambda r: [f"text {r.seed} " * 5, 2]
    replies = await asyncio.gather(*(server.chat("hi", stream=True, seed=i) for i in range(64)))
    for i, reply in enumerate(replies):
        assert assembled(reply.text)[0][0]["message"]["content"] == f"text {i} " * 5


async def test_openai_client_sees_the_tokens(server: Harness) -> None:
    import openai

    client = openai.AsyncOpenAI(
        base_url=f"{server.client.base_url}/v1", api_key=server.server.token, http_client=server.client
    )
    whole = await client.chat.completions.create(model="agent", messages=[{"role": "user", "content": "hi"}])
    assert whole.choices[0].token_ids[-1] == 2  # type: ignore[attr-defined]
    stream = await client.chat.completions.create(
        model="agent", messages=[{"role": "user", "content": "hi"}], stream=True
    )
    last = [c async for c in stream][-1].choices[0]
    assert last.finish_reason == "stop" and last.model_extra["token_ids"] == whole.choices[0].model_extra["token_ids"]  # type: ignore[index]


async def test_exchange_is_written_before_the_reply(server: Harness) -> None:
    reply = (await server.chat("hi")).json()
    lines = (server.server.state / "exchanges.jsonl").read_text().splitlines()
    assert json.loads(lines[0])["completion_id"] == reply["id"]
    assert json.loads(lines[0])["choices"] == reply["choices"]
