"""A Hugging Face decoder, loaded for ragged batches.

Any causal language model works whose attention goes through transformers' attention interface and whose only
state is keys and values. That is tested when a model is loaded: its logits must be those of the untouched model.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AutoModelForCausalLM

from art_sky.errors import InvalidConfig, Unsupported
from art_sky.inference import attention
from art_sky.inference.attention import Plan, plan_chunk, plan_rows
from art_sky.inference.kv_cache import KVCache, KVShape
from art_sky.inference.lora import group_linears

DEFAULT_CONTEXT = 8192


class Model:
    def __init__(self, path: Path, dtype: torch.dtype, context_length: int | None) -> None:
        """Loads and checks. Raises InvalidConfig for a folder or length that cannot be, Unsupported for a model
        that this engine does not compute rightly.
        """
        try:
            model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="sdpa").eval()
        except (OSError, ValueError, KeyError) as e:
            raise InvalidConfig(f"{path} cannot be loaded as a language model: {e}; check the base model") from e
        config = model.config.get_text_config()
        longest = int(config.max_position_embeddings)
        if context_length is not None and context_length > longest:
            raise InvalidConfig(
                f"context_length {context_length} is more than the {longest} tokens of {path}; give at most {longest}"
            )
        rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
        if rope in ("dynamic", "longrope"):
            raise Unsupported(
                f"{path} has {rope} rotary positions, which depend on the longest sequence of a batch; "
                "the CPU engine does not do that: use another engine"
            )
        self.context_length = context_length or min(longest, DEFAULT_CONTEXT)
        self.vocabulary = int(config.vocab_size)
        self.dtype = dtype
        decoder = model.get_decoder()
        self._decoder = decoder
        self.decoder_prefix = next(name + "." for name, m in model.named_modules() if m is decoder)
        heads = int(config.num_attention_heads)
        kv_heads = int(getattr(config, "num_key_value_heads", None) or heads)
        head_dim = int(getattr(config, "head_dim", None) or config.hidden_size // heads)
        self.group = heads // kv_heads
        self.kv_shape = KVShape(int(config.num_hidden_layers), kv_heads, head_dim, dtype)
        with torch.inference_mode():
            probes = [
                [(7919 * i + 1) % self.vocabulary for i in range(start, start + n)] for start, n in ((0, 9), (3, 5))
            ]
            expected = [model(torch.tensor([p]), use_cache=False).logits[0, -1].float() for p in probes]
            self.groups, self.active = group_linears(
                decoder, lambda: decoder(input_ids=torch.tensor([probes[0]]), use_cache=False)
            )
            self._head = _OutputHead(model.get_output_embeddings())
            config._attn_implementation = attention.NAME
            self._check(path, probes, expected)

    def forward(
        self, tokens: Sequence[int], positions: Sequence[int], wanted: Sequence[int], plan: Plan
    ) -> torch.Tensor:
        """Logits [len(wanted), vocabulary] in float32 of the batch rows `wanted`."""
        with torch.inference_mode():
            hidden = self._decoder(
                input_ids=torch.tensor([tokens]), position_ids=torch.tensor([positions]), use_cache=False, plan=plan
            ).last_hidden_state
            return self._head(hidden[0, torch.tensor(wanted, dtype=torch.long)])

    def _check(self, path: Path, probes: list[list[int]], expected: list[torch.Tensor]) -> None:
        """Two prompts of unequal length in one batch, then their last tokens in another."""
        cache = KVCache(self.kv_shape, 1 << 30, 128)
        slots = [cache.allocate(len(p)) for p in probes]
        plan, rows = Plan(self.context_length), Plan(self.context_length)
        tokens: list[int] = []
        positions: list[int] = []
        for prompt, slot in zip(probes, slots, strict=True):
            assert slot is not None
            n = len(prompt) - 1
            plan.chunks.append(plan_chunk(slot, len(tokens), 0, n, self.group))
            tokens += prompt[:n]
            positions += range(n)
        self.forward(tokens, positions, [], plan)
        assert slots[0] is not None
        ends = [len(p) - 1 for p in probes]
        rows.rows.append(plan_rows(slots[0].slab, 0, [0, 1], ends))
        got = self.forward([p[-1] for p in probes], ends, [0, 1], rows)
        limit = 1e-3 if self.dtype == torch.float32 else 0.25
        for ours, theirs in zip(got, torch.stack(expected), strict=True):
            off = (ours.log_softmax(-1) - theirs.log_softmax(-1)).abs().mean().item()
            if not off < limit:
                raise Unsupported(
                    f"the CPU engine does not compute {path} rightly (logprobs differ by {off:.3g} on a test "
                    "prompt): its architecture has parts that this engine does not know; use another engine"
                )


class _OutputHead:
    """Logits in float32 from weights of any dtype.

    Rounding logits to bfloat16 moves logprobs by several hundredths. So the weights are held a second time in
    float32; but as products of bfloat16 numbers are exact in float32, oneDNN may take its bfloat16 instructions,
    which give the same result to 1e-6 in a third of the time.
    """

    def __init__(self, layer: nn.Linear) -> None:
        self._weight = layer.weight.detach().float()
        self._bias = None if layer.bias is None else layer.bias.detach().float()
        self._exact_in_bfloat16 = layer.weight.dtype == torch.bfloat16

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        with _bfloat16_products() if self._exact_in_bfloat16 else contextlib.nullcontext():
            return F.linear(hidden.float(), self._weight, self._bias)


@contextlib.contextmanager
def _bfloat16_products() -> Iterator[None]:
    before = torch.backends.mkldnn.matmul.fp32_precision  # type: ignore[attr-defined]  # torch's stubs lack it
    torch.backends.mkldnn.matmul.fp32_precision = "bf16"  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.backends.mkldnn.matmul.fp32_precision = before  # type: ignore[attr-defined]
