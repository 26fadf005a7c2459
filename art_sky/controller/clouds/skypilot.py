"""`Provider` by SkyPilot: the user's own SkyPilot, its state and its server, so that `sky status` and `sky down` work.

Each call runs in a process of its own (`sky_worker`): SkyPilot costs 1.5 s and 300 MB to import, may hang, and can
then be killed. What a launch asked for is kept in `home()/controller/orders/<node>.json` before it is asked for, so
that another process can find and end the machine.

Keys: SkyPilot copies the credential files of every cloud onto each machine. Where it has a setting against that, the
project config that we write for one call uses it: the cloud of the machine gets SERVICE_ACCOUNT (an instance role),
every other one NO_UPLOAD. For the rest (Lambda, RunPod, R2, the Hugging Face token ...) it has none: there the first
line of setup deletes them (`sky_worker.copied_keys`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from art_sky.config import home
from art_sky.controller.cloud_table import cloud_facts
from art_sky.controller.clouds import sky_catalog
from art_sky.controller.provider import Machine, NodeOrder, Offer, Wanted
from art_sky.errors import CloudError, LaunchFailed, NoCredentials, ProviderUnavailable, from_wire
from art_sky.node import records
from art_sky.node.task import task_yaml
from art_sky.whole_file import write_whole

WORKER = (sys.executable, "-m", "art_sky.controller.clouds.sky_worker")
# Seconds until a call is killed. A launch is bound by the controller's own deadline for setup, too.
DEADLINES = {"check": 180, "launch": 2400, "find": 120, "end": 300, "machines": 300}
# All clouds that SkyPilot's config has the setting `remote_identity` for (`get_config_schema` of 0.14.1).
_KEYED_CLOUDS = ("aws", "azure", "gcp", "kubernetes", "nebius", "oci", "slurm", "ssh", "vast")


class SkyPilotProvider:
    """`environment` is what SkyPilot's client sees, `worker` the command that makes one call; tests bring theirs."""

    shares_files = False

    def __init__(
        self,
        folder: Path | None = None,
        environment: Mapping[str, str] | None = None,
        *,
        worker: Sequence[str] = WORKER,
        deadlines: Mapping[str, float] = DEADLINES,
    ) -> None:
        self._worker, self._deadlines = tuple(worker), deadlines
        self._folder = folder if folder is not None else home() / "controller"
        self._environment = dict(os.environ if environment is None else environment)
        self._launching: dict[str, subprocess.Popen[str]] = {}
        self._lock = threading.Lock()

    def check(self) -> dict[str, str | None]:
        found: dict[str, str | None] = self._call("check", {})
        if not found:
            raise NoCredentials("SkyPilot has no cloud that it may use; run `sky check`, which says how to enable one")
        return found

    def offers(self, wanted: Wanted) -> list[Offer]:
        if wanted.clouds:
            return sky_catalog.offers(wanted, wanted.clouds)
        with ThreadPoolExecutor(1) as pool:  # both import SkyPilot, in two processes
            enabled = pool.submit(self.check)
            sky_catalog.load()
            return sky_catalog.offers(wanted, sorted(enabled.result()))

    def launch(self, order: NodeOrder, progress: Callable[[str, str], None]) -> Machine:
        node, offer = order.config.node, order.offer
        folder = self._folder / "orders" / node
        folder.mkdir(parents=True, exist_ok=True)
        records.write(folder / "node.json", order.config)
        self._remember(node, {"cloud": offer.cloud, "region": offer.region, "request": None})
        task = task_config(order, folder / "node.json")

        phase = "provision"

        def heard(event: dict[str, Any]) -> None:
            nonlocal phase
            if event["event"] == "request":
                self._remember(node, {"cloud": offer.cloud, "region": offer.region, "request": event["id"]})
            elif event["event"] == "log":
                phase = phase_of(event["text"]) or phase
                progress(phase, event["text"])

        call = {
            "task": task, "node": node, "cloud": offer.cloud, "region": offer.region,
            "key_on_node": order.cloud_key_on_node and cloud_facts(offer.cloud).node_agent == "account key",
            "role": order.node_role,
        }  # fmt: skip
        return _machine(self._call("launch", call, heard, node=node, config=key_policy(offer.cloud, order.node_role)))

    def find(self, node: str) -> Machine:
        order = self._order(node)
        return _machine(self._call("find", {"node": node, "cloud": order["cloud"], "region": order["region"]}))

    def list(self) -> list[Machine]:
        return [_machine(m) for m in self._call("machines", {"clouds": sorted(self.check())})]

    def end(self, node: str) -> None:
        with self._lock:
            launching = self._launching.get(node)
        if launching is not None:
            _kill(launching)
        try:
            order = self._order(node)
        except CloudError:
            # Of another computer, as `art-sky gc` may find it: only by what the clouds themselves say of it.
            found = next((m for m in self.list() if m.node == node), None)
            if found is None:
                raise
            order = {"cloud": found.cloud, "region": found.region, "request": None}
        call = {"node": node, "cloud": order["cloud"], "region": order["region"], "request": order["request"]}
        self._call("end", call)

    def logs(self, node: str, follow: bool, write: Callable[[str], None]) -> None:
        def heard(event: dict[str, Any]) -> None:
            if event["event"] == "log":
                write(event["text"] + "\n")

        self._call("logs", {"node": node, "follow": follow}, heard)

    def _order(self, node: str) -> dict[str, Any]:
        """Raises CloudError for a node that was not ordered from this computer."""
        try:
            found: dict[str, Any] = json.loads((self._folder / "orders" / node / "order.json").read_text())
            return found
        except FileNotFoundError:
            raise CloudError(
                f"{node} was not launched from this computer; end it with `sky down`, or in your cloud's console"
            ) from None
        except ValueError as e:
            raise CloudError(f"the record of {node} cannot be read ({e}); see `sky status` for its machine") from e

    def _remember(self, node: str, order: dict[str, Any]) -> None:
        file = self._folder / "orders" / node / "order.json"
        write_whole(file, json.dumps(order))

    def _call(
        self,
        name: str,
        arguments: dict[str, Any],
        heard: Callable[[dict[str, Any]], None] = lambda event: None,
        node: str | None = None,
        config: dict[str, Any] | None = None,
    ) -> Any:
        """One call in a worker. `node`: `end` of it kills the worker. Raises the worker's own typed error."""
        log = self._folder / "skypilot.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as stderr, self._config_file(config or {}) as config_file:
            worker = subprocess.Popen(
                self._worker,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                start_new_session=True,
                cwd=self._folder,  # which Python searches first: never a folder of the user's with modules in it
                env={**self._environment, "SKYPILOT_PROJECT_CONFIG": str(config_file)},
            )
            if node is not None:
                with self._lock:
                    self._launching[node] = worker
            deadline = self._deadlines.get(name)
            killer = threading.Timer(deadline, _kill, [worker]) if deadline is not None else None
            try:
                if killer is not None:
                    killer.start()
                last = _converse(worker, {"call": name, **arguments}, heard)
            finally:
                if killer is not None:
                    killer.cancel()
                _kill(worker)
                if node is not None:
                    with self._lock:
                        self._launching.pop(node, None)
        if last is None:
            failed = LaunchFailed if name == "launch" else ProviderUnavailable
            raise failed(
                f"SkyPilot's {name} ended without a word, or took over {deadline:g} s and was ended; see {log}"
            )
        if last["event"] == "error":
            raise from_wire({"error": {k: v for k, v in last.items() if k != "event"}})
        return last["value"]

    @contextlib.contextmanager
    def _config_file(self, config: dict[str, Any]) -> Iterator[Path]:
        """A project config of SkyPilot for one call; a file of its own, as calls run side by side."""
        folder = self._folder / "configs"
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / f"{os.getpid()}-{threading.get_ident()}.yaml"
        file.write_text(json.dumps(config))  # JSON is YAML
        try:
            yield file
        finally:
            file.unlink(missing_ok=True)


