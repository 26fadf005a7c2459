"""`art-sky export`."""

from __future__ import annotations

from pathlib import Path

import click

from art_sky.cli.output import json_option, print_json, stderr, stdout
from art_sky.cli.stores import chosen_store, find_model_at, store_options
from art_sky.store.export import export_adapter
from art_sky.store.refs import find_step


@click.command()
@click.argument("model", metavar="MODEL[@STEP]")
@click.argument("folder", type=click.Path(path_type=Path))
@store_options
@json_option
def command(model: str, folder: Path, url: str | None, cluster: str | None, as_json: bool) -> None:
    """Write a step's adapter as a plain PEFT folder.

    FOLDER gets adapter_config.json and adapter_model.safetensors, checked against their hashes; peft, vllm and
    transformers load it.
    """
    found, number = find_model_at(chosen_store(url, cluster), model)
    step = find_step(found, number)
    with stderr().status(f"exporting {found.prefix}@{step.manifest.step}"):
        files = export_adapter(found, step.manifest, folder)
    if as_json:
        return print_json(
            {
                "model": found.prefix,
                "step": step.manifest.step,
                "base_model": found.record().base_model,
                "folder": str(folder.absolute()),
                "files": [file.name for file in files],
            }
        )
    stdout().print(
        f"{found.prefix}@{step.manifest.step} is in {folder}; its base model is {found.record().base_model}",
        markup=False,
        soft_wrap=True,
    )
