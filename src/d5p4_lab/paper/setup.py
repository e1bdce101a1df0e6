"""What an experiment is (`Experiment`), and the state of one run of an experiment (`Setup`).

The scale "box" uses the small models of this repository, offline; "smol" the real model of the box, judged by outside
models, and "smol-left" the same from left to right; "paper" (and "paper-llada") the paper's models. An experiment
names the rows that it needs: sets of answers (`cases`), or other measurements (`sources`). It runs in three stages.
*decode* makes the rows. *score* lets outside models score the answers. *draw* reduces answers and scores to numbers,
and makes table, figure, summary and claims. A stopped stage continues where it stopped.
"""

from __future__ import annotations

import gc
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from d5p4.distributed import Mesh
from d5p4.errors import D5P4Error
from d5p4.models.load import choose_device, find, load, shipped_models, without_weights
from d5p4.search import METHODS, SOLVERS
from d5p4.store import read_json

from ..provenance import weights_hash
from .rows import Row, Rows, Source

if TYPE_CHECKING:
    from d5p4.models.base import NativeModel

    from .drawing import Drawing
    from .tasks import Task

OPEN = "open"  # the task in which texts are decoded without a prompt
TEXTS = ("books", "text")  # tasks that are made from a text file
LIST = "a list"
KINDS: dict[str, Any] = {"true or false": bool, "a number": (int, float), "text": str, LIST: (list, tuple)}
KINDS["a mapping"] = Mapping
MAY_BE_NONE = ("encoder", "start", "select_window")  # the names of the settings whose value may be None
SOLVER = "local-search"  # the solver of cases that name none; the committed results were made with it
PAPER_SOLVER = "n-starts"  # greedy selection from all n starts: the solver of the paper's code
FULL_PRECISION = "float32"  # the dtype of judges, unless the setting judge_dtype names another
Data = Path | Mapping[str, Path] | None
GEMMA = "gemma.gguf"  # the outside judge of smol; `bench language --help` says how to get this file


def real(settings: Mapping[str, Any], **own: Any) -> dict[str, dict[str, Any]]:
    """The scales of the real model, by name: the order `confidence` is the paper's, and `left` suits smol best."""
    shared = {**settings, "model": "smol", "judges": (GEMMA,), **own}
    return {name: shared | {"order": order} for name, order in (("smol", "confidence"), ("smol-left", "left"))}


@dataclass(frozen=True)
class Case:
    """One way to decode. It decodes the first `units` prompts of a task, or `units` sets without a prompt."""

    name: str  # the name of the case in tables and figures
    options: Mapping[str, Any]  # options of `d5p4.generate`
    units: int
    task: str = OPEN
    group: str = ""  # the method; the cases of one method are the points of one curve
    value: float | None = None  # the value of the parameter that varies from case to case, if any
    passes: int = 1  # how many times each unit is decoded, each time with other random numbers

    def set_keys(self, number: int | None = None) -> list[str]:
        """The keys of the sets of all passes, or of pass `number`: the unit and, from pass 1 on, a dot and the pass."""
        chosen = range(self.passes) if number is None else [number]
        return [f"{unit}.{place}" if place else str(unit) for place in chosen for unit in range(self.units)]


@dataclass(frozen=True)
class Digest:
    """Reduces a set of answers to the few numbers that drawing needs."""

    name: str  # of the file in numbers/; several experiments may share one file
    make: Callable[[Setup, Case, int, Row, Mapping[str, Row]], Row]  # (setup, case, unit, row, one row per scorer)
    settings: tuple[str, ...] = ()  # settings that the numbers depend on, besides the answers and the scorers
    read: Callable[[Setup, Case, Row], Row] = lambda setup, case, numbers: numbers  # unpacks numbers for drawing


@dataclass(frozen=True)
class Experiment:
    """One table or figure of the paper."""

    name: str
    title: str
    paper: str  # where the table or figure is in the paper
    settings: Mapping[str, Mapping[str, Any]]  # for each scale, its settings by name
    draw: Callable[[Setup], Drawing]
    cases: Callable[[Setup], Sequence[Case]] = lambda setup: ()
    digest: Digest | None = None  # required if the experiment has cases
    sources: Callable[[Setup], Sequence[Source]] = lambda setup: ()  # sources of rows other than answers
    scorers: tuple[str, ...] = ()  # kinds of scorers, see `scoring`
    scored: Callable[[Case], bool] = lambda case: True  # whether the answers of a case are scored
    measured_by: tuple[str, ...] = ()  # kinds of scorers whose models the stage decode needs, for `sources`
    needs_text: tuple[str, ...] = ()  # scales whose decoding needs a text file

    def scales(self, scale: str) -> list[str]:
        """The scale, and those whose names begin with its name and a hyphen."""
        return [own for own in self.settings if f"{own}-".startswith(f"{scale}-")]


Progress = Callable[[float, str], None]
"""Called as `progress(share, text)`: the share of the work that is done, and what is being done now."""


