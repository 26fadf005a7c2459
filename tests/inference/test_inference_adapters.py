"""Adapters from files: what is taken, and what is refused by name."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from inference_engines import MakeScheduler, Reference, make_adapter, prompt, run
from safetensors.torch import load_file, save_file

from art_sky.errors import InvalidInput
from art_sky.inference.protocol import GenerateRequest
from art_sky.schemas import AdapterRef


@pytest.mark.parametrize("targets", [["q_proj", "v_proj"], ["k_proj", "up_proj", "down_proj"], "all-linear"])
def test_any_choice_of_layers(
    targets: str | list[str], tiny_model: Path, engine: MakeScheduler, tmp_path: Path
) -> None:
    folder = make_adapter(tiny_model, tmp_path / "some", 4, target_modules=targets)
    all_layers = make_adapter(tiny_model, tmp_path / "all", 5)
    p = prompt(20)
    refs = [AdapterRef(name=f.name, path=str(f)) for f in (folder, all_layers)]
    answers = run(engine(), [GenerateRequest(prompt_ids=p, adapter=r, max_tokens=10) for r in refs])
    for ref, answer in zip(refs, answers, strict=True):
        rows = Reference(tiny_model, Path(ref.path)).logprobs(p + answer.tokens)[len(p) - 1 : -1]
        want = rows.gather(1, torch.tensor(answer.tokens)[:, None])[:, 0]
        assert torch.allclose(want, torch.tensor(answer.logprobs), atol=1e-4)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("no folder", r"adapter_config\.json"),
        ("no weights", r"adapter_model\.safetensors"),
        ("not json", "cannot be read"),
        ("cut short", "cannot be read"),
        ("other shape", r"128 x 128 .*trained on this model"),
        ("other layer", r"layers\.99.*no linear layer"),
        ("nothing", "target_modules"),
        ("half", "lora_A only"),
        ("nan", "NaN"),
        ("dora", "use_dora"),
    ],
)
def test_bad_adapters_are_refused(
    damage: str, message: str, engine: MakeScheduler, adapters: list[AdapterRef], tmp_path: Path
) -> None:
    folder = tmp_path / "adapter"
    shutil.copytree(adapters[0].path, folder)
    config, weights = folder / "adapter_config.json", folder / "adapter_model.safetensors"
    tensors = load_file(weights)
    key = "base_model.model.model.layers.0.self_attn.q_proj.lora_"
    if damage == "no folder":
        shutil.rmtree(folder)
    elif damage == "no weights":
        weights.unlink()
    elif damage == "not json":
        config.write_text("{")
    elif damage == "cut short":
        weights.write_bytes(weights.read_bytes()[:1000])
    elif damage == "dora":
        config.write_text(json.dumps({**json.loads(config.read_text()), "use_dora": True}))
    else:
        if damage == "other shape":
            tensors[key + "B.weight"] = torch.zeros(64, 4)
        elif damage == "other layer":
            tensors[key.replace("layers.0", "layers.99") + "A.weight"] = torch.zeros(4, 128)
        elif damage == "nothing":
            tensors = {}
        elif damage == "half":
            del tensors[key + "B.weight"]
        elif damage == "nan":
            tensors[key + "B.weight"][0, 0] = torch.nan
        save_file(tensors, weights)
    scheduler = engine()
    with pytest.raises(InvalidInput, match=message):
        scheduler.load(AdapterRef(name="p/bad@1", path=str(folder)))
    assert scheduler.adapters.names() == []


def test_an_adapter_read_ahead_needs_its_files_no_more(
    engine: MakeScheduler, adapters: list[AdapterRef], tmp_path: Path
) -> None:
    scheduler = engine(max_adapters=1)
    copies = []
    for ref in adapters[:4]:
        copy = tmp_path / ref.name.rpartition("@")[2]
        shutil.copytree(ref.path, copy)
        copies.append(AdapterRef(name=ref.name, path=str(copy)))
        scheduler.adapters.read_ahead(copies[-1])
    kept = [c.name for c in copies[2:]]
    assert scheduler.adapters.names() == kept  # memory is bounded: the last two
    for copy in copies:
        shutil.rmtree(copy.path)
    p = prompt(20)
    (ahead,) = run(scheduler, [GenerateRequest(prompt_ids=p, adapter=copies[2], max_tokens=5, seed=1)])
    (read,) = run(engine(), [GenerateRequest(prompt_ids=p, adapter=adapters[2], max_tokens=5, seed=1)])
    assert ahead.tokens == read.tokens
    assert scheduler.adapters.names() == kept
    scheduler.adapters.read_ahead(copies[2])  # it is resident
    with pytest.raises(InvalidInput, match=r"adapter_config\.json"):
        scheduler.adapters.read_ahead(copies[0])
