"""What an experiment is, and what one run of it is given.

An experiment has settings for each scale ("box": the models of the repository, offline; "paper": the paper's own). It
names the rows it needs: sets of answers (`cases`), or anything else it measures (`sources`). It runs in three stages:
*decode* makes sets of answers and measurements, *score* lets outside models score the answers, *draw* reduces the
answers to numbers and makes table, figure, summary and claims. A stopped stage continues where it was. Each stage may
run on another machine: only the folder has to be carried over.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from d5p4.distributed import Mesh
from d5p4.errors import D5P4Error
from d5p4.models.load import choose_device, find, load, shipped
from d5p4.provenance import weights_hash
from d5p4.store import read_json

from .rows import Row, Rows, Source

if TYPE_CHECKING:
    from d5p4.models.base import NativeModel

    from .drawing import Drawing
    from .tasks import Task

OPEN = "open"  # the task of writing without a prompt
TEXTS = ("books", "text")  # tasks made of a text file
LIST = "a list"
MAY_BE_NONE = ("encoder", "start")  # settings for which None is a value of its own


@dataclass(frozen=True)
class Case:
    """One way to decode: on the first `units` prompts of a task, or `units` sets without a prompt."""

    name: str  # in tables and figures
    options: Mapping[str, Any]  # of `d5p4.generate`
    units: int
    task: str = OPEN
    group: str = ""  # the method, where several cases are points of one curve
    value: float | None = None  # of the swept parameter


@dataclass(frozen=True)
class Digest:
    """Reduces a set of answers to the few numbers that drawing needs.

    name      the name of the file below numbers/; experiments may share it
    make      `make(setup, case, unit, row, scores)` gives the numbers of a unit; `scores` are by scorer
    settings  names of the settings that the numbers depend on, besides the answers and the scorers
    """

    name: str
    make: Callable[[Setup, Case, int, Row, Mapping[str, Row]], Row]
    settings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Experiment:
    """One table or figure of the paper."""

    name: str
    title: str
    paper: str  # where it is in the paper
    settings: Mapping[str, Mapping[str, Any]]  # by scale
    draw: Callable[[Setup], Drawing]
    cases: Callable[[Setup], Sequence[Case]] = lambda setup: ()
    digest: Digest | None = None  # reduces the sets of answers, if there are cases
    sources: Callable[[Setup], Sequence[Source]] = lambda setup: ()  # rows other than answers
    scorers: tuple[str, ...] = ()  # kinds of scorers; see `scoring`
    needs_text: tuple[str, ...] = ()  # scales that need a text file to decode


Progress = Callable[[float, str], None]
"""Called as `progress(share, text)`: the share that is done, and what is being done."""


@dataclass(eq=False)
class Setup:
    """One run of an experiment: its settings with the caller's changes, its folder, its model."""

    experiment: Experiment
    scale: str
    root: Path  # the folder of this scale's results
    model_name: str | None = None  # instead of the settings' own
    data: Path | None = None  # the file or folder that the task reads
    device: str | None = None
    dtype: str | None = None
    seed: int = 0
    changes: Mapping[str, Any] = field(default_factory=dict)
    progress: Progress = lambda share, text: None
    decoding: bool = True  # False: rows are only read, so the model need not be on this machine
    finished: bool = True  # False: the deadline came before all rows were made
    mesh: Mesh = field(default_factory=Mesh)  # the ranks that share the decoding
    _tasks: dict[tuple[str, int], Task] = field(default_factory=dict)
    _rows: dict[str, Rows] = field(default_factory=dict)

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
        """The folder of the experiment's own files."""
        return self.root / self.experiment.name

    @cached_property
    def cases(self) -> list[Case]:
        cases = list(self.experiment.cases(self))
        names = [case.name for case in cases]
        if twice := [name for name in dict.fromkeys(names) if names.count(name) > 1]:
            raise D5P4Error(f"{self.experiment.name} has {twice[0]!r} twice; give each value once")
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
        """A hash of the model's weights; it does not depend on where the model is."""
        return self._maker[1] if self._elsewhere else weights_hash(find(self.named))[:16]

    @property
    def label(self) -> str:
        """The model's name without its folder, recorded together with the weights."""
        return self._maker[0] if self._elsewhere else Path(self.named).name

    @cached_property
    def _elsewhere(self) -> bool:
        """Whether the model is neither needed nor on this machine. Then config.json says which model made the rows."""
        return not (self.decoding or Path(self.named).expanduser().is_dir() or shipped(self.named))

    @cached_property
    def _maker(self) -> tuple[str, str]:
        """Name and weights of the model that made the existing rows."""
        config = read_json(self.folder / "config.json") or {}
        maker = str(config.get("model", Path(self.named).name)), str(config.get("weights", "unknown"))
        if self.model_name is not None and maker[0] != Path(self.model_name).name:
            raise D5P4Error(f"{self.folder} holds what {maker[0]!r} made, not {self.model_name!r}; give another --out")
        return maker

    @cached_property
    def model(self) -> NativeModel:
        return load(self.named, self.torch_device, self.dtype, mapped=self.mesh.world > 1)

    def reads_data(self, task: str) -> bool:
        """Whether the prompts of a task come from a file; those of countdown are generated."""
        return task != OPEN and task.partition(":")[0] != "countdown"

    def task(self, name: str, count: int) -> Task:
        """The first `count` prompts of a task; `name:split` gives a split, as in countdown:5."""
        from .tasks import load_task

        if (name, count) not in self._tasks:
            kind, _, split = name.partition(":")
            path = self.data if self.reads_data(name) else None
            if kind in TEXTS and path is None:
                reason = f"the task {kind} reads it"
                raise D5P4Error(f"{self.experiment.name} needs a text file: give --data ({reason})")
            task = load_task(kind, path, limit=count, split=split or None)
            if len(task) < count:
                raise D5P4Error(f"{name} has {len(task)} prompts in {self.data}, {count} are asked for")
            self._check_prompts(name, task)
            self._tasks[name, count] = task
        return self._tasks[name, count]

    def _check_prompts(self, name: str, task: Task) -> None:
        """Refuse a task whose prompts differ from those that the existing rows were made from."""
        from .answers import known_prompts, prompt_digits

        for path, unit, digits in known_prompts(self, name):
            if unit < len(task) and digits != prompt_digits(prompt := str(task.examples[unit].prompt)):
                reason = f"unit {unit} asks something other than {prompt!r:.60}"
                raise D5P4Error(f"{path} was made from other data ({reason}); give another --out")

    def source(
        self, name: str, keys: Sequence[str], make: Callable[[Sequence[str]], Mapping[str, Row]], *, together: int = 1,
        kept: bool = True, cost: float = 1.0, **made_with: Any,
    ) -> Source:  # fmt: skip
        """Rows of the experiment other than answers; `made_with` is all they depend on besides the seed.

        kept: whether drawing reads them; then they are compressed and committed.
        """
        path = f"{self.experiment.name}/{name}.jsonl{'.xz' if kept else ''}"
        header = {"seed": self.seed} | plain(made_with)
        return Source(path, header, keys, make, name, together=lambda: together, cost=lambda: cost)

    def model_and(self, *names: str) -> dict[str, Any]:
        """What the model's rows depend on: the model, its weights, and the named settings."""
        return {name: self[name] for name in names} | {"model": self.label, "weights": self.weights}

    def rows(self, source: Source) -> Rows:
        """The rows of a source that are on the disk; read once."""
        return self.open(source.path, source.made_with)

    def open(self, path: str, header: Mapping[str, Any]) -> Rows:
        if path not in self._rows:
            self._rows[path] = Rows(self.root / path, header)
        return self._rows[path]


