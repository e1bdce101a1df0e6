"""The pages of claims, made from the summaries of the drawn experiments: every claim with our result and our verdict.

docs/claims.md is the short page. The long page is written into the site when it is built.
"""

import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import fill
from typing import Any, NamedTuple

from d5p4.errors import D5P4Error
from d5p4.store import read_json, write_text

from ..tables import markdown
from . import EXPERIMENTS, experiment
from .tasks import SOURCES

Record = Mapping[str, Any]  # a claim as summary.json has it, see `drawing.Claim.record`
LEVEL = 0.05

ABOUT = """# Claims of the paper, re-measured

`python -m d5p4_lab claims` writes this page from the results in `{folder}`; do not edit it.

Our models are much smaller than the paper's, so a claim may come out otherwise at the paper's scale.
[reproduce.md](reproduce.md) says how to run everything again. Sizes of samples were committed before the samples were
decoded.

{counted}

## Summary for a reader in a hurry
*Small models* are `books`, `countdown` and random pools; the *real model* is `smol`, judged by outside models.
*Open* beside an interval without 0: the correction for many claims, or another part or judge, leaves it open.

{summary}

"""
READING = """A claim *holds* if the whole 95 % interval supports it, and *fails* (does not hold) if the whole interval
speaks against it; otherwise it is *open* (not clear). A claim with several parts holds if all parts hold, and fails if
one does. Verdicts are those after Holm's correction for testing {tested} claims at once. A verdict without an interval,
from an exact count or one run, has a star. Two judges of perplexity must agree. {more}
"""
TERMS = """## How to read the tables
* **the paper** is what the paper reports. "Not measured" marks a claim of the paper that we also test in a way in which
  the paper did not test it.
* **ours** is our figure with its 95 % interval. **n** is the number of independent units behind it: sets of texts,
  prompts, puzzles, pools, batches or timings. For a difference of two samples, n is the size of the smaller one. Parts
  of a claim may have different sizes.
* **verdict.** {reading}  A claim about the best parameter value holds if it holds for one value.
* **corrected** is the verdict after Holm's correction: the chance that even one of the decided verdicts in this column
  is wrong by bad luck is at most 5 %. The p-value of a verdict says how far its intervals are from changing it: they
  could be s times as wide, and p is the chance that a normal variable (for up to 30 units, Student's t) is more than s
  times its 95 % point from its mean. Where one of several parts could have decided a claim alone, the p-value is
  multiplied by their number. "no interval" marks exact counts and single measurements, which are not corrected.
* **smol** is what the real model says, in the orders confidence and left.

## Names and measures
* **Methods.** *D5P4+* (also *D5P4*) has the additive kernel and *D5P4×* the multiplicative one; β is the weight of
  diversity. *D5P4^P* guides only the first half of the steps. *D5P3* has no partition. *Diverse beam search* (the
  paper's DivBS) has the weight α, and *greedy beam search* (GBS) has none. *CAT (scores)* draws candidates by a softmax
  of their scores, and *CAT (tokens)* is greedy beam search at a higher token temperature, which is what the paper
  sweeps. *Best of n* chooses k of k·w independent answers: by perplexity, or by the model's own score ("internal").
  *E-SMC* resamples particles. *The tree* is ours ([tree.md](tree.md)). T is the temperature of tokens.
* **Rows.** A pool has k groups of w rows (k×w). The paper counts all k·w rows per step (*nominal* rows); our code runs
  equal rows once, and *rows* without this word are the rows that were run.
* **Fronts.** A *front* has the best trade-offs of a method between perplexity and cosine, over all values of its
  parameter. It is better if the *area* that it dominates is larger (in log perplexity times cosine).
* **Diversity.** *Cosine* and *S-COS* are the mean cosine of two texts of a set under a sentence encoder, and *S-BLEU*
  (self-BLEU) measures common phrases: lower is more diverse. *D1-3* is the share of different n-grams (n = 1, 2, 3),
  and *EAD* corrects the share of different words for length: higher is more diverse.
* **Accuracy.** *F1* is the overlap of words with the reference, as a mean over the answers to a prompt. *F1@k* is the
  best of k answers. *R-COS* is the cosine of the nearest answer to the reference. *pass@n* is the share of problems
  that one of n answers solves; a method *covers* the problems that one of its answers solves. *Points* are percentage
  points, and *points in favour* are positive if they support the claim.
* **Other words.** `MAUVE*` is MAUVE with smoothed counts. *g* is the strength of guidance; 1 is none. The three orders
  of `math` are *confidence*, *tempered* and *tempered argmax* (with temperature 0 for tokens). log det S measures the
  diversity of a set of rows, and log det L its diversity and quality.

"""


