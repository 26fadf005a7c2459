"""Typed JSON records under one folder of a store."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from pydantic import ValidationError

from art_sky.errors import (
    ArtSkyError,
    CorruptObject,
    InvalidInput,
    ObjectNotFound,
    PreconditionFailed,
    StoreError,
)
from art_sky.schemas import Record
from art_sky.store.protocol import Store

FORMAT = 1
UPDATE_TRIES = 200

R = TypeVar("R", bound=Record)


def to_json(value: Record | Mapping[str, Any]) -> bytes:
    """ASCII JSON, so that lone surrogates survive. Raises InvalidInput for what JSON cannot say, NaN included."""
    try:
        plain = value.model_dump() if isinstance(value, Record) else dict(value)
        return json.dumps(plain, allow_nan=False).encode() + b"\n"
    except (TypeError, ValueError, RecursionError) as e:
        raise InvalidInput(f"this cannot be stored as JSON: {e}; give plain, finite values") from e


class Records:
    """The records of `prefix` in a store. Unreadable bytes are CorruptObject, a newer format is a StoreError."""

    def __init__(self, store: Store, prefix: str) -> None:
        self.store = store
        self.prefix = prefix

    def key(self, name: str) -> str:
        return f"{self.prefix}/{name}"

    def name_of(self, key: str) -> str:
        return key.removeprefix(f"{self.prefix}/")

    def read(self, kind: type[R], name: str) -> R:
        """Raises ObjectNotFound when there is none."""
        return self.parse(kind, name, self.store.get(self.key(name)).data)

    def parse(self, kind: type[R], name: str, data: bytes) -> R:
        try:
            record = kind.model_validate(self.parse_dict(name, data))
        except ValidationError as e:
            raise self.corrupt(name, str(e).replace("\n", " ")) from e
        if record.format > FORMAT:
            raise StoreError(f"{self.where(name)} was written by a newer art-sky; upgrade this one")
        return record

    def parse_dict(self, name: str, data: bytes) -> dict[str, Any]:
        try:
            value = json.loads(data)
        except (ValueError, RecursionError) as e:
            raise self.corrupt(name, str(e)) from e
        if not isinstance(value, dict):
            raise self.corrupt(name, "not an object")
        return value

    def names(self, begin: str) -> list[str]:
        """The names below `prefix` that start with `begin`, sorted."""
        return sorted(info.key.removeprefix(self.prefix + "/") for info in self.store.list(self.key(begin)))

    def create_record(self, name: str, record: Record) -> None:
        """Raises PreconditionFailed when another record has the name; our own bytes there are success."""
        data = to_json(record)
        try:
            self.store.create(self.key(name), data)
        except StoreError as e:
            # The reply may have been lost after the bytes were stored: only reading back can tell.
            if not self.holds(name, data, e):
                raise

    def holds(self, name: str, data: bytes, error: ArtSkyError) -> bool:
        """Whether `data` is what is stored. An unreadable store raises `error`, which asked for the check."""
        try:
            return self.store.get(self.key(name)).data == data
        except ObjectNotFound:
            return False
        except StoreError:
            raise error from None

    def update(self, name: str, change: Callable[[dict[str, Any] | None], dict[str, Any]]) -> dict[str, Any]:
        """Stores `change(what is there, or None)` by compare-and-swap, again until nobody came between.

        `change` must give the same when it is applied to its own result: after a lost reply it may be.
        """
        for attempt in range(UPDATE_TRIES):
            old = etag = None
            try:
                found = self.store.get(self.key(name))
                old, etag = self.parse_dict(name, found.data), found.etag
            except ObjectNotFound:
                pass
            new = change(old)
            data = to_json(new)
            if old is not None and data == to_json(old):
                return new
            try:
                if etag is None:
                    self.store.create(self.key(name), data)
                else:
                    self.store.swap(self.key(name), data, etag)
                return new
            except (PreconditionFailed, ObjectNotFound):
                time.sleep(random.uniform(0, min(0.001 * 2**attempt, 0.1)))
        raise StoreError(f"{self.where(name)} is written by too many at once; try again")

    def where(self, name: str) -> str:
        return f"{self.key(name)!r} in {self.store.url}"

    def corrupt(self, name: str, why: str) -> CorruptObject:
        message = f"{self.where(name)} cannot be read: {why[:300]}; see `art-sky verify`"
        return CorruptObject(message, key=self.key(name))
