"""The files that a run writes, and the work of the first rank at the start and the end of a run.

Beside the output `answers.jsonl` there is a header, `answers.run.json`, with the configuration, a record of every start
and, at the end, the report. A run ends in four steps: write all lines into the output, mark the header as finished,
remove the parts, remove the folder of the parts. If a run is killed between two steps, the same command does the rest.
"""

import hashlib
import json
import secrets
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ..__about__ import __version__
from ..distributed import Mesh
from ..errors import D5P4Error
from ..generate import chosen_seed
from ..models.base import NativeModel
from ..models.load import locate
from ..prompts import Prepared
from ..provenance import file_hash, provenance, without_places
from ..result import COUNTS, Answers, rounded
from ..store import json_line, read_json, write_json
from ..types import Model
from .reader import PromptFile, PromptLine
from .rows import RowStore, StoredRows, differences

ANSWER_FIELDS = ("line", "error", "answers", "tokens", "score", "distance", "distinct", "near_copies", "logdet")
FACT_FIELDS = (*COUNTS, "seed", "settings", "logprobs", "reveal_step", "stopped", "unfinished", "log_z", "given")
OURS = (*ANSWER_FIELDS, *FACT_FIELDS)  # the fields of a line besides those of the input, in this order
MODEL_FILES = ("*.json", "*.txt", "*.jinja", "*.model", "*.safetensors")


def output_line(source: PromptLine, outcome: Answers | str, settings: str) -> bytes:
    """Return the line of a prompt with its answers, or with the error that says why there are none.

    The fields of the input line come first. Those with the name of an output field are moved into the field `given`.
    The line has the hash `settings` of the configuration, and no times, so that a rerun writes the same bytes.
    """
    values = {"error": outcome, "answers": []} if isinstance(outcome, str) else outcome.to_dict()
    if values.get("logprobs") is None:
        values.pop("tokens", None)
    values |= {"line": source.line, "settings": settings}
    taken = {name: value for name, value in source.fields.items() if name in OURS}
    others = {name: value for name, value in source.fields.items() if name not in OURS}
    ours = {name: rounded(values[name]) for name in OURS if name in values}
    return json_line(others | ({"given": taken} if taken else {}) | ours)


def configuration(prepared: Prepared, input_hash: str, seed: int) -> dict[str, Any]:
    """Return all values that can change the answers. The header keeps them, and later starts must have the same."""
    model, settings = prepared.model, prepared.settings.to_dict()
    if not prepared.settings.deterministic:
        del settings["max_tokens_per_forward"]  # the size of a forward can change answers only by rounding
    configured = {
        "d5p4": __version__,
        "model": _model_hashes(model),
        "dtype": getattr(model, "bits", None) or str(model.head.weight.dtype).removeprefix("torch."),
        "settings": settings,
        "gen_length_given": prepared.length_given,
        "seed": seed,
        "input": input_hash,
    }
    return json.loads(json.dumps(configured))


def _model_hashes(model: Model) -> dict[str, str]:
    """Return a hash of the model's files if the model was loaded from a folder, or else of its parameters."""
    if isinstance(model, NativeModel):
        with warnings.catch_warnings(), suppress(D5P4Error):
            warnings.simplefilter("ignore")
            source = locate(model.name)
            files = {path for pattern in MODEL_FILES for path in source.folder.glob(pattern)} | {*source.files()}
            return {"files": _sha256("".join(f"{path.name} {file_hash(path)}\n" for path in sorted(files)))}
    module: Any = getattr(model, "module", model)
    tensors: dict[str, Any] = dict(module.state_dict()) if isinstance(module, nn.Module) else {}
    tensors = tensors or vars(model) | {"head": model.head.weight, "bias": model.head.bias}
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        if isinstance(tensor, Tensor):
            digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
            digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return {"parameters": digest.hexdigest()}


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True)
class Pace:
    """The progress of a run, summed over all ranks."""

    total: int  # the number of prompts in the file
    before: int  # those that earlier starts finished
    now: float  # those that this start finished, with fractions for unfinished prompts
    rows: float  # the rows that went through the model in this start
    seconds: float

    @property
    def prompts_per_second(self) -> float:
        return self.now / self.seconds if self.seconds > 0 else 0.0

    @property
    def rows_per_second(self) -> float:
        return self.rows / self.seconds if self.seconds > 0 else 0.0

    @property
    def left(self) -> float | None:
        """The number of seconds until all prompts are finished at this speed, or None if the speed is not known yet."""
        rate = self.prompts_per_second
        return max(0.0, self.total - self.before - self.now) / rate if rate > 0 else None


