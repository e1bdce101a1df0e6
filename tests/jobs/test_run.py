"""What run_file promises in one process; kills and ranks have files of their own."""

import json
import re

import pytest
import torch

import d5p4
from d5p4.distributed import Mesh, RankLost
from d5p4.jobs import plan
from d5p4.jobs import run as module
from tests.checkpoints import write_llada
from tests.fake import FakeModel
from tests.jobs.work import SMALL, Cramped, Spoiled, prompts, write


@pytest.fixture
def box(tmp_path):
    """Run in a folder: the output's lines, and the report."""

    class Box:
        output = tmp_path / "a.jsonl"
        header = tmp_path / "a.run.json"
        parts = tmp_path / "a.jsonl.parts"
        input = tmp_path / "p.jsonl"

        def __call__(self, entries=None, model=None, **options):
            if isinstance(entries, list):
                write(self.input, entries)
            report = d5p4.run_file(model or FakeModel(), self.input, self.output, **SMALL | options)
            return self.lines(), report

        def lines(self):
            return [json.loads(line) for line in self.output.read_text().split("\n")[:-1]]

        def fails(self, *given, **options):
            with pytest.raises(d5p4.D5P4Error) as caught:
                self(*given, **options)
            return str(caught.value)

    return Box()


def test_run_gives_what_generate_gives(box):
    """The same answers for the same seed, with ids and without, however the file is cut into batches."""
    entries = prompts(40)
    lines, report = box(entries, logprobs=True)
    keys = [entry.get("id") for entry in entries]
    with pytest.warns(d5p4.DuplicateAnswers):
        result = d5p4.generate(
            FakeModel(), [entry["prompt"] for entry in entries], keys=keys, logprobs=True,
            **SMALL | {"max_tokens_per_forward": None},
        )  # fmt: skip
    assert [line["answers"] for line in lines] == result.texts
    assert [line["tokens"] for line in lines] == result.answers
    assert [line["rows"] for line in lines] == result.rows.tolist()
    assert [line["reveal_step"] for line in lines] == result.reveal_step
    for name in ("score", "logdet"):
        wanted = [[None if not torch.tensor(x).isfinite() else float(f"{x:.6g}") for x in row]
                  for row in getattr(result, name).reshape(40, -1).tolist()]  # fmt: skip
        assert [line[name] if name == "score" else [line[name]] for line in lines] == wanted
    assert [line["line"] for line in lines] == list(range(1, 41))
    assert {line["seed"] for line in lines} == {5} and {line["settings"] for line in lines} == {report.settings}
    assert (report.prompts, report.now, report.before, report.failed) == (40, 40, 0, 0)
    assert report.rows == int(result.rows.sum())
    assert report.distinct == pytest.approx(int(result.distinct.sum()) / 80, abs=1e-6)
    assert not box.parts.exists()


def test_windows_do_not_change_answers(box, tmp_path, monkeypatch):
    lines, _ = box(prompts(30))
    monkeypatch.setattr(plan, "WINDOW", 7)
    box.output = tmp_path / "b.jsonl"
    assert box()[0] == lines


def test_fields_of_the_input_are_carried_through(box):
    entry = {"id": 3, "prompt": "ab", "reference": ["x"], "more": {"é": None}, "bad": float("nan")}
    taken = {"score": 1, "line": "x", "error": "none", "given": 0}
    [line], _ = box([entry | taken])
    assert {name: line[name] for name in entry} == entry | {"bad": None}
    assert line["given"] == taken and line["line"] == 1 and "error" not in line
    assert list(line)[:2] == ["id", "prompt"] and "tokens" not in line


def test_plain_text_and_messages(box, tmp_path):
    box.input = tmp_path / "p.txt"
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
        b'{"prompt": "zz"}': "holds token id 25, outside the model's 12 ids",
        b'{"prompt": "%s", "level": 2}' % (b"a" * 99): "the prompt has 99 tokens and asks for 4 more",
        b'{"messages": [{"role": "user", "content": "a"}]}': "a conversation, but this model has no chat template",
    }
    box.input.write_bytes(b"\n".join([*good, *bad]))
    lines, report = box()
    assert [len(line["answers"]) for line in lines] == [2] * 3 + [0] * len(bad)
    for line, (text, expected) in zip(lines[3:], bad.items(), strict=True):
        assert expected in line["error"], text
    assert lines[6]["text"] == "ab" and lines[7]["id"] == "n0" and lines[9]["level"] == 2
    assert report.failed == len(bad) and f"{len(bad)} prompts failed" in report.notes[0]
    assert box()[1].now == 0  # an error is an end too
    box.output = box.output.with_name("b.jsonl")
    assert "line 4: not valid JSON" in box.fails(strict=True) and not box.output.exists()


