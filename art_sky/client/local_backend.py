"""A server of one's own: started for this process, ended with it, however it ends."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import errno
import fcntl
import json
import logging
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

from art_sky.base_models import resolve
from art_sky.client.http_backend import HttpBackend
from art_sky.client.model import Model, TrainableModel
from art_sky.client.progress import progress_bar
from art_sky.client.transport import Transport
from art_sky.config import EngineConfig, ServerConfig, TrainerConfig
from art_sky.errors import ArtSkyError, InvalidInput, NoDiskSpace
from art_sky.schemas import ModelStatus

log = logging.getLogger("art_sky")

SERVER = (sys.executable, "-m", "art_sky.server")
POLL_SECONDS = 0.05
MAX_RESTARTS = 3  # of a server that died; then calls fail with its log
LOG_TAIL = 15  # lines shown when it does not start


class LocalBackend(HttpBackend):
    """Trains and serves on this machine, with its state in the folder `path`, from where the next run goes on.

    `store` keeps the steps elsewhere, in s3://bucket/prefix for one; then `path` has only what may be deleted.

    The server starts with the first registered model and ends with `close()`, the `with` block or this process, also
    when that is killed. `state_dir` (default: a folder under `path`) holds logs and scratch and may be deleted. A
    server that dies is started again at the same address. Works as `with` and as `async with`.
    """

    def __init__(
        self,
        path: str | Path = ".art-sky",
        *,
        store: str | None = None,
        engine: EngineConfig | None = None,
        trainer: TrainerConfig | None = None,
        state_dir: str | Path | None = None,
        start_seconds: float = 60.0,
        stop_seconds: float = 15.0,
        cancel_jobs: bool = True,
        allow_untested: bool = False,
    ) -> None:
        super().__init__(None, cancel_jobs=cancel_jobs)
        self._path = Path(path).expanduser().resolve()
        self._store = store or f"file://{self._path}"
        # A project's name begins with a letter or digit, so this is never one.
        self._state_root = Path(state_dir).expanduser().resolve() if state_dir is not None else self._path / ".server"
        self._engine = engine or EngineConfig()
        self._trainer = trainer or TrainerConfig()
        self._allow_untested = allow_untested
        self._process = _ServerProcess(start_seconds, stop_seconds)
        self._starting = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.stop()

    async def register(self, model: Model[Any]) -> ModelStatus:
        """As every backend; a base model that is not on this machine yet is downloaded here, with a progress bar."""
        if isinstance(model, TrainableModel):
            await _downloaded(model.base_model)
        return await super().register(model)

    async def close(self) -> None:
        """Ends the server after it has flushed; waits at most `stop_seconds`. Running jobs are finished by the next
        one."""
        await super().close()
        await asyncio.to_thread(self._process.stop)

    @property
    def log_file(self) -> Path | None:
        """The server's log, once it was started."""
        return self._process.log_file

    async def _http(self) -> Transport:
        if self._transport is None:
            try:
                await asyncio.to_thread(self._start)  # it blocks
            except asyncio.CancelledError:
                self._process.give_up()  # else Python's exit would wait for the thread
                raise
        return self._connected()

    def _start(self) -> None:
        with self._starting:
            if self._transport is not None:
                return
            with _explained(self._path):
                self._path.mkdir(parents=True, exist_ok=True)
                folder, lock = _own_folder(self._state_root)
            try:
                config = ServerConfig(
                    store=self._store,
                    engine=self._engine,
                    trainer=self._trainer,
                    allow_untested=self._allow_untested,
                    state_dir=str(folder),
                )
                base_url, token = self._process.start(config, lock)
            finally:
                os.close(lock)  # the server has it, and keeps it until it has ended
            self._transport = Transport(base_url, token)


