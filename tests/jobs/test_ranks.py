"""Many ranks on one file: the same bytes for every number of them, and a dead one's work is done by the next start."""

import json
import time

import pytest

from tests.jobs.work import entries, finish, run, start, write, written


@pytest.mark.parametrize("world, mesh", [(2, None), (4, None), (4, (2, 2))])
def test_every_number_of_ranks_gives_the_same_file(folder, whole, world, mesh):
    assert run(folder, world, mesh=mesh) == whole
    reports = [json.loads((folder / f"said-{rank}.txt").read_text()) for rank in range(world)]
    assert all(report == reports[0] for report in reports) and reports[0]["now"] == len(entries())
    [begun] = json.loads((folder / "a.run.json").read_text())["starts"]
    assert begun["ranks"] == world and begun["mesh"] == list(mesh or (world, 1))
    assert not (folder / "a.jsonl.parts").exists()


def test_ranks_share_the_work(folder):
    processes = start(folder, 2, pause=0.004)
    parts = folder / "a.jsonl.parts"
    seen: set[str] = set()
    while any(process.is_alive() for process in processes):
        seen |= {path.name for path in parts.glob("part-*.jsonl")}
        time.sleep(0.01)
    finish(processes, folder)
    assert seen == {"part-0001-0000.jsonl", "part-0001-0001.jsonl"}


@pytest.mark.full
def test_a_model_may_take_longer_to_load_and_to_hash_than_a_step(folder, whole):
    assert run(folder, 2, slow=3.0, timeout=1.5) == whole


def test_ranks_that_spell_the_output_differently_share_the_work_too(folder, whole):
    processes = start(folder, 2, pause=0.004, spelled=True)
    most = 0
    while any(process.is_alive() for process in processes):
        most = max(most, written(folder))
        time.sleep(0.002)
    finish(processes, folder)
    assert (folder / "a.jsonl").read_bytes() == whole and 0 < most <= len(whole)


def test_a_dead_ranks_work_is_finished_by_another_number_of_ranks(folder, whole):
    processes = start(folder, 2, pause=0.004)
    while not written(folder):
        time.sleep(0.005)
    processes[1].kill()
    processes[0].kill()  # as torchrun does
    for process in processes:
        process.join()
    assert run(folder, 3) == whole
    assert [begun["ranks"] for begun in json.loads((folder / "a.run.json").read_text())["starts"]] == [2, 3]


@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.full)])
def test_the_survivor_of_a_dead_rank_ends_by_itself_and_keeps_its_lines(folder, whole, victim):
    """Nobody kills it, as where each host has a launcher of its own."""
    timeout, survivor = 3.0, 1 - victim
    processes = start(folder, 2, pause=0.004, timeout=timeout, stderr=True)
    part = folder / "a.jsonl.parts" / f"part-0001-{survivor:04d}.jsonl"
    while not (part.exists() and part.stat().st_size):
        time.sleep(0.002)
    processes[victim].kill()
    killed, there = time.monotonic(), part.read_bytes()
    processes[survivor].join(60)
    seconds = time.monotonic() - killed
    assert processes[survivor].exitcode in (2, 3) and seconds < 2 * timeout
    said = [folder / f"{name}-{survivor}.txt" for name in ("said", "stderr")]
    text = "".join(path.read_text() for path in said if path.exists())
    assert f"rank {victim}" in text and "start the same command again" in text
    kept = part.read_bytes()
    assert kept.startswith(there) and kept.endswith(b"\n") and not (folder / "a.jsonl").exists()
    lines = [path.read_bytes().count(b"\n") for path in part.parent.glob("part-*.jsonl")]
    assert run(folder, 2) == whole
    assert json.loads((folder / "said-0.txt").read_text())["before"] == sum(lines) >= 1


def test_an_error_of_the_first_rank_ends_all(folder):
    run(folder)
    processes = start(folder, 2, k=3)
    first, second = finish(processes, folder)
    assert [process.exitcode for process in processes] == [2, 2]
    assert "settings.k was 2 and is 3" in first
    assert "rank 0 gave up" in second and "settings.k was 2 and is 3" in second


def test_a_folder_that_cannot_be_written_is_an_error_on_all_ranks(folder):
    (folder / "a.jsonl.parts" / "ranks.word.partial").mkdir(parents=True)
    processes = start(folder, 2)
    first, second = finish(processes, folder)
    assert [process.exitcode for process in processes] == [2, 2]
    assert "a.jsonl.parts cannot be written: Is a directory" in first and "rank 0 gave up" in second


def test_strict_stops_all_ranks(folder):
    processes = start(folder, 2, strict=True)
    said = finish(processes, folder)
    assert [process.exitcode for process in processes] == [2, 2]
    assert any("line 51: the prompt holds token id 25" in text for text in said)
    assert not (folder / "a.jsonl").exists()


@pytest.mark.parametrize(
    "other, told",
    [(entries(), "does not see what rank 0 writes into"), (entries()[1:], "is another file on rank 1 than on rank 0")],
)
def test_hosts_that_share_no_files_are_told_so(folder, other, told):
    for rank, lines in enumerate((entries(), other)):
        (folder / str(rank)).mkdir()
        write(folder / str(rank) / "p.jsonl", lines)
    processes = start(folder, 2, apart=True)
    first, second = finish(processes, folder)
    assert [process.exitcode for process in processes] == [2, 2]
    assert told in second and "rank 1 gave up" in first
