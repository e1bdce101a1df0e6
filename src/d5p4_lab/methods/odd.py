"""ODD, orthogonal diverse diffusion (Lamont et al., 2026, arXiv 2603.04893): rows that push each other apart.

The K rows of a prompt are decoded like independent answers, but before tokens are drawn, the logits x of each row move
along a gradient, away from the rows before it. With p = softmax(x) at the open positions M of a row:

    r(t) = 1 if the row has revealed token t, else max over M of p(t);    v = r / |r|         (the features of the row)
    u_k  = v_k - Σ_{j<k} (v_k · u_j) u_j, scaled to length 1                         (Gram-Schmidt; held constant below)
    loss = -(v · u) q,    q = mean over M of max_t p(t)
    x    -= alpha (1 - s/S) g / max over M of |g|,    g = ∂loss/∂x, but 0 at end-of-text

at step s of S. Under adaptive rules, s/S is the share of positions that are no longer open. The first row never moves.
The gradient needs no autograd. With a = q (u - (v · u) v) / |r|, the entry t of -a goes to the position with the
largest p(t), unless t is revealed, and -(v · u) / |M| goes to the top token of each position. If G has these entries,
g = p (G - Σ_t G p).

The orders and reveal rules see the shifted logits, as in the paper. Scores and log-probabilities of answers are those
of the model. M has the open positions of the block, so with blocks, later blocks do not count.

Rows that equal earlier rows (all rows, at the first step) have no direction u of their own. In the authors' code, which
runs in half precision, rounding errors give them one. Here, a row whose remainder is shorter than 1e-6 takes the
remainder of v ξ, where ξ is uniform noise in (-1, 1), keyed like every draw.

The paper's figures are in `bench.rivals`.
The time is O(K M V) per step, and the logits [K, M, V] of all rows of a prompt are in memory, several times.
"""

from collections.abc import Collection
from dataclasses import dataclass, fields
from typing import Annotated, Any

import torch
from torch import Tensor

from d5p4 import Choice, D5P4Error, Option, Settings, Step
from d5p4.decode.pool import Pool, pick
from d5p4.decode.schedule import Steps
from d5p4.ops.precision import steady_sum, wide
from d5p4.ops.sample import plain_draw
from d5p4.ops.ties import coarse
from d5p4.ops.vocab import over_chunks
from d5p4.options import Checked
from d5p4.rng import SELECT, uniform
from d5p4.search import Identity
from d5p4.search.children import Draw, Parents

CHUNK = 1 << 26  # at most this many logits are shifted at once, except that the rows of a prompt stay together
SHORTEST = 1e-6  # a remainder below this length has no direction
LEAST_NORM = 1e-8  # a gradient below this norm is divided by this number


@dataclass(frozen=True)
class Undrawn:
    """The rows of P prompts before their tokens are drawn, with their logits."""

    logits: Tensor  # [P, m, M, V] of M positions of each row, at temperature 1; minus infinity at banned ids
    open: Tensor  # [P, m, M] bool, the positions that are open; the others are padding
    tokens: Tensor  # [P, m, L] the window of each row
    group: Tensor  # [P, m] the number of each row's beam
    stream: Tensor  # [P, m] seeds of random numbers, which no other draw uses
    done: Tensor | float  # [P] or a number: the share of the steps (under adaptive rules, of the positions) behind us
    mask_id: int
    ends: Tensor  # [n] the ids of end-of-text


@dataclass(frozen=True)
class ODD(Checked, Identity):
    """Selects nothing. Before tokens are drawn, the logits of each row move away from the rows of earlier beams."""

    separates, timeless, constrains = True, False, False

    alpha: Annotated[float, Option("Size of the step away from the other answers.", least=0)] = 16.0

    def check(self, settings: Settings) -> None:
        """Raise an error if the order draws positions before it has logits."""
        if settings.order == "ancestral":
            reason = "chooses positions by chance, but method odd shifts the logits of all; use another, such as top"
            raise D5P4Error(reason, option="order", value=settings.order)

    def phase(self, step: Step, name: int) -> Any:
        return step.most, *super().phase(step, name)

    def drawing(self, pool: Pool, choice: Choice, parents: Parents, step: Steps) -> Draw:
        """Return a draw from shifted logits."""
        draw, one = super().drawing(pool, choice, parents, step), step.by_prompt[0]
        own: dict[str, Any] = {field.name: getattr(draw, field.name) for field in fields(Draw)}
        adaptive = self.call.settings.adaptive
        done = pool.progress(torch.get_default_dtype()) if adaptive else one.index / one.most
        tokens = parents.tokens.masked_fill(pool.positions[:, None] < 0, self.draw.mask_id)
        rows = tokens, pick(pool.group, choice.parents), parents.keyed(SELECT)
        return ShiftedDraw(**own, method=self, rows=rows, done=done, ends=self.call.end_ids)

    def shift(self, rows: Undrawn) -> Tensor:
        """Return what to add to the logits, [P, m, M, V]."""
        done = rows.done.view(-1, 1, 1, 1).to(rows.logits.dtype) if isinstance(rows.done, Tensor) else rows.done
        return gradient(rows).mul_(self.alpha * (done - 1))


