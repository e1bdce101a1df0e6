"""What run_file promises in one process. Kills and ranks have their own files."""

import json
import math
import re
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import d5p4
from d5p4.distributed import Mesh, RankLost
from d5p4.jobs import run as module
from d5p4.jobs.decoder import default_budget
from d5p4.store import append
from tests.checkpoints import write_llada
from tests.fake import FakeModel
from tests.jobs.work import SMALL, Cramped, Spoiled, kept, prompts, stopped, write


@pytest.fixture
def box(tmp_path):
    """Run in a folder. A call returns the lines of the output and the report."""

    class Box:
        output = tmp_path / "a.jsonl"
        header = tmp_path / "a.run.json"
        input = tmp_path / "p.jsonl"

        @property
        def parts(self):
            return self.output.with_name(f"{self.output.name}.parts")

        def __call__(self, entries=None, model=None, **options):
            if isinstance(entries, list):
                write(self.input, entries)
            report = d5p4.run_file(model or FakeModel(), self.input, self.output, **SMALL | options)
            return self.lines(), report

        def lines(self):
            return [json.loads(line) for line in self.output.read_text().split("\n")[:-1]]

        def another(self):
            self.output = tmp_path / f"{self.output.stem}b.jsonl"

        def fails(self, *given, **options):
            with pytest.raises(d5p4.D5P4Error) as caught:
                self(*given, **options)
            return str(caught.value)

    return Box()


def six_digits(value):
    return float(f"{value:.6g}") if math.isfinite(value) else None


@pytest.mark.filterwarnings("ignore::d5p4.DuplicateAnswers")
@pytest.mark.parametrize("method", [{}, {"method": "d5p4", "w": 2}])
def test_run_gives_what_generate_gives(box, monkeypatch, method):
    """The same seed gives the same answers, with and without ids, whatever the windows and batches."""
    count, entries, seen = 20, prompts(20), []
    lines, report = box(entries, logprobs=True, progress=seen.append, **method)
    keys = [entry.get("id") for entry in entries]
    options = SMALL | {"max_tokens_per_forward": None, "keys": keys, "logprobs": True} | method
    result = d5p4.generate(FakeModel(), [entry["prompt"] for entry in entries], **options)
    assert [line["answers"] for line in lines] == result.texts
    assert [line["tokens"] for line in lines] == result.answers
    assert [line["rows"] for line in lines] == result.rows.tolist()
    assert [line["reveal_step"] for line in lines] == result.reveal_step
    assert [line["score"] for line in lines] == [list(map(six_digits, row)) for row in result.score.tolist()]
    assert [line["logdet"] for line in lines] == list(map(six_digits, result.logdet.tolist()))
    assert [line["line"] for line in lines] == list(range(1, count + 1))
    assert {line["seed"] for line in lines} == {5} and {line["settings"] for line in lines} == {report.settings}
    assert (report.prompts, report.now, report.before, report.failed) == (count, count, 0, 0)
    assert report.rows == int(result.rows.sum())
    assert (report.distinct, report.answers) == (int(result.distinct.sum()), 2 * count)
    assert (report.distinct == report.answers) == (method == {})  # the tree returns no text twice
    assert not box.parts.exists()

    assert (seen[-1].now, seen[-1].total, seen[-1].before) == (count, count, 0) and seen[-1].rows > count
    assert all(a.now <= b.now and a.seconds <= b.seconds for a, b in zip(seen, seen[1:], strict=False))
    assert seen[0].left > 0 and seen[-1].left == 0

    header = json.loads(box.header.read_text())
    assert header["finished"] and header["size"] == box.output.stat().st_size
    assert header["configuration"]["settings"]["k"] == 2 and header["configuration"]["seed"] == 5
    assert header["report"] == json.loads(json.dumps(report.to_dict()))

    monkeypatch.setattr(module, "WINDOW", 7)
    box.another()
    assert box(logprobs=True, **method)[0] == lines


