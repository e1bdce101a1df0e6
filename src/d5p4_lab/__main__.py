"""`python -m d5p4_lab`: run the paper's experiments, train the shipped models, run the benchmarks."""

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
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
    "pareto, fidelity, control, qa, guidance, math, partition, quality-signal, features, scaling, cost, theory; "
    "`all` runs all of them."
)


Folder = Annotated[Path | None, typer.Option("--out", "-o", help="The results. Default: src/d5p4_lab/results/SCALE.")]
Target = Annotated[Path | None, typer.Option("--out", "-o", help="What to write. Default: the place in this checkout.")]


@app.command()
def options() -> None:
    """Write docs/options.md and the docstring of `generate` from the sources."""
    from . import reference_pages

    reference_pages.write()


@app.command()
def site(out: Target = None) -> None:
    """Build the documentation site from docs/ into the folder `site` in --out."""
    from . import site

    typer.echo(os.path.relpath(site.build(out or site.OUT) / "index.html"))


@app.command()
def notebooks(
    names: Annotated[list[Path] | None, typer.Argument(help="Notebooks. Default: all in examples/.")] = None,
) -> None:
    """Run notebooks and write their new outputs into them."""
    from .notebooks import ALL, executed, write

    for path in names or ALL:
        typer.echo(path.name)
        write(path, executed(path))


@app.command()
def recording(out: Target = None) -> None:
    """Record the runs that the playground opens with: countdown, by its default method and by independent."""
    import d5p4
    from d5p4 import view
    from d5p4.eval.graders import grader_of
    from d5p4.resolve import alike

    model = d5p4.load("countdown", device="cpu", dtype="float64")  # float64, so that all machines give the same texts
    task = grader_of(model)
    assert task is not None
    prompt = task.examples[0][1]
    options = alike(model, {"tree": {}, "independent": {}})
    traces = [view.trace(model, prompt, seed=0, **own) for own in options.values()]
    traces = [trace | {"seconds": None} for trace in traces]  # the time of this machine
    view.write_json(out or view.page_folder() / "recording.json", traces)


@app.command()
def reproduce(
    name: Annotated[str, typer.Argument(help=EXPERIMENT_NAMES)],
    scale: Annotated[
        str | None, typer.Option(help="box (default): small models, offline. smol: the real model. paper: the paper's.")
    ] = None,
    stage: Annotated[list[str] | None, typer.Option(help="Only decode, score or draw; may be repeated.")] = None,
    model: Annotated[str | None, typer.Option("--model", "-m", help="A model instead of the default one.")] = None,
    data: Annotated[list[str] | None, typer.Option(help="A file or folder, or TASK=FILE; may be repeated.")] = None,
    out: Folder = None,
    change: Annotated[list[str] | None, typer.Option("--set", help="Change a setting: units=4; repeatable.")] = None,
    seed: Annotated[int, typer.Option(help="The seed of all random numbers.")] = 0,
    plan: Annotated[bool, typer.Option("--plan", help="Print the missing rows, the models and the data.")] = False,
    device: Device = None,
    dtype: Dtype = None,
    quiet: Quiet = False,
    timeout: Annotated[
        float, typer.Option(help="Seconds that a rank waits for others before the job ends.", rich_help_panel=RUNNING)
    ] = 1800.0,
) -> None:
    """Run an experiment of the paper. To continue a stopped run, give the same command again.

    Example: python -m d5p4_lab reproduce scaling --out try

    What it needs: python -m d5p4_lab reproduce all --scale paper --plan

    The real model of the box, in two orders: python -m d5p4_lab reproduce qa --model smol

    Many GPUs: torchrun --nproc-per-node 8 -m d5p4_lab reproduce NAME ...
    """
    from .paper import EXPERIMENTS
    from .paper.plan import plan as planned
    from .paper.run import STAGES, experiment, preflight, prepare
    from .paper.run import reproduce as run

    if scale is None:
        scale, model = ("smol", None) if model == "smol" else ("box", model)
    changes = dict(_change(text) for text in change or ())
    names = list(EXPERIMENTS) if name == "all" else [name]
    stages = tuple(stage or STAGES)
    options: dict[str, Any] = dict(stages=stages, model=model, data=_data(data), device=device, dtype=dtype, seed=seed)
    runs = [(one, own) for one in names for own in experiment(one).scales(scale)[: 1 if model else None]]
    runs = runs or [(name, scale)]  # an unknown scale is an error
    where = {own: out or Path(os.path.relpath(RESULTS / own)) for _, own in runs}
    if out is not None and len(where) > 1:
        where = {own: out / own for own in where}
    by_name = {chosen: changes for chosen in names}
    if name == "all":  # each experiment gets the changes of the settings that it has
        names = [chosen for chosen in names if experiment(chosen).scales(scale)]
        known = {chosen: experiment(chosen).settings[experiment(chosen).scales(scale)[0]] for chosen in names}
        if unknown := set(changes) - {setting for own in known.values() for setting in own}:
            raise D5P4Error(f"no experiment has a setting {', '.join(sorted(unknown))}")
        by_name = {chosen: {key: changes[key] for key in changes if key in own} for chosen, own in known.items()}
    command = f"python -m d5p4_lab reproduce {name} --scale {scale}"

    if plan:
        setups = [
            prepare(one, changes=by_name.get(one, changes), scale=own, out=where[own], **options) for one, own in runs
        ]
        setups = [replace(setup, decoding=False) for setup in setups]  # so no model is opened
        typer.echo(planned(setups, stages, command))
        return
    with joined(None, timeout, device) as mesh:
        options["mesh"] = mesh
        if len(runs) > 1:
            setups = [
                prepare(one, changes=by_name.get(one, changes), scale=own, out=where[own], **options)
                for one, own in runs
            ]
            preflight(setups, stages)
        for one, own in runs:
            progress = None if quiet else _teller(one)
            setup = run(one, changes=by_name.get(one, changes), scale=own, out=where[own], progress=progress, **options)
            if mesh.first:
                typer.echo(f"{one}: {setup.folder}")


