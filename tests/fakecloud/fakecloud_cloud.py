"""The simulated cloud's process: moto's API with faults on demand, and a hypervisor that boots its instances.

usage: fakecloud_cloud.py NAME FD ENVIRONMENT

Started by fakecloud_session.py, inside the cloud's network and a mount namespace.

FD is a socket listening on this machine's loopback, so that tests outside the namespace can call the API. Controlled
over a Unix socket in the cloud's folder, one JSON line a request. Ends, and cleans up, when its stdin closes.
"""

from __future__ import annotations

import io
import itertools
import json
import logging
import os
import select
import shlex
import shutil
import socketserver
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import fakecloud_network as network
import yaml
from fakecloud_environment import Environment
from fakecloud_hosts import Host, Machine, grep_disk

os.environ |= {"AWS_ACCESS_KEY_ID": "cloud", "AWS_SECRET_ACCESS_KEY": "cloud", "AWS_DEFAULT_REGION": "us-east-1"}

import moto.ec2.models.elastic_network_interfaces as interfaces
from moto.backends import get_backend
from moto.ec2.exceptions import EC2ClientError
from moto.ec2.models import EC2Backend
from moto.iam.models import IAMBackend
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
from werkzeug.serving import make_server

PORT = 5000
API = f"http://{network.GATEWAY}:{PORT}"
ACCOUNT = "123456789012"
REGIONS = ("us-east-1", "us-west-2")
VPC = "skyvpc"
NO_CAPACITY = "InsufficientInstanceCapacity"


