"""A wide start for sets of texts: many partial answers, of which a DPP keeps k that differ, and then plain samples.

K = k + spare partial answers of `cut` tokens are drawn without replacement (`search.enumerated`). After their forward,
all C(K, k) sets A of k of them are compared, and the set with the largest value of this sum goes on:

    log det S_A + 2 tilt Σ_{i in A} φ_i / n_i,        S = (1 - ridge) C + ridge I

A is the mode of the DPP with kernel diag(q) S diag(q), q_i = e^(tilt φ_i / n_i). φ_i is the log-probability of the n_i
tokens of row i, not its perturbed value. C has the cosines of features less their mean over the rows of the prompt.
From then on, each row draws its tokens like a plain sample. With cuts > 1, the k rows branch into K again, and the next
cut follows after as many tokens. With `even`, each of them gets K / k children at the cut, and one child per step from
there to the next cut. Tokens are counted in steps, so use one token per step. T tokens cost about K cut + k (T - cut)
rows: 384 for k = 4, K = 12, cut = 16, T = 64, where k samples cost 256. The rows at a cut run once more to read any
layer, which is not counted. If all rows of a prompt end before a cut, the k best by score are kept.

`compared` names other kernels. "product": C is multiplied by the overlap of tokens, the cosine of their counts.
"d5p4": diag(Q) + beta S replaces S, with the Q and S of the method d5p4, which need no second run. With `even`, cut 1
and tilt 0, this is d5p4 with enumerated children: all rows differ. "texts": an oracle.

`cooling` draws plain samples whose first `hot` tokens have the option temperature, and the others `cool`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache
from typing import Annotated, Any, Literal

import torch
from torch import Tensor

from d5p4 import Choice, D5P4Error, Option
from d5p4.decode.pool import Pool, pick
from d5p4.decode.schedule import Steps
from d5p4.decode.view import ForwardView
from d5p4.options import Checked, Settings
from d5p4.search import Identity, Search, TreeSearch
from d5p4.search.children import Draw, Parents
from d5p4.search.dpp import dpp_kernel
from d5p4.search.tree import awake_rows
from d5p4.types import block_of

from ..scoring.encoder import Encoder
from .exact import exhaustive

Cool = Annotated[float | None, Option("Temperature of later tokens.", above=0, unset="the same")]


class Phases(Search):
    """The draw of a step: colder from the step `last` on."""

    timeless = False
    last: int
    cool: float | None

    def drawing(self, pool: Pool, choice: Choice, parents: Parents, step: Steps) -> Draw:
        draw = super().drawing(pool, choice, parents, step)
        early = step.by_prompt[0].index < self.last
        return draw if early or self.cool is None else replace(draw, temperature=self.cool)


@dataclass(frozen=True)
class Cooling(Checked, Phases, Identity):
    """Selects nothing. Every row has one child."""

    hot: Annotated[int, Option("Tokens that are drawn at the option temperature.", least=0)] = 8
    cool: Cool = None

    @property
    def last(self) -> int:  # type: ignore[override]
        return self.hot


@dataclass(frozen=True)
class WideStart(Checked, Phases, TreeSearch):
    """Keeps K rows until the last cut. At a cut, a DPP keeps k of them; after the last one, each has one child."""

    constrains = False

    cut: Annotated[int, Option("Tokens from one cut to the next.", least=1)] = 16
    cuts: Annotated[int, Option("How often a DPP chooses; 0: never.", least=0)] = 1
    tilt: Annotated[float, Option("Weight of the log-probability per token in a cut.", least=0)] = 1.0
    ridge: Annotated[float, Option("Share of the identity in the similarity.", above=0, most=1)] = 0.1
    even: Annotated[bool, Option("At a cut, all rows get equally many children.")] = False
    compared: Annotated[Literal["states", "product", "d5p4", "texts"], Option("The kernel of a cut.")] = "states"
    beta: Annotated[float, Option("Weight of S in the kernel of d5p4.", above=0)] = 100.0
    layer: Annotated[float, Option("Share of the layers below the states.", above=0, most=1)] = 1.0
    pooled: Annotated[Literal["answer", "block"], Option("The answer so far, or the masks of the block.")] = "answer"
    cool: Cool = None

    @property
    def last(self) -> int:  # type: ignore[override]
        """The step of the last cut."""
        return self.cut * self.cuts

    def check(self, settings: Settings) -> None:
        if self.even and settings.spare % settings.k:
            raise D5P4Error("must be a multiple of k under even", option="spare", value=settings.spare)

    def choose(self, view: ForwardView) -> Choice:
        choice = super().choose(view)
        if not self.cuts or not view.step:
            return choice
        if view.step > self.last:  # the pool has places for k rows that are awake
            return Choice(awake_rows(view, self.call.settings.k), 1)
        if view.step % self.cut:
            return Choice(choice.parents, 1) if self.even and view.step > self.cut else choice
        chosen = choice.parents.gather(1, self.subset(view, choice.parents))
        children = choice.parents.shape[1] // chosen.shape[1] if self.even else choice.children
        return Choice(chosen, children if view.step < self.last else 1)

    def subset(self, view: ForwardView, rows: Tensor) -> Tensor:
        """Return which k of the rows [P, K] a cut keeps."""
        pool, call = view.pool, self.call
        assert view.awake is not None
        exists, tie, tokens = view.awake.gather(1, rows), view.tie.gather(1, rows), pick(pool.tokens, rows)
        shown = (tokens != call.model.mask_id) & ~call.after_end(tokens, pool)
        gain = 2 * self.tilt * view.path.gather(1, rows) / shown.sum(-1).clamp_min(1)
        if self.compared == "d5p4":
            quality, similarity = view.quality.gather(1, rows), pick(pick(view.similarity, rows).mT, rows)
            kernel, _ = dpp_kernel("additive", quality, similarity, self.beta)
        else:
            kernel = centred(self.vectors(view, tokens, shown), self.ridge, exists)
            kernel = kernel * overlap(tokens, shown) if self.compared == "product" else kernel
        return best_set(kernel, gain, call.settings.k, tie, exists)

    def vectors(self, view: ForwardView, tokens: Tensor, shown: Tensor) -> Tensor:
        """Return the features [P, n, D] of rows [P, n, L]."""
        model: Any = self.call.model
        prompts = view.given
        if self.compared == "texts":
            pairs = zip(tokens.flatten(0, 1), shown.flatten(0, 1), strict=True)
            embedded = encoder().encode([model.tokenizer.decode(row[real].tolist()) for row, real in pairs])
            return torch.from_numpy(embedded).to(tokens.device).view(*tokens.shape[:2], -1)
        if self.pooled == "block":
            number, still = prompts.positions[:, None] // (block_of(model) or 1 << 30), tokens == model.mask_id
            shown = still & (number == number.masked_fill(~still, 1 << 30).amin(-1, keepdim=True))
        filled = prompts.fill(tokens)
        window, real = (x[:, None].expand(*tokens.shape[:2], -1) for x in (prompts.window, prompts.attention_mask))
        weight = torch.zeros_like(real, dtype=torch.bool).scatter(2, window, shown)
        pooled = pooled_states(model, filled.flatten(0, 1), real.flatten(0, 1), weight.flatten(0, 1), self.layer)
        return pooled.view(*tokens.shape[:2], -1)


def centred(vectors: Tensor, ridge: float, exists: Tensor) -> Tensor:
    """Return S (see above) [P, n, n] from vectors [P, n, D]. Rows that do not exist count for nothing in the mean."""
    there = exists[..., None].double()
    x = vectors.double() * there
    x = (x - x.sum(1, keepdim=True) / there.sum(1, keepdim=True).clamp_min(1)) * there
    x = x / x.norm(dim=-1, keepdim=True).clamp_min(1e-12)
    return ((1 - ridge) * (x @ x.mT)).diagonal_scatter(torch.ones_like(x[..., 0]), 0, 1, 2)


def overlap(tokens: Tensor, shown: Tensor) -> Tensor:
    """Return the cosines [P, n, n] of the counts of the tokens [P, n, L] that are shown."""
    names, number = tokens.unique(return_inverse=True)
    counts = torch.zeros(*tokens.shape[:2], len(names), dtype=torch.float64, device=tokens.device)
    x = torch.nn.functional.normalize(counts.scatter_add(2, number, shown.double()), dim=-1)
    return (x @ x.mT).diagonal_scatter(torch.ones_like(x[..., 0]), 0, 1, 2)


def best_set(kernel: Tensor, gain: Tensor, k: int, tie: Tensor, exists: Tensor) -> Tensor:
    """Return the indices [P, k] of the set with the largest log det L_A + Σ gain, in ascending order, given kernels L
    [P, n, n] and gain, tie and exists [P, n]. Rows that do not exist are chosen only if there are too few."""
    kernel = torch.where(exists[:, :, None] & exists[:, None], kernel.double(), 0.0)
    kernel = kernel + torch.diag_embed((~exists).double())
    least = torch.where(exists, gain, torch.inf).amin(-1, keepdim=True).nan_to_num(posinf=0)
    return exhaustive(kernel, k, torch.where(exists, gain, least - 1e3).double(), None, tie, partition=False)


@torch.no_grad()
def pooled_states(
    model: Any, tokens: Tensor, real: Tensor, weight: Tensor, layer: float = 1.0, most: int = 1 << 14
) -> Tensor:
    """Return the mean [R, D] of a layer's output over the positions `weight` of rows [R, T], padded on the left."""
    seen, parts, handle = [], [], None
    if layer < 1:
        layers = list(model.parts()[1])
        handle = layers[math.ceil(layer * len(layers)) - 1].register_forward_hook(
            lambda _, __, out: seen.append(out[0] if out[1] is None else out[0] + out[1])
        )
    size = max(1, most // tokens.shape[1])
    for part, mask, share in zip(tokens.split(size), real.split(size), weight.split(size), strict=True):
        features = model.body(part, mask).features
        features = (seen.pop() if handle else features).double() * share[..., None]
        parts.append(features.sum(1) / share.sum(1, keepdim=True).clamp_min(1))
    if handle:
        handle.remove()
    return torch.cat(parts)


@cache
def encoder() -> Encoder:
    return Encoder()
