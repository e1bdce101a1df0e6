"""The trace of a decode: every pool, the rows that were chosen, and the tokens that were revealed, as plain JSON.

A row is stored as its difference from its parent. `parents[i]` of a pool is [step, row]: row i descends from that row
of the pool of that step. Pool 0 consists of masks only, and its rows have no parents. `final` has the rows after the
last step in this form. A tree (`search.tree`) shows only the rows that are awake. A row that slept for some steps has
its parent in the pool before it fell asleep; the parents of all other rows are in the previous pool.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from ..decode.view import ForwardView
from ..eval.graders import grader_of
from ..generate import generate
from ..ops.gram import token_kernel
from ..ops.precision import wide
from ..prompts import encode
from ..result import Answers, Result, finite, rounded
from ..types import Callback, Model, Snapshot
from .pieces import piece

FORMAT = "d5p4-trace/3"
MOST_SIMILARITIES = 3_000_000  # the most similarities in a trace; a longer trace keeps only the matrices of some steps

Row = tuple[list[int] | None, list[list[Any]]]  # a row's parent [step, row], and changes [position, piece, logprob]


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
        self.model = model
        self._tokens: dict[int, int] = {}  # each token of the trace and its number, in the order of the first use
        self._pools: list[dict[str, Any]] = []
        self._numbers: list[dict[int, int]] = []  # per pool, the number in the trace of each row that is shown
        self._rows: list[Row] = []  # the rows of the next pool, with those that sleep
        self._final: tuple[Tensor, list[int], list[bool]] | None = None  # tokens, sources and awake rows at the end

    def _index(self, token: int) -> int:
        return self._tokens.setdefault(token, len(self._tokens))

    def step(self, shot: Snapshot, place: int) -> None:
        """Record a step. `place` is the index of the prompt in the snapshot's tensors. The snapshot is not kept."""
        view, device, source = cast(ForwardView, shot.view), shot.tokens.device, shot.source[place]
        before, after = (rows[place, :, : shot.length(place)] for rows in (shot.tokens, shot.next_tokens))
        step, taken, most = len(self._pools), shot.taken[place], shot.most[place]
        awake = torch.ones_like(view.group[place], dtype=torch.bool) if shot.awake is None else shot.awake[place]
        shown = awake.nonzero()[:, 0]
        row, position = (after != before[source]).nonzero(as_tuple=True)
        parts = [view.raw[place, shown], view.quality[place, shown], shot.next_logprobs[place, row, position]]
        parts += [view.group[place, shown], shot.choice.parents[place], row, position, after[row, position]]
        parts += [shown, source]
        size, tree = len(shown), shot.awake is not None
        stride = -(-size * (size - 1) // 2 * most // MOST_SIMILARITIES)
        kept = size > 1 and (taken % max(1, stride) == 0 or taken == most - 1)
        if kept:
            below = torch.tril_indices(size, size, -1, device=device)
            parts.append(_similarity(shot, place, shown)[below[0], below[1]])
        packed = torch.cat([part.to(wide(device)) for part in parts]).cpu()  # one copy, as floats (exact for ids)
        score, quality, logprob, *rest = packed.split([len(part) for part in parts])
        group, chosen, rows, *revealed, listed, sources = (part.long().tolist() for part in rest[:7])
        number = {row: i for i, row in enumerate(listed)}
        earlier = self._rows or [(None, []) for _ in awake]
        if view.call.matchers is not None:  # the tokens that a form has forced since the last step
            last = torch.full_like(before, self.model.mask_id) if self._final is None else self._final[0]
            for n, i in (before != last).nonzero().tolist():
                earlier[n][1].append([i, self._index(int(before[n, i])), 0.0])
        self._pools.append(
            {
                "parents": [earlier[row][0] for row in listed],
                "changes": [earlier[row][1] for row in listed],
                "score": _rounded(score, 6),
                "quality": None if tree else _rounded(quality, 6),
                "group": list(range(size)) if tree else group,
                "similarity": _rounded(rest[7].float(), 4) if kept else None,  # the part below the diagonal
                "chosen": list(range(size)) if tree else chosen,
            }
        )
        self._numbers.append(number)
        self._rows = [([step, number[row]], []) if row in number else earlier[row] for row in sources]
        for row, place_in_row, token, chance in zip(rows, *revealed, _rounded(logprob, 4), strict=True):
            if sources[row] in number:
                self._rows[row][1].append([place_in_row, self._index(token), chance])
        waking = None if shot.next_awake is None else shot.next_awake[place].tolist()
        self._final = after, sources, waking or [True] * len(sources)

    def trace(self, prompt: Any, result: Result, place: int, seed: int, seconds: float) -> dict[str, Any]:
        """Return the whole trace after the decode with `seed`. `place` is the index of the prompt in the result."""
        model, settings, answers = self.model, result.settings, Answers(result, place)
        right = grade(model, prompt, answers.texts)
        ids = [] if prompt is None else encode(model, prompt, settings.chat)
        holes = [i for i, token in enumerate(ids) if token == model.mask_id]
        rows = result.sequences[place][:, result.attention_mask[place]]
        window = rows[:, [*holes, *range(len(ids), rows.shape[1])]].tolist()  # [k][L]
        final, listed = self._answers(answers, window, right)
        frame = [None if token == model.mask_id else self._index(token) for token in ids] if holes else None
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
            "length": 0 if self._final is None else self._final[0].shape[1],
            "steps": len(self._pools),
            "score_kind": result.score_kind,
            "pools": self._pools,
            "final": final,
            "answers": listed,
            "frame": frame,  # the pieces of a prompt with holes (masked tokens), and None at each hole
            "distances": [[round(value, 4) for value in row] for row in answers.distances],
            "distinct": answers.distinct,
            "near_copies": answers.near_copies,
            "right": count_right(model, answers.texts, right),
            "rows": answers.rows,
            "rows_nominal": answers.rows_nominal,
            "nfe": answers.nfe,
            "seconds": round(seconds, 4),
            "pieces": [piece(model, token) for token in self._tokens],
            "end": [self._tokens[token] for token in model.eos_ids if token in self._tokens],
        }

    def _answers(self, answers: Answers, window: list[list[int]], right: list[bool] | None) -> tuple[Any, list[Any]]:
        """Return the rows after the last step, and the answers among them."""
        result, place = answers.result, answers.place
        tokens, sources, awake = ([], [], []) if self._final is None else (self._final[0].tolist(), *self._final[1:])
        listed, places = [], []
        for rank, text in enumerate(answers.texts):
            lineage, end = result.lineage[place][rank].tolist(), len(result.answers[place][rank])
            ids, mask = window[rank][: end + 1], self.model.mask_id if result.settings.form else None
            same = [n for n in range(len(tokens)) if sources[n] == lineage[-1]]
            same = [n for n in same if all(a in (b, mask) for a, b in zip(tokens[n], ids, strict=False))]
            # A parent chosen twice may have two equal rows, with equal log-probabilities, so the first is taken.
            places.append(n := min(same, key=lambda n: not awake[n]))  # a row that sleeps may repeat the text
            forced = [i for i, token in enumerate(ids) if tokens[n][i] == mask != token]  # after the last step
            self._rows[n][1].extend([i, self._index(ids[i]), 0.0] for i in forced)
            listed.append(
                {
                    "text": text,
                    "score": rounded(answers.score[rank]),
                    "distance": rounded(answers.distance[rank]),
                    "lineage": [number.get(row) for number, row in zip(self._numbers, lineage, strict=True)],
                    "row": 0,
                    "end": end,
                    "right": None if right is None else right[rank],
                }
            )
        shown = [n for n in range(len(tokens)) if awake[n] or n in places]
        for answer, n in zip(listed, places, strict=True):
            answer["row"] = shown.index(n)
        return {"parents": [self._rows[n][0] for n in shown], "changes": [self._rows[n][1] for n in shown]}, listed


def _similarity(shot: Snapshot, place: int, rows: Tensor) -> Tensor:
    """Return the similarity [n, n] of some rows of a prompt: by the method's features or, for a tree, by tokens."""
    if shot.awake is None:
        return shot.view.similarity[place]
    view = cast(ForwardView, shot.view)
    call, pool = view.call, view.pool
    tokens = pool.tokens.masked_fill(call.after_end(pool.tokens, pool), call.model.mask_id)
    return token_kernel(tokens[place, rows][None], call.model.mask_id)[0]


def grade(model: Model, prompt: Any, texts: Sequence[str]) -> list[bool] | None:
    """Return whether each answer is right, or None if the model names no grader that can judge this prompt."""
    return None if (chosen := grader_of(model)) is None else chosen.grade(prompt, texts, None)


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
    return {"prompt": " ".join(map(str, parts)) if model.tokenizer is None else model.tokenizer.decode(parts)}


def _rounded(values: Tensor, digits: int) -> list[float | None]:
    """Round many values to a number of decimals. NaN and infinite values become None."""
    numbers = np.round(values.double().cpu().numpy(), digits)
    return numbers.tolist() if np.isfinite(numbers).all() else finite(numbers.tolist())
