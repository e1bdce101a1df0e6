"""Ranks that share work, wait for each other, fail, hang and die: real processes, no deadlock."""

from __future__ import annotations

import os
import signal
import time

import pytest

import d5p4
from d5p4.distributed import Mesh, connect
from tests.distributed.ranks import finish, results, start

WORK = "tests.distributed.work:"


def test_alone_there_is_nobody_to_wait_for(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    mesh = connect()
    assert type(mesh) is Mesh and mesh.first and mesh.leader and mesh.beams.size == 1
    assert [mesh.ticket("a"), mesh.ticket("a"), mesh.ticket("b")] == [0, 1, 0]
    assert mesh.share(5) == 5 and mesh.count("c", 2) == 2
    mesh.meet()
    mesh.close()


def test_a_mesh_has_no_side_of_nothing():
    with pytest.raises(d5p4.D5P4Error, match="mesh=0,2 must be two numbers of at least 1"):
        connect((0, 2))


@pytest.mark.parametrize("world, mesh", [("1", (2, 1)), ("4", (2, 1)), ("4", (3, 1))])
def test_a_mesh_needs_its_ranks(monkeypatch, world, mesh):
    monkeypatch.setenv("WORLD_SIZE", world)
    with pytest.raises(d5p4.D5P4Error, match=f"mesh={mesh[0]},{mesh[1]} needs .* there are {world}"):
        connect(mesh)


def test_a_broken_environment_is_named(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "two")
    with pytest.raises(d5p4.D5P4Error, match="WORLD_SIZE='two'"):
        connect()


def test_every_ticket_goes_to_one_rank(tmp_path):
    found = results(WORK + "count_and_meet", 3, tmp_path, tickets=20)
    assert sorted(ticket for each in found for ticket in each["mine"]) == list(range(20))
    assert [each["shared"] for each in found] == [{"from": 0}] * 3
    assert [each["done"] for each in found] == [20] * 3
    assert [each["first"] for each in found] == [True, False, False]


@pytest.mark.parametrize(
    "how, kind, rank", [("memory", "OutOfMemoryError", 1),
                        pytest.param("memory", "OutOfMemoryError", 0, marks=pytest.mark.full),
                        pytest.param("layout", "OutOfMemoryError", 1, marks=pytest.mark.full),
                        pytest.param("logits", "NonFiniteLogits", 0, marks=pytest.mark.full),
                        pytest.param("logits", "NonFiniteLogits", 1, marks=pytest.mark.full)],
)  # fmt: skip
def test_what_fails_on_one_rank_fails_on_all_and_they_go_on(tmp_path, how, kind, rank):
    found = results(WORK + "break_one", 2, tmp_path, how=how, rank=rank)
    assert found[0] == found[1]
    assert found[0][0] == kind


@pytest.mark.full
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_dies_in_a_decode_ends_the_job(tmp_path, rank):
    began = time.monotonic()
    ended = finish(start(WORK + "break_one", 2, tmp_path, how="die", rank=rank, timeout=20))
    assert time.monotonic() - began < 60
    code, said = ended[1 - rank]
    assert code != 0
    assert "broke off" in said or "has gone" in said, said


@pytest.mark.full
def test_a_rank_that_hangs_in_a_decode_ends_the_job(tmp_path):
    began = time.monotonic()
    ended = finish(start(WORK + "break_one", 2, tmp_path, how="hang", rank=1, timeout=3))
    assert time.monotonic() - began < 60
    assert ended[0][0] == 3 and "rank 1 has made no step for 3 s; it hangs" in ended[0][1], ended[0][1]
    assert ended[1][0] != 0


@pytest.mark.full
def test_waiting_longer_than_the_timeout_is_no_fault(tmp_path):
    """Rank 0 waits 8 s for rank 1, which works and says so."""
    assert results(WORK + "wait_at_work", 2, tmp_path, seconds=8, timeout=3) == ["met", "met"]


@pytest.mark.full
def test_a_rank_that_sleeps_at_work_is_named(tmp_path):
    ended = finish(start(WORK + "wait_for_the_others", 3, tmp_path, sleeper=1, seconds=600, timeout=2))
    assert "rank 1 has made no step for 2 s" in ended[0][1] and "rank 1 has made no step for 2 s" in ended[2][1]
    assert all(code != 0 for code, _ in ended)


@pytest.mark.parametrize("world", [3, pytest.param(4, marks=pytest.mark.full)])
def test_all_that_wait_for_a_dead_rank_end_together_and_name_it(tmp_path, world):
    """However many there are: only one of them watches it."""
    ready, dead = tmp_path / "ready", world - 1
    given = {"sleeper": dead, "seconds": 600, "timeout": 3, "ready": str(ready)}
    processes = start(WORK + "wait_for_the_others", world, tmp_path, **given)
    while not ready.exists() and processes[0].poll() is None:
        time.sleep(0.05)
    processes[dead].kill()
    began = time.monotonic()
    ended = finish(processes)
    assert time.monotonic() - began < 2 * 3
    for code, said in ended[:dead]:
        assert code != 0 and f"rank {dead} has not been heard of for 3 s" in said, said


def test_a_rank_that_leaves_without_a_word_is_missed_at_once(tmp_path):
    began = time.monotonic()
    ended = finish(start(WORK + "leave", 2, tmp_path, rank=1, timeout=60))
    assert time.monotonic() - began < 40
    assert ended[0][0] != 0 and "rank 1 left without a word" in ended[0][1]


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.full)])
def test_a_rank_that_is_stopped_ends_the_others(tmp_path, rank):
    """Stopped processes cannot speak for themselves; rank 0 holds the store besides."""
    ready = tmp_path / "ready"
    given = {"sleeper": 1 - rank, "seconds": 600, "timeout": 3, "ready": str(ready)}
    processes = start(WORK + "wait_for_the_others", 2, tmp_path, **given)
    while not ready.exists() and processes[0].poll() is None:
        time.sleep(0.05)
    os.kill(processes[rank].pid, signal.SIGSTOP)
    try:
        said, _ = processes[1 - rank].communicate(timeout=40)
    finally:
        for process in processes:
            process.kill()
    assert processes[1 - rank].returncode == 3
    assert f"rank {rank}" in said and "start the same command again" in said


def test_a_rank_that_gives_up_tells_the_others_why(tmp_path):
    began = time.monotonic()
    ended = finish(start(WORK + "give_up", 3, tmp_path, rank=1))
    assert time.monotonic() - began < 40
    for rank in (0, 2):
        assert "rank 1 gave up: the file is not there" in ended[rank][1]


def test_what_cannot_be_spread_is_a_sentence(tmp_path):
    wrong = [{"k": 3}, {"history": True}, {"seed": None}]
    for said in results(WORK + "complaints", 2, tmp_path, cases=wrong):
        assert "k=3 does not split over 2 ranks" in said[0]
        assert "history needs the whole pool" in said[1]
        assert "seed=None would be another seed" in said[2]


def test_a_device_that_is_not_there_is_a_sentence(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(d5p4.D5P4Error, match="device='tpu7'"):
        connect(device="tpu7")
