"""The reveal tree: k different answers, by a search that chooses rows before it runs them.

Children are enumerated (`search.enumerated`), so all rows of the tree differ. A greedy search over the SHORTLIST * K
best children of a prompt keeps a set A of K = k + spare rows for which this sum is large:

    Σ_{i in A} G_i + λ log det S_A,      S_ij = ρ^(d_ij + h_ij / 2)

G is the joint log-probability of a row at temperature 0, and its perturbed value otherwise. λ is the option
`diversity`; with 0, the K best rows are kept. S is `ops.gram.token_kernel` of the tokens before the end of the text.

The pool of a prompt has K rows that are awake and a reserve of K rows that sleep. At every step, the awake rows are run
and get children. The method keeps K of these. The best K of all other rows sleep, except complete rows that have the
tokens of a better row. Sleeping rows are never run. A place without a row has the value -inf.

When rows are complete, their texts are compared: an end-of-text token that was revealed later may have cut off the
difference of two rows, and different tokens may decode to the same text. Of equal texts, the row with the largest
value stays. A prompt whose complete and running rows are fewer than k goes on with its best sleeping rows. It ends when
all awake rows are complete, and there are k texts or no more sleeping rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

import torch
from torch import Tensor

from ..decode.pool import ROWS, Call, Pool, pick
from ..decode.schedule import Facts, Policy, Steps, sent
from ..decode.texts import Texts
from ..ops.gram import token_kernel
from ..ops.partition_map import map_inference
from ..ops.precision import steady_sum, wide
from ..ops.ties import ranked, repeats
from ..options import Checked, Option, Settings
from ..rng import BRANCH, hash_tokens, mix
from ..types import Choice, Kept
from .base import Search
from .children import Draw, Parents
from .enumerated import LATE, enumerated, gumbel_noise
from .reveal import Scheduled

if TYPE_CHECKING:
    from ..constraint import Prefix
    from ..decode.answers import Final
    from ..decode.batch import Batch
    from ..decode.rows import WindowHidden
    from ..decode.view import ForwardView

REVEALS = "reveals"  # the name in `Pool.memory` of m [P, n + 1]: see `search.reveal.Scheduled`
SHORTLIST = 4  # the DPP chooses K of the SHORTLIST * K best children
MOST_STARTS = 32  # with more beams, the greedy search has one start instead of K, which would take minutes
ROUNDS = 8  # a prompt takes at most ROUNDS * L steps; in the last L of them, no incomplete row wakes up


@dataclass(frozen=True)
class Leaves:
    """The children of one step, of which a method keeps K."""

    value: Tensor  # [P, M] the larger, the better; -inf: there is no row at this place
    tie: Tensor  # [P, M] decides between equal values
    tokens: Tensor  # [P, M, L] masks where nothing is revealed, and behind the end of the text
    mask_id: int

    def rows(self, index: Tensor) -> Tensor:
        """Return the tokens [P, n, L] of the leaves with the indices [P, n]."""
        return pick(self.tokens, index)


class TreeSearch(Search):
    """Runs the rows that are awake, enumerates their children, and prunes these before they are run."""

    completes = False
    constrains = True

    def prune(self, leaves: Leaves, k: int, key: Tensor) -> Tensor:
        """Return the indices [P, k] of the leaves that are kept. Leaves without a row have the value -inf."""
        return ranked(leaves.value, leaves.tie)[:, :k]

    def extras(self, settings: Settings) -> dict[str, tuple[int, ...]]:
        drawn = settings.temperature > 0 and not settings.spare and not settings.params.get("diversity")
        return {"perturbed": (settings.k,), "logp": (settings.k,), "kappa": ()} if drawn else {}

    def start(self, call: Call, schedules: Sequence[Policy], pool: Pool) -> Pool:
        """Return the first pool: one row is awake, and all other places are empty."""
        pool = super().start(call, schedules, pool)
        settings, tables = call.settings, [list(getattr(schedule, "reveals", ())) for schedule in schedules]
        sure, longest = settings.reveal_spec.adaptive or max(map(max, tables)) > 1, max(map(len, tables))
        vars(self).update(draw=replace(self.draw, reserve=settings.reserve if sure else 0), project=enumerated)
        tables = [reveals + [0] * (longest - len(reveals)) for reveals in tables]
        memory = {} if settings.reveal_spec.adaptive else {REVEALS: sent(tables, pool.key.device)}
        first = (torch.arange(pool.size, device=pool.key.device) == 0).expand_as(pool.row_hash)
        dtype = wide(pool.key.device)
        value = torch.zeros(first.shape, dtype=dtype, device=first.device)
        if settings.temperature > 0:
            value = value + gumbel_noise(mix(pool.seed, pool.key, BRANCH), 0).to(dtype)[:, None]
        nothing = torch.zeros_like(value)
        state = pool.state | {"value": _only(value, first), "phi": nothing, "late": nothing}
        lost = torch.full_like(value[:, 0], -torch.inf)
        return replace(pool, awake=first, lost=lost, state=state, row_hash=_hashes(pool.row_hash, first), memory=memory)

    def drawing(self, pool: Pool, choice: Choice, parents: Parents, step: Steps) -> Draw:
        draw, reveals = super().drawing(pool, choice, parents, step), pool.memory.get(REVEALS)
        return draw if reveals is None else replace(draw, rule=Scheduled(reveals))

    def streams(self, mothers: Pool) -> Tensor:
        return mix(mothers.seed[:, None], mothers.key[:, None]).expand_as(mothers.tie)

    def choose(self, view: ForwardView) -> Choice:
        """Return K parents: the rows that are awake."""
        return Choice(awake_rows(view, self.call.settings.groups), view.width)

    @property
    def most(self) -> int:
        """How many children of a row compete: at temperature 0, those with its w best tokens."""
        return self.call.settings.w if self.call.settings.temperature == 0 else self.call.settings.width

    def step(self, view: ForwardView, now: Steps) -> tuple[Pool, Choice]:
        pool, choice, call = view.pool, self.choose(view), self.call
        assert pool.lost is not None
        rows = self.candidates(pool, view.hidden, now, choice)
        value, behind = rank_values(rows.state), call.after_end(rows.tokens, pool)
        shown = rows.tokens.masked_fill(behind, call.model.mask_id)
        complete = ((shown != call.model.mask_id) | behind).all(-1)

        # 1. The method keeps K children.
        index = torch.arange(rows.size - pool.size, device=value.device).view(choice.parents.shape[1], -1)
        index = index[:, : min(self.most, choice.children)].flatten().expand(len(value), -1)
        leaves = Leaves(value.gather(1, index), rows.tie.gather(1, index), pick(shown, index), call.model.mask_id)
        kept = index.gather(1, self.prune(leaves, call.settings.groups, pool.keys()))

        # 2. The best other rows sleep, except complete rows with the text of a better row.
        name = torch.where(complete, hash_tokens(shown, pool.positions[:, None]), rows.row_hash)
        others = value.scatter(1, kept, -torch.inf)
        order = ranked(value, rows.tie)
        repeat = repeats(name, order) & (others > -torch.inf)
        others = _only(others, ~repeat)
        gone = (others == -torch.inf).gather(1, order)
        asleep = order.gather(1, gone.to(torch.uint8).argsort(dim=-1, stable=True)[:, : kept.shape[1]])

        # 3. The next pool has an awake row, a sleeping row, an awake row, ...
        index = torch.stack([kept, asleep], 2).flatten(1)
        awake = torch.arange(index.shape[1], device=index.device) % 2 == 0
        exists = torch.where(awake, value.gather(1, index), others.gather(1, index)) > -torch.inf
        drawn = _only(rows.state["value"], rows.state["late"] == 0)
        lost = torch.maximum(pool.lost, drawn.scatter(1, index, -torch.inf).amax(-1))
        following = rows.take(index)
        following = replace(
            following,
            row_hash=_hashes(following.row_hash, exists),
            group=torch.arange(index.shape[1], device=index.device).expand(index.shape),
            state=following.state | {"value": _only(following.state["value"], exists)},
            awake=awake & exists,
            lost=lost.masked_fill((repeat & (drawn > -torch.inf)).any(-1), torch.nan),
        )
        return following, choice

    def candidates(self, pool: Pool, hidden: WindowHidden, step: Steps, choice: Choice) -> Pool:
        """Return a pool of all rows that may be in the next pool: the children, and then the rows that sleep."""
        assert pool.awake is not None
        awake, asleep = (pool.state | {"value": _only(pool.state["value"], x)} for x in (pool.awake, ~pool.awake))
        children = self.children(replace(pool, state=awake), hidden, step, choice)
        children.state["value"] = self.value(children)
        place = torch.arange(pool.size, device=pool.key.device).expand_as(pool.source)
        parts = children, replace(pool, source=place, state=asleep)
        tensors: dict[str, Any] = {name: torch.cat([getattr(part, name) for part in parts], 1) for name in ROWS}
        return replace(pool, **tensors, state={name: torch.cat([x.state[name] for x in parts], 1) for name in asleep})

    def value(self, children: Pool) -> Tensor:
        """Return the values [P, N] of the children of a step. At temperature 0, they are the joint log-probabilities of
        the tokens at their reveal, without those behind the end."""
        value = children.state["value"]
        if self.draw.temperature > 0:
            return value
        behind = self.call.after_end(children.tokens, children)
        return _only(steady_sum(children.logprob.masked_fill(behind, 0).to(wide(behind.device))), value > -torch.inf)

    def drop(self, pool: Pool, dead: Sequence[tuple[int, int]], prefixes: Mapping[tuple[int, int], Prefix]) -> Pool:
        """Return a pool without the rows `dead` and, at temperature 0, without rows that write the text of a better row
        in other tokens. The best sleeping rows wake up in their places."""
        assert pool.awake is not None and self.call.matchers is not None
        text = self.call.matchers.constraint.vocabulary.tokens.decode_bytes
        flags = torch.stack([pool.awake.long(), ranked(rank_values(pool.state), pool.tie)]).tolist()
        exists, gone, merges = (pool.state["value"] > -torch.inf).tolist(), set(dead), self.draw.temperature == 0
        awake, changed = flags[0], False
        for p, best_first in enumerate(flags[1]):
            texts, missing = set[bytes](), 0
            rows = [n for n in best_first if exists[p][n]]
            for n in [n for n in rows if awake[p][n]] + [n for n in rows if not awake[p][n]]:
                own = text(list(prefixes[p, n])) if merges and (p, n) in prefixes else None
                if (p, n) in gone or own in texts:
                    missing, exists[p][n] = missing + awake[p][n], False
                elif missing and not awake[p][n]:
                    missing, awake[p][n] = missing - 1, True
                texts.update([own] if own is not None and exists[p][n] else [])
                changed |= not exists[p][n]
        if not changed:
            return pool
        alive, running = (torch.tensor(flags, device=pool.key.device).bool() for flags in (exists, awake))
        state = pool.state | {"value": _only(pool.state["value"], alive)}
        return replace(pool, awake=running & alive, state=state)

    def settle(self, batch: Batch, facts: Sequence[Facts]) -> tuple[Pool, Sequence[Facts]]:
        """Compare the texts of complete rows. Drop those that repeat the text of a better row, and wake up sleeping
        rows if fewer than k rows are left."""
        pool, facts = super().settle(batch, facts)
        wake = [one.age < one.policy.most - one.policy.length for one in batch.turns]
        ended = [fact.done == fact.rows for fact in facts]
        before = [one.facts.done if one.facts else 0 for one in batch.turns]  # at the last comparison
        look = [i for i, fact in enumerate(facts) if (fact.done > before[i] and fact.done > 1) or ended[i]]
        if not look or pool.awake is None or pool.lost is None:
            return pool, facts
        at = torch.tensor(look, device=pool.key.device)
        part = pool.keep(at)
        texts, value, late = (
            Texts(self.call, part, batch.rows.prompts.take(at)),
            part.state["value"],
            part.state["late"] > 0,
        )
        complete = ~part.undecided.any(-1)
        order = ranked(rank_values(part.state), part.tie)
        flags = torch.stack([x.to(torch.int64) for x in (pool.awake[at], value > -torch.inf, complete, late, order)])
        awake, exists, done, is_late, best_first = flags.tolist()
        changed, weightless = False, [False] * len(look)
        for p in range(len(look)):
            kinds, missing = set[str](), self.call.settings.k
            rows = [n for n in best_first[p] if exists[p][n]]
            for n in [n for n in rows if awake[p][n]] + [n for n in rows if not awake[p][n]]:
                if not awake[p][n] and (missing <= 0 or not (wake[look[p]] or done[p][n])):
                    continue
                repeat = done[p][n] and texts.kind(p, n) in kinds
                changed |= bool(repeat or not awake[p][n])
                weightless[p] |= bool(repeat and not is_late[p][n])
                awake[p][n], exists[p][n], missing = not repeat, not repeat, missing - (not repeat)
                kinds.update([texts.kind(p, n)] if done[p][n] else [])
        if not changed:
            return pool, facts
        new_awake, new_value, lost = pool.awake.clone(), pool.state["value"].clone(), pool.lost.clone()
        flags = torch.tensor([awake, exists], device=at.device, dtype=torch.bool)
        new_awake[at], new_value[at] = flags[0], _only(value, flags[1])
        lost[at] = lost[at].masked_fill(torch.tensor(weightless, device=at.device), torch.nan)
        pool = replace(pool, awake=new_awake, state=pool.state | {"value": new_value}, lost=lost)
        return pool, batch.facts(pool)

    def finish(self, final: Final, k: int) -> Kept:
        """Return the k awake rows with the best scores. Rows with equal scores (the children of one parent) are ordered
        by their values, and places without an answer come last."""
        pool, call = final.pool, self.call
        assert pool.awake is not None and pool.lost is not None
        score = torch.where(pool.awake, self.score(final), torch.nan)
        order = ranked(rank_values(pool.state), pool.row_hash)
        rows = order.gather(1, ranked(score.gather(1, order)))[:, : call.settings.k]
        exists = pool.awake.gather(1, rows)
        tokens = pool.tokens.masked_fill(call.after_end(pool.tokens, pool), call.model.mask_id)
        similarity = token_kernel(pick(tokens, rows), call.model.mask_id)
        late, more = pool.state["late"] > 0, dict[str, Tensor]()
        for name, values in (("perturbed", pool.state["value"]), ("logp", pool.state["phi"])):
            more[name] = torch.where(exists, values.masked_fill(late, -torch.inf).gather(1, rows), torch.nan)
        others = pool.state["value"].masked_fill(late, -torch.inf).scatter(1, rows, -torch.inf)
        more["kappa"] = torch.maximum(pool.lost, others.amax(-1))
        return Kept(rows, score.gather(1, rows), exists, similarity, more)

    def score(self, final: Final) -> Tensor:
        """Return the scores [P, N] by which the answers are sorted."""
        return final.shown


def awake_rows(view: ForwardView, count: int) -> Tensor:
    """Return `count` rows [P, count]: those that are awake or, if these are too few, sleeping rows too."""
    assert view.awake is not None
    return (~view.awake).to(torch.uint8).argsort(dim=-1, stable=True)[:, :count].sort(-1).values


def rank_values(state: Mapping[str, Tensor]) -> Tensor:
    """Return the values [P, N] by which rows are ranked. Late rows come behind all others."""
    return state["value"] - LATE * state["late"]


def _hashes(row_hash: Tensor, exists: Tensor) -> Tensor:
    """Return the hashes [P, N] with another hash for each place without a row, so that it equals no row."""
    place = torch.arange(row_hash.shape[1], device=row_hash.device)
    return torch.where(exists, row_hash, mix(row_hash, place, -1))


def _only(values: Tensor, wanted: Tensor) -> Tensor:
    return values.masked_fill(~wanted, -torch.inf)


@dataclass(frozen=True)
class Tree(Checked, TreeSearch):
    """Keeps every row that was run, and prunes the children before they are run."""

    pure = timeless = True

    diversity: Annotated[float, Option("Weight of diversity among branches; 0 keeps the best.", least=0)] = 0.0

    def cost(self, settings: Settings, steps: int) -> tuple[int, int]:
        """Return 0, because no step runs more pools, and the candidates times the starts of the greedy search."""
        k = settings.groups
        return 0, 0 if self.diversity == 0 else SHORTLIST * k * (k if k <= MOST_STARTS else 1)

    def prune(self, leaves: Leaves, k: int, key: Tensor) -> Tensor:
        """Return the indices [P, k] of the leaves that are kept. Leaves without a row have the value -inf."""
        order = ranked(leaves.value, leaves.tie)
        if self.diversity == 0 or k == 1:
            return order[:, :k]
        order = order[:, : SHORTLIST * k]
        value, tie = leaves.value.gather(1, order), leaves.tie.gather(1, order)
        exists = value > -torch.inf
        similarity = self.similarity(leaves, order)
        similarity = torch.where(exists[:, :, None] & exists[:, None, :], similarity, 0.0)
        similarity = similarity.diagonal_scatter(torch.ones_like(value, dtype=similarity.dtype), 0, 1, 2)
        # A place without a row is chosen only if there are fewer than k rows: it is far worse than the worst row.
        least = torch.where(exists, value, torch.inf).amin(-1, keepdim=True).nan_to_num(posinf=0)
        gain = torch.where(exists, value, least - 1e4 * (1 + self.diversity)) / self.diversity
        starts: Literal["k", "one"] = "k" if k <= MOST_STARTS else "one"
        chosen = map_inference(similarity, k, gain, None, tie, starts=starts, local_search=False)
        return order.gather(1, chosen)

    def similarity(self, leaves: Leaves, order: Tensor) -> Tensor:
        """Return the similarity [P, n, n] of the leaves with the indices order [P, n]."""
        return token_kernel(leaves.rows(order), leaves.mask_id)
