"""Sequential Monte Carlo: N rows (particles) are decoded, and sometimes N parents are drawn by their weights."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

import torch
from torch import Tensor

from ..decode.view import PoolView
from ..errors import D5P4Error
from ..ops.ties import canonical_order, ranked
from ..options import Checked, Option, Settings
from ..rng import draw_index, uniform
from ..types import Choice, Kept
from .beam import Beam

if TYPE_CHECKING:
    from ..decode.answers import Final

_COUNT = "esmc_intervals"
Resampling = Annotated[Literal["multinomial", "systematic"], Option("How parents are drawn.")]


class Particles(Checked, Beam):
    """When a method of particles resamples, and how."""

    interval: float | None
    resampling: Literal["multinomial", "systematic"]
    ess: float | None

    def due(self, pool: PoolView) -> Tensor | bool:
        """Return whether to resample. Under adaptive reveal rules, prompts differ, and the result is a bool [P]."""
        if pool.progress is None:
            return pool.step > 0 and pool.step % (self.interval or 8) == 0
        count = (pool.progress / (self.interval or 1 / 8)).floor()
        before = pool.state.get(_COUNT, torch.zeros_like(count))
        pool.state[_COUNT] = count
        return count > before

    def resampled(self, pool: PoolView, chances: Tensor, due: Tensor | bool, key: Tensor) -> tuple[Tensor, Tensor]:
        """Return the parents [P, N], and which prompts were resampled, a bool [P, 1]. chances [P, N] sum to 1."""
        moved = torch.ones_like(chances[:, :1], dtype=torch.bool) if due is True else torch.as_tensor(due)[:, None]
        if self.ess is not None:
            moved = moved & (1 / (chances**2).sum(-1, keepdim=True) < self.ess * pool.size)
        return torch.where(moved, self._draw(chances, pool.tie, key), pool.stay().parents), moved

    def check(self, settings: Settings) -> None:
        """Raise an error if the interval does not fit the reveal rule."""
        reason = "must be a whole number of steps, unless the reveal rule is adaptive"
        if settings.adaptive:
            reason = f"counts steps, but with reveal={settings.reveal!r} it must be a share below 1, such as 0.125"
        if self.interval is not None and (self.interval >= 1 if settings.adaptive else self.interval % 1 > 0):
            raise D5P4Error(reason, option="interval", value=self.interval)

    def _draw(self, chances: Tensor, tie: Tensor, key: Tensor) -> Tensor:
        """Return the indices [P, N] of the drawn parents, in ascending order."""
        order, number = canonical_order(tie), torch.arange(tie.shape[-1], device=tie.device)
        independent = self.resampling == "multinomial"
        u = uniform(key[:, None], number) if independent else (uniform(key[:, None], 0) + number) / tie.shape[-1]
        drawn = draw_index(chances.gather(-1, order), u.to(chances.dtype))
        return order.gather(-1, drawn).sort(-1).values


@dataclass(frozen=True)
class ESMC(Particles):
    """E-SMC (Chen et al., 2025). At every `interval`, draws N parents by chances that grow with r = 1 - h / log2 V.

    h            a row's mean entropy in bits over its masked positions
    weights      the chances are softmax(G) of G = exp(lam r) ("literal", as in the published method) or G / sum G
    ess          a prompt is resampled only if 1 / sum of squared chances is below ess * N
    """

    lam: Annotated[float, Option("Sharpness of the weights.", least=0)] = 5.0
    interval: Annotated[
        float | None, Option("Steps (or share of positions) between two resamplings.", above=0, unset="8 steps, or 1/8")
    ] = None
    weights: Annotated[Literal["literal", "textbook"], Option("The chances: softmax(G), or G / sum G.")] = "literal"
    resampling: Resampling = "multinomial"
    ess: Annotated[
        float | None,
        Option("Resample if the share of effective particles is below this.", above=0, most=1, unset="every interval"),
    ] = None

    def __call__(self, pool: PoolView, k: int, key: Tensor) -> Choice:
        due = self.due(pool)
        if due is False:
            return pool.stay()
        return Choice(self.resampled(pool, self.chances(self.reward(pool)), due, key)[0], 1)

    def finish(self, final: Final, k: int) -> Kept:
        """Return the k particles (rows) whose parents have the lowest mean entropy (are the most certain)."""
        return Kept(ranked(final.score("entropy", "masked"), final.tie)[:, :k])

    def reward(self, pool: PoolView) -> Tensor:
        """Return the reward r [P, N] in [0, 1]. A reward of NaN becomes 0."""
        bits = -pool.score("entropy", "masked") / math.log(2)
        return (1 - bits / math.log2(pool.vocabulary)).nan_to_num(nan=0.0).clamp(0, 1)

    def chances(self, reward: Tensor) -> Tensor:
        """Return the resampling probabilities [P, N] for rewards [P, N]."""
        exponent = self.lam * reward
        return (exponent.clamp_max(700).exp() if self.weights == "literal" else exponent).softmax(-1)