@pytest.mark.parametrize(
    "good, wrong, options, told",
    [
        ("abl", "allll", {"steps": 2, "block_length": 1}, "steps=2 is fewer than the 4 blocks"),
        ("abll", "al", {"temperature": 0.0, "order": "tempered"}, "temperature=0 with one step a block"),
    ],
)
def test_a_window_that_has_no_schedule_is_a_line_with_an_error(box, good, wrong, options, told):
    """The window is that of the holes, so it can be one prompt's fault; where it is everybody's the run stops."""
    options = options | {"gen_length": None}
    lines, report = box([{"prompt": good}] * 30 + [{"prompt": wrong}], **options)
    assert report.failed == 1 and told in lines[-1]["error"]
    box.output = box.output.with_name("b.jsonl")
    message = box.fails([{"prompt": wrong}] * 30, **options)
    assert "none of the first 30 prompts can be decoded" in message and told in message


def test_errors_are_decoded_again_on_request(box):
    entries = prompts(8)
    wrong = [i for i, entry in enumerate(entries) if entry["prompt"][0] == "a"]
    lines, report = box(entries, model=Spoiled(0))
    assert [i for i, line in enumerate(lines) if "error" in line] == wrong and report.failed == len(wrong)
    assert "not finite" in lines[wrong[0]]["error"]
    # The model stands for a device that failed: its weights are those of the other.
    again, report = box(model=FakeModel(), retry_errors=True)
    box.output = box.output.with_name("b.jsonl")
    assert again == box()[0] and (report.failed, report.now, report.before) == (0, len(wrong), 8 - len(wrong))
    assert box(retry_errors=True)[1].now == 0


def test_logits_that_are_not_finite_spoil_only_their_prompt(box, tmp_path):
    entries = prompts(40)
    lines, report = box(entries, model=Spoiled(0, 2), max_tokens_per_forward=4096)
    box.output = tmp_path / "b.jsonl"
    whole, _ = box()
    for line, good in zip(lines, whole, strict=True):
        spoiled = line["prompt"][0] in "ac"
        assert ("error" in line) == spoiled
        assert spoiled or line | {"settings": 0} == good | {"settings": 0}
    box.output = tmp_path / "c.jsonl"
    assert "p.jsonl line 1: the model gave logits" in box.fails(model=Spoiled(0), strict=True)


def test_when_everything_fails_nothing_is_marked_as_finished(box):
    entries = [{"prompt": "abc"}] * 30
    message = box.fails(entries, model=Spoiled(0))
    assert re.search(r"the first 2\d prompts all failed.*line 1: the model gave logits", message)
    assert not box.output.exists()
    lines, report = box(model=FakeModel())
    assert report.before == 0 and all(line["answers"] for line in lines)


def stopped(box, at, *given, **options):
    """A start that ends when so many prompts are finished: how many lines are on the disk."""

    class Stopped(BaseException):
        pass

    def stop(pace):
        if pace.now >= at:
            raise Stopped

    with pytest.raises(Stopped):
        box(*given, progress=stop, **options)
    return sum(path.read_bytes().count(b"\n") for path in box.parts.glob("part-*"))


def test_failures_after_answers_never_stop_a_run(box):
    """Whether the answers are this start's, an earlier one's or, with retry_errors, those of a finished run."""
    options = {"model": Spoiled(2), "max_tokens_per_forward": 4}
    entries = [{"prompt": "ab"}] * 10 + [{"prompt": "cabab"}] * 24
    assert stopped(box, 10, entries, **options) == 10
    assert stopped(box, 15, **options) == 25  # each failure is on the disk at once
    _, report = box(**options)
    assert (report.failed, report.before) == (24, 25)
    _, report = box(retry_errors=True, **options)
    assert (report.failed, report.now, report.before) == (24, 24, 10)


def test_a_prompt_that_is_too_large_may_be_all_that_is_left(box):
    entries = [{"prompt": "ab"}] * 10 + [{"prompt": "ab" * 20}] * 2
    assert stopped(box, 10, entries, model=Cramped(40)) == 10
    lines, report = box(model=Cramped(40))
    assert (report.failed, report.before) == (2, 10) and "too little memory" in lines[-1]["error"]
    box.output = box.output.with_name("b.jsonl")
    stopped(box, 10, [*entries[:10], *prompts(40)])
    assert "out of memory with line" in box.fails(model=Cramped(2))  # none of so many fits: it is the device


