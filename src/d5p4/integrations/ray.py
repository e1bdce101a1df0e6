"""`Decoder` decodes the prompts of a Ray data set (extra `ray`). docs/scale.md has a program that uses it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import D5P4Error
from ..generate import chosen_seed, run_requests
from ..jobs.decoder import Decoder as BatchDecoder
from ..jobs.reader import PromptLine, prompt_line
from ..jobs.run import FEW, plan_work, prepare_options
from ..models import load
from ..options import Settings, load_plugins
from ..result import Answers, Result, rounded
from ..types import Model

try:
    import pyarrow as pa
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


class Decoder:
    """A class for `Dataset.map_batches` with batch_format="pyarrow". It adds k answers to every row of a table.

    model      a folder, a shipped name or a hub id, which every actor loads, or a loaded model
    seed       the seed of all answers; a whole number, because all actors must have the same seed
    device, dtype, tokenizer   see `d5p4.load`. Ray shows an actor only the GPUs that `num_gpus` gives it
    plugins    the names of modules that register methods
    options    the options of docs/options.md and the parameters of the method, as for `d5p4.generate`

    A row has `prompt` (text) or `messages` (with `role` and `content`), and optionally `id` (text or a whole number),
    which selects its random stream. The new columns (`COLUMNS`, with the option `logprobs` also `WITH_LOGPROBS`) have
    the same types in every batch. Numbers have six digits, as in a file run, and are null if they are not finite.

    The answers to a row are those of `d5p4 run`, except that equal prompts without ids have the same answers. The job
    fails only if the data set has no column to read, if it already has a column that is to be added, or if none of the
    first prompts fits into memory.
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

    def __call__(self, table: pa.Table) -> pa.Table:
        if not isinstance(table, pa.Table):
            raise D5P4Error('Decoder reads Arrow tables; give batch_format="pyarrow" to map_batches')
        self._check_columns(table)
        rows: list[dict[str, Any]] = [{}] * table.num_rows
        for work in plan_work(_sources(table), self.prepared, bad_first=False):
            outcome = self.decoder.decode([line for line in work if not line.error])
            for line, error in [*((line, line.error) for line in work if line.error), *outcome.failed]:
                rows[line.line] = self._row(error=error)
            for line, result, place in outcome.answered:
                answers = Answers(result, place).to_dict()
                rows[line.line] = self._row(**answers | {"scores": answers["score"]})
        for name, kind in self.columns.items():
            table = table.append_column(name, pa.array([row[name] for row in rows], kind))
        return table

    def _attempt(self, items: list[Any], settings: Settings) -> Result:
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


def _sources(table: pa.Table) -> list[PromptLine]:
    """Return the prompts of a table. The line number of a prompt is its place in the table, counted from 0."""
    sources: list[PromptLine] = []
    for place, entry in enumerate(table.select([name for name in READ if name in table.column_names]).to_pylist()):
        if isinstance(entry.get("messages"), list):
            # Arrow adds a null field to a message if another message has that field.
            entry["messages"] = [
                {name: x for name, x in one.items() if x is not None} if isinstance(one, dict) else one
                for one in entry["messages"]
            ]
        sources.append(prompt_line(place, entry))
    return sources
