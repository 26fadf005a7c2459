"""The child's side of the channel between the server and its engine or trainer.

Both ends of a socket pair carry frames: a 4-byte big-endian length, then JSON. The parent sends
`{"id", "method", "params"}`, `{"id", "cancel": true}` and `{"ping": n}`; the child answers with
`{"ready": {...}}` once, any number of `{"id", "event"}`, then one `{"id", "result"}` or `{"id", "error"}`, and
`{"pong": n, "beat": b}`, where `beat` counts the progress of the main thread. A frame may hold a list of such
messages. The channel closes when either process ends, so a child never outlives its server.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import socket
import struct
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from art_sky.errors import ArtSkyError

Message = dict[str, Any]
_LENGTH = struct.Struct(">I")
MAX_FRAME = 1 << 30


def pack(messages: Message | list[Message]) -> bytes:
    body = json.dumps(messages, separators=(",", ":")).encode()
    return _LENGTH.pack(len(body)) + body


@dataclass
class Call:
    """One request from the parent. `cancelled` is set when the parent no longer wants the answer."""

    id: int
    method: str
    params: Message
    channel: Channel
    cancelled: threading.Event = field(default_factory=threading.Event)

    def event(self, data: Message) -> None:
        self.channel.send({"id": self.id, "event": data})

    def result(self, data: Message) -> None:
        self.channel.finish(self.id, {"id": self.id, "result": data})

    def error(self, error: BaseException) -> None:
        known = error if isinstance(error, ArtSkyError) else ArtSkyError(f"{type(error).__name__}: {error}")
        self.channel.finish(self.id, {"id": self.id, **known.to_wire()})


class Channel:
    """Reads in a thread of its own, so that pings and cancels are answered while the main thread computes.

    `calls` is the queue of requests for the main thread; None in it means that the parent is gone or wants the
    child to end. Methods in `aside` have a queue, and so a thread, of their own.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._write = threading.Lock()
        self._open: dict[int, Call] = {}
        self._open_lock = threading.Lock()
        self.calls: queue.Queue[Call | None] = queue.Queue()
        self.aside: dict[str, queue.Queue[Call | None]] = {}
        self.beat = 0
        threading.Thread(target=self._read_forever, name="channel", daemon=True).start()

    @classmethod
    def from_argv(cls) -> Channel:
        """The channel handed over by the parent as `--fd N`."""
        fd = int(sys.argv[sys.argv.index("--fd") + 1])
        os.set_inheritable(fd, False)
        # Ctrl-C in the parent's terminal reaches the whole group; the parent decides when its children end.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        return cls(socket.socket(fileno=fd))

    def ready(self, info: Message) -> None:
        self.send({"ready": info})

    def send(self, messages: Message | list[Message]) -> None:
        data = pack(messages)
        with self._write:
            try:
                self._sock.sendall(data)
            except OSError:
                self.calls.put(None)

    def finish(self, id: int, message: Message) -> None:
        with self._open_lock:
            self._open.pop(id, None)
        self.send(message)

    def serve(self, handlers: dict[str, Callable[[Call], Message]]) -> None:
        """Runs calls one after another on this thread until the parent goes: for children like the trainer."""
        while (call := self.calls.get()) is not None:
            self.beat += 1
            try:
                if call.cancelled.is_set():
                    raise _cancelled()
                call.result(handlers[call.method](call))
            except Exception as e:
                if not isinstance(e, ArtSkyError):
                    import traceback

                    traceback.print_exc()
                call.error(e)

    def _read_forever(self) -> None:
        try:
            stream = self._sock.makefile("rb")
            while head := stream.read(_LENGTH.size):
                (length,) = _LENGTH.unpack(head)
                self._handle(json.loads(stream.read(length)))
        except (OSError, ValueError, struct.error):
            pass  # a broken channel is a parent that is gone
        finally:
            self.calls.put(None)
            # The main thread may be deep in a computation; nobody waits for its answer any more.
            threading.Timer(5.0, os._exit, [0]).start()

    def _handle(self, message: Message) -> None:
        if "ping" in message:
            self.send({"pong": message["ping"], "beat": self.beat})
        elif message.get("cancel"):
            with self._open_lock:
                call = self._open.get(message["id"])
            if call is not None:
                call.cancelled.set()
        else:
            call = Call(message["id"], message["method"], message["params"], self)
            with self._open_lock:
                self._open[call.id] = call
            self.aside.get(call.method, self.calls).put(call)


def _cancelled() -> ArtSkyError:
    from art_sky.errors import Cancelled

    return Cancelled("the call was cancelled before it began; call again if it is still wanted")
