"""What an experiment is, and what one run of it is given.

An experiment has settings for each scale ("box": the models of the repository, offline; "paper": the paper's own) and
up to three stages. *decode* writes raw rows: the sets of answers of its cases, or whatever `measure` finds. *score*
adds what outside models say of those answers. *draw* reads both and makes table, figure, summary and claims. Each stage
goes on where it was stopped, and each may run on another machine: only the folder has to be carried over.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from d5p4.distributed import Mesh
from d5p4.errors import D5P4Error
from d5p4.models.load import choose_device, find, load, shipped
from d5p4.provenance import weights_hash

from .store import JsonLines

if TYPE_CHECKING:
    from d5p4.eval.tasks import Task
    from d5p4.models.base import NativeModel

    from .drawing import Drawing

OPEN = "open"  # the task of writing from nothing
TEXTS = ("books", "text")  # tasks made of a text file
LIST = "a list"
MAY_BE_NONE = ("encoder", "start")  # a setting whose absence says something


@dataclass(frozen=True)
class Case:
    """One way to decode, on the first `units` prompts of a task (or so many sets from nothing)."""

    name: str  # in tables and figures
    options: Mapping[str, Any]  # of `d5p4.generate`
    units: int
    task: str = OPEN
    group: str = ""  # the method, where several cases are points of one curve
    value: float | None = None  # of the swept parameter


@dataclass(frozen=True)
class Experiment:
    """One table or figure of the paper."""

    name: str
    title: str
    paper: str  # where it stands there
    settings: Mapping[str, Mapping[str, Any]]  # by scale
    draw: Callable[[Setup], Drawing]
    cases: Callable[[Setup], Sequence[Case]] = lambda setup: ()
    measure: Callable[[Setup], None] | None = None  # raw rows that are no answers; must go on where it stopped
    scorers: tuple[str, ...] = ()  # kinds; see `scoring`
    needs_text: tuple[str, ...] = ()  # scales at which nothing can be decoded without a text file


Progress = Callable[[float, str], None]
"""`progress(share done, what is being done)`."""


@dataclass(eq=False)
class Setup:
    """One run of an experiment: its settings with the caller's changes, its folder, its model."""

    experiment: Experiment
    scale: str
    root: Path  # the folder of this scale's results
    model_name: str | None = None  # instead of the settings' own
    data: Path | None = None  # of tasks that need a file
    device: str | None = None
    dtype: str | None = None
    seed: int = 0
    changes: Mapping[str, Any] = field(default_factory=dict)
    progress: Progress = lambda share, text: None
    decoding: bool = True  # False: rows are only read, so the model need not be here
    finished: bool = True  # False: `missing` sets are left to decode
    mesh: Mesh = field(default_factory=Mesh)  # the ranks that share the decoding
    _tasks: dict[tuple[str, int], Task] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.scale not in self.experiment.settings:
            raise D5P4Error(f"scale={self.scale!r} is not known; use one of {', '.join(self.experiment.settings)}")
        unknown = sorted(set(self.changes) - set(self.experiment.settings[self.scale]))
        if unknown:
            known = ", ".join(self.experiment.settings[self.scale])
            raise D5P4Error(f"{self.experiment.name} has no setting {', '.join(unknown)} (it has: {known})")
        defaults = self.experiment.settings[self.scale]
        self.changes = {name: _checked(name, value, defaults[name]) for name, value in self.changes.items()}

    @cached_property
    def settings(self) -> dict[str, Any]:
        return dict(self.experiment.settings[self.scale]) | dict(self.changes)

    def __getitem__(self, name: str) -> Any:
        return self.settings[name]

    @property
    def folder(self) -> Path:
        """Of the experiment's own files."""
        return self.root / self.experiment.name

    @cached_property
    def cases(self) -> list[Case]:
        cases = list(self.experiment.cases(self))
        names = [case.name for case in cases]
        if len(set(names)) < len(names):
            raise AssertionError(f"two cases of {self.experiment.name} have one name")
        return cases

    @cached_property
    def torch_device(self) -> torch.device:
        return choose_device(self.device)

    @property
    def named(self) -> str:
        """The model's name."""
        return self.model_name or self["model"]

    @cached_property
    def weights(self) -> str:
        """Says which weights rows were made with, wherever the folder lies."""
        return self._maker[1] if self._elsewhere else weights_hash(find(self.named))[:16]

    @property
    def label(self) -> str:
        """The model's name beside the weights."""
        return self._maker[0] if self._elsewhere else Path(self.named).name

    @cached_property
    def _elsewhere(self) -> bool:
        """Whether the model is neither here nor needed: then the rows themselves say what made them."""
        return not (self.decoding or Path(self.named).expanduser().is_dir() or shipped(self.named))

    @cached_property
    def _maker(self) -> tuple[str, str]:
        """Name and weights of the model that made the rows at hand, all of them; of several the one that is named."""
        wanted = [{"task": case.task, "seed": self.seed, "options": _plain(case.options)} for case in self.cases]
        found = {}
        for path in [*sorted(self.folder.glob("*.jsonl")), *sorted((self.root / "rows").glob("*.jsonl"))]:
            header = _header(path)
            if "model" not in header or "weights" not in header:
                continue
            maker = str(header.pop("model")), str(header.pop("weights"))
            if path.parent == self.folder or header in wanted:
                found[path] = maker
        named = {path: maker for path, maker in found.items() if maker[0] == Path(self.named).name}
        if self.model_name is not None or (named and len(set(found.values())) > 1):
            found = named
        if len(set(found.values())) > 1:
            told = ", ".join(f"{path} by {name} ({weights})" for path, (name, weights) in found.items())
            raise D5P4Error(f"several models made these rows: {told}; name one by --model, or give another --out")
        return next(iter(found.values()), (Path(self.named).name, "unknown"))

    @cached_property
    def model(self) -> NativeModel:
        return load(self.named, self.torch_device, self.dtype, mapped=self.mesh.world > 1)

    def task(self, name: str, count: int) -> Task:
        """The first `count` prompts of a task; `name:split` gives a split, as in countdown:5."""
        from d5p4.eval.tasks import load_task

        if (name, count) not in self._tasks:
            plain, _, split = name.partition(":")
            path = None if plain == "countdown" else self.data
            if plain in TEXTS and path is None:
                told = f"the task {plain} needs the path of one"
                raise D5P4Error(f"{self.experiment.name} needs a text file: give --data ({told})")
            held = load_task(plain, path, limit=count, split=split or None)
            if len(held) < count:
                raise D5P4Error(f"{name} has {len(held)} prompts in {self.data}, {count} are asked for")
            self._compare(name, held)
            self._tasks[name, count] = held
        return self._tasks[name, count]

    def _compare(self, name: str, held: Task) -> None:
        """Refuse a task whose prompts are not those that rows at hand were made from."""
        for case in self.cases:
            rows = self.rows(case) if case.task == name else ()
            for row in rows:
                unit = int(row["key"])
                if "prompt" in row and unit < len(held) and row["prompt"] != (here := held.examples[unit].prompt):
                    told = f"unit {unit} asks {row['prompt']!r:.60} and the data at hand {here!r:.60}"
                    raise D5P4Error(f"{self.rows(case).path} was made from other data ({told}); give another --out")

    def rows(self, case: Case) -> JsonLines:
        """The sets of answers of a case. Experiments that decode the same case share them."""
        made_with = {
            "task": case.task, "model": self.label, "weights": self.weights, "seed": self.seed,
            "options": _plain(case.options),
        }  # fmt: skip
        # The case's name is not in it: the same answers may have two names in two experiments.
        slug = re.sub(r"[^a-z0-9]+", "-", f"{case.task} {case.options['method']}")
        return JsonLines(self.root / "rows" / f"{slug}-{_digest(made_with)}.jsonl", made_with, mend=self.mesh.first)

    def scores(self, case: Case, scorer: str) -> JsonLines:
        """What a scorer says of a case's sets of answers."""
        rows = self.rows(case)
        return JsonLines(self.root / "scores" / scorer / rows.path.name, {"scorer": scorer, **rows.header})

    def measured(self, name: str, **made_with: Any) -> JsonLines:
        """Rows of the experiment that are no answers; `made_with` is all they depend on besides the model."""
        if {"model", "weights"} <= set(made_with) and self._elsewhere:
            made_with["model"] = self.label
        return JsonLines(self.folder / f"{name}.jsonl", {"seed": self.seed} | _plain(made_with))


