"""What every kernel promises, for any device and size: the interpreter runs these small, a GPU at real sizes."""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
from torch import Tensor

from d5p4 import rng
from d5p4.models.layers import rotary
from d5p4.ops import attention as plain_attention
from d5p4.ops import body as plain_body
from d5p4.ops.kernels import attention, body, gram, off, partition_map, sample, vocab
from d5p4.ops.kernels import rng as kernel_rng
from d5p4.ops.partition_map import partition_map as plain_map
from d5p4.ops.problem import prepare
from d5p4.ops.sample import inverse_cdf
from d5p4.ops.ties import first_equal
from d5p4.ops.vocab import plain_stats
from d5p4.search.dpp import dpp_kernel
from d5p4.types import Store
from tests.ops.cases import attention_inputs, normals, within
from tests.search.cases import inputs, is_transversal

WANT = ("entropy", "best", "margin", "certainty")


def logits_and_offset(rows: int, vocabulary: int, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor]:
    """Random rows and, first, rows that are hard: all equal, one-hot, minus infinities, a spread of 1e4."""
    g = torch.Generator().manual_seed(vocabulary)
    logits = torch.randn(rows, vocabulary, generator=g) * torch.tensor([0.5, 3.0, 10.0])[torch.arange(rows) % 3, None]
    logits[0] = 1.5
    logits[1], logits[1, vocabulary // 2] = -math.inf, 3.0
    logits[2, ::2] = -math.inf
    logits[3] = torch.linspace(-1e4, 0, vocabulary)
    offset = torch.randn(vocabulary, generator=g) * 0.1
    offset[[0, vocabulary - 2]] = -math.inf
    return logits.to(device, dtype), offset.to(device)


def check_statistics(rows: int, vocabulary: int, dtype: torch.dtype, device: str = "cpu") -> None:
    logits, offset = logits_and_offset(rows, vocabulary, dtype, device)
    stats = vocab.join_blocks(vocab.block_stats(logits, offset, WANT), WANT, offset)
    wide = logits.double() + offset.double()
    exact = plain_stats(wide, offset == -math.inf, WANT)
    for name, values in stats.items():
        both = torch.stack([values.double(), exact[name]])
        finite = both.isfinite().all(0)  # self-certainty of a token without mass is infinite in both
        assert (both[0] == both[1])[~finite].all(), name
        error = (both[0] - both[1]).abs() / both[1].abs().clamp_min(1)
        assert error[finite].max() < 1e-6, f"{name} is off by {error[finite].max():.1e}"


def check_bad_rows(vocabulary: int, device: str = "cpu") -> None:
    """Rows without a distribution have no finite log-sum-exp, wherever the bad number lies."""
    logits = torch.zeros(6, vocabulary, device=device)
    logits[0, 1], logits[1, -1], logits[2, 5], logits[3] = math.nan, math.inf, math.nan, -math.inf
    blocks = vocab.block_stats(logits, None, ("entropy",))
    finite = vocab.join_blocks(blocks, ("entropy",))["logsumexp"].isfinite()
    assert finite.tolist() == [False, False, False, False, True, True]
    tokens = sample.draw_tokens(logits, None, blocks, torch.full((6, 2), 0.5, dtype=torch.float64, device=device))
    assert (tokens >= 0).all() and (tokens < vocabulary).all()


def check_draws(
    rows: int, vocabulary: int, dtype: torch.dtype, temperature: float, device: str = "cpu", children: int = 5
) -> None:
    """u lies between the token's borders in the float64 CDF, within 1e-6; and never a token without mass."""
    logits, offset = logits_and_offset(rows, vocabulary, dtype, device)
    u = rng.uniform(rng.mix(torch.arange(rows))[:, None], torch.arange(children)).to(device)
    u[:, 0], u[:, -1] = 0.5 / 2**32, 1 - 0.5 / 2**32
    blocks = vocab.block_stats(logits, offset, (), temperature)
    tokens = sample.draw_tokens(logits, offset, blocks, u, temperature)
    wide = (logits.double() + offset.double()) / temperature
    p = torch.softmax(wide, -1)
    assert (p.gather(1, tokens) > 0).all() and (offset[tokens] > -math.inf).all()
    upper = p.cumsum(-1)
    lower = upper - p
    assert (lower.gather(1, tokens) <= u + 1e-6).all() and (upper.gather(1, tokens) >= u - 1e-6).all()
    inner = (tokens == inverse_cdf(wide, u))[:, 1:-1]  # at the very ends the last bits of the tail decide
    assert inner.double().mean() > 0.97


def check_gram(pools: int, size: int, length: int, width: int, dtype: torch.dtype, device: str = "cpu") -> None:
    g = torch.Generator().manual_seed(size)
    features = torch.randn(pools * size, length + 2, width, generator=g) + 1
    features[0] = 0
    features = features.to(device, dtype)[:, 1:-1]
    slot = torch.randint(0, max(1, size // 2), (pools, size), generator=g).to(device)
    slot += torch.arange(pools, device=device)[:, None] * size
    slot[:, :2] = torch.tensor([[0, 1]], device=device)
    cosine = gram.pool_gram(features, slot, first_equal(slot))
    rows = torch.nn.functional.normalize(features.double().flatten(1), dim=-1)[slot]
    exact = rows @ rows.mT
    equal = slot[:, :, None] == slot[:, None, :]
    torch.testing.assert_close(cosine.double(), torch.where(equal, 1.0, exact), atol=1e-6, rtol=0)
    assert torch.equal(cosine, cosine.mT) and (cosine.diagonal(dim1=1, dim2=2) == 1).all()
    same = first_equal(slot)  # rows with one slot are one row
    assert torch.equal(cosine, cosine.gather(1, same[:, :, None].expand_as(cosine)))


def check_solver(k: int, w: int, prompts: int, kind: str, beta: float, device: str = "cpu", **options: object) -> None:
    """The plain solver's value within 1e-3 nat, and its set where the difference is more than rounding."""
    quality, similarity, tie = (x.to(device) for x in inputs(prompts, k, w, k + w, dim=64, parent=0.5))
    kernel, gain = dpp_kernel(kind, quality, similarity, beta)
    narrow = kernel.float()
    chosen = partition_map.partition_map(narrow, k, gain, quality, tie, **options)
    plain = plain_map(narrow.double(), k, gain, quality, tie, **options)
    assert is_transversal(chosen.cpu(), k, w)
    problem = prepare(kernel, k, gain, quality, None)
    value, reference = (problem.score(sets[:, None])[1][:, 0] for sets in (chosen, plain))
    assert (value >= reference - 1e-3).all(), f"worse by {(reference - value).max():.1e} nat"
    if k * w <= partition_map.EXACT:
        assert torch.equal(chosen, plain)


def check_full_search(k: int, w: int, prompts: int, beta: float, shared: float, device: str = "cpu") -> None:
    """From all starts, never below greedy elimination in float64 by more than 1e-3 nat, whatever float32 rounds."""
    quality, similarity, tie = (x.to(device) for x in inputs(prompts, k, w, k + w, dim=24, shared=shared, parent=0.0))
    kernel = dpp_kernel("additive", quality, similarity, beta)[0].float()
    chosen = partition_map.partition_map(kernel, k, None, quality, tie)
    greedy = plain_map(kernel.double(), k, None, quality, tie, starts="n", local_search=False)
    zeros, value = prepare(kernel.double(), k, None, quality, None).score(torch.stack([chosen, greedy], 1))
    regular = zeros[:, 1] == 0
    assert is_transversal(chosen.cpu(), k, w) and (zeros[regular, 0] == 0).all()
    bound = 1e-9 if k * w <= partition_map.EXACT else 1e-3
    loss = (value[:, 1] - value[:, 0])[regular]
    assert (loss <= bound).all(), f"worse by {loss.max():.1e} nat"


def check_hard_problems(k: int, w: int, prompts: int, device: str = "cpu", every: bool = True) -> None:
    """Whatever the input, one item of each group; every kernel with every quality, or each once."""
    quality, similarity, tie = (x.to(device) for x in inputs(prompts, k, w, 3))
    size = k * w
    nan = similarity.clone()
    nan[:, 1, 2] = nan[:, 2, 1] = math.nan
    same = torch.arange(size, device=device) // 2 * 2
    kernels = [torch.full_like(similarity, value) for value in (0.0, 1.0, math.nan, math.inf)]
    kernels += [nan, similarity[:, same][:, :, same], -similarity]
    worths = [quality, quality * 0, quality * math.nan]
    pairs = itertools.product(kernels, worths) if every else zip(kernels, itertools.cycle(worths), strict=False)
    for kernel, worth in pairs:
        chosen = partition_map.partition_map(kernel.float(), k, None, worth, tie)
        assert is_transversal(chosen.cpu(), k, w)
    chosen = partition_map.partition_map(torch.zeros_like(similarity).float(), k, None, quality, tie)
    best = quality.view(prompts, k, w).argmax(-1) + torch.arange(k, device=device) * w
    assert torch.equal(chosen, best), "where all determinants vanish quality decides"


def check_permutation(k: int, w: int, prompts: int, kind: str, device: str = "cpu") -> None:
    """Groups in another order, and items in another order inside them: the same choice."""
    quality, similarity, tie = (x.to(device) for x in inputs(prompts, k, w, 9))
    quality[:, 1::w], similarity[:, 1::w] = quality[:, ::w], similarity[:, ::w]
    similarity[:, :, 1::w] = similarity[:, :, ::w]  # equal siblings: ties decide between them
    g = torch.Generator().manual_seed(0)
    order = torch.stack([torch.randperm(w, generator=g) + group * w for group in torch.randperm(k, generator=g)])
    order = order.flatten().to(device)
    kernel, gain = dpp_kernel(kind, quality, similarity, 10.0)
    first = partition_map.partition_map(kernel.float(), k, gain, quality, tie)
    gain = None if gain is None else gain[:, order]
    kernel = kernel[:, order][:, :, order].float()
    turned = partition_map.partition_map(kernel, k, gain, quality[:, order], tie[:, order])
    assert torch.equal(order[turned].sort(-1).values, first)


def check_equal_rows(k: int, w: int, prompts: int, kind: str, device: str = "cpu") -> None:
    """Pools of a few distinct rows in all groups: several sets have exactly the best value, and one of them is chosen.

    It may differ from the plain solver's: rounding decides between moves of equal value in two groups.
    """
    quality, similarity, tie = inputs(prompts, k, w, 7)
    content = torch.randint(0, k + 1, (prompts, k * w), generator=torch.Generator().manual_seed(k))
    quality, prompt = quality.gather(1, content), torch.arange(prompts)[:, None, None]
    similarity = similarity[prompt, content[:, :, None], content[:, None, :]]
    kernel, gain = dpp_kernel(kind, quality, similarity, 100.0)
    there = (x if x is None else x.to(device) for x in (kernel.float(), gain, quality, tie))
    kernel32, gain32, quality32, tie32 = there
    chosen = partition_map.partition_map(kernel32, k, gain32, quality32, tie32).cpu()
    exact = kernel.float().double()
    problem = prepare(exact, k, gain, quality, None)
    both = torch.stack([chosen, plain_map(exact, k, gain, quality, tie)], 1)
    zeros, value = problem.score(both)
    assert torch.equal(zeros[:, 0], zeros[:, 1])
    torch.testing.assert_close(value[:, 0], value[:, 1], atol=1e-9, rtol=0)
    own = content.view(prompts, k, w) == content.gather(1, chosen)[:, :, None]  # siblings equal to the chosen one
    first = torch.where(own, tie.view(prompts, k, w), torch.iinfo(torch.int64).max).amin(-1)
    assert torch.equal(tie.gather(1, chosen), first), "among equal siblings the smallest tie is chosen"


def check_rng(size: int, device: str = "cpu") -> None:
    """The same bits as plain torch on the CPU."""
    g = torch.Generator().manual_seed(size)
    a, b = torch.randint(-(2**63), 2**63 - 1, (2, size), generator=g)
    c = torch.randint(0, 70000, (size,), generator=g)
    there = [x.to(device) for x in (a, b, c)]
    assert torch.equal(kernel_rng.mix(there).cpu(), rng.mix(a, b, c))
    assert torch.equal(kernel_rng.uniform(*there).cpu(), rng.uniform(a, b, c))
    tokens, positions = c.view(5, -1), torch.arange(-2, size // 5 - 2).expand(5, -1)  # negative ones do not count
    hashes = kernel_rng.hash_tokens(tokens.to(device), positions.to(device)).cpu()
    assert torch.equal(hashes, rng.hash_tokens(tokens, positions))


def close(x: Tensor, y: Tensor, units: dict[torch.dtype, int]) -> bool:
    """Whether a kernel agrees with the plain version. In half precision a value may round the other way, and its
    product with it; in float32 the order of a sum, exp and a quotient show. The interpreter cuts bfloat16 off where
    CUDA rounds. On CUDA, nearly all half-precision numbers are equal."""
    same = not x.is_cuda or x.dtype == torch.float32 or (x == y).double().mean() > 0.99
    return bool(same) and x.dtype == y.dtype and x.shape == y.shape and within(units[x.dtype], x, y)


NORM_UNITS = {torch.float32: 8, torch.bfloat16: 3, torch.float16: 2}
GATE_UNITS = {torch.float32: 32, torch.bfloat16: 3, torch.float16: 2}


def check_norm(shape: tuple[int, ...], dtype: torch.dtype, device: str = "cpu") -> None:
    x, delta = normals(2, *shape, dtype=dtype, device=device, scale=3)
    [weight] = normals(1, shape[-1], dtype=dtype, device=device, seed=1)
    for more in (delta, None):
        total, normal = body.add_rms_norm(x, more, weight, 1e-5)
        expected = x if more is None else x + more
        cut_off = device == "cpu" and dtype == torch.bfloat16
        assert torch.equal(total, expected) or (cut_off and within(1, total, expected))
        with off():
            assert close(normal, plain_body.add_rms_norm(total, None, weight, 1e-5)[1], NORM_UNITS)


def angles_of(positions: Tensor, width: int, dtype: torch.dtype) -> Any:
    return rotary(positions, width, 10000.0, dtype)


def check_rotation(
    tokens: int, heads: int, width: int, angle_rows: int, dtype: torch.dtype, device: str = "cpu"
) -> None:
    """The same bits, from whole rows and from a part of a wider projection."""
    [x] = normals(1, 3, tokens, 3 * heads * width, dtype=dtype, device=device)
    positions = torch.randint(0, 500, (angle_rows, tokens), generator=torch.Generator().manual_seed(1)).to(device)
    angles = angles_of(positions, width, dtype)
    for part in (x.chunk(3, dim=-1)[1], x[..., : heads * width].contiguous()):
        turned = body.norm_rotate(part, None, 0.0, *angles, width)
        with off():
            plain = plain_body.norm_rotate(part, None, 0.0, *angles)
        assert turned.is_contiguous() and turned.dtype == dtype
        assert torch.equal(turned, plain) or (device == "cpu" and dtype == torch.bfloat16 and within(1, turned, plain))


def check_norm_rotate(
    tokens: int, heads: int, width: int, turned: int, dtype: torch.dtype, device: str = "cpu"
) -> None:
    """Rotations subtract, so the error is bounded relative to the largest number of a head."""
    [x] = normals(1, 3, tokens, 3 * heads * width, dtype=dtype, device=device, scale=3, seed=3)
    [weight] = normals(1, width, dtype=dtype, device=device, seed=4)
    angles = angles_of(torch.arange(tokens, device=device)[None], turned, dtype)
    for factor in (weight, weight.float(), None):
        given = (x.chunk(3, dim=-1)[1], factor, 1e-6, *angles, width)
        got = body.norm_rotate(*given)
        with off():
            plain = plain_body.norm_rotate(*given)
        assert got.dtype == dtype and got.shape == plain.shape == (3, tokens, heads, width) and got.is_contiguous()
        scale = plain.double().abs().amax(-1, keepdim=True)
        units = 8 if dtype == torch.float32 else 4
        assert ((got.double() - plain.double()).abs() <= units * torch.finfo(dtype).eps * scale).all()


def check_gate(shape: tuple[int, ...], dtype: torch.dtype, device: str = "cpu") -> None:
    a, b = normals(2, *shape, dtype=dtype, device=device, scale=4)
    product = body.silu_gate(a, b)
    with off():
        assert close(product, plain_body.silu_gate(a, b), GATE_UNITS)


def check_attention(dtype: torch.dtype, device: str = "cpu", **shape: Any) -> None:
    """With both stores and with fewer, against float64. A result is a mean of values, so they bound its error.

    Half precision rounds the weights and the result; the interpreter cuts both off.
    """
    given, own, stores = attention_inputs(dtype=dtype, device=device, **shape)
    whole = [x.nan_to_num() for x in given]
    units = 32 if dtype == torch.float32 else 2
    causal = torch.arange(len(own), device=device) % 2 == 0
    cases = [(given, own, stores), (given, own, stores[1:]), (given, own, []), (whole, None, stores)]
    for (parts, mask, some), order in itertools.product(cases, (None, causal)):
        mixed = attention.attend_stored(*parts, mask, some, 1, order)
        wide = [store._replace(kv=store.kv.double()) for store in some]
        exact = plain_attention.attend_stored(*(x.double() for x in parts), mask, wide, 1, order)
        assert mixed.dtype == dtype and mixed.is_contiguous() and mixed.shape == exact.shape
        largest = max(float(x.nan_to_num().abs().max()) for x in (given[2], *(store.kv[1, 1] for store in some)))
        error = float((mixed.double() - exact).abs().max())
        assert error <= units * torch.finfo(dtype).eps * largest, error
        if len(mixed) > 1 and mask is not None:
            assert (mixed[1] == 0).all()


def check_attention_alone(dtype: torch.dtype, device: str = "cpu", **shape: Any) -> None:
    """A row's bits do not depend on other rows, on the number of slots, or on the number of positions in a slot."""
    given, own, stores = attention_inputs(dtype=dtype, device=device, **shape)
    mixed = attention.attend_stored(*given, own, stores, 0)
    for rows in (slice(2, 3), slice(0, None, 2)):
        few = []
        for store in stores:
            kv = store.kv[:, :, store.slot[rows]]
            hole = None if store.hole is None else store.hole[rows]
            slot = torch.arange(kv.shape[2], device=device)
            few.append(Store(torch.cat([kv, kv], 3), slot, store.length[rows], hole))
        part = [x[rows] for x in (*given, own)]
        assert torch.equal(attention.attend_stored(*part, few, 0), mixed[rows])
