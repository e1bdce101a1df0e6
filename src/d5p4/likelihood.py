"""The Monte-Carlo likelihood bound of masked diffusion models.

An answer has La tokens. A sample masks l of them, chosen uniformly. Then
    log p(answer | prompt) >= E_l E_mask [ (La / l) Σ_{masked i} log p(token_i | rest) ],   l uniform on 1..La.
The samples' values of l are stratified: they start at a random offset and are evenly spaced over 1..La. The result
is the mean of the bracket over the samples. It is an unbiased estimate of the bound (the right-hand side), in nats.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .errors import D5P4Error, NonFiniteLogits
from .ops.vocab import vocab_stats
from .options import whole
from .prompts import Prompt, Request, encode, layout
from .rng import LIKELIHOOD, hash_tokens, key_of, mix, uniform
from .types import Model


@torch.no_grad()
def loglikelihood(
    model: Model,
    text: str | Sequence[int],
    prompt: Prompt | None = None,
    samples: int = 128,
    *,
    seed: int = 0,
    chat: bool | None = None,
    max_tokens_per_forward: int = 16384,
) -> float:
    """Return an estimate of a lower bound on log p(text | prompt) in nats. The same seed gives the same value.

    Text and prompt may be token ids. The prompt is treated as in `generate`: with `chat=None`, the chat template is
    applied if the model has a template.
    """
    whole("samples", samples)
    whole("max_tokens_per_forward", max_tokens_per_forward)
    whole("seed", seed, -(2**63))
    if not isinstance(text, str) and not all(isinstance(part, int) for part in text):
        raise D5P4Error("text must be one string or token ids; score several texts in several calls")
    before = [] if prompt is None else encode(model, prompt, chat)
    answer = encode(model, text, False)
    if not answer:
        raise D5P4Error("the text to score has no tokens")
    if model.mask_id in answer:
        raise D5P4Error("the text to score contains the mask token; its likelihood is not defined")
    if len(before) + len(answer) > model.max_length:
        raise D5P4Error(f"there are {len(before)} + {len(answer)} tokens, but the model takes {model.max_length}")
    device = model.head.weight.device
    row = layout([Request(before + answer, 0)], model.mask_id, model.mask_id, device).tokens[0]
    place = torch.arange(len(before), len(row), device=device)
    stream = mix(key_of(seed), LIKELIHOOD, hash_tokens(row, torch.arange(len(row), device=device)))
    draws = torch.arange(samples, device=device)
    offset = uniform(stream, 0) * len(answer)
    masks = 1 + ((offset + draws * (len(answer) / samples)) % len(answer)).floor().long().clamp_max(len(answer) - 1)
    chance = uniform(mix(stream, 1 + draws)[:, None], place)  # [samples, La]
    masked = chance.argsort(dim=-1, stable=True).argsort(dim=-1, stable=True) < masks[:, None]
    total = torch.zeros((), dtype=chance.dtype, device=device)
    size = max(1, max_tokens_per_forward // len(row))
    for part, number in zip(masked.split(size), masks.split(size), strict=True):
        tokens = row.repeat(len(part), 1)
        hidden = tokens[:, place].masked_fill(part, model.mask_id)
        tokens[:, place] = hidden
        states = model.body(tokens).states[:, place][part]
        truth = row[place].expand(part.shape)[part][:, None]
        stats = vocab_stats(states, model.head.weight, model.head.bias, model.head.banned, (), truth)
        if not bool(stats["logsumexp"].isfinite().all()):
            raise NonFiniteLogits("the model gave logits that are not finite; check the weights or use float32")
        weight = (len(answer) / number)[:, None].expand(part.shape)[part]
        total += (stats["token"][:, 0] * weight).sum()
    return float(total / samples)
