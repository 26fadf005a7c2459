"""Registration, tokens, rollouts, the exchange log and what a restart brings back."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import stat
import time
from pathlib import Path
from typing import Any

import pytest
from server_fakes import GROUP, Harness, chunks, harness

from art_sky.errors import NoDiskSpace, NotFound, StoreError
from art_sky.schemas import Exchange
from art_sky.server import activity
from art_sky.server.app import create_app
from art_sky.server.exchange_log import ExchangeLog
from art_sky.server.security import load_token


async def test_every_route_but_health_needs_the_token(server: Harness) -> None:
    server.client.headers.pop("authorization")
    assert (await server.client.get("/health")).json()["status"] == "ok"
    for method, path in [
        ("GET", "/api/v1/status"),
        ("GET", "/v1/models"),
        ("POST", "/v1/chat/completions"),
        ("POST", "/api/v1/shutdown"),
        ("GET", "/openapi.json"),
        ("GET", "/docs"),
        ("GET", "/nowhere"),
        ("GET", "//health"),
    ]:
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": f"Basic {server.server.token}"}):
            reply = await server.client.request(method, path, headers=headers)
            assert reply.status_code == 401 and reply.json()["error"]["code"] == "unauthorized", path


async def test_foreign_hosts_and_origins_are_refused(server: Harness) -> None:
    for headers in ({"host": "evil.example"}, {"origin": "http://evil.example"}, {"host": "127.0.0.1.evil.example"}):
        assert (await server.client.get("/api/v1/status", headers=headers)).status_code == 400
    for headers in ({"host": "localhost:99"}, {"host": "[::1]:1"}, {"origin": "http://127.0.0.1:1"}):
        assert (await server.client.get("/api/v1/status", headers=headers)).status_code == 200


def test_token_file(tmp_path: Path) -> None:
    file = tmp_path / "s" / "token"
    token = load_token(file)
    assert len(token) > 30 and load_token(file) == token
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    file.chmod(0o644)
    with pytest.raises(StoreError, match="chmod 600"):
        load_token(file)


async def test_token_is_in_no_log(server: Harness, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    await server.client.get("/v1/models", params={"key": "secret-query"})
    await server.client.get("/v1/models\ud800".encode("utf-8", "replace").decode())
    ours = "\n".join(r.getMessage() for r in caplog.records if r.name == "art_sky.server")
    assert "/v1/models" in ours and server.server.token not in ours and "secret-query" not in ours


async def test_register_is_idempotent_and_compares(server: Harness) -> None:
    status = (await server.register()).json()
    assert (status["step"], status["inference_name"], status["context_length"]) == (0, "agent", 512)
    assert (await server.register(config={"free": 1})).status_code == 200
    for fields, says in [
        ({"base_model": "other"}, "base_model"),
        ({"lora": {"rank": 4}}, "lora"),
        ({"options": {"chat_template": "x"}}, "options"),
    ]:
        reply = await server.register(**fields)
        assert reply.status_code == 409 and says in reply.json()["error"]["message"]
    other = await server.register(name="other", base_model="other")
    assert other.status_code == 409 and "another server" in other.json()["error"]["message"]
    old = await server.register(client_version="0.0.1")
    assert old.status_code == 409 and "pip install" in old.json()["error"]["message"]
    twin = await server.register(name="Agent")
    assert twin.status_code == 409
    assert [m["name"] for m in (await server.client.get("/api/v1/models")).json()] == ["agent"]


@pytest.mark.parametrize("name", ["", "a/b", "..", ".a", "a b", "x" * 300, "con", "a\ud800", "a..b"])
async def test_bad_names_create_nothing(bare: Harness, tmp_path: Path, name: str) -> None:
    reply = await bare.register(name=name) if "\ud800" not in name else None
    assert reply is None or (reply.status_code == 400 and reply.json()["error"]["code"] == "invalid_name")
    assert not (tmp_path / "store").exists() or not list((tmp_path / "store").iterdir())


async def test_bad_template_creates_nothing(bare: Harness, tmp_path: Path) -> None:
    reply = await bare.register(options={"chat_template": "{% if %}"})
    assert reply.status_code == 400 and reply.json()["error"]["code"] == "invalid_config"
    assert not (tmp_path / "store" / "p").exists()


async def test_prompted_models_are_only_logged(bare: Harness) -> None:
    body = {"trainable": False, "base_model": "gpt-elsewhere"}
    assert (await bare.register(name="prompted", **body)).status_code == 200
    url = "/api/v1/models/p/prompted"
    assert (await bare.client.post(f"{url}/log", json={"split": "val", "metrics": {"reward": 1}})).status_code == 200
    assert (await bare.client.get(f"{url}/history")).json()[0]["metrics"] == {"reward": 1.0}
    assert (await bare.chat("hi", model="prompted")).status_code == 404
    refused = await bare.client.post(f"{url}/train", json={"request_id": "r", "batch": "0" * 64})
    assert refused.status_code == 400
    assert (await bare.register()).status_code == 200  # and take up no place for a base model


async def test_two_servers_do_not_share_a_model(
    server: Harness, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("art_sky.store.folder.FolderStore.lease_wait_seconds", 0.0)
    async with harness(tiny_model, tmp_path / "second") as second:
        second.server.registry.store = server.server.registry.store
        reply = await second.register()
        assert reply.status_code == 409 and reply.json()["error"]["code"] == "lease_lost"


async def test_rollout_key_opens_its_rollout_only(server: Harness) -> None:
    one, two = [(await server.client.post("/api/v1/models/p/agent/rollouts")).json() for _ in range(2)]
    assert one["base_url"] == f"http://127.0.0.1:1/rollouts/{one['rollout']}/v1"
    headers = {"authorization": f"Bearer {one['api_key']}"}
    body = {"model": "agent", "messages": [{"role": "user", "content": "hi"}]}

    async def post(path: str) -> int:
        return (await server.client.post(path, json=body, headers=headers)).status_code

    mine, other = (f"/rollouts/{r['rollout']}/v1/chat/completions" for r in (one, two))
    assert await post(mine) == 200
    assert (await server.client.get(f"/rollouts/{one['rollout']}/v1/models", headers=headers)).status_code == 200
    assert [await post(p) for p in (other, "/v1/chat/completions", "/api/v1/shutdown")] == [401] * 3
    assert await post(f"/rollouts/{one['rollout']}/v1/../../../api/v1/shutdown") in (401, 404)
    url = f"/api/v1/rollouts/{one['rollout']}"
    assert (await server.client.get(f"{url}/exchanges", headers=headers)).status_code == 401
    (exchange,) = await recorded(server, f"{url}/exchanges")
    assert exchange["rollout"] == one["rollout"] and exchange["choices"][0]["token_ids"]
    for _ in range(2):
        assert (await server.client.delete(url)).status_code == 204
    assert await post(mine) == 404
    assert len(await recorded(server, f"{url}/exchanges")) == 1


async def test_restart_keeps_rollouts_and_exchanges(server: Harness, tiny_model: Path, tmp_path: Path) -> None:
    address = (await server.client.post("/api/v1/models/p/agent/rollouts")).json()
    closed = (await server.client.post("/api/v1/models/p/agent/rollouts")).json()
    await server.client.delete(f"/api/v1/rollouts/{closed['rollout']}")
    body = {"model": "agent", "messages": [{"role": "user", "content": "hi"}]}
    path = f"/rollouts/{address['rollout']}/v1/chat/completions"
    first = (await server.client.post(path, json=body)).json()
    await server.server.close()
    async with harness(tiny_model, tmp_path) as later:
        assert later.server.token == server.server.token
        await later.register()
        found = (await later.client.get(f"/api/v1/exchanges/{first['id']}")).json()
        assert found["choices"] == first["choices"]
        headers = {"authorization": f"Bearer {address['api_key']}"}
        assert (await later.client.post(path, json=body, headers=headers)).status_code == 200
        gone = path.replace(address["rollout"], closed["rollout"])
        assert (await later.client.post(gone, json=body)).status_code == 404
        exchanges = await recorded(later, f"/api/v1/rollouts/{address['rollout']}/exchanges")
        assert exchanges[0]["completion_id"] == first["id"] and len(exchanges) == 2


def an_exchange(id: str, rollout: str | None = None, text: str = "x") -> Exchange:
    messages: list[dict[str, Any]] = [{"role": "user", "content": text}]
    return Exchange(
        completion_id=id, created=1.5, project="p", model="m@0", rollout=rollout, messages=messages, choices=[]
    )


async def test_exchange_log_rotates_and_reloads(tmp_path: Path) -> None:
    log = ExchangeLog(tmp_path, file_bytes=1000, files=3)
    for i in range(30):
        await log.append(an_exchange(f"c{i}", "r" if i % 2 else None, "\ud800" * 10))
        await log.delivered(f"c{i}", "r")
    await log.close()
    with (tmp_path / "exchanges.jsonl").open("ab") as f:
        f.write(b'{"completion_id":"torn","created":1.5,"project":"p","model":"m@0","rollout":null,"mess')
    for n in range(2):
        log = ExchangeLog(tmp_path, file_bytes=1000, files=3)
        assert (await log.find("c29")).messages[0]["content"] == "\ud800" * 10
        found, complete = await log.of_rollout("r")
        kept = [e.completion_id for e in found]
        assert not complete, "of the calls that the agent got some are gone"
        assert kept == [f"c{i}" for i in range(30) if i % 2][-len(kept) :] and 3 <= len(kept) < 15
        for missing in ("c0", "torn", "never"):
            with pytest.raises(NotFound):
                await log.find(missing)
        await log.append(an_exchange(f"later{n}"))
        assert (await log.find(f"later{n}")).model == "m@0"
        await log.close()
    assert not (tmp_path / "exchanges.3.jsonl").exists() and (tmp_path / "exchanges.2.jsonl").exists()


async def test_a_rollout_that_lost_calls_with_a_file_is_known_for_it(tmp_path: Path) -> None:
    """Exactly: by its own calls that the agent got, whenever they were lost, over restarts."""

    async def complete(log: ExchangeLog, rollout: str) -> bool:
        return (await log.of_rollout(rollout))[1]

    log = ExchangeLog(tmp_path, file_bytes=1000, files=3)
    for rollout in ("whole", "cut", "again", "late"):  # the first calls, which will be gone
        await log.append(an_exchange(f"{rollout}-1", rollout))
    await log.delivered("whole-1", "whole")
    await log.delivered("again-1", "again")
    await log.withdraw_alike("again", [{"role": "user", "content": "x"}], None)
    for i in range(30):
        await log.append(an_exchange(f"c{i}", "new" if i == 29 else None, "y" * 20))
    await log.delivered("c29", "new")
    for _ in range(2):
        assert await log.of_rollout("whole") == ([], False), "not a single call is left, and that is told"
        assert await complete(log, "cut"), "a reply that the agent never got is no loss"
        assert await complete(log, "again") and await complete(log, "never-was")
        assert [e.completion_id for e in (await log.of_rollout("new"))[0]] == ["c29"] and await complete(log, "new")
        assert await complete(log, "late")
        await log.close()
        # A server that died before the file was deleted, and in the middle of the line.
        with (tmp_path / "lost.jsonl").open("ab") as f:
            f.write(b'["c29",["new"]]\n["c0",["cu')
        log = ExchangeLog(tmp_path, file_bytes=1000, files=3)
    await log.delivered("late-1", "late")  # the agent took its time
    assert not await complete(log, "late")
    await log.close()
    assert not await complete(ExchangeLog(tmp_path, file_bytes=1000, files=3), "late")


async def test_a_gap_that_cannot_be_written_down_is_not_made(tmp_path: Path) -> None:
    log = ExchangeLog(tmp_path, file_bytes=500, files=2)
    (tmp_path / "lost.jsonl").mkdir()
    await log.append(an_exchange("first", "r"))
    await log.delivered("first", "r")
    with pytest.raises(StoreError):
        for i in range(30):
            await log.append(an_exchange(f"c{i}"))
    assert [e.completion_id for e in (await log.of_rollout("r"))[0]] == ["first"]
    (tmp_path / "lost.jsonl").rmdir()
    for i in range(30):
        await log.append(an_exchange(f"d{i}"))
    assert await log.of_rollout("r") == ([], False)
    await log.close()


async def test_full_disk_holds_the_reply_back(server: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    async def full(_: Exchange) -> None:
        raise NoDiskSpace("the disk is full; free some space")

    monkeypatch.setattr(server.server.exchanges, "append", full)
    reply = await server.chat("hi")
    assert reply.status_code == 507 and reply.json()["error"]["code"] == "no_disk_space"
    values = chunks((await server.chat("hi", stream=True)).text)
    assert values[-1]["error"]["code"] == "no_disk_space"
    assert not any("token_ids" in c for v in values for c in v.get("choices", []))


async def test_fsync_before_each_reply_by_option(tiny_model: Path, tmp_path: Path, monkeypatch: Any) -> None:
    synced: list[int] = []
    monkeypatch.setattr("art_sky.server.exchange_log.os.fsync", synced.append)
    async with harness(tiny_model, tmp_path, fsync_each_reply=True) as h:
        await h.register()
        await h.say("hi")
        assert len(synced) >= 1


async def test_idle_limit_counts_work_only(tiny_model: Path, tmp_path: Path) -> None:
    stopped, now = asyncio.Event(), [time.monotonic()]
    async with harness(tiny_model, tmp_path, idle_minutes=0.1 / 60) as h:
        h.server.stop = stopped.set
        h.server.activity._clock = lambda: now[0]
        await h.register()
        for work in (h.say("hi"), h.upload([GROUP]), h.register(name="b")):
            now[0] += 0.09
            await work
            await asyncio.sleep(0.02)
            assert not stopped.is_set()
        now[0] += 0.2
        status = (await h.client.get("/api/v1/status")).json()  # looking on is no work
        assert status["idle_limit_seconds"] == pytest.approx(0.1) and status["idle_seconds"] == pytest.approx(
            0.2, abs=1e-3
        )
        async with asyncio.timeout(5):
            await stopped.wait()


async def test_what_takes_minutes_without_a_sign_counts_as_work_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activity, "_TOUCH_SECONDS", 0.0)
    now = 100.0
    work = activity.Activity(lambda: now)
    async with work.during(60):
        await asyncio.sleep(0)
        now = 159.0
        await asyncio.sleep(0.01)
        assert work.idle_seconds() == 0
        now = 400.0
        await asyncio.sleep(0.01)
        assert work.idle_seconds() == pytest.approx(241)
    now = 401.0
    await asyncio.sleep(0.01)
    assert work.idle_seconds() == pytest.approx(242)


async def test_a_registration_counts_as_work(tiny_model: Path, tmp_path: Path) -> None:
    now = [time.monotonic()]
    async with harness(tiny_model, tmp_path) as h:
        h.server.activity._clock = lambda: now[0]
        now[0] += 500
        await h.register()
        assert h.server.activity.idle_seconds() < 5


async def test_status(server: Harness) -> None:
    status = (await server.client.get("/api/v1/status")).json()
    assert status["engine"]["state"] == "ready" and status["trainer"]["state"] == "ready"
    assert status["models"][0]["name"] == "agent" and status["store"].startswith("file://")
    lease = status["models"][0]["lease"]
    assert lease["owner"].startswith("server ") and (lease["generation"], lease["problem"]) == (1, None)
    for file in server.server.registry.store.root.glob("**/leases/*"):  # type: ignore[attr-defined]
        file.unlink()
    lease = (await server.client.get("/api/v1/status")).json()["models"][0]["lease"]
    assert "was deleted under this process" in lease["problem"]
    assert (await server.client.get("/nowhere")).json()["error"]["code"] == "not_found"
    assert (await server.client.put("/api/v1/status")).status_code == 405
    assert (await server.client.get("/openapi.json")).status_code == 200


async def test_models_of_the_machine_before_are_served_again(tiny_model: Path, tmp_path: Path) -> None:
    async with harness(tiny_model, tmp_path) as h:
        await h.register()
    shutil.rmtree(tmp_path / "state")
    async with harness(tiny_model, tmp_path, models=["p/agent", "p/never-was"]) as h:
        async with asyncio.timeout(30):
            while not h.server.registry.all():
                await asyncio.sleep(0.01)
        assert (await h.chat("hi")).json()["model"] == "agent@0"


async def recorded(server: Harness, exchanges: str) -> list[Any]:
    """What is on record of a rollout that the server opened itself."""
    found = (await server.client.get(exchanges)).json()
    assert found["complete"] is True
    return list(found["exchanges"])


async def open_rollout(server: Harness) -> tuple[str, str]:
    """(path of its chat completions, path of its exchanges)."""
    id = (await server.client.post("/api/v1/models/p/agent/rollouts")).json()["rollout"]
    return f"/rollouts/{id}/v1/chat/completions", f"/api/v1/rollouts/{id}/exchanges"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_reply_that_was_cut_is_no_part_of_its_rollout(server: Harness, stream: bool) -> None:
    """The agent's call ends before the last byte; the sampling was whole and is on record."""
    chat, exchanges = await open_rollout(server)
    body = {"model": "agent", "messages": [{"role": "user", "content": "hi"}], "stream": stream}
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)
        last = message["type"] == "http.response.body" and (not stream or b"[DONE]" in message["body"])
        if last:
            raise OSError("the connection is gone")

    await call(server, chat, body, send)
    assert len(sent) > 1 and await recorded(server, exchanges) == []
    whole = await server.client.post(chat, json=body)
    assert whole.status_code == 200
    assert len(await recorded(server, exchanges)) == 1


