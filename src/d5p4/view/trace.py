"""The trace of a decode: every pool, the rows that were chosen, and the tokens that were revealed, as plain JSON.

The page replays a trace. A row is stored as its difference from its parent. The parent of row i of a pool is row
`chosen[i // children]` of the previous pool. Pool 0 consists of masks only. Letters in shapes: N rows per pool, m
chosen parents, L window positions, k answers.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..generate import generate
from ..ops.precision import wide
from ..prompts import encode
from ..result import Answers, Result, finite
from ..types import Callback, Model, Snapshot
from .grade import count_right, grade
from .pieces import Pieces

FORMAT = "d5p4-trace/1"
MOST_SIMILARITIES = 3_000_000  # the most similarities in a trace; a longer trace keeps only the matrices of some steps

Change = list[Any]  # [position, token or piece, logprob]


def trace(model: Model, prompt: Any = None, *, callback: Callback | None = None, **options: Any) -> dict[str, Any]:
    """Decode one prompt with options of `d5p4.generate` and return the trace. `callback` also gets every step."""
    recorder = Recorder(model)

    def listen(shot: Snapshot) -> Any:
        recorder.step(shot, 0)
        return None if callback is None else callback(shot)

    start = time.perf_counter()
    result = generate(model, None if prompt is None else [prompt], callback=listen, **options)
    return recorder.trace(prompt, result, 0, result.seed, time.perf_counter() - start)


@dataclass(frozen=True)
class _Step:
    """The data that the recorder keeps of one step, in the memory of the host."""

    score: Tensor  # [N]
    quality: Tensor  # [N]
    group: list[int]  # [N]
    chosen: list[int]  # [m]
    children: int
    similarity: Tensor | None  # [N (N - 1) / 2] float32, the part below the diagonal
    where: Tensor  # [changes, 3]: row of the next pool, position, token
    logprob: Tensor  # [changes]

    def changes(self) -> list[list[Change]]:
        """Return for each row of the next pool a list with [position, token, logprob] for each revealed token."""
        rows: list[list[Change]] = [[] for _ in range(len(self.chosen) * self.children)]
        for (row, position, token), chance in zip(self.where.tolist(), _rounded(self.logprob, 4), strict=True):
            rows[row].append([position, token, chance])
        return rows


class Recorder:
    """Collects the trace of one prompt, step by step."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self._steps: list[_Step] = []
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
        kept = self._keeps_similarity(shot, size)
        if kept:
            below = torch.tril_indices(size, size, -1, device=device)
            parts.append(view.similarity[place, below[0], below[1]])
        packed = torch.cat([part.to(wide(device)) for part in parts]).cpu()  # one copy, as floats (exact for ids)
        score, quality, logprob, *rest = packed.split([len(part) for part in parts])
        group, chosen, row, position, token = (part.long() for part in rest[:5])
        similarity, where = rest[5].float().clone() if kept else None, torch.stack([row, position, token], 1)
        scores, lists = (score.clone(), quality.clone()), (group.tolist(), chosen.tolist())
        self._steps.append(_Step(*scores, *lists, choice.children, similarity, where, logprob.clone()))
        self._final = after

    @staticmethod
    def _keeps_similarity(shot: Snapshot, size: int) -> bool:
        stride = -(-size * (size - 1) // 2 * shot.steps // MOST_SIMILARITIES)
        return size > 1 and (shot.step % max(1, stride) == 0 or shot.step == shot.steps - 1)

    def trace(self, prompt: Any, result: Result, place: int, seed: int, seconds: float) -> dict[str, Any]:
        """Return the whole trace after the decode with `seed`. `place` is the index of the prompt in the result."""
        settings, answers = result.settings, Answers(result, place)
        pieces = Pieces(self.model)
        right = grade(self.model, prompt, answers.texts)
        pools = [self._pool(t, pieces) for t in range(len(self._steps))]
        return {
            "format": FORMAT,
            **_worded(self.model, prompt),
            "model": describe(self.model),
            "method": settings.method,
            "parameters": finite(dict(settings.params)),
            "k": settings.k,
            "w": settings.w,
            "seed": seed,
            "settings": finite(settings.to_dict()),
            "length": 0 if self._final is None else self._final.shape[1],
            "steps": len(pools),
            "score_kind": result.score_kind,
            "pools": pools,
            "answers": self._answers(prompt, result, place, right, pieces),
            "frame": self._frame(prompt, settings.chat, pieces),
            "similarity": [_rounded(row, 4) for row in result.similarity[place]],
            "distinct": answers.distinct,
            "right": count_right(self.model, answers.texts, right),
            "rows": answers.rows,
            "rows_nominal": answers.rows_nominal,
            "nfe": answers.nfe,
            "seconds": round(seconds, 4),
            "pieces": pieces.texts,
            "end": pieces.ends(),
        }

    def _pool(self, t: int, pieces: Pieces) -> dict[str, Any]:
        step = self._steps[t]
        changes = self._steps[t - 1].changes() if t else [[] for _ in step.group]
        return {
            "changes": _written(changes, pieces),
            "score": _rounded(step.score, 6),
            "quality": _rounded(step.quality, 6),
            "group": step.group,
            "similarity": None if step.similarity is None else _rounded(step.similarity, 4),
            "chosen": step.chosen,
            "children": step.children,
        }

    def _answers(
        self, prompt: Any, result: Result, place: int, right: list[bool] | None, pieces: Pieces
    ) -> list[dict[str, Any]]:
        numbers, last = Answers(result, place), self._steps[-1]
        changes = _written(last.changes(), pieces)
        window, final = self._window(prompt, result, place), [] if self._final is None else self._final.tolist()
        listed = []
        for rank, text in enumerate(numbers.texts):
            lineage = result.lineage[place][rank].tolist()
            # A parent chosen twice may have two equal rows. We take the first, as both have the same log-probabilities.
            end = len(result.answers[place][rank])
            parents = (last.chosen[n // last.children] for n in range(len(final)))
            row = next(
                n
                for n, (parent, tokens) in enumerate(zip(parents, final, strict=True))
                if parent == lineage[-1] and tokens[:end] == window[rank][:end]
            )
            listed.append(
                {
                    "text": text,
                    "score": _round(numbers.score[rank], 6),
                    "distance": _round(numbers.distance[rank], 6),
                    "lineage": lineage,
                    "changes": changes[row],
                    "end": len(result.answers[place][rank]),
                    "right": None if right is None else right[rank],
                }
            )
        return listed

    def _window(self, prompt: Any, result: Result, place: int) -> list[list[int]]:
        """Return the window tokens of the answers, [k][L]: those in the prompt's holes, then those after the prompt."""
        rows = result.sequences[place][:, result.attention_mask[place]]
        ids = self._ids(prompt, result.settings.chat)
        holes = [i for i, token in enumerate(ids) if token == self.model.mask_id]
        return rows[:, [*holes, *range(len(ids), rows.shape[1])]].tolist()

    def _ids(self, prompt: Any, chat: bool | None) -> list[int]:
        return [] if prompt is None else encode(self.model, prompt, chat)

    def _frame(self, prompt: Any, chat: bool | None, pieces: Pieces) -> list[int | None] | None:
        """Return the pieces of the prompt, with None at each hole (masked token). A prompt without holes gives None."""
        ids, mask = self._ids(prompt, chat), self.model.mask_id
        return [None if token == mask else pieces.index(token) for token in ids] if mask in ids else None


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


def _written(rows: list[list[Change]], pieces: Pieces) -> list[list[Change]]:
    """Replace each token id in the changes by the index of the token's text in `pieces`."""
    return [[[position, pieces.index(token), chance] for position, token, chance in row] for row in rows]


def _rounded(values: Tensor, digits: int) -> list[float | None]:
    """Round values for a file. NaN and infinite values become None."""
    numbers = values.double().cpu().numpy()
    short = np.round(numbers, digits).tolist()
    return short if np.isfinite(numbers).all() else finite(short)


def _round(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)
