"""The ancestral rule of MDLM: a step from time t to s < t fills each masked position with chance (t - s)/t.

The positions to unmask are drawn first, so that the output head runs only at these positions (about L/steps per child).
"""

from functools import partial

import torch

from ..decode.schedule import Steps
from ..rng import ORDER, TOKEN, uniform
from .children import Children, Draw, Parents


def ancestral(parents: Parents, step: Steps, draw: Draw, count: int) -> Children:
    """Return `count` children of each parent, drawn by the ancestral rule."""
    masked, move = step.block(parents.open), step.move
    child = torch.arange(count, device=masked.device)[:, None]
    position = parents.positions[:, None, None]
    u = uniform(parents.keyed(ORDER)[..., None, None], position, child)  # [P, m, C, L]
    moves = (u < (move.view(-1, 1, 1, 1) if isinstance(move, torch.Tensor) else move)) & masked[:, :, None]
    drawn = moves.any(2)  # [P, m, L]
    prompt, parent, place = drawn.nonzero(as_tuple=True)
    u = uniform(parents.keyed(TOKEN)[prompt, parent][:, None], parents.positions[prompt, place][:, None], child[:, 0])
    how = draw.temperature, draw.filters, ()
    stats = parents.read(parents.slot[prompt, parent], place, partial(draw.tokens, how=how), u)
    token = stats["drawn"]
    tokens = parents.tokens[:, :, None].expand(moves.shape).clone()
    logprob = stats["token"].new_zeros(moves.shape)
    tokens[prompt, parent, :, place] = torch.where(moves[prompt, parent, :, place], token, draw.mask_id)
    logprob[prompt, parent, :, place] = torch.where(moves[prompt, parent, :, place], stats["token"], 0.0)
    finite = torch.ones_like(drawn)
    finite[prompt, parent, place] = stats["logsumexp"].isfinite()
    return Children(tokens, logprob, finite.all(-1))