class Line(NamedTuple):
    """A line of the summary. Lines are chosen by their importance, not by the outcome."""

    experiment: str
    claim: str  # the beginning of the claim; exactly one claim of the experiment begins so
    says: str  # what the paper says, in few words
    figure: str  # a template: {ours} is our result, {last} its last part, {0} the first figure
    digits: int = 1  # after the point of these figures


ONE, TWO = (
    "D5P4+ beats independent sampling in perplexity and in cosine at once",
    "Cosine falls with the logarithm of β",
)
EVERY = "D5P4's answers differ more than independent answers at every strength of guidance (S-COS)"
SUMMARY = (
    Line("pareto", ONE, "better than independent sampling in quality and difference", "{last}"),
    Line(
        "pareto", "The front of D5P4+ is better than that of diverse beam", "a better front than DivBS", "area {0}", 4
    ),
    Line("fidelity", "The best β has a higher MAUVE than indep", "nearer to real text at the best β (MAUVE)", "{last}"),
    Line("control", TWO, "β steers the difference", "correlation {ours}"),
    Line("qa", "D5P4's answers differ more than those of diverse", "answers differ more than DivBS's", "S-BLEU {0}"),
    Line(
        "qa",
        "D5P4's best answer is nearer to the reference than that of ind",
        "better best answer than sampling",
        "{0}",
    ),
    Line("guidance", EVERY, "differs more than sampling at every guidance", "S-COS {0} at g = 1"),
    Line("math", "D5P4 covers more problems than independent", "more problems than independent sampling", "pass@4 {0}"),
    Line("math", "D5P4 covers more problems than best of n by the", "more problems than best of n", "pass@4 {0}"),
    Line("partition", "The partition prevents the collapse", "the partition prevents collapse", "cosine {0}", 3),
    Line("quality-signal", "Entropy is a better", "entropy tells quality better than self-certainty", "{0}", 2),
    Line(
        "scaling", "Solver quality: of the paper's methods, D5P4 has", "the best sets of all solvers", "log det {0}", 3
    ),
)
REAL = {"confidence": "smol", "left": "smol-left"}  # the folders beside that of the small models, by order
SHOWN = {"holds": "holds", "does not hold": "**fails**", "not clear": "open", "not measured": "–"}
SHORT = {  # the paper's names of methods
    "best of n by the model's own score": "BN-I",
    "best of n by perplexity": "BN-P",
    "diverse beam search": "DivBS",
    "greedy beam search": "GBS",
    "independent sampling": "sampling",
    "independent answers": "sampling",
}


Row = tuple[str, Record, str]  # the name of an experiment, a claim, and its verdict after the correction
Real = dict[tuple[str, str], list[list[tuple[Record, str]]]]
"""By experiment and claim: per order, the claims of smol (one per task) with their verdicts."""


def write_claims(folder: Path, page: Path) -> str:
    write_text(page, short_page(folder, page))
    return f"{page}: {_headline(_read(folder)[1])}"


