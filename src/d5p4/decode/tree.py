"""One step of a tree, and what happens when its rows are complete (`methods.tree`, `project.enumerated`).

The pool of a prompt has K rows that are awake and a reserve of K rows that sleep. At every step, the awake rows are run
and get children, the method keeps K of these, and the best K of all other rows sleep. Sleeping rows are never run. A
place without a row has the value -inf.

When rows are complete, their texts are compared: an end-of-text token that was revealed later may have cut off the
difference of two rows, and different tokens may decode to the same text. Of equal texts, the row with the largest
value stays. A prompt whose complete and running rows are fewer than k goes on with its best sleeping rows. It ends when
it has k texts or no more rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..ops.precision import steady_sum, wide
from ..ops.ties import ranked, repeats
from ..project.enumerated import LATE, gumbel_noise
from ..rng import BRANCH, hash_tokens, mix
from ..types import Choice
from .pool import OWN, Branching, Call, Pool, pick
from .schedule import Facts, Step

if TYPE_CHECKING:
    from .rows import Prompts, WindowHidden
    from .view import Look

ROUNDS = 8  # a prompt takes at most ROUNDS * L steps; in the last L of them, no incomplete row wakes up


@dataclass(frozen=True)
class Leaves:
    """The children of one step, of which a method keeps K."""

    value: Tensor  # [P, M] the larger, the better; -inf: there is no row at this place
    tie: Tensor  # [P, M] decides between equal values
    source: Tensor  # [P, M] the index of each row's parent in the pool that was run
    complete: Tensor  # [P, M] bool, the rows that have no open position
    tokens: Tensor  # [P, M, L] masks where nothing is revealed, and behind the end of the text
    mask_id: int
    view: Look  # the pool that was run

    def rows(self, index: Tensor) -> Tensor:
        """Return the tokens [P, n, L] of the leaves with the indices [P, n]."""
        return pick(self.tokens, index)


def first_state(pool: Pool) -> Pool:
    """Return the first pool of a tree: one row is awake, and all other places are empty."""
    first = (torch.arange(pool.size, device=pool.key.device) == 0).expand_as(pool.row_hash)
    dtype = wide(pool.key.device)
    value = torch.zeros(first.shape, dtype=dtype, device=first.device)
    if pool.call.settings.temperature > 0:
        value = value + gumbel_noise(mix(pool.seed, pool.key, BRANCH), 0).to(dtype)[:, None]
    state = {"value": _only(value, first), "phi": torch.zeros_like(value), "late": torch.zeros_like(value)}
    lost = torch.full_like(value[:, 0], -torch.inf)
    return replace(pool, awake=first, lost=lost, state=state, row_hash=_hashes(pool.row_hash, first))


def rank_values(state: Mapping[str, Tensor]) -> Tensor:
    """Return the values [P, N] by which rows are ranked. Late rows come behind all others."""
    return state["value"] - LATE * state["late"]


def _hashes(row_hash: Tensor, exists: Tensor) -> Tensor:
    """Return the hashes [P, N] with another hash for each place without a row, so that it equals no row."""
    place = torch.arange(row_hash.shape[1], device=row_hash.device)
    return torch.where(exists, row_hash, mix(row_hash, place, -1))


class Growing(Branching):
    """Makes the next pool of a tree: the children that the method keeps, and the reserve."""

    def __init__(self, call: Call, reveals: Sequence[int], prune: Callable[[Leaves, int, Tensor], Tensor]) -> None:
        super().__init__(call, reveals)
        self.prune = prune

    def __call__(
        self,
        pool: Pool,
        hidden: WindowHidden,
        step: Step,
        choices: Sequence[Choice],
        places: Sequence[Tensor] | None,
        view: Look,
    ) -> tuple[Pool, Choice]:
        assert pool.awake is not None and pool.lost is not None
        choice, settings, beams = choices[0], pool.call.settings, pool.call.beams
        running = pool.state | {"value": _only(pool.state["value"], pool.awake)}
        children = self._children(replace(pool, state=running), hidden, step, choice)
        if settings.temperature == 0:
            children.state["value"] = _only(_joint(children), children.state["value"] > -torch.inf)
        new, old, count = children.whole(), pool.whole(), settings.groups
        # All rows that may stay: the children, and the rows that sleep.
        place = torch.arange(old.size, device=pool.key.device).expand_as(old.source)
        old = replace(old, source=place, state=old.state | {"value": _only(old.state["value"], ~pool.awake)})
        rows: dict[str, Any] = {name: torch.cat([getattr(new, name), getattr(old, name)], 1) for name in (*OWN, *SMALL)}
        state = {name: torch.cat([new.state[name], old.state[name]], 1) for name in new.state}
        value, mask_id = rank_values(state), pool.call.model.mask_id
        behind = pool.call.after_end(rows["tokens"], pool.appended)
        shown, complete = (
            rows["tokens"].masked_fill(behind, mask_id),
            ~pool.call.open(rows["tokens"], pool.appended).any(-1),
        )
        # At temperature 0, only the w best children of a row may be kept; the others, and all alternatives, may sleep.
        competing = choice.children if settings.temperature > 0 else min(settings.w, choice.children)
        index = torch.arange(new.size, device=place.device).view(choice.parents.shape[1], -1)[:, :competing]
        first = index.flatten().expand(len(place), -1)
        small = (x.gather(1, first) for x in (value, rows["tie"], rows["source"], complete))
        leaves = Leaves(*small, pick(shown, first), mask_id, view)
        kept = first.gather(1, self.prune(leaves, count, pool.keys(step.index)))
        # Of the other rows, the best sleep. A complete row with the tokens of a better one is not among them.
        rest = value.scatter(1, kept, -torch.inf)
        names = torch.where(complete, hash_tokens(shown, pool.positions[:, None]), rows["row_hash"])
        repeat = repeats(names, ranked(value, rows["tie"])) & (rest > -torch.inf)
        order = ranked(_only(rest, ~repeat), rows["tie"])
        dropped = _only(state["value"], (state["late"] == 0)).scatter(
            1, torch.cat([kept, order[:, :count]], 1), -torch.inf
        )
        lost = torch.maximum(pool.lost, dropped.amax(-1)).masked_fill(
            (repeat & (state["late"] == 0)).any(-1), torch.nan
        )
        index = torch.stack([kept, order[:, :count]], 2).flatten(1)  # an awake row, a sleeping row, an awake row, ...
        index = beams.agree(Choice(index, 1)).parents
        awake = torch.arange(index.shape[1], device=index.device) % 2 == 0
        rows = {name: pick(values, index) for name, values in rows.items()}
        exists = (awake & (value.gather(1, index) > -torch.inf)) | (_only(rest, ~repeat).gather(1, index) > -torch.inf)
        state = {name: pick(values, index) for name, values in state.items()}
        state["value"] = _only(state["value"], exists)
        rows["row_hash"] = _hashes(rows["row_hash"], exists)
        following = replace(
            pool,
            **rows | {name: beams.own(rows[name]).contiguous() for name in OWN},
            group=torch.arange(index.shape[1], device=index.device).expand(index.shape),
            state=state,
            awake=awake & exists,
            lost=lost,
        )
        return following, choice


SMALL = ("row_hash", "tie", "source")


def _only(values: Tensor, wanted: Tensor) -> Tensor:
    return values.masked_fill(~wanted, -torch.inf)


def _joint(pool: Pool) -> Tensor:
    """Return the joint log-probability [P, N] of each row's tokens at their reveal, without those behind the end."""
    behind = pool.call.after_end(pool.tokens, pool.appended)
    chances = pool.logprob.masked_fill(behind, 0).to(wide(pool.key.device))
    return pool.call.beams.gather(steady_sum(chances))


