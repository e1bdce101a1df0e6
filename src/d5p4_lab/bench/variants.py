"""Variants of the tree for `countdown`: the reveal rule of its fair rival, methods for ablations, and other rankings.

sure-and-one  a reveal rule for samples: what a tree reveals per pass, all positions above a threshold and one more

tree-hidden   S compares the hidden rows of the parents instead of tokens. Siblings then have equal rows; 0.99 instead
              of 1 beside the diagonal keeps S positive definite
tree-product  S is the product of both similarities
tree-stay     finished rows always stay, and only the other places are open to competition
tree-hybrid   of the K rows that were run, the better half by Σ l + λ log det S of their hidden rows gets children: the
              paper's selection after the forward, with as many rows as the tree
tree-noise    rows are kept by l / heat plus fresh Gumbel noise. Nothing is passed down from parents to children, and
              the law is not that of sampling
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Annotated, Any

import torch
from torch import Tensor

import d5p4
from d5p4.methods import METHODS, Tree
from d5p4.ops.partition_map import map_inference
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


VARIANTS = {"hidden": Hidden, "product": Product, "stay": Stay, "hybrid": Hybrid, "noise": Noise}


def register_variants() -> None:
    """Register the rule and the methods, unless they are registered already."""
    if "sure-and-one" not in Reveal.registry:
        d5p4.register(Reveal("sure-and-one", SureAndOne))
    for name, variant in VARIANTS.items():
        if f"tree-{name}" not in METHODS:
            d5p4.register(replace(METHODS["tree"], name=f"tree-{name}", selector=variant))


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
