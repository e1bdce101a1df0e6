"""SmolLM2, the base of smol, as the causal model that it is: its samples, beams and log-probabilities of tokens."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from d5p4.models.checkpoint import read_json
from d5p4.models.load import find

from ..train.smol import Body
from ..train.smol import base as smol_base
from ..train.smol_data import END

Pair = tuple[list[int], list[int]]  # the tokens of a prompt and of an answer


class Teacher:
    """The causal model, with keys and values kept."""

    def __init__(self, body: Body) -> None:
        self.body, self.device = body.requires_grad_(False), body.table.device

    def run(self, tokens: Tensor, kept: Any, first: int, real: Tensor) -> Tensor:
        """Run tokens [R, S] from a position on and return the log-probabilities [R, V] of the next token. `real` [R, T]
        is False at padding on the left, which changes nothing but the positions, and these matter by differences."""
        at = torch.arange(first, first + tokens.shape[1], device=self.device)
        place = torch.arange(int(at[-1]) + 1, device=self.device)
        mask = (place <= at[:, None]) & real[:, None, : len(place)] | (place == at[:, None])
        seen = [(key[:, :, : len(place)], value[:, :, : len(place)]) for key, value in kept]
        return self.body.logits(self.body(tokens, at, mask[:, None], seen)[:, -1]).log_softmax(-1)

    def answers(
        self, prompts: Sequence[list[int]], seed: int, length: int, k: int, batch: int = 32, **options: Any
    ) -> Iterator[list[list[int]]]:
        """Yield k answers of at most `length` tokens to each prompt: samples, or with `beam` the beams of stochastic
        beam search."""
        for low in range(0, len(prompts), batch):
            yield from self._answers(prompts[low : low + batch], seed + low, length, k, **options)

    @torch.no_grad()
    def _answers(
        self,
        prompts: Sequence[list[int]],
        seed: int,
        length: int,
        k: int,
        temperature: float,
        top_p: float = 1.0,
        beam: bool = False,
    ) -> list[list[list[int]]]:
        draw = torch.Generator(self.device).manual_seed(seed)
        longest, shape = max(map(len, prompts)), (len(prompts), k, -1)
        padded = [[END] * (longest - len(ids)) + ids for ids in prompts for _ in range(k)]
        missing = torch.tensor([longest - len(ids) for ids in prompts for _ in range(k)], device=self.device)
        real = torch.arange(longest + length, device=self.device) >= missing[:, None]
        kept = self.body.new_cache(len(padded), longest + length)
        scores = self.run(torch.tensor(padded, device=self.device), kept, 0, real)
        rows = torch.empty(len(padded), 0, dtype=torch.long, device=self.device)
        logp, noisy = torch.zeros(2, *shape[:2], device=self.device)
        first = torch.arange(len(prompts), device=self.device)[:, None] * k
        for step in range(length):
            scores = cut(scores / temperature, top_p)
            only_end = torch.full_like(scores[:1], -torch.inf)
            only_end[:, END] = 0.0
            scores = torch.where((rows == END).any(1, keepdim=True), only_end, scores).view(shape)
            uniform = torch.rand(scores.shape, generator=draw, device=self.device).clamp(1e-12, 1 - 1e-7)
            gumbel = -(-uniform.log()).log()
            if beam:
                logp, noisy, parent, token = search_step(logp, noisy, scores, gumbel, step == 0)
                chosen = (first + parent).flatten()
                rows, kept = rows[chosen], [(key[chosen], value[chosen]) for key, value in kept]
            else:
                token = (scores + gumbel).argmax(-1)
            rows = torch.cat([rows, token.view(-1, 1)], 1)
            if step + 1 < length:
                scores = self.run(token.view(-1, 1), kept, longest + step, real)
        ended = [row[: row.index(END) + 1] if END in row else row for row in rows.tolist()]
        return [ended[i : i + k] for i in range(0, len(ended), k)]

    def nats(self, pairs: Sequence[Pair], batch: int = 128) -> list[float]:
        """Return -log p of each answer behind its prompt. Padding on the right changes nothing in a causal model."""
        return in_batches(self._nats, pairs, batch)

    @torch.no_grad()
    def _nats(self, pairs: Sequence[Pair]) -> Tensor:
        tokens, row, place = laid_out(pairs, END, self.device)
        at = torch.arange(tokens.shape[1], device=self.device)
        states = self.body(tokens, at, (at[:, None] >= at)[None, None])[row, place - 1]
        return summed_nats(self.body.logits, states, tokens[row, place], row, len(pairs))


def in_batches(sums: Callable[[Sequence[Pair]], Tensor], pairs: Sequence[Pair], batch: int) -> list[float]:
    """Return a number per pair of prompt and answer. Pairs of similar length share a batch."""
    order = sorted(range(len(pairs)), key=lambda i: sum(map(len, pairs[i])))
    numbers = torch.zeros(len(pairs), dtype=torch.float64)
    for first in range(0, len(order), batch):
        part = order[first : first + batch]
        numbers[part] = sums([pairs[i] for i in part]).cpu()
    return numbers.tolist()


def laid_out(pairs: Sequence[Pair], padding: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return rows of tokens, padded on the right, and the row and the position of every token of an answer."""
    ends = torch.tensor([sum(map(len, pair)) for pair in pairs])
    starts, place = torch.tensor([len(before) for before, _ in pairs]), torch.arange(int(ends.max()))
    tokens = torch.tensor(
        [[*before, *answer] + [padding] * (len(place) - len(before) - len(answer)) for before, answer in pairs]
    )
    row, at = ((place >= starts[:, None]) & (place < ends[:, None])).nonzero(as_tuple=True)
    return tokens.to(device), row.to(device), at.to(device)


