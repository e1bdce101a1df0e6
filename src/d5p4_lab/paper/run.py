"""`reproduce` runs the stages of an experiment in order. A stopped stage continues where it stopped."""

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from d5p4.distributed import Mesh, connect
from d5p4.errors import D5P4Error
from d5p4.provenance import without_places
from d5p4.store import read_json, write_json, write_text

from ..provenance import about
from . import experiment
from .answers import answers, numbers, scores
from .plan import check
from .rows import Source, fill
from .scoring import release, scorer_names
from .setup import Data, Progress, Setup
from .tasks import DATA

RESULTS = Path(__file__).resolve().parent.parent / "results"
STAGES = ("decode", "score", "draw")
WORTH_RECORDING = 5.0  # seconds; shorter runs are recorded only if they begin a stage


def reproduce(name: str, *, mesh: Mesh | None = None, **options: Any) -> Setup:
    """Run an experiment of the paper, after all that it needs was opened or checked; `options` are those of `prepare`.

    `mesh` has the ranks that share decoding and scoring, by default all ranks of this job. The first rank draws.
    """
    own = mesh is None
    mesh = connect(device=options.get("device")) if mesh is None else mesh
    stages = options.setdefault("stages", STAGES)
    try:
        setup = prepare(name, mesh=mesh, **options)
        preflight([setup], stages)
        for stage in (stage for stage in STAGES if stage in stages):
            if (stage == "score" and not setup.cases) or (stage == "draw" and not mesh.first):
                continue
            began = time.monotonic()
            worked = _run_stage(setup, stage)
            if mesh.first:
                _record(setup, stage, time.monotonic() - began, worked)
    except BaseException as error:
        mesh.fail(error)
        raise
    if own:
        mesh.close()
    return setup


def prepare(
    name: str,
    *,
    scale: str = "box",
    out: str | Path | None = None,
    stages: Sequence[str] = STAGES,
    model: str | None = None,
    data: str | Path | Mapping[str, str | Path] | None = None,
    device: str | None = None,
    progress: Progress | None = None,
    mesh: Mesh | None = None,
    **options: Any,
) -> Setup:
    """Return the state of a run, as `reproduce` begins with it. Nothing is opened yet. `options` are those of `Setup`.

    out       the folder of the results, by default `results/SCALE`; the files of the experiment go to `out`/`name`
    stages    the stages to run; you may copy the folder to another machine between stages
    model     a model to use instead of the model that the scale names
    data      the file or folder that the task reads, if the task reads one; a mapping names the data of several tasks
    """
    mesh = mesh or Mesh()
    if mesh.rows > 1:
        raise D5P4Error(
            f"mesh={mesh.data},{mesh.rows}: the ranks of an experiment share prompts, not forwards; use {mesh.world},1"
        )
    for stage in stages:
        if stage not in STAGES:
            raise D5P4Error(f"stage={stage!r} is not known; use one of {', '.join(STAGES)}")
    return Setup(
        experiment(name),
        scale,
        Path(out) if out is not None else RESULTS / scale,
        model_name=model,
        data=_paths(data),
        device=device if mesh.device is None else str(mesh.device),
        progress=(progress if mesh.first else None) or (lambda share, text: None),
        decoding="decode" in stages,
        mesh=mesh,
        **options,
    )


def _paths(data: str | Path | Mapping[str, str | Path] | None) -> Data:
    if not isinstance(data, Mapping):
        return None if data is None else Path(data)
    if unknown := sorted(set(data) - set(DATA)):
        raise D5P4Error(f"data names the task {unknown[0]!r}, which does not exist; use one of {', '.join(DATA)}")
    return {task: Path(path) for task, path in data.items()}


def preflight(setups: Sequence[Setup], stages: Sequence[str]) -> None:
    """On all ranks: check what these runs need before the first decodes. One error names all that is missing."""
    mesh, missing = setups[0].mesh, []
    for setup in setups:
        try:
            if mesh.first:
                check(setup, stages)
        except D5P4Error as reason:
            missing.append(str(reason))
    if missing:
        raise D5P4Error("; ".join(dict.fromkeys(missing)))
    mesh.meet()  # models and data are on this machine now


def sources(setup: Setup, stage: str) -> list[Source]:
    """The `Source`s whose rows a stage makes. The first pass of all cases comes first."""
    if stage == "decode":
        passes = range(max((case.passes for case in setup.cases), default=0))
        sets = [answers(setup, case, number) for number in passes for case in setup.cases if number < case.passes]
        return [*setup.experiment.sources(setup), *sets]
    if stage == "score":
        scored = [case for case in setup.cases if setup.experiment.scored(case)]
        return [scores(setup, case, name) for name in scorer_names(setup) for case in scored]
    return [numbers(setup)] if setup.cases else []


