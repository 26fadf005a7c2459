"""One simulated machine: namespaces, a disk, a firewall that obeys the security groups, and its metadata service.

A host lives exactly as long as its processes: its network namespace has no name, and the kernel kills process 1 when
the cloud's process goes away.
"""

from __future__ import annotations

import ctypes
import http.server
import json
import os
import secrets
import shutil
import signal
import socketserver
import subprocess
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fakecloud_network as network
from fakecloud_environment import NODE_UID, NODE_WHEELS, Environment
from fakecloud_init import CLOCK_STEP, CLOCK_STEP_COUNT, CLOCK_STEPS, clock_steps, shift_boot_time
from fakecloud_units import POWEROFF, REBOOT

HERE = Path(__file__).resolve().parent
# Before exec in the child: it dies with the thread that started it, which is the cloud's main thread.
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


@dataclass
class Machine:
    """What the cloud's API knows of an instance and its host needs."""

    id: str
    region: str
    zone: str
    type: str
    private_ip: str
    public_ip: str | None
    user: str
    keys: list[str]
    gpus: int
    role: str | None
    first_boot: list[str]  # commands of the user data, for a shell

    @property
    def addresses(self) -> list[str]:
        return [self.private_ip, *([self.public_ip] if self.public_ip else [])]


@dataclass
class Host:
    machine: Machine
    folder: Path
    environment: Environment
    api: str
    adjustable_clock: bool
    process: subprocess.Popen[str] | None = None
    spot_notice: dict[str, str] | None = None
    dead: bool = False  # killed or crashed: runs in the API's eyes, and is not booted again by itself
    _metadata: _MetadataServer | None = None
    _firewall: str = ""
    _pid: int = 0  # of process 1

    def boot(self) -> None:
        """Starts the host; its network is there and its init running when this returns, sshd follows in a second."""
        machine, up = self.machine, int(time.clock_gettime(time.CLOCK_BOOTTIME))
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "host.json").write_text(json.dumps(self._config()))
        command = ["unshare", "--net", "--mount", "--pid", "--fork", "--uts", "--ipc", "--kill-child"]
        # A machine's clocks since boot begin at its boot, and so does the boot time that programs compute from them.
        command += ["--time", "--monotonic", str(-int(time.monotonic())), "--boottime", str(-up)]
        command += ["/usr/bin/python3", str(HERE / "fakecloud_init.py"), str(self.folder / "host.json")]
        with (self.folder / "console.log").open("a") as console:
            self.process = subprocess.Popen(
                command,
                env={"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8"},
                stdin=subprocess.PIPE,
                stdout=console,
                stderr=console,
                text=True,
                preexec_fn=lambda: _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL),
            )
        self._pid = pid = self._init_pid()
        plug = f"v{machine.id[-8:]}"
        network.ip("link", "del", plug, check=False)
        # The same hardware address after a reboot, so that nobody's neighbour table goes stale.
        mac = "02:00:" + ":".join(f"{int(byte):02x}" for byte in machine.private_ip.split("."))
        network.ip("link", "add", plug, "type", "veth", "peer", "name", "eth0", "address", mac, "netns", str(pid))
        network.ip("link", "set", plug, "master", network.BRIDGE, "up")
        with network.inside(Path(f"/proc/{pid}/ns/net")):
            network.ip("link", "set", "lo", "up")
            network.ip("addr", "add", "169.254.169.254/32", "dev", "lo")
            for address in machine.addresses:
                network.ip("addr", "add", f"{address}/16", "dev", "eth0")
            network.ip("link", "set", "eth0", "up")
            # Leads nowhere; Ray takes the source address of this route for the node's own.
            network.ip("route", "add", "default", "via", network.GATEWAY, "src", machine.private_ip)
            self._metadata = _MetadataServer(("169.254.169.254", 80), _metadata_handler(self))
        threading.Thread(target=self._metadata.serve_forever, daemon=True).start()
        self._firewall = ""
        self.dead = False
        assert self.process.stdin is not None
        self.process.stdin.write("network\n")
        self.process.stdin.flush()

    def halt(self, *, wipe: bool = False) -> None:
        """Pulls the plug."""
        if self.process is not None:
            if self.process.poll() is None:
                with suppress(ProcessLookupError):  # it may be powering off this very moment
                    os.kill(self._pid, signal.SIGKILL)
            self.process.wait()
            self.process = None
        if self._metadata is not None:
            threading.Thread(target=self._metadata.shutdown, daemon=True).start()
            self._metadata.server_close()
            self._metadata = None
        if wipe:
            shutil.rmtree(self.folder, ignore_errors=True)

    def ended_by(self) -> str | None:
        """How the host ended by itself: poweroff, reboot or crash; None while it runs or is off."""
        if self.process is None or (code := self.process.poll()) is None:
            return None
        # reboot(2) in a pid namespace kills its process 1 with these signals.
        ways = {POWEROFF: "poweroff", -signal.SIGINT: "poweroff", REBOOT: "reboot", -signal.SIGHUP: "reboot"}
        return ways.get(code, "crash")

    def pid(self) -> int | None:
        """Process 1's id on this machine; None when the host is off."""
        return self._pid if self.process is not None and self.process.poll() is None else None

    def firewall(self, rules: str) -> None:
        """Loads the host's packet filter, when it changed."""
        pid = self.pid()
        if pid is None or rules == self._firewall:
            return
        subprocess.run(["nsenter", f"--net=/proc/{pid}/ns/net", "nft", "-f", "-"], input=rules, text=True, check=True)
        self._firewall = rules

    def give_up_addresses(self) -> None:
        """Unplugs a running host: what comes to its addresses goes to whoever has them next."""
        network.ip("link", "del", f"v{self.machine.id[-8:]}", check=False)

    def take_addresses(self, addresses: list[str]) -> None:
        """Further addresses for a running host."""
        with network.inside(Path(f"/proc/{self.pid()}/ns/net")):
            for address in addresses:
                network.ip("addr", "add", f"{address}/16", "dev", "eth0")

    def jump_clock(self, seconds: float) -> None:
        """Steps this host's wall clock; jumps add up and survive a reboot."""
        pid = self.pid()
        if not self.adjustable_clock or pid is None:
            raise ValueError(f"{self.machine.id} runs on the real clock: launch it inside adjustable_clocks()")
        table = self.folder / "disk/root" / CLOCK_STEPS.lstrip("/")
        steps = clock_steps(table)
        if len(steps) == CLOCK_STEP_COUNT:
            raise ValueError(f"{self.machine.id}: {len(steps)} jumps are all that a clock can do")
        total = (steps[-1][1] if steps else 0) + int(seconds * 1e9)
        with table.open("r+b") as f:  # in place: every process of the host has it mapped
            f.seek(len(steps) * CLOCK_STEP.size)
            f.write(CLOCK_STEP.pack(time.time_ns(), total))
        enter = ["nsenter", "-t", str(pid), "--mount", "--pid", "--time", "--root", "--wd"]
        subprocess.run([*enter, *shift_boot_time(total)], check=True)

    def _init_pid(self) -> int:
        """The child of unshare(1), once it is in its namespaces."""
        assert self.process is not None
        end = time.monotonic() + 10
        while time.monotonic() < end and self.process.poll() is None:
            children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
            if children:
                return int(children[0])
            time.sleep(0.005)
        raise RuntimeError(f"{self.machine.id} did not boot: {(self.folder / 'console.log').read_text()[-500:]}")

    def _config(self) -> dict[str, Any]:
        machine = self.machine
        # What only a simulated node needs: where the cloud's API is. Its own role and region come as on a real one.
        environment = {"AWS_ENDPOINT_URL": self.api, "AWS_DEFAULT_REGION": machine.region}
        # Ray, in which SkyPilot runs jobs, kills them at 95 % of the memory: here that of all hosts together.
        environment["RAY_memory_monitor_refresh_ms"] = "0"
        environment |= {"SKYPILOT_DISABLE_USAGE_COLLECTION": "1", "HF_HUB_OFFLINE": "1"}
        systemctl = (HERE / "fakecloud_systemctl.py").read_text()
        programs = {"/usr/bin/systemctl": systemctl, "/usr/bin/systemd-run": systemctl}
        if machine.gpus:
            programs["/usr/bin/nvidia-smi"] = f"#!/bin/sh\necho '{machine.gpus} simulated GPU(s)'\n"
        return {
            "disk": str(self.folder / "disk"),
            "home_layers": [str(self.environment.user_env), str(self.environment.runtime)],
            "hostname": "ip-" + machine.private_ip.replace(".", "-"),
            "user": machine.user,
            "uid": NODE_UID,
            "keys": machine.keys,
            "environment": environment,
            "wheels": NODE_WHEELS,
            "clock": str(self.environment.clock) if self.adjustable_clock else None,
            "programs": programs,
            "first_boot": machine.first_boot,
        }


