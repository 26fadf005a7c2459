"""A Hugging Face decoder with a LoRA adapter of PEFT, arranged for training on few, known positions.

Numbers (DESIGN §8): the base runs in its own dtype, the adapter in float32 on an upcast input, and its delta is
added before the sum is cast back, as PEFT computes it. The output layer runs in float32, and only where a token is
trained.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import peft
import torch
import transformers
from torch import Tensor, nn

from art_sky.config import LoRAConfig
from art_sky.errors import BaseMismatch, InvalidConfig, InvalidInput
from art_sky.training import attention
from art_sky.training.attention import PackedRow
from art_sky.training.device import choose_device
from art_sky.training.lora import FrozenForward, LoRAForward, is_quantised
from art_sky.training.output import predict
from art_sky.training.probe import why_not_packed
from art_sky.training.rows import Segment

log = logging.getLogger(__name__)

Dtype = Literal["bfloat16", "float32"]
Load = Callable[[Path, torch.dtype], Any]


class Policy:
    """The frozen base model, loaded once onto `device` (default: `choose_device`), and one trainable adapter at a time.

    Raises InvalidInput when the folder is not a causal language model whose logits are those of a plain linear
    output layer.
    """

    def __init__(
        self, base_model: Path, dtype: Dtype, load: Load | None = None, device: torch.device | None = None
    ) -> None:
        """`load` takes folder and dtype and returns a model of transformers, on a device of its choice, where another
        library is to make it."""
        self.folder = base_model
        try:
            if load is not None:
                model = load(base_model, getattr(torch, dtype))
            else:
                model = _load(base_model, getattr(torch, dtype), device or choose_device())
        except (OSError, ValueError) as e:
            raise InvalidInput(
                f"{base_model} cannot be loaded as a causal language model: {e}; give the folder of one in Hugging "
                f"Face format"
            ) from e
        # First of all: bitsandbytes' own forward repacks the weights of a model that does not train on some CPUs.
        for layer in model.modules():
            if is_quantised(layer):
                layer.forward = FrozenForward(layer)
        self._causal: Any = model.eval().requires_grad_(False)
        self._peft: Any = None
        self._config: dict[str, Any] | None = None
        self._output: nn.Module = model.get_output_embeddings()
        self._head: Tensor = model.get_output_embeddings().weight.float()  # the one float32 copy
        self.device: torch.device = self._head.device
        self.vocab_size: int = self._head.shape[0]
        self.context_length: int = model.config.max_position_embeddings
        self._check_head(dtype)
        model.set_attn_implementation(attention.NAME)
        # Why sequences cannot share the computation of what they begin with, or None.
        self.not_packed: str | None = why_not_packed(self, model.config)
        if self.not_packed is not None:
            model.set_attn_implementation("sdpa")
            log.warning("%s: %s; sequences run as plain rows", base_model, self.not_packed)

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
        # A generator of our own, on the CPU: the same adapter whatever the base's dtype and device, and no global state
        # touched.
        generator = torch.Generator("cpu").manual_seed(lora.seed)
        for name, weight in self.adapter().items():
            if ".lora_A." in name:
                drawn = torch.empty(weight.shape, device="cpu")
                nn.init.kaiming_uniform_(drawn, a=math.sqrt(5), generator=generator)
                weight.data.copy_(drawn)
            else:
                nn.init.zeros_(weight)
        return config | {"base_model_name_or_path": base_name}

    def load_adapter(self, config: Mapping[str, Any], weights: Mapping[str, Tensor]) -> None:
        """Installs an adapter from its PEFT config and its float32 weights, under PEFT's names.

        Raises BaseMismatch when they were made for another base model.
        """
        made_for = config.get("base_model_name_or_path")
        config = dict(config) | {"base_model_name_or_path": None}
        try:
            if config != self._config:
                self._install(peft.LoraConfig.from_peft_type(**config))
        except InvalidConfig as e:
            raise self._mismatch(made_for, e.message) from e
        adapter = self.adapter()
        for name in sorted(adapter.keys() | weights.keys()):
            here, there = (tuple(w[name].shape) if name in w else "not there" for w in (adapter, weights))
            if here != there:
                raise self._mismatch(made_for, f"{name} is {there} in the adapter and {here} on this base model")
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

    def forward(self, segment: Segment, above: Sequence[PackedRow] = ()) -> tuple[PackedRow, Tensor]:
        """Runs a segment below those it hangs on; [B * L, H] are its last hidden states, in the base's dtype."""
        row = PackedRow(segment, above, self.device)
        options = {}
        if segment.packed:
            # A mask of four dimensions is left as it is by every model, and this attention does not look at it.
            ignored = torch.ones(1, 1, 1, 1, device=self.device)
            options = {"attention_mask": ignored, "packed_row": row, "position_ids": row.positions}
        hidden = self._causal.base_model(input_ids=row.ids, use_cache=False, **options).last_hidden_state
        return row, hidden.flatten(0, 1)

    def hidden(self, ids: Tensor, mask: Tensor, positions: Tensor) -> Tensor:
        """[B, L, H] last hidden states of padded rows [B, L]; `mask` is 1 where a token is none of the padding."""
        arguments = {"input_ids": ids, "attention_mask": mask, "position_ids": positions, "use_cache": False}
        states: Tensor = self._causal.base_model(**arguments).last_hidden_state
        return states

    @contextlib.contextmanager
    def lent(self) -> Iterator[Any]:
        """PEFT's model with the adapter, for a library that changes how it behaves: mended after the block."""
        assert self._peft is not None, "no adapter is installed"
        own = self._causal.__dict__.get("forward")
        # By this mark TRL knows a quantised model, and would make its adapter bfloat16.
        mark = self._causal.__dict__.pop("is_loaded_in_4bit", None)
        try:
            yield self._peft
        finally:
            if mark is not None:
                self._causal.is_loaded_in_4bit = mark
            self._causal.__dict__.pop("forward", None)
            if own is not None:
                self._causal.forward = own
            self._peft.eval()

    def predict(self, hidden: Tensor, targets: Tensor, at: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor]:
        """`output.predict` with this model's output layer."""
        return predict(hidden, self._head, targets, at, temperature)

    def _mismatch(self, made_for: str | None, why: str) -> BaseMismatch:
        name = type(self._causal).__name__
        return BaseMismatch(
            f"the adapter was made for the base model {made_for!r}, and this trainer runs the {name} in {self.folder}: "
            f"{why}; start the server with the base model that it was made for, or register a new model"
        )

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
        linear = [type(m) is peft.tuners.lora.Linear or is_quantised(m.get_base_layer()) for m in layers]
        if not all(linear) or any(m.get_base_layer() is self._output for m in layers):
            self._causal = self._peft.unload()
            self._peft = None
            raise InvalidConfig(
                f"lora.target_modules {given!r} name an embedding or the output layer; name linear layers inside the "
                f"model, or 'all-linear'"
            )
        for layer in layers:
            layer.forward = LoRAForward(layer)
        self._config = _as_json(self._peft.peft_config["default"])
        return self._config

    @torch.no_grad()
    def _check_head(self, dtype: Dtype) -> None:
        """Some architectures scale or cap their logits. Trained as plain ones they would go wrong in silence."""
        ids = torch.arange(1, 10, device=self.device)[None] % self.vocab_size
        out = self._causal(input_ids=ids, use_cache=False)
        theirs = out.logits[0, :-1].float().log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        at = torch.arange(ids.shape[1] - 1, device=self.device)
        hidden = self._causal.base_model(input_ids=ids, use_cache=False).last_hidden_state[0, :-1]
        ours, _ = self.predict(hidden, ids[0, 1:], at, torch.ones(len(at), device=self.device))
        difference = (ours - theirs).abs().mean().item()
        if not difference < (1e-3 if dtype == "float32" else 0.2):
            raise InvalidInput(
                f"{type(self._causal).__name__} does more to its logits than one linear layer (mean difference "
                f"{difference:.3g}), which this release cannot train; use a Llama, Qwen, Gemma 3 or Mistral model"
            )


def _load(folder: Path, dtype: torch.dtype, device: torch.device) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=dtype,
        attn_implementation="sdpa",
        local_files_only=True,
        # So weights go from the files to the device, and are never all in main memory.
        device_map={"": device} if device.type != "cpu" else None,
    )


def _as_json(config: peft.LoraConfig) -> dict[str, Any]:
    """PEFT's config with its sets sorted, so that the same adapter has the same bytes in every process."""
    plain = {k: sorted(v) if isinstance(v, set) else v for k, v in config.to_dict().items()}
    return {k: getattr(v, "value", v) for k, v in plain.items()} | {
        "inference_mode": True,
        "base_model_name_or_path": None,
    }