def test_fields_of_the_input_are_carried_through(box, tmp_path):
    entry = {"id": 3, "prompt": "ab", "reference": ["x"], "more": {"é": None}, "bad": float("nan")}
    taken = {"score": 1, "line": "x", "error": "none", "given": 0}
    [line], _ = box([entry | taken])
    assert {name: line[name] for name in entry} == entry | {"bad": None}
    assert line["given"] == taken and line["line"] == 1 and "error" not in line
    assert list(line)[:2] == ["id", "prompt"] and "tokens" not in line
    box.input, box.output = tmp_path / "p.txt", tmp_path / "t.jsonl"
    box.input.write_text("ab\n\nab\n")
    lines, _ = box(temperature=3.0)
    assert [(line["line"], line["prompt"]) for line in lines] == [(1, "ab"), (3, "ab")]
    assert lines[0]["answers"] != lines[1]["answers"]
    box.input, box.output = tmp_path / "m.jsonl", tmp_path / "b.jsonl"
    talk = [{"role": "user", "content": "ab"}]
    [line], _ = box([{"messages": talk}], model=FakeModel(template=True))
    assert line["messages"] == talk and len(line["answers"]) == 2


def test_a_prompt_that_fails_is_a_line_with_its_error(box):
    good = [json.dumps(entry).encode() for entry in prompts(3)]
    bad = {
        b"{": "not valid JSON",
        b'{"prompt": "a\xff"}': "not UTF-8",
        b'{"prompt": "\\ud800", "level": 1}': "half a surrogate pair",
        b'{"text": "ab"}': "neither 'prompt' nor 'messages'",
        b'{"id": "n0", "prompt": "ab"}': "id 'n0' was used before, in line 1",
        b'{"prompt": "zz"}': "token id 25 of the prompt is outside the model's 12 ids",
        b'{"prompt": "%s", "level": 2}' % (b"a" * 99): "the prompt has 99 tokens and asks for 4 more",
        b'{"messages": [{"role": "system", "content": "a"}]}': "a conversation, but this model has no chat template",
    }
    box.input.write_bytes(b"\n".join([*good, *bad]))
    lines, report = box()
    assert [len(line["answers"]) for line in lines] == [2] * 3 + [0] * len(bad)
    for line, (text, expected) in zip(lines[3:], bad.items(), strict=True):
        assert expected in line["error"], text
    assert lines[6]["text"] == "ab" and lines[7]["id"] == "n0" and lines[9]["level"] == 2
    assert report.failed == len(bad) and f"{len(bad)} prompts failed" in report.notes[0]
    assert box()[1].now == 0  # a line with an error is finished too
    box.output = box.output.with_name("b.jsonl")
    assert "line 4: not valid JSON" in box.fails(strict=True) and not box.output.exists()


def test_a_window_that_has_no_schedule_is_a_line_with_an_error(box):
    """Holes differ between prompts, so one prompt can be at fault; if all prompts are, the run stops."""
    options, expected = {"gen_length": None, "steps": 2, "block_length": 1}, "steps=2 is fewer than the 4 blocks"
    lines, report = box([{"prompt": "abl"}] * 30 + [{"prompt": "allll"}], **options)
    assert report.failed == 1 and expected in lines[-1]["error"]
    box.another()
    message = box.fails([{"prompt": "allll"}] * 30, **options)
    assert "none of the first 30 prompts can be decoded" in message and expected in message


