"""Record the costs of a decode call and the parents of rows, and make answers from the rows of finished prompts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ..errors import D5P4Error
from ..ops.precision import steady_mean, steady_sum, wide
from ..ops.problem import eliminate
from ..ops.ties import coarse, first_of_each, ranked
from ..options import Settings
from ..result import COUNTS, Result
from ..types import Choice, Kept, Model, Snapshot
from .pool import Call, Pool, pick
from .rows import Rows
from .schedule import Steps
from .texts import Prompts, Texts
from .view import ForwardView

LOGPROB_SCORE = "mean log-probability of each token at its reveal"
LEFT_PADDED = ("sequences", "attention_mask", "window", "reveal_at", "logprob_at")
ENTROPY_SCORE = "mean negative entropy over the answer at the last forward"


class Ledger:
    """The costs of P prompts, and the parent of every row at every step."""

    def __init__(self, prompts: int, device: torch.device) -> None:
        self.costs = torch.zeros(prompts, len(COUNTS), dtype=torch.int64, device=device)
        self.trail: list[Tensor] = []  # per step, a tensor [P, rows] with the parent of each row of the next pool

    def record(self, view: ForwardView, source: Tensor) -> None:
        """Record one step: its costs, and the parent of each row of the next pool."""
        self.costs = self.costs + view.costs
        self.trail.append(source)

    def part(self, index: Tensor, steps: int) -> Ledger:
        """Return a ledger of only some of the prompts, which have taken at most this many steps."""
        ledger = copy(self)
        ledger.costs = self.costs[index]
        ledger.trail = [parents[index] for parents in self.trail[len(self.trail) - steps :]]
        return ledger

    def join(self, new: Ledger) -> Ledger:
        """Return a ledger with more prompts, which have not taken a step."""
        ledger, count = copy(self), len(new.costs)
        ledger.costs = torch.cat([self.costs, new.costs])
        rows = ((x, torch.arange(x.shape[1], device=x.device).expand(count, -1)) for x in self.trail)
        ledger.trail = [torch.cat(pair) for pair in rows]
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
    before, after, logprob = (x[..., : x.shape[-1] - view.call.extra] for x in (pool.tokens, new.tokens, new.logprob))
    taken, most, shares = zip(*((step.index, step.most, step.share) for step in steps), strict=True)
    rows = before, view, choice, after, logprob, list(shares), new.source, pool.end, pool.awake, new.awake
    return Snapshot(list(taken), list(most), pool.names, *rows)


class Final(ForwardView):
    """The view of the N complete rows of each finished prompt, with the texts of these rows. A row has the scores of
    its parent at the last forward. `Search.finish` chooses the answers among these rows."""

    def __init__(self, call: Call, pool: Pool, rows: Rows, end: Steps, references: Sequence[Any] | None = None) -> None:
        super().__init__(call, pool, rows.final(pool), end, rows.prompts)
        self.forward = pool.step - 1
        self.references = references  # one per prompt, for best-of-n
        self.rows = Texts(call, pool, rows.prompts)
        self.carry_over = call.model.carry_over  # whether entropy says nothing about revealed tokens
        self.state = pool.state  # [P, N] what the search keeps for each row

    def texts(self) -> list[list[str]]:
        """Return the texts [P][N] of all rows."""
        return self.rows.texts()

    @cached_property
    def _masked(self) -> Tensor:
        """The positions revealed by the last step or, if rows may be complete before it, by the last reveal of each
        row."""
        revealed, early = self.pool.revealed, self.call.early
        return self._own(revealed == (revealed.amax(-1, keepdim=True) if early else self.forward[:, None, None]))

    def logprob(self, shown: bool = False) -> Tensor:
        """Return the mean log-probability [P, N] of each row's tokens at the last forward, or at their reveal if the
        model has `carry_over`."""
        call, logprob = self.call, self.pool.logprob
        if not self.carry_over:
            return self.score("logprob", "all", shown)
        counted = call.counted(self.pool.tokens, self.pool, shown)
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
        settings, rows = self.call.settings, kept.rows
        score = self.shown.gather(1, rows) if kept.score is None else kept.score
        order = ranked(score, self.pool.row_hash.gather(1, rows), self.tie.gather(1, rows))
        if settings.spare:
            texts = [[self.rows.kind(p, n) for n in row] for p, row in enumerate(rows.tolist())]
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


def empty_result(
    prompts: Prompts, settings: Settings, model: Model, own: Mapping[str, tuple[int, ...]], costs: Tensor
) -> Result:
    """Return a result without answers. `add_answers` adds those of finished prompts; dropped prompts stay empty.
    own: the names and the shapes per prompt of the extras of the search. costs: see `ForwardView.costs`."""
    device, total, k = prompts.tokens.device, len(prompts.tokens), settings.k
    columns = prompts.tokens.shape[1] - (0 if settings.logprobs else prompts.extra)
    shape, extras, decoded = (total, k, columns), dict[str, Any](), prompts.positions >= 0

    def unknown(*shape: int) -> Tensor:
        return torch.full(shape, torch.nan, dtype=wide(device), device=device)

    if settings.logprobs:
        extras["window"] = torch.zeros_like(prompts.attention_mask).scatter(1, prompts.window, decoded)
        extras["reveal_at"] = torch.full(shape, -1, device=device)
        extras["logprob_at"] = torch.zeros(shape, dtype=wide(device), device=device)
    lists = {"stopped": settings.stop_strings, "unfinished": settings.form}
    extras |= {name: [[] for _ in range(total)] for name, wanted in lists.items() if wanted}
    extras |= {"log_z": unknown(total, k)} if settings.form else {}
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
        distinct=torch.zeros(total, dtype=torch.int64, device=device),
        lineage=[torch.zeros(k, 0, dtype=torch.int64, device=device) for _ in range(total)],
        seed=0,
        settings=settings,
        extras=extras,
        **dict(zip(COUNTS, costs.unbind(-1), strict=True)),
    )


def add_answers(result: Result, ledger: Ledger, final: Final, kept: Kept, score_kind: str | None) -> None:
    """Add the answers of finished prompts, which the search has kept, to their result. score_kind: what their scores
    are, if they are not those of the model."""
    pool, call = final.pool, final.call
    if bool(pool.open.any()):
        raise D5P4Error("decoding ended with masks in an answer; please report this with the settings used")
    if kept.score is not None and score_kind is not None:
        result.score_kind = score_kind
        if bool((kept.score.isnan() if kept.exists is None else kept.score.isnan() & kept.exists).any()):
            reason = "gave an answer the score NaN; a score must be a number"
            raise D5P4Error(f"method {call.settings.method!r} {reason}")
    rows, score, exists, similarity, own = final.ordered(kept)
    assert score is not None and exists is not None and similarity is not None
    result.score[:] = score.to(result.score.dtype)
    for name in own.keys() & result.extras.keys():
        result.extras[name][:] = own[name].to(result.extras[name].dtype)
    if call.matchers is not None:
        result.log_z[:] = torch.where(exists, pool.state["log_z"].gather(1, rows), torch.nan)
        unfinished = pool.state["unfinished"].gather(1, rows).bool().tolist()
    sequences = pick(final.rows.sequences, rows)[..., : result.sequences.shape[-1]]
    result.sequences[:] = torch.where(exists[..., None], sequences, call.model.pad_id)
    similarity = coarse(similarity.to(result.similarity.dtype))  # so that ranks write the same digits
    both = exists[:, :, None] & exists[:, None, :]
    one = torch.eye(similarity.shape[-1], dtype=similarity.dtype, device=similarity.device)
    result.logdet[:] = _logdet(torch.where(both, similarity, one))
    result.similarity[:] = torch.where(both, similarity, torch.nan)
    if call.settings.logprobs:
        window = final.rows.prompts.window[:, None].expand(-1, rows.shape[1], -1)
        for place, values, blank in ((result.reveal_at, pool.revealed, -1), (result.logprob_at, pool.logprob, 0)):
            values = torch.where(exists[..., None], pick(values, rows), blank).to(place.dtype)
            place.scatter_(2, window, values)
    lineage, counts = ledger.lineage(rows), exists.sum(-1).tolist()
    for p, own_rows in enumerate(rows.tolist()):
        kept_rows = [(n, final.rows.ends[p][n]) for n in own_rows][: counts[p]]
        result.answers[p] = [final.rows.tokens[p][n][:end] for n, end in kept_rows]
        result.texts[p] = [final.rows.text(p, n) for n, _ in kept_rows]
        if call.settings.stop_strings:
            result.stopped[p] = [final.rows.text(p, n) != final.rows.whole(p, n) for n, _ in kept_rows]
        if call.matchers is not None:
            result.unfinished[p] = unfinished[p][: counts[p]]
        result.distinct[p] = len({final.rows.kind(p, n) for n, _ in kept_rows})
        steps = final.now.by_prompt[p].index + 1  # before them, the prompt had not joined
        result.lineage[p] = lineage[p, : counts[p], lineage.shape[2] - steps :]


def with_columns(result: Result, columns: int, pad_id: int) -> Result:
    """Return a result whose rows have this many columns, with more or less padding on the left."""
    more, pad = columns - result.sequences.shape[-1], torch.nn.functional.pad
    fill, own = {"sequences": pad_id, "reveal_at": -1}, vars(result) | result.extras
    rows: dict[str, Any] = {n: pad(own[n], (more, 0), value=fill.get(n, 0)) for n in LEFT_PADDED if n in own}
    return replace(result, extras={name: rows.pop(name, x) for name, x in result.extras.items()}, **rows)


def merged(parts: Sequence[tuple[Sequence[int | None], Result]], pad_id: int) -> Result:
    """Merge results, given the place of each prompt, or None if it has no place. The rows get as little padding as they
    need."""
    parts = sorted(parts, key=lambda part: not any(part[1].answers))  # the kind of scores is that of answers
    longest = max(result.sequences.shape[-1] for _, result in parts)
    places = enumerate(place for own, _ in parts for place in own)
    back = [i for _, i in sorted((place, i) for i, place in places if place is not None)]

    def join(values: list[Any]) -> Any:
        if isinstance(values[0], Tensor):
            return torch.cat(values)[torch.tensor(back, device=values[0].device)]
        if isinstance(values[0], list):
            listed = [item for value in values for item in value]
            return [listed[i] for i in back]
        if isinstance(values[0], dict):
            return {name: join([value[name] for value in values]) for name in values[0]}
        return values[0]

    results = [vars(with_columns(result, longest, pad_id)) for _, result in parts]
    result = Result(**{name: join([fields[name] for fields in results]) for name in results[0]})
    padding = int(result.attention_mask.to(torch.uint8).argmax(-1).amin())
    return with_columns(result, longest - padding, pad_id)


def _logdet(similarity: Tensor) -> Tensor:
    """Return the log determinant [P] of similarity [P, k, k]. It is minus infinity for a singular matrix."""
    nothing, place = torch.zeros_like(similarity[:, 0]), torch.arange(similarity.shape[1], device=similarity.device)
    result = eliminate(similarity, nothing, nothing, place.expand(nothing.shape), place, len(place))
    return torch.where(result.zeros > 0, -torch.inf, result.logs)[:, 0]