def grep_disk(disk: Path, text: str) -> list[str]:
    """Paths on the host of the files it wrote that hold `text`. Its /dev/shm is no part of the disk."""
    command = ["grep", "-rlF", "--", text, "root", "upper/usr", "upper/etc", "upper/home"]
    found = subprocess.run(command, cwd=disk, capture_output=True, text=True, check=False).stdout.splitlines()
    places = {"root": "", "upper/usr": "/usr", "upper/etc": "/etc", "upper/home": "/home/ubuntu"}
    return sorted(
        places[top] + path.removeprefix(top)
        for path in found
        for top in sorted(places, key=len)
        if path.startswith(top + "/")
    )


class _MetadataServer(socketserver.ThreadingTCPServer):
    """Not http.server's own class, which asks DNS for the name of the address, and there is no DNS here."""

    daemon_threads = True
    allow_reuse_address = True


def _metadata_handler(host: Host) -> type[http.server.BaseHTTPRequestHandler]:
    """EC2's instance metadata service, versions 1 and 2."""
    machine, tokens = host.machine, set[str]()
    credentials = "/latest/meta-data/iam/security-credentials"
    document = {"instanceId": machine.id, "region": machine.region, "availabilityZone": machine.zone}
    document |= {"instanceType": machine.type, "privateIp": machine.private_ip, "accountId": "123456789012"}

    def page(path: str) -> str | None:
        if machine.role and path == f"{credentials}/{machine.role}":
            now = time.time()
            moment = [time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(t)) for t in (now, now + 6 * 3600)]
            keys = {
                "Code": "Success",
                "Type": "AWS-HMAC",
                "AccessKeyId": "ASIANODEROLE",
                "SecretAccessKey": "node-role",
            }
            return json.dumps(keys | {"Token": "node-token", "LastUpdated": moment[0], "Expiration": moment[1]})
        return {
            credentials: machine.role,
            "/latest/dynamic/instance-identity/document": json.dumps(document),
            "/latest/meta-data/instance-id": machine.id,
            "/latest/meta-data/instance-type": machine.type,
            "/latest/meta-data/local-ipv4": machine.private_ip,
            "/latest/meta-data/public-ipv4": machine.public_ip,
            "/latest/meta-data/placement/region": machine.region,
            "/latest/meta-data/placement/availability-zone": machine.zone,
            "/latest/meta-data/spot/instance-action": json.dumps(host.spot_notice) if host.spot_notice else None,
            "/latest/meta-data/spot/termination-time": host.spot_notice["time"] if host.spot_notice else None,
        }.get(path.rstrip("/"))

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_PUT(self) -> None:
            token = secrets.token_urlsafe(32)
            tokens.add(token)
            self.answer(token if self.path == "/latest/api/token" else None)

        def do_GET(self) -> None:
            token = self.headers.get("X-aws-ec2-metadata-token")
            if token is not None and token not in tokens:
                self.answer("unauthorized", 401)
            else:
                self.answer(page(self.path))

        def answer(self, text: str | None, code: int = 200) -> None:
            body = (text or "not found").encode()
            self.send_response(code if text else 404)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    return Handler
