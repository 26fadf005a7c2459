"""A Hugging Face decoder with a LoRA adapter of PEFT, arranged for training on few, known positions.

Numbers (DESIGN §8): the base runs in its own dtype, the adapter in float32 on an upcast input, and its delta is
added before the sum is cast back, as PEFT computes it. The output layer runs in float32, and only where a token is
trained.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import peft
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F

from art_sky.config import LoRAConfig
from art_sky.errors import CorruptObject, InvalidConfig, InvalidInput

Dtype = Literal["bfloat16", "float32"]
# Positions whose logits exist at a time: 256 x 49,152 tokens x 4 bytes are 48 MiB.
_HEAD_CHUNK = 256


class Policy:
    """The frozen base model, loaded once, and one trainable adapter at a time.

    Raises InvalidInput when the folder is not a causal language model whose logits are those of a plain linear
    output layer.
    """

    def __init__(self, base_model: Path, dtype: Dtype) -> None:
        try:
            model = transformers.AutoModelForCausalLM.from_pretrained(
                base_model, dtype=getattr(torch, dtype), attn_implementation="sdpa", local_files_only=True
            )
        except (OSError, ValueError) as e:
            raise InvalidInput(
                f"{base_model} cannot be loaded as a causal language model: {e}; give the folder of one in Hugging "
                f"Face format"
            ) from e
        self._causal: Any = model.eval().requires_grad_(False)
        self._peft: Any = None
        self._config: dict[str, Any] | None = None
        self._output: nn.Module = model.get_output_embeddings()
        self._head: Tensor = model.get_output_embeddings().weight.float()  # the one float32 copy
        self.vocab_size: int = self._head.shape[0]
        self.context_length: int = model.config.max_position_embeddings
        # One mask serves all layers, so it can stand for plain attention only, not for a sliding window.
        kinds = set(getattr(model.config, "layer_types", None) or ())
        self.can_share = not getattr(model.config, "sliding_window", None) and kinds <= {"full_attention"}
        self._check_head(dtype)

    def new_adapter(self, lora: LoRAConfig, base_name: str) -> dict[str, Any]:
        """Installs an untrained adapter (A drawn from `lora.seed`, B zero) and returns its PEFT config as JSON.

        Raises InvalidConfig when the targets match nothing, or something that is no linear layer.
        """
        config = self._install(
            peft.LoraConfig(
                r=lora.rank,
                lora_alpha=lora.alpha,
                target_modules=lora.target_modules,
                lora_dropout=0.0,
                task_type="CAUSAL_LM",
            )
        )
        # A generator of our own: the same adapter whatever the base's dtype, and no global state touched.
        generator = torch.Generator().manual_seed(lora.seed)
        for name, weight in self.adapter().items():
            if ".lora_A." in name:
                nn.init.kaiming_uniform_(weight, a=math.sqrt(5), generator=generator)
            else:
                nn.init.zeros_(weight)
        return config | {"base_model_name_or_path": base_name}

    def load_adapter(self, config: Mapping[str, Any], weights: Mapping[str, Tensor]) -> None:
        """Installs an adapter from its PEFT config and its float32 weights, under PEFT's names.

        Raises CorruptObject when the two, or the base model, do not belong together.
        """
        config = dict(config) | {"base_model_name_or_path": None}
        if config != self._config:
            self._install(peft.LoraConfig.from_peft_type(**config))
        adapter = self.adapter()
        if {k: v.shape for k, v in adapter.items()} != {k: v.shape for k, v in weights.items()}:
            raise CorruptObject(
                "the adapter's weights do not fit its config and the base model; train from the model that it was "
                "registered with"
            )
        with torch.no_grad():
            for name, parameter in adapter.items():
                parameter.copy_(weights[name])

    def adapter(self) -> dict[str, nn.Parameter]:
        """The trainable float32 parameters by the names under which PEFT saves them, in a fixed order."""
        assert self._peft is not None, "no adapter is installed"
        return {
            name.replace(".default.", "."): p for name, p in sorted(self._peft.named_parameters()) if p.requires_grad
        }

    @contextlib.contextmanager
    def base_only(self) -> Iterator[None]:
        """Within the block the model is the base model, without the adapter."""
        assert self._peft is not None, "no adapter is installed"
        with self._peft.disable_adapter():
            yield

    def logprobs(
        self,
        ids: Tensor,
        rows: Tensor,
        sources: Tensor,
        targets: Tensor,
        temperature: Tensor,
        positions: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """([N] logprobs, [N] entropies, in nats) of the tokens `targets` [N], each predicted at (rows, sources).

        `ids` is [B, L], padded on the right with anything: without `mask` attention is causal, so padding is never
        seen. `mask` [B, L, L] says which position (second) each position (first) sees, and needs `positions` [B, L].
        `temperature` [N] divides the logits. Entropies carry no gradient.
        """
        hidden = self._causal.base_model(
            input_ids=ids,
            position_ids=positions,
            attention_mask=None if mask is None else mask[:, None],
            use_cache=False,
        ).last_hidden_state
        return _selected(hidden[rows, sources], self._head, targets, temperature)

    def _install(self, config: peft.LoraConfig) -> dict[str, Any]:
        if self._peft is not None:
            self._causal = self._peft.unload()
            self._peft, self._config = None, None
        given, config.inference_mode = config.target_modules, False
        try:
            self._peft = peft.get_peft_model(self._causal, config)
        except ValueError as e:
            raise InvalidConfig(f"lora.target_modules {given!r}: {e}; name linear layers of this model") from e
        layers = [m for m in self._peft.modules() if isinstance(m, peft.tuners.lora.LoraLayer)]
        if not all(type(m) is peft.tuners.lora.Linear for m in layers) or any(
            m.get_base_layer() is self._output for m in layers
        ):
            self._causal = self._peft.unload()
            self._peft = None
            raise InvalidConfig(
                f"lora.target_modules {given!r} name an embedding or the output layer; name linear layers inside the "
                f"model, or 'all-linear'"
            )
        for layer in layers:
            layer.forward = _LoRAForward(layer)
        self._config = _as_json(self._peft.peft_config["default"])
        return self._config

    @torch.no_grad()
    def _check_head(self, dtype: Dtype) -> None:
        """Some architectures scale or cap their logits. Trained as plain ones they would go wrong in silence."""
        ids = torch.arange(1, 10)[None] % self.vocab_size
        logits = self._causal(input_ids=ids, use_cache=False).logits[0, :-1].float()
        theirs = logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        sources = torch.arange(ids.shape[1] - 1)
        ours, _ = self.logprobs(ids, torch.zeros_like(sources), sources, ids[0, 1:], torch.ones(len(sources)))
        difference = (ours - theirs).abs().mean().item()
        if not difference < (1e-3 if dtype == "float32" else 0.2):
            raise InvalidInput(
                f"{type(self._causal).__name__} does more to its logits than one linear layer (mean difference "
                f"{difference:.3g}), which this release cannot train; use a Llama, Qwen2, Qwen3 or Mistral model"
            )


class _LoRAForward:
    """What PEFT's lora.Linear computes, but as one autograd step that keeps the input in the base's dtype."""

    def __init__(self, layer: Any) -> None:
        self._layer = layer
        self._base: nn.Linear = layer.get_base_layer()
        self._a: nn.Parameter = layer.lora_A["default"].weight
        self._b: nn.Parameter = layer.lora_B["default"].weight
        self._scale: float = layer.scaling["default"]

    def __call__(self, x: Tensor) -> Tensor:
        if self._layer.disable_adapters:
            return F.linear(x, self._base.weight, self._base.bias)
        arguments = (x, self._base.weight, self._base.bias, self._a, self._b, self._scale)
        out: Tensor = _LoRALinear.apply(*arguments)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        return out


class _LoRALinear(torch.autograd.Function):
    """cast(base(x) + scale * B A float(x)); the base weight is frozen.

    PEFT's own autograd graph keeps a float32 copy of the input for every layer: three quarters of the memory of a
    step on a small bfloat16 model.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scale: float) -> Tensor:
        low = F.linear(x.float(), a)
        out = F.linear(x, weight, bias)
        if out.dtype == torch.float32:
            out += F.linear(low, b) * scale
        else:
            out = out.float().add_(F.linear(low, b), alpha=scale).to(x.dtype)
        ctx.save_for_backward(x, weight, a, b, low)
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None, None, Tensor, Tensor, None]:
        (grad,) = grads
        x, weight, a, b, low = ctx.saved_tensors
        g = grad.float().flatten(0, -2) * ctx.scale
        g_low = g @ b
        grad_b = g.t() @ low.flatten(0, -2)
        grad_a = g_low.t() @ x.float().flatten(0, -2)
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = ((grad.flatten(0, -2) @ weight).float() + g_low @ a).to(x.dtype).view_as(x)
        return grad_x, None, None, grad_a, grad_b, None


