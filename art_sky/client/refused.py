"""Options of ART that are different here: each is refused with what to write instead (rule R6)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from art_sky.errors import InvalidConfig

_SERVER_SIDE = (
    "write lora=LoRAConfig(...) and options=ModelOptions(...) for the model, "
    "and LocalBackend(engine=EngineConfig(...)) for the engine"
)
_INSTEAD = {
    "_internal_config": _SERVER_SIDE,
    "_openai_client_config": _SERVER_SIDE,
    "lora_config": "write lora=LoRAConfig(rank=..., alpha=...)",
    "_config": "write the options as fields of config=TrainConfig(...)",
    "dev_config": "write the options as fields of TrainConfig",
    "allow_training_without_logprobs": (
        "only sampled tokens are trained; put the Choice objects of model.openai_client() into messages_and_choices, "
        "they carry their tokens and logprobs"
    ),
    "ppo": "write loss_fn='ppo'",
    "verbose": "leave it out; progress is shown on a terminal",
    "base_path": "write LocalBackend(path=...)",
    "inference_server_config": _SERVER_SIDE,
}


def refuse_unknown(where: str, given: Mapping[str, Any], known: list[str]) -> None:
    """Raises InvalidConfig for the first of the names `given`; there is none that may pass."""
    for name in given:
        if name in _INSTEAD:
            raise InvalidConfig(f"{where} has no option {name!r}: {_INSTEAD[name]}")
        raise InvalidConfig(f"{where} has no option {name!r}; known: {', '.join(known)}")
