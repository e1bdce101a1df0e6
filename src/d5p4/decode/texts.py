"""Prompts that are ready to decode, and the texts of their rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from ..constraint import canonical
from .pool import Call, Pool, starting_at


@dataclass(frozen=True)
class Prompts:
    """P prompts that are ready to decode: left-padded rows with the mask id at their window positions.

    A window that is shorter than others is filled up with positions that are not decoded, in a column of padding.
    """

    tokens: Tensor  # [P, T]
    attention_mask: Tensor  # [P, T] bool
    window: Tensor  # [P, L] the positions in the row that are to be decoded, ascending; zeros fill up a shorter window
    first: Tensor  # [P] the first window position that follows the prompt; the others are holes in the prompt
    end: Tensor | None = None  # [P] the window positions from this one on belong to no answer; None: there are none
    extra: int = field(default=0, kw_only=True)  # the positions behind an answer that may fill its last block
    fixed: bool = field(default=False, kw_only=True)  # whether all forwards have the same number of rows

    @property
    def positions(self) -> Tensor:
        """The window positions [P, L], counted from the first real token. Those that are not decoded are -1."""
        place = self.window - (~self.attention_mask).sum(-1, keepdim=True)
        if self.end is None:
            return place
        last = place.gather(1, self.end[:, None] - 1) // (self.extra + 1)
        return place.masked_fill((place // (self.extra + 1) > last) | (place < 0), -1)

    @property
    def lengths(self) -> list[tuple[int, int]]:
        """The numbers of tokens and of window positions of each row, without padding. This waits for the device."""
        length = torch.full_like(self.first, self.window.shape[1]) if self.end is None else self.end + self.extra
        pairs: list[tuple[int, int]] = torch.stack([self.attention_mask.sum(-1), length], -1).tolist()
        return pairs

    @staticmethod
    def join(parts: Sequence[Prompts], pad_id: int) -> Prompts:
        """Return the prompts of all parts, with as little padding as they need. Rows of a fixed length keep it."""
        lengths = [pair for part in parts for pair in part.lengths]
        columns, size = row_shape(lengths)
        columns = parts[0].tokens.shape[1] if parts[0].fixed else columns
        pad, rows = torch.nn.functional.pad, []
        for part in parts:
            shift, more = columns - part.tokens.shape[1], size - part.window.shape[1]
            end = torch.full_like(part.first, part.window.shape[1]) if part.end is None else part.end
            place = torch.arange(size, device=end.device)
            window = pad(part.window + shift, (0, more)).masked_fill(place >= end[:, None] + part.extra, 0)
            real = pad(part.attention_mask, (shift, 0))
            rows.append((pad(part.tokens, (shift, 0), value=pad_id), real, window, part.first, end))
        tokens, mask, window, first, end = (torch.cat(values) for values in zip(*rows, strict=True))
        whole = parts[0].extra == 0 and all(length == size for _, length in lengths)
        last = None if whole else end
        return Prompts(tokens, mask, window, first, last, extra=parts[0].extra, fixed=parts[0].fixed)

    def fill(self, answers: Tensor) -> Tensor:
        """Put answers [P, N, L] into the window positions of the prompts, and return the rows [P, N, T]."""
        shape = (*answers.shape[:2], self.tokens.shape[1])
        window = self.window[:, None].expand(answers.shape)
        return self.tokens[:, None].expand(shape).scatter(2, window, answers)

    def without_prompt(self, mask_id: int) -> Prompts:
        """Return the unconditional rows for guidance, in which a mask replaces every token that is not padding."""
        return replace(self, tokens=self.tokens.masked_fill(self.attention_mask, mask_id))

    def take(self, index: Tensor) -> Prompts:
        tensors = self.tokens, self.attention_mask, self.window, self.first
        tokens, mask, window, first = (values[index] for values in tensors)
        end = None if self.end is None else self.end[index]
        return Prompts(tokens, mask, window, first, end, extra=self.extra, fixed=self.fixed)


def row_shape(lengths: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """Return the numbers of columns and of window positions of left-padded rows, given those that each row needs. A row
    with a shorter window needs a column of padding."""
    size = max(window for _, window in lengths)
    return max(tokens + (window < size) for tokens, window in lengths), size


class Texts:
    """The texts of the rows of a pool."""

    def __init__(self, call: Call, pool: Pool, prompts: Prompts) -> None:
        self.call, self.pool, self.prompts = call, pool, prompts

    @cached_property
    def sequences(self) -> Tensor:
        """The rows [P, N, T] of prompt and answer together. End-of-text fills what was left masked behind the end."""
        call, tokens = self.call, self.pool.tokens
        if call.settings.stop and len(call.end_ids):
            tokens = torch.where(tokens == call.model.mask_id, call.end_ids[0], tokens)
        return self.prompts.fill(tokens)

    @cached_property
    def tokens(self) -> list[list[list[int]]]:
        return self.pool.tokens.tolist()

    @cached_property
    def ends(self) -> list[list[int]]:
        """The number [P][N] of tokens of each answer before the first end-of-text token that follows the prompt."""
        ends, end = self.call.ends(self.pool.tokens, self.pool).cumsum(-1) > 0, self.pool.end
        return (~(ends if end is None else ends | starting_at(end, ends))).sum(-1).tolist()

    def whole(self, p: int, n: int) -> str:
        """Return the text of an answer without regard to stop strings, or the whole filled text if the prompt had
        holes."""
        answer, end = self.tokens[p][n], self.ends[p][n]
        ids = answer[:end]
        if int(self.pool.first[p]) > 0:
            row = self.sequences[p, n][self.prompts.attention_mask[p]].tolist()
            length = len(answer) if self.pool.end is None else int(self.pool.end[p])
            ids = row[: len(row) - (length - end)]
        return self._decode(ids)

    def _decode(self, ids: list[int]) -> str:
        codec = self.call.model.tokenizer
        return " ".join(map(str, ids)) if codec is None else codec.decode(ids)

    def text(self, p: int, n: int) -> str:
        """Return the text of an answer, before the first stop string that does not lie before the first hole."""
        stops, start = self.call.settings.stop_strings or (), 0
        if stops and int(self.pool.first[p]) > 0:
            before = slice(0, int(self.prompts.window[p, 0]))
            start = len(self._decode(self.prompts.tokens[p, before][self.prompts.attention_mask[p, before]].tolist()))
        text = self.whole(p, n)
        ends = [text.find(stop, start) for stop in stops]
        return text[: min((end for end in ends if end >= 0), default=None)]

    def kind(self, p: int, n: int) -> str:
        """Return a text that answers share if they count as equal: JSON of a schema is compared by its values."""
        text = self.text(p, n)
        return text if self.call.settings.json_schema is None else canonical(text)

    def texts(self) -> list[list[str]]:
        return [[self.text(p, n) for n in range(len(rows))] for p, rows in enumerate(self.tokens)]
