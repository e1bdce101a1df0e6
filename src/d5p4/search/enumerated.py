"""Enumerated children: the branches of a tree, in which all rows differ.

From one forward, the reveal rule accepts positions, which take their most probable token. The next position of the
order branches: each child takes a different token there. The position depends on the row alone, never on a draw, so
a partial row has one path from the root, and all rows of a tree differ.

Temperature 0: the children take the most probable tokens. Temperature T > 0: every token v of the filtered vocabulary
competes (stochastic beam search, Kool et al. 2019). With φ = the parent's log-probability, q = the distribution of the
draw at temperature T, G = the parent's perturbed value, and Gumbel noise g_v:

    φ_v = φ + log q(v),    G̃_v = φ_v + g_v,    Z = max_v G̃_v,    G_v = -log(e^-G - e^-Z + e^-G̃_v)

So the largest G_v equals G, and the K largest values of all leaves are K draws without replacement from a sampler that
gives accepted positions their top token and draws the token of the next position. Accepted tokens count as certain:
they do not change φ. The noise is keyed by the tokens of the child.

In addition, each row has alternatives for the reserve of a prompt: children that take another token at one of their
accepted positions. The accepted positions before it in the order take their tokens, and those behind it stay masked. At
T > 0 the law gives these children probability 0. And if the position lies behind an accepted end-of-text token, the
child most likely has the text of its parent. Either makes a row `late`: it ranks behind all rows that are less late.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from ..decode.schedule import Steps
from ..ops.precision import wide
from ..ops.sample import filter_logits
from ..ops.ties import coarse
from ..ops.vocab import chunk_rows, over_chunks
from ..rng import BRANCH, hash_tokens, mix, uniform
from .children import Candidates, Children, Draw, Parents, candidates

STATE = ("value", "phi", "late")  # what a tree keeps for every row
LATE = 1e6  # what a late row loses in rank; the value of every other row is above -LATE
_CHUNK = 1 << 22  # at most this many numbers are in one temporary tensor


def enumerated(parents: Parents, step: Steps, draw: Draw, count: int) -> Children:
    """Return `count` branches and `draw.reserve` alternatives of each parent. Places without a child have the value
    -inf."""
    seen = candidates(parents, step, draw, 1, 0.0, ("best",))
    parents = replace(parents, masks=seen.masks)
    base = seen.reveal(parents, seen.accepted)  # the parents with their accepted tokens, [P, m, 1, L]
    stream = mix(parents.keyed(BRANCH), hash_tokens(base.tokens[:, :, 0], parents.positions[:, None]))
    parts = [_branches(parents, draw, seen, base, stream, count)]
    parts += [_alternatives(parents, draw, seen, base, stream)] if draw.reserve else []
    tokens, logprob = (torch.cat([getattr(part, name) for part in parts], 2) for name in ("tokens", "logprob"))
    state = {name: torch.cat([part.state[name] for part in parts], 2) for name in parts[0].state}
    state["value"] = state["value"].masked_fill(parents.state["value"][..., None] == -torch.inf, -torch.inf)
    return base._replace(tokens=tokens, logprob=logprob, state=state)


def _branches(parents: Parents, draw: Draw, seen: Candidates, base: Children, stream: Tensor, count: int) -> Children:
    """Return the `count` best children of each row. A row without a position to branch is its own only child."""
    assert seen.accepted is not None and seen.valid is not None
    still_open = parents.opened(base.tokens).gather(3, seen.place)  # an accepted end-of-text token may close positions
    waiting = seen.valid & ~seen.accepted & still_open
    branches = waiting.any(-1)  # [P, m, 1]
    place = seen.place.gather(3, waiting.to(torch.uint8).argmax(-1, keepdim=True))  # [P, m, 1, 1]
    old = {name: parents.state[name].flatten() for name in STATE}
    number = torch.arange(stream.numel(), device=stream.device)[:, None]  # the number of each row

    def measure(logits: Tensor, number: Tensor) -> dict[str, Tensor]:
        value, phi = (old[name][number] for name in ("value", "phi"))
        if draw.temperature == 0:
            best, token = _top(filter_logits(logits, *draw.filters), count)
            value, phi = value.expand_as(best).masked_fill(best == -torch.inf, -torch.inf), phi.expand_as(best)
        else:
            log_q = draw_chances(logits, draw)
            noise = gumbel_noise(stream.flatten()[number], torch.arange(logits.shape[-1], device=logits.device))
            best, token = _top(phi + log_q + noise, count)
            value, phi = conditional_maximum(value, best), phi + log_q.gather(1, token)
        return {"token": token, "token_logprob": logits.log_softmax(-1).gather(1, token), "value": value, "phi": phi}

    result = _measure(parents, draw, place[:, :, :, 0], number, measure)
    new = {name: x.view(*stream.shape, count) for name, x in result.items() if name != "allowed"}
    own = torch.arange(count, device=stream.device) == 0  # the place of the only child
    value = torch.where(own, parents.state["value"][..., None], -torch.inf)
    phi, late = (parents.state[name][..., None].expand_as(value) for name in ("phi", "late"))
    state = {"value": torch.where(branches, new["value"], value), "phi": torch.where(branches, new["phi"], phi)}
    tokens, logprob = (x.expand(-1, -1, count, -1) for x in (base.tokens, base.logprob))
    place, here = place.expand(-1, -1, count, -1), branches[..., None]
    token_logprob = new["token_logprob"][..., None].to(logprob.dtype)
    return base._replace(
        tokens=tokens.scatter(3, place, torch.where(here, new["token"][..., None], tokens.gather(3, place))),
        logprob=logprob.scatter(3, place, torch.where(here, token_logprob, logprob.gather(3, place))),
        state=seen.carried(parents, seen.valid.expand(-1, -1, count, -1)) | state | {"late": late},
    )


def draw_chances(logits: Tensor, draw: Draw) -> Tensor:
    """Return log q [R, V], the log-probabilities with which `draw` draws tokens: with temperature and filters."""
    tempered = (logits - logits.amax(-1, keepdim=True)) / draw.temperature
    return filter_logits(tempered, *draw.filters).log_softmax(-1)


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


def _alternatives(parents: Parents, draw: Draw, seen: Candidates, base: Children, stream: Tensor) -> Children:
    """Return the `draw.reserve` most probable alternatives of each row, those behind the end of the text last.

    Only `draw.reserve` positions are tried: the accepted ones of which the model is least sure."""
    assert seen.accepted is not None
    places, ends = seen.place[:, :, 0], parents.ends(base.tokens).gather(3, seen.place)[:, :, 0]  # [P, m, M]
    end = torch.where(seen.accepted[:, :, 0] & ends, places, base.tokens.shape[-1])  # where a text may end
    ended = places > torch.nn.functional.pad(end, (1, -1), value=base.tokens.shape[-1]).cummin(-1).values
    accepted, behind = seen.accepted[:, :, 0] & ~ended, places > end.amin(-1, keepdim=True)
    paid = torch.where(accepted, seen.token_logprob[:, :, 0], 0.0).to(wide(stream.device))  # [P, m, M]
    before, last = paid.cumsum(-1) - paid, LATE * behind
    doubt = coarse(-paid - last).masked_fill(~accepted, -torch.inf)
    at = doubt.sort(dim=-1, descending=True, stable=True).indices[..., : draw.reserve]  # indices into the sequence
    place = places.gather(2, at)

    def measure(logits: Tensor, number: Tensor) -> dict[str, Tensor]:
        best, token = _top(filter_logits(logits, *draw.filters), draw.reserve + 1)
        token_logprob = logits.log_softmax(-1).gather(1, token).masked_fill(best == -torch.inf, -torch.inf)
        return {"token": token[:, 1:], "token_logprob": token_logprob[:, 1:]}

    pairs = _measure(parents, draw, place, place.reshape(-1, 1), measure)  # of a position and a token
    token, token_logprob = (pairs[name].view(*place.shape, draw.reserve) for name in ("token", "token_logprob"))
    priority = token_logprob + (before - last).masked_fill(~accepted, -torch.inf).gather(2, at)[..., None]
    best = coarse(priority.flatten(2)).sort(dim=-1, descending=True, stable=True).indices[..., : draw.reserve]
    token, token_logprob, priority = (x.flatten(2).gather(2, best) for x in (token, token_logprob, priority))
    at, place = (x.gather(2, best // draw.reserve) for x in (at, place))
    usable = priority > -torch.inf
    token_logprob = torch.where(usable, token_logprob, 0.0)
    prefix = accepted[:, :, None] & (torch.arange(accepted.shape[-1], device=at.device) < at[..., None])
    children = seen.expand(best.shape[-1]).reveal(parents, prefix)
    value, phi, late = (parents.state[name][..., None].expand(place.shape) for name in STATE)
    late = late + behind.gather(2, at)
    if draw.temperature > 0:
        phi, late = phi + token_logprob, late + 1
        value = phi + gumbel_noise(mix(stream[..., None], place), token)
    return base._replace(
        tokens=children.tokens.scatter(3, place[..., None], token[..., None]),
        logprob=children.logprob.scatter(3, place[..., None], token_logprob[..., None].to(children.logprob.dtype)),
        state=seen.carried(parents, prefix | (at[..., None] == torch.arange(prefix.shape[-1], device=at.device)))
        | {"value": value.masked_fill(~usable, -torch.inf), "phi": phi, "late": late},
    )


def _measure(
    parents: Parents, draw: Draw, place: Tensor, given: Tensor, measure: Callable[[Tensor, Tensor], dict[str, Tensor]]
) -> dict[str, Tensor]:
    """Call measure(logits, given) on the logits at the window positions place [P, m, c] of the parents, in chunks.

    The logits are in the widest float type, in which the batch changes sums over the vocabulary by less than 1e-9."""

    def in_parts(logits: Tensor, offset: Tensor | None, given: Tensor) -> dict[str, Tensor]:
        size, dtype = chunk_rows(logits.shape[-1], _CHUNK), wide(logits.device)
        parts = [
            measure(part.to(dtype) if offset is None else part.to(dtype) + offset, some)
            for part, some in zip(logits.split(size), given.split(size), strict=True)
        ]
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}

    return parents.read_table(place, lambda states, *more: over_chunks(in_parts, states, draw.head, *more), given)


def _top(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the `count` largest values [R, count] and their tokens. Of values that tie, the lowest token comes first.

    If there are fewer tokens, minus infinity fills the places.
    """
    size = values.shape[-1]
    behind = coarse(values - values.amax(-1, keepdim=True))  # close to 0, floats are so dense that tokens can decide
    token = (behind - 2e-15 * torch.arange(size, device=values.device)).topk(min(count, size), -1).indices
    best, missing = values.gather(1, token), max(0, count - size)
    pad = torch.nn.functional.pad
    return pad(best, (0, missing), value=-torch.inf), pad(token, (0, missing))
