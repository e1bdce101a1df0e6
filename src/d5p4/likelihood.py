"""The Monte-Carlo likelihood bound of masked diffusion models.

An answer has La tokens. A sample masks l of them, chosen uniformly. Then
    log p(answer | prompt) >= E_l E_mask [ (La / l) Σ_{masked i} log p(token_i | rest) ],   l uniform on 1..La.
The samples' values of l are stratified: they start at a random offset and are evenly spaced over 1..La. The result
is the mean of the bracket over the samples. It is an unbiased estimate of the bound (the right-hand side), in nats.

A block-causal model factorises: log p(answer | prompt) = Σ_b log p(block b | everything before it), and a block is
denoised while nothing follows it. So the bound is estimated for every block that has answer tokens: "answer" then means
the block's tokens of the answer, "prompt" means all tokens before them, and no tokens follow the block. The result is
the sum over blocks. Every block has as many samples as the caller asks for. One forward of the clean row gives the keys
and values of all blocks, so the samples of a block run only the tokens of that block.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .errors import D5P4Error, NonFiniteLogits
from .ops.vocab import vocab_stats
from .options import whole_number
from .prompts import Prompt, encode
from .rng import LIKELIHOOD, hash_tokens, key_of, mix, uniform
from .types import Context, Hidden, Model, Store, block_of


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

    `samples`: the number of masked copies of the text, or of each block of the text if the model is block-causal.
    `max_tokens_per_forward`: the most tokens per forward, to limit memory.

    Text and prompt may be token ids. The prompt is treated as in `generate`: with `chat=None`, the chat template is
    applied if the model has a template.
    """
    whole_number("samples", samples)
    whole_number("max_tokens_per_forward", max_tokens_per_forward)
    whole_number("seed", seed, -(2**63))
    if not isinstance(text, str) and not all(isinstance(part, int) for part in text):
        raise D5P4Error("text must be one string or token ids; score several texts in several calls")
    if getattr(model, "fills", False):
        raise D5P4Error(f"{model.name} fills holes in a text; the likelihood of a whole text is not defined")
    before = [] if prompt is None else encode(model, prompt, chat)
    answer = encode(model, text, False)
    if not answer:
        raise D5P4Error("the text to score has no tokens; give a longer text")
    if model.mask_id in answer:
        raise D5P4Error("the text to score contains the mask token; its likelihood is not defined")
    if len(before) + len(answer) > model.max_length:
        raise D5P4Error(
            f"prompt and text have {len(before)} + {len(answer)} tokens, but the model takes {model.max_length}; "
            "shorten one of them"
        )
    row = torch.tensor(before + answer, device=model.head.weight.device)
    own_blocks = block_of(model)
    body: Callable[..., Hidden] = model.body
    block = own_blocks or len(row)
    clean = body(row[None], None, Context(keep=True)) if own_blocks and getattr(model, "cache_shape", None) else None
    total, start = 0.0, len(before)
    while start < len(row):
        end = min((start // block + 1) * block, len(row))
        read = (lambda rows: body(rows).states) if clean is None else _after(body, clean, start // block * block)
        total += _bound(model, row[:end], start, samples, seed, max_tokens_per_forward, read)
        start = end
    return total


def _after(body: Callable[..., Hidden], clean: Hidden, begin: int) -> Callable[[Tensor], Tensor]:
    """Return a function from rows [R, T] to the states [R, T - begin, D] of their tokens from the position `begin`. The
    tokens before are those of a clean forward, whose keys and values are read instead."""
    assert clean.kept is not None
    kv = torch.stack([torch.stack([values[:, :begin] for values in pair]) for pair in clean.kept])

    def read(tokens: Tensor) -> Tensor:
        first = torch.full((len(tokens),), begin, device=tokens.device)
        stores = (Store(kv, torch.zeros_like(first), first),) if begin else ()
        edge = None if clean.edge is None else clean.states[:, begin].expand(len(tokens), -1)
        return body(tokens[:, begin:], None, Context(first, stores, edge)).states

    return read


def _bound(
    model: Model,
    row: Tensor,
    start: int,
    samples: int,
    seed: int,
    most_tokens: int,
    read: Callable[[Tensor], Tensor],
) -> float:
    """Estimate the bound on the log-probability of the tokens of row [T] from `start`, given the tokens before.

    `read` returns the states of the last tokens of rows, at least of those from `start`.
    """
    device, length = row.device, len(row) - start
    place = torch.arange(start, len(row), device=device)
    stream = mix(key_of(seed), LIKELIHOOD, hash_tokens(row, torch.arange(len(row), device=device)))
    draws = torch.arange(samples, device=device)
    offset = uniform(stream, 0) * length
    masks = 1 + ((offset + draws * (length / samples)) % length).floor().long().clamp_max(length - 1)
    chance = uniform(mix(stream, 1 + draws)[:, None], place)  # [samples, La]
    masked = chance.argsort(dim=-1, stable=True).argsort(dim=-1, stable=True) < masks[:, None]
    total = torch.zeros((), dtype=chance.dtype, device=device)
    size = max(1, most_tokens // len(row))
    for part, number in zip(masked.split(size), masks.split(size), strict=True):
        tokens = row.repeat(len(part), 1)
        tokens[:, place] = tokens[:, place].masked_fill(part, model.mask_id)
        states = read(tokens)[:, -length:][part]
        truth = row[place].expand(part.shape)[part][:, None]
        stats = vocab_stats(states, model.head, (), truth)
        if not bool(stats["logsumexp"].isfinite().all()):
            raise NonFiniteLogits("the model gave logits that are not finite; check the weights or use float32")
        weight = (length / number)[:, None].expand(part.shape)[part]
        total += (stats["token"][:, 0] * weight).sum()
    return float(total / samples)
