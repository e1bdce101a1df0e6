"""The result of a decode: `Result` holds tensors for all prompts, `Answers` the texts and numbers of one prompt."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from html import escape
from typing import Any

from torch import Tensor

from .eval.lexical import distances, near_copies

DIGITS = 6  # the number of significant digits of scores and distances in JSON
COUNTS = ("rows", "rows_nominal", "tokens_run", "nfe")
EXTRAS = ("window", "reveal_at", "logprob_at", "stopped", "perturbed", "logp", "kappa", "log_z", "unfinished")
SHOWN_PROMPTS = 10  # a notebook shows the answers to the first 10 prompts of a result


@dataclass(eq=False, repr=False)
class Result:
    """k answers for each of P prompts. The answer with the best score comes first. With `spare`, answers that repeat a
    text come last. A prompt has fewer answers if the tree has no more texts to give, and none if it was dropped: its
    lists are shorter, and its tensors are padded with NaN or padding tokens.

    answers         [P][k] token ids before the first end-of-text token (an answer may be empty)
    texts           [P][k] text of the answer, or the whole filled text if the prompt had holes, before the first of the
                    `stop_strings`. Scores and token ids are those of the whole answer
    sequences       [P, k, T] prompt and answer, left-padded; attention_mask [P, T] is True at real tokens
    score           [P, k] scores; `score_kind` says what a score means. Sums (`ots`, `soar`) cannot be compared between
                    prompts, but all others can
    similarity      [P, k, k] similarity S of the chosen rows, as the method sees it: by hidden states at the last
                    forward or, for a tree, by tokens; logdet [P] is log det S. Use `distance` [P][k] instead
    distinct        [P] how many of the k texts differ; near_copies [P] how many are near copies of a better one
    lineage         [P] tensors [k, steps]: index of each answer's ancestor in the pool of every step
    seed            the seed of the random numbers
    nfe             [P] number of steps with a forward, and of the forwards that a method makes itself; rows [P] is the
                    number of distinct rows in all of these
    rows_nominal    [P] number of rows that the paper would count, which includes equal rows; tokens_run [P] is the
                    number of positions in the forwards
    settings        the resolved Settings
    extras          what an option or a method adds, by name: tensors [P, ...] or lists [P]. `result.kappa` reads
                    `result.extras["kappa"]`. These names give None where the call has no such extra:
    window          [P, T] True at the positions that were decoded (logprobs=True). Only with logprobs=True, T includes
                    the rest of the last block of a block-causal model, which is decoded but belongs to no answer
    reveal_at       [P, k, T] the step that revealed each token of `sequences`, and -1 at other tokens; logprob_at
                    [P, k, T] is its log-probability then, and 0 at other tokens (logprobs=True)
    logprobs        [P][k] `logprob_at` as lists, for the tokens of `answers` only; reveal_step [P][k] likewise
    stopped         [P][k] whether a stop string cut the text (stop_strings)
    unfinished      [P][k] whether the answer has no end, so that it does not have the form that was asked for; log_z
                    [P, k] is the logarithm of the probability that the tokens of the form had at the steps of the
                    answer, all multiplied (json_schema, regex, grammar, choices)
    perturbed, logp [P, k] perturbed value and log-probability of each answer, and kappa [P], the threshold that the
                    answers exceed: for importance weights (docs/tree.md). Only of the method tree with a temperature
                    above 0, diversity=0 and spare=0
    """

    answers: list[list[list[int]]]
    texts: list[list[str]]
    sequences: Tensor
    attention_mask: Tensor
    score: Tensor
    score_kind: str
    logdet: Tensor
    similarity: Tensor
    distinct: Tensor
    lineage: list[Tensor]
    seed: int
    nfe: Tensor
    rows: Tensor
    rows_nominal: Tensor
    tokens_run: Tensor
    settings: Any = None
    extras: dict[str, Any] = field(default_factory=dict)

    def __getattr__(self, name: str) -> Any:
        """Return an extra, or a list with this attribute of the `Answers` to each prompt."""
        extras = self.__dict__.get("extras", {})  # nothing while a copy is made
        if name in ("distance", "near_copies", "logprobs", "reveal_step"):
            known = "window" in extras or name in ("distance", "near_copies")
            return [getattr(answers, name) for answers in self] if known else None
        if name in extras or name in EXTRAS:
            return extras.get(name)
        raise AttributeError(f"a result has no {name!r}")

    def __repr__(self) -> str:
        answers = sum(map(len, self.answers))
        rows, nominal = int(self.rows.sum()), int(self.rows_nominal.sum())
        prompts = f"{len(self)} prompt{'s' * (len(self) != 1)}"
        return (
            f"Result({prompts}, {answers} answers, {int(self.distinct.sum())} distinct, "
            f"{rows} of {nominal} rows, seed {self.seed}; texts[0][:1]={self.texts[0][:1] if self.texts else []})"
        )

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, prompt: Any) -> Any:
        """Return the answers to one prompt or, for a slice, a list with the answers to each prompt."""
        if isinstance(prompt, slice):
            return list(self)[prompt]
        if not isinstance(prompt, int) or not -len(self) <= prompt < len(self):
            raise IndexError(f"there is no prompt {prompt!r}; this result has {len(self)}, counted from 0")
        return Answers(self, prompt % len(self))

    def __iter__(self) -> Iterator[Answers]:
        return (Answers(self, prompt) for prompt in range(len(self)))

    def to_dict(self) -> dict[str, Any]:
        """Return the answers and settings as a dict of Python values, without tensors, ready for JSON."""
        shared = {"seed": self.seed, "method": self.settings.method, "settings": self.settings.to_dict()}
        own = [{name: x for name, x in answers.to_dict().items() if name not in shared} for answers in self]
        return shared | {"prompts": own}

    def _repr_html_(self) -> str:
        return _page(self, list(self))


def _count(name: str) -> Any:
    """Return a property of `Answers`: the value of this field of the result for the prompt, as a whole number."""
    return property(lambda answers: int(getattr(answers.result, name)[answers.place]))


@dataclass(frozen=True, repr=False)
class Answers:
    """The answers to prompt number `place` of a result. Scores and counts are Python numbers, not tensors. A NaN or
    infinite score is None."""

    result: Result
    place: int

    def __repr__(self) -> str:
        return f"Answers(prompt {self.place}: {self.distinct} of {len(self)} differ; texts={self.texts})"

    def __len__(self) -> int:
        return len(self.texts)

    def __iter__(self) -> Iterator[str]:
        return iter(self.texts)

    def _repr_html_(self) -> str:
        return _page(self.result, [self])

    @property
    def texts(self) -> list[str]:
        return self.result.texts[self.place]

    @property
    def score(self) -> list[float | None]:
        return finite(self.result.score[self.place].tolist()[: len(self)])

    @cached_property
    def distances(self) -> list[list[float]]:
        """The distance of every two answers, by `eval.lexical.distances`: from 0 for equal words to 1."""
        return distances(self.texts)

    @cached_property
    def distance(self) -> list[float | None]:
        """The distance of each answer to the nearest other answer, or None if there is no other one."""
        return [min((d for j, d in enumerate(row) if j != i), default=None) for i, row in enumerate(self.distances)]

    @cached_property
    def near_copies(self) -> int:
        """How many answers are near copies of a better one (see `eval.lexical.near_copies`); equal texts count, too."""
        return sum(near_copies(self.distances))

    def _at_tokens(self, name: str) -> Any:
        """Return the values of an extra [P, k, T] at the tokens of the answers, or None if there is no such extra."""
        result, place = self.result, self.place
        if name not in result.extras:
            return None
        rows = result.extras[name][place][:, result.window[place]].tolist()
        return [row[: len(answer)] for row, answer in zip(rows, result.answers[place], strict=False)]

    logprobs = cached_property[Any](lambda answers: answers._at_tokens("logprob_at"))
    reveal_step = cached_property[Any](lambda answers: answers._at_tokens("reveal_at"))
    distinct = _count("distinct")
    rows = _count("rows")
    rows_nominal = _count("rows_nominal")
    tokens_run = _count("tokens_run")
    nfe = _count("nfe")

    def to_dict(self) -> dict[str, Any]:
        """Return the answers as Python values, ready for JSON. Scores and distances have six significant digits."""
        result, place = self.result, self.place
        record = {
            "answers": self.texts,
            "tokens": result.answers[place],
            "score": rounded(self.score),
            "score_kind": result.score_kind,
            "distance": rounded(self.distance),
            "distinct": self.distinct,
            "near_copies": self.near_copies,
            "logdet": rounded(float(result.logdet[place])),
            **{name: getattr(self, name) for name in COUNTS},
            "seed": result.seed,
            "method": result.settings.method,
            "settings": result.settings.to_dict(),
        }
        lists = {"logprobs": self.logprobs, "reveal_step": self.reveal_step}
        lists |= {name: result.extras[name][place] for name in ("stopped", "unfinished") if name in result.extras}
        if result.log_z is not None:
            lists["log_z"] = rounded(result.log_z[place].tolist()[: len(self)])
        return record | {name: values for name, values in lists.items() if values is not None}


def _page(result: Result, prompts: list[Answers]) -> str:
    """Return a line of facts and a table of the answers, in HTML without colours: it suits light and dark themes."""
    several, left = len(prompts) != 1, "style='text-align:left;white-space:pre-wrap'"
    count = sum(map(len, prompts))
    distinct, near, rows = (sum(getattr(one, name) for one in prompts) for name in ("distinct", "near_copies", "rows"))
    facts = [f"{distinct} of {count} answers are distinct", counted(near), f"{rows} rows", f"seed {result.seed}"]
    facts = [f"{len(prompts)} prompts"] * several + [*facts, f"method {escape(result.settings.method)}"]
    head = "<th>prompt</th>" * several + f"<th>#</th><th>score</th><th>distance</th><th {left}>answer</th>"
    lines = []
    for answers in prompts[:SHOWN_PROMPTS]:
        numbers = zip(map(number, answers.score), map(number, answers.distance), strict=True)
        cells = [
            f"<td>{i + 1}</td><td>{score}</td><td>{distance}</td><td {left}>{escape(answers.texts[i])}</td>"
            for i, (score, distance) in enumerate(numbers)
        ] or [f"<td colspan=4 {left}>no answers</td>"]
        cells[0] = f"<td rowspan={len(cells)}>{answers.place}</td>" * several + cells[0]
        lines += [f"<tr>{line}</tr>" for line in cells]
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table>"
    hidden = len(prompts) - SHOWN_PROMPTS
    note = f"<p>and {hidden} more prompt{'s' * (hidden != 1)}</p>"
    return f"<p>{' · '.join(facts)}</p>{table}{note * (hidden > 0)}"


def counted(near: int) -> str:
    return f"{near} near {'copy' if near == 1 else 'copies'}"


def number(value: float | None, digits: int = 3) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def finite(value: Any) -> Any:
    """Replace every NaN and infinity in a value by None, because JSON has no such numbers."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return value


def rounded(value: Any) -> Any:
    """Round a float, or all floats in a list, to six significant digits. Replace NaN and infinities by None."""
    if isinstance(value, float):
        return finite(float(f"{value:.{DIGITS}g}") + 0.0)  # adding 0.0 turns -0.0 into 0.0
    return [rounded(item) for item in value] if isinstance(value, (list, tuple)) else value
