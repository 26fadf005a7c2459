"""The public API: thin to import, frozen in its signatures, and plain about what is different from ART."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

import art_sky as art
from art_sky.errors import InvalidConfig, InvalidName

HEAVY = ("torch", "transformers", "sky", "botocore", "wandb", "openai", "pydantic", "httpx", "numpy", "rich", "fastapi")

SIGNATURES = {
    "Trajectory.finish": "(self)",
    "Trajectory.for_logging": "(self)",
    "Trajectory.log": "(self, message)",
    "Trajectory.messages": "(self)",
    "Trajectory.track_duration": "(self, name)",
    "TrajectoryGroup": "(trajectories=(), *, metadata=None, exceptions=(), metrics=None, logs=())",
    "gather_trajectories": "(trajectories, *, pbar_desc='gather', pbar_total_completion_tokens=False, "
    "max_exceptions=0, max_exception_rate=None, max_concurrency=None, timeout=None)",
    "gather_trajectory_groups": "(groups, *, pbar_desc='gather', pbar_total_completion_tokens=False, "
    "max_exceptions=0, max_exception_rate=None, max_concurrency=None, timeout=None, after_each=None)",
    "trajectory_group_batches": "(groups, *, batch_size, max_concurrent_batches=4, skip_batches=0, "
    "max_batch_exceptions=0, max_batch_exception_rate=None, max_concurrency=None, timeout=None, pbar_desc='batch', "
    "pbar_total_completion_tokens=False, after_each=None)",
    "iterate_dataset": "(dataset, groups_per_step=1, num_epochs=1, initial_step=0, use_tqdm=True)",
    "limit_concurrency": "(n, derive_key=None)",
    "retry": "(max_attempts=3, delay=0.25, backoff_factor=2.0, exceptions=(Exception,), on_retry=None)",
    "yield_trajectory": "(trajectory)",
    "capture_yielded_trajectory": "(rollout)",
    "Model": "(*, name, project, config=None, inference_model_name=None, inference_base_url=None, "
    "inference_api_key=None, report_to=None, **unknown)",
    "Model.get_inference_name": "(self, step=None)",
    "Model.litellm_completion_params": "(self, step=None)",
    "Model.log": "(self, trajectories=None, split='val', *, metrics=None, step=None)",
    "Model.openai_client": "(self)",
    "Model.register": "(self, backend, **unknown)",
    "Model.read_state": "(self)",
    "Model.merge_state": "(self, values)",
    "Model.overwrite_state": "(self, values)",
    "TrainableModel": "(*, name, project, base_model, run_name=None, config=None, lora=None, options=None, "
    "report_to=None, **unknown)",
    "TrainableModel.train": "(self, groups, config=None, *, request_id=None, **unknown)",
    "TrainableModel.get_step": "(self)",
    "TrainableModel.delete_checkpoints": "(self, best_checkpoint_metric='val/reward')",
    "TrainableModel.rollout": "(self)",
    "ServerBackend": "(base_url, token, *, patience=60.0, cancel_jobs=True)",
    "ServerBackend.train": "(self, model, groups, *, request_id=None, **options)",
    "TrainableModel.train_sft": "(self, trajectories, config=None, *, request_id=None, **unknown)",
    "ServerBackend.train_sft": "(self, model, groups, *, request_id=None, **options)",
    "create_lr_schedule": "(total_steps, peak_lr, method='linear', warmup_steps=0, min_lr=0.0)",
    "iterate_file": "(file_path, epochs=1, shuffle_buffer_size=10000, seed=42, initial_skip=0)",
    "ServerBackend.train_request": "(self, model, groups, config, request_id)",
    "ServerBackend.download_checkpoint": "(self, model, step, folder, *, optimizer=False)",
    "LocalBackend": "(path='.art-sky', *, store=None, engine=None, trainer=None, state_dir=None, start_seconds=60.0, "
    "stop_seconds=15.0, cancel_jobs=True, allow_untested=False)",
    "load_trajectories": "(store, project=None, models=None, split=None, steps=None)",
    "connect": "(url_or_cluster_name, token=None, **options)",
}


def _signature(path: str) -> str:
    found: object = art
    for part in path.split("."):
        found = getattr(found, part)
    if inspect.isclass(found):
        found = found.__init__
    signature = inspect.signature(found)  # type: ignore[arg-type]
    parameters = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
    if inspect.isclass(art.__dict__.get(path)):
        parameters = parameters[1:]
    shown = str(signature.replace(parameters=parameters, return_annotation=signature.empty))
    return shown.replace("<class 'Exception'>", "Exception")


@pytest.mark.parametrize("path", SIGNATURES)
def test_signatures_are_frozen(path: str) -> None:
    assert _signature(path) == SIGNATURES[path]


def test_fields_are_frozen() -> None:
    assert list(art.Trajectory.model_fields) == [
        "messages_and_choices", "tools", "additional_histories", "reward", "metrics", "metadata", "logs",
    ]  # fmt: skip
    assert list(art.TrajectoryGroup.model_fields) == ["trajectories", "exceptions", "metadata", "metrics", "logs"]
    assert list(art.History.model_fields) == ["messages_and_choices", "tools"]
    assert list(art.RolloutError.model_fields) == ["type", "message", "traceback"]


def test_import_is_thin() -> None:
    code = f"""
