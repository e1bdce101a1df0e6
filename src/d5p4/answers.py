"""Record the costs of a decode call and the parents of rows, and make the `Result` from the rows of the last pool."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from .beams import Seats
from .errors import D5P4Error
from .look import Look
from .ops.pivots import eliminate
from .ops.precision import steady_mean, wide
from .ops.ties import coarse, first_of_each, ranked
from .ops.vocab import vocab_stats
from .options import Settings
from .pool import Pool, pick
from .rows import Prompts
from .types import Choice, Final, Finish, HistoryStep, Kept, Model, PoolView, Result

LOGPROB_SCORE = "mean log-probability of each token at its reveal"
ENTROPY_SCORE = "mean negative entropy over the answer at the last forward"
SCORER_SCORE = "the scorer's number"


class Ledger:
    """Counts the costs of a decode call and records the parent of every row."""

    def __init__(self, names: Tensor, history: bool) -> None:
        prompts, device = len(names), names.device
        self.names = names  # [P] the caller's numbers for the prompts that are not dropped
        self.alive = torch.arange(prompts, device=device)  # [P] the indices of these prompts in the call
        self.nfe, self.rows, self.nominal = (torch.zeros(prompts, dtype=torch.int64, device=device) for _ in range(3))
        self.trail: list[Tensor] = []  # per step, a tensor [P, rows] with the parent of each row of the next pool
        self.history: list[list[HistoryStep]] | None = [[] for _ in range(prompts)] if history else None

    def record(self, choice: Choice, fresh: Tensor, nominal: int, view: PoolView, tokens: Tensor) -> None:
        self.nfe[self.alive] += fresh > 0
        self.rows[self.alive] += fresh
        self.nominal[self.alive] += nominal
        self.trail.append(choice.parents.repeat_interleave(choice.children, 1))
        if self.history is not None:
            everything = tokens, view.raw, view.quality, view.similarity, view.group, choice.parents
            for place, prompt in enumerate(self.alive.tolist()):
                rows, raw, quality, similarity, group, parents = (x[place] for x in everything)
                step = HistoryStep(view.step, rows, raw, quality, similarity, group, parents, choice.children)
                self.history[prompt].append(step)

    def keep(self, index: Tensor) -> None:
        self.alive, self.names = self.alive[index], self.names[index]
        self.trail = [parents[index] for parents in self.trail]

    def lineage(self, rows: Tensor) -> Tensor:
        """Return, for final rows [P, k], the index [P, k, steps] of each row's ancestor in the pool of each step."""
        path = []
        for parents in reversed(self.trail):
            rows = parents.gather(1, rows)
            path.append(rows)
        return torch.stack(path[::-1], -1)


def prompts_to_drop(returned: Any) -> list[int]:
    """Turn the return value of a callback (None, a number, a tensor or an iterable) into a list of prompt numbers."""
    if returned is None:
        return []
    if hasattr(returned, "tolist"):
        returned = returned.tolist()
    numbers = list(returned) if isinstance(returned, Iterable) else [returned]
    numbers = [n.item() if hasattr(n, "item") else n for n in numbers]
    wrong = [n for n in numbers if not isinstance(n, int) or isinstance(n, bool)]
    if wrong:
        raise D5P4Error(f"the callback returned {wrong[0]!r}; it must return None or the numbers of prompts to drop")
    return numbers


@dataclass(frozen=True)
class LastPool:
    """The N rows of each of P prompts after the last step, and the scores and texts computed from these rows."""

    model: Model
    prompts: Prompts
    pool: Pool
    look: Look  # the scores of the pool from which the parents of these rows were chosen
    choice: Choice
    seats: Seats  # the parents whose hidden states this process has

    @cached_property
    def sequences(self) -> Tensor:
        """The rows [P, N, T] of prompt and answer together."""
        return self.prompts.fill(self.pool.tokens)

    @cached_property
    def tokens(self) -> list[list[list[int]]]:
        return self.pool.tokens.tolist()

    @cached_property
    def appended(self) -> list[int]:
        """The number [P] of window positions that follow each prompt. The other window positions are holes."""
        return self.prompts.appended.tolist()

    def end(self, p: int, n: int) -> int:
        """Return the number of tokens of an answer before the first end-of-text token that follows the prompt."""
        answer = self.tokens[p][n]
        ends = (i for i in range(len(answer) - self.appended[p], len(answer)) if answer[i] in self.model.eos_ids)
        return next(ends, len(answer))

    def text(self, p: int, n: int) -> str:
        """Return the text of an answer, or the whole filled text if the prompt had holes."""
        answer, end = self.tokens[p][n], self.end(p, n)
        ids = answer[:end]
        if self.appended[p] < len(answer):
            row = self.sequences[p, n][self.prompts.attention_mask[p]].tolist()
            ids = row[: len(row) - (len(answer) - end)]
        codec = self.model.tokenizer
        return " ".join(map(str, ids)) if codec is None else codec.decode(ids)

    def texts(self) -> list[list[str]]:
        return [[self.text(p, n) for n in range(len(rows))] for p, rows in enumerate(self.tokens)]

    def score(self, kind: str, positions: str) -> Tensor:
        """Return [P, N]: for each row, the raw score of its parent over the whole window, at the last forward."""
        return self.look.score(kind, positions, whole=True).gather(1, self.choice.parents)

    def logprob(self) -> Tensor:
        """Return the mean log-probability [P, N] of each row's tokens at the last forward, or at their reveal if the
        model has `carry_over`."""
        if self.model.carry_over:
            return steady_mean(self.pool.logprob)
        states = self.look.states[self.seats.here(self.look.hidden.slot)]  # hidden states of the parents, [G, q, L, D]
        head, tokens = self.look.head, self.seats.of(self.pool.tokens)
        given = tokens.reshape(-1, 1)
        stats = vocab_stats(states.flatten(0, 2), head.weight, head.bias, head.banned, (), given, head.fixed)
        return self.look.beams.everyone(steady_mean(stats["token"].view(tokens.shape)), self.seats)

    def own_score(self) -> Tensor:
        """Return the scores [P, N] that `Result.score` shows if there is no scorer. The scores are rounded, so that
        scores that count as tied are equal."""
        return coarse(steady_mean(self.pool.logprob) if self.model.carry_over else self.score("entropy", "all"))

    def keep(self, finish: Finish | None, settings: Settings, prompts: Tensor) -> tuple[Tensor, Tensor, bool]:
        """Return the indices [P, k] of the rows that become answers, the scores [P, k] of these rows, and whether a
        scorer gave the scores. The best row comes first. With spare beams, rows that repeat a text come last."""
        count = settings.groups
        rows, score = Kept(torch.arange(count, device=prompts.device).expand(len(prompts), count))
        if finish is not None:
            rows, score = finish(Final(self.pool.tie, self.score, self.logprob, self.texts, prompts), count)
        shown = self.own_score().gather(1, rows) if score is None else score
        order = ranked(shown, self.pool.row_hash.gather(1, rows), self.pool.tie.gather(1, rows))
        if settings.spare:
            texts = [[self.text(p, n) for n in kept] for p, kept in enumerate(rows.tolist())]
            order = first_of_each(order, texts)[:, : settings.k]
        return rows.gather(1, order), shown.gather(1, order), score is not None