class Faults:
    """What the API is told to do wrong. Calls of the hypervisor itself never fail."""

    def __init__(self) -> None:
        self.refused: list[tuple[str | None, str | None, str]] = []  # type, region (None: any), error code
        self.fail_terminate = 0
        self.error_but_created = 0
        self.delays: dict[str, float] = {}  # action ("" for all) -> seconds
        self.expired: set[str] = set()  # access keys

    def install(self) -> None:
        run_instances, terminate_instances = EC2Backend.run_instances, EC2Backend.terminate_instances

        def run(backend: Any, *args: Any, **kwargs: Any) -> Any:
            kind = kwargs.get("instance_type")
            for type_, region, code in self.refused:
                if type_ in (None, kind) and region in (None, backend.region_name):
                    raise EC2ClientError(code, f"no {kind} in {backend.region_name} at the moment (simulated)")
            reservation = run_instances(backend, *args, **kwargs)
            for instance in reservation.instances:
                if not instance.security_groups:  # moto keeps the groups given with a network interface there
                    instance.security_groups = list(instance.nics[0].group_set)
                for disk in instance.block_device_mapping.values():
                    disk.delete_on_termination = True  # EC2's default for the root disk, the only one here
            if self.error_but_created:
                self.error_but_created -= 1
                raise EC2ClientError("InternalError", "an internal error has occurred (simulated; the machine exists)")
            return reservation

        def terminate(backend: Any, instance_ids: list[str]) -> Any:
            if self.fail_terminate:
                self.fail_terminate -= 1
                raise EC2ClientError("InternalError", "an internal error has occurred (simulated; nothing ended)")
            return terminate_instances(backend, instance_ids)

        EC2Backend.run_instances, EC2Backend.terminate_instances = run, terminate

    def middleware(self, app: Callable[..., Iterable[bytes]]) -> Callable[..., Iterable[bytes]]:
        """Delays, and answers for credentials that have expired, before moto sees the request."""

        def call(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
            signed = environ.get("HTTP_AUTHORIZATION", "")
            if any(f"Credential={key}/" in signed for key in self.expired):
                body = b"<Error><Code>ExpiredToken</Code><Message>The provided token has expired.</Message></Error>"
                if "/ec2/" in signed:
                    body = b"<Response><Errors>%s</Errors></Response>" % body
                start_response("400 Bad Request", [("Content-Type", "text/xml"), ("Content-Length", str(len(body)))])
                return [body]
            if self.delays:
                length = int(environ.get("CONTENT_LENGTH") or 0)
                form = environ["wsgi.input"].read(length) if length < 1 << 20 else b""
                if form:
                    environ["wsgi.input"] = io.BytesIO(form)
                hit = (s for action, s in self.delays.items() if f"Action={action}".encode() in form or not action)
                time.sleep(max(hit, default=0))
            return app(environ, start_response)

        return call


class Cloud:
    """The hypervisor: makes hosts follow the API. One lock, held for the length of a boot at most."""

    def __init__(self, folder: Path, environment: Environment) -> None:
        self.folder, self.environment = folder, environment
        self.faults = Faults()
        self.hosts: dict[str, Host] = {}
        self.lock = threading.RLock()
        self.adjustable_clocks = False
        self.ended: dict[str, float] = {}  # instance -> unix time at which it was terminated
        self.preempt_at: dict[str, float] = {}  # monotonic
        self.rebooted: set[str] = set()

    def seed(self) -> None:
        """The account: a VPC with a public subnet a zone in each region, and the role that SkyPilot gives its nodes."""
        for i, region in enumerate(REGIONS):
            ec2 = get_backend("ec2")[ACCOUNT][region]
            vpc = ec2.create_vpc(f"10.77.{i * 64}.0/18")
            vpc.add_tags({"Name": VPC})
            gateway = ec2.create_internet_gateway()
            ec2.attach_internet_gateway(gateway.id, vpc.id)
            table = next(t for t in ec2.route_tables.values() if t.vpc_id == vpc.id)
            ec2.create_route(table.id, "0.0.0.0/0", gateway_id=gateway.id)
            for j, zone in enumerate(ec2.describe_availability_zones()):
                subnet = ec2.create_subnet(vpc.id, f"10.77.{i * 64 + j + 1}.0/24", zone.name)
                subnet.add_tags({"Name": f"{VPC}-{zone.name}"})
            ssh = ec2.create_security_group("ssh", "port 22 from everywhere, for machines without SkyPilot", vpc.id)
            ec2.authorize_security_group_ingress(ssh.id, "tcp", "22", "22", [{"CidrIp": "0.0.0.0/0"}])
        # SkyPilot would make these and then wait 30 s for them to spread.
        iam: IAMBackend = get_backend("iam")[ACCOUNT]["aws"]
        trust = {"Effect": "Allow", "Principal": {"Service": "ec2.amazonaws.com"}, "Action": "sts:AssumeRole"}
        policy = json.dumps({"Version": "2012-10-17", "Statement": [trust]})
        iam.create_role("skypilot-v1", policy, "/", None, "", {}, "3600")
        iam.create_instance_profile("skypilot-v1", "/", [])
        iam.add_role_to_instance_profile("skypilot-v1", "skypilot-v1")

    def instances(self) -> list[Any]:
        return [
            instance
            for region in REGIONS
            for reservation in list(get_backend("ec2")[ACCOUNT][region].reservations.values())
            for instance in list(reservation.instances)
        ]

    def reconcile(self) -> None:
        with self.lock:
            instances = {i.id: i for i in self.instances()}
            for id_, due in list(self.preempt_at.items()):
                if time.monotonic() >= due:
                    del self.preempt_at[id_]
                    instances[id_].terminate()
            for instance in instances.values():
                self._follow(instance)
            for id_, host in self.hosts.items():
                if host.pid() is not None:
                    host.firewall(self._rules(instances[id_]))

    def _follow(self, instance: Any) -> None:
        host = self.hosts.get(instance.id)
        if instance.state == "terminated":
            if instance.id not in self.ended:
                self.ended[instance.id] = time.time()
            if host is not None:
                host.halt(wipe=True)
                del self.hosts[instance.id]
                log(f"{instance.id} terminated")
        elif instance.state == "stopped":
            if host is not None and (host.process is not None or host.dead):
                host.halt()
                host.dead = False
                log(f"{instance.id} stopped")
        elif instance.state == "running":
            if host is None:
                self._boot(instance)
            elif instance.id in self.rebooted:
                self.rebooted.discard(instance.id)
                host.halt()
                self._boot(instance)
            elif host.process is None and not host.dead:
                self._boot(instance)
            elif (way := host.ended_by()) is not None:
                host.halt()
                log(f"{instance.id}: {way} from inside")
                if way == "reboot":
                    self._boot(instance)
                elif way == "crash":
                    host.dead = True
                elif instance.instance_initiated_shutdown_behavior == "terminate":
                    instance.terminate()
                else:
                    instance.stop()

    def _boot(self, instance: Any) -> None:
        host = self.hosts.get(instance.id)
        machine = _machine(instance)
        if host is None:
            folder = self.folder / "hosts" / instance.id
            host = Host(machine, folder, self.environment, API, self.adjustable_clocks)
            self.hosts[instance.id] = host
        host.machine = machine
        try:
            host.boot()
        except BaseException:
            host.halt()  # and the next round tries again
            raise
        log(f"{instance.id} boots: {instance.instance_type} {machine.addresses}")

    def _rules(self, instance: Any) -> str:
        """The security groups as a packet filter: what a group does not let in is dropped."""
        lines = ['iif "lo" accept', "ct state established,related accept", "ip protocol icmp accept"]
        members = {i.id: _machine_addresses(i) for i in self.instances() if i.state == "running"}
        groups = {i.id: {g.id for g in i.security_groups} for i in self.instances()}
        for group in instance.security_groups:
            for rule in group.ingress_rules:
                sources = [rule.ip_range["CidrIp"]] if rule.ip_range.get("CidrIp") else []
                if wanted := rule.source_group.get("GroupId"):
                    sources = [a for i, addresses in members.items() if wanted in groups[i] for a in addresses]
                if not sources:
                    continue
                match = f"ip saddr {{ {', '.join(sorted(set(sources)))} }}"
                if "0.0.0.0/0" in sources:
                    match = ""
                if rule.ip_protocol in ("tcp", "udp"):
                    match += f" {rule.ip_protocol} dport {rule.from_port}-{rule.to_port}"
                elif rule.ip_protocol == "icmp":
                    match += " ip protocol icmp"
                lines.append(f"{match} accept")
        chain = "\n".join(["type filter hook input priority 0; policy drop;", *sorted(set(lines))])
        return f"table ip groups\ndelete table ip groups\ntable ip groups {{\nchain input {{\n{chain}\n}}\n}}\n"

    def stop(self) -> None:
        with self.lock:
            for host in self.hosts.values():
                host.halt()


def _machine_addresses(instance: Any) -> list[str]:
    return [a for a in (instance.private_ip, instance.public_ip) if a]


def _machine(instance: Any) -> Machine:
    backend = get_backend("ec2")[ACCOUNT][instance.region_name]
    # cloud-init's part: the login user, the key and the commands that SkyPilot puts into the user data.
    config = yaml.safe_load(instance.user_data.decode()) if instance.user_data else {}
    user: dict[str, Any] = next((u for u in config.get("users", []) if isinstance(u, dict)), {})
    association = backend.iam_instance_profile_associations.get(instance.id)
    roles = association.iam_instance_profile.roles if association else []
    gpu = _gpu_count(instance.instance_type)
    return Machine(
        id=instance.id,
        region=instance.region_name,
        zone=instance.availability_zone,
        type=instance.instance_type,
        private_ip=instance.private_ip,
        public_ip=instance.public_ip,
        user=user.get("name", "ubuntu"),
        keys=list(user.get("ssh_authorized_keys") or []),
        gpus=gpu,
        role=roles[0].name if roles else None,
        first_boot=[c if isinstance(c, str) else shlex.join(c) for c in config.get("runcmd") or []],
    )


def _gpu_count(instance_type: str) -> int:
    from moto.ec2.models.instance_types import INSTANCE_TYPES

    gpus = INSTANCE_TYPES.get(instance_type, {}).get("GpuInfo", {}).get("Gpus", [])
    return sum(gpu["Count"] for gpu in gpus)


# --------------------------------------------------------------------------------------------- control


class Control:
    """What tests and the developer's shell may ask for. Each method answers something JSON can hold.

    Hosts are booted by the main loop alone: a host dies with the thread that started it.
    """

    def __init__(self, cloud: Cloud) -> None:
        self.cloud = cloud

    def instances(self) -> list[dict[str, Any]]:
        with self.cloud.lock:
            return [self._describe(i) for i in self.cloud.instances()]

    def kill_host(self, id: str) -> None:
        """The machine dies; the API goes on calling it running."""
        with self.cloud.lock:
            host = self._host(id)
            host.dead = True
            host.halt()

    def reboot(self, id: str) -> None:
        with self.cloud.lock:
            self._host(id)
            self.cloud.rebooted.add(id)

    def preempt(self, id: str, notice: float) -> None:
        """Takes a machine away `notice` seconds after a notice in its metadata; 0: at once, unannounced."""
        with self.cloud.lock:
            host = self._host(id)
            if notice:
                when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + notice))
                host.spot_notice = {"action": "terminate", "time": when}
            self.cloud.preempt_at[id] = time.monotonic() + notice

    def jump_clock(self, id: str, seconds: float) -> None:
        with self.cloud.lock:
            self._host(id).jump_clock(seconds)

    def move_addresses(self, id: str, stranger: str) -> None:
        """Gives a machine's addresses to another; the machine itself, if it still runs, is cut off."""
        with self.cloud.lock:
            (instance,) = (i for i in self.cloud.instances() if i.id == id)
            if id in self.cloud.hosts:
                self.cloud.hosts[id].give_up_addresses()
            self._host(stranger).take_addresses(_machine_addresses(instance))

    def adjustable_clocks(self, on: bool) -> None:
        self.cloud.adjustable_clocks = on

    def grep_disk(self, id: str, text: str) -> list[str]:
        return grep_disk(self._host(id).folder / "disk", text)

    def console(self, id: str) -> str:
        return (self._host(id).folder / "console.log").read_text()

    def fault(self, name: str, value: Any) -> None:
        faults = self.cloud.faults
        if name == "refuse":
            faults.refused.append(tuple(value))
        elif name == "delay":
            faults.delays[value[0]] = value[1]
        elif name == "expire":
            faults.expired.add(value)
        else:
            setattr(faults, name, value)

    def clear_faults(self) -> None:
        self.cloud.faults.__dict__.update(Faults().__dict__)

    def _host(self, id: str) -> Host:
        if id not in self.cloud.hosts:
            raise ValueError(f"there is no host {id}; there are {', '.join(self.cloud.hosts) or 'none'}")
        return self.cloud.hosts[id]

    def _describe(self, instance: Any) -> dict[str, Any]:
        host = self.cloud.hosts.get(instance.id)
        return {
            "id": instance.id,
            "state": instance.state,
            "type": instance.instance_type,
            "region": instance.region_name,
            "private_ip": instance.private_ip,
            "public_ip": instance.public_ip,
            "spot": instance.lifecycle == "spot",
            "shutdown_behavior": instance.instance_initiated_shutdown_behavior,
            "tags": {tag["key"]: tag["value"] for tag in instance.get_tags()},
            "ended": self.cloud.ended.get(instance.id),
            "pid": host.pid() if host else None,
        }


