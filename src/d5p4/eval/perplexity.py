"""Perplexity of texts under a causal language model that had no part in writing them.

Perplexity per token depends on the judge's tokenizer, bits per byte does not: compare judges by the second.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from ..errors import D5P4Error, NonFiniteLogits
from ..models.layers import working_dtype
from ..models.load import choose_device, choose_dtype, find


class Scored(NamedTuple):
    """What a judge says of n texts. A text without scored tokens has zeros."""

    nats: np.ndarray  # [n] float64, sum of -log p over the scored tokens
    tokens: np.ndarray  # [n] int64, scored tokens, in the judge's own tokens
    bytes: np.ndarray  # [n] int64, UTF-8 bytes of the scored tokens

    @property
    def perplexity(self) -> float:
        """exp of the mean nats a token over the whole corpus; NaN when nothing was scored."""
        tokens = int(self.tokens.sum())
        return math.exp(self.nats.sum() / tokens) if tokens else math.nan

    @property
    def bits_per_byte(self) -> float:
        """Bits a byte of text over the whole corpus; NaN when nothing was scored."""
        size = int(self.bytes.sum())
        return float(self.nats.sum() / math.log(2) / size) if size else math.nan


def transformers() -> Any:
    """The library, without its progress bars."""
    try:
        import transformers
    except ImportError as reason:
        raise D5P4Error("a causal judge needs transformers: pip install 'd5p4[eval]'") from reason
    transformers.utils.logging.disable_progress_bar()
    return transformers


class CausalJudge:
    """A causal language model of transformers that scores texts (needs the extra `eval`; never runs remote code).

    name_or_path   a folder, a name shipped with d5p4 ("judge") or a hub id
    gguf_file      the name of a GGUF file in that folder, to read instead of safetensors (needs gguf and accelerate)
    device, dtype  the best device there is, and float32, so that figures do not depend on rounding
    start          the special token the first token of a text is predicted from: by default the tokenizer's
                   beginning-of-text token, else its end-of-text token. Where the tokenizer has neither, or with
                   start="", the first token of each text is not scored
    """

    def __init__(
        self,
        name_or_path: str | Path,
        *,
        gguf_file: str | None = None,
        device: str | torch.device | None = None,
        dtype: str | torch.dtype | None = "float32",
        start: str | None = None,
    ) -> None:
        where = choose_device(device)
        self.name = str(name_or_path)
        self.tokenizer, model = _read(name_or_path, gguf_file)
        if not getattr(self.tokenizer, "is_fast", False):
            raise D5P4Error(f"{self.name!r} has no tokenizer.json, which says where in a text each token lies")
        self.model = model.to(device=where, dtype=choose_dtype(dtype, where)).eval()
        self.start_id = _start(self.tokenizer, start, self.name)
        self.context: int | None = getattr(self.model.config, "max_position_embeddings", None)

    @torch.no_grad()
    def score(self, texts: Sequence[str], batch_size: int = 16, max_tokens: int | None = None) -> Scored:
        """-log p of each text, given nothing before it. The batch size changes cost and memory, not results.

        `max_tokens` counts in the judge's tokens and is where longer texts are cut, their bytes with them; without it
        a text longer than the judge's context is an error. An empty text has zero tokens.
        """
        if isinstance(texts, str) or not all(isinstance(text, str) for text in texts):
            raise D5P4Error(f"texts must be a list of strings, not {texts!r:.60}")
        for name, value in (("batch_size", batch_size), ("max_tokens", max_tokens)):
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise D5P4Error(f"{name}={value!r} must be a whole number of at least 1")
        rows, sizes = [], []
        for number, text in enumerate(texts):
            row, size = self._row(text, number, max_tokens)
            rows.append(row)
            sizes.append(size)
        nats = np.zeros(len(rows))
        # Rows of like length share a batch, so that little is padded; a row of one token has nothing to predict.
        order = sorted((i for i, row in enumerate(rows) if len(row) > 1), key=lambda i: len(rows[i]))
        for first in range(0, len(order), batch_size):
            batch = order[first : first + batch_size]
            nats[batch] = self._nats([rows[i] for i in batch])
        tokens = np.array([max(0, len(row) - 1) for row in rows], dtype=np.int64)
        return Scored(nats, tokens, np.array(sizes, dtype=np.int64))

    def _row(self, text: str, number: int, max_tokens: int | None) -> tuple[list[int], int]:
        """A row whose tokens but the first are to be scored, and how many bytes of the text these are."""
        if not text:
            return [], 0
        found = self.tokenizer(
            text, add_special_tokens=False, return_offsets_mapping=True, truncation=False, verbose=False
        )
        ids, ends = found["input_ids"], [end for _, end in found["offset_mapping"]]
        if max_tokens is not None and len(ids) > max_tokens:
            text, ids = text[: ends[max_tokens - 1]], ids[:max_tokens]
        if self.start_id is None:
            text, row = text[ends[0] :] if ids else "", ids
        else:
            row = [self.start_id, *ids]
        if self.context is not None and len(row) - 1 > self.context:
            raise D5P4Error(
                f"text {number} has {len(ids)} tokens for {self.name!r}, which reads {self.context}; "
                f"max_tokens={self.context} cuts it"
            )
        return row, len(text.encode())

    def _nats(self, rows: Sequence[Sequence[int]]) -> list[float]:
        """Sum of -log p over each row's tokens but the first."""
        device = self.model.device
        lengths = [len(row) - 1 for row in rows]
        inputs = torch.zeros(len(rows), max(lengths), dtype=torch.int64)  # right-padded; the padding's value is unseen
        mask = torch.zeros_like(inputs)
        for i, row in enumerate(rows):
            inputs[i, : lengths[i]] = torch.tensor(row[:-1])
            mask[i, : lengths[i]] = 1
        out = self.model(input_ids=inputs.to(device), attention_mask=mask.to(device), use_cache=False)
        sums = []
        for logits, row, length in zip(out.logits, rows, lengths, strict=True):
            scores = logits[:length].to(working_dtype(logits.dtype))
            sums.append(F.cross_entropy(scores, torch.tensor(row[1:], device=device), reduction="none").double().sum())
        result = torch.stack(sums)
        if not bool(result.isfinite().all()):
            raise NonFiniteLogits(f"{self.name!r} gave logits that are not finite; check its weights or use float32")
        return result.tolist()


