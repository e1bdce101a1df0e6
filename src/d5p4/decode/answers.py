"""Record the costs of a decode call and the parents of rows, and make answers from the rows of finished prompts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import copy
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ..errors import D5P4Error
from ..ops.gram import token_kernel
from ..ops.pivots import eliminate
from ..ops.precision import steady_mean, steady_sum, wide
from ..ops.ties import coarse, first_of_each, ranked
from ..options import Settings
from ..result import HistoryStep, Result
from ..rng import mix
from ..types import Choice, Final, Finish, Model
from .pool import Pool, pick
from .rows import WindowHidden
from .schedule import Step
from .texts import Prompts, Texts
from .tree import rank_values
from .view import Look

LOGPROB_SCORE = "mean log-probability of each token at its reveal"
ENTROPY_SCORE = "mean negative entropy over the answer at the last forward"
SCORER_SCORE = "the scorer's number"


class Ledger:
    """Writes the costs and the answers of prompts into the result of a call, and records the parent of every row."""

    def __init__(self, result: Result) -> None:
        self.result = result
        self.alive = torch.arange(len(result.nfe), device=result.nfe.device)  # [P] the indices in the call of prompts
        self.trail: list[Tensor] = []  # per step, a tensor [P, rows] with the parent of each row of the next pool

    def record(self, choice: Choice, source: Tensor, nominal: Tensor, view: Look) -> None:
        """Record one step. nominal [P]: the rows to run if equal rows ran apart."""
        result, fresh = self.result, view.hidden.fresh
        result.nfe[self.alive] += fresh > 0
        result.rows[self.alive] += fresh
        result.rows_nominal[self.alive] += nominal * view.hidden.passes + view.hidden.contexts
        result.tokens_run[self.alive] += view.hidden.tokens
        if view.asked is not None:
            result.nfe[self.alive] += view.asked.rows > 0
            result.rows[self.alive] += view.asked.rows
            result.rows_nominal[self.alive] += view.asked.nominal
            result.tokens_run[self.alive] += view.asked.tokens
        self.trail.append(source)
        if (history := result.extras.get("history")) is not None:
            everything = view.pool.tokens, view.raw, view.quality, view.similarity, view.group, choice.parents
            for place, prompt in enumerate(self.alive.tolist()):
                rows, raw, quality, similarity, group, parents = (x[place] for x in everything)
                awake = None if view.awake is None else view.awake[place]
                step = HistoryStep(view.step, rows, raw, quality, similarity, group, parents, choice.children, awake)
                history[prompt].append(step)

    def part(self, index: Tensor) -> Ledger:
        """Return a ledger of only some of the prompts. Both write into the same result."""
        ledger = copy(self)
        ledger.alive = self.alive[index]
        ledger.trail = [parents[index] for parents in self.trail]
        return ledger

    def lineage(self, rows: Tensor) -> Tensor:
        """Return, for final rows [P, k], the index [P, k, steps] of each row's ancestor in the pool of each step."""
        path = []
        for parents in reversed(self.trail):
            rows = parents.gather(1, rows)
            path.append(rows)
        return torch.stack(path[::-1], -1)


def prompts_to_drop(returned: Any) -> list[int]:
    """Turn the return value of a callback (None, a number, a tensor or an iterable) into a list of prompt numbers."""
    returned = returned.tolist() if hasattr(returned, "tolist") else [] if returned is None else returned
    numbers = list(returned) if isinstance(returned, Iterable) else [returned]
    numbers = [n.item() if hasattr(n, "item") else n for n in numbers]
    wrong = [n for n in numbers if not isinstance(n, int) or isinstance(n, bool)]
    if wrong:
        raise D5P4Error(f"the callback returned {wrong[0]!r}; it must return None or the numbers of prompts to drop")
    return numbers


