"""Sampled logprobs of a real model in bfloat16 against a plain PEFT forward, the LoRA path and lm_head in float32."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from inference_engines import MakeScheduler, make_adapter, run
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from art_sky import base_models
from art_sky.errors import ArtSkyError
from art_sky.inference.protocol import GenerateRequest
from art_sky.schemas import AdapterRef

TOPICS = ["the sea", "a clock", "bread", "winter", "trains", "a garden", "music", "the moon", "paper", "salt"]


@pytest.fixture(scope="module")
def smollm2() -> Path:
    try:
        return base_models.resolve("smollm2-135m")
    except ArtSkyError as e:
        pytest.skip(f"no smollm2-135m: {e}")


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("b_std", [0.0, 0.01])
def test_bfloat16_logprobs_are_near_the_trainers(
    b_std: float, smollm2: Path, engine: MakeScheduler, tmp_path: Path
) -> None:
    folder = make_adapter(smollm2, tmp_path / "adapter", 1, rank=8, b_std=b_std)
    ref = AdapterRef(name="a@1", path=str(folder))
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": f"Write a short text about {topic}."}], add_generation_prompt=True
        )["input_ids"]
        for topic in TOPICS
    ]
    base = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.bfloat16)
    peft = PeftModel.from_pretrained(base, folder, autocast_adapter_dtype=True).eval()
    decoder, head = base.get_decoder(), base.get_output_embeddings().weight.detach().float()
    scheduler = engine(smollm2, dtype="bfloat16", kv_cache_mib=512)
    for temperature in (0.7, 1.0, 1.3):
        requests = [
            GenerateRequest(prompt_ids=p, adapter=ref, max_tokens=100, temperature=temperature, seed=i)
            for i, p in enumerate(prompts)
        ]
        off = []
        for p, answer in zip(prompts, run(scheduler, requests), strict=True):
            with torch.inference_mode():
                assert peft.active_adapters == ["default"]
                hidden = decoder(torch.tensor([p + answer.tokens])).last_hidden_state[0, len(p) - 1 : -1]
                rows = (hidden.float() @ head.T / temperature).log_softmax(-1)
            off.append(rows.gather(1, torch.tensor(answer.tokens)[:, None])[:, 0] - torch.tensor(answer.logprobs))
        d = torch.cat(off)
        assert d.numel() == 1000
        k3 = (d.exp() - 1 - d).mean().item()
        print(f"b_std {b_std} T {temperature}: |d| {d.abs().mean():.4f} mean {d.mean():.4f} k3 {k3:.5f}")
        assert d.abs().mean() < 0.06
        assert abs(d.mean()) < 0.01
        assert k3 < 0.005
