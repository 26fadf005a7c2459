"""An engine and a trainer that live in the test's process, and a server around them."""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from art_sky import __version__
from art_sky.config import ServerConfig
from art_sky.errors import ArtSkyError
from art_sky.inference.protocol import EngineStatus, GenerateEnd, GenerateRequest, TokenDelta
from art_sky.schemas import AdapterRef, InitTask, TrainOutcome, TrainTask
from art_sky.server.app import create_app
from art_sky.server.parts import Parts
from art_sky.server.server import Server
from art_sky.server.vocabulary import Vocabulary
from art_sky.store import open_store
from art_sky.store.batches import decode_batch, encode_batch

JSON = {"content-type": "application/json"}
BASE = "http://127.0.0.1:1"
CHATML_TOOLS = (
    "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>\n"
    '{"name": {{ c.function.name | tojson }}, "arguments": {{ c.function.arguments | tojson }}}\n'
    "</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class FakeEngine:
    """Says what `script` gives for a request: text, token ids, or an error to die with after what came before it."""

    def __init__(self, folder: Path) -> None:
        self.vocabulary = Vocabulary(folder)
        self.script: Callable[[GenerateRequest], list[str | int | ArtSkyError]] = lambda r: ["hello", 2]
        self.requests: list[GenerateRequest] = []
        self.prepared: list[str] = []
        self.cancelled = 0
        self.making_room = 0  # train calls under way, as the engine was told
        self.gate: asyncio.Event | None = None  # waited for before each token

    def ids(self, text: str) -> list[int]:
        """One token a character, also where the tokenizer knows a longer one."""
        return [i for c in text for i in self.vocabulary.encode(c)]

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    async def prepare(self, adapter: AdapterRef) -> None:
        self.prepared.append(adapter.name)

    @asynccontextmanager
    async def room_for_training(self) -> AsyncIterator[None]:
        self.making_room += 1
        try:
            yield
        finally:
            self.making_room -= 1

    async def status(self) -> EngineStatus:
        return EngineStatus(state="ready", adapters=sorted({r.adapter.name for r in self.requests}))

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenDelta | GenerateEnd, None]:
        self.requests.append(request)
        assert (Path(request.adapter.path) / "adapter_model.safetensors").is_file()
        done = False
        try:
            pieces: list[int | ArtSkyError] = []
            for piece in self.script(request):
                pieces += self.ids(piece) if isinstance(piece, str) else [piece]
            reason = "length"
            for n, piece in enumerate(pieces):
                if self.gate is not None:
                    await self.gate.wait()
                await asyncio.sleep(0)
                if isinstance(piece, ArtSkyError):
                    raise piece
                if n == request.max_tokens:
                    break
                logprob = -random.Random(piece).random()
                top = [(piece, logprob), (0, float("-inf"))][: request.top_logprobs]
                yield TokenDelta(token_id=piece, logprob=logprob, top=top)
                if piece in request.stop_token_ids:
                    reason = "stop"
                    break
            done = True
            yield GenerateEnd(finish_reason=reason, cached_tokens=3)
        finally:
            self.cancelled += not done


@dataclass
class FakeChild:
    state: str = "ready"
    restarts: int = 0
    pid: int | None = 1


@dataclass
class FakeTrainer:
    """Writes files that differ at each step. `faults` are raised by the next calls, `gate` holds micro-batches."""

    faults: list[Exception] = field(default_factory=list)
    gate: asyncio.Event | None = None
    tasks: list[TrainTask] = field(default_factory=list)
    references: list[str] = field(default_factory=list)  # the adapters of the steps that a KL penalty refers to
    cancelled: int = 0
    child: FakeChild = field(default_factory=FakeChild)

    async def init(self, task: InitTask) -> None:
        if self.faults:
            raise self.faults.pop(0)
        _write(Path(task.out_dir), "untrained")

    async def train(self, task: TrainTask) -> AsyncGenerator[dict[str, Any] | TrainOutcome, None]:
        self.tasks.append(task)
        if self.faults:
            raise self.faults.pop(0)
        groups = _read(task.batch_path)
        if task.reference_dir is not None:
            self.references.append((Path(task.reference_dir) / "adapter" / "adapter_model.safetensors").read_text())
        done = False
        try:
            for n in range(2):
                if self.gate is not None:
                    await self.gate.wait()
                await asyncio.sleep(0)
                yield {"micro_batch": n + 1, "of": 2}
            done = True
        finally:
            self.cancelled += not done
        if not groups:
            yield TrainOutcome(updates=0, reason="no group", metrics={"data/groups": 0.0})
            return
        before = (Path(task.parent_dir) / "adapter" / "adapter_model.safetensors").read_text()
        _write(Path(task.out_dir), f"{before} {task.request_id}")
        yield TrainOutcome(updates=1, metrics={"loss": 0.5})

    async def close(self) -> None: ...


