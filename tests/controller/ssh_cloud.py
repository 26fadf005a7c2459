"""A provider whose machines are sshds on loopback, with a server and a stand-in for the node's programs.

Its state is files, so that a killed controller's successor finds the machines: `<node>.json` in `$ART_SKY_TEST_CLOUD`.
`script` in that folder holds one word a launch: ok, none, slow (waits for the file `go`).
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

from local_sshd import LocalSshd

from art_sky import __version__
from art_sky.controller import reconcile, renewal
from art_sky.controller.provider import Machine, NodeOrder, Offer, Wanted
from art_sky.errors import NoCapacity

_RECEIVE = """
import json, pathlib, sys
folder = pathlib.Path.home() / ".art-sky-node"
what = sys.argv[1]
(folder / "received").write_text(sys.stdin.read())
(folder / "received").rename(folder / f"received-{what}")
if what == "end":
    state = json.loads((folder / "watchdog.json").read_text())
    (folder / "new").write_text(json.dumps({**state, "phase": "ended", "ending": "asked"}))
    (folder / "new").rename(folder / "watchdog.json")
"""
_BEAT = """
import pathlib, sys
folder = pathlib.Path.home() / ".art-sky-node"
for line in sys.stdin:
    (folder / "beat").touch()
    file = folder / "watchdog.json"
    print(file.read_text() if file.exists() else "{}", flush=True)
"""
# Serves once the secrets are there.
_SERVER = f"""
import json, os, pathlib, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
folder = pathlib.Path.home() / ".art-sky-node"
while not (folder / "received-secrets").exists():
    time.sleep(0.02)
token = json.loads((folder / "received-secrets").read_text())["token"]
class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def log_message(self, *_): pass
    def do_GET(self):
        health = self.path == "/health"
        code = 200 if health or self.headers.get("authorization") == f"Bearer {{token}}" else 401
        body = {{"version": "{__version__}", "node": folder.parent.name}}
        if self.path == "/api/v1/status":
            body = {{"models": [{{
                "project": "p", "name": "agent", "base_model": "b", "inference_name": "agent", "step": 3,
                "manifest": "m", "lora": {{}}, "server_version": "0.1.0", "context_length": 512,
                "lease": {{"owner": "server node pid 7", "generation": 2, "age_seconds": 61.0}},
            }}]}}
        data = json.dumps(body if code == 200 else {{}}).encode()
        self.send_response(code)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
state = {{"boot_id": "b", "boottime": 1.0, "pid": os.getpid(), "phase": "serving", "idle_seconds": 7.0,
         "server_url": f"http://127.0.0.1:{{server.server_port}}"}}
(folder / "new").write_text(json.dumps(state))
(folder / "new").replace(folder / "watchdog.json")
server.serve_forever()
"""


def cloud_folder() -> Path:
    return Path(os.environ["ART_SKY_TEST_CLOUD"])


class SshCloud:
    shares_files = True

    def check(self) -> dict[str, str | None]:
        return {"aws": None}

    @staticmethod
    def offers(wanted: Wanted) -> list[Offer]:
        return [Offer("aws", "us-east-1", "g5.xlarge", {"A10G": 1}, False, 1.0)]

    def launch(self, order: NodeOrder, progress: Callable[[str, str], None]) -> Machine:
        name = order.config.node
        script = cloud_folder() / "script"
        words = script.read_text().split() if script.exists() else []
        if words:
            script.write_text(" ".join(words[1:]))
        progress("provision", "asking for a machine")
        if words[:1] == ["none"]:
            raise NoCapacity("us-east-1 has none; try later")
        home = cloud_folder() / name
        (home / ".art-sky-node").mkdir(parents=True)
        with zipfile.ZipFile(home / ".art-sky-node" / "art_sky.whl", "w") as wheel:
            texts = {"__init__.py": "", "node/__init__.py": "", "node/receive.py": _RECEIVE, "node/beat.py": _BEAT}
            for file, text in texts.items():
                wheel.writestr(f"art_sky/{file}", text)
        sshd = LocalSshd(cloud_folder() / f"{name}-sshd", home)
        assert sshd._process is not None
        server = subprocess.Popen(
            [sys.executable, "-c", _SERVER], env={**os.environ, "HOME": str(home)}, start_new_session=True
        )
        pids = [sshd._process.pid, server.pid]
        facts = {"machine": vars(sshd.machine) | {"node": name, "instance": f"i-{name}"}, "pids": pids}
        scratch = cloud_folder() / "new"
        scratch.write_text(json.dumps(facts))
        scratch.replace(cloud_folder() / f"{name}.json")
        while words[:1] == ["slow"] and not (cloud_folder() / "go").exists():
            time.sleep(0.02)
        progress("setup", "installing")
        return self.find(name)

    def find(self, node: str) -> Machine:
        file = cloud_folder() / f"{node}.json"
        return Machine(**json.loads(file.read_text())["machine"]) if file.exists() else Machine(node, "absent", "aws")

    def list(self) -> list[Machine]:
        return [self.find(f.stem) for f in cloud_folder().glob("artsky-*.json")]

    @staticmethod
    def end(node: str) -> None:
        file = cloud_folder() / f"{node}.json"
        if file.exists():
            for pid in json.loads(file.read_text())["pids"]:
                kill_tree(pid)
            file.unlink()

    def logs(self, node: str, follow: bool, write: Callable[[str], None]) -> None:
        write(f"the log of {node}\n")


def provider() -> SshCloud:
    """In a controller's own process, whose machines are made and gone at once, little need be waited for."""
    main = sys.modules["__main__"].__spec__
    if main is not None and main.name == "art_sky.controller.__main__":
        reconcile.SETTLE_SECONDS, reconcile.ABANDONED_SECONDS = 1.0, 3.0
        reconcile.LOST_AFTER_SECONDS, reconcile.OFTEN, reconcile.SELDOM = 1.0, 0.5, 0.5
        reconcile.END_RETRY_SECONDS = (0.5,)
        renewal.ASK_SECONDS = 0.5
    return SshCloud()


def kill_tree(pid: int) -> None:
    out = subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True, check=False)
    for child in out.stdout.split():
        kill_tree(int(child))
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