def merge(pool: Pool, prompts: Prompts, facts: Sequence[Facts], compared: list[int], wake: bool) -> Pool | None:
    """Compare the texts of complete rows. Drop those that repeat the text of a better row, and wake up sleeping rows if
    fewer than k rows are left.

    compared: the number of complete rows of each prompt at the last comparison, which this call updates. wake: whether
    incomplete rows may wake up. The result is None if nothing changes.
    """
    ended = [fact.done == fact.rows for fact in facts]
    look = [i for i, fact in enumerate(facts) if (fact.done > compared[i] and fact.done > 1) or ended[i]]
    compared[:] = [fact.done for fact in facts]
    if not look or pool.awake is None or pool.lost is None:
        return None
    from .answers import Texts

    at = torch.tensor(look, device=pool.key.device)
    part = pool.keep(at).whole()
    texts, value, late = Texts(part, prompts.take(at)), part.state["value"], part.state["late"] > 0
    complete = ~part.call.open(part.tokens, part.appended).any(-1)
    order = ranked(rank_values(part.state), part.tie)
    flags = torch.stack([x.to(torch.int64) for x in (pool.awake[at], value > -torch.inf, complete, late, order)])
    awake, exists, done, is_late, best_first = flags.tolist()
    changed, weightless = False, [False] * len(look)
    for p, place in enumerate(look):
        kinds, missing = set[str](), pool.call.settings.k
        rows = [n for n in best_first[p] if exists[p][n]]
        for n in sorted(rows, key=lambda n, p=p: not awake[p][n]):  # awake rows first
            if not awake[p][n] and (missing <= 0 or not (wake or done[p][n])):
                continue
            repeat = done[p][n] and texts.text(p, n) in kinds
            changed |= bool(repeat or not awake[p][n])
            weightless[p] |= bool(repeat and not is_late[p][n])
            awake[p][n], exists[p][n], missing = not repeat, not repeat, missing - (not repeat)
            kinds.update([texts.text(p, n)] if done[p][n] else [])
        compared[place] = sum(a and d for a, d in zip(awake[p], done[p], strict=True))
    if not changed:
        return None
    new_awake, new_value, lost = pool.awake.clone(), pool.state["value"].clone(), pool.lost.clone()
    flags = torch.tensor([awake, exists], device=at.device, dtype=torch.bool)
    new_awake[at], new_value[at] = flags[0], _only(value, flags[1])
    lost[at] = lost[at].masked_fill(torch.tensor(weightless, device=at.device), torch.nan)
    return replace(pool, awake=new_awake, state=pool.state | {"value": new_value}, lost=lost)