def empty_result(prompts: Prompts, ledger: Ledger, look: Look, mask_id: int) -> Result:
    """Return the result of a call in which every prompt was dropped."""
    settings, device = look.settings, prompts.tokens.device
    total, k = len(prompts.tokens), settings.k

    def unknown(*shape: int) -> Tensor:
        return torch.full(shape, torch.nan, dtype=wide(device), device=device)

    return Result(
        answers=[[] for _ in range(total)],
        texts=[[] for _ in range(total)],
        sequences=torch.full((total, k, prompts.tokens.shape[1]), mask_id, device=device),
        attention_mask=prompts.attention_mask,
        score=unknown(total, k),
        score_kind=LOGPROB_SCORE if look.model.carry_over else ENTROPY_SCORE,
        logdet=unknown(total),
        similarity=unknown(total, k, k),
        distinct=torch.zeros(total, dtype=torch.int64, device=device),
        lineage=[torch.zeros(k, 0, dtype=torch.int64, device=device) for _ in range(total)],
        seed=0,
        nfe=ledger.nfe,
        rows=ledger.rows,
        rows_nominal=ledger.nominal,
        logprobs=[[] for _ in range(total)] if settings.logprobs else None,
        reveal_step=[[] for _ in range(total)] if settings.logprobs else None,
        history=ledger.history,
        settings=settings,
    )


def gather_result(
    prompts: Prompts,
    pool: Pool,
    look: Look,
    view: PoolView,
    choice: Choice,
    seats: Seats,
    ledger: Ledger,
    finish: Finish | None,
) -> Result:
    """Return the result with the k answers of each prompt that was not dropped. `look`, `view`, `choice` and `seats`
    come from the last step."""
    model, alive = look.model, ledger.alive
    result = empty_result(prompts, ledger, look, model.mask_id)
    if not len(alive):
        return result
    if bool((pool.tokens == model.mask_id).any()):
        raise D5P4Error("decoding ended with masks in an answer; please report this with the settings used")
    last = LastPool(model, prompts.take(alive), pool, look, choice, seats)
    keep, score, judged = last.keep(finish, look.settings, alive)
    result.score_kind = SCORER_SCORE if judged else result.score_kind
    result.score[alive] = score.to(result.score.dtype)
    result.sequences[alive] = pick(last.sequences, keep)
    parents = choice.parents.gather(1, keep)
    similarity = pick(pick(view.similarity, parents).transpose(1, 2), parents).to(result.similarity.dtype)
    result.similarity[alive], result.logdet[alive] = similarity, _logdet(similarity)
    lineage, logprobs, reveals = ledger.lineage(keep), pool.logprob.tolist(), pool.revealed.tolist()
    for p, prompt in enumerate(alive.tolist()):
        rows = [(n, last.end(p, n)) for n in keep[p].tolist()]
        result.answers[prompt] = [last.tokens[p][n][:end] for n, end in rows]
        result.texts[prompt] = [last.text(p, n) for n, _ in rows]
        result.distinct[prompt] = len({tuple(answer) for answer in result.answers[prompt]})
        result.lineage[prompt] = lineage[p]
        if result.logprobs is not None and result.reveal_step is not None:
            result.logprobs[prompt] = [logprobs[p][n][:end] for n, end in rows]
            result.reveal_step[prompt] = [reveals[p][n][:end] for n, end in rows]
    return result


def _logdet(similarity: Tensor) -> Tensor:
    """Return the log determinant [P] of similarity [P, k, k]. It is minus infinity for a singular matrix."""
    nothing, place = torch.zeros_like(similarity[:, 0]), torch.arange(similarity.shape[1], device=similarity.device)
    result = eliminate(similarity, nothing, nothing, place.expand(nothing.shape), place, len(place))
    return torch.where(result.zeros > 0, -torch.inf, result.logs)[:, 0]
