"""Compares MAUVE and MAUVE* of D5P4+, at several values of β, with MAUVE and MAUVE* of independent sampling."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np

from d5p4.errors import D5P4Error

from ..statistics import Figure
from ..tables import Table, listed, shown
from .answers import answers, numbers, numbers_of, scores
from .drawing import Claim, Drawing, decided, every, some
from .measures import STAR, Clusters, MauveSamples, common_clusters, contrasts, mauve_samples
from .open_ended import BOX, INDEPENDENT, PAPER, independent, sweep_beta
from .rows import Row, Source, check_made, complete, missing_keys
from .scoring import feature_reader, judge_dtype, pack, unpack
from .setup import Case, Digest, Experiment, Setup
from .windows import real_windows

PAPERS = {1: 0.8669, 3: 0.8811, 10: 0.9195, 30: 0.9366, 100: 0.9515, 300: 0.9474, 1000: 0.8746}  # MAUVE by β


def cases(setup: Setup) -> list[Case]:
    if len(setup["beta_fidelity"]) < 3:
        raise D5P4Error(
            f"beta_fidelity={setup['beta_fidelity']!r} has ends but no value between them; give three or more"
        )
    units = setup["units_fidelity"]
    return [independent(setup, units), *sweep_beta(setup, setup["beta_fidelity"], units)]


def real_texts(setup: Setup) -> Source:
    """Return the `Source` of real texts: as many as a case has answers, and each as long as an answer, in tokens."""
    return real_windows(setup, setup["gen_length"], setup["units_fidelity"] * setup["k"])


def reference(setup: Setup) -> Source:
    """The source of the features of the real texts."""

    def make(keys: Sequence[str]) -> dict[str, Row]:
        texts = [setup.rows(windows)[key] for key in keys]
        features = feature_reader(setup["judges"][0], setup.device, judge_dtype(setup))([row["text"] for row in texts])
        return {
            key: pack(row[None]) | {"document": text["document"]}
            for key, row, text in zip(keys, features, texts, strict=True)
        }

    windows = real_texts(setup)
    made_with = {"judge": setup["judges"][0], "length": setup["gen_length"], "model": setup.weights}
    more: dict[str, Any] = {"kept": False, "models": setup["judges"][:1]}
    source = setup.source("real", windows.keys, make, together=len(windows.keys), **more, **made_with)
    return replace(source, elsewhere=lambda key: not missing_keys(setup, numbers(setup)))


def sources(setup: Setup) -> list[Source]:
    features = reference(setup)
    return [real_texts(setup), features] if missing_keys(setup, features) else [features]


# --- clusters: what drawing needs of the features ---


def _reduce(setup: Setup, case: Case, unit: int, row: Row, scores: Mapping[str, Row]) -> Row:
    """The clusters of as many references as a set has texts, and of the set's texts; see `_clustered`."""
    labels, documents = _clustered(setup)
    inside = slice(unit * setup["k"], (unit + 1) * setup["k"])
    return {"clusters": labels[case.name][..., inside].tolist(), "documents": documents[inside]}


@lru_cache(maxsize=1)
def _clustered(setup: Setup) -> tuple[dict[str, np.ndarray], list[Any]]:
    """Return the clusters [kind, side, seed, n] of every case, and the references' documents.

    The kinds are clusters of the case alone and common clusters; the sides are references and generated texts.
    """
    scorer = f"features:{setup['judges'][0]}"
    features = {}
    for case in setup.cases:
        check_made(setup, replace(answers(setup, case), elsewhere=lambda key: False), "decode")
        scored = complete(setup, replace(scores(setup, case, scorer), elsewhere=lambda key: False), "score")
        features[case.name] = np.concatenate([unpack(row) for row in scored])
    rows = complete(setup, replace(reference(setup), elsewhere=lambda key: False))
    real = np.concatenate([unpack(row) for row in rows])
    seeds = [25 + i for i in range(setup["mauve_seeds"])]
    common = [common_clusters(real, list(features.values()), seed=seed) for seed in seeds]
    labels = {}
    for place, (name, texts) in enumerate(features.items()):
        kinds = [common_clusters(real, [texts], seed=seed)[0] for seed in seeds], [by_seed[place] for by_seed in common]
        labels[name] = np.array([[[one[side] for one in by_seed] for side in (0, 1)] for by_seed in kinds])
    return labels, [row["document"] for row in rows]


def _stored(setup: Setup, case: Case) -> tuple[list[list[Clusters]], list[Any]]:
    """For both kinds of clusters, the `Clusters` of each seed; and the documents."""
    rows = numbers_of(setup, case)
    both = np.concatenate([np.array(row["clusters"]) for row in rows], axis=3)  # [kind, side, seed, n]
    number = max(2, round(both.shape[3] / 10), int(both.max()) + 1)
    clusters = [[Clusters(p, q, number) for p, q in kind.swapaxes(0, 1)] for kind in both]
    return clusters, [document for row in rows for document in row["documents"]]


# --- drawing ---


