import os
import subprocess
import sys
from pathlib import Path

import pytest

import d5p4

SMALL = ("--gen-length", 4, "--seed", 1)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (("--method", "best"), "there is no method 'best'"),
        (("-k", 0), "k=0"),
        (("-w", 0), "w=0"),
        (("--alpha", 2), "no parameter alpha"),
        (("--temperature", "nan"), "temperature=nan"),
        (("--method", "random", "--solver", "exact"), "no solver"),
        (("--guidance-window", "12"), "guidance_window='12'"),
        (("--select-window", "4:2"), "select_window=(4, 2)"),
        (("--gen-length", 500), "500 more"),
        (("--num-return-sequences", 2, "-k", 2), "the same setting"),
        (("--device", "toaster"), "device='toaster'"),
        (("--dtype", "int4"), "dtype='int4'"),
        (("--sets", 2), "sets"),
        (("--file", "p.jsonl"), "--file"),
    ],
)
def test_bad_options(fails, models, options, expected):
    assert expected in fails("generate", "two", "-m", models.llada, *SMALL, *options)


@pytest.mark.parametrize("command", [("generate", "two", "-m"), ("compare", "two", "-m"), ("info",), ("check",)])
def test_unknown_model(fails, command):
    assert "'no-such-model'" in fails(*command, "no-such-model")


def test_long_prompt(fails, models):
    assert "prompt 0 has 300 tokens" in fails("generate", "a" * 300, "-m", models.llada, *SMALL)


def test_mask_in_a_chat_prompt(fails, models):
    assert "mask token in a chat prompt" in fails("generate", "a <|mdm_mask|>", "-m", models.chat, *SMALL)


def test_prompt_that_is_no_text(fails, models):
    assert "not valid text" in fails("generate", "a\udcff", "-m", models.llada, *SMALL)


def test_bad_files(fails, models, write, tmp_path):
    def sentence(path):
        return fails("generate", "--file", path, "-m", models.llada, *SMALL)

    assert "holds no prompt" in sentence(write("empty.jsonl"))
    assert "broken.jsonl line 3: not valid JSON" in sentence(write("broken.jsonl", '{"prompt": "a"}', "", "{prompt}"))
    assert "does not exist" in sentence(tmp_path / "none.jsonl")


def test_weights_that_are_not_numbers(fails, models):
    said = fails("generate", "two", "-m", models.broken, *SMALL)
    assert "not finite at step 0" in said and "row 0" in said


def test_interrupt(cli, models, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(d5p4, "generate", interrupted)
    found = cli("generate", "two", "-m", models.llada)
    assert (found.exit_code, found.stdout, found.stderr) == (130, "", "stopped\n")


def test_usage_errors(cli):
    for arguments in (("generate", "two"), ("compare",), ("nothing",), ("generate", "-m", "x", "-k", "two")):
        found = cli(*arguments)
        assert found.exit_code == 2 and found.stdout == "" and "Traceback" not in found.stderr


def run(*arguments, **options):
    source = str(Path(d5p4.__file__).parents[1])
    environment = os.environ | {"PYTHONPATH": source, "HF_HUB_OFFLINE": "1"}
    return subprocess.Popen([sys.executable, "-m", "d5p4", *arguments], env=environment, text=True, **options)


def test_a_process_of_its_own():
    started = run("info", "no-such-model", stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    out, err = started.communicate()
    assert started.returncode == 2 and out == ""
    assert err.startswith("error: ") and err.count("\n") == 1


def test_a_closed_pipe_is_quiet():
    reader, writer = os.pipe()
    os.close(reader)
    started = run("methods", "--json", stdout=writer, stderr=subprocess.PIPE)
    os.close(writer)
    assert started.communicate()[1] == ""


def test_a_bad_prompt_of_a_file_is_named_by_its_line(fails, models, tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("a cat\n\n" + "a" * 500 + "\n")
    assert "prompts.txt line 3 has 500 tokens" in fails("generate", "-m", models.llada, "--file", file)


@pytest.mark.parametrize("command, ending", [
    (["methods"], "> /dev/full"), (["info"], ">&-"), pytest.param(["info"], "> /dev/full", marks=pytest.mark.full),
    pytest.param(["methods"], ">&-", marks=pytest.mark.full),
])  # fmt: skip
def test_an_output_that_cannot_be_written_is_no_traceback(models, command, ending):
    words = [sys.executable, "-m", "d5p4", *command, *([models.llada] if command == ["info"] else [])]
    done = subprocess.run(["bash", "-c", f"{' '.join(words)} {ending}"], capture_output=True, text=True)
    assert "Traceback" not in done.stderr
    assert (done.returncode, "cannot write" in done.stderr) in [(2, True), (0, False)]


@pytest.mark.parametrize("name", ["train", "reproduce"])
def test_what_moved_to_the_lab_says_where_it_is(fails, name):
    for words in ([], ["--help"], ["countdown", "--steps", "3", "-x"]):
        assert f"python -m d5p4_lab {name}" in fails(name, *words), words