@dataclass(frozen=True)
class Report:
    """The summary of a finished run, and of this start of it (`now`, `seconds` and the rates)."""

    prompts: int  # the number of lines of the output
    now: int
    before: int  # the number of lines that earlier starts finished
    failed: int  # the number of lines with an error instead of answers
    answers: int
    distinct: int  # the number of answers that differ from the other answers to the same prompt
    near_copies: int  # the number of answers that are near copies of a better answer to the same prompt
    rows: int  # the number of rows that went through the model for all answers
    seconds: float
    prompts_per_second: float
    rows_per_second: float
    seed: int
    settings: str  # the hash of the configuration, which is also in every output line
    notes: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Start:
    """The values that the first rank sends to the other ranks at the beginning of a start."""

    number: int
    seed: int
    settings: str  # the hash of the configuration without input and seed
    digest: str  # the hash of the input
    token: str  # the random name of the counters that the ranks of this start share
    done: NDArray[np.bool_] | None = None  # [last line + 1], whether an earlier start has finished the line
    answered: int = 0  # the number of finished lines that have answers
    report: Report | None = None  # the report of a run that an earlier start finished


def _header_hash(header: Mapping[str, Any]) -> str:
    """Return a hash of the header, which is a field of the header, so that a changed header is noticed."""
    return _sha256(json.dumps({name: value for name, value in header.items() if name != "hash"}, sort_keys=True))


