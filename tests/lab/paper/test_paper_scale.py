"""Every experiment runs with the paper's settings, on tiny random checkpoints in the layouts of the paper's models."""

from __future__ import annotations

import itertools
import json
import multiprocessing
from pathlib import Path
from typing import Any

import pytest

from d5p4.distributed import Mesh, connect
from d5p4.models.load import load
from d5p4.options import Settings
from d5p4_lab.figures import pyplot
from d5p4_lab.paper import EXPERIMENTS, experiment
from d5p4_lab.paper import claims as page_of
from d5p4_lab.paper.answers import answers, case_options, numbers_by_unit
from d5p4_lab.paper.rows import complete
from d5p4_lab.paper.run import RESULTS, reproduce
from d5p4_lab.paper.scaling import SELECTORS
from d5p4_lab.paper.setup import PAPER_SOLVER, Setup, solves
from tests.checkpoints import write_llada, write_mdlm, write_sdar
from tests.distributed.ranks import finish, start
from tests.lab.judges import write_gpt2, write_jina, write_llama3
from tests.lab.paper.smoke import check, write_arc, write_gsm8k, write_text, write_truthfulqa
from tests.lab.paper.test_windows import write_texts

SHORT = {"gen_length": 8, "steps": 4}
MDLM = ("pareto", "fidelity", "control", "partition", "scaling", "features", "quality-signal")
LLADA = ("qa", "guidance", "math", "theory")
LAYOUT = dict.fromkeys(MDLM, "mdlm") | dict.fromkeys(LLADA, "llada")
GAPS = {"features": "by ratio", "theory": "reaches 1"}
SWEEP = dict.fromkeys(("beta", "beta_x", "alpha", "score_temperature"), [0.1, 1, 10, 100])
SWEEP |= {"token_temperature": [1.02, 1.05, 1.1, 1.2]}
FEW: dict[str, dict[str, Any]] = {
    "pareto": SWEEP,
    "fidelity": {"units_fidelity": 3, "beta_fidelity": [1, 10, 100], "mauve_seeds": 1},
    "control": SWEEP,
    "partition": {"interval": [2], "lam_textbook": [5, 50], "beta": [1, 12], "beta_large": [30]},
    "guidance": {"guidances": [1, 2]},
    "features": {"length": 24, "together": 6, "batches": 2, "points": 3},
    "quality-signal": {"length": 24, "real": 5, "draws": 4},
    "scaling": {"sets": 1, "length": 12, "steps": 6, "sizes": ["4x4"], "trials": {"16": 2}}
    | {"authors_sizes": ["4x4"], "timed_size": {"cpu": "4x4", "cuda": "4x4"}, "runs": 2},
    "theory": {"length": 24, "steps": 99, "k": 3, "w": 2, "looks": 4, "sets": 8},  # more steps than positions
}


def write_models(folder: Path) -> dict[str, str]:
    """Checkpoints by layout, and data by task."""
    written = {
        "mdlm": write_mdlm(folder / "mdlm"),
        "llada": write_llada(folder / "llada", chat=True, max_sequence_length=512),
        "gpt2": write_gpt2(folder / "gpt2-large"),
        "llama3": write_llama3(folder / "Meta-Llama-3-8B"),
        "jina": write_jina(folder / "jina-embeddings-v2-base-en"),
        "smol": write_sdar(folder / "smol", chat=True, max_position_embeddings=512),
        "text": write_texts(folder / "val.txt"),
        "books": write_text(folder / "books.txt"),
        "truthfulqa": write_truthfulqa(folder / "truthfulqa.jsonl", 5),
        "arc-challenge": write_arc(folder / "arc.jsonl"),
        "commonsenseqa": write_arc(folder / "csqa.jsonl"),
        "gsm8k": write_gsm8k(folder / "test.jsonl"),
    }
    return {name: str(path) for name, path in written.items()}


DATA = ("text", "books", "truthfulqa", "arc-challenge", "commonsenseqa", "gsm8k")


@pytest.fixture(scope="module")
def given(tmp_path_factory) -> dict[str, str]:
    return write_models(tmp_path_factory.mktemp("given"))


def run(name: str, given: dict[str, str], out: Path, units: int = 2, scale: str = "paper", **words: Any) -> Setup:
    """Run an experiment at the paper's scale with few units, and with judges and encoder in the paper's layouts."""
    layout = LAYOUT[name] if scale == "paper" else "smol"
    few = SHORT | {"judges": [given["gpt2" if layout == "mdlm" else "llama3"]], "encoder": given["jina"], "passes": 2}
    settings = experiment(name).settings[scale]
    few |= {key: units for key in settings if key.startswith("units")}
    changes = {key: value for key, value in few.items() if key in settings} | FEW.get(name, {})
    changes |= words.pop("changes", {})
    data = {task: given[task] for task in DATA}
    words = {"device": "cpu", "data": data} | words
    return reproduce(name, scale=scale, out=out, model=given[layout], changes=changes, **words)


