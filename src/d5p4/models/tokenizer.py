"""The tokenizer of a checkpoint. It converts text to token ids and back, and conversations to prompts."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE, WordLevel, WordPiece

from ..errors import D5P4Error, shown
from .chat import render
from .checkpoint import read_json, refusing, regular

FILES = "tokenizer.json, or vocab.json and merges.txt, or vocab.txt"
LONGEST_TOKEN = 4096  # characters
MOST_GROWTH = 64  # how many times longer a text may become in one part of a tokenizer
MASK_TEXT = "<|mask|>"
END_TOKENS = ("<|eot_id|>", "<|im_end|>", "<|endoftext|>")
NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")

EDGE = re.compile(r"\[(PAD|UNK|CLS|SEP|MASK)\]|<(s|/s|cls|eos|pad|unk|mask)>")  # special tokens of a vocab.txt
UNUSED = re.compile(r"\[unused\d+\]|<null_\d+>")

# How Qwen2 splits text: contractions, words (with one leading mark), digits, runs of marks, line ends, other space.
QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class Tokenizer:
    """A `tokenizers` backend with a chat template and a mask token.

    `encode` recognises the strings of special tokens in a text, and adds no special tokens of its own.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        chat_template: str | None = None,
        named: Mapping[str, str] | None = None,
        mask_id: int | None = None,
    ) -> None:
        """`named` holds strings for the chat template, such as {"bos_token": "<s>"}."""
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        self.chat_template = chat_template
        self.named = dict(named or {})
        self.mask_id = mask_id
        if mask_id is not None:
            _give_mask(backend, mask_id)
        self.mask_token = None if mask_id is None else backend.id_to_token(mask_id)
        self.has_chat = chat_template is not None
        self._ids = set(backend.get_vocab(with_added_tokens=True).values())
        self._special = {i for i, token in backend.get_added_tokens_decoder().items() if token.special}

    @classmethod
    def read(cls, folder: str | Path, *, mask_id: int | None = None, qwen2: bool = False) -> Tokenizer:
        """Read the tokenizer of a folder. `qwen2`: whether text is split like Qwen2, even if tokenizer_class is not."""
        folder = Path(folder)
        with refusing(f"the tokenizer files in {folder} cannot be read", "fetch them again"):
            settings = read_json(folder / "tokenizer_config.json", missing={})
            specials = {**read_json(folder / "special_tokens_map.json", missing={}), **settings}
            named = {key: text for key in NAMED if (text := _text(specials.get(key))) is not None}
            if (folder / "tokenizer.json").is_file():
                backend = _backend(folder / "tokenizer.json")
                _add_listed(backend, settings, folder)
            elif (folder / "vocab.txt").is_file():
                backend = _listed_tokens(regular(folder / "vocab.txt"), settings)
            elif cls.lies_in(folder):
                kind = str(settings.get("tokenizer_class", "")).lower()
                backend = _byte_level(folder, settings, qwen2 or kind.startswith(("qwen2", "dream")))
            else:
                raise D5P4Error(f"{folder} has no tokenizer: put {FILES} there, or pass tokenizer=")
            if max(map(len, backend.get_vocab()), default=0) > LONGEST_TOKEN:
                raise D5P4Error(f"the tokenizer in {folder} has a token of more than {LONGEST_TOKEN} characters")
            extra = map(_text, specials.get("additional_special_tokens") or [])
            _make_special(backend, [*named.values(), *(text for text in extra if text is not None)])
            return cls(backend, chat_template=_chat_template(folder, settings), named=named, mask_id=mask_id)

    @staticmethod
    def lies_in(folder: Path) -> bool:
        """Say whether a folder has the files that `read` needs."""
        both = (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file()
        return both or (folder / "tokenizer.json").is_file() or (folder / "vocab.txt").is_file()

    def for_model(self, mask_id: int) -> Tokenizer:
        """Return this tokenizer, or a copy of it with another mask id."""
        if self.mask_id == mask_id:
            return self
        copy = tokenizers.Tokenizer.from_str(self.backend.to_str())
        return Tokenizer(copy, chat_template=self.chat_template, named=self.named, mask_id=mask_id)

    def encode(self, text: str) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as half:
            place = f"{text[half.start]!r} at character {half.start}, in {text[max(0, half.start - 20) :][:40]!r}"
            reason = f"it has half of a surrogate pair, {place}; remove it"
            raise D5P4Error(f"the prompt is not valid text: {reason}") from None
        reason = f"{shown(text)} cannot be written in this model's tokens"
        with refusing(reason):
            try:
                return self.backend.encode(text, add_special_tokens=False).ids
            except Exception:  # the backend raises plain Exception
                split = self.backend.pre_tokenizer
                for piece in text if split is None else [text[a:b] for _, (a, b) in split.pre_tokenize_str(text)]:
                    try:
                        self.backend.encode(piece, add_special_tokens=False)
                    except Exception as missing:
                        raise D5P4Error(f"{reason}: there is no token for {shown(piece)}") from missing
                raise

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids. Special tokens, the mask and ids without a token are left out."""
        kept = [i for i in map(int, ids) if i in self._ids and i not in self._special and i != self.mask_id]
        with refusing("these token ids have no text"):
            return self.backend.decode(kept, skip_special_tokens=False)

    def ids(self) -> set[int]:
        return self._ids

    def textless(self) -> list[int]:
        """Return the ids that stand in no text: those of special tokens and of unused places of the vocabulary."""
        vocabulary = self.backend.get_vocab(with_added_tokens=True)
        return sorted(self._special | {i for token, i in vocabulary.items() if UNUSED.fullmatch(token)})

    def token_id(self, text: str) -> int | None:
        return self.backend.token_to_id(text)

    def end_ids(self) -> list[int]:
        """Return the ids of the special tokens that end a text: those of `END_TOKENS`, and the padding token unless it
        is also the unknown token or the beginning-of-text token."""
        pad, others = self.named.get("pad_token"), [self.named.get(name) for name in ("unk_token", "bos_token")]
        texts = END_TOKENS if pad is None or pad in others else (*END_TOKENS, pad)
        return [i for i in map(self.backend.token_to_id, texts) if i in self._special]

    def chat(self, messages: Sequence[Mapping[str, str]]) -> str | None:
        """Return the prompt that asks for the next answer in a conversation, or None without a chat template."""
        if self.chat_template is None:
            return None
        if isinstance(messages, (str, Mapping)) or not all(isinstance(m, Mapping) and "role" in m for m in messages):
            raise D5P4Error(f"messages={shown(messages)} should be a list of objects with 'role' and 'content'")
        facts = {"tools": None, "documents": None, "add_generation_prompt": True, **self.named}
        return render(self.chat_template, facts | {"messages": [dict(message) for message in messages]})


def _backend(file: Path) -> tokenizers.Tokenizer:
    content = read_json(file)
    with refusing(f"{file} cannot be read", "fetch it again"):
        for part in ("normalizer", "pre_tokenizer", "decoder"):
            if (growth := _growth(content.get(part))) > MOST_GROWTH:
                raise D5P4Error(f"the {part} in {file} may make a text {growth:,.0f} times longer, so it is refused")
        return tokenizers.Tokenizer.from_str(json.dumps(content))


def _growth(part: Any) -> float:
    """Return how many times longer the replacements and byte letters in a part of a tokenizer can make a text."""
    if isinstance(part, list):
        return math.prod(map(_growth, part))
    if not isinstance(part, dict):
        return 1
    growth = _growth(list(part.values()))
    if part.get("type") == "Replace":
        pattern = part["pattern"].get("String", "")  # a regular expression may match nothing, as an empty text does
        return growth * (max(1, len(part["content"]) / len(pattern)) if pattern else 1 + len(part["content"]))
    return growth * (2 if part.get("type") == "ByteLevel" else 1)


def _byte_level(folder: Path, settings: Mapping[str, Any], qwen2: bool) -> tokenizers.Tokenizer:
    """Build a byte-level BPE tokenizer from vocab.json, merges.txt and the lists of added tokens."""
    vocabulary, merges = BPE.read_file(*(str(regular(folder / name)) for name in ("vocab.json", "merges.txt")))
    extra = read_json(folder / "added_tokens.json", missing={})
    added = {int(i): AddedToken(text) for text, i in extra.items()} | _listed(settings)
    # Added tokens are put into the vocabulary now, so that they keep their ids even if the ids have gaps.
    ids = {token.content: i for i, token in added.items()}
    backend = tokenizers.Tokenizer(BPE({**vocabulary, **ids}, merges))
    if qwen2:
        backend.normalizer = normalizers.NFC()
        split = pre_tokenizers.Split(Regex(QWEN2_SPLIT), behavior="isolated")
        bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.pre_tokenizer = pre_tokenizers.Sequence([split, bytes_only])
    else:
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=bool(settings.get("add_prefix_space")))
    backend.decoder = decoders.ByteLevel()
    for _, token in sorted(added.items()):
        _add(backend, token)
    _make_special(backend, ["<|endoftext|>"])
    return backend


def _listed_tokens(file: Path, settings: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """Build the tokenizer of a vocab.txt, which has one token per line: BERT's word pieces or, if no token begins with
    "##", the letters of proteins or the symbols of molecules, of which the longest that fits is taken."""
    tokens = file.read_text(encoding="utf-8").splitlines()
    vocabulary = {token.strip(): i for i, token in enumerate(tokens)}
    special = [token for token in vocabulary if EDGE.fullmatch(token)]
    if any(token.startswith("##") for token in vocabulary):
        backend = tokenizers.Tokenizer(WordPiece(vocabulary, unk_token="[UNK]"))
        backend.normalizer = normalizers.BertNormalizer(lowercase=bool(settings.get("do_lower_case", True)))
        backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        backend.decoder = decoders.WordPiece()
    else:
        longest = sorted(set(vocabulary) - set(special) - {""}, key=len, reverse=True)
        split = pre_tokenizers.Split(Regex("|".join(map(re.escape, longest))), "isolated")
        no_space = pre_tokenizers.Split(Regex(r"\s+"), "removed")
        backend = tokenizers.Tokenizer(WordLevel(vocabulary, unk_token=""))  # an unknown letter is an error
        backend.pre_tokenizer = pre_tokenizers.Sequence([no_space, split])
        backend.decoder = decoders.Fuse()
    _make_special(backend, special)
    return backend


def _listed(settings: Mapping[str, Any]) -> dict[int, AddedToken]:
    """Return the added tokens of tokenizer_config.json, by their ids."""
    options = ("single_word", "lstrip", "rstrip", "normalized", "special")
    listed = (settings.get("added_tokens_decoder") or {}).items()
    return {int(i): AddedToken(e["content"], **{k: e[k] for k in options if k in e}) for i, e in listed}


def _add_listed(backend: tokenizers.Tokenizer, settings: Mapping[str, Any], folder: Path) -> None:
    """Add to the backend each token that tokenizer_config.json lists but tokenizer.json does not have."""
    for i, token in sorted(_listed(settings).items()):
        if backend.token_to_id(token.content) is None:
            _add(backend, token)
        if (actual := backend.token_to_id(token.content)) != i:
            ids = f"{token.content!r} has id {actual} in tokenizer.json and id {i} in tokenizer_config.json"
            raise D5P4Error(f"the tokenizer files in {folder} disagree: {ids}; fetch the files again")


def _add(backend: tokenizers.Tokenizer, token: AddedToken) -> None:
    (backend.add_special_tokens if token.special else backend.add_tokens)([token])


def _make_special(backend: tokenizers.Tokenizer, texts: Sequence[str]) -> None:
    """Mark strings that already have an id as special tokens."""
    special = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    wanted = [text for text in texts if text not in special and backend.token_to_id(text) is not None]
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in wanted])


def _give_mask(backend: tokenizers.Tokenizer, mask_id: int) -> None:
    """Make the token with the mask id special. If no token has this id and it is the next free id, add `<|mask|>`."""
    text = backend.id_to_token(mask_id)
    if text is not None:
        _make_special(backend, [text])
        return
    ids = backend.get_vocab().values()
    if mask_id == len(ids) == max(ids, default=-1) + 1 and backend.token_to_id(MASK_TEXT) is None:
        backend.add_special_tokens([AddedToken(MASK_TEXT, special=True, normalized=False)])


def _chat_template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    """Return the template of chat_template.jinja, or else of tokenizer_config.json, or else of chat_template.json."""
    if (folder / "chat_template.jinja").exists():
        return regular(folder / "chat_template.jinja").read_text(encoding="utf-8")
    template = settings.get("chat_template")
    if template is None:
        template = read_json(folder / "chat_template.json", missing={}).get("chat_template")
    if isinstance(template, list):
        template = {str(item.get("name")): item.get("template") for item in template if isinstance(item, dict)}
    if isinstance(template, dict):
        names, only = ", ".join(template), next(iter(template.values()), None)
        # Prompts with chat=False need no template, so the error is raised only when the template is rendered.
        reason = f"none of the templates {names} is called default: write a chat_template.jinja, or use chat=False"
        refusal = f"{{{{ raise_exception({json.dumps(reason)}) }}}}"
        template = template.get("default", only if len(template) < 2 else refusal)
    return template if isinstance(template, str) else None


def _text(token: Any) -> str | None:
    """Return the string of a special token. Files store it as a string, or as an object with the key `content`."""
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else None
