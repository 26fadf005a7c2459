"""A step's adapter as a plain folder in PEFT's format, for any other tool."""

from __future__ import annotations

import shutil
import uuid
from pathlib import Path

from art_sky.errors import Conflict, NotFound
from art_sky.schemas import Manifest
from art_sky.store.model_store import ModelStore
from art_sky.store.os_errors import reported

ADAPTER = "adapter/"


def export_adapter(model: ModelStore, manifest: Manifest, folder: Path) -> list[Path]:
    """Writes `adapter_config.json`, `adapter_model.safetensors` and whatever else the adapter has into `folder`.

    The folder appears whole, its files verified. Raises Conflict when it exists and is not empty, NotFound for a
    step without an adapter or whose files were deleted, CorruptObject for damaged bytes.
    """
    names = [name for name in manifest.files if name.startswith(ADAPTER)]
    if not names:
        raise NotFound(f"step {manifest.step} of {model.prefix} has no adapter; choose another step")
    with reported("export an adapter", folder):
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise Conflict(f"{folder} exists already; choose another folder, or delete it")
        scratch = folder.absolute().parent / f".{folder.name[:80]}.{uuid.uuid4().hex}"
        try:
            model.fetch_files(manifest, scratch, ADAPTER)
            folder.parent.mkdir(parents=True, exist_ok=True)
            (scratch / ADAPTER).rename(folder)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)  # best effort: what stays is only in the way
    return [folder / name.removeprefix(ADAPTER) for name in sorted(names)]