def _run_stage(setup: Setup, stage: str) -> bool:
    """Return whether the stage did anything."""
    if stage == "decode":
        return fill(setup, sources(setup, stage), setup.mesh)
    if stage == "score":
        setup.release()  # the judges need the memory
        setup.forget()  # other ranks have decoded rows, too
        worked = fill(setup, sources(setup, stage), setup.mesh)
        release()
        return worked
    setup.forget()
    fill(setup, sources(setup, stage), Mesh())
    before = _drawn(setup)
    setup.experiment.draw(setup).save(setup.folder, _about(setup))
    # Folders mean nothing on other machines, so judges and encoders are named without them.
    folders = sorted((name for name in _outside(setup) if len(Path(name).parts) > 2), key=len, reverse=True)
    for file, text in _drawn(setup).items():
        for folder in folders:
            text = text.replace(folder, Path(folder).name)
        write_text(file, text)
    return _drawn(setup) != before


def _outside(setup: Setup) -> list[str]:
    return [name for name in (*setup.settings.get("judges", ()), setup.settings.get("encoder")) if name]


def _drawn(setup: Setup) -> dict[Path, str]:
    """The drawn texts. If drawing leaves them unchanged, so is config.json."""
    files = (setup.folder / "table.md", setup.folder / "summary.json")
    return {file: file.read_text(encoding="utf-8") for file in files if file.is_file()}


def _record(setup: Setup, stage: str, seconds: float, worked: bool) -> None:
    """Write the experiment's settings into config.json, and record this run of the stage if the run did something."""
    device = "cpu" if stage == "draw" else setup.torch_device
    ran = about(device) | {"seconds": round(seconds, 1)}
    if stage != "draw" and setup.cases and setup.mesh.world > 1:
        ran["ranks"] = setup.mesh.world
    config = read_json(setup.folder / "config.json") or {}
    stages = config.setdefault("stages", {})
    if stage == "draw":
        stages[stage] = [ran] if worked or stage not in stages else stages[stage]
    elif worked and (stage not in stages or seconds > WORTH_RECORDING):
        stages.setdefault(stage, []).append(ran)
    settings = json.loads(without_places(json.dumps(setup.settings, ensure_ascii=False)))
    config |= {"experiment": setup.experiment.name, "scale": setup.scale, "seed": setup.seed, "settings": settings}
    if "model" in setup.settings:
        config |= {"model": setup.label, "weights": setup.weights}
    config["cases"] = [
        {"name": case.name, "task": case.task, "units": case.units, "options": dict(case.options)}
        for case in setup.cases
    ]
    write_json(setup.folder / "config.json", config)


def _about(setup: Setup) -> dict[str, Any]:
    """What stands above the table: title, place in the paper, command, machines, and a judge that is gone."""
    configs = {file.parent.name: read_json(file) for file in sorted(setup.root.glob("*/config.json"))}
    stages = configs.get(setup.experiment.name, {}).get("stages", {})
    ours = [case.options for case in setup.cases]
    shared = [one for one in configs.values() if any(case["options"] in ours for case in one.get("cases", ()))]
    made = []
    for stage, verb in (("decode", "decoded" if setup.cases else "measured"), ("score", "scored")):
        runs = stages.get(stage) or [run for one in shared for run in one.get("stages", {}).get(stage, ())]
        places = [
            f"{run['machine'].replace(', 1 threads', ', 1 thread')} "
            f"({run['ranks']} ranks, torch {run['torch']}, {run['date']})".replace("None ranks, ", "")
            for run in ({"ranks": None} | run for run in runs)
        ]
        if places:
            made.append(f"{verb} on {' and on '.join(dict.fromkeys(places))}")
    changed = "".join(f" --set {name}={json.dumps(value)}" for name, value in setup.changes.items())
    typed = f"python -m d5p4_lab reproduce {setup.experiment.name} --scale {setup.scale}{changed}"
    text = f"The command was `{without_places(typed)}`."
    text += f" The results were {' and '.join(made)}." * bool(made)
    text += " The judge `judge` is a small model that is no longer shipped." * ("judge" in _outside(setup))
    own = setup.experiment
    return {"experiment": own.name, "title": own.title, "paper": own.paper, "scale": setup.scale, "made": text}