def test_logits_that_are_not_finite_spoil_only_their_prompt_which_is_decoded_again_on_request(box):
    lines, report = box(prompts(16), model=Spoiled(0, 2))
    output, failed = box.output, report.failed
    box.another()
    whole, _ = box()
    for line, good in zip(lines, whole, strict=True):
        assert line == good or (line["prompt"][0] in "ac" and "not finite" in line["error"])
    assert failed == sum("error" in line for line in lines) == sum(line["prompt"][0] in "ac" for line in whole)
    # The first model stands for a device that failed: its weights are the same.
    box.output = output
    again, report = box(model=FakeModel(), retry_errors=True)
    assert again == whole and (report.failed, report.now, report.before) == (0, failed, 16 - failed)
    assert box(retry_errors=True)[1].now == 0
    box.output = output.with_name("strict.jsonl")
    assert "p.jsonl line 1: the model gave logits" in box.fails(model=Spoiled(0), strict=True)


def test_a_run_without_an_answer_is_not_finished(box, monkeypatch):
    """If all decodes fail, or no prompt of a window or file can be decoded, then no line counts as finished, and a
    corrected run may use the same output."""
    monkeypatch.setattr(module, "WINDOW", 32)
    message = box.fails([{"prompt": "abc"}] * 30, model=Spoiled(0))
    assert re.search(r"the first 2\d prompts all failed.*line 1: the model gave logits", message)
    assert not box.output.exists() and json.loads(box.header.read_text())["finished"] is False
    lines, report = box(k=3)  # also with another configuration
    assert (report.before, report.failed) == (0, 0) and all(len(line["answers"]) == 3 for line in lines)
    for entries, expected, first in (
        ([{"question": "ab"}] * 40, "none of the first 32 prompts can be decoded", "line 1: has neither 'prompt' nor"),
        ([{"prompt": "zz"}] * 3, "all prompts of", "the first failure is in line 1: "),
    ):
        box.another()
        error = box.fails(entries)
        assert expected in error and first in error and not box.output.exists()
        assert not box.parts.exists() or len(entries) == 3  # these errors were written before the end
        assert box([{"prompt": "ab"}, *entries])[1].failed == len(entries)


def test_failures_after_answers_never_stop_a_run(box, monkeypatch):
    """The answers may be from this start, from an earlier one or, with retry_errors, from a finished run."""
    options = {"model": Spoiled(2), "max_tokens_per_forward": 4}
    stopped(box, 10, [{"prompt": "ab"}] * 10 + [{"prompt": "cabab"}] * 24, **options)
    assert kept(box.output) == 10
    stopped(box, 15, **options)
    assert kept(box.output) == 25  # failures are written at once
    _, report = box(**options)
    assert (report.failed, report.before) == (24, 25)
    _, report = box(retry_errors=True, **options)
    assert (report.failed, report.now, report.before) == (24, 24, 10)

    monkeypatch.setattr(module, "WINDOW", 8)  # lines that cannot be decoded
    box.another()  # each window has too few bad lines to stop the run
    assert box([{"prompt": "zz"}] * 40 + [{"prompt": "ab"}] * 9)[1].failed == 40


def test_decoded_lines_are_kept_when_another_rank_has_failed(box):
    class Left(Mesh):
        """Raises the failure at the first count that is not a ticket."""

        def count(self, name, more=0):
            if not name.endswith("batch"):
                raise RankLost("rank 1 gave up")
            return super().count(name, more)

    assert "rank 1 gave up" in box.fails(prompts(3), mesh=Left())
    assert kept(box.output) >= 1


@pytest.mark.parametrize("parameters, cuda, tokens", [(8e9, True, 8192), (9.7e6, True, 1 << 17), (9.7e6, False, 2048)])
def test_large_models_take_fewer_tokens(parameters, cuda, tokens):
    module = nn.Module()
    module.weight = nn.Parameter(torch.empty(int(parameters), device="meta"))
    module.head = SimpleNamespace(weight=SimpleNamespace(is_cuda=cuda))
    assert default_budget(module) == tokens


def sizes(report):
    """The budgets that were too large, from the notes of the report."""
    return [int(re.search(r"budget of (\d+)", note)[1]) for note in report.notes if "out of memory" in note]