def draw(setup: Setup) -> Drawing:
    stored = [_stored(setup, case) for case in setup.cases]
    units = np.arange(setup["units_fidelity"]).repeat(setup["k"]).tolist()
    groups = {"p_groups": stored[0][1], "q_groups": units}
    by_kind = [list(zip(*(clusters[kind] for clusters, _ in stored), strict=True)) for kind in (0, 1)]
    # MAUVE and MAUVE*: in the clusters of each case, as in the paper, and in common clusters
    own, common = ([mauve_samples(kind, smoothing=x, **groups) for x in (0, STAR)] for kind in by_kind)
    values = [
        [f._replace(low=max(0.0, f.low), high=min(1.0, f.high)) for f in contrasts(samples, np.eye(len(setup.cases)))]
        for samples in own
    ]
    pairs = [(case.name, INDEPENDENT) for case in setup.cases]
    gains = [contrasts(samples, _minus(setup, pairs)) for samples in common]
    rows = []
    for place, case in enumerate(setup.cases):
        paper = f"{PAPERS[int(case.value)]:.4f}" if case.value in PAPERS else ".8824" if case.value is None else "–"
        spread = f"{own[0].seeds[:, place].std(ddof=1):.4f}" if setup["mauve_seeds"] > 1 else "–"
        differences = [shown(kind[place], 4) if place else "–" for kind in gains]
        rows.append([case.name, *(shown(kind[place], 4) for kind in values), spread, *differences, paper])
    count, documents = len(units), len(set(stored[0][1]))
    note = (
        "MAUVE* is MAUVE with smoothed counts. "
        f"{count} generated texts are compared with {count} real texts of the same length, from "
        f"{documents} documents. The features are the states of {setup['judges'][0]} at the last token. "
        f"Values are means over {setup['mauve_seeds']} seeds of k-means; the spread of seeds is their standard "
        "deviation. MAUVE and MAUVE* use the clusters of each case, as in the paper. Differences to independent "
        "sampling use clusters that all cases share. Intervals resample sets and documents, in the same way for all "
        "cases."
    )
    columns = ["case", "MAUVE", "MAUVE*", "spread of seeds", "MAUVE minus independent's", "MAUVE* minus independent's"]
    table = Table("MAUVE against β", [*columns, "the paper's MAUVE"], rows, note)
    figures = {
        case.name: {"mauve": values[0][place], "star": values[1][place]}
        | {"mauve minus independent": gains[0][place].value, "star minus independent": gains[1][place].value}
        for place, case in enumerate(setup.cases)
    }
    limit = f"the references come from only {documents} documents; a larger sample needs more documents, too"
    claims = [claim for kind, x in zip(PAPER_SAYS, common, strict=True) for claim in _claims(setup, kind, x, limit)]
    return Drawing([table], None, figures, claims)


def _minus(setup: Setup, pairs: Sequence[tuple[str, str]]) -> np.ndarray:
    rows = dict(zip((case.name for case in setup.cases), np.eye(len(setup.cases)), strict=True))
    return np.stack([rows[a] - rows[b] for a, b in pairs])


PAPER_SAYS = {  # for each measure, the paper's values: in the middle and at the ends of the sweep, the best, the ends
    "MAUVE": (".9515 at β 100; .8669 at 1, .8746 at 1000", ".9515 against .8824", ".8669, .8746 against .8824"),
    "MAUVE*": (".9615 at β 100; .9024 at 1, .9078 at 1000", ".9615 against .9134", ".9024, .9078 against .9134"),
}


def _claims(setup: Setup, kind: str, samples: MauveSamples, limit: str) -> list[Claim]:
    peak, best_of, at_ends = PAPER_SAYS[kind]
    line = [case for case in setup.cases if case.value is not None]
    inner, ends = line[1:-1], (line[0], line[-1])

    def compared(pairs: Sequence[tuple[Case, str]], together: bool) -> list[Figure]:
        return contrasts(samples, _minus(setup, [(a.name, b) for a, b in pairs]), together)

    over_ends = compared([(case, end.name) for case in inner for end in ends], True)
    by_inner = [over_ends[2 * i : 2 * i + 2] for i in range(len(inner))]
    best = max(range(len(inner)), key=lambda i: min(f.value for f in by_inner[i]))
    names = [f"β {case.value:g}" for case in ends]
    gains = compared([(case, INDEPENDENT) for case in line], True)
    top = max(range(len(line)), key=lambda i: gains[i].value)
    losses = [-f for f in compared([(case, INDEPENDENT) for case in ends], False)]
    together = f"the intervals hold for all values of β at once, because the best β was chosen afterwards; {limit}"
    return [
        Claim(
            f"{kind} is highest at a β between the ends of the sweep",
            peak,
            f"at β {inner[best].value:g}, minus that at the ends: {listed(names, by_inner[best], 4)}",
            replace(some(every(map(decided, pair)) for pair in by_inner), chances=(1, 1)),
            together,
        ),
        Claim(
            f"The best β has a higher {kind} than independent sampling",
            best_of,
            f"at β {line[top].value:g}, minus that of independent sampling: {shown(gains[top], 4)}",
            replace(some(map(decided, gains)), chances=(1, 1)),
            together,
        ),
        Claim(
            f"With a β that is too small or too large, {kind} falls below that of independent sampling",
            at_ends,
            f"independent sampling minus the ends of the sweep: {listed(names, losses, 4)}",
            every(map(decided, losses)),
            limit,
        ),
    ]


EXPERIMENT = Experiment(
    name="fidelity",
    title="Fidelity to real text",
    paper="Figure mauve",
    settings={"box": dict(BOX) | {"mauve_seeds": 5}, "paper": dict(PAPER) | {"mauve_seeds": 5}},
    draw=draw,
    cases=cases,
    # The clusters depend on all texts at once, so other numbers of units or values of β need all sets again.
    digest=Digest("fidelity", _reduce, ("units_fidelity", "beta_fidelity", "mauve_seeds")),
    sources=sources,
    scorers=("features",),
    measured_by=("features",),
    needs_text=("box", "paper"),
)
