"""Keyed randomness: the published vectors, the distribution, and numbers that may never change."""

from __future__ import annotations

import pytest
import torch
from scipy import stats
from torch import Tensor

from d5p4 import rng

ONES = 0xFFFFFFFF


def as_key(low: int, high: int) -> Tensor:
    """Two 32-bit words as the int64 key, low word first."""
    word = low | high << 32
    return torch.tensor(word - (1 << 64) if word >> 63 else word)


def test_philox_gives_the_published_vectors() -> None:
    for key, counter, word in (
        ((0, 0), (0, 0, 0, 0), 0x6627E8D5),
        ((ONES, ONES), (ONES, ONES, ONES, ONES), 0x408F276D),
        ((0xA4093822, 0x299F31D0), (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), 0xD16CFE09),
    ):
        assert rng.philox(as_key(*key), counter).item() == word


STREAMS = rng.mix(11, torch.arange(64))


@pytest.fixture(scope="module")
def draws() -> Tensor:
    """Uniforms [64 streams, 64 positions, 32 children]."""
    return rng.uniform(STREAMS[:, None, None], torch.arange(64)[:, None], torch.arange(32))


def test_uniform_is_strictly_inside_zero_and_one(draws: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    assert draws.dtype == torch.float64
    assert draws.min() > 0 and draws.max() < 1
    for word in (0, ONES):  # the two ends, which a sample would never meet
        monkeypatch.setattr(rng, "philox", lambda key, counter, word=word: torch.tensor(word))
        u = rng.uniform(torch.tensor(0), 0)
        assert 0 < u < 1
        assert rng.gumbel(u).isfinite()


def test_uniform_is_uniform(draws: Tensor) -> None:
    counts = torch.histc(draws, 256, 0, 1)
    assert stats.chisquare(counts.numpy()).pvalue > 1e-3
    assert stats.kstest(draws.flatten().numpy(), "uniform").pvalue > 1e-3


def test_neighbouring_uniforms_are_independent(draws: Tensor) -> None:
    for dim, name in enumerate(("streams", "positions", "children")):
        length = draws.shape[dim] // 2
        pairs = draws.movedim(dim, 0).reshape(length, 2, -1)  # pairs that share no draw
        left, right = (pairs[:, side].flatten() for side in (0, 1))
        cell = (left * 16).long() * 16 + (right * 16).long()
        assert stats.chisquare(torch.bincount(cell, minlength=256).numpy()).pvalue > 1e-3, name


def test_streams_that_differ_in_one_word_are_independent() -> None:
    seeds = torch.arange(4096)
    base = rng.uniform(rng.mix(seeds, 5, rng.TOKEN, 0), 3)
    for other in (
        rng.mix(seeds, 6, rng.TOKEN, 0),  # another prompt
        rng.mix(seeds, 5, rng.ORDER, 0),  # another purpose
        rng.mix(seeds, 5, rng.TOKEN, 1),  # another step
        rng.mix(seeds + 1, 5, rng.TOKEN, 0),  # another seed
    ):
        cell = (base * 8).long() * 8 + (rng.uniform(other, 3) * 8).long()
        assert stats.chisquare(torch.bincount(cell, minlength=64).numpy()).pvalue > 1e-3


def test_gumbel_argmax_draws_from_the_distribution() -> None:
    p = torch.tensor([0.5, 0.25, 0.15, 0.1], dtype=torch.float64)
    noise = rng.gumbel(rng.uniform(rng.mix(3, torch.arange(20_000))[:, None], torch.arange(4)))
    counts = torch.bincount((p.log() + noise).argmax(-1), minlength=4)
    assert stats.chisquare(counts.numpy(), (p * 20_000).numpy()).pvalue > 1e-3


def test_hash_tokens_depends_on_every_token_and_position() -> None:
    tokens, positions = torch.tensor([5, 9, 5, 2]), torch.arange(4)
    rows = [tokens]
    for place in range(4):
        changed = tokens.clone()
        changed[place] += 1
        rows.append(changed)
    rows += [tokens[[1, 0, 2, 3]], tokens.flip(0)]
    assert rng.hash_tokens(torch.stack(rows), positions).unique().numel() == len(rows)
    assert rng.hash_tokens(tokens, positions) != rng.hash_tokens(tokens, positions + 1)
    assert rng.hash_tokens(tokens, positions) != rng.hash_tokens(positions, tokens)
    assert rng.hash_tokens(tokens[:3], positions[:3]) != rng.hash_tokens(tokens, positions)
    nowhere = positions.where(positions < 3, -1)  # a token at a negative position does not count
    assert rng.hash_tokens(tokens[:3], positions[:3]) == rng.hash_tokens(tokens, nowhere)


def test_hash_tokens_does_not_collide() -> None:
    rows = torch.cartesian_prod(*[torch.arange(10)] * 5)  # 1e5 rows of five small tokens
    assert rng.hash_tokens(rows, torch.arange(5)).unique().numel() == len(rows)


# Frozen since the first release ---------------------------------------------------------------------------------------


def test_key_of_is_frozen() -> None:
    for value, key in (
        (0, 0),
        (1, 1),
        (-1, -1),
        (2**64 - 1, -1),
        (2**63, -(2**63)),
        (12345678901234567890, -6101065172474983726),
        ("", -5426141060434712860),
        ("a", 3405396810240292928),
        ("prompt-1", 9205575635437560729),
        ("é", 3394012004367669963),
    ):
        assert rng.key_of(value) == key, value


def test_hashes_are_frozen() -> None:
    assert (rng.TOKEN, rng.ORDER, rng.SELECT, rng.LIKELIHOOD) == (1, 2, 3, 4)
    assert rng.mix(0).item() == 258863698125685209
    assert rng.mix(1, 2, 3).item() == 17824878756907967
    assert rng.mix(3, 2, 1).item() == 2392573924989223431
    assert rng.hash_tokens(torch.tensor([5, 6, 7]), torch.arange(3)).item() == 7551992540365352275


def test_uniforms_are_frozen() -> None:
    stream = rng.mix(7, rng.key_of("a"), rng.TOKEN, 3)
    assert stream.item() == -8205118211530954075
    assert rng.philox(stream, (torch.arange(4), 2, 0, 0)).tolist() == [677056810, 2702074680, 1068714222, 2285672507]
    expected = ["0x1.42d88954p-3", "0x1.421cc671p-1", "0x1.fd9a4774p-3", "0x1.10793077p-1"]
    assert rng.uniform(stream, torch.arange(4), 2).tolist() == [float.fromhex(u) for u in expected]


def test_rows_of_any_length_hash_as_each_alone() -> None:
    rows = [[3, 1, 2], [], [3, 1, 2], [5] * 40, [1]]
    alone = [int(rng.hash_tokens(torch.tensor(row, dtype=torch.int64), torch.arange(len(row)))) for row in rows]
    assert rng.hash_rows(rows).tolist() == alone
    assert rng.hash_rows([]).tolist() == []
