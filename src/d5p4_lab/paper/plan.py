"""What a run needs: time, GPU memory, models and data. `plan` estimates it, and `check` opens it before decoding.

Both look at the same missing rows. Rows that several experiments share count once in the total. Times follow from the
operations of a row and from the GPU benchmark, which timed whole decoding steps of LLaDA-8B's shape. Narrower
models use a GPU less well: the runs of `books` (width 320) reached about 110 TFLOP/s, which gives `NARROW`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from safetensors import safe_open

from d5p4.errors import D5P4Error
from d5p4.models.checkpoint import read_json, weight_files
from d5p4.models.load import find, shipped_models
from d5p4.options import Settings

from ..scoring.encoder import DEFAULT as MINILM
from ..scoring.encoder import Encoder
from ..scoring.perplexity import SMOLLM2, CausalJudge
from ..tables import markdown
from . import EXPERIMENTS, experiment
from .answers import answers, case_options, scores
from .rows import missing_keys
from .scoring import TOKENS as JUDGED
from .scoring import judge_dtype, models_of, scorer_names
from .setup import TEXTS, Case, Setup
from .tasks import SOURCES

PROMPTS = {"truthfulqa": 40, "arc-challenge": 55, "commonsenseqa": 45, "gsm8k": 110, "countdown": 16, "books": 40}
GB = 1e9
GPU = "one NVIDIA H200 in bf16"
TOKENS = 1 << 14  # per forward
ACTIVATIONS = 14  # bytes of activations per token / (width · bytes per number); 2.64 GB for 60 × 384 tokens, measured
HEAD_GB = 1.0  # the streamed head's own memory on a GPU
NARROW = 0.675  # the rate of a model of width D is proportional to D to this power, up to `WIDEST`
WIDEST = 4096
JUDGE = {"float32": 0.05, "bfloat16": 0.3}  # a judge's rate on a GPU, relative to decoding


# ---- the sizes of models


@dataclass(frozen=True)
class Shape:
    """The size of a model."""

    layers: int
    width: int
    vocabulary: int
    parameters: float
    tables: int = 2  # how many matrices of vocabulary × width the parameters include: embedding and head
    carry_over: bool = False  # whether the head sees only masked positions, as in MDLM
    gated: bool = False  # whether the hub asks for a licence to be accepted
    stored: float = 2.0  # bytes per parameter in the files

    @property
    def head(self) -> float:
        """Operations per token."""
        return 2.0 * self.vocabulary * self.width

    def body(self, length: int) -> float:
        """Operations per token of a row of this length."""
        return 2 * self.parameters - self.tables * self.head + 4 * length * self.width * self.layers


LLADA = Shape(32, 4096, 126464, 8_015_581_184)
KNOWN = {  # the paper's models, and the two that come inside Python packages
    "kuleshov-group/mdlm-owt": Shape(12, 768, 50258, 169_627_218, 2, True, stored=4),
    "GSAI-ML/LLaDA-8B-Instruct": LLADA,
    "GSAI-ML/LLaDA-8B-Base": LLADA,
    "openai-community/gpt2-large": Shape(36, 1280, 50257, 774_030_080, 1, stored=4.2),
    "meta-llama/Meta-Llama-3-8B": Shape(32, 4096, 128256, 8_030_261_248, gated=True),
    "jinaai/jina-embeddings-v2-base-en": Shape(12, 768, 30528, 137_368_320, 1),
    SMOLLM2: Shape(30, 576, 49152, 134_515_008, 1),
    MINILM: Shape(6, 384, 30522, 22_713_216, 1),
}
WIDTHS = ("hidden_dim", "d_model", "hidden_size", "n_embd")
LAYERS = ("n_blocks", "n_layers", "num_hidden_layers", "n_layer")
VOCABULARIES = ("embedding_size", "vocab_size")


def is_local(name: str) -> bool:
    """Whether a model is in a folder of this machine or comes with a Python package."""
    return name in (SMOLLM2, MINILM) or name in shipped_models() or Path(name).expanduser().is_dir()


@lru_cache(maxsize=32)
def shape_of(name: str) -> Shape | None:
    """Return the size of a model, or None if nothing is known about it. No weights are read, and nothing is fetched."""
    if name in KNOWN or not is_local(name):
        by_last = {known.rsplit("/", 1)[-1]: shape for known, shape in KNOWN.items()}
        return by_last.get(name.rstrip("/").rsplit("/", 1)[-1])
    config = read_json(find(name) / "config.json")
    width, layers, vocabulary = (
        next((int(config[key]) for key in keys if config.get(key)), 0) for keys in (WIDTHS, LAYERS, VOCABULARIES)
    )
    if not (width and layers and vocabulary):
        return None
    sizes = []
    for file in weight_files(find(name)):
        with safe_open(file, framework="pt", device="cpu") as shard:
            sizes += [tuple(shard.get_slice(name).get_shape()) for name in shard.keys()]  # noqa: SIM118 (not a dict)
    parameters = sum(math.prod(size) for size in sizes)
    tables = sizes.count((vocabulary, width))  # a head that equals the embedding is not stored
    return Shape(layers, width, vocabulary, parameters, tables, config.get("model_type") == "mdlm")


# Operations per second: a step of 60 rows of 384 tokens, 256 of them in the head, took 556 ms (`bench gpu`).
RATE = (60 * 384 * LLADA.body(384) + 60 * 256 * LLADA.head) / 0.556


def seconds(operations: float, width: int, dtype: str | None = None) -> float:
    """The time of a GPU for operations of a model of this width; `dtype` is given if the model is a judge."""
    rate = RATE * (min(width, WIDEST) / WIDEST) ** NARROW
    return operations / rate / (JUDGE.get(dtype, 0.05) if dtype else 1.0)


def decoding(shape: Shape | None, case: Case) -> float:
    """Operations of one set of answers, if all rows of its pool differ at every step."""
    if shape is None:
        return 0.0
    options = {"k": 1, "spare": 0, "w": 1, "guidance": 1.0} | dict(case.options)
    prompt, length = PROMPTS.get(case.task.partition(":")[0], 0), options["gen_length"]
    body = (prompt + length) * shape.body(prompt + length) * (1 if options["guidance"] == 1 else 2)
    met = length / 2 if shape.carry_over else length  # positions of a row that meet the head, on average
    rows = (options["k"] + options["spare"]) * options["w"]
    return rows * (options.get("steps") or length) * (body + met * shape.head)


# ---- the rows that are missing, and what they cost


class Part(NamedTuple):
    """Missing rows of one source."""

    stage: str
    path: str
    keys: list[str]
    work: Mapping[tuple[str, str | None], float]  # operations per row, by model and dtype (None: the decoded model)
    seconds: float = 0.0  # other seconds per row, on one CPU thread


def parts(setup: Setup, stages: Sequence[str]) -> Iterator[Part]:
    """The rows that the stages have to make."""

    def reading(name: str, tokens: float, length: int = 512) -> dict[tuple[str, str | None], float]:
        shape = shape_of(name)
        decoded = "model" in setup.settings and name == setup.named
        dtype = None if decoded else judge_dtype(setup) if name in setup.settings.get("judges", ()) else "float32"
        return {(name, dtype): 0.0 if shape is None else tokens * (shape.body(length) + shape.head)}

    if "decode" in stages:
        for source in setup.experiment.sources(setup):
            work = {key: value for name, n in source.tokens.items() for key, value in reading(name, n).items()}
            yield Part("decode", source.path, missing_keys(setup, source), work, source.seconds)
        for case in setup.cases:
            source = answers(setup, case)
            work = {(setup.named, None): decoding(shape_of(setup.named), case)}
            yield Part("decode", source.path, missing_keys(setup, source), work)
    for scorer in scorer_names(setup) if "score" in stages else ():
        for case in filter(setup.experiment.scored, setup.cases):
            done, source = scores(setup, case, scorer), answers(setup, case)
            length = case.options["gen_length"]
            keys = [key for key in source.keys if key not in setup.rows(done) and not source.elsewhere(key)]
            work = reading(scorer.partition(":")[2], case.options.get("k", 1) * length, length)
            yield Part("score", done.path, keys, work)


@dataclass
class Estimate:
    """What the missing rows of one or more experiments cost."""

    rows: int = 0
    seconds: float = 0.0  # on one GPU
    memory: float = 0.0  # bytes on each GPU
    unknown: set[str] = field(default_factory=set)  # models of unknown size
    seen: dict[str, set[str]] = field(default_factory=dict)  # the keys of each file that were counted

    def add(self, setup: Setup, given: Sequence[Part]) -> None:
        for part in given:
            seen = self.seen.setdefault(part.path, set())
            keys = [key for key in part.keys if key not in seen]
            seen.update(keys)
            shapes = {(name, dtype): shape_of(name) for name, dtype in part.work} if keys else {}
            self.unknown |= {name for (name, _), shape in shapes.items() if shape is None}
            one_row = part.seconds / 4  # a GPU's machine has faster cores
            one_row += sum(seconds(part.work[key], s.width, key[1]) for key, s in shapes.items() if s)
            self.rows += len(keys) if part.stage == "decode" else 0
            self.seconds += len(keys) * one_row
        self.memory = max(self.memory, memory(setup, given))

    def cells(self) -> tuple[str, ...]:
        time = f"{self.seconds / 3600:,.1f} h" if self.seconds >= 3600 else f"{self.seconds / 60:.0f} min"
        return f"{self.rows:,}", time, f"{self.memory / GB:.0f} GB"


def memory(setup: Setup, given: Sequence[Part]) -> float:
    """Bytes on a GPU. The decoded model is freed before the stage score loads its judges, which keep all their logits.

    The decoded model has the device's default dtype, bfloat16, if none is given.
    """
    needed = {"decode": 0.0, "score": 0.0}
    for stage, name, dtype in {(part.stage, *model) for part in given if part.keys for model in part.work}:
        if (shape := shape_of(name)) is not None:
            named = str(setup.dtype if dtype is None else dtype).removeprefix("torch.")
            size = {"float64": 8, "float32": 4, "fp64": 8, "fp32": 4}.get(named, 2)
            tokens, logits, head = (TOKENS, 0, HEAD_GB * GB) if dtype is None else (JUDGED, shape.vocabulary, 0.0)
            numbers = shape.parameters + tokens * (ACTIVATIONS * shape.width + logits)
            needed[stage] += numbers * size + head
    return max(needed.values())


# ---- printing a plan


def plan(setups: Sequence[Setup], stages: Sequence[str], command: str) -> str:
    """Describe what the experiments need, as text. No weights are read, and nothing is fetched."""
    total, rows = Estimate(), []
    work = [(setup, list(parts(setup, stages))) for setup in setups]
    for setup, given in work:
        own = Estimate()
        own.add(setup, given)
        total.add(setup, given)
        rows.append((setup.experiment.name, *own.cells()))
    if len(setups) > 1:
        rows.append(("all, shared rows once", *total.cells()))
    text = [
        f"Plan of `{command}`: what the missing rows need. A row is one set of answers or one measurement.",
        "",
        markdown(("experiment", "rows", "time", "GPU memory"), rows),
        "",
        *_models(work),
        *_data(work),
        f"Times are estimates for {GPU}, within a factor of two. Ranks share most of the rows.",
        "They count every candidate of a pool. Equal candidates run only once, so decoding may take less time.",
        "To make fewer rows, use --set, for example --set units=8. A finished run can be extended with a larger value.",
    ]
    if total.unknown:
        text.append(f"Not counted, because their size is unknown: {', '.join(sorted(total.unknown))}.")
    return "\n".join(text)


def _models(work: Sequence[tuple[Setup, Sequence[Part]]]) -> list[str]:
    users: dict[str, list[str]] = {}
    for setup, given in work:
        for name in dict.fromkeys(name for part in given if part.keys for name, _ in part.work):
            users.setdefault(name, []).append(setup.experiment.name)
    lines = []
    for name, experiments in users.items():
        shape, facts = shape_of(name), "on this machine"
        if not is_local(name):
            size = "size unknown" if shape is None else f"{shape.parameters * shape.stored / GB:.1f} GB"
            facts = f"fetched from the hub unless it was before, {size}"
            if shape and shape.gated:
                facts += ", gated: accept the licence on its hub page, then run `hf auth login`"
        lines.append(f"  {name}: {facts}; for {', '.join(experiments)}")
    return ["Models:", *lines, ""] if lines else []


def _data(work: Sequence[tuple[Setup, Sequence[Part]]]) -> list[str]:
    lines: dict[str, list[str]] = {}
    for setup, given in work:
        busy = any(part.keys for part in given if part.stage == "decode")
        for task in setup.readers if busy else ():
            source = str(setup.data_of(task) or "")
            if not source and task in TEXTS:
                source = f"give --data {task}=FILE, a text on which the model was not trained (the paper used FineWeb)"
            elif not source:
                source = f"{SOURCES[task].hub_id} from the hub, or give --data {task}=FILE"
            lines.setdefault(f"  {task}: {source}", []).append(setup.experiment.name)
    return ["Data:", *(f"{line}; for {', '.join(names)}" for line, names in lines.items()), ""] if lines else []


COMPUTE = {  # the rows of the paper's table of compute: the experiments that make the same figures, accelerator-hours
    "open-ended generation": (("pareto", "fidelity", "control"), "192 (mixed)"),
    "E-SMC comparison": (("partition",), "72 (L40S)"),
    "question answering, three data sets": (("qa",), "240 (A100)"),
    "CFG sweep": (("guidance",), "300 (A100)"),
    "mathematical reasoning": (("math",), "360 (H100)"),
    "synthetic DPP maximisation": (("scaling",), "24 (H200)"),
}


def compute_table() -> str:
    """The Markdown table of docs/reproduce.md. Experiments that the paper's table leaves out follow at the end."""
    named = {name for names, _ in COMPUTE.values() for name in names}
    others = {name: ((name,), "not in the table") for name in EXPERIMENTS if name not in named}
    rows = []
    for what, (names, paper) in (COMPUTE | others).items():
        total = Estimate()
        for name in names:
            setup = Setup(experiment(name), "paper", Path("no results"), device="cpu", decoding=False)
            total.add(setup, list(parts(setup, ("decode", "score"))))
        rows.append([what, ", ".join(names), paper, f"{total.seconds / 3600:.1f}"])
    columns = ["in the paper", "here", "the paper, accelerator-hours", "plan, hours on one GPU"]
    return markdown(columns, rows)


