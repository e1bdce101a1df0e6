"""From the last pool to a Result: scores, order, texts, lineage and the cost."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .errors import D5P4Error
from .look import Look
from .ops.pivots import eliminate
from .ops.ties import ranked
from .ops.vocab import vocab_stats
from .pool import Pool, pick
from .rng import wide
from .rows import Prompts
from .types import Choice, Final, Finish, HistoryStep, Kept, Model, PoolView, Result

LOGPROB_SCORE = "mean log-probability of each token at its reveal"
SCORER_SCORE = "the scorer's number"
ENTROPY_SCORE = "mean negative entropy over the answer at the last forward"


class Ledger:
    """What a decode call spends and where its rows come from."""

    def __init__(self, prompts: int, device: torch.device, history: bool) -> None:
        self.alive = torch.arange(prompts, device=device)  # prompts not dropped
        self.nfe, self.rows, self.nominal = (torch.zeros(prompts, dtype=torch.int64, device=device) for _ in range(3))
        self.trail: list[Tensor] = []  # per step [P, rows of the next pool]: index of each row's parent
        self.history: list[list[HistoryStep]] | None = [[] for _ in range(prompts)] if history else None

    def record(self, choice: Choice, fresh: Tensor, nominal: int, view: PoolView, tokens: Tensor) -> None:
        self.nfe[self.alive] += fresh > 0
        self.rows[self.alive] += fresh
        self.nominal[self.alive] += nominal
        self.trail.append(choice.parents.repeat_interleave(choice.children, 1))
        if self.history is not None:
            for place, prompt in enumerate(self.alive.tolist()):
                self.history[prompt].append(
                    HistoryStep(
                        view.step, tokens[place], view.raw[place], view.quality[place], view.similarity[place],
                        view.group[place], choice.parents[place], choice.children,
                    )  # fmt: skip
                )

    def keep(self, index: Tensor) -> None:
        self.alive = self.alive[index]
        self.trail = [parents[index] for parents in self.trail]

    def lineage(self, rows: Tensor) -> Tensor:
        """[P, k, steps] ancestors of the final rows [P, k] in the pool of each step."""
        path = []
        for parents in reversed(self.trail):
            rows = parents.gather(1, rows)
            path.append(rows)
        return torch.stack(path[::-1], -1)


@dataclass(frozen=True)
class Cut:
    """Where an answer ends and what its text is."""

    appended: int  # the last so many window positions follow the prompt; the rest fill holes in it
    eos_ids: tuple[int, ...]

    def length(self, answer: list[int]) -> int:
        """Tokens before the first end-of-text among the appended ones."""
        first = len(answer) - self.appended
        ends = (i for i in range(first, len(answer)) if answer[i] in self.eos_ids)
        return next(ends, len(answer))


def write_text(model: Model, sequence: list[int], answer: list[int], cut: int, infilled: bool) -> str:
    """The answer; the whole filled text when holes in a given text were filled."""
    ids = sequence[: len(sequence) - (len(answer) - cut)] if infilled else answer[:cut]
    if model.tokenizer is None:
        return " ".join(map(str, ids))
    return model.tokenizer.decode(ids)


def gather_result(
    model: Model,
    prompts: Prompts,
    pool: Pool,
    look: Look,
    view: PoolView,
    choice: Choice,
    ledger: Ledger,
    finish: Finish | None,
) -> Result:
    """The k answers of each prompt, best first. `look`, `view` and `choice` are the last step's."""
    settings = look.settings
    alive, device = ledger.alive, pool.tokens.device
    total, k = len(ledger.nfe), settings.k
    kept = prompts.take(alive)
    sequences = kept.fill(pool.tokens)  # [P', N, T]
    appended = kept.appended.tolist()
    infilled = [n < pool.tokens.shape[2] for n in appended]
    cuts = [Cut(n, model.eos_ids) for n in appended]
    starts = (~kept.attention_mask).sum(-1).tolist()
    ids, answers = sequences.tolist(), pool.tokens.tolist()

    def text(p: int, n: int) -> str:
        answer = answers[p][n]
        return write_text(model, ids[p][n][starts[p] :], answer, cuts[p].length(answer), infilled[p])

    def texts() -> list[list[str]]:
        return [[text(p, n) for n in range(len(answers[p]))] for p in range(len(answers))]

    def logprob() -> Tensor:
        if model.carry_over:
            return pool.logprob.mean(-1)
        states = look.states[look.hidden.slot.gather(1, choice.parents)]  # [P', N, L, D]
        head, flat = look.head, pool.tokens.reshape(-1, 1)
        stats = vocab_stats(states.flatten(0, 2), head.weight, head.bias, head.banned, (), flat)
        return stats["token"].view(pool.tokens.shape).mean(-1)

    def last_score(kind: str, positions: str) -> Tensor:
        return look.score(kind, positions, whole=True).gather(1, choice.parents)

    if len(alive) and bool((pool.tokens == model.mask_id).any()):
        raise D5P4Error("decoding ended with masks in an answer; please report this with the settings used")
    kept_rows = Kept(torch.arange(k, device=device).expand(len(alive), k))
    if len(alive) and finish is not None:
        kept_rows = finish(Final(pool.tie, last_score, logprob, texts, alive), k)
    keep, outside = kept_rows.rows, kept_rows.score is not None

    score = torch.full((total, k), torch.nan, dtype=wide(device), device=device)
    similarity = torch.full((total, k, k), torch.nan, dtype=wide(device), device=device)
    logdet = torch.full((total,), torch.nan, dtype=wide(device), device=device)
    if len(alive):
        if kept_rows.score is None:
            own = pool.logprob.mean(-1) if model.carry_over else last_score("entropy", "all")
            kept_rows = kept_rows._replace(score=own.gather(1, keep))
        assert kept_rows.score is not None
        order = ranked(kept_rows.score, pool.row_hash.gather(1, keep), pool.tie.gather(1, keep))
        keep = keep.gather(1, order)
        score[alive] = kept_rows.score.gather(1, order).to(score.dtype)
        parents = choice.parents.gather(1, keep)
        similarity[alive] = pick(pick(view.similarity, parents).transpose(1, 2), parents)
        logdet[alive] = _logdet(similarity[alive])
    rows = keep.tolist()

    result = Result(
        answers=[[] for _ in range(total)],
        texts=[[] for _ in range(total)],
        sequences=torch.full((total, k, prompts.tokens.shape[1]), model.mask_id, device=device),
        attention_mask=prompts.attention_mask,
        score=score,
        score_kind=SCORER_SCORE if outside else LOGPROB_SCORE if model.carry_over else ENTROPY_SCORE,
        logdet=logdet,
        similarity=similarity,
        distinct=torch.zeros(total, dtype=torch.int64, device=device),
        lineage=[torch.zeros(k, 0, dtype=torch.int64, device=device) for _ in range(total)],
        seed=0,
        nfe=ledger.nfe,
        rows=ledger.rows,
        rows_nominal=ledger.nominal,
        logprobs=[[] for _ in range(total)] if settings.logprobs else None,
        reveal_step=[[] for _ in range(total)] if settings.logprobs else None,
        history=ledger.history,
        settings=settings,
    )
    if not len(alive):
        return result
    result.sequences[alive] = pick(sequences, keep)
    lineage = ledger.lineage(keep)
    logprobs, reveals = pool.logprob.tolist(), pool.revealed.tolist()
    for p, prompt in enumerate(alive.tolist()):
        ends = [cuts[p].length(answers[p][n]) for n in rows[p]]
        result.answers[prompt] = [answers[p][n][:end] for n, end in zip(rows[p], ends, strict=True)]
        result.texts[prompt] = [text(p, n) for n in rows[p]]
        result.distinct[prompt] = len({tuple(answer) for answer in result.answers[prompt]})
        result.lineage[prompt] = lineage[p]
        if result.logprobs is not None and result.reveal_step is not None:
            result.logprobs[prompt] = [logprobs[p][n][:end] for n, end in zip(rows[p], ends, strict=True)]
            result.reveal_step[prompt] = [reveals[p][n][:end] for n, end in zip(rows[p], ends, strict=True)]
    return result


def _logdet(similarity: Tensor) -> Tensor:
    """[P] log det of [P, k, k]; minus infinity where a row is explained by the others."""
    nothing, place = torch.zeros_like(similarity[:, 0]), torch.arange(similarity.shape[1], device=similarity.device)
    result = eliminate(similarity, nothing, nothing, place.expand(nothing.shape), place, len(place))
    return torch.where(result.zeros > 0, -torch.inf, result.logs)[:, 0]


def prompts_to_drop(said: Any) -> list[int]:
    """The prompt numbers a callback returned, as None, a number, a tensor or any iterable of numbers."""
    if said is None:
        return []
    if hasattr(said, "tolist"):
        said = said.tolist()
    numbers = [said] if isinstance(said, int) else list(said) if isinstance(said, Iterable) else [said]
    wrong = [n for n in numbers if not isinstance(n, int) or isinstance(n, bool)]
    if wrong:
        raise D5P4Error(f"the callback returned {wrong[0]!r}; return None, or the numbers of prompts to drop")
    return numbers
