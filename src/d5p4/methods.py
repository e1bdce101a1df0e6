"""The paper's methods by name, as combinations of parts, with the one table of their own parameters and defaults."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from . import select
from .errors import D5P4Error
from .ops.precision import wide
from .ops.ties import first_of_each, ranked
from .types import Final, Finish, Kept, Selector

if TYPE_CHECKING:
    from .settings import Settings

Scorer = Callable[..., Any]
"""`scorer(texts) -> numbers`, or `scorer(text, reference) -> number` when references are given; higher is better."""


@dataclass(frozen=True)
class Method:
    """A way to decode: what selects, how large the pool is, what happens at the end."""

    name: str
    summary: str
    section: str  # where the paper describes it
    build: Callable[[Settings], Selector]
    parameters: Mapping[str, Any] = field(default_factory=dict)
    wide: bool = True  # the pool holds k*w rows; otherwise k
    solver: bool = False  # takes `solver`
    presets: Mapping[str, Any] = field(default_factory=dict)  # settings this method changes unless the caller says
    half_guided: bool = False  # guidance on the first half of the steps unless a window is given
    finish: Callable[[Settings, Scorer | None, Sequence[Any] | None], Finish] | None = None
    scored: bool = False  # `finish` makes use of scorer and references


def _dpp(kernel: Literal["additive", "multiplicative"], partition: bool = True) -> Callable[[Settings], Selector]:
    def build(s: Settings) -> Selector:
        return select.PartitionDPP(beta=s.params["beta"], kernel=kernel, solver=s.solver, partition=partition)

    return build


def _with_params(make: Callable[..., Selector]) -> Callable[[Settings], Selector]:
    return lambda s: make(**s.params)


def _identity(_: Settings) -> Selector:
    return select.Identity()


def _best_of_n(settings: Settings, scorer: Scorer | None, references: Sequence[Any] | None) -> Finish:
    rank = settings.params["rank"]
    if rank == "auto":
        rank = "entropy" if scorer is None else "scorer"
    if rank not in ("entropy", "logprob", "scorer"):
        raise D5P4Error(f"rank={rank!r} is not a way to rank best-of-n; use 'auto', 'entropy', 'logprob' or 'scorer'")
    if rank == "scorer" and scorer is None:
        raise D5P4Error("best-of-n with rank='scorer' needs scorer=, a function of texts or of text and reference")
    if rank != "scorer" and scorer is not None:
        raise D5P4Error(f"best-of-n was given a scorer and rank={rank!r}; leave one of them out")
    if references is not None and scorer is None:
        raise D5P4Error("references need scorer=, a function of a text and a reference")

    repeats = settings.params["repeats"]
    if not isinstance(repeats, bool):
        raise D5P4Error(f"repeats={repeats!r} must be True or False")

    def best(values: Tensor, final: Final, k: int) -> Tensor:
        """[P, k] rows by values; without repeats each text once before any comes again."""
        order = ranked(values, final.tie)
        return (order if repeats else first_of_each(order, final.texts()))[:, :k]

    def finish(final: Final, k: int) -> Kept:
        if scorer is None:
            return Kept(best(final.score("entropy", "all") if rank == "entropy" else final.logprob(), final, k))
        judged = [
            _judge(scorer, texts, None if references is None else (references[prompt],))
            for prompt, texts in zip(final.prompts.tolist(), final.texts(), strict=True)
        ]
        values = torch.tensor(judged, dtype=wide(final.tie.device), device=final.tie.device)
        rows = best(values, final, k)
        return Kept(rows, values.gather(1, rows))

    return finish


def _judge(scorer: Scorer, texts: list[str], reference: tuple[Any] | None) -> list[float]:
    """A number for each text; empty texts and NaN are the worst."""
    said = scorer(texts) if reference is None else [scorer(text, *reference) for text in texts]
    try:
        numbers = [float(x) for x in said]
    except (TypeError, ValueError, OverflowError):
        raise D5P4Error(f"the scorer gave {said!r}, which is not a number for each text") from None
    if len(numbers) != len(texts):
        raise D5P4Error(f"the scorer gave {len(numbers)} numbers for {len(texts)} texts")
    return [x if text.strip() and not math.isnan(x) else -math.inf for x, text in zip(numbers, texts, strict=True)]


def _keep_certain(settings: Settings, scorer: Scorer | None, references: Sequence[Any] | None) -> Finish:
    return lambda final, k: Kept(ranked(final.score("entropy", "masked"), final.tie)[:, :k])


_TABLE = (
    Method("d5p4", "partition DPP, additive kernel diag(Q) + beta S (D5P4+)", "3.3", _dpp("additive"),
           {"beta": 20.0}, solver=True),
    Method("d5p4x", "partition DPP, multiplicative kernel e^(Q/beta) S e^(Q/beta)", "3.3", _dpp("multiplicative"),
           {"beta": 1.0}, solver=True),
    Method("d5p4-p", "d5p4 with guidance on the first half of the steps only", "4.2", _dpp("additive"),
           {"beta": 20.0}, solver=True, presets={"guidance": 2.0}, half_guided=True),
    Method("d5p3", "d5p4 without the partition: lineages may die out", "App. E", _dpp("additive", partition=False),
           {"beta": 20.0}, solver=True),
    Method("greedy-beam", "the best candidate of each group", "4, App. B.4", lambda s: select.GreedyBeam()),
    Method("diverse-beam", "quality minus alpha times similarity to those chosen (transversal MMR)", "4, App. B.4",
           _with_params(select.MMR), {"alpha": 20.0, "form": "mean", "starts": "n"}),
    Method("cat", "one candidate of each group drawn by softmax(Q / score_temperature)", "4.1",
           _with_params(select.Categorical), {"score_temperature": 1.0}),
    Method("random", "one candidate of each group, any", "5", lambda s: select.Random()),
    Method("k-dpp", "k candidates sampled from the unconstrained k-DPP", "App. B.4",
           _with_params(select.KDPP), {"beta": 20.0, "kernel": "additive"}),
    Method("partition-sample", "one candidate of each group sampled from the partition DPP", "ours",
           _with_params(select.PartitionSample), {"beta": 20.0, "kernel": "additive"}),
    Method("e-smc", "particles resampled by e^(lam * certainty) every `interval` steps, the k best kept", "App. E",
           _with_params(select.ESMC),
           {"lam": 5.0, "interval": 8, "weights": "literal", "potential": "max", "resampling": "multinomial",
            "ess": None, "incremental": False}, finish=_keep_certain),
    Method("best-of-n", "k*w independent answers, the k best by entropy, log-probability or a scorer", "4, App. B.4",
           _identity, {"rank": "auto", "repeats": True}, finish=_best_of_n, scored=True),
    Method("independent", "k independent answers: no selection", "4", _identity, wide=False),
)  # fmt: skip

METHODS: dict[str, Method] = {method.name: method for method in _TABLE}


def register(method: Method) -> None:
    """Make a method of your own known by its name, to `generate` and to the command line of this process."""
    if not isinstance(method, Method):
        raise D5P4Error(f"register takes a d5p4.Method, not {type(method).__name__}")
    if method.name in METHODS:
        raise D5P4Error(f"there is already a method {method.name!r}")
    METHODS[method.name] = method


def method_named(name: str) -> Method:
    if not isinstance(name, str) or name not in METHODS:
        raise D5P4Error(f"there is no method {name!r}; choose one of {', '.join(METHODS)}")
    return METHODS[name]