def key_policy(launched_on: str, role: str | None) -> dict[str, Any]:
    """SkyPilot's settings under which it copies as few keys of this computer as it can be told to, to a machine of the
    cloud `launched_on`. `role`: an AWS instance profile instead of the one that SkyPilot makes."""
    policy = {cloud: {"remote_identity": "NO_UPLOAD"} for cloud in _KEYED_CLOUDS}
    if cloud_facts(launched_on).node_agent == "role":
        own = role if role is not None and launched_on == "aws" else "SERVICE_ACCOUNT"
        policy[launched_on] = {"remote_identity": own}
    return policy


def task_config(order: NodeOrder, node_json: Path) -> dict[str, Any]:
    """The SkyPilot task of one node: `sky/server.yaml` with what this order fixes."""
    import yaml

    task: dict[str, Any] = yaml.safe_load(task_yaml())
    offer = order.offer
    resources: dict[str, Any] = {
        **task.get("resources", {}),
        "infra": f"{offer.cloud}/{offer.region}",
        "instance_type": offer.instance_type,
        "use_spot": offer.spot,
        "disk_size": order.disk_gib,
    }
    if offer.accelerators:
        resources["accelerators"] = dict(offer.accelerators)
    if order.image_id is not None:
        resources["image_id"] = order.image_id
    if cloud_facts(offer.cloud).labels:
        resources["labels"] = dict(order.labels)
    task["name"] = order.config.node
    task["resources"] = resources
    task["file_mounts"] = {
        f"{records.FOLDER}/node.json": str(node_json),
        f"{records.FOLDER}/{Path(order.wheel).name}": order.wheel,
    }
    return task


# What SkyPilot prints when it enters a phase.
_PHASES = (
    ("provision", ("Launching on",)),
    ("runtime", ("Instance is up",)),  # SkyPilot's own, on the machine
    ("files", ("Cluster launched", "Syncing")),
    ("job", ("Job submitted",)),
)


def phase_of(line: str) -> str:
    """The phase that a line of SkyPilot's log belongs to, "" where it says nothing of it."""
    return next((phase for phase, words in _PHASES if any(word in line for word in words)), "")


def _machine(values: dict[str, Any]) -> Machine:
    names = {field.name for field in dataclasses.fields(Machine)}
    return Machine(**{k: v for k, v in values.items() if k in names})


def _converse(
    worker: subprocess.Popen[str], call: dict[str, Any], heard: Callable[[dict[str, Any]], None]
) -> dict[str, Any] | None:
    """Sends the call, hands on what the worker says, returns its last word; None when it died without one."""
    assert worker.stdin is not None and worker.stdout is not None
    with contextlib.suppress(BrokenPipeError):  # it died at once: no last word follows
        worker.stdin.write(json.dumps(call))
        worker.stdin.close()
    for line in worker.stdout:
        event = json.loads(line)
        if event["event"] in ("result", "error"):
            return dict(event)
        heard(event)
    return None


def _kill(worker: subprocess.Popen[str]) -> None:
    if worker.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(worker.pid, 9)
    worker.wait()
