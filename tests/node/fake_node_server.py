"""Stands in for `python -m art_sky.server`, `-m art_sky.node.ledger` and `.logs`. What the server does stands in the
file `control.json` of its state folder, read at each request: `working`, `jobs`, `finishes` (drains at once), `exits`.
A file `logs-fail` or `logs-hang` in the node's folder says how the last push of the logs goes."""

from __future__ import annotations

import http.server
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit


def ledger() -> None:
    folder = Path(sys.argv[3])
    (folder / "ledger-began").touch()
    sys.stdin.read()
    (folder / "ledger-ended").write_text((folder / "watchdog.json").read_text())


def logs() -> None:
    sys.stdin.read()
    if (Path(sys.argv[3]) / "logs-hang").exists():
        time.sleep(1000)
    sys.exit((Path(sys.argv[3]) / "logs-fail").exists())


def serve(state: Path, factor: float) -> None:
    began = [time.monotonic()]

    def control() -> dict[str, Any]:
        try:
            found: dict[str, Any] = json.loads((state / "control.json").read_text())
        except (OSError, ValueError):
            found = {}
        return found

    def end(*_: object) -> None:
        left = [] if control().get("finishes", True) else [f"p/m {job['request_id']}" for job in control()["jobs"]]
        (state / "unfinished.json").write_text(json.dumps({"pid": os.getpid(), "requests": left}))
        os._exit(0)

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            wanted = control()
            if wanted.get("working"):
                began[0] = time.monotonic()
            idle = (time.monotonic() - began[0]) * factor
            self._answer({"idle_seconds": idle, "jobs": wanted.get("jobs", [])})

        def do_POST(self) -> None:
            seconds = float(parse_qs(urlsplit(self.path).query)["drain_seconds"][0])
            (state / "drained").write_text(str(seconds))
            self._answer({})
            if control().get("finishes", True):
                threading.Timer(0.02, end).start()

        def _answer(self, value: object) -> None:
            if self.headers["authorization"] != f"Bearer {(state / 'token').read_text().strip()}":
                self.send_error(401)
                return
            data = json.dumps(value).encode()
            self.send_response(200)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None: ...

    if control().get("exits"):
        sys.exit(3)
    signal.signal(signal.SIGTERM, end)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    owner = int(sys.argv[sys.argv.index("--owner-fd") + 1])
    threading.Thread(target=lambda: (os.read(owner, 1), end()), daemon=True).start()
    (state / "environment.json").write_text(json.dumps(dict(os.environ)))
    announced = {"pid": os.getpid(), "base_url": f"http://127.0.0.1:{server.server_port}"}
    (state / "server.json.new").write_text(json.dumps(announced))
    (state / "server.json.new").replace(state / "server.json")
    server.serve_forever(0.05)


if __name__ == "__main__":
    if sys.argv[1] == "-c":
        sys.exit()  # the installation looks whether the server can be imported
    if sys.argv[2] == "art_sky.node.ledger":
        ledger()
    elif sys.argv[2] == "art_sky.node.logs":
        logs()
    else:
        config = json.loads(Path(sys.argv[sys.argv.index("--config") + 1]).read_text())
        serve(Path(config["state_dir"]), float(config["engine"]["factor"]))
