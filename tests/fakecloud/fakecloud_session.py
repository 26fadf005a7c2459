"""The simulated cloud as tests see it: start it, run things on its laptop, and do to its machines what clouds do.

    with FakeCloud.start() as cloud:
        cloud.run(["sky", "launch", "-y", "task.yaml"])
        cloud.preempt(cloud.instances()[0].id)

See README.md in this folder.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import secrets
import select
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import fakecloud_network as network
from fakecloud_environment import CHECKOUT, PYTHON, Environment, locate

HERE = Path(__file__).resolve().parent
API = f"http://{network.GATEWAY}:5000"
REGION, *_ = REGIONS = ("us-east-1", "us-west-2")
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
# The laptop's cloud keys: recognisable, so that a grep of a node's disk for them means something.
LAPTOP_KEY, LAPTOP_SECRET = "AKIALAPTOPKEY0000000", "laptop-secret-that-must-stay-on-the-laptop"
LIVE = ("pending", "running", "stopping", "stopped", "shutting-down")


@dataclass(frozen=True)
class Instance:
    """One machine as the cloud's API sees it, and the id on this machine of its process 1 (None: it is off)."""

    id: str
    state: str  # running, stopped, terminated
    type: str
    region: str
    private_ip: str
    public_ip: str | None
    spot: bool
    shutdown_behavior: str  # what a power-off from inside does: stop or terminate
    tags: dict[str, str]
    ended: float | None  # unix time at which it was terminated
    pid: int | None

    @property
    def cluster(self) -> str | None:
        """SkyPilot's name of the cluster it belongs to; on the cloud it is followed by a hash of the user."""
        name = self.tags.get("skypilot-cluster-name")
        return re.sub(r"-[0-9a-f]{8}$", "", name) if name else None