def short_page(folder: Path, page: Path) -> str:
    """Return the short page, as it would stand at `page`: headline, summary, and the verdict on every claim."""
    drawn, rows = _read(folder)
    real, more = _real(folder), "The site (`make docs`) has figures,\nintervals, sample sizes and commands."
    parts = [_about(folder, page, rows, real), "## All claims\n", READING.format(tested=_tested(rows), more=more)]
    parts.append(
        "\nThe paper's names: " + "; ".join(f"{name} is {long}" for long, name in list(SHORT.items())[:4]) + ".\n"
    )
    for name, summary in drawn.items():
        with_real = any(key[0] == name for key in real)
        lines = [
            [_shortened(claim["claim"]), _verdict(claim, after)]
            + [_by_order(real.get((name, claim["claim"])))] * with_real
            for other, claim, after in rows
            if other == name
        ]
        columns = ("claim", "verdict", *(["smol: confidence; left"] * with_real))
        note = "" if with_real or "smol" not in experiment(name).settings else " smol: not measured."
        parts += [f"\n### {name}\n{summary['title']}.{note}\n\n", markdown(columns, lines), "\n"]
    return "".join(parts)


def full_page(folder: Path, page: Path) -> str:
    """Return the long page, as it would stand at `page`: every claim with its figures, intervals and sample size."""
    drawn, rows = _read(folder)
    where, real = _relative(folder, page.parent), _real(folder)
    reading = READING.format(tested=_tested(rows), more="").strip().replace("\n", "\n  ")
    parts = [_about(folder, page, rows, real), TERMS.format(reading=reading)]
    for name, summary in drawn.items():
        parts.append(f"## {name}\n{summary['title']}. In the paper: {summary['paper']}. {summary['made']} ")
        parts.append(f"The results are in a [table]({where}/{name}/table.md) and, with all digits, in ")
        parts.append(f"[summary.json]({where}/{name}/summary.json).\n\n")
        if (folder / name / "figure.png").exists():
            parts.append(f"![{summary['title']}]({where}/{name}/figure.png)\n\n")
        lines = [_cells(row, real.get((name, row[1]["claim"]))) for row in rows if row[0] == name]
        parts += [markdown(COLUMNS, lines), "\n\n"]
    return "".join(parts).rstrip() + "\n"


def _read(folder: Path) -> tuple[dict[str, Any], list[Row]]:
    """Return the summaries of the drawn experiments, by name, and the rows of all their claims."""
    summaries = {name: read_json(folder / name / "summary.json") for name in EXPERIMENTS}
    drawn = {name: summary for name, summary in summaries.items() if summary is not None}
    if not drawn:
        raise D5P4Error(f"{folder} contains no drawn experiment; run python -m d5p4_lab reproduce all first")
    claims = [(name, claim) for name, summary in drawn.items() for claim in summary["claims"]]
    corrected = _corrected([claim for _, claim in claims])
    return drawn, [(name, claim, after) for (name, claim), after in zip(claims, corrected, strict=True)]


def _real(folder: Path) -> Real:
    """Return what smol says about claims. A task's name in brackets at the end of its claim does not count."""
    real_claims: Real = {}
    for order, name in enumerate(REAL.values()):
        if any((folder.parent / name).glob("*/summary.json")):
            for where, claim, after in _read(folder.parent / name)[1]:
                key = where, re.sub(rf" \((?:{'|'.join(SOURCES)})\)$", "", claim["claim"])
                real_claims.setdefault(key, [[] for _ in REAL])[order].append((claim, after))
    return real_claims


def _by_order(real_claims: Sequence[Sequence[tuple[Record, str]]] | None) -> str:
    """Return the verdicts of smol: those of several tasks with slashes, those of the two orders with a semicolon."""
    orders = ["/".join(_verdict(claim, after) for claim, after in own) or "–" for own in real_claims or ()]
    return "; ".join(orders) or "–"


def _about(folder: Path, page: Path, rows: Sequence[Row], real: Real) -> str:
    summary = markdown(("the paper says", "small models", "real model"), [_line(line, rows, real) for line in SUMMARY])
    return ABOUT.format(
        folder=_relative(folder, page.parent.parent), counted=fill(_headline(rows), 118), summary=summary
    )


