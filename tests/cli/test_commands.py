import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from rich.console import Console

import d5p4
from d5p4.cli.answer import side_by_side
from d5p4.models.load import shipped_models
from d5p4.options import Settings, parameters_of, public


def test_generate_help_is_short_and_whole_at_80_columns(cli, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    lines = cli("generate", "--help").stdout.splitlines()
    assert len(lines) <= 46 and max(map(len, lines)) <= 80
    text = "\n".join(lines)
    basic = [name for name, p in parameters_of(Settings).items() if p.option.group == "basic"]
    assert all(f"--{name.replace('_', '-')} " in text.replace("[no-]", "") for name in basic) and "Example:" in text
    assert "--beta" not in text and "--top-k" not in text and "…" not in text


def test_help_all_shows_every_option(cli):
    shown = cli("generate", "--help-all")
    names = [*public("command"), *(name for method in d5p4.METHODS.values() for name in method.parameters)]
    assert shown.exit_code == 0
    for name in names:
        assert f"--{name.replace('_', '-')}" in shown.stdout.replace("[no-]", ""), name
    assert "--max-new-tokens" not in shown.stdout  # aliases work and are not shown


def test_the_model_comes_from_the_environment_or_the_box(cli, models, monkeypatch):
    short = ("generate", "two", "-k", 1, "--gen-length", 2, "--json", "--seed", 1)
    monkeypatch.setenv("D5P4_MODEL", models.llada)
    assert cli(*short).stdout == cli(*short, "-m", models.llada).stdout
    monkeypatch.setenv("D5P4_MODEL", "nothing")
    assert "the variable D5P4_MODEL names this model" in cli(*short).stderr
    monkeypatch.delenv("D5P4_MODEL")
    shipped = json.loads(cli("generate", "1,2:3", "-k", 1, "--steps", 1, "--json").stdout)
    assert shipped["answers"] and shipped["right"] in ([True], [False])
    assert shipped["nfe"] == 1  # steps replace the reveal rule of the model


def test_ctrl_c_during_the_import_ends_quietly(tmp_path):
    """The interrupt arrives when torch is imported: a module of that name stands in its place and sends it."""
    (tmp_path / "torch.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    code = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); import runpy, sys; "
    code += "sys.argv[0] = 'd5p4'; runpy.run_module('d5p4', run_name='__main__')"
    source = str(Path(d5p4.__file__).parents[1])
    ended = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), source])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == -signal.SIGINT and ended.stderr == ""


def test_methods(cli):
    """The methods that most users need come first."""
    outcome = json.loads(cli("methods", "--json").stdout)
    names = [entry["name"] for entry in outcome]
    assert names[:4] == ["tree", "d5p4", "independent", "best-of-n"] and set(names) == set(d5p4.METHODS)
    assert outcome[0]["parameters"] == {"diversity": 0.0} and outcome[1]["section"] == "3.3"
    assert outcome[1]["parameters"] == {"beta": 20.0, "solver": "full-search"}
    lines = cli("methods").stdout.splitlines()
    assert [line.split()[0] for line in lines if line[:1].strip()] == [*names[:4], "research", *names[4:]]


def test_info(cli, models):
    outcome = json.loads(cli("info", models.chat, "--device", "cpu", "--json").stdout)
    model = d5p4.load(models.chat, "cpu")
    assert outcome["parameters"] == sum(p.numel() for p in model.parameters())
    assert (outcome["architecture"], outcome["layers"], outcome["width"]) == ("llada", 2, 32)
    assert (outcome["mask_id"], outcome["mask_token"]) == (model.mask_id, "<|mdm_mask|>")
    assert tuple(outcome["eos_ids"]) == model.eos_ids and outcome["vocabulary"] == model.head.weight.shape[0]
    assert (outcome["max_length"], outcome["default_order"]) == (model.max_length, model.default_order)
    assert outcome["chat_template"] is True and outcome["defaults"] == {"k": 3, "temperature": 0.8}
    assert (outcome["dtype"], outcome["device"]) == ("float32", "cpu")
    assert outcome["weight_bytes"] > 4 * outcome["parameters"]
    shown = cli("info", models.mdlm).stdout
    assert "mdlm" in shown and "ancestral" in shown and "chat template  no" in shown


def test_info_lists_the_models_in_the_box(cli):
    listed = json.loads(cli("info", "--json").stdout)
    assert [entry["name"] for entry in listed] == ["countdown", *sorted({*shipped_models()} - {"countdown"})]
    shown = " ".join(cli("info").stdout.split())
    for entry in listed:
        weights = any(shipped_models()[entry["name"]].glob("*.safetensors"))
        assert len(entry["task"]) > 20 and (entry["weight_bytes"] > 1e6) == weights
        assert entry["example"].endswith(f"-m {entry['name']}")
        assert all(" ".join(text.split()) in shown for text in (entry["name"], entry["task"]))


def test_check(cli, models):
    broken = cli("check", models.broken)
    assert broken.exit_code == 1 and "\nfail  logits finite" in broken.stdout and broken.stdout.endswith("\nfail\n")
    outcome = cli("check", models.llada, "--device", "cpu", "--dtype", "float64")
    *lines, verdict = outcome.stdout.splitlines()
    assert outcome.exit_code == 0 and verdict == "pass"
    assert len(lines) >= 5 and all(line.startswith("pass  ") for line in lines)
    assert lines[-1].startswith("pass  decodes: tree, order ") and " rows in " in lines[-1]  # its own settings


def test_answers_cannot_disturb_the_terminal(capsys):
    """Neither by control characters nor by the markup of rich."""
    answers = ["[red]x[/red] [/]", "\x1b[2J\x00:smile:", "\n\n", "", "a\r\n\tb\u202e"]
    console = Console(file=io.StringIO(), width=60)
    console.print(side_by_side([("one", answers, None)], console.width))
    shown = console.file.getvalue()
    assert not any(bad in shown for bad in "\x1b\x00\r\t\u202e")
    for text in ("[red]x[/red] [/]", r"\x1b[2J\x00:smile:", "white space only", "empty", "    b"):
        assert text in shown
