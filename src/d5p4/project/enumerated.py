"""Enumerated children: the branches of a tree, in which all rows differ.

From one forward, the reveal rule accepts positions, which take their most probable token. The next position of the
order branches: every child takes another of its tokens. The position depends on the row alone and never on a draw, so
a partial row has one path from the root, and all rows of a tree differ.

Temperature 0: the children take the most probable tokens. Temperature T > 0: every token v of the filtered vocabulary
competes (stochastic beam search, Kool et al. 2019). With φ = the parent's log-probability, q = the distribution of the
draw at temperature T, G = the parent's perturbed value, and Gumbel noise g_v:

    φ_v = φ + log q(v),    G̃_v = φ_v + g_v,    Z = max_v G̃_v,    G_v = -log(e^-G - e^-Z + e^-G̃_v)

So the largest G_v equals G, and the K largest values of all leaves are K draws without replacement. Accepted tokens
count as certain: they do not change φ. The noise is keyed by the tokens of the child.

Besides, each row has alternatives for the reserve of a prompt: children that take another token at one of their
PLACES least sure accepted positions. The accepted positions before it take their tokens, and those behind it stay
masked. At T > 0 the law gives these children probability 0, so they and their descendants are marked as `late`: they
rank behind all others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..ops.precision import wide
from ..ops.sample import filter_logits
from ..ops.ties import coarse
from ..ops.vocab import chunk_rows, over_chunks
from ..rng import BRANCH, hash_tokens, mix, uniform
from .children import Candidates, Children, Draw, Parents, candidates

if TYPE_CHECKING:
    from ..decode.schedule import Step

PLACES, OTHERS = 2, 3  # how many accepted positions have alternatives, and how many other tokens each has
STATE = ("value", "phi", "late")  # what a tree keeps for every row
_CHUNK = 1 << 22  # at most this many numbers are in one temporary tensor


def enumerated(parents: Parents, step: Step, draw: Draw, count: int) -> Children:
    """Return `count` children per parent, and then the alternatives. Places without a child have the value -inf."""
    seen = candidates(parents, step, draw, 1, 0.0, ("best", "margin"))
    assert seen.accepted is not None and seen.valid is not None
    base = seen.reveal(parents, seen.accepted)
    still_open = parents.opened(base.tokens).gather(3, seen.place)  # an accepted end-of-text token may close positions
    waiting = seen.valid & ~seen.accepted & still_open
    branches = waiting.any(-1)  # [P, m, 1]
    where = seen.place.gather(3, waiting.to(torch.uint8).argmax(-1, keepdim=True))  # [P, m, 1, 1]
    stream = mix(parents.keyed(BRANCH), hash_tokens(base.tokens[:, :, 0], parents.positions[:, None]))
    token, chance, value, phi = _branch(parents, draw, where[:, :, :, 0], stream, count)
    old_value, old_phi, late = (parents.state[name][..., None] for name in STATE)
    only = torch.arange(count, device=token.device) == 0  # without a position to branch, the first child is the row
    value = torch.where(branches, value, torch.where(only, old_value, -torch.inf))
    phi = torch.where(branches, phi, old_phi)
    where, shape = where.expand(-1, -1, count, -1), (*token.shape, base.tokens.shape[-1])
    token = torch.where(branches, token, 0)[..., None]
    rows, logprob = base.tokens.expand(shape), base.logprob.expand(shape)
    tokens = torch.where(branches[..., None], rows.scatter(3, where, token), rows)
    chances = torch.where(branches[..., None], logprob.scatter(3, where, chance[..., None].to(logprob.dtype)), logprob)
    others = _alternatives(parents, draw, seen, base.tokens, stream)
    parts = zip((tokens, chances, value, phi, late.expand_as(value)), others, strict=True)
    tokens, chances, value, phi, late = (torch.cat(pair, 2) for pair in parts)
    value = value.masked_fill(old_value == -torch.inf, -torch.inf)
    return Children(tokens, chances, base.finite, {"value": value, "phi": phi, "late": late})


def _branch(
    parents: Parents, draw: Draw, place: Tensor, stream: Tensor, count: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return token, log-probability, value and φ [P, m, count] of the best tokens at one position [P, m, 1] per row."""
    state = [parents.state[name].flatten() for name in ("value", "phi")]
    given = torch.arange(stream.numel(), device=stream.device)[:, None]  # the number of each row

    def measure(logits: Tensor, number: Tensor) -> dict[str, Tensor]:
        value, phi = (x[number[:, 0]][:, None] for x in state)
        if draw.temperature == 0:
            best, token = _top(filter_logits(logits, draw.top_k, draw.top_p), count)
            value = value.expand_as(best).masked_fill(best == -torch.inf, -torch.inf)
            phi = phi.expand_as(best)
        else:
            log_q = draw_chances(logits, draw)
            noise = gumbel_noise(stream.flatten()[number], torch.arange(logits.shape[-1], device=logits.device))
            best, token = _top(phi + log_q + noise, count)
            value = conditional_maximum(value, best)
            phi = phi + log_q.gather(1, token)
        chance = logits.gather(1, token) - logits.logsumexp(-1, keepdim=True)
        return {"token": token, "chance": chance, "value": value, "phi": phi}

    result = _measure(parents, draw, place, given, measure)
    names = ("token", "chance", "value", "phi")
    return tuple(result[name].view(*stream.shape, count) for name in names)  # type: ignore[return-value]


def draw_chances(logits: Tensor, draw: Draw) -> Tensor:
    """Return log q [R, V], the log-probabilities with which `draw` draws tokens: with temperature and filters."""
    tempered = (logits - logits.amax(-1, keepdim=True)).to(wide(logits.device)) / draw.temperature
    return filter_logits(tempered, draw.top_k, draw.top_p).log_softmax(-1)


