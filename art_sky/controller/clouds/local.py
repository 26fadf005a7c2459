"""The local cloud: a server in the background of this machine, with an idle limit instead of a bill.

Everything about the cluster NAME lies in `home()/clusters/NAME`: `cluster.json` (the record, written
atomically), `lock` (held by the launch under way), `config.json` (what the server was started with),
`server.log` and `state/` (the server's own folder, with its token and `server.json`). The record is a memory;
what a caller sees is the record checked against the processes of this machine.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from art_sky.config import ServerConfig, home
from art_sky.controller import api, processes
from art_sky.controller.cloud import CLUSTER_TRANSITIONS, Cluster, ClusterState, LaunchConfig
from art_sky.errors import ArtSkyError, Conflict, CorruptObject, InvalidConfig, InvalidInput, NoDiskSpace, NotFound
from art_sky.names import check_name
from art_sky.suggest import did_you_mean
from art_sky.whole_file import write_whole

SERVER = (sys.executable, "-m", "art_sky.server")


class LocalCloud:
    """Implements `Cloud`. `server` is the command that is started with `--config FILE`.

    `start_seconds`: until the server answers; `flush_seconds`: for its own end after it was asked;
    `term_seconds`: after SIGTERM, before SIGKILL.
    """

    def __init__(
        self,
        root: Path | None = None,
        *,
        server: Sequence[str] = SERVER,
        start_seconds: float = 60.0,
        flush_seconds: float = 30.0,
        term_seconds: float = 5.0,
    ) -> None:
        self._root = root if root is not None else home() / "clusters"
        self._server = tuple(server)
        self._start_seconds, self._flush_seconds, self._term_seconds = start_seconds, flush_seconds, term_seconds

    def folder(self, name: str) -> Path:
        """Where the cluster's files are; `LaunchConfig.server.state_dir` must be its `state`."""
        return self._root / check_name("cluster", name)

    def launch(self, config: LaunchConfig, progress: Callable[[str], None]) -> Cluster:
        """Raises Conflict (the name is up, a launch of it is under way, the port is taken), InvalidInput (a
        folder that cannot be written), NoDiskSpace, or ArtSkyError when the server ends or stays silent."""
        folder = self.folder(config.name)
        if Path(config.server.state_dir) != folder / "state":
            raise InvalidConfig(
                f"state_dir of a local cluster is {folder / 'state'}; give that, or use `art-sky serve`"
            )
        with _explained(folder):
            folder.mkdir(parents=True, exist_ok=True)
            with self._lock(config.name):
                self._refuse_if_up(config.name)
                _refuse_taken_port(config.server)
                # What an earlier server of this name left must not be taken for this one's.
                shutil.rmtree(folder / "state", ignore_errors=True)
                (folder / "server.log").write_bytes(b"")
                return self._start(config, folder, progress)

    def list(self) -> list[Cluster]:
        """All clusters, those that are down included, as observed now."""
        if not self._root.is_dir():
            return []
        records = (f for f in sorted(self._root.iterdir()) if (f / "cluster.json").is_file())
        return [self._observed(_read(f / "cluster.json")) for f in records]

    def has(self, name: str) -> bool:
        return (self.folder(name) / "cluster.json").is_file()

    def get(self, name: str) -> Cluster:
        """Raises NotFound, with a near name."""
        record = self.folder(name) / "cluster.json"
        if not record.is_file():
            near = did_you_mean(name, [c.name for c in self.list()])
            raise NotFound(f"there is no cluster {name!r} ({near}); see `art-sky status`, or `art-sky launch {name}`")
        return self._observed(_read(record))

    def down(self, name: str) -> Cluster:
        """Asks the server to end, then ends it with all its children. A cluster that is down stays down."""
        cluster = self.get(name)
        if cluster.state == "down":
            return cluster
        pid, who = cluster.details.get("pid"), cluster.details.get("identity")
        if pid is not None and processes.is_alive(pid, who):
            try:
                api.shutdown(cluster)
                processes.wait_end(pid, who, self._flush_seconds)
            except ArtSkyError:
                pass  # it does not listen; signals follow
            if not processes.end_group(pid, who, self._term_seconds):
                raise ArtSkyError(f"process {pid} of cluster {name!r} does not end; end it with `kill -9 {pid}`")
        return self._move(cluster, "down")

    def _start(self, config: LaunchConfig, folder: Path, progress: Callable[[str], None]) -> Cluster:
        server = config.server
        cluster = Cluster(
            name=config.name,
            cloud="local",
            state="starting",
            base_url=None,
            token_file=str(Path(server.state_dir) / "token"),
            log_file=str(folder / "server.log"),
            store=server.store,
            created=time.time(),
            details={"idle_minutes": server.idle_minutes},
        )
        self._write(cluster)
        process: subprocess.Popen[bytes] | None = None
        try:
            config_file = folder / "config.json"
            write_whole(config_file, server.model_dump_json(indent=2), 0o600)
            with (folder / "server.log").open("ab") as log, processes.interrupts_held():
                process = subprocess.Popen(
                    [*self._server, "--config", str(config_file)],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,  # Ctrl-C here is not meant for it; its children share its group
                )
                who = processes.identity(process.pid)
            cluster = cluster.model_copy(update={"details": {**cluster.details, "pid": process.pid, "identity": who}})
            self._refuse_if_ended(cluster)
            self._write(cluster)
            progress(f"started the server (process {process.pid}), its log is {cluster.log_file}")
            base_url = self._wait_until_it_answers(process, cluster, progress)
            self._refuse_if_ended(cluster)
            return self._move(cluster.model_copy(update={"base_url": base_url}), "up")
        except BaseException:
            # KeyboardInterrupt too: whatever happens, nothing is left running.
            if process is not None:
                processes.end_group(process.pid, processes.identity(process.pid), self._term_seconds)
                process.wait()
            with contextlib.suppress(OSError):  # the disk may be what failed; the first error is the one to tell
                if _read(folder / "cluster.json").state == "starting":
                    self._move(cluster, "failed")
            raise

    def _wait_until_it_answers(
        self, process: subprocess.Popen[bytes], cluster: Cluster, progress: Callable[[str], None]
    ) -> str:
        began = told = time.monotonic()
        while True:
            if process.poll() is not None:
                raise ArtSkyError(
                    f"the server ended with code {process.returncode} before it answered: "
                    f"{_last_line(Path(cluster.log_file))}; see {cluster.log_file}"
                )
            base_url = _announced_url(cluster)
            if base_url is not None and api.is_healthy(base_url):
                return base_url
            now = time.monotonic()
            if now - began > self._start_seconds:
                raise ArtSkyError(
                    f"the server did not answer within {self._start_seconds:.0f} s and was ended; "
                    f"see {cluster.log_file}, then launch again"
                )
            if now - told >= 1:
                told = now
                progress(f"waiting for the server to answer: {now - began:.0f} s of {self._start_seconds:.0f} s")
            time.sleep(processes.POLL_SECONDS)

    def _refuse_if_up(self, name: str) -> None:
        if not (self.folder(name) / "cluster.json").is_file():
            return
        cluster = self._observed(_read(self.folder(name) / "cluster.json"))
        if cluster.state in ("up", "starting"):
            where = f"at {cluster.base_url}" if cluster.base_url else f"as process {cluster.details.get('pid')}"
            raise Conflict(
                f"cluster {name!r} is already {cluster.state} {where} (token in {cluster.token_file}); use it, end "
                f"it with `art-sky down {name}`, or launch another with `art-sky launch OTHER-NAME`"
            )

    def _refuse_if_ended(self, cluster: Cluster) -> None:
        if _read(self.folder(cluster.name) / "cluster.json").state != "starting":
            raise Conflict(f"cluster {cluster.name!r} was ended while it started; launch it again if it is wanted")

    def _observed(self, record: Cluster) -> Cluster:
        """The record as its processes say: a dead server is down, a launch that died half-way has failed."""
        if record.state not in ("starting", "up"):
            return record
        alive = processes.is_alive(record.details.get("pid"), record.details.get("identity"))
        if record.state == "up":
            return record if alive else _moved(record, "down")
        if self._launching(record.name):
            return record
        if not alive:
            return _moved(record, "failed")
        # Whoever launched it was killed; the server itself may have come up since.
        base_url = _announced_url(record)
        if base_url is not None and api.is_healthy(base_url):
            return _moved(record.model_copy(update={"base_url": base_url}), "up")
        return record

    def _move(self, cluster: Cluster, state: ClusterState) -> Cluster:
        moved = _moved(cluster, state)
        self._write(moved)
        return moved

    def _write(self, cluster: Cluster) -> None:
        write_whole(self.folder(cluster.name) / "cluster.json", cluster.model_dump_json(indent=2), 0o600)

    @contextlib.contextmanager
    def _lock(self, name: str) -> Iterator[None]:
        """Held by one launch at a time; the system frees it when the launching process dies."""
        with (self.folder(name) / "lock").open("ab") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise Conflict(
                    f"another launch of cluster {name!r} is under way; wait for it, or end it with "
                    f"`art-sky down {name}`"
                ) from None
            yield

    def _launching(self, name: str) -> bool:
        try:
            with self._lock(name):
                return False
        except Conflict:
            return True


