"""Linear layers whose weights are stored in 8 or 4 bits and become a matrix again in every forward.

A row of a weight is cut into groups. A group with the range [low, high], which includes 0, is stored as

    s = (high - low) / (2^bits - 1),    zero = round(-low / s),    q = round(w / s) + zero,    w' = (q - zero) s

Decodes multiply thousands of positions by each matrix in a step, so arithmetic takes longer than reading the weights.
Kernels that multiply packed weights, such as torchao's for int4, are made for a few positions. Here a layer
unpacks its weight and calls the same product as before: it costs a pass over the weights per forward, runs on every
device, has the bits that `deterministic` needs, and can be recorded as a CUDA graph.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..errors import D5P4Error
from ..ops.precision import working_dtype
from .experts import Experts

BITS = {"int8": 8, "int4": 4}
GROUPS = (128, 64, 32)  # sizes of groups, of which the first that divides all widths is taken


class QuantisedLinear(nn.Module):
    """A linear layer with the weight [O, I]. Two numbers of 4 bits share a byte."""

    packed: Tensor  # [O, I] or [O, I / 2] uint8
    scale: Tensor  # [O, groups]
    zero: Tensor  # [O, groups] uint8

    def __init__(self, linear: Any, bits: int) -> None:
        super().__init__()
        self.bits, self.bias, weight = bits, linear.bias, linear.weight.data
        parts = weight.to(working_dtype(weight.dtype), copy=True).unflatten(-1, (-1, linear.group))
        low, high = parts.amin(-1).clamp_max(0), parts.amax(-1).clamp_min(0)
        scale = ((high - low) / (2**bits - 1)).clamp_min(torch.finfo(weight.dtype).tiny).to(weight.dtype)
        zero = (-low / scale).round()
        q = parts.div_(scale[..., None]).round_().add_(zero[..., None]).clamp_(0, 2**bits - 1)
        q = q.to(torch.uint8).flatten(1)
        self.register_buffer("packed", q if bits == 8 else q[:, ::2] | q[:, 1::2] << 4)
        self.register_buffer("scale", scale)
        self.register_buffer("zero", zero.to(torch.uint8))

    @property
    def weight(self) -> Tensor:
        q = self.packed
        if self.bits == 4:
            q = torch.stack((q & 15, q >> 4), dim=-1).flatten(1)
        parts = q.to(self.scale.dtype).unflatten(-1, (self.scale.shape[1], -1))
        return parts.sub_(self.zero[..., None]).mul_(self.scale[..., None]).flatten(1)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


def weight_count(model: Any) -> int:
    """Return the number of weights of a model, however they are stored, or of its head if it is not a module."""
    module = getattr(model, "module", model)
    if not isinstance(module, nn.Module):
        return model.head.weight.numel()
    packed = (part for part in module.modules() if isinstance(part, QuantisedLinear))
    return sum(w.numel() for w in module.parameters()) + sum(p.packed.numel() * 8 // p.bits for p in packed)


def plan(model: Any, kind: str) -> None:
    """Mark the linear layers that `quantise` replaces when their weights are read: all but the head."""
    refused = partial(D5P4Error, option="dtype", value=kind)
    if model.reads_wide or any(isinstance(part, Experts) for part in model.modules()):
        what = "folded weights" if model.reads_wide else "experts"
        raise refused(f"is not for {model.title}, which has {what}; use bfloat16")
    layers: list[Any] = [part for part in model.modules() if isinstance(part, nn.Linear)]
    layers = [layer for layer in layers if layer.weight is not model.unembedding[0]]
    widths = sorted({layer.in_features for layer in layers})
    group = next((group for group in GROUPS if not any(width % group for width in widths)), None)
    if group is None:
        raise refused(f"needs widths that are multiples of {GROUPS[-1]}, but {model.title} has {widths}")
    model.bits = kind
    for layer in layers:
        layer.group = group


def quantise(model: Any, name: str) -> None:
    """Replace a layer whose weight was read, if it is marked."""
    layer = model.get_submodule(name) if name else model
    if isinstance(layer, nn.Linear) and hasattr(layer, "group") and not layer.weight.is_meta:
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, QuantisedLinear(layer, BITS[model.bits]))