def test_bad_lines_are_written_at_once_and_never_stop_a_run(box, monkeypatch):
    monkeypatch.setattr(plan, "WINDOW", 8)
    assert stopped(box, 8, [{"prompt": "ab"}] * 8 + [{"prompt": "zz"}] * 60) == 8
    assert stopped(box, 24) == 32
    assert box()[1].failed == 60
    box.output = box.output.with_name("b.jsonl")  # bad windows first, but fewer bad lines in one than are a sign
    assert box([{"prompt": "zz"}] * 40 + [{"prompt": "ab"}] * 9)[1].failed == 40


def test_a_file_without_a_prompt_that_can_be_decoded_stops(box, monkeypatch):
    monkeypatch.setattr(plan, "WINDOW", 32)
    entries = [{"question": "ab"}] * 40
    message = box.fails(entries)
    assert "none of the first 32 prompts can be decoded" in message and "line 1: has neither 'prompt' nor" in message
    assert not box.output.exists() and not box.parts.exists()
    assert box([{"prompt": "ab"}, *entries])[1].failed == 40


def test_what_is_decoded_is_kept_when_another_rank_has_failed(box):
    class Left(Mesh):
        """Tells of the failure as soon as it is asked something that is no ticket."""

        def count(self, name, more=0):
            if not name.endswith("batch"):
                raise RankLost("rank 1 gave up")
            return super().count(name, more)

    assert "rank 1 gave up" in box.fails(prompts(3), mesh=Left())
    [part] = box.parts.glob("part-*")
    assert part.read_bytes().count(b"\n") >= 1


def test_a_file_of_failures_is_no_finished_run(box):
    """However few they are; and it may be mended without another output."""
    assert "all prompts of" in (said := box.fails([{"prompt": "zz"}] * 3)) and "the first: line 1: " in said
    assert not box.output.exists()
    lines, report = box(prompts(2))
    assert report.failed == 0 and [line["line"] for line in lines] == [1, 2]


@pytest.mark.parametrize("name", ["-", "/dev/null"])
def test_only_files_on_a_disk_are_read_and_written(box, name):
    model, prompts_file = FakeModel(), box.input
    for given in ((name, "a.jsonl"), (prompts_file, name)):
        with pytest.raises(d5p4.D5P4Error, match=f"{name} cannot be the (input|output)"):
            d5p4.run_file(model, *given, **SMALL)


def sizes(report):
    """Budgets that were too large, as the report tells them."""
    return [int(re.search(r"budget of (\d+)", note)[1]) for note in report.notes if "out of memory" in note]


def test_too_little_memory_halves_the_budget(box, tmp_path):
    """Answers stay the same; the report notes each size once."""
    whole, _ = box(prompts(40), max_tokens_per_forward=1024)
    box.output = tmp_path / "b.jsonl"
    model = Cramped(100)
    lines, report = box(model=model, max_tokens_per_forward=1024)
    assert lines == whole and 50 < model.largest <= 100
    assert sizes(report) == [1024, 512, 256, 128]


def test_too_little_memory_leaves_fixed_shapes_alone(box, tmp_path, monkeypatch):
    """Under `deterministic` only fewer prompts at a time can help."""
    options = {"deterministic": True, "max_tokens_per_forward": 256}
    whole, _ = box(prompts(40), **options)
    box.output = tmp_path / "b.jsonl"
    shapes, real = set(), module.run_requests

    def crowded(model, requests, keys, settings, seed, **given):
        if len(requests) > 3:
            raise torch.OutOfMemoryError("no room")
        shapes.add(settings.max_tokens_per_forward)
        return real(model, requests, keys, settings, seed, **given)

    monkeypatch.setattr(module, "run_requests", crowded)
    lines, report = box(**options)
    assert lines == whole and shapes == {256} and sizes(report)[0] == 256
    box.output = tmp_path / "c.jsonl"
    assert "out of memory with line" in box.fails(model=Cramped(100), **options)


