"""`art-sky demo`."""

from __future__ import annotations

import shutil
from typing import Any, NoReturn

import click
from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from rich.text import Text

from art_sky.cli.main import INTERRUPTED
from art_sky.cli.output import duration, json_option, print_json, size, stderr, stdout
from art_sky.demo import DemoOptions, DemoResult, StepRow, run_demo
from art_sky.tracking.charts import Curve, png_chart, terminal_chart

_DEFAULTS = DemoOptions()
_COLUMNS = "{:>4} {:>7} {:>8} {:>9} {:>8} {:>8} {:>7}  {}"  # fits 80 columns


@click.command()
@click.option("--steps", type=click.IntRange(1), default=_DEFAULTS.steps, show_default=True, help="Train up to here.")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Of prompts, LoRA and sampling.")
@click.option("--fresh", is_flag=True, help="Start anew instead of going on from the newest step.")
@click.option("--store", metavar="URL", default=_DEFAULTS.store, show_default=True, help="Where steps are kept.")
@click.option("--learning-rate", type=float, default=_DEFAULTS.learning_rate, show_default=True, help="Of AdamW.")
@click.option(
    "--engine", type=click.Choice(["cpu", "vllm"]), default=_DEFAULTS.engine, show_default=True, help="What samples."
)
@click.option(
    "--trainer",
    type=click.Choice(["native", "trl", "unsloth"]),
    default=_DEFAULTS.trainer,
    show_default=True,
    help="What trains.",
)
@click.option("--allow-untested", is_flag=True, help="Use what docs/capabilities.md lists as untested.")
@json_option
def command(as_json: bool, **given: Any) -> None:
    """Train a small chat model on this machine and watch its reward rise.

    SmolLM2-135M (fetched once, 90 MB) learns to answer "maybe", in a few minutes on two CPU cores and without a
    GPU. Interrupted and started again, it goes on from its newest step.
    """
    options = DemoOptions(**given)
    report = _Report(stderr() if as_json else stdout())
    try:
        with report:
            result = run_demo(options, report)
    except KeyboardInterrupt:
        _interrupted(report)
    if as_json:
        return print_json(result.to_json())
    _summary(stdout(), options, result)


class _Bytes(ProgressColumn):
    """How much of how much, and how fast, where bytes are what is counted."""

    def render(self, task: Task) -> Text:
        if not task.fields["in_bytes"]:
            return Text("")
        of = "" if task.total is None else f" of {size(int(task.total))}"
        return Text(f"{size(int(task.completed))}{of}, {size(int(task.speed or 0))}/s")


class _Report:
    """A line of progress at the bottom, and above it the table of steps as it grows."""

    def __init__(self, console: Console) -> None:
        self.last_step = 0
        self._console = console
        self._header_shown = False
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            _Bytes(),
            TimeElapsedColumn(),
            console=console,
            transient=True,
        )
        self._task: TaskID | None = None
        self._phase = ""

    def __enter__(self) -> _Report:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def phase(self, text: str, done: int = 0, total: int | None = None, in_bytes: bool = False) -> None:
        if self._task is None:
            self._task = self._progress.add_task(text, total=total, in_bytes=False)
        if text != self._phase and not self._console.is_terminal:
            self._console.print(f"{text} ...", markup=False)
        self._phase = text
        self._progress.update(
            self._task, description=text.replace("[", "\\["), completed=done, total=total, in_bytes=in_bytes
        )

    def note(self, text: str) -> None:
        self._console.print(text, markup=False)

    def validation(self, step: int, reward: float) -> None:
        self._console.print(f"validation at step {step}: mean reward {reward:.3f}", markup=False)

    def step(self, row: StepRow) -> None:
        if not self._header_shown:
            self._header_shown = True
            names = ("step", "reward", "loss", "grad norm", "sampled", "trained", "time", "")
            self._console.print(_COLUMNS.format(*names), style="bold")
        self.last_step = row.step
        cells = (
            row.step,
            _number(row.reward, ".3f"),
            _number(row.loss, ".4f"),
            _number(row.grad_norm, ".3f"),
            _number(row.tokens_sampled, "d"),
            _number(row.tokens_trained, "d"),
            duration(row.seconds),
            "skipped (no spread)" if row.skipped else "",
        )
        self._console.print(_COLUMNS.format(*cells).rstrip(), markup=False)


def _summary(console: Console, options: DemoOptions, result: DemoResult) -> None:
    before, after = result.validation["before"], result.validation["after"]
    curve = Curve(
        line=[(row.step, row.reward) for row in result.steps if row.reward is not None],
        marks=[(0, before), (int(result.head["step"]), after)],
        gaps=[row.step for row in result.steps if row.skipped],
        title=f"Mean reward, {result.base_model}, seed {options.seed}",
        y_range=(0, 1),
    )
    console.print()
    console.print(terminal_chart(curve, min(100, shutil.get_terminal_size().columns)), markup=False)
    png = png_chart(curve, options.folder / f"{options.name}.png")
    console.print()
    console.print(
        f"Validation, {result.validation['samples']} samples of phrasings never trained on: "
        f"{before:.3f} before, {after:.3f} after",
        style="bold",
    )
    console.print(f"{len(result.steps)} steps; this run took {duration(result.seconds)}")
    console.print(f"curve     {png}", markup=False, soft_wrap=True)
    console.print(f"state     {options.store}", markup=False, soft_wrap=True)
    console.print(f"Next:  art-sky steps {options.name} --store {options.store}", markup=False, soft_wrap=True)


def _interrupted(report: _Report) -> NoReturn:
    at = f"step {report.last_step} is committed; " if report.last_step else ""
    click.echo(f"interrupted; {at}the same command without --fresh goes on from there", err=True)
    raise SystemExit(INTERRUPTED)


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
