"""The controller: one process per user that owns tunnels, stable addresses and limits of all rented clusters.

It holds a lock, so that there is one; it is started by whoever needs it and ends when nothing is left to watch. All
that matters is in the registry: after any end of it the next one goes on.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import fcntl
import json
import logging
import os
import secrets
import signal
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from art_sky import __version__
from art_sky.config import explain
from art_sky.controller.address import Address
from art_sky.controller.calls import Calls
from art_sky.controller.clock import Clock
from art_sky.controller.clouds.local import LocalCloud
from art_sky.controller.ledger import StoreLedger
from art_sky.controller.order import make_order
from art_sky.controller.provider import NodeOrder, Offer, Provider
from art_sky.controller.reconcile import Reconciler
from art_sky.controller.registry import Registry
from art_sky.controller.renewal import FileCredentials
from art_sky.controller.rented import LaunchRequest, Node, RentedCluster
from art_sky.controller.secrets import write_secrets
from art_sky.controller.ssh_link import SshLink, socket_folder
from art_sky.controller.views import cluster_view, is_over, state_of
from art_sky.errors import ArtSkyError, Conflict, InvalidInput, LaunchFailed, NotFound, ServerUnreachable
from art_sky.names import check_name
from art_sky.node.records import NodeLimits
from art_sky.whole_file import write_whole

log = logging.getLogger("art_sky.controller")

LINGER_SECONDS = 300.0  # with nothing to watch, before it ends itself; long enough for a sweep
SWEEP_SECONDS, SWEPT_SECONDS = 240.0, 3600.0  # how often machines are looked for that ended lately, and how long
AFTER_ERROR_SECONDS = 10.0
WATCH_SECONDS = 0.2
KEEPALIVE_SECONDS = 5.0
TOLD_SECONDS = 20.0  # an extension waits so long for the node to have it

Reply = Callable[[dict[str, Any]], Awaitable[None]]


@contextlib.contextmanager
def only_one(folder: Path) -> Iterator[None]:
    """Held while a controller lives; the system frees it. Raises Conflict when another one has it."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    folder.chmod(0o700)
    with (folder / "lock").open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Conflict("another controller runs already; use that") from None
        yield


