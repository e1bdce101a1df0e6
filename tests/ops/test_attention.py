"""The plain version of attention over stores against a loop over rows, and when the kernel may run."""

import itertools
import math

import pytest
import torch

from d5p4.ops.attention import attend_stored
from tests.ops.cases import attention_inputs


def read_by_row(key, value, own, stores, layer, row):
    """The keys and values [positions, K, d] that a row reads."""
    columns = range(key.shape[1]) if own is None else own[row].nonzero().flatten().tolist()
    keys, values = [key[row, s] for s in columns], [value[row, s] for s in columns]
    for store in stores:
        hole = range(0) if store.hole is None else range(*store.hole[row].tolist())
        for j in range(int(store.length[row])):
            if j not in hole:
                keys.append(store.kv[layer, 0, store.slot[row], j])
                values.append(store.kv[layer, 1, store.slot[row], j])
    return (torch.stack(keys), torch.stack(values)) if keys else None


def check_causal_row(mixed, query, keys, values, columns):
    """The row's own keys, at `columns`, come first. A query reads those up to its column, and all stored ones."""
    copies = query.shape[1] // keys.shape[1]
    for s, head in itertools.product(range(len(query)), range(query.shape[1])):
        read = torch.cat([columns <= s, torch.ones(len(keys) - len(columns), dtype=torch.bool)])
        if not read.any():
            assert (mixed[s, head] == 0).all()
            continue
        key, value = keys[read][:, head // copies], values[read][:, head // copies]
        expected = torch.softmax(query[s, head] @ key.T / math.sqrt(16), -1) @ value
        torch.testing.assert_close(mixed[s, head], expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize("heads, key_heads", [(4, 4), (6, 2)])
@pytest.mark.parametrize("count", [0, 1, 2])
@pytest.mark.parametrize("causal", [False, True])
def test_attention_matches_the_formula(heads, key_heads, count, causal):
    (query, key, value), own, stores = attention_inputs(4, 3, heads, key_heads, 16, torch.float64)
    stores = stores[:count]
    order = torch.arange(4) % 3 == 0 if causal else None
    mixed = attend_stored(query, key, value, own, stores, 1, order).unflatten(-1, (heads, 16))
    for row in range(4):
        read = read_by_row(key, value, own, stores, 1, row)
        if read is None:
            assert (mixed[row] == 0).all()
            continue
        keys, values = read
        if causal and row % 3 == 0:
            check_causal_row(mixed[row], query[row], keys, values, own[row].nonzero().flatten())
            continue
        for head in range(heads):
            share = head // (heads // key_heads)
            score = query[row, :, head] @ keys[:, share].T / math.sqrt(16)
            expected = torch.softmax(score, -1) @ values[:, share]
            torch.testing.assert_close(mixed[row, :, head], expected, atol=1e-12, rtol=0)
    assert (mixed[1] == 0).all() and (mixed[0] != 0).any()