# ---- opening everything before the first decode


def check(setup: Setup, stages: Sequence[str]) -> None:
    """Open or check everything that the stages need, and fetch what is on the hub. Nothing is written."""
    there = next(place for place in (setup.root, *setup.root.absolute().parents) if place.exists())
    if not (there.is_dir() and os.access(there, os.W_OK | os.X_OK)):
        reason = "may not be written" if there.is_dir() else "is not a folder"
        raise D5P4Error(f"the results cannot go to {setup.root}, because {there} {reason}; give another --out")
    decoded = setup.named if "model" in setup.settings else None
    if setup.decoding and decoded:
        with _explaining(decoded, "--model FOLDER"):
            find(decoded)  # the hash of its weights tells which rows are missing
    needed: dict[str, set[str]] = {"decode": set(), "score": set()}  # the models of each stage that have work
    for part in parts(setup, stages):
        needed[part.stage] |= {name for name, _ in part.work} if part.keys else set()
    if not any(needed.values()):
        return
    if decoded in needed["decode"]:
        with _explaining(setup.named, "--model FOLDER"):
            weight_files(find(setup.named))
            outline = setup.outline
        for case in setup.cases:
            Settings.make(outline, **case_options(case))
    if "decode" in stages:
        _check_data(setup)
    kinds = {"decode": models_of(setup, setup.experiment.measured_by), "score": scorer_names(setup)}
    for scorer in (scorer for stage, scorers in kinds.items() for scorer in scorers if stage in stages):
        if scorer.partition(":")[2] in needed["decode"] | needed["score"]:
            check_outside(setup, scorer)


