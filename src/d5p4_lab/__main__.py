"""`python -m d5p4_lab`: run the paper's experiments, train the models in the box, run the benchmarks."""

from __future__ import annotations

import json
import os
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer

from d5p4.cli.common import Commands, joined
from d5p4.cli.options import RUNNING, Device, Dtype, Quiet
from d5p4.errors import D5P4Error

RESULTS = Path(__file__).resolve().parent / "results"

app = typer.Typer(cls=Commands, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)

EXPERIMENT_NAMES = (
    "pareto, fidelity, control, qa, guidance, math, partition, quality-signal, features, scaling, cost, theory, "
    "budget; `all` runs all of them; `claims` writes the page of claims from what was drawn."
)
UNFINISHED = 3  # the exit code when --minutes was not enough


@app.command()
def options() -> None:
    """Write docs/options.md and the docstring of `generate` from the table of options."""
    from . import options_page

    options_page.write()


@app.command()
def reproduce(
    name: Annotated[str, typer.Argument(help=EXPERIMENT_NAMES)],
    scale: Annotated[
        str, typer.Option(help="box: the models of the repository, offline; paper: those of the paper.")
    ] = "box",
    stage: Annotated[
        list[str] | None, typer.Option(help="Run only decode, score or draw; may be repeated (all three).")
    ] = None,
    model: Annotated[str | None, typer.Option("--model", "-m", help="A model instead of the scale's own.")] = None,
    data: Annotated[Path | None, typer.Option(help="The file or folder that the task reads, if it needs one.")] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="The folder of results (src/d5p4_lab/results/SCALE).")
    ] = None,
    change: Annotated[
        list[str] | None, typer.Option("--set", help="Change a setting, such as units=4; may be repeated.")
    ] = None,
    scorers: Annotated[str | None, typer.Option(help="Score only with these, separated by commas: ppl,cos.")] = None,
    minutes: Annotated[float | None, typer.Option(help="Start no decoding that would end later.")] = None,
    seed: Annotated[int, typer.Option(help="The seed of all random numbers.")] = 0,
    page: Annotated[Path, typer.Option(help="The page that `claims` writes.")] = Path("docs/claims.md"),
    device: Device = None,
    dtype: Dtype = None,
    quiet: Quiet = False,
    timeout: Annotated[
        float, typer.Option(help="Seconds after which a silent rank ends the job.", rich_help_panel=RUNNING)
    ] = 600.0,
) -> None:
    """Run an experiment of the paper. A stopped run continues when the same command is given again.

    Example: python -m d5p4_lab reproduce scaling --out try

    Many GPUs: torchrun --nproc-per-node 8 -m d5p4_lab reproduce NAME ...
    """
    from .paper import EXPERIMENTS, experiment
    from .paper.claims import write_claims
    from .paper.run import STAGES, left
    from .paper.run import reproduce as run

    folder = out if out is not None else Path(os.path.relpath(RESULTS / scale))
    if minutes is not None and minutes < 0:
        raise D5P4Error(f"minutes={minutes:g} must not be negative")
    changes = dict(_change(text) for text in change or ())
    if name == "all" and data is None and "decode" in (stage or STAGES):
        # An experiment that has been drawn has its rows, so it no longer needs the text.
        need = [known for known in EXPERIMENTS if scale in experiment(known).needs_text]
        undone = [known for known in need if not (folder / known / "summary.json").is_file()]
        if undone:
            raise D5P4Error(f"{', '.join(undone)} need{'s' * (len(undone) == 1)} a text file: give --data")
    began = time.monotonic()
    finished = True
    with joined(None, timeout, device) as mesh:
        if name == "claims" and mesh.first:
            typer.echo(write_claims(folder, page))
        for chosen in {"all": EXPERIMENTS, "claims": ()}.get(name, (name,)):
            setup = run(
                chosen, scale=scale, out=folder, stages=stage or STAGES, model=model, data=data, device=device,
                dtype=dtype, seed=seed, minutes=None if minutes is None else minutes - (time.monotonic() - began) / 60,
                scorers=None if scorers is None else scorers.split(","), changes=changes,
                progress=None if quiet else _Teller(chosen), mesh=mesh,
            )  # fmt: skip
            finished = finished and setup.finished
            if not mesh.first:
                continue
            if setup.finished:
                typer.echo(f"{chosen}: {setup.folder}")
            else:
                typer.echo(f"{chosen}: not finished, {left(setup)} rows left; run the same command again")
    if not finished and mesh.first:
        raise typer.Exit(UNFINISHED)


