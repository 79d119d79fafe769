"""The ``trueup`` command: parse, call, render. ``main`` is the only place where an error becomes an exit code."""

from __future__ import annotations

import os
import sys
from typing import Annotated, NoReturn

import typer

from trueup import __version__
from trueup.cli.demo import demo_command
from trueup.cli.diagnose import EPILOG, diagnose_command
from trueup.errors import TrueupError

INTERRUPTED = 130  # 128 + SIGINT, what a shell reports for a program that Ctrl-C ended

app = typer.Typer(
    name="trueup",
    no_args_is_help=True,
    add_completion=False,
    # Markup is for our own help texts; file names and messages are never read as markup.
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Example: [bold]trueup diagnose rollouts.parquet --html report.html[/]",
)
app.command("diagnose", epilog=EPILOG)(diagnose_command)
app.command("demo", epilog="Example: [bold]trueup demo --offline --out trueup-demo[/]")(demo_command)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"trueup {__version__}")
        raise typer.Exit()


@app.callback()
def trueup(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    """Measure where a model's use departs from its training, and say why."""


def main() -> NoReturn:
    """Run the command line and leave with its exit code.

    0 done; 1 done, and a gap is beyond the threshold that the user set; 2 bad input, with one sentence on stderr;
    130 interrupted.
    """
    try:
        app()
    except TrueupError as error:
        print(f"trueup: {error}", file=sys.stderr)
        sys.exit(2)
    except BrokenPipeError:
        # The reader of a pipe left (`| head`). Nothing more can be said to it; keep Python from trying at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(INTERRUPTED)
    except OSError as error:
        # What the readers and writers do not foresee: a full disk, a folder that vanished.
        where = f"{error.filename}: " if error.filename else ""
        print(f"trueup: {where}{error.strerror or error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        _say_interrupted()
        sys.exit(INTERRUPTED)
    except SystemExit as leaving:
        # typer catches Ctrl-C itself and leaves without a word.
        if leaving.code == INTERRUPTED:
            _say_interrupted()
        raise
    sys.exit(0)


def _say_interrupted() -> None:
    print("trueup: interrupted", file=sys.stderr)