def test_too_little_memory_halves_the_budget(box):
    """Answers stay the same; the report names each size once."""
    whole, _ = box(prompts(20), max_tokens_per_forward=1024)
    box.another()
    model = Cramped(100)
    lines, report = box(model=model, max_tokens_per_forward=1024)
    assert lines == whole and 50 < model.largest <= 100
    assert sizes(report) == [1024, 512, 256, 128]


def test_too_little_memory_for_one_prompt(box):
    """It is an error of that prompt if other prompts succeed, even in an earlier start; if none does, the run stops.
    The other prompts keep their budget."""
    few, large = [{"prompt": "ab"}] * 10, {"prompt": "ab" * 20}
    model = Cramped(40)
    lines, report = box([*few, large, *few], model=model, max_tokens_per_forward=32)
    assert [i for i, line in enumerate(lines) if "error" in line] == [10] and "too little memory" in lines[10]["error"]
    assert model.largest > 16
    box.another()
    assert "out of memory with line 1 alone" in box.fails(model=Cramped(5))
    box.another()
    stopped(box, 10, [*few, large, large], model=Cramped(40))
    assert kept(box.output) == 10
    lines, report = box(model=Cramped(40))
    assert (report.failed, report.before) == (2, 10) and "too little memory" in lines[-1]["error"]
    box.another()
    stopped(box, 10, [*few, *prompts(40)])
    assert "out of memory with line" in box.fails(model=Cramped(2))  # no prompt fits, so the device is at fault


def test_another_configuration_is_refused_with_the_differences(box, tmp_path):
    box(prompts(3))
    before = box.output.read_bytes()
    message = box.fails(seed=6, k=3, diversity=7.0)
    for part in ("seed was 5 and is 6", "settings.k was 2 and is 3", "settings.params.diversity was 0.0 and is 7.0"):
        assert part in message
    assert "gen_length" not in message
    assert "model.parameters was" in box.fails(model=FakeModel(seed=1))
    assert 'dtype was "float64" and is "float32"' in box.fails(model=FakeModel(dtype=torch.float32))
    assert box(max_tokens_per_forward=99, seed=None)[1].seed == 5  # the token budget is not compared
    message = box.fails(prompts(4))
    assert f"the input file {box.input} has changed" in message and "restore the file" in message
    assert box.output.read_bytes() == before
    first = tmp_path / "first"
    folder = write_llada(tmp_path / "model")
    box.output, box.input = first, write(tmp_path / "q.jsonl", [{"prompt": "ab"}])
    box(model=str(folder))
    (folder / "tokenizer_config.json").write_text("{}")
    assert "model.files was" in box.fails(model=str(folder))
    box.output = tmp_path / "drawn.jsonl"
    _, report = box(seed=None)
    assert box(seed=None)[1].seed == report.seed  # the header keeps the seed of the first start
    assert "seed was" in box.fails(seed=report.seed + 1)


def test_files_of_other_programs_are_left_alone(box, tmp_path):
    box.output.write_text("mine\n")
    assert "was not made by d5p4 run" in box.fails(prompts(2))
    assert box.output.read_text() == "mine\n" and not box.parts.exists() and not box.header.exists()
    box.output.unlink()
    box.header.write_text('{"some": 1}')
    assert "is not the header of a run" in box.fails()
    box.header.unlink()
    box()
    box.output = tmp_path / "a.txt"
    assert "a.run.json is the header of a.jsonl" in box.fails()
    box.output = tmp_path / "a.jsonl"
    box.output.unlink()
    box.header.unlink()
    stopped(box, 1)
    box.header.unlink()
    assert "holds lines of a run whose a.run.json is gone" in box.fails()


def test_a_finished_output_that_was_changed_is_an_error(box):
    box(prompts(2))
    whole = box.output.read_bytes()
    box.output.write_bytes(whole[:-5])
    assert f"has {len(whole) - 5} bytes, but the run wrote {len(whole)}" in box.fails()
    box.output.unlink()
    assert "is gone" in box.fails()
    box.header.unlink()
    box()
    assert box.output.read_bytes() == whole


