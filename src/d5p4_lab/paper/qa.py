"""Answers to prompts with references: search against best-of-n, the paper's full set of metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from d5p4.eval.groups import Group
from d5p4.eval.lexical import distinct, f1, self_bleu
from d5p4.eval.report import Report, report
from d5p4.eval.stats import Figure, figure, paired_difference

from .continuation import BOX, PAPER, POOL, best_by, best_internal, best_perplexity, chosen, first, pool, search
from .drawing import STYLES, Claim, Drawing, Table, agreed, bars, decided, every, pyplot, shown
from .plane import perplexity
from .scoring import Row
from .setup import Case, Experiment, Setup

REPEATED = (
    "Repeated: triples of words that came before in the same answer. In confidence order a small model repeats itself, "
    "and a judge likes that: low perplexity is no proof of quality here."
)


def cases(setup: Setup) -> list[Case]:
    guidance = setup["guidance"]
    return [
        pool(setup, guidance),
        search(setup, "greedy beam", {"method": "greedy-beam"}, guidance),
        search(setup, "diverse beam", {"method": "diverse-beam", "alpha": setup["alpha"]}, guidance),
        search(setup, "D5P4+", {"method": "d5p4", "beta": setup["beta"]}, guidance),
        search(setup, "D5P4^P", {"method": "d5p4-p", "beta": setup["beta"]}, guidance),
    ]


def _nearness(text: str, row: Row) -> float:
    return f1(text, row["references"])


def ways(setup: Setup) -> dict[str, list[Row]]:
    """The k answers of each method to every prompt, with all that was scored of them: rows by method."""
    by_group = {case.group: case for case in setup.cases}
    source = by_group[POOL]
    found = {
        "k independent": chosen(setup, source, first),
        "best of n, perplexity": chosen(setup, source, best_perplexity),
        "best of n, internal": chosen(setup, source, best_internal),
    }
    found |= {name: chosen(setup, case, None) for name, case in by_group.items() if name != POOL}
    return found | {"best of n, F1 oracle": chosen(setup, source, best_by(_nearness))}


def values(rows: Sequence[Row], judges: Sequence[str]) -> dict[str, np.ndarray]:
    """[n] of each metric that is a mean over prompts."""
    found = {f"nats {judge}": np.array([np.mean(row["nats"][judge]) for row in rows]) for judge in judges}
    each = [[f1(text, row["references"]) for text in row["texts"]] for row in rows]
    found |= {"F1": np.array([np.mean(x) for x in each]), "F1@k": np.array([max(x) for x in each])}
    found["S-BLEU"] = np.array([self_bleu(row["texts"]) for row in rows])
    found["S-COS"] = np.array([row["S-COS"] for row in rows])
    found["D1-3"] = np.array([np.mean([distinct(row["texts"], n) for n in (1, 2, 3)]) for row in rows])
    found["repeated"] = np.array([np.mean([_repeated(text) for text in row["texts"]]) for row in rows])
    found["R-COS"] = np.array([max(row["reference"]) for row in rows])
    return found


def _repeated(text: str) -> float:
    """The share of a text's triples of words that came before in it."""
    words = text.split()
    triples = list(zip(words, words[1:], words[2:], strict=False))
    return 1 - len(set(triples)) / len(triples) if triples else 0.0


def full_report(rows: Sequence[Row]) -> Report:
    return report([Group(row["prompt"], row["texts"], row["references"], str(i)) for i, row in enumerate(rows)])


def draw(setup: Setup) -> Drawing:
    found = ways(setup)
    judges = setup["judges"]
    measured = {name: values(rows, judges) for name, rows in found.items()}
    reports = {name: full_report(rows) for name, rows in found.items()}
    k = setup["k"]
    rows = []
    figures: dict[str, Mapping[str, Any]] = {}
    for name in found:
        m, r = measured[name], reports[name]
        cells = {f"PPL, {judge}": (perplexity(m[f"nats {judge}"]), 1) for judge in judges}
        cells |= {"entropy": (r["entropy"], 3), "F1": (r["F1"], 2), f"F1@{k}": (r[f"F1@{k}"], 2)}
        cells |= {"BLEU": (r["BLEU"], 2), f"BLEU@{k}": (r[f"BLEU@{k}"], 2)}
        cells |= {"R-COS": (figure(100 * m["R-COS"]), 2)}
        cells |= {metric: (r[metric], 2) for metric in ("D1", "D2", "D3", "D1-3", "EAD", "S-BLEU")}
        cells |= {metric: (figure(100 * m[metric]), 2) for metric in ("S-COS", "repeated")}
        figures[name] = {metric: value for metric, (value, _) in cells.items()}
        rows.append([name, *(shown(value, digits) for value, digits in cells.values())])
    note = (
        f"{len(found['D5P4+'])} prompts, k = {k}, w = {setup['w']}, guidance {setup['guidance']:g}; all but perplexity "
        f"and entropy (nats) in %. Best-of-n takes {k} of {k * setup['w']} independent answers. The perplexity of "
        f"best of n is that of {judges[0]}, which also judges it; internal is the model's own score of an answer "
        f"(`Result.score`). {REPEATED}"
    )
    table = Table("Every metric", ["method", *next(iter(figures.values()))], rows, note)
    return Drawing([table], _figure(setup, figures), {"metrics": figures}, _claims(setup, measured))


