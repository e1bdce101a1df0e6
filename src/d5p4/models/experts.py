"""Mixtures of experts: a router chooses a few SwiGLU layers (experts) for every token.

The experts of a layer are stacked into three parameters. On GPUs with a grouped matrix product, one call runs them all,
and the CPU never waits for the GPU. Otherwise a loop runs the experts that have tokens.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..ops.body import silu_gate
from ..ops.precision import working_dtype

ALIGNMENT = 8  # the grouped product needs rows of a multiple of 16 bytes, which are 8 numbers in bfloat16


class MLP(nn.Module):
    """A SwiGLU layer from [..., D] to [..., D] with `inner` hidden units."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, h: Tensor) -> Tensor:
        return self.down_proj(silu_gate(self.gate_proj(h), self.up_proj(h)))


class Router(nn.Module):
    """Chooses k experts for every token.

    The share s of an expert is softmax(W h) or, if `sigmoid`, sigmoid(W h), and its rank is r = s + bias. The score of
    a group of experts is the sum of its two largest r. The k experts with the largest r in the `best_groups` groups
    with the best scores are chosen. The weight of an expert is its s, divided by the sum of the k chosen s if
    `normalised`, times `scale`.
    """

    expert_bias: nn.Parameter | None

    def __init__(
        self,
        width: int,
        experts: int,
        chosen: int,
        normalised: bool,
        sigmoid: bool = False,
        groups: int = 1,
        best_groups: int = 1,
        scale: float = 1.0,
        bias: bool = False,
    ) -> None:
        super().__init__()
        self.weight = _drawn(experts, width)
        self.register_parameter("expert_bias", nn.Parameter(torch.zeros(experts)) if bias else None)
        self.chosen, self.normalised, self.sigmoid = chosen, normalised, sigmoid
        self.groups, self.best_groups, self.scale = groups, best_groups, scale

    def forward(self, h: Tensor) -> tuple[Tensor, Tensor]:
        """Return the chosen experts [M, k] for h [M, D] and their weights [M, k], in float32 or wider."""
        work = working_dtype(h.dtype)  # a rounded number could choose another expert
        affinity = F.linear(h.to(work), self.weight.to(work))
        share = affinity.sigmoid() if self.sigmoid else affinity.softmax(-1)
        rank = share if self.expert_bias is None else share + self.expert_bias.to(work)
        if self.best_groups < self.groups:
            grouped = rank.unflatten(-1, (self.groups, -1))  # [M, groups, experts per group]
            best = grouped.topk(min(2, grouped.shape[-1])).values.sum(-1).topk(self.best_groups).indices
            outside = torch.ones_like(grouped[..., 0], dtype=torch.bool).scatter(-1, best, False)
            rank = grouped.masked_fill(outside[..., None], -torch.inf).flatten(1)
        experts = rank.topk(self.chosen).indices
        weights = share.gather(-1, experts)
        if self.normalised:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return experts, weights * self.scale


class Experts(nn.Module):
    """E SwiGLU layers. A checkpoint stores the matrices of each expert as separate tensors."""

    def __init__(self, count: int, width: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = _drawn(count, inner, width)
        self.up_proj = _drawn(count, inner, width)
        self.down_proj = _drawn(count, width, inner)

    def stored_names(self, owner: str, leaf: str) -> list[str]:
        """Return the names of the matrices that are stacked in the parameter `leaf` of this module, called `owner`."""
        return [f"{owner}.{expert}.{leaf}.weight" for expert in range(len(self.gate_proj))]

    @property
    def recordable(self) -> bool:
        """Whether a forward never waits for the device."""
        weight = self.gate_proj
        if not weight.is_cuda or weight.dtype != torch.bfloat16 or not hasattr(torch, "_grouped_mm"):
            return False
        aligned = weight.shape[1] % ALIGNMENT == 0 and weight.shape[2] % ALIGNMENT == 0
        return aligned and torch.cuda.get_device_capability(weight.device)[0] in (9, 10)

    def forward(self, h: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """Return [M, D], the weighted sums of the outputs of the chosen experts [M, k] for h [M, D]."""
        numbers, order = experts.flatten().sort(stable=True)
        rows = h[order // experts.shape[1]]
        training = torch.is_grad_enabled() and (h.requires_grad or self.gate_proj.requires_grad)
        sorted_outputs = self._grouped(rows, numbers) if self.recordable and not training else self._loop(rows, numbers)
        # Every output returns to its place and is added in the order of the choice, so that the sum is deterministic.
        outputs = sorted_outputs[order.argsort()].unflatten(0, experts.shape)
        return (outputs.to(weights.dtype) * weights[..., None]).sum(1).to(h.dtype)

    def _grouped(self, rows: Tensor, numbers: Tensor) -> Tensor:
        ends = torch.searchsorted(numbers, torch.arange(len(self.gate_proj), device=rows.device), right=True).int()

        def product(x: Tensor, matrices: Tensor) -> Tensor:
            return torch._grouped_mm(x, matrices.transpose(1, 2), offs=ends)

        inner = silu_gate(product(rows, self.gate_proj), product(rows, self.up_proj))
        return product(inner, self.down_proj)

    def _loop(self, rows: Tensor, numbers: Tensor) -> Tensor:
        counts = torch.bincount(numbers, minlength=len(self.gate_proj)).tolist()
        outputs = [rows[:0]]
        for expert, part in enumerate(rows.split(counts)):
            if len(part):
                gate, up, down = (w[expert] for w in (self.gate_proj, self.up_proj, self.down_proj))
                outputs.append(F.linear(silu_gate(F.linear(part, gate), F.linear(part, up)), down))
        return torch.cat(outputs)


class SparseMLP(nn.Module):
    """A router with its experts. Every token also runs through an expert with `shared` hidden units, if any."""

    def __init__(self, router: nn.Module, count: int, width: int, inner: int, shared: int = 0) -> None:
        super().__init__()
        self.gate = router
        self.experts = Experts(count, width, inner)
        self.shared_experts = MLP(width, shared) if shared else None

    def forward(self, h: Tensor) -> Tensor:
        rows = h.flatten(0, -2)
        mixed = self.experts(rows, *self.gate(rows)).view_as(h)
        return mixed if self.shared_experts is None else mixed + self.shared_experts(h)


def _drawn(*shape: int) -> nn.Parameter:
    """Return random matrices [..., outputs, inputs], drawn like those of nn.Linear."""
    parameter: Any = nn.Parameter(torch.empty(shape))
    nn.init.uniform_(parameter, -(shape[-1] ** -0.5), shape[-1] ** -0.5)
    return parameter