def _moved(cluster: Cluster, state: ClusterState) -> Cluster:
    """A step along CLUSTER_TRANSITIONS, which no caller may leave."""
    if state not in CLUSTER_TRANSITIONS[cluster.state]:
        raise AssertionError(f"cluster {cluster.name!r} cannot go from {cluster.state} to {state}")
    return cluster.model_copy(update={"state": state})


def _read(path: Path) -> Cluster:
    try:
        return Cluster.model_validate_json(path.read_bytes())
    except ValueError as e:
        raise CorruptObject(f"the record {path} cannot be read; remove its folder if no server of it runs") from e


def _announced_url(cluster: Cluster) -> str | None:
    """What the server wrote into its own folder when it began to listen."""
    try:
        announced = json.loads((Path(cluster.token_file).parent / "server.json").read_text())
        return str(announced["base_url"])
    except (FileNotFoundError, ValueError, KeyError):  # not there, or not whole yet
        return None


def _refuse_taken_port(server: ServerConfig) -> None:
    if server.port == 0:
        return
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((server.host, server.port))
        except OSError as e:
            why = "is in use" if e.errno == errno.EADDRINUSE else f"cannot be used ({e.strerror})"
            raise Conflict(f"port {server.port} {why}; give another with --port, or 0 for any free one") from e


def _last_line(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1][:300] if lines else "it wrote nothing"


@contextlib.contextmanager
def _explained(folder: Path) -> Iterator[None]:
    """Turns what the file system refuses into one line that says what to do."""
    try:
        yield
    except OSError as e:
        path: Any = e.filename or folder
        if e.errno in (errno.ENOSPC, errno.EDQUOT):
            raise NoDiskSpace(f"no space left for {path}; free some, or set ART_SKY_HOME to another disk") from e
        if e.errno in (errno.EACCES, errno.EROFS, errno.EPERM, errno.ENOTDIR):
            raise InvalidInput(
                f"cannot write {path} ({e.strerror}); set ART_SKY_HOME to a folder that you may write to"
            ) from e
        raise
