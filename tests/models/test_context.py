"""A forward of a part of a row, with stored keys and values, gives the numbers of the whole row."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from d5p4.models import load
from d5p4.models.base import NativeModel
from d5p4.types import Context, Hidden, Store
from tests.checkpoints import WRITERS

KINDS = list(WRITERS)
SHIFTED_BLOCKS = ("fast_dllm", "fast_dllm_llama")
BLOCKS = [kind for kind in KINDS if kind in ("sdar", "sdar_moe", *SHIFTED_BLOCKS, "stable_diffcoder", "llada2_moe")]
BOUND = 1e-10


def model_of(tmp_path: Path, kind: str) -> NativeModel:
    model = load(WRITERS[kind](tmp_path, dtype=torch.float64), "cpu", "float64")
    assert model.cache_shape == (2, 4 if kind in ("llada", "mdlm") else 2, 12 if kind == "sdar" else 8)
    assert model.block == (4 if kind in BLOCKS else None)
    return model


def rows(model: NativeModel, count: int, length: int) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, 45, (count, length), generator=generator)
    return tokens.masked_fill(torch.rand(count, length, generator=generator) < 0.3, model.mask_id)


def empty_store(model: NativeModel, slots: int, capacity: int) -> Tensor:
    """A store of NaN, so that reading what was never written shows."""
    layers, heads, width = model.cache_shape
    return torch.full((layers, 2, slots, capacity, heads, width), float("nan"), dtype=model.dtype)


def put(kv: Tensor, slot: int, start: int, hidden: Hidden, row: int, columns: slice) -> None:
    for layer, pair in enumerate(hidden.kept):
        for which, values in enumerate(pair):
            part = values[row, columns]
            kv[layer, which, slot, start : start + len(part)] = part


@pytest.mark.parametrize("kind", BLOCKS)
def test_block_by_block_equals_the_whole_row(tmp_path: Path, kind: str) -> None:
    """Two rows of different lengths; the last block of each is partial and padded on the right."""
    model = model_of(tmp_path, kind)
    lengths, prefix = (11, 15), (4, 8)
    tokens = rows(model, 2, 15)
    whole = [model.body(tokens[r : r + 1, : lengths[r]]).states[0] for r in (0, 1)]

    prompts = torch.stack((torch.cat((tokens[0, :4], tokens[0, :4])), tokens[1, :8]))
    real = torch.ones(2, 8, dtype=torch.bool)
    real[0, :4] = False
    start = model.body(prompts, real, Context(keep=True))
    assert (start.edge is None) == (kind not in SHIFTED_BLOCKS)
    kv = empty_store(model, 3, 16)
    slot = torch.tensor([2, 0])
    for r in (0, 1):
        assert (start.states[r, 8 - prefix[r] :] - whole[r][: prefix[r]]).abs().max() <= BOUND
        put(kv, int(slot[r]), 0, start, r, slice(8 - prefix[r], None))
    first, edge = torch.tensor(prefix), start.edge
    for _ in range(2):
        part = torch.zeros(2, 4, dtype=torch.int64)
        valid = first[:, None] + torch.arange(4) < torch.tensor(lengths)[:, None]
        for r in (0, 1):
            part[r, valid[r]] = tokens[r, first[r] : min(int(first[r]) + 4, lengths[r])]
        context = Context(first, (Store(kv, slot, first),), edge, keep=True)
        hidden = model.body(part, valid, context)
        for r in (0, 1):
            ours = hidden.states[r, valid[r]]
            assert (ours - whole[r][first[r] : first[r] + len(ours)]).abs().max() <= BOUND
            put(kv, int(slot[r]), int(first[r]), hidden, r, slice(None, len(ours)))
        first, edge = first + 4, hidden.edge


@pytest.mark.parametrize("kind", KINDS)
def test_a_part_in_the_hole_of_a_stored_row_equals_the_whole_row(tmp_path: Path, kind: str) -> None:
    """The rows keep their prefix in one store and the rest in another; the parts have different lengths."""
    model = model_of(tmp_path, kind)
    tokens = rows(model, 3, 12)
    whole = model.body(tokens, None, Context(keep=True))
    assert (whole.states - model.body(tokens).states).abs().max() == 0
    first, sizes = 4, torch.tensor([4, 4 if model.causal_context else 3, 4])  # causal: only whole blocks
    prefix, rest = empty_store(model, 3, 9), empty_store(model, 3, 14)
    for r in range(3):
        put(prefix, 2 - r, 0, whole, r, slice(None, first))
        put(rest, r, first + int(sizes[r]), whole, r, slice(first + int(sizes[r]), None))
    end = first + 4 if model.block else 12
    hole = torch.stack((torch.zeros_like(sizes), first + sizes), dim=1)
    stores = (
        Store(prefix, torch.tensor([2, 1, 0]), torch.full((3,), first)),
        Store(rest, torch.arange(3), torch.full((3,), end), hole),
    )
    valid = torch.arange(4) < sizes[:, None]
    edge = whole.states[:, first] if kind in ("dream", *SHIFTED_BLOCKS) else None  # the state before the part
    hidden = model.body(tokens[:, first : first + 4], valid, Context(torch.full((3,), first), stores, edge))
    assert hidden.kept is None and hidden.edge is None
    assert (hidden.states - whole.states[:, first : first + 4])[valid].abs().max() <= BOUND
    assert hidden.states.isfinite().all()


def test_gradients_flow_through_stores(tmp_path: Path) -> None:
    model = model_of(tmp_path, "sdar").requires_grad_()
    tokens = rows(model, 1, 8)
    start = model.body(tokens[:, :4], None, Context(keep=True))
    kv = torch.stack([torch.stack(pair) for pair in start.kept])
    store = Store(kv, torch.zeros(1, dtype=torch.int64), torch.tensor([4]))
    part = model.body(tokens[:, 4:], None, Context(torch.tensor([4]), (store,))).states
    whole = model.body(tokens).states[:, 4:]
    weight = model.model.layers[0].self_attn.k_proj.weight
    ours, theirs = (torch.autograd.grad(states.square().sum(), weight)[0] for states in (part, whole))
    assert theirs.abs().max() > 1e-3 and (ours - theirs).abs().max() <= BOUND
