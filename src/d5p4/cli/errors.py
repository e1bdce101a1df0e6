"""How every command ends when something goes wrong: one sentence on stderr and an exit code, no traceback."""

from __future__ import annotations

import os
import sys
from typing import Any

import typer
from typer.core import TyperGroup

from ..errors import D5P4Error
from .show import visible


class Commands(TyperGroup):
    """The commands. What the caller can put right ends with code 2, Ctrl-C with 130; a closed pipe ends quietly."""

    def invoke(self, ctx: Any) -> Any:
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
            return result
        except D5P4Error as error:
            typer.secho("error: ", fg="red", bold=True, err=True, nl=False)
            typer.echo(visible(" ".join(str(error).split())), err=True)
            raise typer.Exit(2) from None
        except KeyboardInterrupt:
            typer.echo("stopped", err=True)
            raise typer.Exit(130) from None
        except BrokenPipeError:
            _write_nowhere()
            raise typer.Exit(1) from None
        except OSError as error:
            _write_nowhere()
            typer.echo(f"error: cannot write to standard output: {error.strerror or error}", err=True)
            raise typer.Exit(2) from None
        except (MemoryError, RuntimeError) as error:
            said = str(error).splitlines()[0] if str(error) else "out of memory"
            if not isinstance(error, MemoryError) and "memory" not in said:
                raise
            typer.echo(f"error: {said}; use a smaller -k, -w or --gen-length", err=True)
            raise typer.Exit(2) from None


def _write_nowhere() -> None:
    """Whatever is still buffered has no reader; give the interpreter's last flush a place to go."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
