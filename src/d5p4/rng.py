"""Keyed randomness: every random number is a pure function of its purpose and place.

A 64-bit stream is mixed from (seed, prompt key, purpose, step, parent's tokens, parent's number among equal parents).
Philox4x32-10 with that stream as its key and (position, child) as its counter gives the uniform number. Nothing is
consumed in sequence, so batch size, padding, order of prompts, de-duplication and the number of ranks cannot change a
draw. Integers are int64 tensors, and overflow wraps around. Draws have not changed since the first release. On CUDA,
each function is one kernel launch and returns the same bits.
"""

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from .ops import kernels
from .ops.precision import wide

TOKEN, ORDER, SELECT, LIKELIHOOD, BRANCH = 1, 2, 3, 4, 5
"""What a random number draws: a token, a position to reveal, a parent, positions that the likelihood bound masks, or
the noise of a branch of a tree."""

_MASK32 = 0xFFFFFFFF


def _signed(value: int) -> int:
    """Return the int64 number that has the same 64 bits as `value`."""
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >> 63 else value


_GOLDEN, _FIRST, _SECOND = map(_signed, (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def _finish(x: Tensor) -> Tensor:
    """Apply the splitmix64 finaliser, a bijection of 64 bits in which every input bit affects every output bit.

    The masks turn torch's right shift of int64 numbers, which keeps the sign, into the logical one.
    """
    x = (x ^ (x >> 30 & (1 << 34) - 1)) * _FIRST
    x = (x ^ (x >> 27 & (1 << 37) - 1)) * _SECOND
    return x ^ (x >> 31 & (1 << 33) - 1)


def mix(*words: Tensor | int) -> Tensor:
    """Return a 64-bit hash of each tuple of int64 numbers. The arguments broadcast."""
    device = next((w.device for w in words if isinstance(w, Tensor)), torch.device("cpu"))
    tensors = [
        word.to(torch.int64) if isinstance(word, Tensor) else torch.full((), _signed(word), device=device)
        for word in words
    ]
    if tensors and device.type == "cuda" and kernels.usable(tensors[0]):
        from .ops.kernels.rng import mix as launch

        return launch(torch.broadcast_tensors(*tensors))
    state = torch.zeros((), dtype=torch.int64, device=device)
    for tensor in tensors:
        state = _finish((state + _GOLDEN) ^ _finish(tensor + _GOLDEN))
    return state


def hash_tokens(tokens: Tensor, positions: Tensor) -> Tensor:
    """Return a 64-bit hash [...] of each row of tokens [..., L] at positions [..., L].

    The order of the columns does not matter, and tokens at negative positions do not count.
    """
    if tokens.is_cuda and kernels.usable(tokens):
        from .ops.kernels.rng import hash_tokens as launch

        return launch(*torch.broadcast_tensors(tokens, positions))
    return _finish((mix(tokens, positions) * (positions >= 0)).sum(-1))


def hash_rows(rows: Sequence[Sequence[int]]) -> Tensor:
    """Return the hashes [n] of n rows of any lengths, as `hash_tokens` computes them at positions 0, 1, ..."""
    longest = max(map(len, rows), default=0)
    padded = torch.tensor([[*row, *[-1] * (longest - len(row))] for row in rows], dtype=torch.int64)
    padded = padded.view(len(rows), longest)
    return hash_tokens(padded, torch.arange(longest).where(padded >= 0, -1))


def key_of(value: int | str) -> int:
    """Return the 64-bit key for a prompt's name, which is a whole number or any text."""
    if isinstance(value, int):
        return _signed(value)
    digest = hashlib.blake2b(value.encode(errors="surrogatepass"), digest_size=8).digest()
    return _signed(int.from_bytes(digest, "little"))


def _multiply(constant: int, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the high and the low 32 bits of constant * x, where both factors are below 2**32."""
    product = x * constant  # a product beyond 2**63 wraps around, but its 64 bits are still right
    return (product >> 32) & _MASK32, product & _MASK32


def philox(key: Tensor, counter: tuple[Tensor | int, Tensor | int, Tensor | int, Tensor | int]) -> Tensor:
    """Return the first 32 bits of Philox4x32-10 (Salmon et al., 2011) as int64 in [0, 2**32), with broadcasting."""
    k0, k1 = key & _MASK32, key >> 32 & _MASK32
    c0, c1, c2, c3 = (torch.as_tensor(c, dtype=torch.int64, device=key.device) & _MASK32 for c in counter)
    for _ in range(10):
        high0, low0 = _multiply(0xD2511F53, c0)
        high1, low1 = _multiply(0xCD9E8D57, c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) & _MASK32, (k1 + 0xBB67AE85) & _MASK32
    return c0.expand(torch.broadcast_shapes(c0.shape, c1.shape, c2.shape, c3.shape))


def uniform(stream: Tensor, position: Tensor | int, child: Tensor | int = 0) -> Tensor:
    """Return uniform numbers (x + 1/2) / 2**32 inside (0, 1), where x is what `philox` returns. Arguments broadcast."""
    if stream.is_cuda and kernels.usable(stream):
        from .ops.kernels.rng import uniform as launch

        counters = (c if isinstance(c, Tensor) else stream.new_full((), c) for c in (position, child))
        return launch(*torch.broadcast_tensors(stream, *counters))
    word = philox(stream, (position, child, 0, 0))
    u = (word.to(wide(word.device)) + 0.5) / 2**32
    return u if u.dtype == torch.float64 else u.clamp_max(1 - 2**-24)  # in float32, the largest number would become 1


def draw_index(weights: Tensor, u: Tensor) -> Tensor:
    """Draw indices [P, m] with chances proportional to weights [P, N] >= 0. Uniform numbers u [P, m] decide the draws.

    An index of weight zero is never drawn if another index has a positive weight.
    """
    heap = weights.cumsum(-1)
    return torch.searchsorted(heap, u * heap[:, -1:]).clamp_max(weights.shape[-1] - 1)


def gumbel(u: Tensor) -> Tensor:
    """Turn uniform numbers inside (0, 1) into standard Gumbel noise. argmax(log p + noise) is a draw from p."""
    return -torch.log(-torch.log(u))
