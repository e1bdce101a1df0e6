"""`Decoder` decodes the prompts of a Ray data set (extra `ray`).

    answers = prompts.map_batches(
        Decoder,
        fn_constructor_kwargs={"model": "GSAI-ML/LLaDA-8B-Instruct", "k": 4, "gen_length": 128},
        compute=ray.data.ActorPoolStrategy(size=8),
        num_gpus=1,
        batch_size=64,
        batch_format="pyarrow",
    )

See docs/scale.md.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import D5P4Error
from ..generate import chosen_seed, run_requests
from ..jobs.decoder import Decoder as BatchDecoder
from ..jobs.reader import HALF_PAIR, BadLine, PromptLine, id_and_prompt
from ..jobs.run import FEW, Item, plan_work, prepare_options
from ..models import load
from ..options import Settings, load_plugins
from ..result import Answers, Result, rounded
from ..types import Model

try:
    import pyarrow as pa
    from ray.data.block import BlockAccessor, BlockType
except ImportError as reason:
    raise D5P4Error(f"Ray Data is missing: pip install 'd5p4[ray]' ({reason})") from reason

READ = ("prompt", "messages", "id")
COLUMNS = {
    "answers": pa.list_(pa.string()),
    "scores": pa.list_(pa.float64()),
    "seed": pa.int64(),
    "rows": pa.int64(),
    "error": pa.string(),
}
WITH_LOGPROBS = {
    "tokens": pa.list_(pa.list_(pa.int64())),
    "logprobs": pa.list_(pa.list_(pa.float64())),
    "reveal_step": pa.list_(pa.list_(pa.int64())),
}
EXACT = 2**53  # a float holds every whole number below this one exactly


class Decoder:
    """A class for `Dataset.map_batches`. It adds k answers to every row, and keeps all columns of the row.

    model      a folder, a shipped name or a hub id, which every actor loads, or a loaded model
    seed       the seed of all answers; a whole number, because all actors must have the same seed
    device, dtype, tokenizer   see `d5p4.load`. Ray shows an actor only the GPUs that `num_gpus` gives it
    plugins    the names of modules that register methods
    options    the options of docs/options.md and the parameters of the method, as for `d5p4.generate`

    Columns that it reads:
    prompt     text
    messages   a conversation: a list of messages with `role` and `content`. A row has a prompt or messages, not both
    id         optional; text or a whole number. It selects the random stream of the row

    Columns that it adds, with the same types in every batch:
    answers    list of texts, best first
    scores     list of numbers, rounded to six digits as in a file run. A score that is not finite is null
    seed       whole number
    rows       whole number, the number of rows that went through the model
    error      null, or a sentence that says why the row has no answers
    tokens, logprobs, reveal_step   lists with one list per answer, if the option `logprobs` is on

    The answers to a row depend on its prompt, its id and the seed. They do not depend on the number of actors or nodes,
    the batch size, the order of rows, or retries (in bf16, use deterministic=True for this). They are the answers that
    `d5p4 run` writes for a file with the same seed, ids and prompts. Ids need not differ. Rows with the same id and the
    same prompt have the same answers. A row without an id takes its random stream from the tokens of its prompt, so
    equal prompts without ids have the same answers. In `d5p4 run` they have different answers, because it reads the
    file in order and can count them.

    A prompt that cannot be decoded gives a row with an error. The job fails only if the data set has no column to read,
    if it already has a column that is to be added, or if none of the first prompts fits into memory.
    """

    def __init__(
        self,
        model: str | Path | Model,
        *,
        seed: int = 0,
        device: str | None = None,
        dtype: str | None = None,
        tokenizer: str | None = None,
        plugins: Sequence[str] = (),
        **options: Any,
    ) -> None:
        load_plugins(plugins)
        if seed is None:
            raise D5P4Error("would be a different seed on every actor; give a whole number", option="seed", value=None)
        self.seed = chosen_seed(seed)
        loaded: Any = load(model, device, dtype, tokenizer) if isinstance(model, (str, Path)) else model
        self.prepared = prepare_options(loaded, options, numbered=False)
        settings = self.prepared.settings
        self.columns = COLUMNS | (WITH_LOGPROBS if settings.logprobs else {})
        self.decoder = BatchDecoder(self._attempt, settings, FEW)

    def __call__(self, batch: Any) -> pa.Table:
        """Return the batch with the new columns. The batch is a table, a data frame, or arrays by name."""
        values = _values(batch)
        table = _table(batch, values)
        self._check_columns(table)
        rows: list[dict[str, Any]] = [{}] * table.num_rows
        for work in plan_work(_sources(values, table.num_rows), self.prepared, bad_first=False):
            for bad in work.bad:
                rows[bad.line] = self._row(error=bad.error)
            outcome = self.decoder.decode(work.items)
            for item, error in outcome.failed:
                rows[item.line] = self._row(error=error)
            for item, result, place in outcome.answered:
                answers = Answers(result, place).to_dict()
                rows[item.line] = self._row(**answers | {"scores": answers["score"]})
        for name, kind in self.columns.items():
            table = table.append_column(name, pa.array([row[name] for row in rows], kind))
        return table

    def _attempt(self, items: list[Item], settings: Settings) -> Result:
        return run_requests(self.prepared.model, [item.request for item in items], settings, self.seed)

    def _check_columns(self, table: pa.Table) -> None:
        names = table.column_names
        if taken := [name for name in self.columns if name in names]:
            cure = f"rename it with Dataset.rename_columns({{{taken[0]!r}: ...}}) or remove it"
            raise D5P4Error(f"the data set already has a column {taken[0]!r}, which Decoder adds; {cure}")
        if table.num_rows and not {"prompt", "messages"} & set(names):
            cure = "rename one with Dataset.rename_columns({...: 'prompt'})"
            raise D5P4Error(f"the data set has no column 'prompt' or 'messages', only {', '.join(names)}; {cure}")

    def _row(self, **values: Any) -> dict[str, Any]:
        """Return the values of the new columns. Without answers, lists are empty and counts are 0."""
        empty: dict[str, Any] = {name: [] if pa.types.is_list(kind) else None for name, kind in self.columns.items()}
        given = {name: rounded(value) for name, value in values.items() if name in empty}
        return empty | {"seed": self.seed, "rows": 0} | given


def _values(batch: Any) -> dict[str, list[Any]]:
    """Return the columns to read as Python values. In numpy and pandas, Ray turns missing values into NaN, whole
    numbers in the same column into floats, and conversations into arrays of objects. This function undoes that."""
    names = batch.column_names if isinstance(batch, pa.Table) else list(batch)
    values = {}
    for name in (name for name in READ if name in names):
        column = batch[name]
        if isinstance(column, pa.ChunkedArray):
            column = column.to_pylist()
        elif hasattr(column, "to_numpy"):  # pandas
            column = column.to_numpy(dtype=object, na_value=None)
        values[name] = [_plain(value) for value in column]
    if "id" in values:
        values["id"] = [_whole(value) for value in values["id"]]
    return values


def _table(batch: Any, values: Mapping[str, list[Any]]) -> pa.Table:
    """Return a batch of any of Ray's formats as a table. Tables are unchanged. `values` are the columns to read."""
    if isinstance(batch, pa.Table):
        return batch
    read = BlockAccessor.batch_to_block(dict(values), BlockType.ARROW)
    others = {name: batch[name] for name in batch if name not in values}
    if not isinstance(batch, Mapping):
        others = batch[list(others)]
    table = BlockAccessor.batch_to_block(others, BlockType.ARROW)
    return pa.table({name: read[name] if name in values else table[name] for name in batch})


