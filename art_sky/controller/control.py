"""How commands and backends talk to the controller: JSON lines over a Unix socket that only its user can open.

The controller speaks first: `{"art_sky": VERSION, "pid": N}`. A request is one line, `{"op": NAME, ...}`; replies are
`{"event": {...}}` lines, then one `{"ok": ...}` or `{"error": ...}`.
"""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from art_sky import __version__
from art_sky.config import home
from art_sky.controller.registry import Registry, registry_file
from art_sky.controller.rented import LaunchRequest
from art_sky.controller.views import cluster_view, is_over
from art_sky.errors import ArtSkyError, ServerUnreachable, VersionMismatch, from_wire

START_SECONDS = 20.0
HELLO_SECONDS = 10.0
REPLY_SECONDS = 60.0  # for one line; a watch sends one at least every few seconds
CONTROLLER = (sys.executable, "-m", "art_sky.controller")


def controller_folder() -> Path:
    return home() / "controller"


class ControlClient:
    """Each method is one connection. `start`: whether a controller that does not run is started.

    All raise the controller's typed error, ServerUnreachable when there is none, VersionMismatch.
    """

    def __init__(self, folder: Path | None = None, *, start: bool = True) -> None:
        self._folder = folder if folder is not None else controller_folder()
        self._start = start

    def launch(
        self,
        request: LaunchRequest,
        plan: list[dict[str, Any]],
        *,
        store_env: dict[str, str] | None = None,
        hf_token: str | None = None,
    ) -> dict[str, Any]:
        """Puts the intent on record and begins; see `watch`. `plan` is the offers (`provider.Offer`) in the order in
        which they are tried. Raises Conflict where a cluster of this name is up and differs, naming in what."""
        secrets = {"store_env": store_env or {}, "hf_token": hf_token}
        return self._call("launch", request=request.model_dump(), plan=plan, secrets=secrets)

    def watch(
        self, id: str, until: str, told: Callable[[dict[str, Any]], None], *, owner: bool = False
    ) -> dict[str, Any]:
        """Waits until the cluster is `up` or `gone`, telling each event `{n, time, text}`; returns its view.

        With `owner` the launch belongs to this call: when its process goes away before the cluster is up, however
        that happens, the cluster is ended. A controller that is killed meanwhile is started again. Raises
        LaunchFailed when it is to be up and was given up.
        """
        after = 0

        def tell(event: dict[str, Any]) -> None:
            nonlocal after
            after = max(after, int(event["n"]))
            told(event)

        deadline: float | None = None
        while True:
            try:
                return self._call("watch", tell, id=id, until=until, owner=owner, after=after)
            except ServerUnreachable:
                deadline = deadline or time.monotonic() + START_SECONDS
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.2)

    def down(self, name: str) -> dict[str, Any]:
        """Says that the cluster is to end; `watch(id, "gone")` waits for it."""
        return self._call("down", name=name)

    def extend(
        self, name: str, hours: float, dollars: float, store_env: dict[str, str] | None = None
    ) -> dict[str, Any]:
        """`store_env` takes the place of the credential for the store that its launch gave."""
        return self._call("extend", name=name, hours=hours, dollars=dollars, store_env=store_env or {})

    def status(self) -> list[dict[str, Any]]:
        """A view of the newest run of each name."""
        return list(self._call("status")["clusters"])

    def machine(self, name: str) -> dict[str, Any]:
        """The fields of provider.Machine of the cluster's node. Raises ServerUnreachable when there is none now."""
        return self._call("machine", name=name)

    def stop(self) -> dict[str, Any]:
        """Ends the controller; machines go on by themselves until their own limits end them."""
        return self._call("stop")

    def _call(self, op: str, told: Callable[[dict[str, Any]], None] | None = None, **fields: Any) -> dict[str, Any]:
        with self._connected() as connection:
            connection.sendall(json.dumps({"op": op, **fields}).encode() + b"\n")
            connection.settimeout(REPLY_SECONDS)
            for reply in _lines(connection):
                if "event" in reply:
                    if told is not None and reply["event"]:
                        told(reply["event"])
                elif "error" in reply:
                    raise from_wire(reply)
                else:
                    return dict(reply["ok"])
        raise ServerUnreachable("the controller ended before it answered; see its log and call again")

    @contextlib.contextmanager
    def _connected(self) -> Iterator[socket.socket]:
        connection, hello = self._greeted()
        with connection:
            if hello.get("art_sky") != __version__:
                raise VersionMismatch(
                    f"the controller (process {hello.get('pid')}) is art-sky {hello.get('art_sky')} and this is "
                    f"{__version__}; run `kill {hello.get('pid')}` and call again: its machines go on, and a new "
                    "controller takes them over"
                )
            try:
                yield connection
            except (ConnectionError, TimeoutError) as e:
                raise ServerUnreachable(f"the controller does not answer ({type(e).__name__}); {self._hangs()}") from e

    def _greeted(self) -> tuple[socket.socket, dict[str, Any]]:
        """A connection to a controller that has said who it is; one that was just ending is asked again."""
        deadline = time.monotonic() + START_SECONDS
        while True:
            connection = self._connect()
            if connection is None and self._start:
                connection = self._start_controller()
            if connection is None:
                raise ServerUnreachable(f"no controller runs here; see {self._folder / 'controller.log'}")
            connection.settimeout(HELLO_SECONDS)
            try:
                hello = next(_lines(connection), None)
                if hello is not None:
                    return connection, hello
            except TimeoutError:
                connection.close()
                raise ServerUnreachable(self._hangs()) from None
            except ConnectionError:
                pass
            connection.close()
            if time.monotonic() > deadline:
                raise ServerUnreachable(self._hangs())
            time.sleep(0.05)

    def _connect(self) -> socket.socket | None:
        """None when nobody listens."""
        try:
            path = json.loads((self._folder / "control.json").read_text())["socket"]
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                connection.connect(path)
            except OSError:
                connection.close()
                return None
            return connection
        except (OSError, ValueError, KeyError):
            return None

    def _start_controller(self) -> socket.socket | None:
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        log = self._folder / "controller.log"
        with log.open("ab") as out:
            process = subprocess.Popen(
                [*CONTROLLER], stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True, cwd="/"
            )
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            connection = self._connect()
            if connection is not None:
                return connection
            if process.poll() not in (None, 0):  # 0: another one runs already, and will listen
                raise ArtSkyError(f"the controller does not start: {_last_line(log)}")
            time.sleep(0.05)
        raise ServerUnreachable(self._hangs())

    def _hangs(self) -> str:
        try:
            pid = json.loads((self._folder / "control.json").read_text())["pid"]
        except (OSError, ValueError, KeyError):
            return f"no controller listens; see {self._folder / 'controller.log'} and call again"
        return f"see {self._folder / 'controller.log'}; `kill -9 {pid}` and the next call starts another, which goes on"


def _lines(connection: socket.socket) -> Iterator[dict[str, Any]]:
    with connection.makefile("rb") as stream:
        for line in stream:
            yield json.loads(line)


def _last_line(log: Path) -> str:
    with contextlib.suppress(OSError):
        lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
        if lines:
            return lines[-1].removeprefix("error: ")
    return f"see {log}"


def rented_views() -> list[dict[str, Any]]:
    """Views of rented clusters, of each name the newest run. Asks the controller, which is started, only while there is
    anything to watch. Raises what the registry and the controller raise."""
    if not registry_file().exists():
        return []
    registry = Registry(registry_file())
    try:
        newest = registry.newest()
    finally:
        registry.close()
    if all(is_over(cluster) for cluster in newest):
        now = time.time()
        nothing = {"held_requests": 0, "store_credential": None}
        return [{**cluster_view(cluster, None, None, now), **nothing} for cluster in newest]
    return ControlClient().status()
