"""The command `art-sky`. Help and version come from this file alone: a command's module is imported when it runs."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Sequence
from types import FrameType
from typing import NoReturn

import click

from art_sky import __version__
from art_sky.errors import ArtSkyError

# name -> (module that defines `command`, first line of its help)
COMMANDS = {
    "demo": ("art_sky.cli.demo", "Train a small chat model on this machine and watch its reward rise."),
    "launch": ("art_sky.cli.launch", "Start a server that outlives this command."),
    "status": ("art_sky.cli.status", "Show clusters, their models and jobs."),
    "logs": ("art_sky.cli.logs", "Show the log of a cluster's server."),
    "ssh": ("art_sky.cli.ssh", "Open a shell on a rented machine."),
    "extend": ("art_sky.cli.extend", "Let a rented cluster go on for longer."),
    "models": ("art_sky.cli.models", "List the models of a store."),
    "steps": ("art_sky.cli.steps", "Show the steps of a model: reward, loss, tokens, seconds."),
    "diff": ("art_sky.cli.diff", "Compare the settings and metrics of two steps."),
    "replay": ("art_sky.cli.replay", "List train requests that failed, or train the batch of one again."),
    "tag": ("art_sky.cli.tag", "Give a step a name; its files are then kept."),
    "export": ("art_sky.cli.export", "Write a step's adapter as a plain PEFT folder."),
    "push": ("art_sky.cli.push", "Copy a model to another store."),
    "pull": ("art_sky.cli.pull", "Copy a model from another store, or its trajectories into parquet files."),
    "fork": ("art_sky.cli.fork", "Begin a new model with a step of another one."),
    "verify": ("art_sky.cli.verify", "Read again and hash everything a model needs."),
    "repair": ("art_sky.cli.repair", "Mend what `art-sky verify` finds; with --apply, write it."),
    "gc": ("art_sky.cli.gc", "Find what no step needs; with --delete, delete it."),
    "check": ("art_sky.cli.check", "Try out what a store can do."),
    "down": ("art_sky.cli.down", "End clusters."),
    "serve": ("art_sky.cli.serve", "Run a server in the foreground."),
}
INTERRUPTED = 130


class LazyGroup(click.Group):
    """A group whose commands are known by name and help, and imported only when one is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        from importlib import import_module

        command = import_module(COMMANDS[cmd_name][0]).command
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            from art_sky.suggest import did_you_mean

            raise click.UsageError(f"no command {args[0]!r}; {did_you_mean(args[0], COMMANDS)}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, help_line) for name, (_, help_line) in COMMANDS.items()])


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, "--version", message="art-sky %(version)s")
def cli() -> None:
    """Train LLM agents by reinforcement learning while the agent's code stays on this machine.

    Begin with `art-sky demo`, or with `art-sky launch` and your own agent. Read commands take --json.
    """


def main(args: Sequence[str] | None = None) -> NoReturn:
    """Runs the command line and exits: 0 done, 1 an error told in one line, 2 wrong usage, 130 interrupted."""
    # The end of a terminal or a `kill` is answered like Ctrl-C: what was started is cleaned up.
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, _exit_on_signal)
    code = _run(args)
    gc.freeze()  # Python would search all that was loaded for garbage before it ends: 50 ms after a bucket was used
    sys.exit(code)


def _run(args: Sequence[str] | None) -> int:
    try:
        code = cli.main(args, prog_name="art-sky", standalone_mode=False)
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except click.ClickException as e:
        e.show()
        return e.exit_code
    except (click.Abort, KeyboardInterrupt):
        click.echo("interrupted", err=True)
        return INTERRUPTED
    except ArtSkyError as e:
        return _fail(e.message)
    except BrokenPipeError:
        # The reader of our output is gone, as in `art-sky logs | head`; that is no error of ours.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as e:
        return _fail(f"{e}; mend that and call again")
    except ModuleNotFoundError as e:
        return _fail(f"{e}; install what a local server needs: pip install 'art-sky[local]'")


def _fail(message: str) -> int:
    click.echo(f"error: {' '.join(message.split())}", err=True)
    return 1


def _exit_on_signal(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)


if __name__ == "__main__":
    main()
