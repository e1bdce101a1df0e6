"""Writes docs/claims.md from the summaries that `draw` wrote: every claim of the paper beside our result."""

from __future__ import annotations

import os
from pathlib import Path

from d5p4.errors import D5P4Error
from d5p4.store import read_json, write_text

from . import EXPERIMENTS
from .drawing import cell

HEAD = """# Claims of the paper, re-measured

`python -m d5p4_lab reproduce claims` writes this page from `{folder}`; do not edit it.

Each line shows a claim of the D5P4 paper, the figure given there, our figure with its 95 % interval, and a verdict.
The verdict depends on the interval alone: *holds* or *does not hold* if the interval lies wholly on one side, otherwise
*not clear*. Two judges measure perplexity (the shipped one, and SmolLM2-135M quantised to 4 bits); if their verdicts
differ, the verdict is *not clear*. A claim with several parts holds if all parts hold, and fails if one part surely
fails. Intervals are not corrected for the number of comparisons.

The models are the small ones of this repository, a thousandth of the paper's size, so a claim that fails here may hold
there, and the other way round. [How to run these experiments again, also at the paper's scale](reproduce.md).

"""


def write_claims(folder: Path, page: Path) -> str:
    """Write the page. Returns one line that counts the verdicts."""
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
    parts += [f"{sum(verdicts.values())} claims: {counted}.\n\n", "\n".join(table), "\n"]
    for name, summary in drawn:
        where = _relative(folder, page)
        parts.append(f"\n## {name}\n{summary['title']} ({summary['paper']}). {summary['made']}. ")
        parts.append(f"[Table]({where}/{name}/table.md), [figures in numbers]({where}/{name}/summary.json).\n")
        if (folder / name / "figure.svg").exists():
            parts.append(f"\n![{summary['title']}]({where}/{name}/figure.png)\n")
    write_text(page, "".join(parts))
    return f"{page}: {counted}"


def _relative(folder: Path, page: Path) -> str:
    return Path(os.path.relpath(folder, page.parent)).as_posix()
