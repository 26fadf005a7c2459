"""`python -m art_sky.server --config FILE.json`: one server process until it is asked to end."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import fcntl
import json
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import uvicorn
from pydantic import ValidationError

from art_sky import __version__
from art_sky.config import ServerConfig, explain
from art_sky.errors import ArtSkyError, Conflict, InvalidConfig
from art_sky.server.app import create_app
from art_sky.server.connection import Protocol
from art_sky.server.parts import Parts, real_parts
from art_sky.server.server import Server
from art_sky.whole_file import write_whole

log = logging.getLogger("art_sky.server")

_END_SECONDS = 5  # open connections get this long when the server ends


def main(argv: list[str] | None = None) -> int:
    """Exit code 0 after a graceful end, 1 with one line on stderr when the server cannot start."""
    parser = argparse.ArgumentParser(prog="python -m art_sky.server", description="The art-sky server.")
    parser.add_argument("--config", type=Path, required=True, help="a ServerConfig as a JSON file")
    parser.add_argument("--owner-fd", type=int, help="end when this pipe is closed by the process that owns it")
    options = parser.parse_args(argv)
    _log_to_stderr()
    try:
        config = _read_config(options.config)
        with _only_one(Path(config.state_dir)), _listen(config) as listening:
            asyncio.run(serve(config, real_parts(), listening, options.owner_fd))
    except ArtSkyError as e:
        print(f"error: {' '.join(e.message.split())}", file=sys.stderr)
        return 1
    return 0


async def serve(config: ServerConfig, parts: Parts, listening: socket.socket, owner_fd: int | None = None) -> None:
    """Serves on a bound socket until SIGTERM, SIGINT, POST /shutdown, the idle limit or the owner's end."""
    loop = asyncio.get_running_loop()

    def stop() -> None:
        http.should_exit = True

    server = Server(config, parts, stop)
    http = _Http(
        uvicorn.Config(
            create_app(server),
            http=Protocol,
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=_END_SECONDS,
            ws="none",
            timeout_keep_alive=75,  # longer than clients keep idle connections, so that none is reused as it closes
        ),
        lambda: _announce(config, listening),
    )
    for sign in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(sign, stop)
    if owner_fd is not None:
        os.set_inheritable(owner_fd, False)
        loop.add_reader(owner_fd, _owner_gone, loop, owner_fd, stop)
    try:
        await http.serve(sockets=[listening])
    finally:
        (server.state / "server.json").unlink(missing_ok=True)
    log.info("the server has ended")


class _Http(uvicorn.Server):
    """uvicorn that leaves signals alone and says when it listens."""

    def __init__(self, config: uvicorn.Config, listens: Callable[[], None]) -> None:
        super().__init__(config)
        self._listens = listens

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._listens()


def _read_config(file: Path) -> ServerConfig:
    try:
        return ServerConfig.model_validate_json(file.read_bytes())
    except OSError as e:
        raise InvalidConfig(f"cannot read {file}: {e.strerror}; give a ServerConfig as a JSON file") from e
    except ValidationError as e:
        raise InvalidConfig(f"{explain(e, str(file), sorted(ServerConfig.model_fields))}; mend the file") from e


@contextlib.contextmanager
def _only_one(state: Path) -> Iterator[None]:
    """Two servers on one state folder would write into each other's files."""
    try:
        state.mkdir(parents=True, exist_ok=True)
        file = (state / "server.lock").open("a")
    except OSError as e:
        raise InvalidConfig(f"cannot write {state}: {e.strerror}; give a state_dir that can be written") from e
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise Conflict(f"another server uses {state}; stop it, or give another state_dir") from None
        yield


def _listen(config: ServerConfig) -> socket.socket:
    listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((config.host, config.port))
        listening.listen(2048)
    except OSError as e:
        listening.close()
        where = f"{config.host}:{config.port}"
        raise Conflict(f"cannot listen on {where}: {e.strerror}; give another port, or 0 for any free one") from e
    return listening


def _announce(config: ServerConfig, listening: socket.socket) -> None:
    host, port = listening.getsockname()[:2]
    announced = {
        "pid": os.getpid(),
        "port": port,
        "base_url": f"http://{host}:{port}",
        "version": __version__,
        "started": time.time(),
    }
    write_whole(Path(config.state_dir) / "server.json", json.dumps(announced))
    log.info("art-sky %s listens on %s", __version__, announced["base_url"])


def _owner_gone(loop: asyncio.AbstractEventLoop, fd: int, stop: Callable[[], None]) -> None:
    if os.read(fd, 4096) == b"":
        loop.remove_reader(fd)
        log.info("the process that owns this server has ended, so it ends too")
        stop()


def _log_to_stderr() -> None:
    sys.stderr.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]  # lone surrogates in messages
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    logging.getLogger("httpx").setLevel(logging.WARNING)