def gradient(rows: Undrawn) -> Tensor:
    """Return the gradient [P, m, M, V] of the loss of each row, divided by its largest norm at a position."""
    p = rows.logits.softmax(-1).masked_fill(~rows.open[..., None], 0.0)
    # Values within rounding errors count as equal: then the first position, or the lowest id, wins.
    place, top = coarse(p).argmax(2, keepdim=True), coarse(p).argmax(3, keepdim=True)  # [P, m, 1, V], [P, m, M, 1]
    shown = torch.zeros_like(p[:, :, 0], dtype=torch.bool).scatter(2, rows.tokens, True)
    shown[..., rows.mask_id] = False
    pooled = p.gather(2, place).squeeze(2).masked_fill(shown, 1.0).to(wide(p.device))
    length = norm(pooled)[..., None]
    features, count = pooled / length, rows.open.sum(-1, keepdim=True).clamp_min(1)
    noise = 2 * uniform(rows.stream[..., None], torch.arange(p.shape[-1], device=p.device)) - 1
    unit = directions(features, rows.group, features * noise * rows.open.any(-1, keepdim=True))
    unit = unit.masked_fill((rows.group == rows.group.amin(-1, keepdim=True))[..., None], 0.0)
    along = steady_sum(features * unit)[..., None]
    sure = steady_sum(p.gather(-1, top).squeeze(-1).to(unit.dtype))[..., None] / count
    pull = (sure * (unit - along * features) / length).masked_fill(shown, 0.0)
    slope = torch.zeros_like(p).scatter_(2, place, -pull.to(p.dtype)[:, :, None])
    slope.scatter_add_(3, top, (-along / count).to(p.dtype)[..., None].expand(top.shape))
    slope = p.mul_(slope - steady_sum(slope * p)[..., None]).index_fill_(3, rows.ends, 0.0)
    return slope.div_(norm(slope).amax(-1).clamp_min(LEAST_NORM)[..., None, None])


def directions(features: Tensor, group: Tensor, spare: Tensor) -> Tensor:
    """Return the directions u [P, m, V] of rows with unit features [P, m, V]: the remainders of Gram-Schmidt in the
    order of `group`, as unit vectors. A row without remainder takes that of its spare vector [P, m, V] or, if this has
    none either, zeros."""
    order = group.argsort(-1)
    prompt = torch.arange(len(group), device=group.device)
    unit = torch.zeros_like(features)
    for number in range(group.shape[1]):
        row = order[:, number]
        rest, other = (remainder(x[prompt, row], unit) for x in (features, spare))
        rest = torch.where(norm(rest)[:, None] > SHORTEST, rest, other)
        length = norm(rest)[:, None]
        unit[prompt, row] = (rest / length).masked_fill(length <= SHORTEST, 0.0)
    return unit


def remainder(x: Tensor, unit: Tensor) -> Tensor:
    """Return x [P, V] without its projections on the orthonormal or zero vectors unit [P, m, V]."""
    for _ in range(2):  # the second round removes the rounding errors of the first
        x = x - steady_sum(steady_sum(unit * x[:, None])[..., None] * unit, 1)
    return x


def norm(x: Tensor) -> Tensor:
    return steady_sum(x.square()).sqrt()


@dataclass(frozen=True, kw_only=True)
class ShiftedDraw(Draw):
    """Draws tokens from shifted logits."""

    method: ODD
    rows: tuple[Tensor, Tensor, Tensor]  # tokens, group and stream of `Undrawn`
    done: Tensor | float
    ends: Tensor

    def at(
        self,
        parents: Parents,
        place: Tensor,
        opened: Tensor | None,
        u: Tensor,
        temperature: float,
        statistics: Collection[str],
    ) -> dict[str, Tensor]:
        head, parts = self.head, []
        states = parents.read_table(place, lambda states: {"states": states})["states"].view(*place.shape, -1)
        how = temperature, self.filters, statistics
        opened = torch.ones_like(u[..., 0], dtype=torch.bool) if opened is None else opened
        size = max(1, CHUNK // max(1, opened[:1].numel() * len(head.banned)))
        for start in range(0, max(1, len(states)), size):
            part = slice(start, start + size)
            logits = over_chunks(_logits, states[part].flatten(0, 2), head, None)["logits"]
            done = self.done[part] if isinstance(self.done, Tensor) else self.done
            tokens, group, stream = (x[part] for x in self.rows)
            where = logits.view(*opened[part].shape, -1), opened[part], tokens, group, stream, done
            shift = self.method.shift(Undrawn(*where, self.mask_id, self.ends)).flatten(0, 2)
            token, stats = plain_draw(logits + shift, head.banned, u[part].flatten(0, 2), how)
            stats["token_logprob"] = logits.gather(-1, token) - logits.logsumexp(-1, keepdim=True)
            parts.append(stats | {"drawn": token})
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def _logits(logits: Tensor, offset: Tensor | None, given: None) -> dict[str, Tensor]:
    return {"logits": logits if offset is None else logits.float() + offset}