def _check_data(setup: Setup) -> None:
    """Read the prompts of every task that has sets to decode, and cut the windows of real text."""
    reading = (
        case for case in setup.cases if setup.reads_data(case.task) and missing_keys(setup, answers(setup, case))
    )
    for task, count in {case.task: case.units for case in sorted(reading, key=lambda case: case.units)}.items():
        try:
            setup.task(task, count)
        except D5P4Error as reason:
            hint = "" if "--data" in str(reason) else f" (--data {task.partition(':')[0]}=FILE)"
            raise D5P4Error(f"{reason}{hint}") from reason
    for source in setup.experiment.sources(setup):
        if source.early and (keys := missing_keys(setup, source)):
            source.make(keys)


def check_outside(setup: Setup, scorer: str) -> None:
    """Open the config, the tokenizer and the names of the weight files of a judge or an encoder."""
    kind, _, name = scorer.partition(":")
    with _explaining(name, "--set encoder=FOLDER" if kind == "cos" else "--set 'judges=[\"FOLDER\"]'"):
        if kind == "cos":
            Encoder.check(name)
        else:
            CausalJudge.check(name)


@contextmanager
def _explaining(name: str, setting: str) -> Iterator[None]:
    """Add what to do to the error of a model that cannot be opened. `setting` is how to give a folder instead."""
    try:
        yield
    except D5P4Error as reason:
        text = str(reason)
        if type(reason.__cause__).__name__ == "GatedRepoError":
            text = f"{name!r} is gated: accept its licence at https://huggingface.co/{name} and run `hf auth login`"
            text += f", or give a folder: {setting}"
        elif "download from the hub failed" in text:
            text = f"{text}; check the network, or give a folder: {setting}"
        raise D5P4Error(text) from reason