import sys
import art_sky
loaded = [m for m in {HEAVY!r} if m in sys.modules]
assert not loaded, loaded
art_sky.TrainConfig, art_sky.gather_trajectory_groups, art_sky.TrainableModel, art_sky.LocalBackend, art_sky.connect
art_sky.load_trajectories
heavy = ("torch", "transformers", "sky", "botocore", "wandb", "fastapi", "numpy", "polars")
loaded = [m for m in heavy if m in sys.modules]
assert not loaded, loaded
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_every_name_is_there_and_has_a_type() -> None:
    for name in art.__all__:
        assert getattr(art, name) is not None
    assert set(art.__all__) <= set(dir(art))
    stub = inspect.getsource(art).split("if TYPE_CHECKING:")[1].split("__version__")[0]
    typed = {line.rsplit(" as ", 1)[1] for line in stub.splitlines() if " as " in line}
    assert typed == set(art.__all__)


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("dev", "TrainConfig"),
        ("ServerlessBackend", "LocalBackend"),
        ("auto_trajectory", r"model\.rollout\(\)"),
        ("TrajectoryGruop", "did you mean 'TrajectoryGroup'"),
    ],
)
def test_missing_names_say_what_to_write(name: str, instead: str) -> None:
    with pytest.raises(AttributeError, match=instead):
        getattr(art, name)


@pytest.mark.parametrize(
    ("option", "instead"),
    [
        ("_internal_config", "EngineConfig"),
        ("lora_config", r"lora=LoRAConfig\("),
        ("colour", "known: name, project, base_model"),
    ],
)
def test_refused_options_of_a_model(option: str, instead: str) -> None:
    with pytest.raises(InvalidConfig, match=instead):
        art.TrainableModel(name="a", project="p", base_model="m", **{option: {}})


@pytest.mark.parametrize(
    ("option", "instead"),
    [
        ("_config", "fields of config=TrainConfig"),
        ("verbose", "leave it out"),
        ("allow_training_without_logprobs", "Choice objects of model.openai_client"),
        ("learning_rate", r"config=TrainConfig\(learning_rate="),
    ],
)
async def test_refused_options_of_train(option: str, instead: str) -> None:
    model: art.TrainableModel[None] = art.TrainableModel(name="a", project="p", base_model="m")
    with pytest.raises(InvalidConfig, match=instead):
        await model.train([], **{option: {}})


@pytest.mark.parametrize("name", ["a/b", "..", "", " ", "x" * 300, "é", "con", "-a", None, 3])
def test_bad_names_are_refused_before_anything_is_made(name: str) -> None:
    for fields in ({"name": name, "project": "p"}, {"name": "a", "project": name}):
        with pytest.raises(InvalidName):
            art.TrainableModel(base_model="m", **fields)
    if name is not None:
        with pytest.raises(InvalidName, match="run"):
            art.TrainableModel(name="a", project="p", base_model="m", run_name=name)


def test_settings_are_typed() -> None:
    with pytest.raises(InvalidConfig, match=r"write lora=LoRAConfig\("):
        art.TrainableModel(name="a", project="p", base_model="m", lora={"rank": 8})  # type: ignore[arg-type]
    model = art.TrainableModel(name="a", project="p", base_model="./models/x", config={"k": 1})
    assert model.base_model.startswith("/") and model.config_values == {"k": 1}
    assert art.TrainableModel(name="a", project="p", base_model="org/x").base_model == "org/x"
    bad = art.Model(name="a", project="p", config=3)
    with pytest.raises(InvalidConfig, match="config is int"):
        _ = bad.config_values


def test_models_may_be_written_with_their_config_type() -> None:
    assert art.Model[int] is not None and art.TrainableModel[dict[str, int]] is not None