def _sources(values: Mapping[str, list[Any]], count: int) -> list[PromptLine | BadLine]:
    """Return the prompts of `count` rows. The line number of a prompt is its place in the batch, counted from 0."""
    sources: list[PromptLine | BadLine] = []
    for place in range(count):
        entry = {name: column[place] for name, column in values.items()}
        if isinstance(entry.get("messages"), list):
            entry["messages"] = [_without_nulls(message) for message in entry["messages"]]
        try:
            if isinstance(entry.get("id"), float) and entry["id"].is_integer():
                raise D5P4Error("'id' was rounded to a float because another id is null; use batch_format='pyarrow'")
            name, prompt = id_and_prompt(entry)
            json.dumps([name, prompt], ensure_ascii=False).encode()
            sources.append(PromptLine(place, name, prompt))
        except D5P4Error as error:
            sources.append(BadLine(place, str(error)))
        except UnicodeEncodeError:
            sources.append(BadLine(place, HALF_PAIR))
    return sources


def _plain(value: Any) -> Any:
    """Return a value of a batch as JSON would give it."""
    if isinstance(value, (np.ndarray, np.generic)):
        value = value.tolist()
    if isinstance(value, float) and math.isnan(value):
        return None
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def _without_nulls(message: Any) -> Any:
    """Return a message without null fields. Arrow adds a null field to a message if another message has that field."""
    if not isinstance(message, Mapping):
        return message
    return {name: value for name, value in message.items() if value is not None}


def _whole(value: Any) -> Any:
    """Return a float without a fraction as a whole number. A large float stays: it may have lost digits."""
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) < EXACT else value
