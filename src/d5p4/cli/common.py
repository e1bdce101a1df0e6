"""Functions that several commands use: read a prompt, load a model, decode, print and handle errors."""

import json
import os
import re
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text
from typer.core import TyperGroup

import d5p4

from ..distributed import Mesh, RankLost, connect
from ..errors import D5P4Error, DuplicateAnswers
from ..models.base import NativeModel
from ..progress import bar
from ..result import Result, finite
from ..types import Model
from .options import flag

# Matches control characters (except tab and line feed), separators, direction overrides and half surrogate pairs.
UNSEEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


class Commands(TyperGroup):
    """The command group. If the user can correct an error, the message is printed and the exit code is 2. After Ctrl-C,
    the exit code is 130."""

    def invoke(self, ctx: Any) -> Any:
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
            return result
        except typer.Exit:
            raise
        except D5P4Error as error:
            print_error(error)
            raise typer.Exit(2) from None
        except KeyboardInterrupt:
            typer.echo("stopped", err=True)
            raise typer.Exit(130) from None
        except BrokenPipeError:
            _drop_output()
            raise typer.Exit(1) from None
        except OSError as error:
            place = error.filename or "cannot write to standard output"  # a stream has no file name
            if error.filename is None:
                _drop_output()
            typer.echo(f"error: {place}: {error.strerror or error}", err=True)
            raise typer.Exit(2) from None
        except (MemoryError, RuntimeError) as error:
            message = str(error).splitlines()[0] if str(error) else "out of memory"
            if not isinstance(error, MemoryError) and "memory" not in message:
                raise
            typer.echo(f"error: {message}; use a smaller -k, -w or --gen-length", err=True)
            raise typer.Exit(2) from None


def print_error(error: D5P4Error) -> None:
    """Print an error as one line on standard error. It names options as flags, and does not number the prompt."""
    typer.secho("error: ", fg="red", bold=True, err=True, nl=False)
    typer.echo(visible(" ".join(error.phrase(flag, place="").split())), err=True)


def _drop_output() -> None:
    """Discard all later output. Otherwise Python would flush standard output when it exits, and fail a second time."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def read_prompt(prompt: str) -> str:
    """Return the prompt argument, or the text of standard input if the argument is "-"."""
    try:
        text = sys.stdin.read().removesuffix("\n") if prompt == "-" else prompt
        text.encode()  # fails if the text is not valid Unicode
    except UnicodeError as reason:
        raise D5P4Error(f"the prompt is not valid text: {reason}") from None
    return text


def load_model(name: str, device: str | None, dtype: str | None, shown: bool, mapped: bool = False) -> NativeModel:
    console = Console(stderr=True)
    with console.status(f"loading {name}") if shown and console.is_terminal else nullcontext():
        try:
            return d5p4.load(name, device, dtype, mapped=mapped)
        except D5P4Error as error:
            if name != os.environ.get("D5P4_MODEL"):
                raise
            raise D5P4Error(f"{error} (the variable D5P4_MODEL names this model)") from error


def run(model: Model, prompts: Any, label: str, shown: bool, **options: Any) -> tuple[Result, float]:
    """Call `d5p4.generate`, and return its result and the seconds that the call took."""
    count = len(prompts) if prompts is not None else options.get("sets") or 1
    start = time.perf_counter()
    with warnings.catch_warnings(), bar(label, count, shown) as callback:
        warnings.simplefilter("ignore", DuplicateAnswers)  # the commands print a note instead of this warning
        result = d5p4.generate(model, prompts, callback=callback, **options)
    return result, time.perf_counter() - start


def print_json(value: Any) -> None:
    utf8 = (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"
    print(json.dumps(finite(value), ensure_ascii=not utf8, allow_nan=False))


@contextmanager
def joined(mesh: tuple[int, int] | None, timeout: float, device: str | None) -> Iterator[Mesh]:
    """Yield the mesh of a job under torchrun. If the job fails, only rank 0 and the failed rank print the error."""
    ranks = connect(mesh, timeout, device)
    try:
        with ranks:
            yield ranks
    except RankLost as error:
        if ranks.first or not error.reported:
            print_error(error)
        else:
            time.sleep(1)  # torchrun kills all ranks when one exits, so let the failed rank print its error first
        raise typer.Exit(3) from None


def visible(text: str) -> str:
    """Replace invisible characters of a text by escapes, so that the text cannot disturb the terminal."""
    text = text.replace("\r\n", "\n").expandtabs(4)
    return UNSEEN.sub(lambda match: match.group().encode("unicode_escape", "surrogatepass").decode(), text)


def facts_line(*facts: str) -> Text:
    return Text("  " + " · ".join(facts), style="dim")


def plain_table(*columns: str, wide: str = "") -> Table:
    """Return a table without edges. The columns that `wide` names are aligned left, and all other columns right."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold", show_edge=False)
    for name in columns:
        text = name in wide.split(",")
        table.add_column(name, justify="left" if text else "right", overflow="fold", no_wrap=not text)
    return table


def narrow_tables(
    columns: Sequence[str], rows: Sequence[Sequence[str]], console: Console, wide: str = "method"
) -> Iterator[Table]:
    """Yield a table of the rows or, if the terminal is too narrow, several tables that all begin with the first column.
    No cell is cut or folded. The columns that `wide` names are aligned left."""
    widths = [max(len(row[i]) for row in (columns, *rows)) + 2 for i in range(len(columns))]
    rest = list(range(1, len(columns)))
    while rest:
        count = len(rest)
        while count > 1 and widths[0] + sum(widths[i] for i in rest[:count]) > console.width:
            count -= 1
        table = plain_table(*(columns[i] for i in (0, *rest[:count])), wide=wide)
        for row in rows:
            table.add_row(*(row[i] for i in (0, *rest[:count])))
        yield table
        rest = rest[count:]


def note(text: str) -> None:
    Console(stderr=True).print(Text.assemble(("note: ", "yellow"), text), soft_wrap=True)