def test_generate_accepts_the_options_of_every_case(given, tmp_path):
    """`generate` accepts the options of all cases, so that no run fails after hours. The solver is the paper's."""
    tiny = {layout: load(given[layout], "cpu") for layout in ("mdlm", "llada")}
    for name, scale in itertools.product(EXPERIMENTS, ("box", "paper")):
        setup = Setup(experiment(name), scale, tmp_path)
        assert name in LAYOUT or not setup.cases, name
        for case in setup.cases:
            settings = Settings.make(tiny[LAYOUT[name]], **case_options(case))
            assert settings.gen_length == case.options["gen_length"] and case.units >= 8, case
            assert scale == "box" or not solves(case.options) or case.options["solver"] == PAPER_SOLVER, case
    more = Setup(experiment("math"), "paper", tmp_path, changes={"passes": 20}).cases
    assert {(case.passes, case.options["guidance"], case.options["eos"]) for case in more} == {
        (20, 2.5, "last")
    }  # eos as published


def dry_run(given: dict[str, str], out: str) -> list[str]:
    """One rank of two: run every experiment, all stages, on the tiny checkpoints."""
    mesh = connect(timeout=100)
    multiprocessing.current_process()._config["daemon"] = False  # as under torchrun, so that runs may start processes
    for name in LAYOUT:
        run(name, given, Path(out) / name, mesh=mesh)
    mesh.close()
    return list(LAYOUT)


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_every_experiment_from_end_to_end_on_two_ranks(given, tmp_path):
    out = tmp_path / "out"
    ranks = start("tests.lab.paper.test_paper_scale:dry_run", 2, tmp_path / "ranks", given=given, out=str(out))
    for code, output in finish(ranks, timeout=1500):
        assert code == 0, output
    for name in LAYOUT:
        setup = run(name, given, out / name, stages=["draw"], mesh=Mesh())
        summary = check(setup, gaps=GAPS.get(name))
        figures = summary["figures"]
        pyplot().close("all")
        if setup.cases:
            config = json.loads((setup.folder / "config.json").read_text(encoding="utf-8"))
            assert all(ran["ranks"] == 2 for stage in ("decode", "score") for ran in config["stages"].get(stage, ()))
            assert [len(numbers_by_unit(setup, case)) for case in setup.cases] == [case.units for case in setup.cases]
        if name == "scaling":
            assert {*SELECTORS} <= set(figures["4×4"])
        if name == "math":
            rows = complete(setup, answers(setup, setup.cases[0]))
            assert len(rows) == 4 and all(len(row["texts"]) == 16 for row in rows)  # two passes over two problems


REAL = [name for name in EXPERIMENTS if "smol" in experiment(name).settings]


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_the_experiments_of_the_real_model_on_a_stand_in(given, tmp_path):
    """All run in both orders on a tiny model with blocks, and the page of claims takes what they say."""
    for name, scale in ((one, own) for one in REAL for own in experiment(one).scales("smol")):
        setup = run(name, given, tmp_path / scale, scale=scale)
        orders = {case.options["order"] for case in setup.cases}
        assert not orders or ("left" in orders) == (scale == "smol-left"), (name, orders)
        if name != "control":  # it has the rows of pareto
            assert check(setup, gaps=GAPS.get(name))["claims"]
        pyplot().close("all")
    box = tmp_path / "box"
    for file in (RESULTS / "box").glob("*/summary.json"):
        (box / file.parent.name).mkdir(parents=True)
        (box / file.parent.name / file.name).write_bytes(file.read_bytes())
    page = page_of.short_page(box, tmp_path / "docs" / "claims.md")
    assert page.count("| smol: confidence; left |") == len(REAL) and "smol: not measured" not in page
    summary = page[page.index("## Summary") : page.index("## All claims")]
    assert summary.count("not measured |") == 3 and "confidence: " in summary and "left: " in summary
    assert len(page.split()) <= 4000


def test_a_scale_brings_its_variants_and_a_model_its_scale(cli, tmp_path):
    for words, rows in (
        (["qa", "--model", "smol"], {"qa", "qa, smol-left"}),
        (["features", "--scale", "paper"], {"features", "features, paper-llada"}),
        (["features", "--scale", "paper", "--model", "org/name"], {"features"}),
    ):
        result = cli("reproduce", *words, "--plan", "--out", tmp_path)
        assert result.exit_code == 0, result.output
        lines = [line.split(" | ")[0].strip("| ") for line in result.stdout.splitlines() if line.startswith("| ")]
        assert set(lines[2:]) - {"all, shared rows once"} == rows
    assert "scale='none' is not known" in cli("reproduce", "qa", "--scale", "none", "--plan").output
