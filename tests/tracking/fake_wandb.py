"""A stand-in for the W&B service, and a reader of the files that the real client writes offline.

The service accepts anything, so it shows what the client sends and that it completes, not that the real service
would take it. The reader knows the LevelDB log format: blocks of 32 KiB, records with a 7-byte header.
"""

from __future__ import annotations

import gzip
import json
import struct
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any


class FakeWandb:
    """`rows` and `configs` by run id; `url` to give as WANDB_BASE_URL."""

    def __init__(self) -> None:
        self.rows: dict[str, list[dict[str, Any]]] = {}
        self.configs: dict[str, dict[str, Any]] = {}
        self.offsets: list[tuple[str, int]] = []
        self.complete: list[str] = []
        self.bodies: list[bytes] = []
        handler = type("Handler", (_Handler,), {"service": self})
        self._server = _Quiet(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Quiet(ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that ends with open connections is no news."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    service: FakeWandb

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        self._reply({})

    def do_PUT(self) -> None:
        self._body()
        self._reply({})

    def do_POST(self) -> None:
        body = self._body()
        self.service.bodies.append(body)
        if self.path == "/graphql":
            request = json.loads(body)
            return self._reply({"data": self._graphql(request["query"], request.get("variables") or {})})
        if self.path.endswith("/file_stream"):
            run, stream = self.path.split("/")[-2], json.loads(body)
            for file, chunk in (stream.get("files") or {}).items():
                if file == "wandb-history.jsonl":
                    self.service.offsets.append((run, chunk["offset"]))
                    rows = self.service.rows.setdefault(run, [])
                    del rows[chunk["offset"] :]
                    rows += [json.loads(line) for line in chunk["content"]]
            if "complete" in stream:
                self.service.complete.append(run)
        self._reply({"exitcode": None, "limits": {}})

    def _graphql(self, query: str, variables: dict[str, Any]) -> dict[str, Any]:
        if "upsertBucket" in query:
            run = variables.get("name") or "?"
            if variables.get("config"):
                self.service.configs[run] = json.loads(variables["config"])
            return {"upsertBucket": {"bucket": self._bucket(run, variables), "inserted": run not in self.service.rows}}
        if "createRunFiles" in query:
            files = [
                {"name": name, "uploadUrl": f"{self.service.url}/upload/{name}"} for name in variables.get("files", [])
            ]
            return {"createRunFiles": {"runID": "UnVuOjE=", "uploadHeaders": [], "files": files}}
        if "stopped" in query:
            return {"project": {"run": {"stopped": False}}}
        if "organization" in query:
            return {"entity": {"organization": None}}
        if "viewer" in query or "serverInfo" in query:
            versions = {"min_cli_version": "0.0.1", "max_cli_version": "99.0.0"}
            return {
                "viewer": {"id": "VXNlcjox", "username": "ci", "entity": "ci", "flags": "{}", "teams": {"edges": []}},
                "serverInfo": {"cliVersionInfo": versions, "latestLocalVersionInfo": None, "features": []},
            }
        run = variables.get("name") or variables.get("run") or "?"
        known = self._bucket(run, variables) if run in self.service.rows else None
        return {"model": {"bucket": known}, "project": {"bucket": None, "run": None}}

    def _bucket(self, run: str, variables: dict[str, Any]) -> dict[str, Any]:
        rows = self.service.rows.get(run, [])
        return {
            "id": "UnVuOjE=", "name": run, "displayName": run, "description": None, "sweepName": None,
            "config": json.dumps(self.service.configs.get(run, {})), "wandbConfig": '{"t": 1}',
            "historyLineCount": len(rows), "logLineCount": 0, "eventsLineCount": 0,
            "historyTail": json.dumps([json.dumps(r) for r in rows[-1:]]), "eventsTail": "[]",
            "summaryMetrics": "{}", "tags": [], "notes": None, "group": None, "jobType": None, "stopped": False,
            "createdAt": "2026-01-01T00:00:00Z", "heartbeatAt": "2026-01-01T00:00:00Z",
            "project": {"id": "UHJvajox", "name": variables.get("project") or "p",
                        "entity": {"id": "RW50OjE=", "name": variables.get("entity") or "ci"}},
        }  # fmt: skip

    def _body(self) -> bytes:
        data = self.rfile.read(int(self.headers.get("content-length") or 0))
        if self.headers.get("transfer-encoding") == "chunked":
            data = b""
            while size := int(self.rfile.readline(), 16):
                data += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
        return gzip.decompress(data) if self.headers.get("content-encoding") == "gzip" else data

    def _reply(self, body: object) -> None:
        data = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


class OfflineRun:
    """What one offline run's file holds."""

    def __init__(self, file: Path) -> None:
        self.id = ""
        self.project = ""
        self.config: dict[str, Any] = {}
        self.rows: list[dict[str, Any]] = []
        self.axes: dict[str, str] = {}  # metric name or glob -> its step metric
        self.raw = file.read_bytes()
        for record in _records(self.raw):
            kind = record.WhichOneof("record_type")
            if kind == "history":
                self.rows.append({_key(i): json.loads(i.value_json) for i in record.history.item})
            elif kind == "run":
                self.id, self.project = record.run.run_id, record.run.project
                self.config.update({_key(i): json.loads(i.value_json) for i in record.run.config.update})
            elif kind == "metric":
                self.axes[record.metric.name or record.metric.glob_name] = record.metric.step_metric


def offline_runs(folder: Path) -> list[OfflineRun]:
    """All offline runs below `folder`. Ends wandb's own process, which writes the end of a run in its own time."""
    import wandb

    wandb.teardown()
    return [OfflineRun(file) for file in sorted(folder.glob("wandb/offline-run-*/*.wandb"))]


def _records(data: bytes) -> Iterator[Any]:
    from wandb.proto import wandb_internal_pb2

    block, full, first, last = 32768, 1, 1, 4
    assert data[:4] == b":W&B"
    at, pending = 7, b""
    while at + 7 <= len(data):
        if (left := block - at % block) < 7:
            at += left
            continue
        _crc, length, kind = struct.unpack("<IHB", data[at : at + 7])
        chunk, at = data[at + 7 : at + 7 + length], at + 7 + length
        if len(chunk) < length or (kind == 0 and length == 0):
            return  # cut off, or padding
        pending = chunk if kind in (first, 2) else pending + chunk
        if kind in (full, last):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(pending)
            yield record


def _key(item: Any) -> str:
    return str(item.key or ".".join(item.nested_key))
