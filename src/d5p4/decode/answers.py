"""Record the costs of a decode call and the parents of rows, and make answers from the rows of finished prompts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from copy import copy
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ..errors import D5P4Error
from ..ops.precision import steady_mean, steady_sum, wide
from ..ops.problem import eliminate
from ..ops.ties import coarse, first_of_each, ranked
from ..options import Settings
from ..result import HistoryStep, Result
from ..types import Choice, Kept, Model, Snapshot
from .pool import Pool, pick
from .rows import Rows
from .schedule import Steps
from .texts import Prompts, Texts
from .view import ForwardView

LOGPROB_SCORE = "mean log-probability of each token at its reveal"
ENTROPY_SCORE = "mean negative entropy over the answer at the last forward"


class Ledger:
    """Writes the costs and the answers of prompts into the result of a call, and records the parent of every row."""

    def __init__(self, result: Result) -> None:
        self.result = result
        self.alive = torch.arange(len(result.nfe), device=result.nfe.device)  # [P] the indices in the call of prompts
        self.trail: list[Tensor] = []  # per step, a tensor [P, rows] with the parent of each row of the next pool

    def record(self, view: ForwardView, choice: Choice, source: Tensor) -> None:
        """Record one step: its costs, and the parent of each row of the next pool."""
        result, fresh, early = self.result, view.hidden.fresh, view.pool.call.settings.early
        nominal = (~view.pool.complete).sum(-1) if early else torch.full_like(fresh, view.size)
        result.nfe[self.alive] += fresh > 0
        result.rows[self.alive] += fresh
        result.rows_nominal[self.alive] += nominal * view.hidden.passes + view.hidden.contexts
        result.tokens_run[self.alive] += view.hidden.tokens
        self.trail.append(source)
        if (history := result.extras.get("history")) is not None:
            everything = view.pool.tokens, view.raw, view.quality, view.similarity, view.group, choice.parents
            for place, prompt in enumerate(self.alive.tolist()):
                rows, raw, quality, similarity, group, parents = (x[place] for x in everything)
                awake = None if view.awake is None else view.awake[place]
                rows = rows[:, : rows.shape[1] - view.pool.call.extra]
                own = rows, raw, quality, similarity, group, parents, choice.children, awake
                history[prompt].append(HistoryStep(view.now.by_prompt[place].index, *own))

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


def snapshot(view: ForwardView, choice: Choice, following: Pool) -> Snapshot:
    """Return what a callback gets after a step. The tensors of the next pool are copies, theirs to change."""
    pool, new, steps = view.pool, following.map(Tensor.clone), view.now.by_prompt
    before, after, logprob = (x[..., : x.shape[-1] - pool.call.extra] for x in (pool.tokens, new.tokens, new.logprob))
    rows = before, view, choice, after, logprob, [step.share for step in steps], new.source, pool.awake, new.awake
    return Snapshot([step.index for step in steps], [step.most for step in steps], pool.names, *rows)


class Final(ForwardView):
    """The view of the N complete rows of each finished prompt, with the texts of these rows. A row has the scores of
    its parent at the last forward. `Search.finish` chooses the answers among these rows."""

    def __init__(self, pool: Pool, rows: Rows, end: Steps, prompts: Tensor) -> None:
        super().__init__(pool, rows.final(pool), end)
        self.forward = pool.step - 1
        self.prompts = prompts  # [P]: their indices in the call
        self.rows = Texts(pool, rows.prompts)
        self.carry_over = pool.call.model.carry_over  # whether entropy says nothing about revealed tokens
        self.state = pool.state  # [P, N] what the search keeps for each row

    def texts(self) -> list[list[str]]:
        """Return the texts [P][N] of all rows."""
        return self.rows.texts()

    @cached_property
    def _masked(self) -> Tensor:
        """The positions revealed by the last step or, if rows may be complete before it, by the last reveal of each
        row."""
        revealed, early = self.pool.revealed, self.pool.call.settings.early
        return self._own(revealed == (revealed.amax(-1, keepdim=True) if early else self.forward[:, None, None]))

    def logprob(self, shown: bool = False) -> Tensor:
        """Return the mean log-probability [P, N] of each row's tokens at the last forward, or at their reveal if the
        model has `carry_over`."""
        call, logprob = self.pool.call, self.pool.logprob
        if not self.carry_over:
            return self.score("logprob", "all", shown)
        counted = call.counted(self.pool.tokens, self.pool.appended, shown)
        if counted is None:
            return steady_mean(logprob)
        return steady_sum((logprob * counted).to(wide(logprob.device))) / counted.sum(-1)

    @cached_property
    def shown(self) -> Tensor:
        """The scores [P, N] that a result shows, rounded, so that scores that count as tied are equal."""
        return coarse(self.logprob(shown=True) if self.carry_over else self.score("entropy", "all", shown=True))

    def ordered(self, kept: Kept) -> Kept:
        """Return the k rows that become answers, best score first. With spare beams, rows that repeat a text come
        last."""
        if kept.exists is not None:  # the search has ordered them itself
            return kept
        settings, rows = self.pool.call.settings, kept.rows
        score = self.shown.gather(1, rows) if kept.score is None else kept.score
        order = ranked(score, self.pool.row_hash.gather(1, rows), self.tie.gather(1, rows))
        if settings.spare:
            texts = [[self.rows.text(p, n) for n in row] for p, row in enumerate(rows.tolist())]
            order = first_of_each(order, texts)[:, : settings.k]
        rows = rows.gather(1, order)
        similarity = kept.similarity
        if similarity is None:
            similarity = pick(pick(self.compare(shown=True), rows).transpose(1, 2), rows)
        return kept._replace(
            rows=rows,
            score=score.gather(1, order),
            exists=torch.ones_like(rows, dtype=torch.bool),
            similarity=similarity,
            extras={name: pick(x, order) if x.ndim > 1 else x for name, x in kept.extras.items()},
        )


def empty_result(prompts: Prompts, settings: Settings, model: Model, own: Mapping[str, tuple[int, ...]]) -> Result:
    """Return a result without answers. `add_answers` adds those of finished prompts; dropped prompts stay empty.
    own: the names and the shapes per prompt of the extras of the search."""
    device, total, k = prompts.tokens.device, len(prompts.tokens), settings.k
    columns = prompts.tokens.shape[1] - (0 if settings.logprobs else prompts.extra)
    shape, extras, decoded = (total, k, columns), dict[str, Any](), prompts.positions >= 0

    def unknown(*shape: int) -> Tensor:
        return torch.full(shape, torch.nan, dtype=wide(device), device=device)

    def zeros() -> Tensor:
        return torch.zeros(total, dtype=torch.int64, device=device)

    if settings.logprobs:
        extras["window"] = torch.zeros_like(prompts.attention_mask).scatter(1, prompts.window, decoded)
        extras["reveal_at"] = torch.full(shape, -1, device=device)
        extras["logprob_at"] = torch.zeros(shape, dtype=wide(device), device=device)
    for name in ("history",) * settings.history + ("stopped",) * bool(settings.stop_strings):
        extras[name] = [[] for _ in range(total)]
    extras |= {name: unknown(total, *shape) for name, shape in own.items()}
    return Result(
        answers=[[] for _ in range(total)],
        texts=[[] for _ in range(total)],
        sequences=torch.full(shape, model.mask_id, device=device),
        attention_mask=prompts.attention_mask.scatter(1, prompts.window, decoded)[:, :columns],
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


def add_answers(ledger: Ledger, final: Final, kept: Kept, score_kind: str | None) -> None:
    """Add the answers of finished prompts, which the search has kept, to the result. score_kind: what their scores are,
    if they are not those of the model."""
    pool, call, alive, result = final.pool, final.pool.call, ledger.alive, ledger.result
    if bool(final.pool.open.any()):
        raise D5P4Error("decoding ended with masks in an answer; please report this with the settings used")
    if kept.score is not None and score_kind is not None:
        result.score_kind = score_kind
        if bool((kept.score.isnan() if kept.exists is None else kept.score.isnan() & kept.exists).any()):
            reason = "gave an answer the score NaN; a score must be a number"
            raise D5P4Error(f"method {call.settings.method!r} {reason}")
    rows, score, exists, similarity, own = final.ordered(kept)
    assert score is not None and exists is not None and similarity is not None
    result.score[alive] = score.to(result.score.dtype)
    for name in own.keys() & result.extras.keys():
        result.extras[name][alive] = own[name].to(result.extras[name].dtype)
    sequences = pick(final.rows.sequences, rows)[..., : result.sequences.shape[-1]]
    result.sequences[alive] = torch.where(exists[..., None], sequences, call.model.pad_id)
    similarity = coarse(similarity.to(result.similarity.dtype))
    both = exists[:, :, None] & exists[:, None, :]
    one = torch.eye(similarity.shape[-1], dtype=similarity.dtype, device=similarity.device)
    result.logdet[alive] = _logdet(torch.where(both, similarity, one))
    result.similarity[alive] = torch.where(both, similarity, torch.nan)
    if call.settings.logprobs:
        window = final.rows.prompts.window[:, None].expand(-1, rows.shape[1], -1)
        for place, values, blank in ((result.reveal_at, pool.revealed, -1), (result.logprob_at, pool.logprob, 0)):
            values = torch.where(exists[..., None], pick(values, rows), blank).to(place.dtype)
            place[alive] = place[alive].scatter(2, window, values)
    lineage, counts = ledger.lineage(rows), exists.sum(-1).tolist()
    for p, prompt in enumerate(alive.tolist()):
        kept_rows = [(n, final.rows.ends[p][n]) for n in rows[p].tolist()][: counts[p]]
        result.answers[prompt] = [final.rows.tokens[p][n][:end] for n, end in kept_rows]
        result.texts[prompt] = [final.rows.text(p, n) for n, _ in kept_rows]
        if call.settings.stop_strings:
            result.stopped[prompt] = [final.rows.text(p, n) != final.rows.whole(p, n) for n, _ in kept_rows]
        result.distinct[prompt] = len(set(result.texts[prompt]))
        result.lineage[prompt] = lineage[p, : counts[p]]


def _logdet(similarity: Tensor) -> Tensor:
    """Return the log determinant [P] of similarity [P, k, k]. It is minus infinity for a singular matrix."""
    nothing, place = torch.zeros_like(similarity[:, 0]), torch.arange(similarity.shape[1], device=similarity.device)
    result = eliminate(similarity, nothing, nothing, place.expand(nothing.shape), place, len(place))
    return torch.where(result.zeros > 0, -torch.inf, result.logs)[:, 0]
