"""After a kill at any moment, or a full disk, the same call continues and writes the file of an uninterrupted run."""

import json
import random
import shutil
import signal
from itertools import count

import pytest

import d5p4
from d5p4.eval.groups import read_groups
from d5p4.jobs import run as module
from tests.distributed.ranks import finish
from tests.jobs.work import decode_here, entries, kept, parts, run, start, stopped, until_paused, write


def test_killed_at_every_step(folder, whole):
    """Each start dies one step later than the one before, until one finishes. A step opens, renames or removes a file
    of the run."""
    lines = []
    for step in count(1):
        [(code, printed)] = finish(start(folder, dies=(0, step)))
        if code == 0:
            break
        assert code == -signal.SIGKILL, printed
        lines.append(kept(folder / "a.jsonl"))
    assert (folder / "a.jsonl").read_bytes() == whole
    assert lines[0] == 0 and any(0 < kept_lines < len(entries()) for kept_lines in lines) and len(entries()) in lines
    header = json.loads((folder / "a.run.json").read_text())
    assert header["finished"] and header["report"]["prompts"] == len(entries()) and len(header["starts"]) > 2
    assert {path.name for path in folder.iterdir()} == {"p.jsonl", "a.jsonl", "a.run.json", "ranks"}


@pytest.mark.full
@pytest.mark.parametrize("method", ["independent", "d5p4", "tree"])
def test_a_run_with_a_form_continues_after_kills(folder, method):
    form = dict(method=method, regex="(a|b){1,2}c|d(ef|g)d?", reveal="threshold", tau=0.5)
    decode_here(folder, **form)
    (folder / "a.jsonl").rename(folder / "whole.jsonl")
    (folder / "a.run.json").unlink()
    for step in count(2, 3):
        [(code, printed)] = finish(start(folder, dies=(0, step), **form))
        if code == 0:
            break
        assert code == -signal.SIGKILL, printed
    assert step > 5 and (folder / "a.jsonl").read_bytes() == (folder / "whole.jsonl").read_bytes()
    lines = [json.loads(line) for line in (folder / "a.jsonl").read_text().splitlines()]
    assert sum(len(line.get("unfinished", ())) for line in lines) > len(lines)


@pytest.mark.full
@pytest.mark.parametrize("worlds", [(1,), (1, 2, 3, 4)])
def test_killed_many_times(folder, worlds):
    """Also with another number of ranks at every start; one rank dies, and then torchrun kills the others."""
    write(folder / "p.jsonl", entries(600))
    decode_here(folder)
    whole = (folder / "a.jsonl").read_bytes()
    (folder / "a.jsonl").unlink()
    (folder / "a.run.json").unlink()
    chance, kills, code = random.Random(1), 0, -signal.SIGKILL
    while code == -signal.SIGKILL and kills < 25:
        world = chance.choice(worlds)
        victim = chance.randrange(world)
        ranks = start(folder, world, dies=(victim, chance.randrange(1, 5 if victim else 20)))
        code = ranks[victim].wait()
        if code:
            kills += 1
            for rank in chance.sample(ranks, world):
                rank.kill()
        finish(ranks)
    assert code in (0, -signal.SIGKILL) and kills > 8
    run(folder, worlds[-1])
    assert (folder / "a.jsonl").read_bytes() == whole


