"""How the controller's ssh is called: nothing of the user's own configuration, keys of hosts in a file of its own.

A host is known by its instance, not by its address: clouds give addresses to the next stranger. The first key of an
instance is taken, another one later is refused.
"""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path

from art_sky.config import home
from art_sky.controller.provider import Machine
from art_sky.errors import ServerUnreachable
from art_sky.node.task import node_command

SEND_SECONDS = 60.0


def known_hosts() -> Path:
    return home() / "controller" / "known_hosts"


def ssh_command(machine: Machine, hosts: Path, *options: str) -> list[str]:
    """The argv up to the destination; a command for the other side may follow."""
    settings = {
        "BatchMode": "yes",
        "IdentitiesOnly": "yes",
        "ForwardAgent": "no",
        "ForwardX11": "no",
        "ControlPath": "none",
        "UserKnownHostsFile": f'"{hosts}"',
        "GlobalKnownHostsFile": "/dev/null",
        "HostKeyAlias": machine.host_key_alias,
        "StrictHostKeyChecking": "accept-new",
        "UpdateHostKeys": "no",
        "CheckHostIP": "no",
        "ConnectTimeout": "10",
        "ServerAliveInterval": "5",
        "ServerAliveCountMax": "3",
        "ExitOnForwardFailure": "yes",
        "StreamLocalBindUnlink": "yes",
        "StreamLocalBindMask": "0177",
        "LogLevel": "ERROR",
    }
    argv = ["ssh", "-F", "none", "-p", str(machine.port)]
    if machine.key_file:
        argv += ["-i", str(Path(machine.key_file).expanduser())]
    for name, value in settings.items():
        argv += ["-o", f"{name}={value}"]
    return [*argv, *options, f"{machine.user}@{machine.host}"]


def send(machine: Machine, hosts: Path, what: str, record: str) -> None:
    """Hands a record to the node's `receive` over stdin. Raises ServerUnreachable."""
    command = [*ssh_command(machine, hosts, "-T"), node_command("receive", what)]
    try:
        done = subprocess.run(command, input=record, capture_output=True, text=True, timeout=SEND_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise ServerUnreachable(
            f"{machine.node} did not take the {what} within {SEND_SECONDS:.0f} s; it is tried again"
        ) from None
    except OSError as e:
        raise no_ssh(e) from e
    if done.returncode != 0:
        raise ServerUnreachable(f"{machine.node} did not take the {what}: {last_line(done.stderr)}; it is tried again")


def ask(machine: Machine, hosts: Path, program: str, *arguments: str) -> str:
    """What a program of the node prints. Raises ServerUnreachable."""
    command = [*ssh_command(machine, hosts, "-T"), node_command(program, *arguments)]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=SEND_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise ServerUnreachable(f"{machine.node} did not answer within {SEND_SECONDS:.0f} s; see `sky logs`") from None
    except OSError as e:
        raise no_ssh(e) from e
    if done.returncode != 0:
        why = last_line(done.stderr.decode(errors="replace"))
        raise ServerUnreachable(f"{machine.node} did not answer: {why}; see `sky logs`")
    return done.stdout.decode(errors="replace")


def is_changed_key(stderr: str) -> bool:
    return "HOST IDENTIFICATION HAS CHANGED" in stderr or "Host key verification failed" in stderr


def changed_key(machine: Machine, hosts: Path) -> str:
    """What to say about it."""
    alias = shlex.quote(machine.host_key_alias)
    return (
        f"the machine at {machine.host} has another SSH host key than {machine.host_key_alias} had before, so nothing "
        f"is sent to it; if that is right, run `ssh-keygen -R {alias} -f {shlex.quote(str(hosts))}`"
    )


def last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else "ssh said nothing"


def no_ssh(error: OSError) -> ServerUnreachable:
    return ServerUnreachable(f"ssh cannot be started ({error.strerror or error}); install OpenSSH's client")
