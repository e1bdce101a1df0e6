from pathlib import Path

import pytest

import d5p4
from d5p4_lab.bench import steps


@pytest.mark.full
def test_a_version_gives_its_own_texts_and_calls(capsys):
    steps.main(["--before", str(Path(d5p4.__file__).parent.parent), "--rounds", "1", "--prompts", "1"])
    *_, row = capsys.readouterr().out.splitlines()
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    before, after = cells[4].split(" / ")
    assert cells[0] == "1" and before == after and cells[5] == "yes"