def _checked(name: str, value: Any, default: Any) -> Any:
    """A caller's value of a setting. It must be of the default's kind; one value may stand for a list of one."""
    kind = _kind(default)
    if default is None or (value is None and name in MAY_BE_NONE):
        return value
    inner = {_kind(item) for item in default} if kind == LIST else set()
    if kind == LIST and _kind(value) != LIST and inner != {LIST}:
        value = [value]
    if _kind(value) != kind:
        raise D5P4Error(f"{name}={value!r} must be {kind}, such as {plain(default)!r}")
    if len(inner) == 1 and any(_kind(item) not in inner for item in value):
        raise D5P4Error(f"{name}={value!r} must be {LIST} of which each is {inner.pop()}, such as {plain(default)!r}")
    if name.startswith("units") and (not isinstance(value, int) or value < 1):
        raise D5P4Error(f"{name}={value!r} must be a whole number of at least 1")
    return value


def _kind(value: Any) -> str:
    kinds: list[tuple[Any, str]] = [(bool, "true or false"), ((int, float), "a number"), (str, "text")]
    kinds += [((list, tuple), LIST), (Mapping, "a mapping")]
    return next((words for kind, words in kinds if isinstance(value, kind)), "nothing")


def plain(value: Any) -> Any:
    """The value as JSON gives it back."""
    return json.loads(json.dumps(value))


def digest_of(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:10]


def slugged(text: str) -> str:
    """A text with everything but a-z and 0-9 turned into dashes, for a file's name."""
    return re.sub(r"[^a-z0-9]+", "-", text)
