import os
import subprocess
import sys
from pathlib import Path

import d5p4

SMALL = ("--gen-length", 2, "--seed", 1)
BAD = [
    (("--method", "best"), "--method='best' is not a method; did you mean best-of-n?"),
    (("-k", 0), "k=0"),
    (("-w", 0), "w=0"),
    (("--alpha", 2), "--alpha: it is a parameter of diverse-beam"),
    (("--temperature", "nan"), "temperature=nan"),
    (("--method", "random", "--solver", "exact"), "--solver: it is a parameter of d5p4"),
    (("--guidance-window", "12"), "--guidance-window='12'"),
    (("--select-window", "4:2"), "--select-window='4:2'"),
    (("--gen-length", 500), "500 more"),
    (("--num-return-sequences", 2, "-k", 2), "the same setting"),
    (("--device", "toaster"), "device='toaster'"),
    (("--dtype", "int4"), "dtype='int4'"),
    (("--sets", 2), "sets"),
]


def test_bad_options(fails, models):
    for options, expected in BAD:
        assert expected in fails("generate", "two", "-m", models.llada, *SMALL, *options), options


def test_an_unknown_model(fails):
    for command in (("generate", "two", "-m"), ("compare", "two", "-m"), ("info",), ("check",)):
        assert "'no-such-model'" in fails(*command, "no-such-model"), command


def test_bad_prompts(fails, models):
    for prompt, model, expected in (
        ("a" * 300, models.llada, "error: the prompt has 300 tokens"),
        ("a <|mdm_mask|>", models.chat, "a chat prompt holds the mask token"),
        ("a\udcff", models.llada, "not valid text"),
        ("two", models.broken, "not finite at step 0"),  # whose weights are no numbers
    ):
        assert expected in fails("generate", prompt, "-m", model, *SMALL)


def test_interrupt(cli, models, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(d5p4, "generate", interrupted)
    outcome = cli("generate", "two", "-m", models.llada)
    assert (outcome.exit_code, outcome.stdout, outcome.stderr) == (130, "", "stopped\n")


def test_usage_errors(cli):
    for arguments in (("generate", "two"), ("compare",), ("nothing",), ("generate", "-m", "x", "-k", "two")):
        outcome = cli(*arguments)
        assert outcome.exit_code == 2 and outcome.stdout == "" and "Traceback" not in outcome.stderr


def test_processes_of_their_own(models):
    """What goes wrong is one sentence; an output that cannot be written is no traceback, a closed pipe is quiet."""

    place = os.environ | {"PYTHONPATH": str(Path(d5p4.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    commands = "info no-such-model", "methods --json | true", "methods >/dev/full", f"info {models.llada} >&-"
    lines = [f"{sys.executable} -m d5p4 {words}" for words in commands]
    started = [subprocess.Popen(["bash", "-c", line], env=place, **pipes) for line in lines]
    wrong, unread, full, closed = [(*process.communicate(timeout=100), process.returncode) for process in started]
    assert wrong[0] == "" and wrong[1].startswith("error: ") and wrong[1].count("\n") == 1 and wrong[2] == 2
    assert unread[1] == ""
    assert "cannot write" in full[1] and full[1].count("\n") == 1 and full[2] == 2
    assert closed[1:] == ("", 0)
