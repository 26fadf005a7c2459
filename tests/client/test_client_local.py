"""LocalBackend and the process that it owns. The server here is a few lines that keep to its contract."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import art_sky as art
from art_sky.client import local_backend
from art_sky.errors import ArtSkyError, InvalidInput, NotFound

SERVER = """
import argparse, json, os, signal, sys, threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

options = argparse.ArgumentParser()
options.add_argument("--config", type=Path)
options.add_argument("--owner-fd", type=int)
options = options.parse_args()
config = json.loads(options.config.read_text())
state = Path(config["state_dir"])
if (state.parent.parent / "broken").exists():
    print("the port is taken; give another", file=sys.stderr)
    sys.exit(3)
os.close(os.open(state / "token", os.O_WRONLY | os.O_CREAT, 0o600))
(state / "token").write_text("t0ken\\n")


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *args):
        pass

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        assert self.headers["authorization"] == "Bearer t0ken"
        self.answer({
            "project": body["project"], "name": body["name"], "base_model": body["base_model"], "lora": body["lora"],
            "inference_name": body["name"], "step": 0, "manifest": "m", "server_version": body["client_version"],
            "context_length": 1,
        })

    def do_GET(self):
        self.answer({"pid": os.getpid(), "store": config["store"], "engine": config["engine"]})

    def answer(self, value):
        data = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


http = ThreadingHTTPServer(("127.0.0.1", config["port"]), Handler)
threading.Thread(target=lambda: (os.read(options.owner_fd, 1), os._exit(0)), daemon=True).start()
port = http.server_address[1]
address = {"pid": os.getpid(), "port": port, "base_url": f"http://127.0.0.1:{port}"}
(state / "server.json.new").write_text(json.dumps(address))
(state / "server.json.new").replace(state / "server.json")
http.serve_forever()
"""


@pytest.fixture(autouse=True)
def base_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that looks like a base model, at `./base`; this server loads none."""
    folder = tmp_path / "base"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").touch()
    monkeypatch.chdir(tmp_path)
    return folder


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    script = tmp_path / "server.py"
    script.write_text(SERVER)
    command = (sys.executable, str(script))
    monkeypatch.setattr(local_backend, "SERVER", command)
    return command


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "runs"


@pytest.fixture
def broken(path: Path) -> Path:
    """While this file is there, the server ends while it starts."""
    path.mkdir()
    (path / "broken").touch()
    return path / "broken"


async def facts(backend: art.LocalBackend) -> dict[str, Any]:
    model: art.TrainableModel[None] = art.TrainableModel(name="agent", project="p", base_model="./base")
    await model.register(backend)
    state = await model.read_state()
    assert state is not None
    return state


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


async def until(done: Callable[[], bool], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline, "it took too long"
        await asyncio.sleep(0.02)


async def test_it_starts_when_needed_and_ends_with_the_block(command: Any, path: Path) -> None:
    async with art.LocalBackend(path, engine=art.EngineConfig(max_batch=3)) as backend:
        assert backend.log_file is None
        with pytest.raises(InvalidInput, match="register a model first"):
            backend.inference()
        seen = await facts(backend)
        assert is_running(seen["pid"]) and seen["engine"]["max_batch"] == 3
        assert seen["store"] == f"file://{path}"
        base_url, key = backend.inference()
        assert base_url.endswith("/v1") and key == "t0ken"
        assert (await facts(backend))["pid"] == seen["pid"]
        assert backend.log_file is not None and backend.log_file.is_relative_to(path / ".server")
    assert not is_running(seen["pid"])


async def test_the_plain_with_block_and_close_twice(command: Any, path: Path) -> None:
    with art.LocalBackend(path) as backend:
        seen = await facts(backend)
    assert not is_running(seen["pid"])
    await backend.close()


async def test_two_at_once_share_nothing_but_the_store(command: Any, path: Path) -> None:
    async with art.LocalBackend(path) as one, art.LocalBackend(path) as two:
        first, second = await asyncio.gather(facts(one), facts(two))
        assert first["pid"] != second["pid"] and first["store"] == second["store"]
        assert one.log_file != two.log_file


async def test_what_an_earlier_server_left_is_not_taken_over(command: Any, path: Path) -> None:
    folder = path / ".server" / "server-0"
    folder.mkdir(parents=True)
    (folder / "server.json").write_text(json.dumps({"pid": 1, "port": 1, "base_url": "http://127.0.0.1:1"}))
    (folder / "models.json").write_text("[]")
    async with art.LocalBackend(path) as backend:
        await facts(backend)
        assert not (folder / "models.json").exists()


async def test_a_server_that_does_not_start_shows_its_log(command: Any, path: Path, broken: Path) -> None:
    async with art.LocalBackend(path) as backend:
        with pytest.raises(ArtSkyError, match=r"(?s)ended with code 3 while it started.*the port is taken"):
            await facts(backend)
        await asyncio.to_thread(broken.unlink)
        assert is_running((await facts(backend))["pid"])


async def test_a_server_that_stays_silent_is_given_up(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_backend, "SERVER", (sys.executable, "-c", "import time; time.sleep(60)"))
    async with art.LocalBackend(path, start_seconds=0.3) as backend:
        with pytest.raises(ArtSkyError, match=r"not ready within 0\.3 s"):
            await facts(backend)


async def test_cancelling_while_it_starts_leaves_nothing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_backend, "SERVER", (sys.executable, "-c", "import time; time.sleep(60)"))
    backend = art.LocalBackend(path)
    task = asyncio.create_task(facts(backend))
    await until(lambda: backend.log_file is not None and backend.log_file.exists())
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until(lambda: backend._process._process is None)


async def test_a_killed_server_comes_back_at_the_same_address(command: Any, path: Path) -> None:
    async with art.LocalBackend(path) as backend:
        seen, address = await facts(backend), backend.inference()
        os.kill(seen["pid"], signal.SIGKILL)
        again = await facts(backend)
        assert again["pid"] != seen["pid"] and backend.inference() == address
    await until(lambda: not is_running(again["pid"]))


async def test_a_folder_that_cannot_be_used(command: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    async with art.LocalBackend(tmp_path / "file") as backend:
        with pytest.raises(InvalidInput, match="give another folder"):
            await facts(backend)


async def test_a_base_model_that_is_nowhere_starts_nothing(command: Any, path: Path) -> None:
    backend = art.LocalBackend(path)
    model: art.TrainableModel[None] = art.TrainableModel(name="agent", project="p", base_model="./nowhere")
    with pytest.raises(NotFound, match="there is no such folder"):
        await model.register(backend)
    assert backend.log_file is None


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, None])
async def test_the_server_ends_with_its_client(command: Any, path: Path, tmp_path: Path, how: Any) -> None:
    """Killed, terminated, or just at its end without closing anything."""
    script = f"""
        import asyncio, sys, time
        import art_sky as art
        from art_sky.client import local_backend
        local_backend.SERVER = {command!r}

        async def main():
            backend = art.LocalBackend({str(path)!r})
            model = art.TrainableModel(name="agent", project="p", base_model="./base")
            await model.register(backend)
            print((await model.read_state())["pid"], flush=True)

        asyncio.run(main())
        if {how is not None}:
            time.sleep(60)
    """
    client = await asyncio.create_subprocess_exec(
        sys.executable, "-c", textwrap.dedent(script), stdout=asyncio.subprocess.PIPE
    )
    assert client.stdout is not None
    pid = int(await client.stdout.readline())
    if how is not None:
        assert is_running(pid)
        client.send_signal(how)
    await asyncio.wait_for(client.wait(), 20)
    await until(lambda: not is_running(pid))
