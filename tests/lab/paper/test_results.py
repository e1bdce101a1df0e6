"""The committed results: a clean clone draws them again."""

import pytest

from d5p4_lab.paper import EXPERIMENTS, experiment
from d5p4_lab.paper.claims import MISSING, short_page
from d5p4_lab.paper.run import RESULTS, reproduce
from tests.lab.paper.smoke import cheap, clone

BOX = RESULTS / "box"
FULL = pytest.mark.full
QUICK = ("pareto", "cost")


@pytest.mark.parametrize("name", [name if name in QUICK else pytest.param(name, marks=FULL) for name in EXPERIMENTS])
def test_committed_files_are_enough_to_draw_again(tmp_path, name):
    """Drawn from the committed files alone, table and summary are equal, byte by byte."""
    there = clone(BOX, tmp_path / "box")
    with cheap():
        setup = reproduce(name, out=there, stages=["draw"])
    for file in ("table.md", "summary.json"):
        assert (setup.folder / file).read_bytes() == (BOX / name / file).read_bytes(), file


def test_committed_results_are_complete_and_small():
    files = list(RESULTS.rglob("*.xz"))
    assert files and sum(file.stat().st_size for file in files) < 5_000_000
    for name in EXPERIMENTS:
        for file in ("config.json", "table.md", "summary.json"):
            assert (BOX / name / file).is_file(), (name, file)
        if (digest := experiment(name).digest) is not None:
            assert (BOX / "numbers" / f"{digest.name}.jsonl.xz").is_file(), name


def test_the_page_of_claims_is_that_of_the_committed_results():
    """If this fails, draw all experiments again (`make tables`) and commit the page with the results."""
    page = RESULTS.parents[2] / "docs" / "claims.md"
    text = short_page(BOX, page)
    assert MISSING not in text, "docs/claims.md needs a claim in its summary that the results do not have"
    assert page.read_text(encoding="utf-8") == text, "docs/claims.md is old: run python -m d5p4_lab claims"
    claims = [line.split(" | ")[0] for line in text.splitlines() if line.startswith("| ")]
    assert len(text.split()) <= 4000 and max(len(claim.split()) - 1 for claim in claims) <= 25