def _headline(rows: Sequence[Row]) -> str:
    theirs = [row for row in rows if not row[1]["claim"].startswith("Ours")]
    ours = [row for row in rows if row[1]["claim"].startswith("Ours")]
    return f"The paper's {len(theirs)} claims: {_counted(theirs)}. Our own {len(ours)} claims: {_counted(ours)}."


def _counted(rows: Sequence[Row]) -> str:
    counts = Counter(after for *_, after in rows)
    words = {"holds": "holds", "does not hold": "fails", "not clear": "open"}
    words |= {verdict: verdict for verdict in ("no interval", "not measured")}
    return ", ".join(f"{word} {counts[verdict]}" for verdict, word in words.items() if counts[verdict])


def _tested(rows: Sequence[Row]) -> int:
    return sum(claim["p"] is not None for _, claim, _ in rows)


def _verdict(claim: Record, corrected: str) -> str:
    return f"{SHOWN[claim['verdict']]}\\*" if corrected == "no interval" else SHOWN[corrected]


def _shortened(claim: str) -> str:
    for long, name in SHORT.items():
        claim = re.sub(long, name, claim, flags=re.IGNORECASE)
    return claim


COLUMNS = ("claim", "the paper", "ours", "n", "verdict", "corrected", "smol")


def _cells(row: Row, real_claims: Sequence[Sequence[tuple[Record, str]]] | None) -> list[str]:
    _, claim, corrected = row
    sizes = [n for n in claim["n"] if n]
    shown = [f"{n:,}" for n in (sizes if len(sizes) < 3 else (sizes[0], sizes[-1]))]
    size = (" and " if len(sizes) < 3 else " to ").join(shown) or "–"
    ours = claim["ours"] + (f" ({claim['note']})" if claim["note"] else "")
    per_order = zip(REAL, real_claims or (), strict=False)
    real_lines = [f"{order}: {one['ours']} ({after})" for order, own in per_order for one, after in own]
    real = "; ".join(real_lines) or "not measured"
    return [claim["claim"], claim["paper"], ours, size, f"**{claim['verdict']}**", corrected, real]


def _corrected(claims: Sequence[Record]) -> list[str]:
    tested = sorted((claim["p"], place) for place, claim in enumerate(claims) if claim["p"] is not None)
    verdicts = ["no interval" if claim["p"] is None else "not clear" for claim in claims]
    for rank, (p, place) in enumerate(tested):
        if p * (len(tested) - rank) > LEVEL:
            break  # a claim can pass only if all claims with smaller p-values pass
        verdicts[place] = claims[place]["verdict"]
    return [
        claim["verdict"] if claim["verdict"] == "not measured" else verdict
        for claim, verdict in zip(claims, verdicts, strict=True)
    ]


def _line(line: Line, rows: Sequence[Row], real: Real) -> list[str]:
    """A line of the summary. It says so if the results do not have its claim."""
    such = [row for row in rows if row[0] == line.experiment and row[1]["claim"].startswith(line.claim)]
    if len(such) != 1:
        return [line.claim, MISSING, f"`reproduce {line.experiment}` has {len(such)} such claims"]
    ((name, claim, corrected),) = such

    def said(one: Record, after: str) -> str:
        figures = [_figure(figure, line.digits) for figure in one["figures"]]
        texts = {"ours": one["ours"], "last": one["ours"].rpartition(": ")[2]}
        return f"{_verdict(one, after)}: {line.figure.format(*figures, **texts)}" if figures else "not measured"

    real_claims = zip(REAL, real.get((name, claim["claim"]), ()), strict=False)
    parts = [f"{order}: {said(*own[0])}" for order, own in real_claims if own]
    return [f"[{line.says}](#{name})", said(claim, corrected), "; ".join(parts) or "not measured"]


MISSING = "**missing**"  # marks lines of the summary whose claim was not real_claims


def _figure(figure: Sequence[float | None], digits: int) -> str:
    value, low, high = ("?" if x is None else f"{x:.{digits}f}" for x in figure)
    return f"{value} [{low}, {high}]"


def _relative(folder: Path, start: Path) -> str:
    return Path(os.path.relpath(folder, start)).as_posix()
