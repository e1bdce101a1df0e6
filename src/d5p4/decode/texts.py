"""Prompts that are ready to decode, and the texts of their rows."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .pool import Pool


@dataclass(frozen=True)
class Prompts:
    """P prompts that are ready to decode: left-padded rows with the mask id at their window positions."""

    tokens: Tensor  # [P, T]
    attention_mask: Tensor  # [P, T] bool
    window: Tensor  # [P, L] the positions in the row that are to be decoded, ascending
    appended: Tensor  # [P] how many window positions follow the prompt; the others are holes in the prompt
    extra: int = field(default=0, kw_only=True)  # how many of the last window positions belong to no answer
    fixed: bool = field(default=False, kw_only=True)  # whether all forwards have the same number of rows

    @property
    def positions(self) -> Tensor:
        """The window positions [P, L], counted from the first real token. Those behind the last block are -1."""
        place = self.window - (~self.attention_mask).sum(-1, keepdim=True)
        last = place[:, -1 - self.extra :][:, :1] // (self.extra + 1)
        return place.masked_fill(place // (self.extra + 1) > last, -1) if self.extra else place

    def fill(self, answers: Tensor) -> Tensor:
        """Put answers [P, N, L] into the window positions of the prompts, and return the rows [P, N, T]."""
        shape = (*answers.shape[:2], self.tokens.shape[1])
        window = self.window[:, None].expand(answers.shape)
        return self.tokens[:, None].expand(shape).scatter(2, window, answers)

    def without_prompt(self, mask_id: int) -> Prompts:
        """Return the unconditional rows for guidance, in which a mask replaces every token that is not padding."""
        return replace(self, tokens=self.tokens.masked_fill(self.attention_mask, mask_id))

    def take(self, index: Tensor) -> Prompts:
        tensors = self.tokens, self.attention_mask, self.window, self.appended
        return Prompts(*(values[index] for values in tensors), extra=self.extra, fixed=self.fixed)


class Texts:
    """The texts of the rows of a pool. The pool has the tokens of all its rows in this process."""

    def __init__(self, pool: Pool, prompts: Prompts) -> None:
        self.pool, self.prompts = pool, prompts

    @cached_property
    def sequences(self) -> Tensor:
        """The rows [P, N, T] of prompt and answer together. End-of-text fills what was left masked behind the end."""
        call, tokens = self.pool.call, self.pool.tokens
        if call.settings.stop and len(call.end_ids):
            tokens = torch.where(tokens == call.model.mask_id, call.end_ids[0], tokens)
        return self.prompts.fill(tokens)

    @cached_property
    def tokens(self) -> list[list[list[int]]]:
        return self.pool.tokens.tolist()

    @cached_property
    def ends(self) -> list[list[int]]:
        """The number [P][N] of tokens of each answer before the first end-of-text token that follows the prompt."""
        ends = self.pool.call.ends(self.pool.tokens, self.pool.appended)
        return (ends.cumsum(-1) == 0)[..., : ends.shape[-1] - self.pool.call.extra].sum(-1).tolist()

    def whole(self, p: int, n: int) -> str:
        """Return the text of an answer without regard to stop strings, or the whole filled text if the prompt had
        holes."""
        answer, end = self.tokens[p][n], self.ends[p][n]
        ids = answer[:end]
        if int(self.pool.appended[p]) < len(answer):
            row = self.sequences[p, n][self.prompts.attention_mask[p]].tolist()
            ids = row[: len(row) - (len(answer) - end)]
        return self._decode(ids)

    def _decode(self, ids: list[int]) -> str:
        codec = self.pool.call.model.tokenizer
        return " ".join(map(str, ids)) if codec is None else codec.decode(ids)

    def text(self, p: int, n: int) -> str:
        """Return the text of an answer, before the first stop string that does not lie before the first hole."""
        stops, start = self.pool.call.settings.stop_strings or (), 0
        if stops and int(self.pool.appended[p]) < len(self.tokens[p][n]):
            before = slice(0, int(self.prompts.window[p, 0]))
            start = len(self._decode(self.prompts.tokens[p, before][self.prompts.attention_mask[p, before]].tolist()))
        text = self.whole(p, n)
        ends = [text.find(stop, start) for stop in stops]
        return text[: min((end for end in ends if end >= 0), default=None)]

    def texts(self) -> list[list[str]]:
        return [[self.text(p, n) for n in range(len(rows))] for p, rows in enumerate(self.tokens)]