async def call(server: Harness, path: str, body: dict[str, Any], send: Any) -> None:
    """One request over ASGI whose replies go to `send`."""
    data = json.dumps(body).encode()
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "path": path,
        "raw_path": path.encode(), "query_string": b"", "scheme": "http", "server": ("127.0.0.1", 1),
        "client": ("127.0.0.1", 2), "root_path": "",
        "headers": [
            (b"host", b"127.0.0.1:1"), (b"content-type", b"application/json"),
            (b"authorization", f"Bearer {server.server.token}".encode()),
        ],
    }  # fmt: skip
    messages = [{"type": "http.request", "body": data, "more_body": False}]

    async def receive() -> dict[str, Any]:
        if messages:
            return messages.pop()
        await asyncio.Event().wait()
        raise AssertionError

    with contextlib.suppress(Exception):
        async with asyncio.timeout(30):
            await create_app(server.server)(scope, receive, send)


async def test_a_repeated_call_takes_the_place_of_the_one_that_was_lost(
    server: Harness, tiny_model: Path, tmp_path: Path
) -> None:
    """The network swallowed the reply without the server seeing it; OpenAI's client says that it asks again."""
    chat, exchanges = await open_rollout(server)
    other = {"model": "agent", "messages": [{"role": "user", "content": "another"}]}
    body = {"model": "agent", "messages": [{"role": "user", "content": "hi"}]}
    kept = (await server.client.post(chat, json=other)).json()["id"]
    lost = (await server.client.post(chat, json=body, headers={"x-stainless-retry-count": "0"})).json()["id"]
    assert [e["completion_id"] for e in await recorded(server, exchanges)] == [kept, lost]
    again = (await server.client.post(chat, json=body, headers={"x-stainless-retry-count": "1"})).json()["id"]
    assert [e["completion_id"] for e in await recorded(server, exchanges)] == [kept, again]
    sampled = (await server.client.post(chat, json=body)).json()["id"]  # no retry: the agent wants two samples
    await server.server.close()
    async with harness(tiny_model, tmp_path) as later:
        found = await recorded(later, exchanges)
        assert [e["completion_id"] for e in found] == [kept, again, sampled]
