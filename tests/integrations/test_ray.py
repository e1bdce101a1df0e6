"""Ray decodes data sets, and every row has the answers that `d5p4 run` writes for the same prompt, id and seed."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import d5p4
from tests.checkpoints import write_llada
from tests.fake import FakeModel
from tests.jobs.work import Cramped, Spoiled, write
from tests.refusals import refusal

pytest.importorskip("ray", reason="needs d5p4[ray]")

import pyarrow as pa  # noqa: E402
import pyarrow.parquet as pq  # noqa: E402
import ray  # noqa: E402
import ray.data  # noqa: E402

from d5p4.integrations.ray import COLUMNS, WITH_LOGPROBS, Decoder  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::d5p4.DuplicateAnswers")  # a tiny model often repeats itself

Row = dict[str, Any]
RANDOM: dict[str, Any] = dict(method="independent", k=2, gen_length=6, temperature=1.3)
"""Options with which different random streams give different answers."""
ASK = [{"role": "user", "content": "abc"}]
BAD: list[tuple[Row, str]] = [
    ({"prompt": None}, "neither 'prompt' nor 'messages'"),
    ({"prompt": "abc", "messages": ASK}, "has both 'prompt' and 'messages'"),
    ({"messages": []}, "at least one message"),
    ({"messages": [{"role": "user", "content": None}]}, "'role' and 'content'"),
    ({"prompt": "abl"}, "a chat prompt holds the mask token"),
    ({"prompt": " "}, "the prompt is empty"),
    ({"prompt": "a" * 70}, "takes at most 64 together"),
    ({"prompt": "zz"}, "outside the model's 12 ids"),
]
BAD_COLUMNS: list[tuple[Row, str]] = [  # of another type than those of good rows
    ({"messages": "abc"}, "'messages' must be a list"),
    ({"prompt": b"abc"}, "'prompt' must be text, not bytes"),
    ({"prompt": "abc", "id": 1.5}, "'id' must be text or a whole number"),
]


def table_of(rows: Sequence[Row]) -> pa.Table:
    """Rows as a table. Columns that some rows lack have nulls there."""
    names = dict.fromkeys(name for row in rows for name in row)
    return pa.table({name: [row.get(name) for row in rows] for name in names})


def entries(count: int) -> list[Row]:
    """Prompts of many lengths: text and conversations, with and without ids, and some that cannot be decoded."""
    rows: list[Row] = []
    for i in range(count):
        text = "solve "[: 1 + i % 5] + str(i)
        row: Row = {"messages": [{"role": "user", "content": text}]} if i % 4 == 1 else {"prompt": text}
        if i % 7 == 5:
            row = [{"messages": []}, {"prompt": "<|mdm_mask|>"}, {"prompt": "x" * 200}][i // 7 % 3]
        rows.append((row if i % 3 == 2 else {"id": f"n{i}"} | row) | {"level": i})
    return rows


def values_of(table: Any, *names: str) -> list[tuple[Any, ...]]:
    return [tuple(row[name] for name in names) for row in table.to_pylist()]


def test_columns_keep_their_types_and_new_ones_have_the_same_types_in_every_batch():
    model = FakeModel(template=True)
    rows: list[Row] = [{"prompt": "abc", "id": 1, "level": 3}, {"messages": ASK, "level": 4}, {"level": 5}]
    schema = {
        "prompt": pa.string(),
        "messages": pa.list_(pa.struct({"role": pa.string(), "content": pa.string(), "name": pa.string()})),
        "id": pa.int64(),
        "level": pa.int8(),
    }
    table = pa.table({name: pa.array([row.get(name) for row in rows], kind) for name, kind in schema.items()})
    decode = Decoder(model, **RANDOM)
    decoded = decode(table)
    assert decoded.select(list(schema)).equals(table)
    assert {field.name: field.type for field in decoded.schema} == schema | COLUMNS
    assert values_of(decoded, "error") == [(None,), (None,), ("has neither 'prompt' nor 'messages'; add one of them",)]
    assert values_of(decoded, "answers", "scores", "seed", "rows")[2] == ([], [], 0, 0)
    wanted = [d5p4.generate(model, "abc", keys=[key], seed=0, **RANDOM) for key in (1, None)]
    assert [texts for (texts,) in values_of(decoded, "answers")[:2]] == [result.texts[0] for result in wanted]
    assert all(scores == sorted(scores, reverse=True) for (scores,) in values_of(decoded, "scores"))
    for batch in (table.slice(2), table.slice(0, 0)):  # every row fails; no rows
        assert decode(batch).schema == decoded.schema
    exact = Decoder(model, logprobs=True, **RANDOM)(table)
    assert {field.name: field.type for field in exact.schema} == schema | COLUMNS | WITH_LOGPROBS
    tokens, logprobs = exact.to_pylist()[0]["tokens"], exact.to_pylist()[0]["logprobs"]
    assert tokens == wanted[0].answers[0] and [len(row) for row in logprobs] == [6, 6]
    assert values_of(exact, "tokens", "logprobs", "reveal_step")[2] == ([], [], [])


def test_a_bad_prompt_is_a_row_with_an_error():
    """A bad row does not change the rows beside it, whatever is wrong with it."""
    decode = Decoder(FakeModel(template=True), **RANDOM)
    good: Row = {"prompt": "abc", "id": "g"}
    answers = decode(table_of([good])).to_pylist()[0]["answers"]
    for row, expected in BAD:
        first, bad, last = decode(table_of([good, row, good])).to_pylist()
        assert first["answers"] == last["answers"] == answers and first["error"] is last["error"] is None, row
        assert expected in bad["error"], (row, bad["error"])
        assert (bad["answers"], bad["scores"], bad["seed"], bad["rows"]) == ([], [], 0, 0)
    for row, expected in BAD_COLUMNS:
        [bad] = decode(table_of([row])).to_pylist()
        assert expected in bad["error"], (row, bad["error"])


def test_answers_depend_on_prompt_id_and_seed_alone():
    rows = [{"id": i % 8 or None, "prompt": "abcdefgh"[: 1 + i % 6]} for i in range(24)]
    wanted = Decoder(FakeModel(), **RANDOM)(table_of(rows)).to_pylist()
    assert wanted[1]["answers"] != wanted[7]["answers"]  # ids differ, the prompt does not
    assert wanted[0]["answers"] != wanted[6]["answers"]
    for size in (1, 5):
        again = Decoder(FakeModel(), max_tokens_per_forward=32, **RANDOM)
        batches = [again(table_of(rows[::-1][start : start + size])) for start in range(0, len(rows), size)]
        assert [row for batch in batches for row in batch.to_pylist()] == wanted[::-1]
    same = again(table_of([{"prompt": "ab", "id": None}] * 2))["answers"].to_pylist()
    assert same[0] == same[1]
    assert [row["answers"] for row in Decoder(FakeModel(), seed=1, **RANDOM)(table_of(rows)).to_pylist()] != [
        row["answers"] for row in wanted
    ]


def test_rows_are_the_lines_of_a_file_run(tmp_path):
    """Without ids, the first of equal prompts has the same answers in a file run."""
    rows = [{"prompt": "ab", "x": 1}, {"prompt": "abc", "id": "i"}, {"prompt": "zz"}, {"prompt": "ab", "id": "3"}]
    d5p4.run_file(FakeModel(), write(tmp_path / "p.jsonl", rows), tmp_path / "a.jsonl", seed=0, **RANDOM)
    assert decoded_rows(Decoder(FakeModel(), **RANDOM)(table_of(rows)).to_pylist()) == lines(tmp_path / "a.jsonl")


def test_prompts_that_the_device_or_the_model_cannot_decode():
    prompts = pa.table({"prompt": ["abc", "bbb", "cab", "a" * 40]})
    wanted = Decoder(FakeModel(), **RANDOM)(prompts).to_pylist()
    spoiled = Decoder(Spoiled(1), **RANDOM)(prompts).to_pylist()
    assert "logits that are not finite" in spoiled[1]["error"] and spoiled[1]["answers"] == []
    assert [spoiled[i] for i in (0, 2, 3)] == [wanted[i] for i in (0, 2, 3)]
    with pytest.raises(d5p4.D5P4Error, match="out of memory with line 20 alone, before any prompt was decoded"):
        Decoder(Cramped(3), **RANDOM)(pa.table({"prompt": ["abc"] * 40}))


def test_a_mistake_that_concerns_all_rows_is_an_error():
    for options, expected in (
        ({"model": "no-such-model"}, "'no-such-model' is neither a folder nor a hub id"),
        ({"kk": 2}, "kk: did you mean k?"),
        ({"seed": None}, "seed=None would be a different seed on every actor"),
        ({"scorer": len}, "scorer: whole files and data sets do not accept this option"),
        ({"plugins": ["no_such_module"]}, "plugin='no_such_module' cannot be loaded"),
    ):
        assert expected in refusal(lambda **given: Decoder(**given), **{"model": FakeModel()} | options), options
    decode = Decoder(FakeModel(), **RANDOM)
    assert "no column 'prompt' or 'messages', only text;" in refusal(decode, pa.table({"text": ["a"]}))
    assert "already has a column 'rows'" in refusal(decode, pa.table({"prompt": ["a"], "rows": [1]}))
    assert 'give batch_format="pyarrow"' in refusal(decode, {"prompt": ["a"]})


@contextmanager
def environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """Options for Ray in all tests: a short path for its sockets, no dashboard, our source, its own address."""
    folder = tempfile.mkdtemp(prefix="ray", dir="/tmp")
    source = Path(d5p4.__file__).parents[1]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(source), str(Path(__file__).parents[2])]))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    try:
        yield {"include_dashboard": False, "object_store_memory": 100_000_000, "_temp_dir": folder}
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def alone(monkeypatch) -> Iterator[None]:
    """A Ray of one node. Two actors need more than two logical CPUs: reading and writing need some, too."""
    with environment(monkeypatch) as options:
        ray.init("local", num_cpus=6, log_to_driver=False, logging_level="ERROR", **options)
        ray.data.DataContext.get_current().enable_progress_bars = False
        try:
            yield
        finally:
            ray.shutdown()


def lines(path: Path) -> list[Row]:
    """The lines of a file run, with the names that the columns have."""
    entries = map(json.loads, path.read_text().splitlines())
    return [
        {name: entry.get(name) for name in ("id", "prompt", "messages", "level", "x", "answers", "error")}
        | {"scores": entry.get("score", []), "seed": entry.get("seed", 0), "rows": entry.get("rows", 0)}
        for entry in entries
    ]


def decoded_rows(rows: Sequence[Row]) -> list[Row]:
    names = ("id", "prompt", "messages", "level", "x", *COLUMNS)
    return sorted(({name: row.get(name) for name in names} for row in rows), key=lambda row: row["level"] or 0)


def decode(dataset: Any, folder: Path, actors: int = 1, kind: type = Decoder, **options: Any) -> Any:
    given = {"batch_size": 4, "batch_format": "pyarrow", "compute": ray.data.ActorPoolStrategy(size=actors)}
    model = {"model": str(folder), "device": "cpu", "dtype": "float64", **RANDOM}
    model |= {name: options.pop(name) for name in ("marker", "k") if name in options}
    return dataset.map_batches(kind, fn_constructor_kwargs=model, **given | options)


class Killed(Decoder):
    """A decoder whose first process is killed at its first batch."""

    def __init__(self, marker: str, **options: Any) -> None:
        super().__init__(**options)
        self.marker = Path(marker)

    def __call__(self, batch: Any) -> Any:
        try:
            self.marker.touch(exist_ok=False)
        except FileExistsError:
            return super().__call__(batch)
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.full
@pytest.mark.timeout(600)
def test_ray_writes_the_lines_of_d5p4_run(alone, tmp_path):
    """JSON lines in, Parquet out, with any actors, batches and blocks, and with a killed actor."""
    folder, prompts = write_llada(tmp_path / "tiny", chat=True), write(tmp_path / "p.jsonl", entries(60))
    d5p4.run_file(d5p4.load(folder, "cpu", "float64"), prompts, tmp_path / "a.jsonl", seed=0, **RANDOM)
    wanted = lines(tmp_path / "a.jsonl")
    decode(ray.data.read_json(str(prompts)), folder).write_parquet(tmp_path / "out")
    table = pq.read_table(tmp_path / "out")
    assert {field.name: field.type for field in table.schema}.items() >= COLUMNS.items()
    assert decoded_rows(table.to_pylist()) == wanted
    for actors, size, blocks in ((1, 1, 1), (1, 60, 1), (2, 7, 5), (3, 4, 12)):
        dataset = ray.data.read_json(str(prompts)).repartition(blocks)
        assert decoded_rows(decode(dataset, folder, actors, batch_size=size).take_all()) == wanted, (actors, size)
    for actors in (1, 2):
        marker = tmp_path / f"killed{actors}"
        dataset = ray.data.read_json(str(prompts)).repartition(8)
        decoded = decode(dataset, folder, actors, kind=Killed, marker=str(marker)).take_all()
        assert decoded_rows(decoded) == wanted and marker.exists()


def blocks(language: str) -> list[str]:
    """The blocks of docs/scale.md in this language."""
    page = Path(__file__).parents[2] / "docs" / "scale.md"
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)


def test_the_yaml_of_the_page_can_be_read():
    yaml = pytest.importorskip("yaml")
    sky, job = map(yaml.safe_load, blocks("yaml"))
    assert sky["run"].startswith("torchrun ") and "--model GSAI-ML/LLaDA-8B-Instruct -k 16" in sky["run"]
    (container,) = job["spec"]["template"]["spec"]["containers"]
    command = [*container["command"], *container["args"]]
    assert command[:6] == ["torchrun", "--nproc-per-node", "8", "-m", "d5p4", "run"]
    assert all(isinstance(word, str) for word in command)


@pytest.mark.full
@pytest.mark.timeout(600)
def test_the_program_of_the_page(monkeypatch, tmp_path):
    (program,) = (block for block in blocks("python") if "import Decoder" in block)
    rows = [{"id": "b", "prompt": "50,46,80,7:91"}, {"id": "a", "prompt": "86,28,13,31:96"}, {"id": "c", "prompt": "x"}]
    write(tmp_path / "prompts.jsonl", rows)
    with environment(monkeypatch) as options:
        # the program starts Ray by itself, with as many logical CPUs as the machine has
        variables = os.environ | {"RAY_TMPDIR": options["_temp_dir"]}
        words = [sys.executable, "-c", program]
        ended = subprocess.run(words, env=variables, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    texts = d5p4.generate("countdown", ["86,28,13,31:96", "50,46,80,7:91"], keys=["a", "b"], k=4, seed=0).texts
    first, second, third = ended.stdout.splitlines()[-3:]
    assert [first, second] == [f"a {texts[0]}", f"b {texts[1]}"] and "no token for 'x'" in third
