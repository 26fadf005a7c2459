"""Stands in for vLLM's interpreter: `-c ...` says what is installed, `-m ...` serves a part of vLLM's interface.

Only the standard library. What a reply is like is chosen by the prompt's first token, see `REPLIES`; how the
process starts, and where calls are written down, by environment variables.
"""

from __future__ import annotations

import json
import os
import socketserver
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler
from pathlib import Path

PLAIN, GARBAGE, REFUSED, FAILED, BROKEN_OFF, NAN, ENDLESS, MISMATCH, EXIT, LOST, NO_TOKENS, ODD_END = range(12)
dead = threading.Event()  # the engine behind the API server
asleep = threading.Event()
adapters: dict[str, str] = {}
running = 0


def record(what: str, **values: object) -> None:
    with Path(os.environ["FAKE_VLLM_CALLS"]).open("a") as f:
        f.write(json.dumps({"call": what, **values}) + "\n")


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_: object) -> None: ...

    def address_string(self) -> str:
        return "unix"

    def answer(self, status: int, body: object) -> None:
        data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def refuse(self, status: int, message: str) -> None:
        self.answer(status, {"error": {"message": message, "type": "Error", "param": None, "code": status}})

    def do_GET(self) -> None:
        if self.path == "/health":
            self.answer(503 if dead.is_set() else 200, "")
        elif self.path == "/metrics":
            self.answer(
                200,
                f'# HELP x\nvllm:num_requests_running{{engine="0"}} {running}.0\n'
                'vllm:num_requests_waiting{engine="0"} 3.0\nvllm:kv_cache_usage_perc{engine="0"} 0.25\n',
            )

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if self.path == "/v1/load_lora_adapter":
            record("load", **body)
            if "broken" in body["lora_path"]:
                return self.refuse(500, "header too large")
            adapters[body["lora_name"]] = body["lora_path"]
        elif self.path == "/art-sky/name_adapter":
            record("name", **body)
            if os.environ.get("FAKE_VLLM_NAMES") == "no":
                return self.refuse(500, "no attribute lora_requests")
            adapters[body["lora_name"]] = body["lora_path"]
        elif self.path == "/v1/unload_lora_adapter":
            record("unload", **body)
            adapters.pop(body["lora_name"], None)
        elif self.path.startswith("/sleep"):
            record(self.path)
            asleep.set()
        elif self.path == "/wake_up":
            record("/wake_up")
            asleep.clear()
        else:
            return self.generate(body)
        self.answer(200, "ok")

    def generate(self, body: dict) -> None:
        global running
        record("generate", **body)
        kind, *rest = body["token_ids"]
        if body["model"] not in adapters or kind == LOST:
            return self.refuse(404, "The model does not exist")
        if kind == REFUSED and not rest:
            return self.refuse(400, "top_k must be positive")
        if kind == FAILED and not rest:
            return self.refuse(500, "out of luck")
        self.send_response(200)
        self.end_headers()
        running += 1
        try:
            self.stream(kind, body)
        except OSError:
            record("cancelled")
        finally:
            running -= 1

    def stream(self, kind: int, body: dict) -> None:
        params = body["sampling_params"]
        count = params["max_tokens"]
        for i in range(count):
            end = "length" if i == count - 1 else None
            if kind == GARBAGE:
                self.wfile.write(b"data: {not json\n\n")
            elif kind in (REFUSED, FAILED):
                code = 400 if kind == REFUSED else 500
                self.event({"error": {"message": "in the stream", "type": "Error", "param": None, "code": code}})
                return
            elif kind == BROKEN_OFF and i == 1:
                return
            elif kind == EXIT and i == 1:
                os._exit(3)
            if kind == ODD_END and end:
                end = "tired"
            logprob = -9999.0 if kind == NAN else -0.5 - i
            token = 50 + i
            content = {"token_id": token + (kind == MISMATCH), "logprob": logprob, "rank": 2, "top_logprobs": []}
            # As vLLM: the sampled token first, then the likeliest ones, as many as asked for in all.
            tops = [(token, logprob), (7, -0.1), (8, -0.2), (9, -0.3)][: max(params["logprobs"], 1)]
            content["top_logprobs"] = [{"token_id": t, "logprob": p, "rank": 1} for t, p in tops]
            choice = {"index": 0, "finish_reason": end, "token_ids": [token], "logprobs": {"content": [content]}}
            if kind == NO_TOKENS:
                choice = ["what"]
            self.event({"request_id": "r", "usage": None, "choices": [choice]})
            while kind == ENDLESS and i == 1:
                time.sleep(0.01)
                self.wfile.write(b"\n")
        usage = {"prompt_tokens": 1, "prompt_tokens_details": {"cached_tokens": 16}}
        self.event({"request_id": "r", "usage": usage, "choices": []})
        self.wfile.write(b"data: [DONE]\n\n")

    def event(self, event: dict) -> None:
        self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())


class Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True


def main() -> None:
    if sys.argv[1] == "-c":
        print(os.environ["FAKE_VLLM_INSTALLED"])
        return
    assert sys.argv[1:3] == ["-m", "vllm.entrypoints.openai.api_server"]
    record("start", argv=sys.argv, pid=os.getpid(), env=sorted(os.environ), gpus=os.environ.get("CUDA_VISIBLE_DEVICES"))
    start = os.environ.get("FAKE_VLLM_START", "")
    if start == "exit":
        print("INFO loading\nValueError: no such architecture\nINFO the end", file=sys.stderr)
        sys.exit(1)
    if start == "never":
        time.sleep(600)
    # What a dead engine looks like is asked for from outside, by a file beside the calls.
    threading.Thread(target=watch, daemon=True).start()
    Server(sys.argv[sys.argv.index("--uds") + 1], Handler).serve_forever()


def watch() -> None:
    file = Path(os.environ["FAKE_VLLM_CALLS"]).with_name("engine-dies")
    while not dead.is_set():
        if file.exists():
            file.unlink()
            dead.set()
        time.sleep(0.01)


if __name__ == "__main__":
    main()
