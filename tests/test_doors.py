"""A new option is one entry, and a stranger's method is one dataclass: both then work at every door.

The doors are built from the table and the registry when they are made, so the first test runs a process of its own.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

from fastapi.testclient import TestClient
from typer.testing import CliRunner

import d5p4
from d5p4.cli import build
from d5p4.integrations.lm_eval import D5P4LM
from d5p4.serve import create_app
from tests.checkpoints import write_llada
from tests.refusals import refusal

SOURCE = Path(d5p4.__file__).parent

PLUGIN = '''
from dataclasses import dataclass
from typing import Annotated

import d5p4


@dataclass(frozen=True)
class Rows:
    """Keeps the child with this number of every parent."""

    child: Annotated[int, d5p4.Option("Which child is kept.", least=0)] = 0

    def __call__(self, pool, k, key):
        width = pool.size // k
        return pool.keep(pool.group.new_tensor([i * width + self.child % width for i in range(k)]).expand(len(key), k))


@dataclass(frozen=True)
class Some:
    """Reveals this many positions per step."""

    count: Annotated[int, d5p4.Option("Positions per step.", least=1)] = 1

    def __call__(self, seen):
        return seen.probability.new_ones(seen.probability.shape).cumsum(-1) <= self.count


d5p4.register(d5p4.Method("rows", Rows, "keeps one child by its number"))
d5p4.register(d5p4.Order("right", lambda seen: seen.place.float(), "right to left"))
d5p4.register(d5p4.Reveal("some", Some, "as many as asked"))
'''

DOORS = """
import contextlib, io, json, sys
from pathlib import Path

import d5p4
from d5p4.cli import main
from d5p4.integrations.lm_eval import D5P4LM
from d5p4.serve import create_app
from fastapi.testclient import TestClient

cases, folder = json.loads(sys.argv[1])
model = d5p4.load(folder, "cpu")


def command(*arguments):
    output = io.StringIO()
    sys.argv = ["d5p4", *map(str, arguments)]
    with contextlib.redirect_stdout(output), contextlib.suppress(SystemExit):
        main()
    return output.getvalue()


for chosen, option, value in cases:

    def of(settings):
        return {**settings, **settings["params"]}[option]

    doors = {}
    result = d5p4.generate(model, "two", **chosen, k=2, gen_length=4, seed=1, **{option: value})
    doors["python"] = of(result.settings.to_dict())
    flag = "--" + option.replace("_", "-")
    base = ["-k", 2, "--gen-length", 4, "--seed", 1, "-m", folder, "--device", "cpu"]
    base += [word for name, value in chosen.items() for word in ("--" + name, value)] + [flag, value]
    doors["command"] = of(json.loads(command("generate", "two", "--json", *base))["settings"])
    Path("in.txt").write_text("two")
    command("run", "-i", "in.txt", "-o", f"{option}.jsonl", "--quiet", *base)
    doors["run"] = of(json.loads(Path(f"{option}.run.json").read_text())["configuration"]["settings"])
    lm_eval = D5P4LM(model, k=1, gen_length=4, **chosen, **{option: str(value)})
    doors["lm-eval"] = of(lm_eval._settings.to_dict())
    with TestClient(create_app(model, name="tiny")) as client:
        body = {"prompt": "two", "n": 2, "max_tokens": 4, "seed": 1, **chosen}
        while client.get("/readyz").status_code != 200:
            pass
        answer = client.post("/v1/completions", json=body | {option: value})
        assert answer.status_code == 200, answer.text
        assert [choice["text"] for choice in answer.json()["choices"]] == result.texts[0]
        other = client.post("/v1/completions", json=body | {option: -1})
        assert other.status_code == 400 and option in other.json()["error"]["message"]
        assert option in json.dumps(client.get("/openapi.json").json())
    assert flag in command("generate", "--help-all")
    assert all(setting == value for setting in doors.values()), (option, doors)