class _ServerProcess:
    """The child, and the thread that starts it again. Safe to stop from any thread, and more than once."""

    def __init__(self, start_seconds: float, stop_seconds: float) -> None:
        self._start_seconds, self._stop_seconds = start_seconds, stop_seconds
        self._process: subprocess.Popen[bytes] | None = None
        self._owner: int | None = None  # our end of the pipe; the server ends when it closes, so with us
        self._stopping = threading.Event()
        self._changing = threading.Lock()  # of the two fields above
        self.log_file: Path | None = None

    def start(self, config: ServerConfig, lock: int) -> tuple[str, str]:
        """(base URL, token) when it listens. Raises ArtSkyError with the end of its log when it does not."""
        atexit.register(self.stop)
        self._stopping.clear()
        state = Path(config.state_dir)
        self.log_file = state / "server.log"
        with _explained(state):
            address = self._spawn(config, state, lock)
        again = config.model_copy(update={"port": address["port"]})
        held = os.dup(lock)
        threading.Thread(target=self._watch, args=(again, state, held), name="server watch", daemon=True).start()
        return str(address["base_url"]), (state / "token").read_text().strip()

    def stop(self) -> None:
        self._stopping.set()
        atexit.unregister(self.stop)
        with self._changing:
            process, self._process = self._process, None
            self._close_owner()
        if process is None:
            return
        for seconds, then in ((self._stop_seconds, process.terminate), (5.0, process.kill), (5.0, process.kill)):
            try:
                process.wait(seconds)
                return
            except subprocess.TimeoutExpired:
                log.warning("the server (process %d) does not end; sending a signal", process.pid)
                then()

    def give_up(self) -> None:
        """Ends a start that is under way; does not wait."""
        self._stopping.set()

    def _spawn(self, config: ServerConfig, state: Path, lock: int) -> dict[str, Any]:
        announced = state / "server.json"
        announced.unlink(missing_ok=True)
        file = state / "server-config.json"
        file.write_text(config.model_dump_json(indent=2))
        theirs, ours = os.pipe()
        try:
            with (state / "server.log").open("ab") as out:
                process = subprocess.Popen(
                    [*SERVER, "--config", str(file), "--owner-fd", str(theirs)],
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=out,
                    pass_fds=(theirs, lock),
                    start_new_session=True,  # Ctrl-C is for the client, which then ends the server in good order
                )
        except BaseException:
            os.close(ours)
            raise
        finally:
            os.close(theirs)
        with self._changing:
            self._close_owner()
            self._process, self._owner = process, ours
        try:
            return self._wait_until_it_listens(process, announced)
        except BaseException:
            with self._changing:
                self._close_owner()
                self._process = None
            process.kill()
            process.wait()
            raise

    def _wait_until_it_listens(self, process: subprocess.Popen[bytes], announced: Path) -> dict[str, Any]:
        deadline = time.monotonic() + self._start_seconds
        while time.monotonic() < deadline:
            code = process.poll()
            if code is not None:
                raise self._failure(f"the server ended with code {code} while it started")
            with contextlib.suppress(OSError, ValueError):  # not there yet, or half written
                address = json.loads(announced.read_text())
                if address["pid"] == process.pid:
                    return dict(address)
            if self._stopping.wait(POLL_SECONDS):
                raise InvalidInput("the start of the server was interrupted; call again")
        raise self._failure(f"the server was not ready within {self._start_seconds:g} s")

    def _failure(self, what: str) -> ArtSkyError:
        assert self.log_file is not None
        with contextlib.suppress(OSError):
            lines = self.log_file.read_text(errors="replace").splitlines()[-LOG_TAIL:]
            return ArtSkyError(
                f"{what}; mend the cause and call again; the end of {self.log_file}:\n" + "\n".join(lines)
            )
        return ArtSkyError(f"{what}; its log is {self.log_file}")

    def _watch(self, config: ServerConfig, state: Path, lock: int) -> None:
        try:
            for _ in range(MAX_RESTARTS):
                process = self._process
                if process is None:
                    return
                code = process.wait()
                if self._stopping.is_set():
                    return
                log.warning("the server ended with code %d; starting it again, its log is %s", code, self.log_file)
                try:
                    self._spawn(config, state, lock)
                except (ArtSkyError, OSError) as e:
                    log.error("the server could not be started again: %s", e)
                    return
            log.error("the server ended %d times; it is not started again, see %s", MAX_RESTARTS, self.log_file)
        finally:
            os.close(lock)

    def _close_owner(self) -> None:
        if self._owner is not None:
            os.close(self._owner)
            self._owner = None


async def _downloaded(base_model: str) -> None:
    """In a thread that nobody waits for, so that Ctrl-C ends a long download at once."""
    loop = asyncio.get_running_loop()
    over: asyncio.Future[None] = loop.create_future()

    def end(error: Exception | None) -> None:
        if not over.done():
            over.set_exception(error) if error else over.set_result(None)

    def run() -> None:
        error: Exception | None = None
        try:
            with progress_bar(f"base model {base_model}", None) as bar:
                resolve(base_model, lambda what, done, total: bar.update(done=done, total=total, text=what))
        except Exception as e:
            error = e
        with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
            loop.call_soon_threadsafe(end, error)

    threading.Thread(target=run, name="base model", daemon=True).start()
    await over


def _own_folder(root: Path) -> tuple[Path, int]:
    """An empty state folder `root/<n>` that no other server uses, and the lock on it."""
    for n in range(100):
        folder = root / f"server-{n}"
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder / "owner.lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            continue
        # What an earlier run left there is not this one's: its models may have another base model.
        for entry in folder.iterdir():
            if entry.name == "owner.lock":
                continue
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        return folder, lock
    raise InvalidInput(f"100 servers use {root} already; end some, or give another state_dir")


@contextlib.contextmanager
def _explained(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as e:
        kind = NoDiskSpace if e.errno in (errno.ENOSPC, errno.EDQUOT) else InvalidInput
        raise kind(f"{folder} cannot be used: {e.strerror or e}; give another folder, or free space") from e
