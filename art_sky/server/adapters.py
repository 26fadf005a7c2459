"""Adapters unpacked from the store into folders, for the engine to load."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator
from pathlib import Path

from art_sky.schemas import AdapterRef, Manifest
from art_sky.store.model_store import ModelStore

WEIGHTS = "adapter/adapter_model.safetensors"


class AdapterFolders:
    """At most `keep` folders that no request uses; the least recently used go first.

    Steps with the same weights (skipped ones) are the same adapter, under the name of the step seen first, so that
    the engine keeps what it has cached for it.
    """

    def __init__(self, folder: Path, keep: int = 16) -> None:
        self._folder, self._keep = folder, keep
        self._refs: OrderedDict[tuple[str, str], AdapterRef] = OrderedDict()
        self._users: Counter[tuple[str, str]] = Counter()
        self._locks: dict[tuple[str, str], asyncio.Lock] = {}

    @contextlib.asynccontextmanager
    async def use(self, store: ModelStore, manifest: Manifest) -> AsyncIterator[AdapterRef]:
        """The adapter of a step; its files stay until the context ends. Raises NotFound for deleted steps."""
        key = (store.prefix, manifest.files[WEIGHTS].sha256)
        self._users[key] += 1
        try:
            async with self._locks.setdefault(key, asyncio.Lock()):
                ref = self._refs.get(key)
                if ref is None or not await asyncio.to_thread(Path(ref.path).is_dir):
                    place = self._folder / store.prefix / key[1][:32]
                    await asyncio.to_thread(store.fetch_files, manifest, place, "adapter/")
                    name = ref.name if ref else f"{store.prefix}@{manifest.step}"
                    ref = self._refs[key] = AdapterRef(name=name, path=str(place / "adapter"))
            self._refs.move_to_end(key)
            yield ref
        finally:
            self._users[key] -= 1
            await self._shrink()

    async def _shrink(self) -> None:
        idle = [key for key in self._refs if not self._users[key]]
        for key in idle[: max(len(idle) - self._keep, 0)]:
            ref = self._refs.pop(key)
            del self._users[key], self._locks[key]
            await asyncio.to_thread(shutil.rmtree, Path(ref.path).parent, ignore_errors=True)