class Daemon:
    """Made and run in one event loop."""

    def __init__(self, folder: Path, registry: Registry, provider: Provider) -> None:
        self._folder, self._registry, self._provider = folder, registry, provider
        self._clock, self._link = Clock(), SshLink()
        self._reconciler = Reconciler(
            registry, provider, self._link, StoreLedger(), order_with_models, self._clock, Calls(), FileCredentials()
        )
        self._addresses: dict[str, Address] = {}  # by cluster id
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._nudges: dict[str, asyncio.Event] = {}
        self._launching = asyncio.Lock()
        self._connections = 0
        self._stop = asyncio.Event()
        self._busy_until = self._clock.now() + LINGER_SECONDS
        # A provider may take a minute to answer, and there may be many clusters.
        self._threads = ThreadPoolExecutor(max_workers=32, thread_name_prefix="step")

    async def run(self) -> None:
        """Until SIGTERM, the op `stop`, or when nothing was left to watch for a while."""
        loop = asyncio.get_running_loop()
        for sign in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(sign, self._stop.set)
        for cluster in self._registry.all():
            if not is_over(cluster):
                self._watch_cluster(cluster)
        path = socket_folder() / "control.sock"
        path.unlink(missing_ok=True)
        server = await asyncio.start_unix_server(self._serve, path, limit=16 << 20)
        path.chmod(0o600)
        announced = {"socket": str(path), "pid": os.getpid(), "version": __version__}
        write_whole(self._folder / "control.json", json.dumps(announced))
        log.info("controller of art-sky %s, process %d", __version__, os.getpid())
        try:
            await self._until_idle()
        finally:
            server.close()
            for task in self._tasks.values():
                task.cancel()
            await asyncio.gather(*self._tasks.values(), return_exceptions=True)
            for address in self._addresses.values():
                await address.close()
            await self._link.close_all()
            (self._folder / "control.json").unlink(missing_ok=True)
            # Threads that wait for a cloud are left: what they do is on record.
            self._threads.shutdown(wait=False, cancel_futures=True)
            log.info("the controller has ended")

    async def _until_idle(self) -> None:
        swept = self._clock.now() - SWEEP_SECONDS + 60
        while not self._stop.is_set():
            now = self._clock.now()
            if self._tasks or self._connections:
                self._busy_until = now + LINGER_SECONDS
            if now - swept > SWEEP_SECONDS:
                swept = now
                await self._sweep()
            if now > self._busy_until:
                log.info("nothing is left to watch")
                return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    await self._stop.wait()

    async def _sweep(self) -> None:
        try:
            closed = [n.closed for c in self._registry.all() for n in c.nodes if n.closed is not None]
            if self._clock.now() - max(closed, default=0.0) < SWEPT_SECONDS:
                await self._in_thread(self._reconciler.sweep)
        except ArtSkyError as e:
            log.warning("machines that should be gone could not be looked for: %s", e.message)

    # --- one task a cluster -------------------------------------------------------------------------------

    def _watch_cluster(self, cluster: RentedCluster) -> None:
        if cluster.id not in self._tasks:
            self._nudges[cluster.id] = asyncio.Event()
            self._tasks[cluster.id] = asyncio.create_task(self._cluster(cluster), name=f"cluster {cluster.name}")

    async def _cluster(self, cluster: RentedCluster) -> None:
        id, nudge = cluster.id, self._nudges[cluster.id]
        try:
            while True:
                await self._keep_address(cluster)
                wait: float | None = AFTER_ERROR_SECONDS
                try:
                    wait = await self._in_thread(lambda: self._reconciler.step(id))
                    cluster = self._registry.get(id)
                except Exception as e:  # one cluster's trouble must not be another's, and its limits go on
                    log.exception("a step of %s failed", id)
                    await self._in_thread(partial(self._tell_failed, id, e))
                if wait is None:
                    return
                self._gate(cluster)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(wait):
                        await nudge.wait()
                nudge.clear()
        finally:
            address = self._addresses.pop(id, None)
            if address is not None:
                await address.close()
            self._tasks.pop(id, None)

    def _tell_failed(self, id: str, error: Exception) -> None:
        try:
            self._registry.note(id, self._clock.now(), f"a step failed and is tried again: {error}")
        except ArtSkyError as e:  # the registry itself may be what failed
            log.warning("%s", e.message)

    async def _keep_address(self, cluster: RentedCluster) -> None:
        """The address listens from the intent to the end; a port that is taken is tried again."""
        if cluster.id in self._addresses:
            return
        address = Address(cluster.name, cluster.port, self._link.socket(cluster))
        try:
            await address.start()
        except Conflict as e:
            log.warning("%s", e.message)
            return
        self._addresses[cluster.id] = address
        self._gate(cluster)

    def _gate(self, cluster: RentedCluster) -> None:
        address = self._addresses.get(cluster.id)
        if address is None:
            return
        if cluster.node is not None and cluster.node.state == "up" and cluster.wanted == "up":
            address.open()
        else:
            address.hold(_waits_for(cluster))

    # --- control ------------------------------------------------------------------------------------------

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async def reply(line: dict[str, Any]) -> None:
            writer.write(json.dumps(line).encode() + b"\n")
            await writer.drain()

        self._connections += 1
        try:
            await reply({"art_sky": __version__, "pid": os.getpid()})
            line = await reader.readline()
            if line:
                await reply(await self._answer(line, reader, reply))
        except ConnectionError:
            pass  # whoever asked has gone; what that means for a launch is `_watch`'s affair
        finally:
            self._connections -= 1
            writer.close()

    async def _answer(self, line: bytes, reader: asyncio.StreamReader, reply: Reply) -> dict[str, Any]:
        ops: dict[str, Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]] = {
            "launch": self._launch,
            "down": self._down,
            "extend": self._extend,
            "status": self._status,
            "machine": self._machine,
            "stop": self._end,
            "watch": lambda request: self._watch(request, reader, reply),
        }
        try:
            request = json.loads(line)
            op = ops.get(request.pop("op"))
            if op is None:
                raise InvalidInput(f"the controller knows {', '.join(ops)}; run one art-sky release on this machine")
            return {"ok": await op(request)}
        except ArtSkyError as e:
            return e.to_wire()
        except ConnectionError:
            raise
        except Exception as e:
            log.exception("a request failed")
            return ArtSkyError(
                f"the controller failed ({type(e).__name__}); see {self._folder}/controller.log"
            ).to_wire()

    async def _launch(self, given: dict[str, Any]) -> dict[str, Any]:
        try:
            request = LaunchRequest.model_validate(given["request"])
        except ValidationError as e:
            raise InvalidInput(explain(e, "launch", sorted(LaunchRequest.model_fields))) from e
        name, plan = check_name("cluster", request.name), [dataclasses.asdict(Offer(**o)) for o in given["plan"]]
        if not plan:
            raise InvalidInput("the plan names no offer; see `art-sky launch --dry-run`")
        async with self._launching:
            old = self._registry.find(name)
            if old is not None and not is_over(old):
                _refuse_other(old, request)
                if given["secrets"]["store_env"]:
                    await asyncio.to_thread(_take_credential, old, given["secrets"]["store_env"])
                    self._nudge(old.id)
                return self._view(old)
            _refuse_local(name)
            await asyncio.to_thread(write_secrets, name, **given["secrets"])
            id = f"artsky-{secrets.token_hex(4)}"
            address = Address(name, old.port if old is not None else 0, self._folder)
            await address.start()
            cluster = RentedCluster(
                name=name,
                id=id,
                wanted="up",
                created=self._clock.now(),
                request=request,
                plan=plan,
                port=address.port,
            )
            address.upstream = self._link.socket(cluster)
            try:
                await self._in_thread(lambda: self._registry.add(cluster))
            except BaseException:
                await address.close()
                raise
            self._addresses[id] = address
            self._gate(cluster)
            self._watch_cluster(cluster)
        return self._view(cluster)

    async def _watch(self, given: dict[str, Any], reader: asyncio.StreamReader, reply: Reply) -> dict[str, Any]:
        id, after, until = str(given["id"]), int(given["after"]), str(given["until"])
        left = asyncio.create_task(reader.read(1))  # ends when whoever asked goes away
        quiet = 0.0
        try:
            while True:
                for n, time, text in self._registry.events(id, after):
                    after, quiet = n, 0.0
                    await reply({"event": {"n": n, "time": time, "text": text}})
                cluster = self._registry.get(id)
                state = state_of(cluster)
                if until == "gone" and state == "down":
                    return self._view(cluster)
                if until == "up" and (state in ("up", "lost") and cluster.wanted == "up"):
                    return self._view(cluster)
                if until == "up" and (state == "down" or (state == "kept" and cluster.error)):
                    raise LaunchFailed(cluster.error or f"cluster {cluster.name!r} was ended; launch it again")
                await asyncio.wait({left}, timeout=WATCH_SECONDS)
                if left.done():
                    raise ConnectionResetError
                quiet += WATCH_SECONDS
                if quiet >= KEEPALIVE_SECONDS:
                    quiet = 0.0
                    await reply({"event": {}})
        except ConnectionError:
            # Not at our own end: the next controller goes on with the launch, and its owner comes back.
            if given["owner"] and until == "up" and not self._stop.is_set():
                await self._note(id, "whoever launched it has gone: it is ended")
                await self._want_down(id)
            raise
        finally:
            left.cancel()

    async def _down(self, given: dict[str, Any]) -> dict[str, Any]:
        cluster = self._registry.named(str(given["name"]))
        return self._view(cluster if is_over(cluster) else await self._want_down(cluster.id))

    async def _extend(self, given: dict[str, Any]) -> dict[str, Any]:
        hours, dollars, store_env = float(given["hours"]), float(given["dollars"]), dict(given["store_env"])
        if hours < 0 or dollars < 0 or (hours + dollars == 0 and not store_env):
            raise InvalidInput("give what is added, more than 0: --hours H or --budget DOLLARS")
        cluster = self._registry.named(str(given["name"]))
        if is_over(cluster):
            raise NotFound(f"cluster {cluster.name!r} is down; launch it again with the limits that you want")
        budget = cluster.request.limits.budget
        if dollars and budget is None:
            raise InvalidInput(f"cluster {cluster.name!r} has no budget that could grow; extend its --hours")

        def change(c: RentedCluster) -> RentedCluster:
            limits = c.request.limits
            if dollars and limits.budget is not None:
                limits = limits.model_copy(update={"budget": limits.budget + dollars})
            request = c.request.model_copy(update={"limits": limits})
            return c.model_copy(update={"request": request, "extended_hours": c.extended_hours + hours})

        if store_env:
            await asyncio.to_thread(_take_credential, cluster, store_env)
        changed: RentedCluster = await self._in_thread(lambda: self._registry.update(cluster.id, change))
        if hours or dollars:
            await self._note(cluster.id, f"extended by {hours:g} h and ${dollars:.2f}")
        self._nudge(cluster.id)
        node, seen = changed.node, self._reconciler.seen

        def told() -> bool:
            if node is None or node.state != "up":
                return True
            return seen.has_limits(changed, node) and (not store_env or seen.has_credential(node, store_env))

        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(TOLD_SECONDS):
                while not told():  # noqa: ASYNC110
                    await asyncio.sleep(WATCH_SECONDS)
        return {**self._view(changed), "told": told()}

    async def _status(self, given: dict[str, Any]) -> dict[str, Any]:
        return {"pid": os.getpid(), "clusters": [self._view(c) for c in self._registry.newest()]}

    async def _machine(self, given: dict[str, Any]) -> dict[str, Any]:
        cluster = self._registry.named(str(given["name"]))
        node = cluster.node
        machine = self._reconciler.seen.running(node) if node is not None else None
        if machine is None or machine.host is None:
            raise ServerUnreachable(
                f"cluster {cluster.name!r} has no machine now ({state_of(cluster)}); see `art-sky status`"
            )
        return dataclasses.asdict(machine)

    async def _end(self, given: dict[str, Any]) -> dict[str, Any]:
        self._stop.set()
        return {"pid": os.getpid()}

    # --- parts --------------------------------------------------------------------------------------------

    async def _note(self, id: str, text: str) -> None:
        """In a thread, as all that writes: a registry that is locked must not hold the addresses up."""
        await self._in_thread(lambda: self._registry.note(id, self._clock.now(), text))

    async def _want_down(self, id: str) -> RentedCluster:
        wanted = {"wanted": "down"}
        cluster: RentedCluster = await self._in_thread(
            lambda: self._registry.update(id, lambda c: c.model_copy(update=wanted))
        )
        self._watch_cluster(cluster)
        self._nudge(id)
        return cluster

    def _nudge(self, id: str) -> None:
        if id in self._nudges:
            self._nudges[id].set()

    def _view(self, cluster: RentedCluster) -> dict[str, Any]:
        node, seen = cluster.node, self._reconciler.seen
        watchdog = seen.watchdog(node) if node is not None else None
        problem = seen.problem(node) if node is not None else None
        leases = seen.leases(node) if node is not None and node.state == "up" else {}
        if not is_over(cluster) and cluster.id not in self._addresses:
            problem = f"its port {cluster.port} is another program's; end that, and the address comes back"
        view = cluster_view(cluster, watchdog, problem, self._clock.now(), leases)
        address = self._addresses.get(cluster.id)
        credential = seen.credential(node) if node is not None and node.state != "gone" else None
        held = address.held if address is not None else 0
        return {**view, "held_requests": held, "store_credential": credential}

    async def _in_thread(self, call: Callable[[], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._threads, call)


def order_with_models(cluster: RentedCluster, node: Node, limits: NodeLimits) -> NodeOrder:
    """The order of a machine that serves again what the one before it served."""
    server = {**cluster.request.server, **({"models": cluster.models} if cluster.models else {})}
    request = cluster.request.model_copy(update={"server": server})
    return make_order(cluster.model_copy(update={"request": request}), node, limits)


def _refuse_other(old: RentedCluster, request: LaunchRequest) -> None:
    """The same launch again is answered with what is there; another one is refused with the differences."""
    if old.wanted == "down":
        raise Conflict(f"cluster {old.name!r} is still ending; wait for `art-sky down {old.name}`, then launch again")
    there, asked = old.request.model_dump(), request.model_dump()
    differ = [f"{key} is {there[key]!r}, not {asked[key]!r}" for key in there if there[key] != asked[key]]
    if differ:
        raise Conflict(
            f"cluster {old.name!r} is up and differs: {'; '.join(differ)}. Use it as it is, `art-sky extend` its "
            f"limits, or end it with `art-sky down {old.name}`"
        )


def _refuse_local(name: str) -> None:
    with contextlib.suppress(NotFound):
        if LocalCloud().get(name).state in ("starting", "up"):
            raise Conflict(f"a local cluster {name!r} is up; end it with `art-sky down {name}`, or take another name")


def _take_credential(cluster: RentedCluster, store_env: dict[str, str]) -> None:
    kept = FileCredentials()
    if not kept.current(cluster):
        raise InvalidInput(
            f"cluster {cluster.name!r} was launched without a credential: its machine reaches the store by its role; "
            "leave --store-credential out, or launch again with it"
        )
    kept.keep(cluster, store_env)


def _waits_for(cluster: RentedCluster) -> str:
    node = cluster.node
    if cluster.wanted == "down":
        return "nothing: the cluster is ending"
    return f"{node.name}, which is {node.state}" if node is not None and node.state != "gone" else "a machine"