def _header(path: Path) -> dict[str, Any]:
    """What a file of rows says of itself; nothing where its first line is broken."""
    with path.open(encoding="utf-8") as file:
        try:
            return dict(json.loads(file.readline())["header"])
        except (ValueError, KeyError, TypeError):
            return {}


def _checked(name: str, value: Any, default: Any) -> Any:
    """A caller's value of a setting, which must be of the default's kind; one value may stand for a list of it."""
    kind = _kind(default)
    if default is None or (value is None and name in MAY_BE_NONE):
        return value
    inner = {_kind(item) for item in default} if kind == LIST else set()
    if kind == LIST and _kind(value) != LIST and inner != {LIST}:
        value = [value]
    if _kind(value) != kind:
        raise D5P4Error(f"{name}={value!r} must be {kind}, such as {_plain(default)!r}")
    if len(inner) == 1 and any(_kind(item) not in inner for item in value):
        raise D5P4Error(f"{name}={value!r} must be {LIST} of which each is {inner.pop()}, such as {_plain(default)!r}")
    if name.startswith("units") and (not isinstance(value, int) or value < 1):
        raise D5P4Error(f"{name}={value!r} must be a whole number of at least 1")
    return value


def _kind(value: Any) -> str:
    kinds: list[tuple[Any, str]] = [(bool, "true or false"), ((int, float), "a number"), (str, "text")]
    kinds += [((list, tuple), LIST), (Mapping, "a mapping")]
    return next((told for kind, told in kinds if isinstance(value, kind)), "nothing")


def _plain(value: Any) -> Any:
    return json.loads(json.dumps(value))


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:10]


def batches(items: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    for first in range(0, len(items), size):
        yield items[first : first + size]
