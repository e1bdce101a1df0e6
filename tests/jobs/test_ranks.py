"""Any number of ranks writes the same bytes, and the next start does the work of a rank that died."""

import json
import time

import pytest

from tests.distributed.ranks import finish
from tests.jobs.work import decode_here, entries, kept, run, start, until_paused, write

FULL = pytest.mark.full
RANKS = [
    (2, None, True),
    (4, (2, 2), False),
    pytest.param(3, None, False, marks=FULL),
    pytest.param(4, None, True, marks=FULL),
]


@pytest.mark.parametrize("world, mesh, spelled", RANKS)
def test_every_number_of_ranks_gives_the_same_file(folder, whole, world, mesh, spelled):
    """The ranks share the work, even if each writes the path of the output in another way."""
    reports = run(folder, world, mesh=mesh, spelled=spelled, meets=True)
    assert (folder / "a.jsonl").read_bytes() == whole
    rows = [report.pop("rows_here") for report in reports]
    assert all(rows) and (mesh or sum(rows) == reports[0]["rows"])  # nothing is decoded twice
    assert all(report == reports[0] for report in reports) and reports[0]["now"] == len(entries())
    [begun] = json.loads((folder / "a.run.json").read_text())["starts"]
    assert begun["ranks"] == world and begun["mesh"] == list(mesh or (world, 1))
    assert not (folder / "a.jsonl.parts").exists()


@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.full)])
def test_a_rank_ends_after_another_died_and_the_next_start_continues(folder, whole, victim):
    """Nobody kills the survivor, as if each host had its own launcher. Its lines are kept."""
    ranks = start(folder, 2, paused=victim, timeout=8)
    until_paused(folder, ranks)
    while not kept(folder / "a.jsonl"):  # the survivor's, as the victim is at its first forward
        assert ranks[1 - victim].poll() is None, ranks[1 - victim].output.read_text()
        time.sleep(0.01)
    ranks[victim].kill()
    code, printed = finish(ranks)[1 - victim]
    assert code == 2 and "another rank has died" in printed and "start the same command again" in printed
    lines = kept(folder / "a.jsonl")
    assert lines >= 1 and not (folder / "a.jsonl").exists()
    assert run(folder, 3)[0]["before"] == lines
    assert (folder / "a.jsonl").read_bytes() == whole
    assert [begun["ranks"] for begun in json.loads((folder / "a.run.json").read_text())["starts"]] == [2, 3]


def test_what_stops_one_rank_stops_all(folder, tmp_path):
    def both(name, wanted, **given):
        ended = finish(start(tmp_path / name, 2, **given))
        assert [code for code, _ in ended] == [2, 2], ended
        assert all(text in printed for (_, printed), texts in zip(ended, wanted, strict=True) for text in texts), ended

    for name in ("finished", "strict"):
        (tmp_path / name).mkdir()
        write(tmp_path / name / "p.jsonl", entries())
    decode_here(tmp_path / "finished")
    other = "settings.k was 2 and is 3"
    both("finished", [[other], ["rank 0 gave up", other]], k=3)
    both("strict", [["line 21: token id 25 of the prompt"]] * 2, strict=True)
    assert not (tmp_path / "strict" / "a.jsonl").exists()
    for name, lines, expected in (
        ("apart", entries(), "does not see what rank 0 writes into"),
        ("unlike", entries()[1:], "differs between rank 0 and rank 1"),
    ):
        for rank, own_lines in enumerate((entries(), lines)):
            (tmp_path / name / str(rank)).mkdir(parents=True)
            write(tmp_path / name / str(rank) / "p.jsonl", own_lines)
        both(name, [["rank 1 gave up"], [expected]], apart=True)