"""


def test_one_entry_in_the_table_and_a_strangers_method_appear_at_every_door(tmp_path):
    """The package with one more line in options.py, and a package with the entry points `d5p4.plugins`."""
    package = tmp_path / "changed" / "d5p4"
    package.mkdir(parents=True)
    for entry in SOURCE.iterdir():  # every other file is the real one
        (package / entry.name).symlink_to(entry)
    text = (SOURCE / "options.py").read_text(encoding="utf-8")
    line = '    flavour: Annotated[int, Option("An option of the test.", "reveal", 0)] = 3\n'
    marker = "    params: Mapping[str, Any] = field(default_factory=dict)\n"
    assert text.count(marker) == 1
    (package / "options.py").unlink()
    (package / "options.py").write_text(text.replace(marker, line + marker), encoding="utf-8")
    info = tmp_path / "site" / "d5p4_rows-1.0.dist-info"
    info.mkdir(parents=True)
    (info.parent / "d5p4_rows.py").write_text(PLUGIN)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: d5p4-rows\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[d5p4.plugins]\nrows = d5p4_rows\n")
    cases = [({}, "flavour", 7), ({"method": "rows"}, "child", 1), ({"order": "right", "reveal": "some"}, "count", 1)]
    given = json.dumps([cases, str(write_llada(tmp_path / "model"))])
    paths = os.pathsep.join(map(str, (package.parent, info.parent, SOURCE.parent)))
    environment = os.environ | {"PYTHONPATH": paths}
    ended = subprocess.run([sys.executable, "-c", DOORS, given], cwd=tmp_path, env=environment, capture_output=True)
    assert ended.returncode == 0, ended.stderr.decode()


def test_without_options_every_door_gives_the_same_texts_which_differ(tmp_path):
    folder = write_llada(tmp_path / "model", generation={"d5p4": {"length": 6}})
    model = d5p4.load(folder, "cpu")

    def command(*words):
        outcome = CliRunner().invoke(build(), [*map(str, words), "-m", str(folder), "--seed", "3", "--device", "cpu"])
        assert outcome.exit_code == 0, outcome.output
        return outcome.stdout

    texts = {"python": d5p4.generate(model, "two", seed=3).texts[0]}
    texts["command"] = json.loads(command("generate", "two", "--json"))["answers"]
    (tmp_path / "in.txt").write_text("two")
    command("run", "-i", tmp_path / "in.txt", "-o", tmp_path / "out.jsonl", "--quiet")
    texts["run"] = json.loads((tmp_path / "out.jsonl").read_text())["answers"]
    with TestClient(create_app(lambda: model, name="tiny")) as client:
        while client.get("/readyz").status_code != 200:
            pass
        reply = client.post("/v1/completions", json={"prompt": "two", "n": 4, "seed": 3}).json()
    texts["http"] = [choice["text"] for choice in reply["choices"]]
    request = SimpleNamespace(args=("two", {}), task_name="task", doc_id=0, idx=0)
    texts["lm-eval"] = D5P4LM(model, seed=3).generate_until([request] * 4)
    assert all(answers == texts["python"] for answers in texts.values()), texts
    assert len(set(texts["python"])) == reply["d5p4"]["distinct"] == 4 and reply["d5p4"]["method"] == "tree"


HABITS = [  # what users of other libraries write: in Python, in a shell, and a part of both answers ({k}: our option)
    ({"prompt": "two"}, ["--prompt", "two"], "d5p4.generate(model, 'TEXT') in Python, d5p4 generate 'TEXT' in a shell"),
    ({"stop": ","}, ["--stop", ","], "is true or false; use {stop_strings} for texts at which answers end"),
    ({"batch_size": 4}, ["--batch-size", "4"], "use {max_tokens_per_forward} to limit memory"),
    ({"repetition_penalty": 1.1}, ["--repetition-penalty", "1.1"], "use {diversity}, or another {method}"),
    ({"streamer": print}, ["--streamer", "x"], "use callback= in Python"),
    ({"n": 4}, ["-n", "4"], "use {k} for the number of answers"),
    ({"num_beams": 4}, ["--num-beams", "4"], "use {k} for the number of answers and {w} for the children of each"),
    ({"max_tokens": 9}, ["--max-tokens", "9"], "use {gen_length} for the length of the answer"),
    ({"threshold": 0.9}, ["--threshold", "0.9"], "use {reveal}='threshold' with {tau}"),
]


def test_habits_from_other_libraries_are_answered_with_what_to_type(tmp_path):
    model = d5p4.load(write_llada(tmp_path / "model"), "cpu")
    for options, words, expected in HABITS:
        message = refusal(d5p4.generate, model, None if "prompt" in options else "two", **options)
        assert expected.replace("{", "").replace("}", "") in message, options
        ended = CliRunner().invoke(build(), ["generate", "two", *words])
        shown = re.sub(r"\{(\w+)\}", lambda match: "--" + match[1].replace("_", "-"), expected)
        assert ended.exit_code == 2 and shown in ended.stderr and ended.stderr.count("\n") == 1, (words, ended.stderr)
    assert "use d5p4.generate(model, 'TEXT')" in refusal(model.generate, "two", max_new_tokens=3)


def test_an_empty_prompt_is_refused_at_every_door_by_models_that_answer_prompts(tmp_path):
    """Those with a grader or a chat template. A model that continues texts may begin with nothing."""
    expected = "the prompt is empty, but {} answers prompts"
    chat = d5p4.load(write_llada(tmp_path / "chat", chat=True), "cpu")
    graded, plain = d5p4.load("countdown", "cpu"), d5p4.load(write_llada(tmp_path / "plain"), "cpu")
    small = {"gen_length": 2, "k": 1}
    for model in (chat, graded):
        for prompt in (None, "", " \n", [{"role": "user", "content": ""}]):
            assert expected.format(model.name) in refusal(d5p4.generate, model, prompt, **small), (model.name, prompt)
    assert d5p4.generate(chat, [[]], **small).texts and d5p4.generate(chat, "", chat=False, **small).texts
    assert d5p4.generate(chat, sets=2, **small).texts and d5p4.generate(plain, "", **small).texts
    ended = CliRunner().invoke(build(), ["generate", "-m", "countdown"])
    assert ended.exit_code == 2 and ended.stderr.startswith("error: " + expected.format("countdown"))
    (tmp_path / "p.jsonl").write_text('{"prompt": "1,2:3"}\n{"prompt": ""}\n')
    d5p4.run_file(graded, tmp_path / "p.jsonl", tmp_path / "a.jsonl", **small)
    assert expected.format("countdown") in json.loads((tmp_path / "a.jsonl").read_text().splitlines()[1])["error"]
    with TestClient(create_app(graded, name="tiny")) as client:
        while client.get("/readyz").status_code != 200:
            pass
        reply = client.post("/v1/completions", json={"prompt": "", "max_tokens": 4})
    assert reply.status_code == 400 and expected.format("countdown") in reply.json()["error"]["message"]


def test_settings_hold_the_length_that_was_used(tmp_path):
    """Also the default length, and the shorter one that fits the model."""
    model = d5p4.load(write_llada(tmp_path / "model", max_sequence_length=64), "cpu")
    for prompt, options, length in (("two", {}, 61), ("two", {"gen_length": 5}, 5), (["a", "b"], {}, 63)):
        result = d5p4.generate(model, prompt, k=1, steps=1, **options)
        assert result.settings.gen_length == length == result.to_dict()["settings"]["gen_length"], prompt
        again = d5p4.generate(model, prompt, seed=result.seed, **result.settings.options())
        assert again.texts == result.texts
    holes = d5p4.generate(model, "a <|mdm_mask|>", k=1)
    assert holes.settings.gen_length is None  # nothing was appended


def test_reference_pages_and_the_docstring_are_written_from_the_sources():
    """`make options` would change nothing, and the reference on the site has every public name."""
    from d5p4_lab import reference_pages

    assert not reference_pages.is_stale(), "run `make options`"
    names = {name for _, module, names in reference_pages.SECTIONS if module == "d5p4" for name in names.split()}
    assert names == set(d5p4.__all__) - {"__version__"}
    table = d5p4.options.parameters_of(d5p4.Settings)
    basic = [name for name, parameter in table.items() if parameter.option.group == "basic"]
    signature = d5p4.generate.__annotations__
    assert [name for name in signature if name in table] == basic