class LastLook(Look):
    """The view of the N complete rows of each finished prompt, with the texts of these rows. A row has the scores of
    its parent at the last forward."""

    def __init__(self, pool: Pool, hidden: WindowHidden, prompts: Prompts, step: Step) -> None:
        super().__init__(pool, hidden, step)
        self.whole = pool.whole()
        self.rows = Texts(self.whole, prompts)

    @cached_property
    def _names(self) -> Tensor:
        return mix(self.pool.row_hash, self.pool.source)

    @cached_property
    def _masked(self) -> Tensor:
        """The positions revealed by the last step or, under adaptive rules, by the last reveal of each row."""
        revealed = self.pool.revealed
        return self._own(revealed == (self.step if self._block.exact else revealed.amax(-1, keepdim=True)))

    def logprob(self, shown: bool = False) -> Tensor:
        """Return the mean log-probability [P, N] of each row's tokens at the last forward, or at their reveal if the
        model has `carry_over`."""
        call, logprob = self.pool.call, self.whole.logprob
        if not call.model.carry_over:
            return self.score("logprob", "all", shown)
        counted = call.counted(self.whole.tokens, self.pool.appended, shown)
        if counted is None:
            return steady_mean(logprob)
        return steady_sum((logprob * counted).to(wide(logprob.device))) / counted.sum(-1)

    def best(self, rows: Tensor, finish: Finish | None, alive: Tensor) -> tuple[Tensor, Tensor, bool]:
        """Return the indices [P, k] of the rows that become answers, the scores [P, k] of these rows, and whether
        `finish` gave the scores. The best row comes first. With spare beams, rows that repeat a text come last.

        rows [P, K]: the rows to choose from, unless the method has a `finish`. Rows of a tree with equal scores (the
        children of one parent) are ordered by their values, and places without an answer come last."""
        score, settings, carry_over = None, self.pool.call.settings, self.pool.call.model.carry_over
        if finish is not None:
            look = self.tie, self.score, self.logprob, self.rows.texts
            final = Final(*look, alive, carry_over, lambda: self.path, self.pool.state)
            rows, score = finish(final, settings.groups)
        shown = score
        if shown is None:
            own = self.logprob(shown=True) if carry_over else self.score("entropy", "all", shown=True)
            shown = coarse(own).gather(1, rows)  # rounded, so that scores that count as tied are equal
        if self.awake is not None:
            shown = torch.where(self.awake, shown, torch.nan)
            order = ranked(rank_values(self.pool.state), self.pool.row_hash)
            order = order.gather(1, ranked(shown.gather(1, order)))[:, : settings.k]
            return order, shown.gather(1, order), score is not None
        order = ranked(shown, self.pool.row_hash.gather(1, rows), self.tie.gather(1, rows))
        if settings.spare:
            texts = [[self.rows.text(p, n) for n in kept] for p, kept in enumerate(rows.tolist())]
            order = first_of_each(order, texts)[:, : settings.k]
        return rows.gather(1, order), shown.gather(1, order), score is not None


def empty_result(prompts: Prompts, settings: Settings, model: Model) -> Result:
    """Return a result without answers. `add_answers` adds those of finished prompts; dropped prompts stay empty."""
    device, total, k = prompts.tokens.device, len(prompts.tokens), settings.k
    shape, extras = (total, k, prompts.tokens.shape[1]), dict[str, Any]()

    def unknown(*shape: int) -> Tensor:
        return torch.full(shape, torch.nan, dtype=wide(device), device=device)

    def zeros() -> Tensor:
        return torch.zeros(total, dtype=torch.int64, device=device)

    if settings.logprobs:
        extras["window"] = torch.zeros_like(prompts.attention_mask).scatter(1, prompts.window, True)
        extras["reveal_at"] = torch.full(shape, -1, device=device)
        extras["logprob_at"] = torch.zeros(shape, dtype=wide(device), device=device)
    if settings.history:
        extras["history"] = [[] for _ in range(total)]
    if settings.reserve and settings.temperature and not settings.spare and not settings.params.get("diversity"):
        extras |= {"perturbed": unknown(total, k), "logp": unknown(total, k), "kappa": unknown(total)}
    return Result(
        answers=[[] for _ in range(total)],
        texts=[[] for _ in range(total)],
        sequences=torch.full(shape, model.mask_id, device=device),
        attention_mask=prompts.attention_mask,
        score=unknown(total, k),
        score_kind=LOGPROB_SCORE if model.carry_over else ENTROPY_SCORE,
        logdet=unknown(total),
        similarity=unknown(total, k, k),
        distinct=zeros(),
        lineage=[torch.zeros(k, 0, dtype=torch.int64, device=device) for _ in range(total)],
        seed=0,
        nfe=zeros(),
        rows=zeros(),
        rows_nominal=zeros(),
        tokens_run=zeros(),
        settings=settings,
        extras=extras,
    )