@dataclass(eq=False)
class Setup:
    """One run of an experiment: the settings with the caller's changes, the folder, the model."""

    experiment: Experiment
    scale: str
    root: Path  # the folder of this scale's results
    model_name: str | None = None  # a model to use instead of the model that the settings name
    data: Data = None  # the file or folder that the only task reads, or the file or folder of each task by name
    device: str | None = None
    dtype: str | None = None
    seed: int = 0
    changes: Mapping[str, Any] = field(default_factory=dict)
    progress: Progress = lambda share, text: None
    decoding: bool = True  # if False, no row is decoded, so the model need not be on this machine
    mesh: Mesh = field(default_factory=Mesh)  # the ranks that share the decoding
    _tasks: dict[tuple[str, int], Task] = field(default_factory=dict)
    _rows: dict[str, Rows] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.scale not in self.experiment.settings:
            raise D5P4Error(f"scale={self.scale!r} is not known; use one of {', '.join(self.experiment.settings)}")
        defaults = self.experiment.settings[self.scale]
        if unknown := ", ".join(sorted(set(self.changes) - set(defaults))):
            raise D5P4Error(f"{self.experiment.name} has no setting {unknown} (it has: {', '.join(defaults)})")
        self.changes = {name: _checked(name, value, defaults[name]) for name, value in self.changes.items()}

    @cached_property
    def settings(self) -> dict[str, Any]:
        """The settings with the caller's changes. The judges are those of the results in the folder, if there are any.

        If `units` is below its default, no other default of units, such as `units_close`, is larger.
        """
        settings = dict(self.experiment.settings[self.scale])
        if "judges" in settings and "judges" not in self.changes:
            begun = (read_json(self.folder / "config.json") or {}).get("settings", {})
            settings["judges"] = begun.get("judges", settings["judges"])
        if self.changes.get("units", inf) < settings.get("units", 0):
            few = self.changes["units"]
            settings |= {name: min(settings[name], few) for name in settings if name.startswith("units_")}
        return settings | dict(self.changes)

    def __getitem__(self, name: str) -> Any:
        return self.settings[name]

    @property
    def folder(self) -> Path:
        return self.root / self.experiment.name

    @cached_property
    def cases(self) -> list[Case]:
        cases = list(self.experiment.cases(self))
        if "passes" in self.settings:
            cases = [replace(case, passes=self["passes"]) for case in cases]
        if solver := self._other_solver():
            cases = [replace(one, options={**one.options, **solver}) if solves(one.options) else one for one in cases]
        names = [case.name for case in cases]
        if twice := [name for name in dict.fromkeys(names) if names.count(name) > 1]:
            raise D5P4Error(f"{self.experiment.name} has the case {twice[0]!r} twice; give each value once")
        return cases

    @cached_property
    def torch_device(self) -> torch.device:
        return choose_device(self.device)

    @property
    def named(self) -> str:
        return self.model_name or self["model"]

    @cached_property
    def weights(self) -> str:
        """A hash of the model's weights. The hash does not depend on the folder of the model."""
        return self._maker[1] if self._elsewhere else weights_hash(find(self.named))[:16]

    @property
    def label(self) -> str:
        """The model's name without its folder."""
        return self._maker[0] if self._elsewhere else Path(self.named).name

    @cached_property
    def _elsewhere(self) -> bool:
        """Whether the model is not on this machine and not needed. Its name and hash are then read from config.json."""
        return not (self.decoding or Path(self.named).expanduser().is_dir() or self.named in shipped_models())

    @cached_property
    def _maker(self) -> tuple[str, str]:
        """The name of the model that made the rows on the disk, and the hash of its weights, as config.json says."""
        named = Path(self.named).name
        config = read_json(self.folder / "config.json")
        if not config:  # another experiment in the same folder may have rows of this model
            others = (read_json(file) or {} for file in sorted(self.root.glob("*/config.json")))
            config = next((other for other in others if other.get("model") == named), {})
        maker = str(config.get("model", named)), str(config.get("weights", "unknown"))
        if self.model_name is not None and maker[0] != Path(self.model_name).name:
            raise D5P4Error(f"{self.folder} has rows of {maker[0]!r}, not of {self.model_name!r}; give another --out")
        return maker

    @cached_property
    def model(self) -> NativeModel:
        return load(self.named, self.torch_device, self.dtype, mapped=self.mesh.world > 1)

    @cached_property
    def outline(self) -> NativeModel:
        """The model without its weights: its tokenizer, its longest length and its settings."""
        if "model" in self.__dict__:
            return self.model
        model, _, tokenizer, generation = without_weights(self.named)
        model.attach(self.named, tokenizer, generation)
        return model

    def release(self) -> None:
        """Free the memory of the model for the judges. The model is loaded again if it is needed."""
        if self.__dict__.pop("model", None) is not None:
            self.__dict__.pop("outline", None)
            gc.collect()
            if self.torch_device.type == "cuda":
                torch.cuda.empty_cache()

    def reads_data(self, task: str) -> bool:
        """Whether the prompts of a task come from a file. (The prompts of countdown are generated.)"""
        return task != OPEN and task.partition(":")[0] != "countdown"

    @cached_property
    def readers(self) -> list[str]:
        """The tasks of the experiment that read data. `text` stands for measurements on real text."""
        kinds = [case.task.partition(":")[0] for case in self.cases if self.reads_data(case.task)]
        if self.scale in self.experiment.needs_text and not set(kinds) & set(TEXTS):
            kinds.append(self.settings.get("texts", "text"))
        return list(dict.fromkeys(kinds))

    def data_of(self, task: str) -> Path | None:
        """The file or folder of a task, or None if the caller gave none. One path is the data of the only task."""
        kind = task.partition(":")[0]
        if not isinstance(self.data, Path):
            return (self.data or {}).get(kind)
        if len(self.readers) > 1 and not set(self.readers) <= set(TEXTS):
            several = ", ".join(self.readers)
            raise D5P4Error(f"--data {self.data} does not say whose data it is ({several}); give --data {kind}=FILE")
        return self.data

    def task(self, name: str, count: int) -> Task:
        """Load the first `count` prompts of a task. A name such as countdown:5 consists of a task and a split."""
        from .answers import known_prompts, prompt_digits
        from .tasks import load_task

        if (name, count) not in self._tasks:
            kind, _, split = name.partition(":")
            path = self.data_of(name) if self.reads_data(name) else None
            if kind in TEXTS and path is None:
                raise D5P4Error(f"{self.experiment.name} needs a text file: give --data {kind}=FILE")
            task = load_task(kind, path, limit=count, split=split or None)
            if len(task) < count:
                raise D5P4Error(f"{name} has only {len(task)} prompts in {task.source}, but {count} are needed")
            for file, unit, digits in known_prompts(self, name):
                if unit < count and digits != prompt_digits(prompt := task.examples[unit].prompt):
                    reason = f"its unit {unit} has another prompt than {prompt!r:.60}"
                    raise D5P4Error(f"{file} was made from other data ({reason}); give another --out")
            self._tasks[name, count] = task
        return self._tasks[name, count]

    def source(
        self,
        name: str,
        keys: Sequence[str],
        make: Callable[[Sequence[str]], Mapping[str, Row]],
        *,
        together: int = 1,
        kept: bool = True,
        early: bool = False,
        models: Sequence[str] = (),
        **made_with: Any,
    ) -> Source:
        """Make a source of rows other than answers. Rows depend on nothing but `made_with` and the seed.

        kept  whether drawing reads the rows; these rows are compressed and committed. The rest is as in `Source`
        """
        path = f"{self.experiment.name}/{name}.jsonl{'.xz' if kept else ''}"
        header = {"seed": self.seed} | plain(made_with)
        return Source(path, header, keys, make, name, lambda: together, early=early, models=models)

    def model_and(self, *names: str) -> dict[str, Any]:
        """What rows made by the model depend on: its name, its weights, the settings `names`, and another solver."""
        made_by = {"model": self.label, "weights": self.weights}
        return {name: self[name] for name in names} | self._other_solver() | made_by

    def _other_solver(self) -> dict[str, str]:
        solver = self.settings.get("solver", SOLVER)
        return {} if solver == SOLVER else {"solver": solver}

    def forget(self) -> None:
        """Read all rows again at their next use. Other ranks may have written rows."""
        self._rows.clear()

    def rows(self, source: Source) -> Rows:
        return self.open(source.path, source.made_with)

    def open(self, path: str, header: Mapping[str, Any]) -> Rows:
        if path not in self._rows:
            self._rows[path] = Rows(self.root / path, header)
        return self._rows[path]