def _claims(setup: Setup, measured: dict[str, dict[str, np.ndarray]]) -> list[Claim]:
    def less(metric: str, a: str, b: str) -> Figure:
        """How much lower a is than b."""
        return paired_difference(measured[b][metric], measured[a][metric])

    claims = []
    for rival, paper in (("best of n, perplexity", "46.27, 96.40"), ("best of n, internal", "45.57, 96.12")):
        pair = [less("S-BLEU", "D5P4+", rival), less("S-COS", "D5P4+", rival)]
        claims.append(Claim(
            f"Search with D5P4 gives more different answers than {rival}, at equal nominal rows",
            f"S-BLEU 39.00, S-COS 95.16 against {paper}",
            f"S-BLEU lower by {shown(pair[0])}, S-COS by {shown(pair[1], 2, 100)}", every([decided(d) for d in pair]),
        ))  # fmt: skip
    pair = [less("S-BLEU", "D5P4+", "diverse beam"), less("S-COS", "D5P4+", "diverse beam")]
    claims.append(Claim(
        "D5P4's answers differ more than those of diverse beam search",
        "S-BLEU 39.00 against 40.74, S-COS 95.16 against 95.36",
        f"S-BLEU lower by {shown(pair[0])}, S-COS by {shown(pair[1], 2, 100)}", every([decided(d) for d in pair]),
    ))  # fmt: skip
    for rival, paper in (("diverse beam", "22.71 against 22.55"), ("k independent", "22.71 against 20.74")):
        gain = less("F1@k", rival, "D5P4+")
        claims.append(Claim(f"D5P4's best answer is nearer to the reference than that of {rival} (F1@k)", paper,
                            f"higher by {shown(gain, 2, 100)} points", decided(gain)))  # fmt: skip
    kept = [less(f"nats {judge}", "D5P4+", "k independent") for judge in setup["judges"]]
    claims.append(Claim(
        "D5P4 keeps or lowers the perplexity of independent sampling", "6.40 against 6.46",
        "log perplexity lower by " + "; ".join(f"{judge} {shown(d, 3)}" for judge, d in
                                               zip(setup["judges"], kept, strict=True)),
        agreed([decided(d) for d in kept]),
        "repetition lowers perplexity too, and D5P4's answers repeat themselves more by "
        f"{shown(less('repeated', 'k independent', 'D5P4+'), 2, 100)} points of triples",
    ))  # fmt: skip
    lexical = less("D1-3", "k independent", "D5P4+")
    claims.append(Claim("D5P4's answers have more different n-grams than independent ones (D1-3)",
                        "57.54 against 55.41", f"higher by {shown(lexical, 2, 100)} points",
                        decided(lexical)))  # fmt: skip
    gain = less("F1", "D5P4+", "D5P4^P")
    claims.append(Claim("Guidance in the first half only (D5P4^P) raises accuracy (F1)", "20.71 against 19.02",
                        f"higher by {shown(gain, 2, 100)} points", decided(gain)))  # fmt: skip
    best = less("F1@k", "D5P4+", "D5P4^P")
    claims.append(Claim("D5P4^P also raises the best answer's F1", "24.84 against 22.71",
                        f"higher by {shown(best, 2, 100)} points", decided(best)))  # fmt: skip
    return claims


def _figure(setup: Setup, figures: dict[str, Mapping[str, Any]]) -> object:
    plt = pyplot()
    shown_metrics = (f"F1@{setup['k']}", "S-BLEU", "S-COS", f"PPL, {setup['judges'][-1]}")
    better = ("higher", "lower", "lower", "lower")
    picture, axes = plt.subplots(1, 4, figsize=(11, 3.2), sharey=True)
    names = list(figures)
    for axis, metric, way in zip(axes, shown_metrics, better, strict=True):
        for row, name in enumerate(names):
            f = figures[name][metric]
            style = STYLES.get(name, STYLES["independent" if name == "k independent" else "best of n"])
            axis.errorbar(f.value, row, xerr=bars([f]), color=style["color"], marker=style["marker"],
                          markeredgecolor="black", markeredgewidth=0.4)  # fmt: skip
        axis.set_xlabel(f"{metric} ({way}: better)")
    axes[0].set_yticks(range(len(names)), names)
    axes[0].invert_yaxis()
    return picture


EXPERIMENT = Experiment(
    "qa", "Answers to prompts with references", "QA tables (figures quoted: TruthfulQA)", {"box": BOX, "paper": PAPER},
    draw, cases, scorers=("ppl", "cos"), needs_text=("box",),
)  # fmt: skip