def _change(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise D5P4Error(f"--set {text!r} must be a name and a value, such as units=4")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


class _Teller:
    """Prints a line of progress with the time left, at most every two seconds."""

    def __init__(self, label: str) -> None:
        self.label, self.began, self.last = label, time.monotonic(), 0.0
        self.start = 0.0  # the share that was done when the stage began

    def __call__(self, share: float, text: str) -> None:
        now = time.monotonic()
        if share <= 0 or share < self.start:
            self.began, self.start = now, share
        if now - self.last < 2 and share < 1:
            return
        self.last = now
        spent = now - self.began
        left = f", about {spent / share * (1 - share):.0f} s left" if 0 < share < 1 and spent > 1 else ""
        typer.echo(f"{self.label} {100 * share:3.0f} % {text}{left}", err=True)


RECIPE_NAMES = "countdown, books or judge; corpus trains nothing and turns texts into token files."


@app.command()
def train(
    name: Annotated[str, typer.Argument(help=RECIPE_NAMES)],
    out: Annotated[Path, typer.Option("--out", "-o", help="The folder of the model; a stopped run there continues.")],
    minutes: Annotated[float | None, typer.Option(help="Minutes of training, without the time to compile (1).")] = None,
    steps: Annotated[int | None, typer.Option(help="Steps instead of minutes; the weights are repeatable.")] = None,
    data: Annotated[
        Path | None, typer.Option(help="books, judge: a folder with train.txt and val.txt (or .xz), or a corpus.")
    ] = None,
    size: Annotated[str | None, typer.Option(help="full or toy (full on a GPU, toy on a CPU).")] = None,
    vocabulary: Annotated[int, typer.Option(help="Size of the BPE vocabulary that is made from texts.")] = 8192,
    seed: Annotated[int, typer.Option(help="The seed of the first weights, the data and the masks.")] = 0,
    compile: Annotated[
        bool | None, typer.Option("--compile/--no-compile", help="Compile the model, or not (compile on a GPU).")
    ] = None,
    validate: Annotated[
        bool, typer.Option("--validate", help="Train nothing; measure the model in the folder.")
    ] = False,
    device: Device = None,
    quiet: Quiet = False,
) -> None:
    """Train a small model: at full size on a GPU, as a toy on a CPU. Or turn texts into a corpus.

    Example: python -m d5p4_lab train countdown --out try --minutes 2
    """
    from d5p4.models.load import choose_device

    from .train import recipe
    from .train.corpus import prepare
    from .train.folder import refuse_occupied
    from .train.loop import Budget
    from .train.loop import train as run

    if minutes is not None and not 0 < minutes < float("inf"):
        raise D5P4Error(f"minutes={minutes} must be positive")
    if steps is not None and minutes is not None:
        raise D5P4Error(f"steps={steps} and minutes={minutes}: give one of them")
    if steps is not None and steps < 1:
        raise D5P4Error(f"steps={steps} must be at least 1")
    if size not in (None, "full", "toy"):
        raise D5P4Error(f"size={size!r} must be full or toy")
    if not 0 <= seed < 2**63:
        raise D5P4Error(f"seed={seed} must be at least 0 and below 2**63")
    started = time.perf_counter()

    def say(line: str) -> None:
        if not quiet:
            typer.echo(line)

    if name == "corpus":
        if data is None:
            raise D5P4Error("corpus needs texts: give their folder (train.txt and val.txt, or .xz) with --data")
        if any(option is not None for option in (minutes, steps, size, compile, device)):
            raise D5P4Error("train corpus takes --data, --vocabulary and --out only: it trains nothing")
        corpus = prepare(data, out, vocabulary)
        say(f"{len(corpus.train):,} tokens to train on, {len(corpus.val):,} held out, in {out}")
        if corpus.left_out:
            say(f"{corpus.left_out} books were left out of the held-out text because the training text has them")
        return
    if not validate:
        refuse_occupied(out)
    chosen = choose_device(device)
    on_gpu = chosen.type == "cuda"
    toy = size == "toy" or (size is None and not on_gpu)
    what = recipe(name, chosen, out, seed, toy, data, vocabulary)
    if validate:
        for figure, value in what.validate(out).items():
            typer.echo(f"{figure}: {value:.4g}")
        what.tidy()
        return
    budget = Budget(steps=steps) if steps is not None else Budget(seconds=60 * (minutes or 1.0))
    run(what, out, budget, compiled=on_gpu if compile is None else compile, say=say)
    say(f"{time.perf_counter() - started:.0f} s this time")


BENCHES = (
    "agreement", "books", "countdown", "deterministic", "gpu", "large_checkpoint", "scale", "scale_plan", "serve",
    "solver_quality", "spare", "tables",
)  # fmt: skip


@app.command(context_settings={"allow_extra_args": True, "allow_interspersed_args": False})
def bench(context: typer.Context, name: Annotated[str, typer.Argument(help=", ".join(BENCHES))]) -> None:
    """Run a benchmark with its own options, which `bench NAME --help` lists; `bench tables` redraws the documents.

    Example: python -m d5p4_lab bench gpu --sections step,solver
    """
    if name not in BENCHES:
        raise D5P4Error(f"there is no benchmark {name!r}; choose one of {', '.join(BENCHES)}")
    sys.exit(import_module(f"d5p4_lab.bench.{name}").main(context.args))


if __name__ == "__main__":
    app(prog_name="python -m d5p4_lab")