@app.command()
def claims(
    scale: Annotated[str, typer.Option(help="The scale of the results: box or paper.")] = "box",
    out: Folder = None,
    page: Annotated[Path, typer.Option(help="The page to write.")] = Path("docs/claims.md"),
) -> None:
    """Write the page of claims from the results: the verdict on each claim of the paper, and on ours.

    Example: python -m d5p4_lab claims
    """
    from .paper.claims import write_claims

    typer.echo(write_claims(out if out is not None else RESULTS / scale, page))


def _data(given: list[str] | None) -> Path | dict[str, str] | None:
    """Read the values of --data: one file or folder, or TASK=FILE for each task."""
    from .paper.tasks import DATA

    named = {}
    for text in given or ():
        task, equals, path = text.partition("=")
        if equals and (task in DATA or not Path(text).exists()):
            named[task] = path
        elif len(given or ()) > 1:
            raise D5P4Error(f"--data {text!r} does not say whose data it is: write TASK={text}")
        else:
            return Path(text)
    return named or None


def _change(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise D5P4Error(f"--set {text!r} must be a name and a value, such as units=4")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def _teller(label: str) -> Callable[[float, str], None]:
    """Return a function that prints the progress, at most once every two seconds."""
    last = 0.0

    def tell(share: float, text: str) -> None:
        nonlocal last
        if time.monotonic() - last >= 2 or share >= 1:
            last = time.monotonic()
            typer.echo(f"{label} {100 * share:3.0f} % {text}", err=True)

    return tell


RECIPE_NAMES = "countdown, programs, books or smol; `corpus` only turns texts into token files."
DATA_HELP = "corpus: train.txt and val.txt (or .xz). books: a corpus. smol: a folder with gsm8k and books."


@app.command()
def train(
    name: Annotated[str, typer.Argument(help=RECIPE_NAMES)],
    out: Annotated[Path, typer.Option("--out", "-o", help="The folder of the model. A stopped run in it continues.")],
    minutes: Annotated[float | None, typer.Option(help="Minutes of training, without compilation. Default: 1.")] = None,
    steps: Annotated[int | None, typer.Option(help="Train for this many steps instead, repeatably.")] = None,
    data: Annotated[Path | None, typer.Option(help=DATA_HELP)] = None,
    option: Annotated[list[str] | None, typer.Option(help="Of smol: block=16, rank=32 or causal=1.")] = None,
    size: Annotated[str | None, typer.Option(help="full or toy. Default: full on a GPU, toy on a CPU.")] = None,
    vocabulary: Annotated[int, typer.Option(help="corpus: the size of its BPE vocabulary.")] = 8192,
    seed: Annotated[int, typer.Option(help="The seed of the initial weights, the data and the masks.")] = 0,
    compile: Annotated[bool | None, typer.Option("--compile/--no-compile", help="Default: on a GPU.")] = None,
    validate: Annotated[bool, typer.Option("--validate", help="Only measure the model in the folder.")] = False,
    device: Device = None,
    quiet: Quiet = False,
) -> None:
    """Train a small model, or turn texts into a corpus. The default --size is full on a GPU and toy on a CPU.

    Example: python -m d5p4_lab train countdown --out try --minutes 2
    """
    from d5p4.models.load import choose_device

    from .train import recipe
    from .train.corpus import prepare
    from .train.loop import Budget
    from .train.loop import train as run

    if minutes is not None and not 0 < minutes < float("inf"):
        raise D5P4Error(f"minutes={minutes} must be positive")
    if steps is not None and minutes is not None:
        raise D5P4Error(f"steps={steps} and minutes={minutes} exclude each other: give only one of them")
    if steps is not None and steps < 1:
        raise D5P4Error(f"steps={steps} must be at least 1")
    if size not in (None, "full", "toy"):
        raise D5P4Error(f"size={size!r} must be full or toy")
    if not 0 <= seed < 2**63:
        raise D5P4Error(f"seed={seed} must be at least 0 and below 2**63")

    def say(line: str) -> None:
        if not quiet:
            typer.echo(line)

    if name == "corpus":
        if data is None:
            raise D5P4Error("corpus needs texts: give the folder of train.txt and val.txt (or .xz) with --data")
        if any(option is not None for option in (minutes, steps, size, compile, device)):
            raise D5P4Error("`train corpus` trains nothing: it takes only --data, --vocabulary and --out")
        corpus = prepare(data, out, vocabulary)
        say(f"{len(corpus.train):,} tokens to train on, {len(corpus.val):,} held out, in {out}")
        if corpus.left_out:
            say(f"{corpus.left_out} books of the held-out text were left out: they are in the training text too")
        return
    training_device = choose_device(device)
    on_gpu = training_device.type == "cuda"
    toy = size == "toy" or (size is None and not on_gpu)
    pairs = [pair.partition("=") for pair in option or []]
    if wrong := [f"{key}{sign}{value}" for key, sign, value in pairs if not value.isdecimal()]:
        raise D5P4Error(f"--option {wrong[0]} must be a name, = and a whole number")
    options = {key: int(value) for key, _, value in pairs}
    model_recipe = recipe(name, training_device, seed, toy, data, out, say, **options)
    if validate:
        for figure, value in model_recipe.validate(out).items():
            typer.echo(f"{figure}: {value:.4g}")
        return
    budget = Budget(steps=steps) if steps is not None else Budget(seconds=60 * (minutes or 1.0))
    run(model_recipe, out, budget, compiled=on_gpu if compile is None else compile, say=say)


BENCH_NAMES = "countdown, fill, gpu, host, language, ranks, rivals, rollouts, scale, serve, smol, tables"
BENCHES = tuple(BENCH_NAMES.split(", "))


@app.command(context_settings={"allow_extra_args": True, "allow_interspersed_args": False})
def bench(context: typer.Context, name: Annotated[str, typer.Argument(help=BENCH_NAMES)]) -> None:
    """Run a benchmark. `bench NAME --help` lists its options. `bench tables` redraws the tables of the documents.

    Example: python -m d5p4_lab bench gpu --sections step,solver
    """
    if name not in BENCHES:
        raise D5P4Error(f"there is no benchmark {name!r}; choose one of {BENCH_NAMES}")
    sys.exit(import_module(f"d5p4_lab.bench.{name}").main(context.args))


if __name__ == "__main__":
    app(prog_name="python -m d5p4_lab")
