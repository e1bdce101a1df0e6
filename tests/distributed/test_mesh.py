"""Ranks that share work, wait for each other, fail, hang and die: real processes, no deadlock."""

from __future__ import annotations

import signal
import time

import pytest

import d5p4
from d5p4.distributed import Mesh, connect
from tests.distributed.ranks import finish, results, start

WORK = "tests.distributed.work:"
AGAIN = "finished work is kept: start the same command again"


def test_alone_there_is_nobody_to_wait_for(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    mesh = connect()
    assert type(mesh) is Mesh and mesh.first and mesh.leader and mesh.ranks.size == 1
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
    ranks = start(WORK + "break_one", 2, tmp_path, breaks=[(how, rank)], timeout=3 if how == "hang" else 20)
    code, output = ranks[1 - rank].wait(), ranks[1 - rank].output.read_text()
    ranks[rank].kill()
    finish(ranks)
    assert code != 0 and "failed, so one of them has died or hangs" in output and AGAIN in output, output


@pytest.mark.parametrize("stopped", [0, pytest.param(1, marks=pytest.mark.full)])
def test_who_waits_for_a_dead_or_a_stopped_rank_ends(tmp_path, stopped):
    """A dead rank is missed at once, and a stopped one after the timeout, even if it is rank 0 and holds the store."""
    ranks = start(WORK + "wait_for_one", 3, tmp_path / "dead", rank=2, ready=str(tmp_path / "one"))
    pair = start(
        WORK + "wait_for_one", 2, tmp_path / "stopped", rank=stopped, timeout=3, ready=str(tmp_path / "another")
    )
    while not ((tmp_path / "one").exists() and (tmp_path / "another").exists()):
        time.sleep(0.01)
    ranks[2].kill()
    pair[stopped].send_signal(signal.SIGSTOP)
    try:
        ended, code = finish(ranks, 20)[:2], pair[1 - stopped].wait()
    finally:
        pair[stopped].kill()
    for code, output in [*ended, finish(pair)[1 - stopped]]:
        assert code != 0 and "another rank has died or hangs" in output and AGAIN in output, output


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_gives_up_tells_the_others_why(tmp_path, rank):
    ended = finish(start(WORK + "wait_for_one", 3, tmp_path, rank=rank, why="the file is not there"))
    for code, output in ended[:rank] + ended[rank + 1 :]:
        assert code != 0 and f"rank {rank} gave up: the file is not there (so rank" in output, output


def test_every_rank_has_the_whole_pool(tmp_path):
    alone, *others = results(WORK + "whole_pools", 2, tmp_path)
    assert others == [alone] and alone[0][3] == []
