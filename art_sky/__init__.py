"""art-sky: train LLM agents by reinforcement learning on rented GPUs while the agent's code stays here.

Names are loaded when they are first used, so that `import art_sky` costs nothing (rule R8).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from art_sky.client.backend import Backend as Backend
    from art_sky.client.connect import connect as connect
    from art_sky.client.datasets import DatasetBatch as DatasetBatch
    from art_sky.client.datasets import iterate_dataset as iterate_dataset
    from art_sky.client.flow import capture_yielded_trajectory as capture_yielded_trajectory
    from art_sky.client.flow import limit_concurrency as limit_concurrency
    from art_sky.client.flow import retry as retry
    from art_sky.client.flow import yield_trajectory as yield_trajectory
    from art_sky.client.frames import load_trajectories as load_trajectories
    from art_sky.client.gather import gather_trajectories as gather_trajectories
    from art_sky.client.gather import gather_trajectory_groups as gather_trajectory_groups
    from art_sky.client.gather import trajectory_group_batches as trajectory_group_batches
    from art_sky.client.http_backend import ServerBackend as ServerBackend
    from art_sky.client.local_backend import LocalBackend as LocalBackend
    from art_sky.client.model import Model as Model
    from art_sky.client.model import TrainableModel as TrainableModel
    from art_sky.client.rollout import Rollout as Rollout
    from art_sky.client.sft import iterate_file as iterate_file
    from art_sky.client.sft import train_sft_from_file as train_sft_from_file
    from art_sky.client.skypilot_backend import SkyPilotBackend as SkyPilotBackend
    from art_sky.config import EngineConfig as EngineConfig
    from art_sky.config import LoRAConfig as LoRAConfig
    from art_sky.config import ModelOptions as ModelOptions
    from art_sky.config import SFTConfig as SFTConfig
    from art_sky.config import TrainConfig as TrainConfig
    from art_sky.config import TrainerConfig as TrainerConfig
    from art_sky.schedules import create_lr_schedule as create_lr_schedule
    from art_sky.schemas import TrainResult as TrainResult
    from art_sky.trajectories import History as History
    from art_sky.trajectories import MessagesAndChoices as MessagesAndChoices
    from art_sky.trajectories import RolloutError as RolloutError
    from art_sky.trajectories import Trajectory as Trajectory
    from art_sky.trajectories import TrajectoryGroup as TrajectoryGroup

__version__ = "0.1.0"

_HOME = {
    "client.backend": ["Backend"],
    "client.connect": ["connect"],
    "client.datasets": ["DatasetBatch", "iterate_dataset"],
    "client.flow": ["capture_yielded_trajectory", "limit_concurrency", "retry", "yield_trajectory"],
    "client.frames": ["load_trajectories"],
    "client.gather": ["gather_trajectories", "gather_trajectory_groups", "trajectory_group_batches"],
    "client.http_backend": ["ServerBackend"],
    "client.local_backend": ["LocalBackend"],
    "client.model": ["Model", "TrainableModel"],
    "client.rollout": ["Rollout"],
    "client.sft": ["iterate_file", "train_sft_from_file"],
    "client.skypilot_backend": ["SkyPilotBackend"],
    "config": ["EngineConfig", "LoRAConfig", "ModelOptions", "SFTConfig", "TrainConfig", "TrainerConfig"],
    "schedules": ["create_lr_schedule"],
    "schemas": ["TrainResult"],
    "trajectories": ["History", "MessagesAndChoices", "RolloutError", "Trajectory", "TrajectoryGroup"],
}
_MODULE_OF = {name: f"art_sky.{module}" for module, names in _HOME.items() for name in names}

# Names of ART that are different here, and what to write instead.
_INSTEAD = {
    "dev": "give the options as fields of TrainConfig, LoRAConfig, ModelOptions and EngineConfig",
    "ServerlessBackend": "use LocalBackend, or art_sky.connect(name) for a launched server",
    "TinkerBackend": "use LocalBackend, or art_sky.connect(name) for a launched server",
    "PydanticException": "failed rollouts are RolloutError",
    "auto_trajectory": "use `async with model.rollout() as r` and call r.base_url",
    "capture_auto_trajectory": "use `async with model.rollout() as r` and call r.base_url",
}

__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> Any:
    if name in _MODULE_OF:
        value = getattr(importlib.import_module(_MODULE_OF[name]), name)
        globals()[name] = value
        return value
    if name in _INSTEAD:
        raise AttributeError(f"art_sky has no {name!r}: {_INSTEAD[name]}")
    from art_sky.suggest import did_you_mean

    raise AttributeError(f"art_sky has no {name!r}; {did_you_mean(name, __all__)}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