def solves(options: Mapping[str, Any]) -> bool:
    return "solver" in METHODS[options["method"]].parameters


def _checked(name: str, value: Any, default: Any) -> Any:
    """Check that a value of a setting has the default's type. A single value may replace a list."""
    kind = _kind(default)
    if default is None or (value is None and name in MAY_BE_NONE):
        return value
    inner = {_kind(item) for item in default} if kind == LIST else set()
    if kind == LIST and _kind(value) != LIST and inner != {LIST}:
        value = [value]
    if _kind(value) != kind or (len(inner) == 1 and any(_kind(item) not in inner for item in value)):
        wanted = kind + (f" in which every item is {inner.pop()}" if len(inner) == 1 else "")
        raise D5P4Error(f"{name}={value!r} must be {wanted}, such as {plain(default)!r}")
    if name == "solver" and value not in SOLVERS:
        raise D5P4Error(f"{name}={value!r} must be one of {', '.join(SOLVERS)}")
    if (name.startswith("units") or name == "passes") and (not isinstance(value, int) or value < 1):
        raise D5P4Error(f"{name}={value!r} must be a whole number of at least 1")
    return value


def _kind(value: Any) -> str:
    return next((words for words, kind in KINDS.items() if isinstance(value, kind)), "nothing")


def plain(value: Any) -> Any:
    return json.loads(json.dumps(value))


def digest_of(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:10]
