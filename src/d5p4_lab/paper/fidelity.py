"""MAUVE and MAUVE* of D5P4+ against β, compared with independent sampling."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from d5p4.errors import D5P4Error
from d5p4.eval.perplexity import CausalJudge

from ..statistics import Figure
from .answers import numbers_of
from .drawing import Claim, Drawing, Table, Verdict, bars, every, pyplot, shown
from .measures import MauveInterval, last_token_features, mauve_interval
from .open_ended import BOX, INDEPENDENT, PAPER, independent, sweep
from .rows import Row, Source, complete
from .scoring import MAUVE_TOKENS, TOKENS, pack8, unpack, unpack8
from .setup import Case, Digest, Experiment, Setup

STAR = 0.5  # MAUVE* adds this to the count of every bin
PAPERS = {1: 0.8669, 3: 0.8811, 10: 0.9195, 30: 0.9366, 100: 0.9515, 300: 0.9474, 1000: 0.8746}


def cases(setup: Setup) -> list[Case]:
    if len(setup["beta_fidelity"]) < 3:
        raise D5P4Error(
            f"beta_fidelity={setup['beta_fidelity']!r}: give three values or more, so that one is in the middle"
        )
    units = {value: setup["units_fidelity"] for value in setup["beta_fidelity"]}
    return [
        independent(setup, setup["units_fidelity"]),
        *sweep(setup, "D5P4+", {"method": "d5p4"}, "beta", setup["beta_fidelity"], units=units),
    ]


def _reduce(setup: Setup, case: Case, unit: int, row: Row, said: Mapping[str, Row]) -> Row:
    return pack8(unpack(said[f"features:{setup['judges'][0]}"]))


def reference(setup: Setup) -> Source:
    """Features of real texts: as many as a case has answers, cut to the generated length."""

    def make(keys: Sequence[str]) -> dict[str, Row]:
        codec, judge = setup.model.tokenizer, CausalJudge(setup["judges"][0], device=setup.device)
        assert codec is not None  # every loaded checkpoint has one
        examples = [setup.task("text", count).examples[int(key)] for key in keys]
        texts = [codec.decode(codec.encode(example.references[0])[: setup["gen_length"]]) for example in examples]
        features = last_token_features(judge, texts, max_tokens=MAUVE_TOKENS, max_tokens_per_batch=TOKENS)
        return {
            key: pack8(row[None]) | {"document": example.meta["document"]}
            for key, row, example in zip(keys, features, examples, strict=True)
        }

    count = setup["units_fidelity"] * setup["k"]
    made_with = {"judge": setup["judges"][0], "length": setup["gen_length"], "model": setup.weights}
    return setup.source("reference", [str(unit) for unit in range(count)], make, together=count, **made_with)


def _real(setup: Setup) -> tuple[np.ndarray, list[Any]]:
    """[n, D] features of the real texts, and the document that each text comes from."""
    rows = complete(setup, reference(setup))
    return np.concatenate([unpack8(row) for row in rows]), [row["document"] for row in rows]


def _over_seeds(found: MauveInterval) -> MauveInterval:
    """Replace the value of the first k-means seed by the mean over all seeds, and shift the interval with it."""
    first = found.figure
    change = float(np.mean(found.seeds)) - first.value
    value, low, high = (min(1.0, max(0.0, x + change)) for x in (first.value, first.low, first.high))
    return found._replace(figure=first._replace(value=value, low=low, high=high))


def draw(setup: Setup) -> Drawing:
    real, documents = _real(setup)
    found: dict[str, list[MauveInterval]] = {}
    for case in setup.cases:
        packed = [unpack8(row) for row in numbers_of(setup, case)]
        features = np.concatenate(packed)
        sets = np.repeat(np.arange(len(packed)), [len(texts) for texts in packed])
        seeds = [25 + i for i in range(setup["mauve_seeds"])]
        found[case.name] = [
            _over_seeds(mauve_interval(real, features, p_groups=documents, q_groups=sets.tolist(),
                                       smoothing=smoothing, seeds=seeds))
            for smoothing in (0.0, STAR)
        ]  # fmt: skip
    rows = []
    for case in setup.cases:
        plain, star = found[case.name]
        paper = f"{PAPERS[int(case.value)]:.4f}" if case.value in PAPERS else ".8824" if case.value is None else "–"
        spread = f"{np.std(plain.seeds, ddof=1):.4f}" if len(plain.seeds) > 1 else "–"
        rows.append([case.name, shown(plain.figure, 4), shown(star.figure, 4), spread, paper])
    note = (
        f"{len(real)} texts on each side, real ones cut to the generated length; features of the last token under "
        f"{setup['judges'][0]}, kept in 8 bits; mean over {setup['mauve_seeds']} k-means seeds (their spread is "
        "shown). Intervals resample sets and books with the clusters fixed."
    )
    table = Table("MAUVE against β", ["case", "MAUVE", "MAUVE*", "spread of seeds", "the paper's MAUVE"], rows, note)
    numbers = {name: {"mauve": pair[0].figure, "star": pair[1].figure} for name, pair in found.items()}
    return Drawing([table], _figure(setup, found), numbers, _claims(setup, found))


def _claims(setup: Setup, found: dict[str, list[MauveInterval]]) -> list[Claim]:
    line = [case for case in setup.cases if case.value is not None]
    inner, ends = line[1:-1], (line[0], line[-1])
    claims = []
    for place, kind, paper in ((0, "MAUVE", ".9515 at β 100; .8669 at 1, .8746 at 1000"),
                               (1, "MAUVE*", ".9615 at β 100; .9024 at 1, .9078 at 1000")):  # fmt: skip
        best = max(inner, key=lambda case: found[case.name][place].figure.value)
        ours = found[best.name][place].figure
        told = f"best inside {best.name} {shown(ours, 4)}; " + ", ".join(
            f"{case.name} {shown(found[case.name][place].figure, 4)}" for case in ends
        )
        apart = [_apart(ours, found[case.name][place].figure) for case in ends]
        claims.append(Claim(f"{kind} is highest at a middle β", paper, told, every(apart),
                            f"the best of {len(inner)}, so its interval is a little too kind"))  # fmt: skip
        alone = found[INDEPENDENT][place].figure
        claims.append(Claim(f"The best β has a higher {kind} than independent sampling",
                            (".9515 against .8824", ".9615 against .9134")[place],
                            f"{shown(ours, 4)} against {shown(alone, 4)}", _apart(ours, alone)))  # fmt: skip
    return claims


def _apart(a: Figure, b: Figure) -> Verdict:
    """Whether a is above b, given the standard errors of both."""
    gap, doubt = a.value - b.value, 1.96 * float(np.hypot(a.se, b.se))
    return "holds" if gap > doubt else "does not hold" if gap < -doubt else "not clear"


def _figure(setup: Setup, found: dict[str, list[MauveInterval]]) -> object:
    plt = pyplot()
    picture, axes = plt.subplots(figsize=(6.2, 3.8))
    line = [case for case in setup.cases if case.value is not None]
    for place, name, colour, marker in ((0, "MAUVE", "#0072B2", "o"), (1, "MAUVE*", "#D55E00", "s")):
        figures = [found[case.name][place].figure for case in line]
        axes.errorbar([case.value for case in line], [f.value for f in figures], yerr=bars(figures), color=colour,
                      marker=marker, capsize=2, label=f"D5P4+, {name}")  # fmt: skip
        alone = found[INDEPENDENT][place].figure
        axes.axhline(alone.value, color=colour, linestyle=":", label=f"independent, {name}")
        axes.axhspan(alone.low, alone.high, color=colour, alpha=0.08)
    axes.set_xscale("log")
    axes.set_xlabel("β")
    axes.set_ylabel("MAUVE against held-out text")
    axes.legend(fontsize=8)
    return picture


EXPERIMENT = Experiment(
    "fidelity", "Fidelity to real text", "Figure mauve",
    {"box": dict(BOX) | {"mauve_seeds": 5}, "paper": dict(PAPER) | {"mauve_seeds": 5}}, draw, cases,
    Digest("fidelity", _reduce), lambda setup: [reference(setup)], ("features",), needs_text=("box", "paper"),
)  # fmt: skip
