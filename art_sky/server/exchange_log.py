"""Every exchange on disk before its reply is released.

`exchanges.jsonl` holds one Exchange a line, its short fields first, so that the index is rebuilt at start without
parsing prompts. A line is written before the reply and reaches the disk within 100 ms (or before the reply, by
option). What became of a rollout's reply follows in a line of its own: `{"delivered":ID}` when all of it was handed to
its connection, `{"withdrawn":ID}` when its caller asked the same again. A full file becomes `exchanges.1.jsonl` and so
on; the oldest is deleted. Before that, the rollouts that lose a received reply with it are written to `lost.jsonl`, a
line for each file: [one of its completions, rollouts], so that a rollout with a gap is known for one.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import os
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Literal

from art_sky.errors import ArtSkyError, CorruptObject, NoDiskSpace, NotFound, StoreError
from art_sky.schemas import Exchange
from art_sky.server.wire_json import dumps, loads
from art_sky.whole_file import write_whole

FSYNC_SECONDS = 0.1
KEPT_LOST = 100_000  # rollouts that are known to have a gap
_HEAD = re.compile(
    rb'\{"completion_id":"([^"]+)","created":[^,]+,"project":"[^"]*","model":"[^"]*","rollout":(?:"([^"]+)"|null),'
)
_MARK = re.compile(rb'\{"(delivered|withdrawn)":"([^"]+)"\}')
Mark = Literal["delivered", "withdrawn"]


class ExchangeLog:
    def __init__(self, folder: Path, *, fsync_each: bool = False, file_bytes: int = 64 << 20, files: int = 4) -> None:
        """Raises StoreError when the folder cannot be written."""
        self._path = folder / "exchanges.jsonl"
        self._fsync_each, self._file_bytes, self._files = fsync_each, file_bytes, files
        self._lock = threading.Lock()
        self._place: dict[str, tuple[int, int, int]] = {}  # completion id -> file number, offset, length
        self._rollouts: dict[str, list[str]] = {}
        self._marks: dict[Mark, set[str]] = {"delivered": set(), "withdrawn": set()}
        self._lost: dict[str, None] = {}  # rollouts with a gap, in the order in which they got it
        self._lost_path = folder / "lost.jsonl"
        self._number = 0  # of the newest file; older ones count down
        self._fsync: asyncio.Task[None] | None = None
        with _disk_errors("open", self._path):
            folder.mkdir(parents=True, exist_ok=True)
            for age in range(files - 1, -1, -1):
                if self._file(age).exists():
                    self._load(age)
            self._load_lost()
            self._out: BinaryIO = self._path.open("ab", buffering=0)

    async def append(self, exchange: Exchange) -> None:
        """Raises NoDiskSpace or StoreError: the reply must not be released then."""
        await asyncio.to_thread(self._write, exchange)
        if not self._fsync_each and self._fsync is None:
            self._fsync = asyncio.create_task(self._fsync_soon())

    async def find(self, completion_id: str) -> Exchange:
        """Raises NotFound for a completion that is unknown, or so old that its file was deleted."""
        return await asyncio.to_thread(self._read, completion_id)

    async def of_rollout(self, rollout: str) -> tuple[list[Exchange], bool]:
        """Those whose reply reached the agent, as far as can be told, in the order in which they ended, and whether
        none of these is gone with a file that was deleted.

        One that was cut is no part of what the agent did, and must not be trained.
        """
        received = self._marks["delivered"] - self._marks["withdrawn"]
        found = [e for id in self._rollouts.get(rollout, []) if id in received and (e := await self._kept(id))]
        return found, rollout not in self._lost

    async def delivered(self, completion_id: str, rollout: str) -> None:
        """All of a reply of a rollout was handed to its connection. Known at once, then written."""
        if completion_id in self._place:
            await self._mark("delivered", completion_id)
        else:  # it took so long that its record is gone
            await asyncio.to_thread(self._lose, completion_id, [rollout])

    async def withdraw_alike(
        self, rollout: str, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None
    ) -> None:
        """The agent's client asks again for what got no reply: the earlier one was lost on its way, unseen from here.

        Which of several alike it was cannot be told, so that none of them counts; nor does one whose last bytes are
        still on their way.
        """
        for id in [id for id in self._rollouts.get(rollout, []) if id not in self._marks["withdrawn"]]:
            exchange = await self._kept(id)
            if exchange and exchange.messages == messages and (exchange.tools or None) == (tools or None):
                await self._mark("withdrawn", id)

    async def close(self) -> None:
        if self._fsync is not None:
            await self._fsync
        self._out.close()

    async def _kept(self, completion_id: str) -> Exchange | None:
        """None for one whose file was deleted meanwhile."""
        try:
            return await self.find(completion_id)
        except NotFound:
            return None

    async def _mark(self, mark: Mark, completion_id: str) -> None:
        self._marks[mark].add(completion_id)
        await asyncio.to_thread(self._write_line, dumps({mark: completion_id}).encode() + b"\n", None)

    def _write(self, exchange: Exchange) -> None:
        self._write_line(dumps(exchange.model_dump()).encode() + b"\n", exchange)

    def _write_line(self, line: bytes, exchange: Exchange | None) -> None:
        with self._lock, _disk_errors("write", self._path):
            if self._out.tell() + len(line) > self._file_bytes and self._out.tell():
                self._rotate()
            offset = self._out.tell()
            written = self._out.write(line)
            if written != len(line):  # a full disk: take the piece back, so that the file stays whole lines
                self._out.truncate(offset)
                self._out.seek(offset)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            if exchange is not None:
                self._remember(exchange.completion_id, exchange.rollout, (self._number, offset, len(line)))
            if self._fsync_each:
                os.fsync(self._out.fileno())

    async def _fsync_soon(self) -> None:
        await asyncio.sleep(FSYNC_SECONDS / 2)
        self._fsync = None
        with self._lock:
            fd = os.dup(self._out.fileno())
        try:
            await asyncio.to_thread(os.fsync, fd)
        finally:
            os.close(fd)

    def _read(self, completion_id: str) -> Exchange:
        with self._lock, _disk_errors("read", self._path):
            place = self._place.get(completion_id)
            if place is None:
                raise NotFound(
                    f"no exchange {completion_id[:80]!r} is on record here; ask the server that sampled it, or keep "
                    "the Choice object as the client returned it"
                )
            number, offset, length = place
            with self._file(self._number - number).open("rb") as f:
                f.seek(offset)
                line = f.read(length)
        try:
            return Exchange.model_validate(loads(line))
        except ValueError as e:
            raise CorruptObject(f"the record of {completion_id} cannot be read: {e}; sample it again") from e

    def _file(self, age: int) -> Path:
        return self._path if age == 0 else self._path.with_name(f"exchanges.{age}.jsonl")

    def _rotate(self) -> None:
        os.fsync(self._out.fileno())
        oldest = self._number - self._files + 2  # that is kept
        gone = {id for id, p in self._place.items() if p[0] < oldest}
        received = gone & (self._marks["delivered"] - self._marks["withdrawn"])
        losers = [r for r, ids in self._rollouts.items() if not received.isdisjoint(ids)]
        if losers:
            self._write_lost(next(iter(gone)), losers)
        self._out.close()
        for age in range(self._files - 1, 0, -1):
            if self._file(age - 1).exists():
                self._file(age - 1).replace(self._file(age))
        self._number += 1
        self._place = {id: p for id, p in self._place.items() if p[0] >= oldest}
        kept = {r: [id for id in ids if id in self._place] for r, ids in self._rollouts.items()}
        self._rollouts = {r: ids for r, ids in kept.items() if ids}
        for marked in self._marks.values():
            marked.intersection_update(list(self._place))
        self._out = self._path.open("ab", buffering=0)

    def _lose(self, completion_id: str, rollouts: list[str]) -> None:
        with self._lock, _disk_errors("write", self._lost_path):
            self._write_lost(completion_id, rollouts)

    def _write_lost(self, gone: str, rollouts: list[str]) -> None:
        """Raises OSError; nothing may be deleted then."""
        with self._lost_path.open("ab") as file:
            file.write(dumps([gone, rollouts]).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
        self._lost.update(dict.fromkeys(rollouts))
        self._forget_lost()

    def _forget_lost(self) -> None:
        for rollout in list(itertools.islice(self._lost, max(len(self._lost) - KEPT_LOST, 0))):
            del self._lost[rollout]

    def _load_lost(self) -> None:
        if not self._lost_path.exists():
            return
        for line in self._lost_path.read_bytes().splitlines():
            try:
                gone, rollouts = loads(line)
            except (ArtSkyError, ValueError):
                continue  # the server died in the middle of a write, before anything was deleted
            if gone not in self._place:
                self._lost.update(dict.fromkeys(rollouts))
        self._forget_lost()
        write_whole(self._lost_path, dumps(["", list(self._lost)]) + "\n")

    def _load(self, age: int) -> None:
        path, offset = self._file(age), 0
        with path.open("rb") as f:
            for line in f:
                head = _HEAD.match(line[:1024])
                mark = _MARK.match(line[:1024])
                if mark and line.endswith(b"}\n"):
                    self._marks["delivered" if mark[1] == b"delivered" else "withdrawn"].add(mark[2].decode())
                if head and line.endswith(b"}\n"):
                    rollout = head[2].decode() if head[2] else None
                    self._remember(head[1].decode(), rollout, (-age, offset, len(line)))
                offset += len(line)
        if age == 0 and offset and not line.endswith(b"\n"):
            os.truncate(path, offset - len(line))  # the server died in the middle of a write

    def _remember(self, id: str, rollout: str | None, place: tuple[int, int, int]) -> None:
        self._place[id] = place
        if rollout is not None:
            self._rollouts.setdefault(rollout, []).append(id)


@contextlib.contextmanager
def _disk_errors(what: str, path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as e:
        if e.errno in (errno.ENOSPC, errno.EDQUOT):
            raise NoDiskSpace(f"the disk is full, cannot {what} {path}; free some space, then try again") from e
        raise StoreError(f"cannot {what} {path}: {e.strerror or e}; check the folder's permissions") from e
