"""Killed at any moment, or out of disk: the same call goes on, and the file is that of an uninterrupted run."""

import json
import shutil
import time
from pathlib import Path

import pytest

import d5p4
from d5p4.eval.groups import read_groups
from d5p4.jobs import plan
from d5p4.jobs.header import Header
from d5p4.jobs.parts import Parts
from tests.jobs.work import decode_here, entries, kill_at_random, run, start, write, written


def test_killed_in_a_loop(folder, whole):
    kill_at_random(folder, 3, seed=0)
    assert run(folder) == whole
    header = json.loads((folder / "a.run.json").read_text())
    assert header["finished"] and header["report"]["prompts"] == len(entries())
    assert len(header["starts"]) >= 2 and not (folder / "a.jsonl.parts").exists()


@pytest.mark.full
@pytest.mark.parametrize("worlds", [(1,), (1, 2, 3, 4)])
def test_killed_many_times(folder, worlds):
    """Also with another number of ranks at every start."""
    write(folder / "p.jsonl", entries(600))
    decode_here(folder)
    whole = (folder / "a.jsonl").read_bytes()
    (folder / "a.jsonl").unlink()
    (folder / "a.run.json").unlink()
    kill_at_random(folder, 25, seed=1, worlds=worlds)
    assert run(folder, worlds[-1]) == whole


def interrupted(folder: Path, lines: int) -> Parts:
    """A run that was stopped when so many lines were on the disk."""

    class Stopped(BaseException):
        pass

    def stop(pace) -> None:
        if pace.now >= lines:
            raise Stopped

    with pytest.raises(Stopped):
        decode_here(folder, progress=stop)
    return Parts(folder / "a.jsonl")


def test_finished_prompts_are_never_decoded_again(folder, whole):
    parts = interrupted(folder, 20)
    [part] = parts.files()
    kept = part.read_bytes()
    assert len(read_groups(part)) >= 20  # what is there can be scored meanwhile
    seen = []
    report = decode_here(folder, progress=lambda pace: seen.append(part.read_bytes()) if part.exists() else None)
    assert seen[0] == kept  # nothing was written over
    assert report.before == kept.count(b"\n") >= 20 and report.now == len(entries()) - report.before
    assert (folder / "a.jsonl").read_bytes() == whole


def test_a_torn_batch_keeps_the_lines_it_has(folder, whole):
    """Half of a batch on the disk: the batch is decoded as a whole, and each line is there once."""
    parts = interrupted(folder, 20)
    [part] = parts.files()
    lines = part.read_bytes().splitlines(keepends=True)
    part.write_bytes(b"".join(lines[:-3]))
    assert decode_here(folder).before == len(lines) - 3
    assert (folder / "a.jsonl").read_bytes() == whole


@pytest.mark.parametrize(
    "harm, told",
    [
        (lambda lines: [*lines[:-1], lines[-1][:-9]], "ended in half a line"),
        (lambda lines: [*lines[:-1], lines[-1][:-1]], "ended in half a line"),
        (lambda lines: [*lines[:4], lines[4][:20] + b"\n", *lines[5:]], "has 1 broken lines"),
        (lambda lines: [*lines[:4], b'\0' * 30 + b"\n", b"[1]\n", *lines[4:]], "has 2 broken lines"),
    ],
)  # fmt: skip
def test_broken_lines_are_noted_and_decoded_again(folder, whole, harm, told):
    parts = interrupted(folder, 20)
    [part] = parts.files()
    part.write_bytes(b"".join(harm(part.read_bytes().splitlines(keepends=True))))
    report = decode_here(folder)
    assert any(told in note for note in report.notes)
    assert (folder / "a.jsonl").read_bytes() == whole


def test_every_state_of_the_end_is_recovered_from(folder, whole):
    """What a kill leaves between two steps of the end, made by hand."""
    parts = interrupted(folder, len(entries()) - 1)
    kept = folder / "kept"
    shutil.copytree(parts.folder, kept)
    header = (folder / "a.run.json").read_bytes()

    def again(before: int) -> None:
        report = decode_here(folder)
        assert (report.before, report.prompts) == (before, len(entries()))
        assert (folder / "a.jsonl").read_bytes() == whole
        assert not parts.folder.exists() and not (folder / "a.jsonl.partial").exists()

    (folder / "a.jsonl.partial").write_bytes(whole[:100])  # the merge was going on
    again(len(entries()) - 1)
    finished = (folder / "a.run.json").read_bytes()

    shutil.copytree(kept, parts.folder)  # the output is whole, the header does not say so
    (folder / "a.run.json").write_bytes(header)
    again(len(entries()) - 1)

    (folder / "a.run.json").write_bytes(finished)  # the header says so, the parts are still there
    shutil.copytree(kept, parts.folder)
    again(len(entries()))

    parts.folder.mkdir()  # their folder is still there
    (parts.folder / "lock").touch()
    (parts.folder / "ranks.word").touch()  # in which ranks looked whether they share it
    (parts.folder / "ranks.word.partial").touch()
    again(len(entries()))


