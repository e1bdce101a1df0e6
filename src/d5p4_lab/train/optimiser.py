"""Optimises the matrices of the blocks with Muon and everything else with AdamW, and sets the learning rates.

Muon (Jordan et al., 2024) steps along the orthogonalised momentum: M = U diag(s) V' becomes about U V', so that every
direction of a matrix learns at the same rate. Matrices of the same shape are orthogonalised together, so a step
launches a few dozen kernels for any number of layers.
"""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

MOMENTUM = 0.95
DECAY = 0.01
# Five rounds of this quintic polynomial bring singular values from (0, 1] into about [0.7, 1.2].
QUINTIC = (3.4445, -4.7750, 2.0315)
ROUNDS = 5
WARMUP_STEPS, WARMUP_SHARE = 100, 0.02  # the warm-up ends at this step or at this share of the run, whichever is first


def rate_scale(step: int, progress: float) -> float:
    """Return the factor for the learning rates: a short linear warm-up times half a cosine that ends at zero."""
    warmth = max((step + 1) / WARMUP_STEPS, progress / WARMUP_SHARE)
    return min(1.0, warmth) * 0.5 * (1 + math.cos(math.pi * progress))


class Optimiser:
    """Muon and AdamW together. `step(scale)` takes a step of both, with both learning rates multiplied by `scale`."""

    def __init__(self, named: Iterable[tuple[str, nn.Parameter]], matrix_rate: float, other_rate: float) -> None:
        named = list(named)
        self.parameters = [parameter for _, parameter in named]
        self.matrix_rate, self.other_rate = matrix_rate, other_rate
        # {(shape, pieces): matrices}: a "qkv" matrix has three maps (queries, keys, values), orthogonalised separately
        self.groups: dict[tuple[torch.Size, int], list[nn.Parameter]] = {}
        for name, parameter in named:
            if is_block_matrix(name, parameter):
                self.groups.setdefault((parameter.shape, 3 if "qkv" in name else 1), []).append(parameter)
        self.momenta = [torch.zeros_like(torch.stack(list(group))) for group in self.groups.values()]
        others = [parameter for name, parameter in named if not is_block_matrix(name, parameter)]
        fused = others[0].device.type == "cuda"
        self.adam = torch.optim.AdamW(others, lr=other_rate, betas=(0.9, 0.98), weight_decay=0.0, fused=fused)

    @torch.no_grad()
    def step(self, scale: float) -> None:
        nn.utils.clip_grad_norm_(self.parameters, 1.0)
        rate = self.matrix_rate * scale
        for ((rows, columns), pieces), group, momentum in zip(
            self.groups, self.groups.values(), self.momenta, strict=True
        ):
            gradient = torch.stack([parameter.grad for parameter in group if parameter.grad is not None])
            momentum.lerp_(gradient, 1 - MOMENTUM)
            update = gradient.lerp_(momentum, MOMENTUM).view(-1, rows // pieces, columns)
            update = orthogonalised(update).reshape(momentum.shape)
            weights: list[Tensor] = list(group)
            torch._foreach_mul_(weights, 1 - rate * DECAY)
            torch._foreach_add_(weights, list(update.unbind()), alpha=-rate * max(1.0, rows / pieces / columns) ** 0.5)
        self.adam.param_groups[0]["lr"] = self.other_rate * scale
        self.adam.step()
        for parameter in self.parameters:
            parameter.grad = None

    def state_dict(self) -> dict[str, Any]:
        return {"muon": self.momenta, "adam": self.adam.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for momentum, saved in zip(self.momenta, state["muon"], strict=True):
            momentum.copy_(saved)
        self.adam.load_state_dict(state["adam"])


def orthogonalised(matrices: Tensor) -> Tensor:
    """Return approximately U V' for each matrix U diag(s) V'. `matrices` is [n, rows, columns]."""
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    x = x.bfloat16() if x.device.type == "cuda" else x
    a, b, c = QUINTIC
    for _ in range(ROUNDS):
        square = x @ x.mT
        x = a * x + (b * square + c * square @ square) @ x
    return (x.mT if tall else x).to(matrices.dtype)


def is_block_matrix(name: str, parameter: Tensor) -> bool:
    """Return True for a matrix inside a layer, but not for embeddings, heads, norms, biases and adaLN maps."""
    return parameter.ndim == 2 and ("blocks." in name or "layers." in name) and "adaLN" not in name