def test_too_little_memory_for_one_prompt(box, tmp_path):
    """An error where others succeed, the end of the run where none did; others keep the budget they had."""
    entries = [{"prompt": "ab"}] * 10 + [{"prompt": "ab" * 20}] + [{"prompt": "ba"}] * 10
    model = Cramped(40)
    lines, report = box(entries, model=model, max_tokens_per_forward=32)
    assert [i for i, line in enumerate(lines) if "error" in line] == [10] and "too little memory" in lines[10]["error"]
    assert model.largest > 16
    box.output = tmp_path / "b.jsonl"
    assert "out of memory with line 1 alone" in box.fails(model=Cramped(5))


def test_the_header_says_what_was_done(box):
    _, report = box(prompts(3))
    found = json.loads(box.header.read_text())
    held = found["configuration"]
    assert found["output"] == "a.jsonl" and found["finished"] and found["size"] == box.output.stat().st_size
    assert held["settings"]["k"] == 2 and held["seed"] == 5 and held["dtype"] == "float64"
    assert held["d5p4"] == d5p4.__version__ and held["gen_length_given"] is True
    assert found["report"] == json.loads(json.dumps(report.to_dict()))
    [start] = found["starts"]
    assert (start["ranks"], start["torch"]) == (1, torch.__version__)


def test_another_configuration_is_refused_with_the_differences(box, tmp_path):
    box(prompts(3))
    before = box.output.read_bytes()
    message = box.fails(seed=6, k=3, beta=7.0)
    for part in ("seed was 5 and is 6", "settings.k was 2 and is 3", "settings.params.beta was 20.0 and is 7.0"):
        assert part in message
    assert "gen_length" not in message
    assert "model.parameters was" in box.fails(model=FakeModel(seed=1))
    assert 'dtype was "float64" and is "float32"' in box.fails(model=FakeModel(dtype=torch.float32))
    box(max_tokens_per_forward=99, seed=None)  # how the work is cut is no part of it
    assert "input was" in box.fails(prompts(4))
    assert box.output.read_bytes() == before
    first = tmp_path / "first"
    folder = write_llada(tmp_path / "model")
    box.output, box.input = first, write(tmp_path / "q.jsonl", [{"prompt": "ab"}])
    box(model=str(folder))
    (folder / "tokenizer_config.json").write_text("{}")
    assert "model.files was" in box.fails(model=str(folder))


def test_an_unfinished_run_without_a_line_may_change_its_configuration(box):
    box.fails([{"prompt": "abc"}] * 30, model=Spoiled(0))
    assert json.loads(box.header.read_text())["finished"] is False
    assert box(k=3)[1].failed == 0


def test_the_seed_of_the_first_start_is_kept(box):
    _, report = box(prompts(4), seed=None)
    assert box(seed=None)[1].seed == report.seed == json.loads(box.header.read_text())["configuration"]["seed"]
    assert "seed was" in box.fails(seed=report.seed + 1)


def test_what_others_made_is_left_alone(box, tmp_path):
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


def test_a_finished_output_that_was_changed_is_an_error(box):
    box(prompts(2))
    whole = box.output.read_bytes()
    box.output.write_bytes(whole[:-5])
    assert f"has {len(whole) - 5} bytes where the run left {len(whole)}" in box.fails()
    box.output.unlink()
    assert "is gone" in box.fails()
    box.header.unlink()
    box()
    assert box.output.read_bytes() == whole


def test_bad_arguments(box, tmp_path):
    write(box.input, prompts(2))
    for options, expected in (
        ({"scorer": len}, "scorer has no meaning for a whole file"),
        ({"references": ["x"]}, "references has no meaning"),
        ({"history": True}, "history has no meaning"),
        ({"prompts": "abc"}, "prompts has no meaning"),
        ({"seed": 1.5}, "seed=1.5 must be a whole number"),
        ({"alpha": 1.0}, "method 'd5p4' has no parameter alpha"),
        ({"k": 0}, "k=0"),
    ):
        assert expected in box.fails(**options)
    box.output = tmp_path / "none" / "a.jsonl"
    assert "there is no folder" in box.fails()
    box.output = tmp_path
    assert "is a folder" in box.fails()
    box.output = box.input
    assert "both input and output" in box.fails()
    box.input = tmp_path / "none.jsonl"
    assert "does not exist" in box.fails()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["p.jsonl"]


def test_progress(box):
    seen = []
    box(prompts(40), progress=seen.append)
    assert seen[-1].now == 40 and seen[-1].total == 40 and seen[-1].before == 0 and seen[-1].rows > 40
    assert all(a.now <= b.now and a.seconds <= b.seconds for a, b in zip(seen, seen[1:], strict=False))
    assert seen[0].left > 0 and seen[-1].left == 0