def test_errors_of_a_finished_run_are_decoded_again_after_a_kill(folder, whole):
    """The output's lines are a part again; until that start is finished nothing is lost, whatever it is stopped by."""
    decode_here(folder)
    parts = Parts(folder / "a.jsonl")
    parts.folder.mkdir()
    parts.restore(2)  # killed before the header knew
    assert decode_here(folder).now == 0 and not parts.folder.exists()
    parts.folder.mkdir()
    parts.restore(2)
    held = Header(folder / "a.jsonl")
    held.data["finished"] = False
    held.path.write_text(json.dumps(held.data))  # killed after
    assert decode_here(folder).now == 0
    assert decode_here(folder, retry_errors=True).now == 1
    assert (folder / "a.jsonl").read_bytes() == whole


@pytest.mark.parametrize("begun, limit, place", [(0, 4000, "a.jsonl.parts"), (30, 10_000, "a.jsonl")])
def test_a_full_disk_is_an_error_and_nothing_is_lost(folder, whole, begun, limit, place):
    """A file that may not grow stands for a full disk: while a part is written, or the output."""
    if begun:
        interrupted(folder, begun)  # so that no part alone is as large as the output
    [process] = start(folder, limit=limit)
    process.join(60)
    message = (folder / "said-0.txt").read_text()
    assert process.exitcode == 2 and f"{place} cannot be written: File too large" in message
    assert "run the same command again" in message and not (folder / "a.jsonl").exists()
    assert not list(folder.glob("**/*.partial"))  # it would keep the disk full
    kept = sum(path.read_bytes().count(b"\n") for path in Parts(folder / "a.jsonl").files())
    assert kept >= 3
    report = decode_here(folder)
    assert report.before == kept and (folder / "a.jsonl").read_bytes() == whole


def test_a_second_run_on_the_same_output_is_refused(folder, whole):
    [process] = start(folder, pause=0.002)
    while not written(folder):
        time.sleep(0.01)
    with pytest.raises(d5p4.D5P4Error, match="another run is writing .*a.jsonl"):
        decode_here(folder)
    process.join(60)
    assert process.exitcode == 0 and (folder / "a.jsonl").read_bytes() == whole


@pytest.mark.parametrize("again", [False, True])
def test_an_input_that_changes_meanwhile_is_an_error(folder, whole, monkeypatch, again):
    """Written over while lines are still to be read, perhaps even put back: no line of another file is kept."""
    monkeypatch.setattr(plan, "WINDOW", 8)
    padded = [entry | {"level": "x" * 2000} for entry in entries()]  # longer than what is read ahead
    write(folder / "p.jsonl", padded)
    changed = []

    def change(pace) -> None:
        if not changed:
            changed.append(write(folder / "p.jsonl", [entry | {"prompt": "ccc"} for entry in padded]))
        elif again:
            write(folder / "p.jsonl", padded)

    with pytest.raises(d5p4.D5P4Error, match="was changed while it was being decoded"):
        decode_here(folder, progress=change)
    assert not (folder / "a.jsonl").exists()
    write(folder / "p.jsonl", padded)
    assert decode_here(folder).before > 0
    lines = [json.loads(line) for line in (folder / "a.jsonl").read_text().splitlines()]
    assert [line["prompt"] for line in lines] == [entry["prompt"] for entry in padded]
    kept = [json.loads(line) for line in whole.splitlines()]
    assert [line["answers"] for line in lines] == [line["answers"] for line in kept]


def test_a_header_that_is_gone_is_an_error(folder):
    interrupted(folder, 20)
    (folder / "a.run.json").unlink()
    with pytest.raises(d5p4.D5P4Error, match="holds lines of a run whose a.run.json is gone"):
        decode_here(folder)