def test_finished_lines_are_never_decoded_again_and_broken_ones_are(folder, whole):
    """Lines on the disk are never overwritten, and can be scored during the run."""
    stopped(decode_here, 12, folder)
    [part] = parts(folder / "a.jsonl")
    lines = part.read_bytes().splitlines(keepends=True)
    assert len(read_groups(part)) == len(lines) >= 12
    for harmed, lost, expected in (
        (lines, 0, None),
        (lines[:-2], 2, None),  # in the middle of a batch, which is decoded as a whole
        ([*lines[:-1], lines[-1][:-9]], 1, "ended in half a line"),
        ([*lines[:-1], lines[-1][:-1]], 1, "ended in half a line"),
        ([*lines[:4], lines[4][:20] + b"\n", *lines[5:]], 1, "has 1 broken line;"),
        ([*lines[:4], b"\0" * 30 + b"\n", b"[1]\n", *lines[4:]], 0, "has 2 broken lines"),
    ):
        copy = folder / "copy"
        shutil.copytree(folder, copy, ignore=shutil.ignore_patterns("copy"))
        [part], seen = parts(copy / "a.jsonl"), []
        part.write_bytes(b"".join(harmed))
        report = decode_here(copy, progress=lambda pace, part=part, seen=seen: seen.append(part.read_bytes()))
        assert seen[0] == b"".join(harmed)
        assert report.before == len(lines) - lost and report.now == len(entries()) - report.before
        notes = [note for note in report.notes if "missing" in note]
        assert len(notes) == (expected is not None) and all(expected in note for note in notes)
        assert (copy / "a.jsonl").read_bytes() == whole, expected
        shutil.rmtree(copy)


def test_errors_of_a_finished_run_are_decoded_again_after_a_kill(folder, whole):
    """The output is read again, and nothing is lost if that start is stopped."""
    decode_here(folder)
    header = folder / "a.run.json"
    finished = header.read_bytes()
    for before_the_header_knew in (True, False):
        stopped(decode_here, 1, folder, retry_errors=True)
        if before_the_header_knew:
            header.write_bytes(finished)
        assert decode_here(folder).now == 0 and not parts(folder / "a.jsonl")
    assert decode_here(folder, retry_errors=True).now == 1
    assert (folder / "a.jsonl").read_bytes() == whole


def test_a_full_disk_is_an_error_and_nothing_is_lost(tmp_path, whole):
    """While a part is written, and while the output is."""
    for begun, limit, place in ((0, 2000, "a.jsonl.parts"), (15, 5000, "a.jsonl")):
        folder = tmp_path / str(begun)
        folder.mkdir()
        write(folder / "p.jsonl", entries())
        if begun:
            stopped(decode_here, begun, folder)  # so that no part alone is as large as the output
        [(code, printed)] = finish(start(folder, limit=limit))
        assert code == 2 and f"{place} cannot be written: File too large" in printed, printed
        assert "run the same command again" in printed and not (folder / "a.jsonl").exists()
        assert not list(folder.glob("**/*.partial"))  # it would keep the disk full
        lines = kept(folder / "a.jsonl")
        assert lines >= 3 and decode_here(folder).before == lines
        assert (folder / "a.jsonl").read_bytes() == whole


def test_a_second_run_on_the_same_output_is_refused(folder, whole):
    ranks = start(folder, paused=0)
    until_paused(folder, ranks)
    with pytest.raises(d5p4.D5P4Error, match="another run is writing .*a.jsonl"):
        decode_here(folder)
    ranks[0].kill()
    ranks[0].join()
    decode_here(folder)
    assert (folder / "a.jsonl").read_bytes() == whole


def test_an_input_that_changes_during_the_run_is_an_error(tmp_path, whole, monkeypatch):
    """Even if the input is restored later, no line of the other file is kept."""
    monkeypatch.setattr(module, "WINDOW", 8)
    padded = [entry | {"level": "x" * 2000} for entry in entries()]  # longer than what is read ahead
    for put_back in (False, True):
        folder, changed = tmp_path / str(put_back), []
        folder.mkdir()
        write(folder / "p.jsonl", padded)

        def change(pace, folder=folder, changed=changed, put_back=put_back) -> None:
            if not changed:
                changed.append(write(folder / "p.jsonl", [entry | {"prompt": "ccc"} for entry in padded]))
            elif put_back:
                write(folder / "p.jsonl", padded)

        with pytest.raises(d5p4.D5P4Error, match="was changed while it was being decoded"):
            decode_here(folder, progress=change)
        assert not (folder / "a.jsonl").exists()
        write(folder / "p.jsonl", padded)
        assert decode_here(folder).before > 0
        lines = [json.loads(line) for line in (folder / "a.jsonl").read_text().splitlines()]
        assert [line["prompt"] for line in lines] == [entry["prompt"] for entry in padded]
        assert [line["answers"] for line in lines] == [json.loads(line)["answers"] for line in whole.splitlines()]