class Output:
    """The output file, its header and its parts. Only the first rank uses this class, inside `RowStore.locked`."""

    def __init__(self, store: RowStore, file: PromptFile) -> None:
        self.store, self.file, self.path = store, file, store.output
        self.header_path = self.path.with_suffix(".run.json")
        self.header = self._read_header()
        self.notes: list[str] = []

    def _read_header(self) -> dict[str, Any]:
        """Return the header, which is empty for a new run. Raise an error if the files do not belong to this run."""
        path, output, parts = self.header_path, self.path, self.store.folder
        try:
            header: dict[str, Any] = read_json(path) if path.exists() else {}
            if path.exists() and not (isinstance(header, dict) and header.get("hash") == _header_hash(header)):
                raise ValueError("another program or an older version wrote it, or it was changed")
        except (OSError, ValueError, RecursionError) as reason:
            advice = f"restore the header, or move it away together with {output.name} and {parts.name}"
            raise D5P4Error(f"{path} is not the header of a run ({reason}); {advice}") from None
        if header and header["output"] != output.name:
            raise D5P4Error(f"{path} is the header of {header['output']}; give that file or a new name as --output")
        if not header and output.exists():
            raise D5P4Error(f"{output} was not made by d5p4 run (there is no {path.name}); give another --output")
        if not header and self.store.parts():
            advice = f"restore {path.name}, or move {parts.name} away"
            raise D5P4Error(f"{parts} holds lines of a run whose {path.name} is gone; {advice}")
        return header

    def _summarise(self, entry: Any) -> tuple[int, tuple[int, ...], bool] | None:
        """Return the number of a line of this run and its counts of answers, distinct answers, near copies and rows.
        Return None for a damaged line, a line of another configuration, and a line of no prompt."""
        entry, configured = entry if isinstance(entry, dict) else {}, self.header["configuration"]
        answers, error = entry.get("answers"), entry.get("error")
        line, *counts = entry.get("line"), *(entry.get(name, 0) for name in ("distinct", "near_copies", "rows"))
        changed = configured["input"] != self.file.digest  # then `begin` refuses to continue
        intact = (
            isinstance(answers, list)
            and all(isinstance(text, str) for text in answers)
            and all(type(count) is int and count >= 0 for count in (line, *counts))
            and (error is None or (isinstance(error, str) and not answers))
            and entry.get("settings") == self.header["settings"]
            and entry.get("seed", configured["seed"]) == configured["seed"]
            and (changed or self.file.has_prompt(line))
        )
        return (line, (len(answers), *counts), error is not None) if intact else None

    def _check_configuration(self, configured: Mapping[str, Any]) -> None:
        before, cure = self.header["configuration"], "to continue that run, or give another --output"
        if before["input"] != configured["input"]:
            fact = f"the input file {self.file.path} has changed since {self.path} was begun"
            raise D5P4Error(f"{fact}; restore the file {cure}")
        if changed := differences(before, configured):
            fact = f"{self.path} was begun with another configuration: {'; '.join(changed)}"
            raise D5P4Error(f"{fact}. Give the same options {cure}")

    def _check_size(self) -> None:
        size = self.path.stat().st_size if self.path.is_file() else None
        if size != self.header["size"]:
            fact = "is gone" if size is None else f"has {size} bytes, but the run wrote {self.header['size']}"
            raise D5P4Error(
                f"{self.header_path} says that the run is finished, but {self.path} {fact}; restore the output, or "
                f"remove {self.header_path.name} and {self.path.name} to decode again"
            )

    def begin(self, prepared: Prepared, mesh: Mesh, seed: int | None, retry_errors: bool) -> Start:
        """Read which lines earlier starts have finished, and add this start to the header."""
        header = self.header
        seed = chosen_seed(header["configuration"]["seed"] if header and seed is None else seed)
        configured = configuration(prepared, self.file.digest, seed)
        number = 1 + len(header.get("starts", []))
        shared = {name: value for name, value in configured.items() if name not in ("input", "seed")}
        settings = _sha256(json.dumps(shared, sort_keys=True))[:12]
        start = Start(number, seed, settings, self.file.digest, secrets.token_hex(8))
        if header.get("finished"):
            self._check_configuration(configured)
            self._check_size()
            report = Report(**header["report"])
            if not (retry_errors and report.failed):
                self.store.remove_parts()
                idle = replace(report, now=0, seconds=0.0, prompts_per_second=0.0, rows_per_second=0.0)
                return replace(start, report=replace(idle, before=report.prompts))
        stored = self.store.read(self._summarise)
        if stored.answered:
            self._check_configuration(configured)
        elif stored.places:  # all stored lines are failures, so this start decodes them again
            self.store.remove_parts()
            stored = StoredRows()
        facts = provenance(prepared.model.head.weight.device)
        del facts["d5p4"]  # the configuration already holds the version
        facts |= {"ranks": mesh.world, "mesh": [mesh.data, mesh.rows]}
        facts["max_tokens_per_forward"] = prepared.settings.max_tokens_per_forward
        header |= {
            "output": self.path.name,
            "model": without_places(prepared.model.name),
            "configuration": configured,
            "settings": start.settings,
            "finished": False,
        }
        header["starts"] = [*header.get("starts", []), {"start": number, **facts}]
        with writing(self.path):
            self._write_header()
        self.notes += stored.notes
        done = np.zeros(self.file.last + 1, dtype=bool)
        done[[line for line, place in stored.places.items() if not (retry_errors and place.failed)]] = True
        return replace(start, done=done, answered=stored.answered)

    def end(self, start: Start, pace: Pace, too_large: list[int]) -> Report:
        """Merge the parts into the output. Return the report. Memory ran out with the token budgets `too_large`."""
        self.file.check_unchanged()
        stored = self.store.read(self._summarise)
        if len(stored.places) != self.file.count:
            counts = f"only {len(stored.places)} of {self.file.count} lines"
            raise D5P4Error(f"{self.store.folder} holds {counts} at the end of the run; run the same command again")
        if not stored.answered:
            first = min(stored.places)
            [raw] = self.store.raw_rows({first: stored.places[first]})
            raise D5P4Error(
                f"all prompts of {self.file.path} failed, so the run is not finished; "
                f"the first failure is in line {first}: {json.loads(raw)['error']}"
            )
        failed = len(stored.places) - stored.answered
        answers, distinct, near, rows = (sum(place.facts[i] for place in stored.places.values()) for i in range(4))
        report = Report(
            prompts=self.file.count,
            now=self.file.count - pace.before,
            before=pace.before,
            failed=failed,
            answers=answers,
            distinct=distinct,
            near_copies=near,
            rows=rows,
            seconds=round(pace.seconds, 3),
            prompts_per_second=round(pace.prompts_per_second, 3),
            rows_per_second=round(pace.rows_per_second, 3),
            seed=start.seed,
            settings=start.settings,
            notes=list(self._notes(failed, too_large)),
        )
        with writing(self.path):
            self.store.write(self.store.raw_rows(stored.places))
            self.header |= {"finished": True, "size": self.path.stat().st_size, "report": report.to_dict()}
            self._write_header()
            self.store.remove_parts()
        return report

    def _write_header(self) -> None:
        write_json(self.header_path, self.header | {"hash": _header_hash(self.header)})

    def _notes(self, failed: int, too_large: list[int]) -> Iterator[str]:
        yield from self.notes
        for name in ("machine", "torch", "max_tokens_per_forward"):  # other values can change results
            values = dict.fromkeys(str(start.get(name)) for start in self.header["starts"])
            if len(values) > 1:
                yield f"the starts of this run had different values of {name}: {', '.join(values)}"
        for size in too_large:
            yield f"the device was out of memory with a budget of {size} tokens; the run went on with half of it"
        if failed:
            subject = "1 prompt failed: its line says" if failed == 1 else f"{failed} prompts failed: their lines say"
            yield f"{subject} why, and --retry-errors decodes failed prompts again"


@contextmanager
def writing(place: Path) -> Iterator[None]:
    """Turn an error of the file system, such as a full disk, into a `D5P4Error` that says what to do."""
    try:
        yield
    except OSError as reason:
        raise D5P4Error(
            f"{place} cannot be written: {reason.strerror or reason}; finished lines are kept, so make the place "
            "writable (free some space if the disk is full) and run the same command again"
        ) from reason
