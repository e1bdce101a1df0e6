import json
import os
import signal
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

import d5p4

module = sys.modules["d5p4.cli.run"]  # `d5p4.cli.run` is the command
ROOT = Path(__file__).resolve().parents[2]
SMALL = ("-k", 2, "--gen-length", 6, "--seed", 5, "--device", "cpu", "--dtype", "float64")


@pytest.fixture
def input(write):
    talk = [{"role": "user", "content": "two"}]
    return write(
        "p.jsonl",
        '{"id": "a", "prompt": "two plus two", "reference": "four", "score": 1}',
        *[json.dumps({"prompt": "one plus " + "one " * n}) for n in range(8)],
        json.dumps({"messages": talk}),
        "{",
    )


def test_run(cli, models, input, tmp_path):
    output = tmp_path / "a.jsonl"
    ended = cli("run", "-i", input, "-o", output, "-m", models.chat, *SMALL)
    assert ended.exit_code == 0, (ended.output, ended.exception)
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    model = d5p4.load(models.chat, "cpu", "float64")
    result = d5p4.generate(model, lines[0]["prompt"], k=2, gen_length=6, seed=5, keys=["a"])
    assert lines[0]["answers"] == result.texts[0] and "not valid JSON" in lines[-1]["error"]
    first, second = ended.stdout.splitlines()
    assert first == f"{output}: 11 prompts, 1 of them failed"
    assert "11 now, 0 before" in second and "distinct" in second and "seed 5" in second and "prompts/s" in second
    assert "note: 1 prompt failed: its line says why" in ended.stderr
    assert (tmp_path / "a.run.json").is_file()


def test_run_again(cli, fails, models, input, tmp_path):
    arguments = ("run", "-i", input, "-o", tmp_path / "a.jsonl", "-m", models.llada)
    assert cli(*arguments, *SMALL, "--quiet").stderr == ""
    again = cli(*arguments, *SMALL, "--json")
    report = json.loads(again.stdout)
    assert again.stderr.count("note") == 1
    assert (report["now"], report["before"], report["failed"], report["seed"]) == (0, 11, 1, 5)
    message = fails(*arguments, *SMALL, "--method", "independent", "--seed", 6)
    assert 'settings.method was "tree" and is "independent"' in message and "seed was 5 and is 6" in message
    retried = json.loads(cli(*arguments, *SMALL, "--retry-errors", "--json", "--quiet").stdout)
    assert (retried["now"], retried["before"], retried["failed"]) == (1, 10, 1)


def test_errors(fails, models, input, tmp_path):
    def message(*options, file=input):
        return fails("run", "-i", file, "-o", tmp_path / "a.jsonl", "-m", models.chat, *SMALL, *options)

    assert "p.jsonl line 11: not valid JSON" in message("--strict")
    assert "mesh=2,1 needs 2 ranks, but there are 1" in message("--mesh", "2,1")
    assert "mesh='2x1' must be two whole numbers" in message("--mesh", "2x1")
    assert "timeout=0 must be" in message("--timeout", 0)
    assert "--method='d5p5' is not a method" in message("--method", "d5p5")
    assert "none.jsonl does not exist" in message(file=tmp_path / "none.jsonl")
    assert not (tmp_path / "a.jsonl").exists() and not (tmp_path / "a.jsonl.parts").exists()


@pytest.mark.full
def test_torchrun(cli, models, input, tmp_path):
    """Two ranks print one report and write the file that one process writes."""
    given = ["-i", input, "-m", models.chat, *SMALL, "--max-tokens-per-forward", 64]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2, "-m", "d5p4"]
    place = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]), "OMP_NUM_THREADS": "1"}
    words = [str(word) for word in (*torchrun, "run", "-o", tmp_path / "a.jsonl", *given)]
    ended = subprocess.run(words, env=place, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("11 prompts") == 1 and "11 now, 0 before" in ended.stdout
    [begun] = json.loads((tmp_path / "a.run.json").read_text())["starts"]
    assert begun["ranks"] == 2 and begun["mesh"] == [2, 1]
    assert cli("run", "-o", tmp_path / "b.jsonl", *given).exit_code == 0
    assert (tmp_path / "a.jsonl").read_bytes() == (tmp_path / "b.jsonl").read_bytes()


def test_sigterm_stops_a_run_with_a_message(cli, models, write, tmp_path, monkeypatch):
    """The signal comes after the first batch, as Slurm may send it; the same command continues."""
    input = write("p.jsonl", *[json.dumps({"prompt": "one plus " + "one " * n}) for n in range(4)])
    command = ("run", "-i", input, "-o", tmp_path / "a.jsonl", "-m", models.chat, *SMALL)
    command += ("--max-tokens-per-forward", 8)

    def stop(pace):
        if pace.rows:
            signal.raise_signal(signal.SIGTERM)

    def missed(*_):
        raise AssertionError("the run did not catch the signal")

    before = signal.signal(signal.SIGTERM, missed)
    try:
        with monkeypatch.context() as patch:
            patch.setattr("d5p4.jobs.run.OFTEN", 0.0)
            patch.setattr(module, "file_progress", lambda shown: nullcontext(stop))
            stopped = cli(*command)
        assert signal.getsignal(signal.SIGTERM) is missed
    finally:
        signal.signal(signal.SIGTERM, before)
    assert (stopped.exit_code, stopped.stdout) == (143, "")
    assert stopped.stderr == "stopped by SIGTERM; finished lines are kept: run the same command again to continue\n"
    report = json.loads(cli(*command, "--json", "--quiet").stdout)
    assert report["now"] + report["before"] == 4 and report["before"] > 0 and report["now"] > 0