def _read(path: str) -> list[dict[str, Any]]:
    return decode_batch(Path(path).read_bytes())


def _write(out: Path, content: str) -> None:
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        (out / "adapter").mkdir(parents=True, exist_ok=True)
        (out / "adapter" / name).write_text(content)
    (out / "trainer").mkdir(exist_ok=True)
    (out / "trainer" / "state.json").write_text(content)


@dataclass
class Harness:
    server: Server
    client: httpx.AsyncClient
    engine: FakeEngine
    trainer: FakeTrainer

    async def register(self, name: str = "agent", project: str = "p", **fields: Any) -> httpx.Response:
        body = {"project": project, "name": name, "base_model": "tiny", "client_version": __version__, **fields}
        return await self.client.post("/api/v1/models", json=body)

    async def chat(self, content: Any = "hi", **fields: Any) -> httpx.Response:
        messages = content if isinstance(content, list) else [{"role": "user", "content": content}]
        body = {"model": "agent", "messages": messages, **fields}
        return await self.client.post("/v1/chat/completions", content=json.dumps(body), headers=JSON)

    async def say(self, content: Any = "hi", **fields: Any) -> dict[str, Any]:
        """The choice of a reply that must be one."""
        reply = await self.chat(content, **fields)
        assert reply.status_code == 200, reply.text
        return reply.json()["choices"][0]

    async def upload(self, groups: list[Any], name: str = "agent") -> str:
        data = encode_batch(groups)
        sha = hashlib.sha256(data).hexdigest()
        reply = await self.client.put(f"/api/v1/models/p/{name}/blobs/{sha}", content=data)
        assert reply.json() == {"sha256": sha, "size": len(data)}, reply.text
        return sha

    async def train(self, request_id: str, batch: str, **config: Any) -> httpx.Response:
        body = {"request_id": request_id, "batch": batch, "config": config}
        return await self.client.post("/api/v1/models/p/agent/train", json=body)

    async def events(self, request_id: str, offset: int = 0) -> list[dict[str, Any]]:
        """All events from an offset until the job has ended."""
        async with asyncio.timeout(20):
            reply = await self.client.get(f"/api/v1/jobs/{request_id}/events", params={"offset": offset})
        return [json.loads(line) for line in reply.text.splitlines() if line]

    async def finish(self, request_id: str) -> dict[str, Any]:
        await self.events(request_id)
        return (await self.client.get(f"/api/v1/jobs/{request_id}")).json()


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # what is waited for has no event
            await asyncio.sleep(0.005)


def chunks(text: str) -> list[Any]:
    """The values of a server-sent event stream; [DONE] is a string."""
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line.startswith("data: ")]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


def assembled(text: str, n: int = 1) -> tuple[list[dict[str, Any]], list[Any]]:
    """Choices put together from a stream as a client does, and all chunks."""
    values = chunks(text)
    assert values[-1] == "[DONE]"
    made: list[dict[str, Any]] = [{"message": {}, "tool_calls": [], "logprobs": []} for _ in range(n)]
    for chunk in values[:-1]:
        for c in chunk["choices"]:
            choice, delta = made[c["index"]], c["delta"]
            for key in ("content", "reasoning_content"):
                if delta.get(key):
                    choice["message"][key] = choice["message"].get(key, "") + delta[key]
            choice["tool_calls"] += delta.get("tool_calls", [])
            choice["logprobs"] += (c["logprobs"] or {}).get("content", [])
            if c["finish_reason"]:
                choice["last"] = c
    return made, values[:-1]


GROUP = {"trajectories": [], "exceptions": [], "metadata": {}, "metrics": {}, "logs": []}


@asynccontextmanager
async def harness(
    folder: Path, root: Path, engine: FakeEngine | None = None, trainer: FakeTrainer | None = None, **config: Any
) -> AsyncIterator[Harness]:
    engine, trainer = engine or FakeEngine(folder), trainer or FakeTrainer()

    def make_engine(*_: object) -> FakeEngine:
        return engine

    parts = Parts(make_engine, lambda *_: trainer, lambda name: folder, open_store)
    settings = ServerConfig(store=f"file://{root / 'store'}", state_dir=str(root / "state"), **config)
    server = Server(settings, parts, lambda: None)
    await server.start()
    transport = httpx.ASGITransport(create_app(server))
    headers = {"authorization": f"Bearer {server.token}"}
    async with httpx.AsyncClient(transport=transport, base_url=BASE, headers=headers, timeout=30) as client:
        try:
            yield Harness(server, client, engine, trainer)
        finally:
            await server.close()