class FakeCloud:
    """A running simulated cloud. Several may run at once; they share nothing but the built environment."""

    def __init__(self, name: str, environment: Environment, port: int, process: subprocess.Popen[bytes] | None) -> None:
        self.name, self.environment = name, environment
        self.folder = network.RUN / name
        self.home = self.folder / "home"  # the laptop's
        self.api = f"http://127.0.0.1:{port}"  # the cloud's API, from outside its network
        self._process = process

    @classmethod
    def start(cls) -> FakeCloud:
        """Starts a cloud, after removing what killed ones left behind; takes 3 s.

        Raises:
            Unavailable: this machine cannot run it, or `make fakecloud-env` was not run; one line says which.
        """
        environment = locate()
        remove_stale()
        name = secrets.token_hex(2)
        folder = network.RUN / name
        folder.mkdir(parents=True)
        lock = (folder / "lock").open("w")
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            network.create(name)
            listener = socket.create_server(("127.0.0.1", 0))
            parts = json.dumps({key: str(value) for key, value in asdict(environment).items()})
            with (folder / "cloud.log").open("wb") as log:
                process = subprocess.Popen(
                    [
                        *("nsenter", f"--net={network.cloud_space(name)}", "unshare", "--mount"),
                        *(environment.laptop / "bin/python", HERE / "fakecloud_cloud.py"),
                        *(name, str(listener.fileno()), parts),
                    ],
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=log,
                    pass_fds=(listener.fileno(), lock.fileno()),
                    start_new_session=True,
                )
            port = listener.getsockname()[1]
            (folder / "port").write_text(str(port))
            cloud = cls(name, environment, port, process)
            listener.close()
            lock.close()  # the cloud's process holds it now: a folder whose lock is free belongs to nobody
            cloud._wait_ready()
            cloud._make_laptop()
        except BaseException:
            network.remove(name)
            shutil.rmtree(folder, ignore_errors=True)
            raise
        return cloud

    @classmethod
    def attach(cls, name: str) -> FakeCloud:
        """A cloud that another process has started and will stop."""
        return cls(name, locate(), int((network.RUN / name / "port").read_text()), None)

    def stop(self) -> None:
        """Ends every process of the cloud and its laptop and removes their traces; 2 s."""
        assert self._process is not None and self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()

        self._process.wait(60)

    def __enter__(self) -> FakeCloud:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    # The laptop.

    def run(
        self,
        argv: Sequence[str | Path],
        *,
        env: Mapping[str, str] | None = None,
        timeout: float = 600,
        check: bool = True,
        cwd: Path | None = None,
        input: str | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Runs a command on the laptop: in its network, with its HOME, `sky` and `art-sky` on its PATH.

        Raises:
            AssertionError: it failed (unless check is False); the message holds its output.
        """
        done = subprocess.run(
            self.enter(argv), env=self.laptop_env(env), timeout=timeout, cwd=cwd or self.home, input=input,
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        if check and done.returncode:
            raise AssertionError(f"{argv} ended with {done.returncode}\n{done.stdout[-6000:]}\n{done.stderr[-6000:]}")
        return done

    def popen(
        self,
        argv: Sequence[str | Path],
        *,
        env: Mapping[str, str] | None = None,
        log: IO[str] | int = subprocess.DEVNULL,
    ) -> subprocess.Popen[str]:
        """Starts a command on the laptop, in a session of its own; stdout and stderr go to `log`."""
        return subprocess.Popen(
            self.enter(argv), env=self.laptop_env(env), cwd=self.home, stdin=subprocess.DEVNULL,
            stdout=log, stderr=log, text=True, start_new_session=True,
        )  # fmt: skip

    def enter(self, argv: Sequence[str | Path]) -> list[str]:
        """The command that runs `argv` on the laptop, to be started with laptop_env()."""
        return ["nsenter", f"--net={network.laptop_space(self.name)}", "--", *map(str, argv)]

    def laptop_env(self, extra: Mapping[str, str] | None = None) -> dict[str, str]:
        return {
            "HOME": str(self.home),
            "USER": "laptop",
            "LANG": "C.UTF-8",
            "TMPDIR": str(self.home / "tmp"),
            "TERM": os.environ.get("TERM", "dumb"),
            "PATH": f"{self.home}/bin:{self.environment.laptop}/bin:{SYSTEM_PATH}",
            "PYTHONPATH": f"{CHECKOUT}:{self.home}/lib",
            "AWS_ENDPOINT_URL": API,
            "AWS_DEFAULT_REGION": REGION,
            "SKYPILOT_DISABLE_USAGE_COLLECTION": "1",
            "DO_NOT_TRACK": "1",
            # SkyPilot builds its own wheel with pip, which without an index must not isolate the build. pip reads the
            # variable the wrong way round: 0 switches isolation off.
            "PIP_NO_BUILD_ISOLATION": "0",
            "PIP_NO_INDEX": "1",
            "HF_HUB_OFFLINE": "1",
            **(extra or {}),
        }

    @contextmanager
    def inside(self) -> Iterator[None]:
        """What this thread connects to in the block, it connects to from the laptop; loopback is the laptop's."""
        with network.inside(network.laptop_space(self.name)):
            yield

    def kill_laptop(self) -> None:
        """SIGKILL to every process on the laptop, SkyPilot's API server included."""
        network.kill_inside(network.laptop_space(self.name))

    def laptop_processes(self) -> list[int]:
        return network.processes(network.laptop_space(self.name))

    def unplug_laptop(self) -> None:
        """Cuts the laptop's network without a sign to either end, until plug_laptop()."""
        network.ip("-n", network.cloud_space(self.name).name, "link", "set", "laptop", "down")

    def plug_laptop(self) -> None:
        network.ip("-n", network.cloud_space(self.name).name, "link", "set", "laptop", "up")

    def client(self, service: str, region: str = REGION) -> Any:
        """A boto3 client on the cloud's API: ec2, s3, iam ..."""
        import boto3

        return boto3.client(
            service, region_name=region, endpoint_url=self.api, aws_access_key_id="test", aws_secret_access_key="test"
        )

    # The machines.

    def instances(self, cluster: str | None = None, *, live: bool = False) -> list[Instance]:
        """All instances ever made, oldest first; of one cluster; or those only that may still cost something."""
        found = [Instance(**values) for values in self._call("instances")]
        return [i for i in found if cluster in (None, i.cluster) and (i.state in LIVE or not live)]

    def boot_instance(self, instance_type: str = "m6i.large", *, spot: bool = False, **options: Any) -> Instance:
        """A machine without SkyPilot, once its sshd answers; `options` are those of the RunInstances call."""
        ec2 = self.client("ec2")
        (subnet, *_) = ec2.describe_subnets(Filters=[{"Name": "tag:Name", "Values": [f"skyvpc-{REGION}a"]}])["Subnets"]
        (ssh, *_) = ec2.describe_security_groups(Filters=[{"Name": "group-name", "Values": ["ssh"]}])["SecurityGroups"]
        place = {"SubnetId": subnet["SubnetId"], "SecurityGroupIds": [ssh["GroupId"]]}
        options = {"ImageId": "ami-12c6146b", "MinCount": 1, "MaxCount": 1} | place | options
        if spot:
            options["InstanceMarketOptions"] = {"MarketType": "spot"}
        reply = ec2.run_instances(InstanceType=instance_type, **options)
        return self.wait_host(reply["Instances"][0]["InstanceId"])

    def wait_gone(self, cluster: str, bound: float) -> float:
        """Waits until every instance of a SkyPilot cluster (or the instance of this id) is terminated; seconds waited.

        The cloud's API says "terminated" a moment before the time of it is noted: what is gone has its `ended`.

        Raises:
            AssertionError: not gone within `bound` seconds, or there never was one.
        """
        began = time.monotonic()
        while True:
            mine = [i for i in self.instances() if cluster in (i.cluster, i.id)]
            assert mine, f"there never was an instance of {cluster}"
            waited = time.monotonic() - began
            if all(i.ended is not None for i in mine):
                return waited
            states = ", ".join(f"{i.id} {i.state}" for i in mine)
            assert waited < bound, f"not gone after {bound:.0f} s: {states}\n{self.log(mine[-1].id)}"
            time.sleep(0.5)

    def wait_host(self, id: str, bound: float = 60) -> Instance:
        """Waits until sshd of an instance's host answers."""
        end = time.monotonic() + bound
        while True:
            (instance,) = (i for i in self.instances() if i.id == id)
            with suppress(OSError), self.inside(), socket.create_connection((instance.private_ip, 22), 1) as s:
                if s.recv(4) == b"SSH-":
                    return instance
            assert time.monotonic() < end, f"{id} does not answer: {instance}\n{self.log(id)}"
            time.sleep(0.1)

    def on_host(
        self,
        id: str,
        argv: Sequence[str],
        *,
        user: str = "root",
        check: bool = True,
        timeout: float = 60,
        input: str | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Runs a command on a host behind SSH's back, as its root or as another of its users."""
        (instance,) = (i for i in self.instances() if i.id == id)
        if instance.pid is None:
            raise ValueError(f"{id} is off")
        spaces = ("--mount", "--net", "--pid", "--uts", "--ipc", "--time", "--root", "--wd")
        home = "/root" if user == "root" else "/home/ubuntu"
        environment = Path(f"/proc/{instance.pid}/root/etc/environment").read_text().splitlines()
        command = ["nsenter", "-t", str(instance.pid), *spaces, "--"]
        command += ["env", "-i", "-C", home, *environment, f"PATH={SYSTEM_PATH}"]
        command += argv if user == "root" else ["sudo", "-n", "-H", "-u", user, "--", *argv]
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, input=input, check=False)
        if check and done.returncode:
            output = f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
            raise AssertionError(f"{argv} on {id} ended with {done.returncode}\n{output}")
        return done

    def kill_host(self, id: str) -> None:
        """The machine dies without a word; the cloud's API goes on calling it running."""
        self._call("kill_host", id)

    def reboot(self, id: str) -> None:
        """Power cycle: the disk stays, /tmp and /run are empty, boot time and boot id are new."""
        self._call("reboot", id)

    def preempt(self, id: str, notice: float = 120) -> None:
        """A spot machine is taken away `notice` seconds after the notice in its metadata; 0: at once, unannounced."""
        self._call("preempt", id, notice)

    @contextmanager
    def adjustable_clocks(self) -> Iterator[None]:
        """Machines first booted in this block have a clock that jump_clock() can set."""
        self._call("adjustable_clocks", True)
        try:
            yield
        finally:
            self._call("adjustable_clocks", False)

    def jump_clock(self, id: str, seconds: float) -> None:
        """Steps one host's wall clock, at once and for all its processes, and with it the boot time; jumps add up."""
        self._call("jump_clock", id, seconds)

    def take_over(self, id: str) -> Instance:
        """A stranger's machine gets the addresses of this one, which is cut off if it still runs.

        Its sshd lets everybody in, does nothing for them, and notes what it is sent: see heard().
        """
        stranger = self.boot_instance()
        self.on_host(stranger.id, ["sh", "-ec", TRAP])
        self._call("move_addresses", id, stranger.id)
        for space in (network.laptop_space(self.name), network.cloud_space(self.name)):
            network.ip("-n", space.name, "neigh", "flush", "all")
        return stranger

    def heard(self, stranger: Instance) -> str:
        """What a stranger of take_over() was sent, and what its sshd logged."""
        return self.on_host(stranger.id, ["cat", "/tmp/heard", "/var/log/units/ssh.service"]).stdout

    def ports(self, id: str) -> list[int]:
        """TCP ports of a host that a stranger in its network can connect to, of all that something listens on."""
        (instance,) = (i for i in self.instances() if i.id == id)
        tables = self.on_host(id, ["cat", "/proc/net/tcp", "/proc/net/tcp6"]).stdout.splitlines()
        listening = {int(f[1].rpartition(":")[2], 16) for f in map(str.split, tables) if len(f) > 3 and f[3] == "0A"}
        tries = {}
        with network.inside(network.cloud_space(self.name)):
            for port in sorted(listening):
                tries[port] = socket.socket()
                tries[port].setblocking(False)
                tries[port].connect_ex((instance.private_ip, port))
        time.sleep(1.5)  # what the packet filter drops never answers
        _, writable, _ = select.select([], list(tries.values()), [], 0)
        failed = {s for s in tries.values() if s.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)}
        reachable = [port for port, s in tries.items() if s in writable and s not in failed]
        for s in tries.values():
            s.close()
        return reachable

    def grep_disk(self, id: str, text: str) -> list[str]:
        """Files that hold `text` among those that a host has written since it exists, its /dev/shm included."""
        found = list(self._call("grep_disk", id, text))
        (instance,) = (i for i in self.instances() if i.id == id)
        if instance.pid is not None:
            found += self.on_host(id, ["grep", "-rlF", "--", text, "/dev/shm"], check=False).stdout.splitlines()
        return sorted(found)

    def console(self, id: str) -> str:
        """What process 1 of a host printed: units, power-off, crashes. Empty when the machine is gone."""
        with suppress(RuntimeError):
            return str(self._call("console", id))
        return ""

    def log(self, id: str) -> str:
        """The ends of the cloud's own log and of a host's console, for messages about what did not happen."""
        return f"{(self.folder / 'cloud.log').read_text()[-1500:]}\n{self.console(id)[-1500:]}"

    # The cloud's API going wrong. All of it ends with clear_faults().

    def capacity_error(
        self, instance_type: str | None = None, region: str | None = None, code: str = "InsufficientInstanceCapacity"
    ) -> None:
        """Launches of this type in this region (None: any) are refused, for want of capacity or as `code` says."""
        self._call("fault", "refuse", [instance_type, region, code])

    def fail_terminate(self, times: int) -> None:
        """The next calls that terminate instances answer an error and do nothing."""
        self._call("fault", "fail_terminate", times)

    def error_but_created(self, times: int = 1) -> None:
        """The next launches answer an error although the machine is there."""
        self._call("fault", "error_but_created", times)

    def api_delay(self, seconds: float, action: str = "") -> None:
        """Answers take this much longer: all of them, or those to one action such as RunInstances."""
        self._call("fault", "delay", [action, seconds])

    def expire_credentials(self, access_key: str) -> None:
        """Requests signed with this key are answered ExpiredToken."""
        self._call("fault", "expire", access_key)

    def clear_faults(self) -> None:
        self._call("clear_faults")

    # Inside.

    def _call(self, name: str, *args: Any) -> Any:
        with socket.socket(socket.AF_UNIX) as s:
            s.settimeout(60)
            s.connect(str(self.folder / "control"))
            s.sendall(json.dumps({"call": name, "args": args}).encode() + b"\n")
            answer = json.loads(s.makefile().readline())
        if "error" in answer:
            raise RuntimeError(f"{name}{args}: {answer['error']}")
        return answer["value"]

    def _wait_ready(self) -> None:
        assert self._process is not None
        end = time.monotonic() + 60
        while not (self.folder / "control").exists() or b"ready" not in (self.folder / "cloud.log").read_bytes():
            if self._process.poll() is not None or time.monotonic() > end:
                log = (self.folder / "cloud.log").read_text()
                raise RuntimeError(f"the simulated cloud did not start: {log[-2000:]}")
            time.sleep(0.05)

    def _make_laptop(self) -> None:
        keys = f"aws_access_key_id = {LAPTOP_KEY}\naws_secret_access_key = {LAPTOP_SECRET}\n"
        files = {
            ".aws/credentials": f"[default]\n{keys}",
            ".aws/config": f"[default]\nregion = {REGION}\n",
            ".sky/config.yaml": "allowed_clouds: [aws]\naws:\n  vpc_names: skyvpc\n  use_internal_ips: false\n"
            "  post_provision_runcmd: ['echo ran > /var/own-command']\n",
            # SkyPilot keeps the sockets of its SSH connections in /tmp under this name, and clouds share addresses.
            ".sky/user_hash": network.user_hash(self.name),
            "bin/art-sky": f'#!/bin/sh\nexec {self.environment.laptop}/bin/python -m art_sky.cli.main "$@"\n',
            "bin/fakecloud": f'#!/bin/sh\nexec {PYTHON} {HERE}/fakecloud_shell.py {self.name} "$@"\n',
        }
        for folder in ("tmp", "lib"):
            (self.home / folder).mkdir(parents=True)
        for path, text in files.items():
            (self.home / path).parent.mkdir(parents=True, exist_ok=True)
            (self.home / path).write_text(text)
            (self.home / path).chmod(0o755 if path.startswith("bin/") else 0o600)
        self.run(["python", HERE / "fakecloud_catalogs.py", self.home, *REGIONS])
        # art-sky as an installed package, which goes to nodes as a wheel.
        describe = "import sys; from hatchling.build import prepare_metadata_for_build_wheel as p; p(sys.argv[1])"
        self.run(["python", "-c", describe, self.home / "lib"], cwd=CHECKOUT)


# Any key fits, and every session is written down.
TRAP = """
printf '#!/bin/sh\necho "$1 $2"\n' > /opt/any-key
printf '#!/bin/sh\necho "command: $SSH_ORIGINAL_COMMAND" >> /tmp/heard\nexec cat >> /tmp/heard\n' > /opt/listen
chmod 755 /opt/any-key /opt/listen
install -m 666 /dev/null /tmp/heard
cat >> /etc/ssh/sshd_config <<END
LogLevel DEBUG
AuthorizedKeysCommand /opt/any-key %t %k
AuthorizedKeysCommandUser root
ForceCommand /opt/listen
END
systemctl restart ssh
"""


def remove_stale() -> None:
    """Removes what is left of clouds whose process was killed."""
    for folder in network.RUN.glob("*") if network.RUN.exists() else ():
        with suppress(FileNotFoundError), (folder / "lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            network.remove(folder.name)
            shutil.rmtree(folder, ignore_errors=True)
