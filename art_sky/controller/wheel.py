"""The wheel that goes to a node: made from the package that runs here, so that both ends are the same bits (R10)."""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import zipfile
from pathlib import Path

import art_sky
from art_sky.errors import CloudError

_TIME = (1980, 1, 1, 0, 0, 0)  # equal contents are an equal file
_SKIPPED = {"__pycache__", "node_modules"}


def make_wheel(folder: Path) -> Path:
    """Writes `art_sky-<version>+<hash of the contents>-py3-none-any.whl` into `folder`, unless it is there.

    Works for a checkout and for an installed package alike. Raises CloudError where the package's own metadata is
    missing.
    """
    package = Path(art_sky.__file__).parent
    files = {f"art_sky/{f.relative_to(package).as_posix()}": f.read_bytes() for f in _files(package)}
    digest = hashlib.sha256()
    for name, data in sorted(files.items()):
        digest.update(f"{name}\0{len(data)}\0".encode() + data)
    version = f"{art_sky.__version__}+{digest.hexdigest()[:12]}"
    wheel = folder / f"art_sky-{version}-py3-none-any.whl"
    if wheel.exists():
        return wheel
    info = f"art_sky-{version}.dist-info"
    files[f"{info}/METADATA"] = _metadata(version)
    files[f"{info}/WHEEL"] = b"Wheel-Version: 1.0\nGenerator: art-sky\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    files[f"{info}/entry_points.txt"] = b"[console_scripts]\nart-sky = art_sky.cli.main:main\n"
    record = "".join(f"{name},sha256={_hash(data)},{len(data)}\n" for name, data in sorted(files.items()))
    files[f"{info}/RECORD"] = f"{record}{info}/RECORD,,\n".encode()
    folder.mkdir(parents=True, exist_ok=True)
    scratch = wheel.with_suffix(".new")
    with zipfile.ZipFile(scratch, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in sorted(files.items()):
            entry = zipfile.ZipInfo(name, _TIME)
            entry.external_attr = 0o644 << 16
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, data)
    scratch.replace(wheel)
    return wheel


def _files(package: Path) -> list[Path]:
    found = (f for f in package.rglob("*") if f.is_file() and f.suffix != ".pyc")
    return sorted(f for f in found if not _SKIPPED & set(f.relative_to(package).parts))


def _metadata(version: str) -> bytes:
    try:
        text = importlib.metadata.distribution("art-sky").read_text("METADATA")
    except importlib.metadata.PackageNotFoundError:
        text = None
    if not text:
        raise CloudError("art-sky runs here without being installed; run `pip install -e .` in its checkout")
    head, blank, body = text.partition("\n\n")
    lines = [f"Version: {version}" if line.startswith("Version: ") else line for line in head.splitlines()]
    return ("\n".join(lines) + blank + body).encode()


def _hash(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
