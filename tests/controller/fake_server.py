"""A stand-in for `art_sky.server`: announces itself, answers /health, /status and /shutdown; or misbehaves.

The behaviour is the first word of the environment variable FAKE_SERVER: "" (well-behaved), "silent" (never
announces), "dies", "deaf" (refuses shutdown and ignores SIGTERM, with a child that does so too).
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

mode = os.environ.get("FAKE_SERVER", "")
parser = argparse.ArgumentParser()
parser.add_argument("--config")
config = json.loads(Path(parser.parse_args().config).read_text())
state = Path(config["state_dir"])
state.mkdir(parents=True, exist_ok=True)
TOKEN = "t" * 32
started = time.time()


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass

    def reply(self, code: int, body: object) -> None:
        data = json.dumps(body).encode()
        self.send_response(code)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def authorized(self) -> bool:
        if self.headers.get("authorization") == f"Bearer {TOKEN}":
            return True
        self.reply(401, {"error": {"message": "wrong token", "code": "unauthorized"}})
        return False

    def do_GET(self) -> None:
        if self.path == "/health":
            self.reply(200, {"status": "ok"})
        elif self.authorized():
            self.reply(200, {
                "version": "0.1.0", "pid": os.getpid(), "store": config["store"], "started": started,
                "idle_seconds": 5.0, "idle_limit_seconds": (config["idle_minutes"] or 0) * 60 or None,
                "engine": {"state": "ready"}, "trainer": {"state": "stopped"}, "jobs": [],
                "models": [{
                    "project": "p", "name": "agent", "base_model": "b", "inference_name": "agent", "step": 3,
                    "manifest": "m", "lora": {}, "server_version": "0.1.0", "context_length": 512,
                }],
            })  # fmt: skip

    def do_POST(self) -> None:
        if not self.authorized():
            return
        if mode == "deaf":
            return self.reply(503, {"error": {"message": "no", "code": "busy"}})
        self.reply(200, {})
        threading.Thread(target=server.shutdown).start()


if mode == "dies":
    sys.exit("error: something is wrong; mend it")
if mode == "silent":
    time.sleep(600)
if mode == "deaf":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    (state / "child.pid").write_text(str(child.pid))
(state / "token").touch(mode=0o600)
(state / "token").write_text(TOKEN)
server = ThreadingHTTPServer((config["host"], config["port"]), Handler)
url = f"http://127.0.0.1:{server.server_port}"
announced = {"pid": os.getpid(), "port": server.server_port, "base_url": url, "version": "0.1.0", "started": started}
(state / "server.json").write_text(json.dumps(announced))
print("listening on", url, flush=True)
server.serve_forever()
