"""One step of a tree, and what happens when its rows are complete (`methods.tree`, `project.enumerated`).

The pool of a prompt has K rows that are awake and a reserve of K rows that sleep. At every step, the awake rows are run
and get children. The method keeps K of these. The best K of all other rows sleep, except complete rows that have the
tokens of a better row. Sleeping rows are never run. A place without a row has the value -inf.

When rows are complete, their texts are compared: an end-of-text token that was revealed later may have cut off the
difference of two rows, and different tokens may decode to the same text. Of equal texts, the row with the largest
value stays. A prompt whose complete and running rows are fewer than k goes on with its best sleeping rows. It ends when
all awake rows are complete, and there are k texts or no more sleeping rows.
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
from .texts import Prompts, Texts

if TYPE_CHECKING:
    from .rows import WindowHidden
    from .view import Look

SMALL = ("row_hash", "tie", "source")  # what a tree knows of every row, besides its tokens and state
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
    state: Mapping[str, Tensor]  # [P, M] what the tree keeps for every row

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

    completes = False

    def __init__(self, call: Call, reveals: Sequence[int], select: Any) -> None:
        """select: the method. Its `prune(leaves, K, key)` returns the indices [P, K] of the leaves that are kept."""
        super().__init__(call, reveals)
        self.prune: Callable[[Leaves, int, Tensor], Tensor] = select.prune
        # At temperature 0, only the w best tokens of each parent compete.
        self.most = call.settings.w if call.settings.temperature == 0 else call.settings.width

    def __call__(
        self,
        pool: Pool,
        hidden: WindowHidden,
        step: Step,
        choices: Sequence[Choice],
        places: Sequence[Tensor] | None,
        view: Look,
    ) -> tuple[Pool, Choice]:
        assert pool.lost is not None
        choice, call, beams = choices[0], pool.call, pool.call.beams
        rows = self._candidates(pool, hidden, step, choice)
        value, behind = rank_values(rows.state), call.after_end(rows.tokens, pool.appended)
        shown = rows.tokens.masked_fill(behind, call.model.mask_id)
        complete = ((shown != call.model.mask_id) | behind).all(-1)

        # 1. The method keeps K children.
        index = torch.arange(rows.size - pool.size, device=value.device).view(choice.parents.shape[1], -1)
        index = index[:, : min(self.most, choice.children)].flatten().expand(len(value), -1)
        best, tie, source, done = (x.gather(1, index) for x in (value, rows.tie, rows.source, complete))
        state = {name: values.gather(1, index) for name, values in rows.state.items()}
        leaves = Leaves(best, tie, source, done, pick(shown, index), call.model.mask_id, view, state)
        kept = index.gather(1, self.prune(leaves, call.settings.groups, pool.keys(step.index)))

        # 2. The best other rows sleep, except complete rows with the text of a better row.
        name = torch.where(complete, hash_tokens(shown, pool.positions[:, None]), rows.row_hash)
        others = value.scatter(1, kept, -torch.inf)
        order = ranked(value, rows.tie)
        repeat = repeats(name, order) & (others > -torch.inf)
        others = _only(others, ~repeat)
        gone = (others == -torch.inf).gather(1, order)
        asleep = order.gather(1, gone.to(torch.uint8).argsort(dim=-1, stable=True)[:, : kept.shape[1]])

        # 3. The next pool has an awake row, a sleeping row, an awake row, ..., so that ranks have equally many of both.
        index = beams.agree(Choice(torch.stack([kept, asleep], 2).flatten(1), 1)).parents
        awake = torch.arange(index.shape[1], device=index.device) % 2 == 0
        exists = torch.where(awake, value.gather(1, index), others.gather(1, index)) > -torch.inf
        drawn = _only(rows.state["value"], rows.state["late"] == 0)
        lost = torch.maximum(pool.lost, drawn.scatter(1, index, -torch.inf).amax(-1))
        tensors: dict[str, Any] = {name: pick(getattr(rows, name), index) for name in (*OWN, *SMALL)}
        state = {name: pick(values, index) for name, values in rows.state.items()}
        following = replace(
            pool,
            **tensors | {name: beams.own(tensors[name]).contiguous() for name in OWN},
            group=torch.arange(index.shape[1], device=index.device).expand(index.shape),
            state=state | {"value": _only(state["value"], exists)},
            awake=awake & exists,
            lost=lost.masked_fill((repeat & (drawn > -torch.inf)).any(-1), torch.nan),
        )
        return replace(following, row_hash=_hashes(following.row_hash, exists)), choice

    def _candidates(self, pool: Pool, hidden: WindowHidden, step: Step, choice: Choice) -> Pool:
        """Return a pool of all rows that may be in the next pool: the children, and then the rows that sleep. All their
        tokens are in this process."""
        assert pool.awake is not None
        awake, asleep = (pool.state | {"value": _only(pool.state["value"], x)} for x in (pool.awake, ~pool.awake))
        children = self._children(replace(pool, state=awake), hidden, step, choice)
        children.state["value"] = self.value(children, step)
        place = torch.arange(pool.size, device=pool.key.device).expand_as(pool.source)
        parts = children.whole(), replace(pool, source=place, state=asleep).whole()
        tensors: dict[str, Any] = {
            name: torch.cat([getattr(part, name) for part in parts], 1) for name in (*OWN, *SMALL)
        }
        return replace(pool, **tensors, state={name: torch.cat([x.state[name] for x in parts], 1) for name in asleep})

    def value(self, children: Pool, step: Step) -> Tensor:
        """Return the values [P, N] of the children of a step: at temperature 0, their joint log-probability."""
        value = children.state["value"]
        return value if self.draw.temperature > 0 else _only(_joint(children), value > -torch.inf)


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
        for n in [n for n in rows if awake[p][n]] + [n for n in rows if not awake[p][n]]:
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