def conditional_maximum(value: Tensor, perturbed: Tensor) -> Tensor:
    """Return G_v from the parent's G [R, 1] and G̃_v [R, C], largest first, so that the first result is G itself.

    The stable form: with d = Z - G̃_v and u = G - G̃_v + log(1 - e^-d), G_v = G - max(u, 0) - log(1 + e^-|u|).
    """
    behind = perturbed.amax(-1, keepdim=True) - perturbed
    u = (
        value
        - perturbed
        + torch.where(behind > 0.7, torch.log1p(-torch.exp(-behind)), torch.log(-torch.expm1(-behind)))
    )
    result = value - u.clamp_min(0) - torch.log1p(torch.exp(-u.abs()))
    return torch.where(behind == 0, value, result.masked_fill(perturbed == -torch.inf, -torch.inf))


def gumbel_noise(stream: Tensor, number: Tensor | int) -> Tensor:
    """Return Gumbel noise from 64 random bits: 32 would leave out tokens of a probability below 2^-33."""
    high, low = uniform(stream, number, 0), uniform(stream, number, 1)
    return -torch.log(-torch.log1p(-(high - 2**-33 + low / 2**32).clamp(2**-64, 1 - 2**-24)))


def _alternatives(
    parents: Parents, draw: Draw, seen: Candidates, base: Tensor, stream: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return tokens and log-probabilities [P, m, a, L], values, φ and late [P, m, a] of the alternatives of each row.

    base [P, m, 1, L]: the rows after acceptance. A position behind their end-of-text has no alternative.
    """
    assert seen.accepted is not None
    blank = base.scatter(3, seen.place, draw.mask_id)  # behind the end of the text, a masked position is not open
    before_end = parents.opened(torch.where(parents.ends(base), base, blank)) | parents.ends(base)
    accepted = (seen.accepted & before_end.gather(3, seen.place))[:, :, 0]  # [P, m, M]
    chance = seen.chance[:, :, 0]
    size = min(PLACES, accepted.shape[-1])
    number = torch.arange(accepted.shape[-1], device=accepted.device)
    paid = torch.where(accepted, chance, 0.0).to(wide(chance.device))
    before = paid.cumsum(-1) - paid
    second = (seen.stats["best"].exp() - seen.stats["margin"])[:, :, 0].clamp_min(0).log()
    worth = coarse((before + second).masked_fill(~accepted, -torch.inf))
    at = worth.sort(dim=-1, descending=True, stable=True).indices[..., :size]  # [P, m, a] in the sequence of the order
    place = seen.place[:, :, 0].gather(2, at)

    def measure(logits: Tensor, given: Tensor) -> dict[str, Tensor]:
        best, token = _top(filter_logits(logits, draw.top_k, draw.top_p), OTHERS + 1)
        chance = logits.gather(1, token) - logits.logsumexp(-1, keepdim=True)
        return {"token": token[:, 1:], "chance": chance.masked_fill(best == -torch.inf, -torch.inf)[:, 1:]}

    result = _measure(parents, draw, place, place.reshape(-1, 1), measure)
    token, own = (
        result[name].view(*place.shape[:2], size * OTHERS) for name in ("token", "chance")
    )  # [P, m, a * OTHERS]
    at, place = (x.repeat_interleave(OTHERS, -1) for x in (at, place))
    prefix = accepted[:, :, None] & (number < at[..., None])  # [P, m, a * OTHERS, M]
    children = seen.expand(prefix.shape[2]).reveal(parents, prefix)
    usable = accepted.gather(2, at) & (own > -torch.inf)
    own = torch.where(usable, own, 0.0)
    tokens = children.tokens.scatter(3, place[..., None], token[..., None])
    logprob = children.logprob.scatter(3, place[..., None], own[..., None].to(children.logprob.dtype))
    value, phi, late = (parents.state[name][..., None].expand(place.shape) for name in STATE)
    if draw.temperature > 0:
        phi = phi + own
        value, late = phi + gumbel_noise(mix(stream[..., None], place), token), torch.ones_like(late)
    return tokens, logprob, value.masked_fill(~usable, -torch.inf), phi, late


def _measure(
    parents: Parents, draw: Draw, place: Tensor, given: Tensor, measure: Callable[[Tensor, Tensor], dict[str, Tensor]]
) -> dict[str, Tensor]:
    """Call measure(logits, given) on the logits at the window positions place [P, m, c] of the parents, in chunks."""
    states, head = parents.states[parents.slot[..., None], place].flatten(0, 2), draw.head

    def in_parts(logits: Tensor, offset: Tensor | None, given: Tensor) -> dict[str, Tensor]:
        size = chunk_rows(logits.shape[-1], _CHUNK)
        parts = [
            measure(part if offset is None else part.float() + offset, some)
            for part, some in zip(logits.split(size), given.split(size), strict=True)
        ]
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}

    return over_chunks(in_parts, states, head.weight, head.bias, head.banned, given, head.fixed)


def _top(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the `count` largest values [R, count] and their tokens. Of values that tie, the lowest token comes first.

    If there are fewer tokens, minus infinity fills the places.
    """
    size = values.shape[-1]
    keys = coarse(values.to(wide(values.device))) - 2e-15 * torch.arange(size, device=values.device)
    token = keys.topk(min(count, size), -1).indices
    best = values.gather(1, token)
    if count > size:
        best = torch.nn.functional.pad(best, (0, count - size), value=-torch.inf)
        token = torch.nn.functional.pad(token, (0, count - size))
    return best, token