class _Selected(torch.autograd.Function):
    """Logprob and entropy of one token a position, with logits in memory for one chunk of positions only.

    Each logprob depends on one hidden vector, so its derivative, (W[target] - p W) / temperature, is made while the
    probabilities are there, and the backward pass is one product a position.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, head: Tensor, targets: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor]:
        n = len(targets)
        logprobs, entropies = torch.empty(n), torch.empty(n)
        needed = ctx.needs_input_grad[0]
        slopes = torch.empty(n, head.shape[1]) if needed else None
        for start in range(0, n, _HEAD_CHUNK):
            at = slice(start, start + _HEAD_CHUNK)
            t, target = temperature[at, None], targets[at]
            logits = (hidden[at].float() @ head.t()).div_(t)
            normaliser = logits.logsumexp(-1, keepdim=True)
            logprobs[at] = (logits.gather(1, target[:, None]) - normaliser)[:, 0]
            probabilities = (logits - normaliser).exp_()
            entropies[at] = normaliser[:, 0] - torch.linalg.vecdot(probabilities, logits)
            if slopes is not None:
                slopes[at] = (head[target] - probabilities @ head).div_(t)
        if slopes is not None:
            ctx.save_for_backward(slopes)
        ctx.dtype = hidden.dtype
        ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (slopes,) = ctx.saved_tensors
        return (grads[0][:, None] * slopes).to(ctx.dtype), None, None, None


def _selected(hidden: Tensor, head: Tensor, targets: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor]:
    arguments = (hidden, head, targets, temperature)
    result: tuple[Tensor, Tensor] = _Selected.apply(*arguments)  # type: ignore[no-untyped-call]  # as above
    return result


def _as_json(config: peft.LoraConfig) -> dict[str, Any]:
    """PEFT's config with its sets sorted, so that the same adapter has the same bytes in every process."""
    plain = {k: sorted(v) if isinstance(v, set) else v for k, v in config.to_dict().items()}
    return {k: getattr(v, "value", v) for k, v in plain.items()} | {
        "inference_mode": True,
        "base_model_name_or_path": None,
    }
