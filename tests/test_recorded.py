"""Every decode gives the rows, scores and costs that were recorded."""

import json

import pytest

from tests.recorded import CASES, FILE, QUICK, read, run

RECORDS = read()
LARGEST = 60_000  # bytes of the file


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.full) for name in CASES]
)
def test_rows_are_the_recorded_rows(name):
    recorded = RECORDS[name]
    assert json.loads(json.dumps(CASES[name])) == recorded["case"], f"case {name!r} is not the case that was recorded"
    records = run(CASES[name])
    assert len(records) == len(recorded["prompts"])
    for prompt, (now, before) in enumerate(zip(records, recorded["prompts"], strict=True)):
        assert now.keys() == before.keys()
        for field in now:
            where = f"case {name!r}, prompt {prompt}: {field} differ from the recorded ones"
            value, expected = unsorted(now, field), unsorted(before, field)
            if field in ("answers", "lineage") and CASES[name]["options"].get("spare") and "scores" not in now:
                continue  # the scores also decide which beams become answers
            assert value == expected, f"{where}\nnow:    {value}\nbefore: {expected}"


def unsorted(record, field):
    """Since the first rows were recorded, the scores by which answers are sorted leave out what follows the end of the
    text. Records with scores are younger."""
    is_old = "scores" not in record
    return sorted(record[field]) if is_old and field in ("answers", "lineage") else record[field]


def test_every_case_is_recorded_in_a_small_file():
    assert RECORDS.keys() == CASES.keys()
    assert FILE.stat().st_size < LARGEST
