"""`Link` over SSH: tunnels in the controller's event loop, questions to the server through them."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import http.client
import json
import os
import socket
import stat
import tempfile
from pathlib import Path
from typing import Any

from art_sky.config import home
from art_sky.controller import ssh
from art_sky.controller.link import LinkStatus
from art_sky.controller.provider import Machine
from art_sky.controller.rented import RentedCluster
from art_sky.controller.secrets import read_secrets
from art_sky.controller.tunnel import Tunnel
from art_sky.errors import InvalidInput, ServerUnreachable
from art_sky.node.records import NodeLimits, WatchdogState
from art_sky.schemas import LeaseStatus, ModelStatus

ASK_SECONDS = 10.0
_LONGEST_SOCKET = 100  # bytes of a path that every system takes for a Unix socket


class SshLink:
    """Implements `Link`. Made in the event loop in which the tunnels live."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._hosts = ssh.known_hosts()
        self._folder = socket_folder()
        self._tunnels: dict[str, Tunnel] = {}  # by cluster id; changed in the loop only

    def socket(self, cluster: RentedCluster) -> Path:
        """Where the node's server is reached while its tunnel is open."""
        return self._folder / f"{cluster.id}.sock"

    def connect(self, cluster: RentedCluster, machine: Machine) -> None:
        tunnel = self._tunnels.get(cluster.id)
        if tunnel is None or _address(tunnel.machine) != _address(machine):
            asyncio.run_coroutine_threadsafe(self._replace(cluster, machine), self._loop).result(ASK_SECONDS)

    def close(self, cluster: RentedCluster) -> None:
        if cluster.id in self._tunnels:
            asyncio.run_coroutine_threadsafe(self._replace(cluster, None), self._loop).result(ASK_SECONDS)

    def status(self, cluster: RentedCluster) -> LinkStatus:
        tunnel = self._tunnels.get(cluster.id)
        return tunnel.status if tunnel is not None else LinkStatus("closed")

    def health(self, cluster: RentedCluster) -> str | None:
        try:
            return str(self._ask(cluster, "/health", None)["version"])
        except (ServerUnreachable, KeyError):
            return None

    def models(self, cluster: RentedCluster) -> dict[str, LeaseStatus | None]:
        found = self._ask(cluster, "/api/v1/status", read_secrets(cluster.name).token)
        models = [ModelStatus.model_validate(m) for m in found["models"]]
        return {f"{m.project}/{m.name}": m.lease for m in models}

    def watchdog(self, machine: Machine) -> WatchdogState:
        tunnel = self._to(machine)
        state = tunnel.watchdog if tunnel is not None else None
        if state is None:
            raise ServerUnreachable(f"the watchdog of {machine.node} says nothing; see `art-sky logs`")
        return state

    def log(self, machine: Machine) -> str:
        return ssh.ask(machine, self._hosts, "logs", "show")

    def send_secrets(self, cluster: RentedCluster, machine: Machine) -> None:
        ssh.send(machine, self._hosts, "secrets", json.dumps(dataclasses.asdict(read_secrets(cluster.name))))

    def send_limits(self, machine: Machine, limits: NodeLimits) -> None:
        ssh.send(machine, self._hosts, "extend", json.dumps(dataclasses.asdict(limits)))

    def send_end(self, machine: Machine) -> None:
        ssh.send(machine, self._hosts, "end", "")
        tunnel = self._to(machine)
        if tunnel is not None:
            tunnel.quick = True

    async def close_all(self) -> None:
        tunnels, self._tunnels = list(self._tunnels.values()), {}
        await asyncio.gather(*(tunnel.close() for tunnel in tunnels))

    def _to(self, machine: Machine) -> Tunnel | None:
        return next((t for t in list(self._tunnels.values()) if t.machine.node == machine.node), None)

    async def _replace(self, cluster: RentedCluster, machine: Machine | None) -> None:
        old = self._tunnels.pop(cluster.id, None)
        if old is not None:
            await old.close()
        if machine is not None:
            self._tunnels[cluster.id] = Tunnel(machine, self.socket(cluster), self._hosts)

    def _ask(self, cluster: RentedCluster, path: str, token: str | None) -> Any:
        """Raises ServerUnreachable."""
        connection = UnixConnection(self.socket(cluster), ASK_SECONDS)
        try:
            headers = {"Host": "127.0.0.1", **({"Authorization": f"Bearer {token}"} if token else {})}
            connection.request("GET", path, headers=headers)
            reply = connection.getresponse()
            body = reply.read()
            if reply.status != 200:
                raise ServerUnreachable(f"the server answered {reply.status} to {path}; it is asked again")
            return json.loads(body)
        except (OSError, http.client.HTTPException, ValueError) as e:
            raise ServerUnreachable(
                f"no answer from the server of {cluster.name} ({type(e).__name__}); it is asked again"
            ) from e
        finally:
            connection.close()


class UnixConnection(http.client.HTTPConnection):
    """HTTP over a Unix socket."""

    def __init__(self, path: Path, seconds: float) -> None:
        super().__init__("127.0.0.1", timeout=seconds)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))


def socket_folder() -> Path:
    """A private folder (0700) whose path is short enough for sockets in it, and plain enough for ssh's -L."""
    folder = home() / "controller" / "sockets"
    if len(os.fsencode(folder)) > _LONGEST_SOCKET - 32 or ":" in str(folder):
        who = hashlib.sha256(os.fsencode(folder)).hexdigest()[:16]
        folder = Path(tempfile.gettempdir()) / f"art-sky-{os.getuid()}-{who}"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise InvalidInput(f"{folder} is not a folder that only you can open; remove it and call again")
    return folder


def _address(machine: Machine) -> tuple[object, ...]:
    return (machine.node, machine.instance, machine.host, machine.port, machine.user, machine.key_file)
