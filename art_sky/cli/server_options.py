"""The options of a server, shared by `launch` and `serve`. Defaults stand in `art_sky.config`, nowhere else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, get_args

import click

from art_sky.config import EngineConfig, ServerConfig, TrainerConfig
from art_sky.store import open_store

Function = TypeVar("Function", bound=Callable[..., Any])
_NUMBERS = ("threads", "max_batch", "kv_cache_mib", "max_adapters", "context_length", "max_lora_rank")
_TRAINER = {"trainer": "kind", "processes": "processes", "optimizer": "optimizer", "quantization": "quantization"}
_ENGINE = ("kind", "dtype", *_NUMBERS, "vllm_python")


def server_options(function: Function) -> Function:
    """Adds the options; the command gets each that was given, and None for the others."""
    engine, trainer = EngineConfig.model_fields, TrainerConfig.model_fields
    for option in reversed(
        [
            click.option("--store", metavar="URL", help=f"Where steps are kept. Default: {_default('store')}."),
            click.option("--port", type=click.IntRange(0, 65535), help="Default: any free port."),
            click.option("--engine", "kind", type=click.Choice(["cpu", "vllm"]), help="What samples. Default: cpu."),
            click.option(
                "--dtype", type=click.Choice(["bfloat16", "float32"]), help="Of the engine. Default: bfloat16."
            ),
            *(
                click.option(
                    f"--{name.replace('_', '-')}", type=int, metavar="N", help=f"Engine: {_help(engine[name])}."
                )
                for name in _NUMBERS
            ),
            click.option(
                "--trainer", type=click.Choice(["native", "trl", "unsloth"]), help="What trains. Default: native."
            ),
            click.option(
                "--processes", type=click.IntRange(1, 64), metavar="N", help=f"Trainer: {_help(trainer['processes'])}."
            ),
            *(
                click.option(
                    f"--{name}",
                    type=click.Choice(list(get_args(trainer[name].annotation))),
                    help=f"Trainer: {_help(trainer[name])}.",
                )
                for name in ("optimizer", "quantization")
            ),
            click.option("--vllm-python", metavar="FILE", help=f"Engine: {_help(engine['vllm_python'])}."),
            click.option(
                "--allow-untested", is_flag=True, default=None, help="Use what docs/capabilities.md lists as untested."
            ),
        ]
    ):
        function = option(function)
    return function


def server_config(given: dict[str, Any], **fixed: Any) -> ServerConfig:
    """From what was given on the command line. Raises InvalidConfig naming the option.

    A relative store is made absolute: the server may run elsewhere than the command.
    """
    values = {k: v for k, v in given.items() if v is not None}
    engine = {k: values.pop(k) for k in _ENGINE if k in values}
    trainer = {name: values.pop(k) for k, name in _TRAINER.items() if k in values}
    parts = {name: part for name, part in (("engine", engine), ("trainer", trainer)) if part}
    made: ServerConfig = ServerConfig.parse({**values, **fixed, **parts})
    return made.model_copy(update={"store": open_store(made.store).url})


def _default(name: str) -> str:
    return str(ServerConfig.model_fields[name].default)


def _help(field: Any) -> str:
    text = str(field.description)
    return text if field.default is None else f"{text} (default {field.default})"