def summed_nats(
    logits: Callable[[Tensor], Tensor], states: Tensor, tokens: Tensor, owner: Tensor, count: int
) -> Tensor:
    """Return the sums [count] of -log p of tokens [M] by their owner. The states [M, D] predict the tokens."""
    sums = torch.zeros(count, dtype=torch.float64, device=states.device)
    for state, token, own in zip(states.split(4096), tokens.split(4096), owner.split(4096), strict=True):
        sums.index_add_(0, own, -logits(state).log_softmax(-1).gather(1, token[:, None])[:, 0].double())
    return sums


def search_step(
    logp: Tensor, noisy: Tensor, scores: Tensor, gumbel: Tensor, first: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Take a step of stochastic beam search (Kool et al., 2019) over scores [Q, K, V]: the K children [Q, K] with the
    largest values. Their values are Gumbel draws around their log-probability, given that the largest value of the
    children is the parent's. Return log-probabilities, values, parents and tokens."""
    total = logp[..., None] + scores
    value = total + gumbel
    if first:
        value[:, 1:] = -torch.inf  # all beams are the same at the start
    else:
        largest = value.amax(-1, keepdim=True)
        below = (value - largest).exp().clamp(max=1.0)
        inner = noisy[..., None] - value + torch.log1p(-below)  # minus infinity at the largest value
        value = noisy[..., None] - inner.clamp(min=0) - torch.log1p((-inner.abs()).exp())
        value[total == -torch.inf] = -torch.inf
    noisy, flat = value.flatten(1).topk(value.shape[1])
    parent, token = flat // value.shape[2], flat % value.shape[2]
    return total.flatten(1).gather(1, flat), noisy, parent, token


def cut(scores: Tensor, top_p: float) -> Tensor:
    """Return log-probabilities of the likeliest tokens with a mass of at least `top_p`."""
    scores = scores.log_softmax(-1)
    if top_p < 1:
        ordered, order = scores.sort(-1, descending=True)
        outside = ordered.exp().cumsum(-1) - ordered.exp() >= top_p
        scores = scores.masked_fill(torch.zeros_like(outside).scatter(1, order, outside), -torch.inf).log_softmax(-1)
    return scores


def causal_base(device: torch.device, dtype: torch.dtype) -> tuple[Teacher, Any]:
    """Return the base of smol and its tokenizer."""
    tensors, tokenizer = smol_base()
    return Teacher(Body(read_json(find("smol") / "config.json"), tensors, 0, dtype).to(device)), tokenizer
