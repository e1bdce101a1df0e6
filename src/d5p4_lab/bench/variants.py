"""Variants of methods for the benchmarks: the tree's reveal rule for samples, ablations, and ideas that were tried.

sure-and-one  a reveal rule for samples: what a tree reveals per pass, all positions above a threshold and one more

tree-hidden   S compares the hidden rows of the parents instead of tokens. Siblings then have equal rows; 0.99 instead
              of 1 beside the diagonal keeps S positive definite
tree-product  S is the product of both similarities
tree-stay     finished rows always stay, and only the other places are open to competition
tree-hybrid   of the K rows that were run, the better half by Σ l + λ log det S of their hidden rows gets children: the
              paper's selection after the forward, with as many rows as the tree
tree-noise    rows are kept by l / heat plus fresh Gumbel noise. Nothing is passed down from parents to children, and
              the law is not that of sampling

d5p4-same     S = (1 - share) S + share E: E is 1 where two rows would be the same answer if every masked position took
              its most probable token (`key` of the model's grader), and 0 elsewhere
d5p4-spread   the weight of diversity follows the pool at every step: β = beta std(Q) / mean of 1 - S between rows
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import Annotated, Any

import torch
from torch import Tensor

import d5p4
from d5p4.eval.graders import grader_of
from d5p4.methods import METHODS, Tree
from d5p4.methods.dpp import D5P4
from d5p4.ops.partition_map import map_inference, partition_map
from d5p4.ops.vocab import logits_of
from d5p4.options import Checked, Option
from d5p4.project.reveal import Reveal, Sequence
from d5p4.rng import gumbel, uniform
from d5p4.types import Choice


@dataclass(frozen=True)
class SureAndOne(Checked):
    sure: Annotated[float, Option("Reveal all positions with a probability above this, and one more.")] = 0.99

    def __call__(self, seen: Sequence) -> Tensor:
        accepted = seen.probability > self.sure
        waiting = seen.open & ~accepted
        return accepted | (waiting & (waiting.cumsum(-1) == 1))


@dataclass(frozen=True)
class Hidden(Tree):
    def similarity(self, leaves: Any, order: Tensor) -> Tensor:
        source = leaves.source.gather(1, order)
        prompt = torch.arange(len(source), device=source.device)[:, None, None]
        between = leaves.view.similarity[prompt, source[:, :, None], source[:, None, :]]
        same = torch.eye(source.shape[1], dtype=between.dtype, device=source.device)
        return 0.99 * between * (1 - same) + same


@dataclass(frozen=True)
class Product(Hidden):
    def similarity(self, leaves: Any, order: Tensor) -> Tensor:
        return super().similarity(leaves, order) * Tree.similarity(self, leaves, order)


@dataclass(frozen=True)
class Stay(Tree):
    def prune(self, leaves: Any, k: int, key: Tensor) -> Tensor:
        return super().prune(replace(leaves, value=leaves.value + 1e3 * leaves.complete), k, key)


@dataclass(frozen=True)
class Hybrid(Tree):
    def __call__(self, pool: Any, k: int, key: Tensor) -> Choice:
        value = pool.pool.state["value"].masked_fill(~pool.awake, -1e4)
        gain = value.clamp_min(-1e4) / max(self.diversity, 1e-3)
        gain = gain - gain.amax(-1, keepdim=True)
        similarity = pool.similarity + 1e-3 * torch.eye(pool.size, device=value.device)
        return pool.keep(map_inference(similarity, (k + 1) // 2, gain, None, pool.tie).sort(-1).values)


@dataclass(frozen=True)
class Noise(Tree):
    heat: Annotated[float, Option("Divides l before the noise is added.")] = 1.0

    def prune(self, leaves: Any, k: int, key: Tensor) -> Tensor:
        noise = gumbel(uniform(key[:, None], leaves.tie)).to(leaves.value.dtype)
        return super().prune(replace(leaves, value=leaves.value / self.heat + noise), k, key)


@dataclass(frozen=True)
class Same(D5P4):
    share: Annotated[float, Option("Weight of E; S has the rest.", least=0, most=1)] = 0.9

    def __call__(self, pool: Any, k: int, key: Tensor) -> Choice:
        names = answer_names(pool)
        same = (names[:, :, None] == names[:, None, :]).to(pool.similarity.dtype)
        return _best_set(pool, k, self.beta, (1 - self.share) * pool.similarity + self.share * same)


@dataclass(frozen=True)
class Spread(D5P4):
    def __call__(self, pool: Any, k: int, key: Tensor) -> Choice:
        apart = (1 - pool.similarity).sum((-2, -1)) / max(1, pool.size * (pool.size - 1))
        beta = self.beta * pool.quality.std(-1) / apart.clamp_min(1e-6)
        beta = torch.where(beta > 0, beta, 1.0)  # if all rows are equally good, every β gives the same set
        return _best_set(pool, k, beta[:, None, None], pool.similarity)


def _best_set(pool: Any, k: int, beta: Any, similarity: Tensor) -> Choice:
    """Return what d5p4 with its default solver chooses for this β and this S."""
    kernel = (torch.diag_embed(pool.quality) + beta * similarity).to(similarity.dtype)
    return pool.keep(partition_map(kernel, k, None, pool.quality, pool.tie))


def answer_names(pool: Any) -> Tensor:
    """Return a number [P, N] for each row: rows of a prompt have equal numbers if their answers are the same when
    every masked position takes its most probable token."""
    hidden, call = pool.hidden, pool.pool.call
    head, codec, grader = call.head, call.model.tokenizer, grader_of(call.model)
    assert codec is not None and grader is not None
    tokens = pool.pool.tokens[hidden.owner[:, 0], hidden.owner[:, 1]]  # [U, L]
    logits = logits_of(hidden.states.flatten(0, 1), head.weight, head.bias, head.banned)
    tokens = torch.where(tokens == call.model.mask_id, logits.argmax(-1).view(tokens.shape), tokens)
    before = (torch.isin(tokens, call.end_ids).cumsum(-1) == 0).sum(-1)
    numbers: dict[Hashable, int] = {}
    rows = zip(tokens.tolist(), before.tolist(), strict=True)
    named = [numbers.setdefault(grader.key(codec.decode(row[:end])), len(numbers)) for row, end in rows]
    return torch.tensor(named, device=tokens.device)[hidden.slot]


VARIANTS = {"hidden": Hidden, "product": Product, "stay": Stay, "hybrid": Hybrid, "noise": Noise}
IDEAS = {"same": Same, "spread": Spread}


def register_variants() -> None:
    """Register the rule and the methods, unless they are registered already."""
    if "sure-and-one" not in Reveal.registry:
        d5p4.register(Reveal("sure-and-one", SureAndOne))
    for base, variants in (("tree", VARIANTS), ("d5p4", IDEAS)):
        for name, variant in variants.items():
            if f"{base}-{name}" not in METHODS:
                d5p4.register(replace(METHODS[base], name=f"{base}-{name}", selector=variant))


def ranked_texts(model: Any, result: d5p4.Result, sort: str) -> list[list[str]]:
    """Return the texts of each prompt, best first, ranked by "l" or by their entropy at one more forward ("leaves")."""
    if sort == "l":
        values = [[math.fsum(row) for row in rows] for rows in result.logprobs or ()]
    else:
        values = (-leaf_entropy(model, result)).tolist()
    pairs = zip(result.texts, values, strict=True)
    return [[texts[i] for i in sorted(range(len(texts)), key=lambda i: -row[i])] for texts, row in pairs]


@torch.no_grad()
def leaf_entropy(model: Any, result: d5p4.Result, rows: int = 1024) -> Tensor:
    """Return the mean entropy [P, k] over the positions of each answer, its end-of-text included, when it is run."""
    prompts, k, _ = result.sequences.shape
    length = result.settings.gen_length
    ends = [[len(answer) for answer in answers] + [0] * (k - len(answers)) for answers in result.answers]
    counted = torch.arange(length) <= torch.tensor(ends).view(-1, 1)
    tokens, mask = result.sequences.flatten(0, 1), result.attention_mask.repeat_interleave(k, 0)
    means = []
    for start in range(0, prompts * k, rows):
        part = slice(start, start + rows)
        states = model.body(tokens[part].to(model.device), mask[part].to(model.device)).states[:, -length:]
        head = model.head
        logs = logits_of(states.flatten(0, 1), head.weight, head.bias, head.banned).log_softmax(-1)
        entropy = -(logs.exp() * logs.clamp_min(-1e4)).sum(-1).view(-1, length).cpu()
        means.append((entropy * counted[part]).sum(-1) / counted[part].sum(-1))
    return torch.cat(means).view(prompts, k)