class _Line(socketserver.StreamRequestHandler):
    """One request: {"call": name, "args": [...]}; one answer: {"value": ...} or {"error": text}."""

    def handle(self) -> None:
        request = json.loads(self.rfile.readline())
        try:
            answer = {"value": getattr(self.server.control, request["call"])(*request["args"])}  # type: ignore[attr-defined]
        except Exception as e:
            answer = {"error": f"{type(e).__name__}: {e}"}
        self.wfile.write(json.dumps(answer).encode() + b"\n")


class _Server(socketserver.ThreadingUnixStreamServer):
    daemon_threads = True


def log(text: str) -> None:
    print(time.strftime("%H:%M:%S"), text, flush=True)


def main() -> None:
    name, fd = sys.argv[1], int(sys.argv[2])
    environment = Environment(**{part: Path(path) for part, path in json.loads(sys.argv[3]).items()})
    folder = network.RUN / name
    (folder / "hosts").mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "disks", str(folder / "hosts")], check=True)
    cloud = Cloud(folder, environment)
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    numbers = itertools.count(10)
    # moto would hand out addresses of the real Amazon.
    interfaces.random_public_ip = lambda: f"10.77.{250 + (n := next(numbers)) // 250}.{n % 250}"
    reboot_instances = EC2Backend.reboot_instances

    def reboot(backend: Any, instance_ids: list[str]) -> Any:
        cloud.rebooted.update(instance_ids)
        return reboot_instances(backend, instance_ids)

    EC2Backend.reboot_instances = reboot
    cloud.seed()
    cloud.faults.install()
    app = cloud.faults.middleware(DomainDispatcherApplication(create_backend_app))
    for server in (
        make_server(network.GATEWAY, PORT, app, threaded=True, request_handler=MotoRequestHandler),
        make_server("127.0.0.1", 0, app, threaded=True, request_handler=MotoRequestHandler, fd=fd),
    ):
        threading.Thread(target=server.serve_forever, daemon=True).start()
    control = _Server(str(folder / "control"), _Line)
    control.control = Control(cloud)  # type: ignore[attr-defined]
    threading.Thread(target=control.serve_forever, daemon=True).start()
    log("ready")
    trouble = ""
    try:
        # Whoever started this holds the other end of stdin; when it goes away, however it dies, so does the cloud.
        while not select.select([sys.stdin], [], [], 0.2)[0]:
            try:
                cloud.reconcile()
            except Exception as e:  # one broken host must not stop the others
                if trouble != (trouble := f"{type(e).__name__}: {e}"):
                    log(trouble)
    finally:
        cloud.stop()
        network.remove(name)
        subprocess.run(["umount", "--lazy", str(folder / "hosts")], check=True)
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
