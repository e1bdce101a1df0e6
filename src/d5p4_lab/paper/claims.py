"""Writes docs/claims.md from the summaries of the drawn experiments: every claim of the paper, with our result."""

from __future__ import annotations

import os
from pathlib import Path

from d5p4.errors import D5P4Error
from d5p4.store import read_json, write_text

from . import EXPERIMENTS
from .drawing import cell

HEAD = """# Claims of the paper, re-measured

`python -m d5p4_lab reproduce claims` writes this page from `{folder}`; do not edit it.

Each row of the table shows a claim of the D5P4 paper, the paper's figure, our figure with its 95 % interval, and our
verdict. The verdict depends on the interval alone. A claim *holds* if the whole interval supports it, and *does not
hold* if the whole interval speaks against it. Otherwise the verdict is *not clear*. Two judges measure perplexity: the
judge of this repository, and SmolLM2-135M quantised to 4 bits. If the two judges disagree about a claim, the verdict is
*not clear*. A claim with several parts holds if all parts hold, and does not hold if one part does not hold. The
intervals are not corrected for the number of comparisons.

Our models are the small models of this repository. They are about a thousand times smaller than the paper's models. A
claim that does not hold here may hold at the paper's scale, and a claim that holds here may not hold there.
[reproduce.md](reproduce.md) explains how to run the experiments again, at our scale or at the paper's.

"""


def write_claims(folder: Path, page: Path) -> str:
    """Write the page of claims, and return one line that counts the verdicts."""
    summaries = {name: read_json(folder / name / "summary.json") for name in EXPERIMENTS}
    drawn = [(name, summary) for name, summary in summaries.items() if summary is not None]
    if not drawn:
        raise D5P4Error(f"{folder} contains no drawn experiment; run python -m d5p4_lab reproduce all first")
    verdicts: dict[str, int] = {}
    parts = [HEAD.format(folder=folder.as_posix())]
    table = ["| claim | the paper | ours | verdict | from |", "|---|---|---|---|---|"]
    for name, summary in drawn:
        for claim in summary["claims"]:
            verdicts[claim["verdict"]] = verdicts.get(claim["verdict"], 0) + 1
            note = f" ({claim['note']})" if claim["note"] else ""
            cells = (claim["claim"], claim["paper"], claim["ours"] + note, f"**{claim['verdict']}**")
            table.append(f"| {' | '.join(map(cell, cells))} | [{name}](#{name}) |")
    counted = ", ".join(f"{count} {verdict}" for verdict, count in sorted(verdicts.items(), key=lambda item: -item[1]))
    parts += [f"Verdicts on {sum(verdicts.values())} claims: {counted}.\n\n", "\n".join(table), "\n"]
    for name, summary in drawn:
        where = _relative(folder, page)
        parts.append(f"\n## {name}\n{summary['title']}. In the paper: {summary['paper']}. {summary['made']} ")
        parts.append(f"The results are in a [table]({where}/{name}/table.md) and, with all digits, in ")
        parts.append(f"[summary.json]({where}/{name}/summary.json).\n")
        if (folder / name / "figure.png").exists():
            parts.append(f"\n![{summary['title']}]({where}/{name}/figure.png)\n")
    write_text(page, "".join(parts))
    return f"{page}: {counted}"


def _relative(folder: Path, page: Path) -> str:
    return Path(os.path.relpath(folder, page.parent)).as_posix()
