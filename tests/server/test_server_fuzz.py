"""Nothing that a client sends is an internal error."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from server_fakes import JSON, Harness, harness

from art_sky.server.openai_fields import FIELDS

SETTINGS = settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))

texts = st.text(st.characters() | st.sampled_from("\ud800\udfff\x00<|im_end|>\U000f0000"), max_size=12)
scalars = st.none() | st.booleans() | st.integers() | st.floats() | texts | st.just(10**400)
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3), max_leaves=8
)
parts = st.fixed_dictionaries({"type": st.sampled_from(["text", "image_url", 3]), "text": values})
calls = st.fixed_dictionaries({"function": st.fixed_dictionaries({"name": values, "arguments": values}) | values})
messages = st.fixed_dictionaries(
    {
        "role": st.sampled_from(["user", "assistant", "system", "tool", "developer"]) | texts,
        "content": texts | st.lists(parts, max_size=2) | values,
    },
    optional={"tool_calls": st.lists(calls, max_size=2) | values, "name": values},
)
plain = st.fixed_dictionaries(
    {
        "model": st.sampled_from(["agent", "agent@0", "p/agent"]),
        "messages": st.lists(messages, min_size=1, max_size=3),
        "stream": st.booleans(),
        "n": st.integers(1, 3),
        "stop": st.lists(texts.filter(bool), max_size=3),
    }
)
odd = st.dictionaries(st.sampled_from(sorted(FIELDS)) | texts, values, max_size=2)
bodies = st.builds(lambda plain, odd: {**plain, **odd}, plain, odd)


@pytest.fixture(scope="module")
def loop_and_server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Harness]]:
    loop = asyncio.new_event_loop()
    context = harness(tiny_model, tmp_path_factory.mktemp("fuzz"))
    server = loop.run_until_complete(context.__aenter__())
    server.engine.script = lambda r: ["he<|im_start|>llo é", 1, 2]
    loop.run_until_complete(server.register())
    yield loop, server
    loop.run_until_complete(context.__aexit__(None, None, None))
    loop.close()


def send(loop_and_server: tuple[Any, Harness], method: str, path: str, body: bytes) -> None:
    loop, server = loop_and_server
    reply = loop.run_until_complete(server.client.request(method, path, content=body, headers=JSON))
    assert reply.status_code < 500, (reply.status_code, reply.text, body)
    if reply.status_code >= 400:
        assert set(reply.json()["error"]) >= {"message", "type", "code", "retryable"}


@SETTINGS
@given(body=bodies)
def test_chat_bodies(loop_and_server: tuple[Any, Harness], body: dict[str, Any]) -> None:
    send(loop_and_server, "POST", "/v1/chat/completions", json.dumps(body).encode())


ROUTES = [
    ("POST", "/api/v1/models", ["project", "name", "base_model", "lora", "options", "config", "client_version"]),
    ("POST", "/api/v1/models/p/agent/train", ["request_id", "batch", "config"]),
    ("POST", "/api/v1/models/p/agent/log", ["split", "step", "batch", "metrics"]),
    ("PATCH", "/api/v1/models/p/agent/state", ["a"]),
]


@SETTINGS
@given(data=st.data(), route=st.sampled_from(ROUTES))
def test_api_bodies(
    loop_and_server: tuple[Any, Harness], data: st.DataObject, route: tuple[str, str, list[str]]
) -> None:
    method, path, names = route
    good = {"split": "val", "metrics": {"r": 1}, "project": "p", "name": "agent", "base_model": "tiny"}
    body = {n: data.draw(st.just(good[n]) | values if n in good else values) for n in names}
    send(loop_and_server, method, path, json.dumps(body).encode())


@SETTINGS
@given(
    path=st.lists(texts, min_size=1, max_size=3),
    prefix=st.sampled_from(
        ["/api/v1/models/p/agent/", "/api/v1/jobs/", "/api/v1/exchanges/", "/rollouts/", "/v1/models/"]
    ),
    method=st.sampled_from(["GET", "DELETE"]),
)
def test_paths(loop_and_server: tuple[Any, Harness], path: list[str], prefix: str, method: str) -> None:
    quoted = "/".join(quote(p.encode("utf-8", "surrogatepass"), safe="") for p in path)
    send(loop_and_server, method, prefix + quoted, b"")