def add_answers(ledger: Ledger, view: LastLook, finish: Finish | None, select: Any, selected: Sequence[bool]) -> None:
    """Add the answers of finished prompts to the result. `view` sees their complete rows.

    selected: whether each prompt's rows are children of selected parents. Otherwise rows are selected now.
    """
    pool, call, alive, result = view.whole, view.pool.call, ledger.alive, ledger.result
    groups = call.settings.groups if pool.awake is None else view.size
    rows = torch.arange(groups, device=alive.device).expand(len(alive), groups) * (view.size // groups)
    if finish is None and view.size > groups and not all(selected):
        now = view.choose(select, view.step + 1, last=True)
        rows = torch.where(torch.tensor(selected, device=alive.device)[:, None], rows, now.parents)
    if bool(view.pool.open.any()):
        raise D5P4Error("decoding ended with masks in an answer; please report this with the settings used")
    keep, score, judged = view.best(rows, finish, alive)
    result.score_kind = getattr(select, "score_kind", SCORER_SCORE) if judged else result.score_kind
    result.score[alive] = score.to(result.score.dtype)
    exists = torch.ones_like(keep, dtype=torch.bool) if pool.awake is None else pool.awake.gather(1, keep)
    sequences = pick(view.rows.sequences, keep)
    result.sequences[alive] = torch.where(exists[..., None], sequences, call.model.pad_id)
    if pool.awake is None:
        similarity = pick(pick(view.compare(shown=True), keep).transpose(1, 2), keep)
    else:
        tokens = pool.tokens.masked_fill(call.after_end(pool.tokens, pool.appended), call.model.mask_id)
        similarity = token_kernel(pick(tokens, keep), call.model.mask_id)
        _add_values(result, pool, keep, exists, alive)
    similarity = coarse(similarity.to(result.similarity.dtype))  # so that ranks write the same digits
    both = exists[:, :, None] & exists[:, None, :]
    one = torch.eye(similarity.shape[-1], dtype=similarity.dtype, device=similarity.device)
    result.logdet[alive] = _logdet(torch.where(both, similarity, one))
    result.similarity[alive] = torch.where(both, similarity, torch.nan)
    if call.settings.logprobs:
        window = view.rows.prompts.window[:, None].expand(-1, keep.shape[1], -1)
        for rows, values, blank in ((result.reveal_at, pool.revealed, -1), (result.logprob_at, pool.logprob, 0)):
            values = torch.where(exists[..., None], pick(values, keep), blank).to(rows.dtype)
            rows[alive] = rows[alive].scatter(2, window, values)
    lineage, counts = ledger.lineage(keep), exists.sum(-1).tolist()
    for p, prompt in enumerate(alive.tolist()):
        kept = [(n, view.rows.ends[p][n]) for n in keep[p].tolist()][: counts[p]]
        result.answers[prompt] = [view.rows.tokens[p][n][:end] for n, end in kept]
        result.texts[prompt] = [view.rows.text(p, n) for n, _ in kept]
        result.distinct[prompt] = len(set(result.texts[prompt]))
        result.lineage[prompt] = lineage[p, : counts[p]]


def _add_values(result: Result, pool: Pool, keep: Tensor, exists: Tensor, alive: Tensor) -> None:
    """Add perturbed values, log-probabilities and thresholds, if the result has these extras."""
    if "kappa" not in result.extras or pool.lost is None:
        return
    late = pool.state["late"] > 0
    for numbers, place in ((pool.state["value"], result.perturbed), (pool.state["phi"], result.logp)):
        place[alive] = torch.where(exists, numbers.masked_fill(late, -torch.inf).gather(1, keep), torch.nan)
    others = pool.state["value"].masked_fill(late, -torch.inf).scatter(1, keep, -torch.inf)
    result.kappa[alive] = torch.maximum(pool.lost, others.amax(-1))


def _logdet(similarity: Tensor) -> Tensor:
    """Return the log determinant [P] of similarity [P, k, k]. It is minus infinity for a singular matrix."""
    nothing, place = torch.zeros_like(similarity[:, 0]), torch.arange(similarity.shape[1], device=similarity.device)
    result = eliminate(similarity, nothing, nothing, place.expand(nothing.shape), place, len(place))
    return torch.where(result.zeros > 0, -torch.inf, result.logs)[:, 0]
