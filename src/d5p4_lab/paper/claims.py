"""The pages of claims, made from the summaries of the drawn experiments: every claim with our result and our verdict.

docs/claims.md is the short page. The long page is written into the site when it is built.
"""

import math
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import fill
from typing import Any, NamedTuple

from d5p4.errors import D5P4Error
from d5p4.store import read_json, write_text

from ..tables import markdown
from . import EXPERIMENTS

Record = Mapping[str, Any]  # a claim as summary.json has it, see `drawing.Claim.record`
LEVEL = 0.05
MOST = 100  # a claim that needs more than this many times the sample gets a bound of the effect instead

ABOUT = """# Claims of the paper, re-measured

`python -m d5p4_lab claims` writes this page from the results in `{folder}`; do not edit it.

Our models are about a thousand times smaller than the paper's. A claim that does not hold here may hold at the paper's
scale, and a claim that holds here may not hold there. [reproduce.md](reproduce.md) explains how to run the experiments
again, at our scale or at the paper's. Sample sizes were committed before the samples were decoded. A first run, on 16
November 2026, left close comparisons open, so larger samples for them were fixed and decoded on 18 November.

## In short
{counted}

{summary}

"""
READING = """A claim *holds* if the whole 95 % interval supports it, and *does not hold* if the whole interval speaks
against it; otherwise the verdict is *not clear*. A claim with several parts holds if all parts hold, and does not hold
if one does not. A verdict that Holm's correction for testing {tested} claims at once changes has the new one in
brackets. Perplexity has two judges: `judge`, a small model that is no longer shipped, and `smollm2`, SmolLM2-135M
quantised to 4 bits. If they disagree about a claim, the verdict is *not clear*. {more}
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
* **it would take** is, for claims that are not clear, the sample size at which the interval around today's value would
  decide, and whether it would then speak for or against the claim. Intervals become narrower as 1/√n.
* **command** is short for `python -m d5p4_lab reproduce NAME`.

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
    figure: str  # a template: {ours} is our result, {0} the first figure of the verdict with its interval, and so on
    digits: int = 1  # after the point of these figures


PASSED = "difference of pass@4: {0} points (confidence order)"
SUMMARY = (
    Line("pareto", "D5P4+ beats independent sampling in perplexity and in cosine at once", "{ours}"),
    Line(
        "pareto",
        "The front of D5P4+ is better than that of diverse beam",
        "difference of the areas that they dominate: {0} (under `judge`)",
        4,
    ),
    Line("fidelity", "The best β has a higher MAUVE than independent sampling", "{ours}"),
    Line("control", "Cosine falls with the logarithm of β", "correlation {ours}"),
    Line("qa", "D5P4's answers differ more than those of diverse beam search", "S-BLEU, how much lower: {0} points"),
    Line(
        "guidance",
        "D5P4's answers differ more than independent answers at every strength of guidance",
        "S-COS, how much lower: {0} points at g = 1",
    ),
    Line("math", "D5P4 covers more problems than independent sampling", PASSED),
    Line("math", "D5P4 covers more problems than diverse beam search", PASSED),
    Line("partition", "The partition prevents the collapse", "cosine, how much lower: {0} at the smallest β", 3),
    Line(
        "quality-signal",
        "Entropy is a better signal of quality than self-certainty",
        "by how much its correlation is stronger: {0}",
        2,
    ),
    Line("cost", "D5P4 takes less time after the forward", "{ours}"),
)


Row = tuple[str, Record, str]  # the name of an experiment, a claim, and its verdict after the correction


def write_claims(folder: Path, page: Path) -> str:
    write_text(page, short_page(folder, page))
    return f"{page}: {_headline(_read(folder)[1])}"


def short_page(folder: Path, page: Path) -> str:
    """Return the short page, as it would stand at `page`: headline, summary, and the verdict on every claim."""
    drawn, rows = _read(folder)
    more = "The site (`make docs`) has the figures,\nintervals and sample sizes."
    parts = [_about(folder, page, rows), "## All claims\n", READING.format(tested=_tested(rows), more=more)]
    for name, summary in drawn.items():
        lines = [(claim["claim"], _verdict(claim, after)) for other, claim, after in rows if other == name]
        parts.append(f"\n### {name}\n{summary['title']} ({summary['paper']}).\n\n")
        parts += [markdown(("claim", "verdict"), lines), "\n"]
    return "".join(parts)


def full_page(folder: Path, page: Path) -> str:
    """Return the long page, as it would stand at `page`: every claim with its figures, intervals and sample size."""
    drawn, rows = _read(folder)
    where = _relative(folder, page.parent)
    reading = READING.format(tested=_tested(rows), more="").strip().replace("\n", "\n  ")
    parts = [_about(folder, page, rows), TERMS.format(reading=reading)]
    for name, summary in drawn.items():
        parts.append(f"## {name}\n{summary['title']}. In the paper: {summary['paper']}. {summary['made']} ")
        parts.append(f"The results are in a [table]({where}/{name}/table.md) and, with all digits, in ")
        parts.append(f"[summary.json]({where}/{name}/summary.json).\n\n")
        if (folder / name / "figure.png").exists():
            parts.append(f"![{summary['title']}]({where}/{name}/figure.png)\n\n")
        parts += [markdown(COLUMNS, [_cells(row) for row in rows if row[0] == name]), "\n\n"]
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


def _about(folder: Path, page: Path, rows: Sequence[Row]) -> str:
    summary = markdown(("claim", "verdict", "our figure"), [_line(line, rows) for line in SUMMARY])
    return ABOUT.format(
        folder=_relative(folder, page.parent.parent), counted=fill(_headline(rows), 118), summary=summary
    )


def _headline(rows: Sequence[Row]) -> str:
    theirs = [row for row in rows if not row[1]["claim"].startswith("Ours")]
    ours = [row for row in rows if row[1]["claim"].startswith("Ours")]
    return (
        f"Of the paper's {len(theirs)} claims, {_counted(theirs)}. Of our own {len(ours)} claims, {_counted(ours)}. "
        f"After Holm's correction for testing {_tested(rows)} claims at once: {_counted(theirs, 2)} of the paper's; "
        f"{_counted(ours, 2)} of ours."
    )


def _tested(rows: Sequence[Row]) -> int:
    return sum(claim["p"] is not None for _, claim, _ in rows)


def _verdict(claim: Record, corrected: str) -> str:
    changed = corrected not in (claim["verdict"], "no interval")
    return f"**{claim['verdict']}**" + (f" ({corrected})" if changed else "")


COLUMNS = ("claim", "the paper", "ours", "n", "verdict", "corrected", "it would take")


def _cells(row: Row) -> list[str]:
    _, claim, corrected = row
    sizes = [n for n in claim["n"] if n]
    shown = [f"{n:,}" for n in (sizes if len(sizes) < 3 else (sizes[0], sizes[-1]))]
    size = (" and " if len(sizes) < 3 else " to ").join(shown) or "–"
    ours = claim["ours"] + (f" ({claim['note']})" if claim["note"] else "")
    return [claim["claim"], claim["paper"], ours, size, f"**{claim['verdict']}**", corrected, _needed(claim)]


def _needed(claim: Record) -> str:
    if claim["verdict"] != "not clear" or not claim["figures"]:
        return "–"
    if any(end is None for figure in claim["figures"] for end in figure):
        return "an interval for every part"
    if not claim["factor"]:
        return "no sample size: judges or parts point in different directions"
    times = 1 / claim["factor"] ** 2
    if times > MOST:
        where = " in the part that is hardest to decide" if len(claim["figures"]) > 1 else ""
        return f"more than {MOST} times this sample; the effect, if any, is smaller than {claim['reach']:.2g}{where}"
    sizes = [f"{_rounded_up(times * n):,}" for n in claim["n"] if n]
    sample = f"{times:.1f} times this sample" + (f", n = {' and '.join(sizes)}" if 0 < len(sizes) < 3 else "")
    return f"{sample}; then it would speak {claim['leans']} the claim"


def _rounded_up(number: float) -> int:
    unit = 10 ** max(0, math.floor(math.log10(number)) - 1)
    return math.ceil(number / unit) * unit


def _corrected(claims: Sequence[Record]) -> list[str]:
    tested = sorted((claim["p"], place) for place, claim in enumerate(claims) if claim["p"] is not None)
    verdicts = ["no interval" if claim["p"] is None else "not clear" for claim in claims]
    for rank, (p, place) in enumerate(tested):
        if p * (len(tested) - rank) > LEVEL:
            break  # a claim can pass only if all claims with smaller p-values pass
        verdicts[place] = claims[place]["verdict"]
    return [
        claim["verdict"] if claim["verdict"] == "not testable at this scale" else verdict
        for claim, verdict in zip(claims, verdicts, strict=True)
    ]


def _line(line: Line, rows: Sequence[Row]) -> list[str]:
    """A line of the summary. It says so if the results do not have its claim."""
    such = [row for row in rows if row[0] == line.experiment and row[1]["claim"].startswith(line.claim)]
    if len(such) != 1:
        return [line.claim, MISSING, f"`reproduce {line.experiment}` has {len(such)} such claims"]
    ((name, claim, corrected),) = such
    figures = [_figure(figure, line.digits) for figure in claim["figures"]]
    text = line.figure.format(*figures, ours=claim["ours"])
    return [f"[{claim['claim']}](#{name})", _verdict(claim, corrected), text]


MISSING = "**missing**"  # marks lines of the summary whose claim was not found


def _figure(figure: Sequence[float | None], digits: int) -> str:
    value, low, high = ("?" if x is None else f"{x:.{digits}f}" for x in figure)
    return f"{value} [{low}, {high}]"


PLURALS = {
    "holds": "hold",
    "does not hold": "do not hold",
    "not clear": "are not clear",
    "no interval": "have no interval",
    "not testable at this scale": "cannot be tested at this scale",
}


def _counted(rows: Sequence[Row], column: int = 1) -> str:
    """Count the verdicts of rows or, with column 2, the verdicts after the correction."""
    counts = Counter(row[1]["verdict"] if column == 1 else row[2] for row in rows)
    return ", ".join(f"{counts[verdict]} {words}" for verdict, words in PLURALS.items() if counts[verdict]) or "none"


def _relative(folder: Path, start: Path) -> str:
    return Path(os.path.relpath(folder, start)).as_posix()
