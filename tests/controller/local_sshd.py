"""A real sshd on loopback with keys and a configuration of its own, for the tunnel's tests and benchmark."""

from __future__ import annotations

import getpass
import os
import shutil
import socket
import subprocess
import time
from pathlib import Path

from art_sky.controller.provider import Machine

_SSHD = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")
MISSING = None if _SSHD and shutil.which("ssh") else "no sshd or ssh here: apt-get install openssh-server"


class LocalSshd:
    """`machine` is how the controller sees it; `new_host_key` makes it another machine at the same address."""

    def __init__(self, folder: Path, home: Path | None = None) -> None:
        self.folder, self.home = folder, home
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.key = folder / "id"
        _keygen(self.key)
        _keygen(folder / "host")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def machine(self) -> Machine:
        return Machine(
            "artsky-1-1", "running", "aws", instance="i-1", host="127.0.0.1", port=self.port,
            user=getpass.getuser(), key_file=str(self.key),
        )  # fmt: skip

    def start(self) -> None:
        assert _SSHD is not None
        if os.geteuid() == 0:
            Path("/run/sshd").mkdir(exist_ok=True)
        lines = [
            f"Port {self.port}", "ListenAddress 127.0.0.1", f"HostKey {self.folder / 'host'}", "UsePAM no",
            f"AuthorizedKeysFile {self.key}.pub", "StrictModes no", "PasswordAuthentication no", "PrintMotd no",
            "PermitRootLogin prohibit-password", f"PidFile {self.folder / 'pid'}",
        ]  # fmt: skip
        if self.home is not None:
            lines.append(f'SetEnv HOME="{self.home}"')
        (self.folder / "config").write_text("\n".join(lines) + "\n")
        self._log = (self.folder / "log").open("ab")
        self._process = subprocess.Popen(
            [_SSHD, "-D", "-e", "-f", str(self.folder / "config")], stderr=self._log, start_new_session=True
        )
        for _ in range(200):
            try:
                socket.create_connection(("127.0.0.1", self.port), 1).close()
                return
            except OSError:
                time.sleep(0.02)
        raise AssertionError(f"sshd does not listen: {(self.folder / 'log').read_text()}")

    def stop(self) -> None:
        """Ends it with all its sessions, as a machine that vanishes does (but says so)."""
        if self._process is not None:
            for pid in self.sessions():
                subprocess.run(["kill", "-9", str(pid)], check=False, stderr=subprocess.DEVNULL)
            self._process.kill()
            self._process.wait()
            self._process = None
            self._log.close()

    def sessions(self) -> list[int]:
        """Process ids of sshd's children, one or two a connection."""
        assert self._process is not None
        found: list[int] = []
        parents = [self._process.pid]
        while parents:
            out = subprocess.run(["pgrep", "-P", str(parents.pop())], capture_output=True, text=True, check=False)
            children = [int(pid) for pid in out.stdout.split()]
            found += children
            parents += children
        return found

    def new_host_key(self) -> None:
        self.stop()
        for file in (self.folder / "host", self.folder / "host.pub"):
            file.unlink()
        _keygen(self.folder / "host")
        self.start()


def _keygen(file: Path) -> None:
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(file)], check=True)
