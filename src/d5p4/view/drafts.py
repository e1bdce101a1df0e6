"""What the answers look like in the middle of a decode."""

from __future__ import annotations

from typing import Any

import torch

from ..ops.precision import wide
from ..record import finite
from ..types import Model, Snapshot
from .pieces import BLOCK, piece, spell

MOST = 16  # drafts of one prompt


def drafts(model: Model, shot: Snapshot, place: int) -> list[dict[str, Any]]:
    """One draft a chosen parent (its first child): {"text", "tokens", "logprobs"}, None where a token is masked.

    `place` is the prompt's row in the snapshot's tensors.
    """
    children = shot.choice.children
    tokens, logprobs = (x[place, ::children][:MOST] for x in (shot.next_tokens, shot.next_logprobs))
    both = torch.stack([tokens.to(wide(tokens.device)), logprobs.to(wide(tokens.device))]).tolist()  # one transfer
    return [_draft(model, list(map(int, row)), chances) for row, chances in zip(*both, strict=True)]


def _draft(model: Model, row: list[int], chances: list[float]) -> dict[str, Any]:
    end = len(row)
    while end and row[end - 1] in model.eos_ids:
        end -= 1
    row = row[:end]
    masked = [token == model.mask_id for token in row]
    texts = spell(None if hidden else piece(model, token) for token, hidden in zip(row, masked, strict=True))
    return {
        "text": "".join(BLOCK if text is None else text for text in texts),
        "tokens": texts,
        "logprobs": [
            None if hidden else finite(round(chance, 4)) for hidden, chance in zip(masked, chances, strict=False)
        ],
    }
