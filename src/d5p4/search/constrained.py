"""What a constraint does to a pool before a forward: it writes forced tokens, ends or drops rows that have no valid
continuation, and gives every running row the mask of its next token.

If no token can continue a row and it is not complete, its end-of-text is written, and it is marked as unfinished. A
tree drops such rows instead. It also drops those that a closing probe cannot complete in the room left and, at
temperature 0, those with the text of a better row. The best sleeping row wakes up in the place of a running one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from ..constraint import Prefix
from ..decode.pool import Call, Pool
from ..decode.schedule import sent
from ..rng import hash_tokens

if TYPE_CHECKING:
    from .base import Search


def constrain(pool: Pool, search: Search) -> tuple[Pool, bool]:
    """Return the pool that the next forward runs, with `masks`, and whether its rows have changed. This function waits
    for the device."""
    call, tree, size = search.call, pool.awake is not None, pool.tokens.shape[-1]
    matchers, ends = call.matchers, call.model.eos_ids
    assert matchers is not None
    tokens, first = pool.tokens.tolist(), (pool.step == 0).tolist()
    exists = (pool.state["value"] > -torch.inf).tolist() if tree else [[True] * pool.size] * len(tokens)
    lengths = [size] * len(tokens) if pool.end is None else pool.end.tolist()
    running, dead, writes = dict[tuple[int, int], Prefix](), list[tuple[int, int]](), list[tuple[int, ...]]()
    for p, n in ((p, n) for p, row in enumerate(exists) for n, exist in enumerate(row) if exist):
        row = tokens[p][n][: lengths[p]]
        start = next((i for i, token in enumerate(row) if token == call.model.mask_id or token in ends), len(row))
        prefix, complete = tuple(row[:start]), row[start : start + 1] != [call.model.mask_id]
        run = [] if complete else matchers.forced(prefix, len(row) - start)
        if start + len(run) == len(row) or run[-1:] == [matchers.end]:
            complete, run = (False, run[:-1]) if first[p] else (True, run)  # there is at least one forward
        prefix += tuple(token for token in run if token != matchers.end)
        room = len(row) - len(prefix)
        if not complete and matchers.words(prefix).any() and (not tree or first[p] or matchers.closes(prefix, room)):
            running[p, n] = prefix
        elif not complete or not matchers.accepts(prefix):
            dead.append((p, n))
            run += [] if complete or tree else [matchers.end]
        writes += [(p, n, start + i, token) for i, token in enumerate(run)]
    following = search.drop(_written(call, pool, writes), dead, running)
    own = matchers.masks(list(running.values()))
    masks = torch.full((*pool.row_hash.shape, own.shape[1]), -1, dtype=torch.int32)
    if running:
        masks[torch.tensor(list(running)).unbind(1)] = own
    return replace(following, masks=masks.to(pool.key.device)), following is not pool


def _written(call: Call, pool: Pool, writes: Sequence[tuple[int, ...]]) -> Pool:
    """Return a pool with other tokens, each given by prompt, row, window position and token. Their log-probability is
    0, and the step that follows reveals them."""
    if not writes:
        return pool
    p, n, place, token = sent(writes, pool.key.device).unbind(1)
    tokens, revealed = pool.tokens.index_put((p, n, place), token), pool.revealed.index_put((p, n, place), pool.step[p])
    changed = torch.zeros_like(pool.row_hash, dtype=torch.bool).index_put((p, n), torch.ones_like(p, dtype=torch.bool))
    row_hash = torch.where(changed, hash_tokens(tokens, pool.positions[:, None]), pool.row_hash)
    return replace(pool, tokens=tokens, undecided=call.open(tokens, pool), revealed=revealed, row_hash=row_hash)
