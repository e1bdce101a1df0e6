"""Ranks that share work, wait for each other, fail, hang and die: real processes, no deadlock."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

import d5p4
from d5p4.distributed import Mesh, connect
from tests.distributed.ranks import Rank, finish, results, start

WORK = "tests.distributed.work:"


def test_alone_there_is_nobody_to_wait_for(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    mesh = connect()
    assert type(mesh) is Mesh and mesh.first and mesh.leader and mesh.beams.size == 1
    assert [mesh.ticket("a"), mesh.ticket("a"), mesh.ticket("b")] == [0, 1, 0]
    assert mesh.share(5) == 5 and mesh.count("c", 2) == 2
    mesh.meet()
    mesh.close()


def test_a_mesh_that_cannot_be_is_a_sentence(monkeypatch):
    for world, given, message in (
        ("1", {"mesh": (0, 2)}, "mesh=0,2 must be two whole numbers of at least 1"),
        ("1", {"mesh": (2, 1)}, "mesh=2,1 needs 2 ranks, but there are 1"),
        ("4", {"mesh": (3, 1)}, "mesh=3,1 needs 3 ranks, but there are 4"),
        ("two", {}, "WORLD_SIZE='two'"),
        ("2", {"device": "tpu7"}, "device='tpu7'"),
        ("2", {"timeout": 0.0}, "timeout=0 must be a positive number"),
    ):
        monkeypatch.setenv("WORLD_SIZE", world)
        with pytest.raises(d5p4.D5P4Error, match=message):
            connect(**given)


def test_every_ticket_goes_to_one_rank(tmp_path):
    ranks = results(WORK + "count_and_meet", 3, tmp_path, tickets=20)
    assert sorted(ticket for rank in ranks for ticket in rank["mine"]) == list(range(20))
    assert [rank["shared"] for rank in ranks] == [{"from": 0, "size": 9_000_000}] * 3  # more than a store's value
    assert [rank["done"] for rank in ranks] == [20] * 3
    assert [rank["first"] for rank in ranks] == [True, False, False]


def test_what_fails_on_one_rank_fails_on_all_and_they_go_on(tmp_path):
    breaks = [("memory", 1), ("memory", 0), ("logits", 0), ("logits", 1)]
    first, second = results(WORK + "break_one", 2, tmp_path, breaks=breaks)
    assert first == second
    assert [kind for kind, *_ in first] == 2 * ["OutOfMemoryError"] + 2 * ["NonFiniteLogits"]
    assert all(texts == first[0][1:] for _, *texts in first)


@pytest.mark.full
@pytest.mark.parametrize("how, rank", [("die", 0), ("die", 1), ("hang", 1)])
def test_a_rank_that_dies_or_hangs_in_a_decode_ends_the_job(tmp_path, how, rank):
    timeout = 3 if how == "hang" else 20
    ended = finish(start(WORK + "break_one", 2, tmp_path, breaks=[(how, rank)], timeout=timeout))
    code, output = ended[1 - rank]
    if how == "hang":
        assert code == 3 and "rank 1 has made no step for 3 s, so it hangs" in output, output
    else:
        assert "failed, so" in output or "has ended" in output, output
    assert all(code != 0 for code, _ in ended)


@pytest.mark.full
def test_a_rank_that_sleeps_at_work_is_named_and_one_that_says_that_it_works_is_not(tmp_path):
    """Rank 0 waits 8 s for rank 1."""
    assert results(WORK + "wait_for_one", 2, tmp_path, rank=1, seconds=8, timeout=3) == ["met", "met"]
    ended = finish(start(WORK + "wait_for_one", 3, tmp_path, rank=1, seconds=600, timeout=2, beats=False))
    assert "rank 1 has made no step for 2 s" in ended[0][1] and "rank 1 has made no step for 2 s" in ended[2][1]
    assert all(code != 0 for code, _ in ended)


def at_work(world: int, folder: Path, rank: int) -> list[Rank]:
    """One rank is at work and the others wait for it."""
    ranks = start(WORK + "wait_for_one", world, folder, rank=rank, seconds=600, timeout=3, ready=str(folder / "ready"))
    while not (folder / "ready").exists():
        assert ranks[0].poll() is None, ranks[0].output.read_text()
        time.sleep(0.01)
    return ranks


@pytest.mark.parametrize("stopped", [0, pytest.param(1, marks=pytest.mark.full)])
def test_who_waits_for_a_dead_or_a_stopped_rank_ends_and_names_it(tmp_path, stopped):
    """All do, though only one of them watches it. Stopped ranks cannot speak; rank 0 holds the store besides."""
    dead = 2
    ranks, pair = at_work(3, tmp_path / "dead", dead), at_work(2, tmp_path / "stopped", 1 - stopped)
    pair[stopped].send_signal(signal.SIGSTOP)
    try:
        ranks[dead].kill()
        ended, code = finish(ranks)[:dead], pair[1 - stopped].wait()
    finally:
        pair[stopped].kill()
    for dead_code, output in ended:
        assert dead_code != 0 and f"rank {dead} has sent no pulse for 3 s" in output, output
    output = finish(pair)[1 - stopped][1]
    assert code == 3 and f"rank {stopped}" in output and "start the same command again" in output


def test_a_rank_that_ends_is_missed_at_once(tmp_path):
    """Whether it says why or not: nobody waits for the timeout, which would be another sentence."""
    ended = finish(start(WORK + "leave", 2, tmp_path / "silent", rank=1))
    assert ended[0][0] != 0 and "rank 1 ended without leaving the mesh" in ended[0][1], ended
    ended = finish(start(WORK + "leave", 3, tmp_path / "told", rank=1, why="the file is not there"))
    for rank in (0, 2):
        assert "rank 1 gave up: the file is not there" in ended[rank][1], ended


def test_what_cannot_be_spread_is_a_sentence(tmp_path):
    wrong = [{"k": 3}, {"history": True}, {"seed": None}]
    for messages in results(WORK + "complaints", 2, tmp_path, cases=wrong):
        assert "k=3 must be a multiple of 2, the number of ranks" in messages[0]
        assert "history needs the whole pool" in messages[1]
        assert "seed=None would be a different seed" in messages[2]
