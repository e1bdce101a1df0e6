"""The trace of a decode: every pool, the rows that were chosen, and the tokens that were revealed, as plain JSON.

The page replays a trace. A row is stored as its difference from its parent. The parent of row i of a pool is row
`chosen[i // children]` of the previous pool. Pool 0 consists of masks only. Letters in shapes: N rows per pool, m
chosen parents, L window positions, k answers.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..eval.graders import grader_of
from ..generate import generate
from ..ops.precision import wide
from ..prompts import encode
from ..result import Answers, Result, finite
from ..types import Callback, Model, Snapshot
from .pieces import Pieces

FORMAT = "d5p4-trace/1"
MOST_SIMILARITIES = 3_000_000  # the most similarities in a trace; a longer trace keeps only the matrices of some steps

Change = list[Any]  # [position, number of the piece, logprob]


def trace(model: Model, prompt: Any = None, *, callback: Callback | None = None, **options: Any) -> dict[str, Any]:
    """Decode one prompt with options of `d5p4.generate` and return the trace. `callback` also gets every step."""
    recorder = Recorder(model)

    def listen(shot: Snapshot) -> Any:
        recorder.step(shot, 0)
        return None if callback is None else callback(shot)

    start = time.perf_counter()
    result = generate(model, None if prompt is None else [prompt], callback=listen, **options)
    return recorder.trace(prompt, result, 0, result.seed, time.perf_counter() - start)


class Recorder:
    """Collects the trace of one prompt, step by step."""

    def __init__(self, model: Model) -> None:
        self.model, self._pieces = model, Pieces(model)
        self._pools: list[dict[str, Any]] = []
        self._changes: list[list[Change]] = []  # for each row of the next pool, the tokens that the last step revealed
        self._final: Tensor | None = None  # [rows, L] the window's tokens in each row after the last step

    def step(self, shot: Snapshot, place: int) -> None:
        """Record a step. `place` is the index of the prompt in the snapshot's tensors. The snapshot is not kept."""
        view, choice = shot.view, shot.choice
        size, device = view.size, shot.tokens.device
        before = shot.tokens[place, choice.parents[place]].repeat_interleave(choice.children, 0)
        after = shot.next_tokens[place]
        row, position = (after != before).nonzero(as_tuple=True)
        parts = [view.raw[place], view.quality[place], shot.next_logprobs[place, row, position]]
        parts += [view.group[place], choice.parents[place], row, position, after[row, position]]
        stride = -(-size * (size - 1) // 2 * shot.steps // MOST_SIMILARITIES)
        kept = size > 1 and (shot.step % max(1, stride) == 0 or shot.step == shot.steps - 1)
        if kept:
            below = torch.tril_indices(size, size, -1, device=device)
            parts.append(view.similarity[place, below[0], below[1]])
        packed = torch.cat([part.to(wide(device)) for part in parts]).cpu()  # one copy, as floats (exact for ids)
        score, quality, logprob, *rest = packed.split([len(part) for part in parts])
        group, chosen, *revealed = (part.long().tolist() for part in rest[:5])
        self._pools.append(
            {
                "changes": self._changes or [[] for _ in group],
                "score": _rounded(score, 6),
                "quality": _rounded(quality, 6),
                "group": group,
                "similarity": _rounded(rest[5].float(), 4) if kept else None,  # the part below the diagonal
                "chosen": chosen,
                "children": choice.children,
            }
        )
        self._changes = [[] for _ in after]
        for number, place_in_row, token, chance in zip(*revealed, _rounded(logprob, 4), strict=True):
            self._changes[number].append([place_in_row, self._pieces.index(token), chance])
        self._final = after

    def trace(self, prompt: Any, result: Result, place: int, seed: int, seconds: float) -> dict[str, Any]:
        """Return the whole trace after the decode with `seed`. `place` is the index of the prompt in the result."""
        model, settings, answers = self.model, result.settings, Answers(result, place)
        right = grade(model, prompt, answers.texts)
        ids = [] if prompt is None else encode(model, prompt, settings.chat)
        holes = [i for i, token in enumerate(ids) if token == model.mask_id]
        rows = result.sequences[place][:, result.attention_mask[place]]
        window = rows[:, [*holes, *range(len(ids), rows.shape[1])]].tolist()  # [k][L]
        listed = self._answers(answers, window, right)
        frame = [None if token == model.mask_id else self._pieces.index(token) for token in ids] if holes else None
        return {
            "format": FORMAT,
            **_worded(model, prompt),
            "model": describe(model),
            "method": settings.method,
            "parameters": finite(dict(settings.params)),
            "k": settings.k,
            "w": settings.w,
            "seed": seed,
            "settings": finite(settings.to_dict()),
            "length": 0 if self._final is None else self._final.shape[1],
            "steps": len(self._pools),
            "score_kind": result.score_kind,
            "pools": self._pools,
            "answers": listed,
            "frame": frame,  # the pieces of a prompt with holes (masked tokens), and None at each hole
            "similarity": [_rounded(row, 4) for row in result.similarity[place]],
            "distinct": answers.distinct,
            "right": count_right(model, answers.texts, right),
            "rows": answers.rows,
            "rows_nominal": answers.rows_nominal,
            "nfe": answers.nfe,
            "seconds": round(seconds, 4),
            "pieces": self._pieces.texts,
            "end": self._pieces.ends(),
        }

    def _answers(self, answers: Answers, window: list[list[int]], right: list[bool] | None) -> list[dict[str, Any]]:
        result, place, last = answers.result, answers.place, self._pools[-1]
        final = [] if self._final is None else self._final.tolist()
        listed = []
        for rank, text in enumerate(answers.texts):
            lineage = result.lineage[place][rank].tolist()
            # A parent chosen twice may have two equal rows. We take the first, as both have the same log-probabilities.
            end = len(result.answers[place][rank])
            row = next(
                n
                for n, tokens in enumerate(final)
                if last["chosen"][n // last["children"]] == lineage[-1] and tokens[:end] == window[rank][:end]
            )
            listed.append(
                {
                    "text": text,
                    "score": _round(answers.score[rank], 6),
                    "distance": _round(answers.distance[rank], 6),
                    "lineage": lineage,
                    "changes": self._changes[row],
                    "end": end,
                    "right": None if right is None else right[rank],
                }
            )
        return listed


def grade(model: Model, prompt: Any, texts: Sequence[str]) -> list[bool] | None:
    """Return whether each answer is right. Return None if the model has no grader that can judge this prompt.

    The model's generation_config.json names its grader (see `eval.graders`).
    """
    chosen = grader_of(model)
    return None if chosen is None else chosen.grade(prompt, texts, None)


def count_right(model: Model, texts: Sequence[str], right: Sequence[bool] | None) -> int | None:
    """Return the number of different right answers, or None if `grade` returned None."""
    chosen = grader_of(model)
    return None if chosen is None or right is None else chosen.count_right(texts, right)


def describe(model: Model) -> dict[str, Any]:
    """Return a few facts about the model. A folder is named without its path."""
    folder = Path(model.name)
    parameters = getattr(model, "parameters", None)
    return {
        "name": folder.resolve().name if folder.is_dir() else model.name,
        "architecture": getattr(model, "architecture", type(model).__name__),
        "parameters": sum(part.numel() for part in parameters()) if callable(parameters) else None,
        "max_length": model.max_length,
    }


def _worded(model: Model, prompt: Any) -> dict[str, Any]:
    """Return the prompt as text, and also as messages if it is a conversation."""
    if prompt is None or isinstance(prompt, str):
        return {"prompt": prompt}
    parts: Sequence[Any] = prompt.tolist() if hasattr(prompt, "tolist") else list(prompt)
    if parts and all(isinstance(part, dict) for part in parts):
        return {"prompt": parts[-1].get("content"), "messages": parts}
    ids = list(map(int, parts))
    return {"prompt": " ".join(map(str, ids)) if model.tokenizer is None else model.tokenizer.decode(ids)}


def _rounded(values: Tensor, digits: int) -> list[float | None]:
    """Round values for a file. NaN and infinite values become None."""
    numbers = values.double().cpu().numpy()
    short = np.round(numbers, digits).tolist()
    return short if np.isfinite(numbers).all() else finite(short)


def _round(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)