def test_bad_arguments(box, tmp_path):
    write(box.input, prompts(2))
    for options, expected in (
        ({"scorer": len}, "scorer: whole files and data sets do not accept this option"),
        ({"method": "best-of-n", "rank": "scorer"}, "rank='scorer' needs scorer="),
        ({"seed": 1.5}, "seed=1.5 must be a whole number"),
        ({"k": 0}, "k=0"),
    ):
        assert expected in box.fails(**options)
    given = box.input, box.output
    for places, expected in (
        (("-", given[1]), "- cannot be the input"),
        ((given[0], "/dev/null"), "/dev/null cannot be the output"),
        ((given[0], tmp_path / "none" / "a.jsonl"), "there is no folder"),
        ((given[0], tmp_path), "is a folder"),
        ((given[0], given[0]), "both input and output"),
        ((tmp_path / "none.jsonl", given[1]), "does not exist"),
    ):
        box.input, box.output = places
        assert expected in box.fails()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["p.jsonl"]


def test_damaged_and_edited_parts_are_noticed(box):
    """Whatever stands in a part, its line is decoded again and the output is that of an undisturbed run."""
    entries = prompts(12)
    whole, _ = box(entries)
    box.output.unlink()
    box.header.unlink()
    stopped(box, 12)
    kept_header = box.header.read_bytes()
    [part] = box.parts.glob("*.jsonl")
    lines = part.read_bytes().splitlines(keepends=True)
    good = json.loads(lines[-1])
    for edit in (
        {"line": -1},
        {"line": True},
        {"line": 99},
        {"settings": "0" * 12},
        {"settings": None},
        {"seed": 6},
        {"answers": [1, None]},
        {"answers": "ab"},
        {"rows": "many"},
        {"distinct": -3},
        {"error": 5},
        {"error": "both an error and answers"},
    ):
        part.write_bytes(b"".join(lines[:-1]) + json.dumps(good | edit).encode() + b"\n")
        _, report = box()
        assert any("has 1 broken line; its row counts as missing" in note for note in report.notes), edit
        assert box.lines() == whole, edit
        box.output.unlink()
        box.parts.mkdir()
        box.header.write_bytes(kept_header)
    for wrong in ({"starts": 3}, {"configuration": []}, {"settings": "edited"}, {"finished": True}, {"hash": None}):
        box.header.write_text(json.dumps(json.loads(kept_header) | wrong))
        assert "is not the header of a run" in box.fails(), wrong
    for wrong in ("", "[]", "null", "{}", "[" * 100_000):
        box.header.write_text(wrong)
        assert "is not the header of a run" in box.fails(), wrong[:9]


def test_parts_of_a_longer_input_and_folders_among_parts_are_named(box):
    stopped(box, 12, [{"prompt": ""}, *prompts(12)])
    [part] = box.parts.glob("*.jsonl")
    part.write_bytes(part.read_bytes().splitlines(keepends=True)[-1])  # a line that the shorter input does not have
    assert "the input file" in box.fails(prompts(1))
    (box.parts / "part-0009-0000.jsonl").mkdir()
    assert "part-0009-0000.jsonl cannot be read (Is a directory);" in box.fails()


def test_no_link_is_followed_when_a_file_is_written(box, tmp_path):
    """The names of temporary files and parts can be foreseen, so somebody else may have put links there."""
    other = tmp_path / "other"
    other.write_text("mine")
    for name in ("a.jsonl.partial", "a.run.json.partial"):
        (tmp_path / name).symlink_to(other)
    box(prompts(3))
    assert other.read_text() == "mine" and not box.output.is_symlink()
    (tmp_path / "part.jsonl").symlink_to(other)
    with pytest.raises(OSError):
        append(tmp_path / "part.jsonl", [b"x"])
    assert other.read_text() == "mine"