def _read(name_or_path: str | Path, gguf_file: str | None) -> tuple[Any, Any]:
    """Tokenizer and model of a folder, a shipped name or a hub id."""
    library = transformers()
    folder = find(name_or_path)
    options: dict[str, Any] = {"use_safetensors": True}  # as elsewhere here: never a pickle
    if gguf_file is not None:
        if not (folder / gguf_file).is_file():
            raise D5P4Error(f"gguf_file={gguf_file!r} is not in {folder}")
        options = {"gguf_file": gguf_file}
    try:
        tokenizer = library.AutoTokenizer.from_pretrained(folder, gguf_file=gguf_file)
        model = library.AutoModelForCausalLM.from_pretrained(folder, **options)
    except Exception as reason:  # transformers raises many unrelated kinds
        first = (str(reason).strip() or "no reason given").splitlines()[0]
        raise D5P4Error(
            f"{str(name_or_path)!r} cannot be read as a causal language model ({type(reason).__name__}: {first})"
        ) from reason
    return tokenizer, model


def _start(tokenizer: Any, start: str | None, name: str) -> int | None:
    """The id that stands before a text; None: nothing does."""
    if start == "":
        return None
    if start is None:
        found = [i for i in (tokenizer.bos_token_id, tokenizer.eos_token_id) if i is not None]
        return found[0] if found else None
    if start not in tokenizer.get_vocab():
        raise D5P4Error(f"start={start!r} is no token of {name!r}")
    return int(tokenizer.convert_tokens_to_ids(start))
