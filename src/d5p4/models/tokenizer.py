"""The tokenizer of a checkpoint. It converts text to token ids and back, and conversations to prompts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE

from ..errors import D5P4Error
from .checkpoint import read_json

if TYPE_CHECKING:
    import jinja2

FILES = "tokenizer.json, or vocab.json and merges.txt"
MASK_TEXT = "<|mask|>"
NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")

# How Qwen2 splits text: contractions, words (with one leading mark), digits, runs of marks, line ends, other space.
QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
    r"|[^\r\n\p{L}\p{N}]?\p{L}+"
    r"|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+"
    r"|\s+(?!\S)"
    r"|\s+"
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
        self._ids = set(backend.get_vocab(with_added_tokens=True).values())
        self._special = {i for i, token in backend.get_added_tokens_decoder().items() if token.special}

    @classmethod
    def read(cls, folder: str | Path, *, mask_id: int | None = None, qwen2: bool | None = None) -> Tokenizer:
        """Read the tokenizer of a folder. `qwen2`: whether to split text like Qwen2 (None: as tokenizer_class says)."""
        folder = Path(folder)
        settings = read_json(folder / "tokenizer_config.json", missing={})
        specials = {**read_json(folder / "special_tokens_map.json", missing={}), **settings}
        named = {key: text for key in NAMED if (text := _text(specials.get(key))) is not None}
        if (folder / "tokenizer.json").is_file():
            try:
                backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
            except Exception as reason:  # the library raises plain Exception
                raise D5P4Error(f"{folder / 'tokenizer.json'} cannot be read ({reason}): fetch it again") from reason
            _add_listed(backend, settings, folder)
        elif (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file():
            if qwen2 is None:
                kind = str(settings.get("tokenizer_class", "")).lower()
                qwen2 = kind.startswith(("qwen2", "dream"))
            backend = _byte_level(folder, settings, qwen2)
        else:
            raise D5P4Error(f"{folder} has no tokenizer: put {FILES} there, or pass tokenizer=")
        extra = specials.get("additional_special_tokens") or []
        _make_special(backend, [*named.values(), *(text for item in extra if (text := _text(item)) is not None)])
        return cls(backend, chat_template=_chat_template(folder, settings), named=named, mask_id=mask_id)

    @staticmethod
    def lies_in(folder: Path) -> bool:
        """Say whether a folder has the files that `read` needs."""
        both = (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file()
        return both or (folder / "tokenizer.json").is_file()

    def for_model(self, mask_id: int) -> Tokenizer:
        """Return this tokenizer, or a copy of it with another mask id."""
        if self.mask_id == mask_id:
            return self
        copy = tokenizers.Tokenizer.from_str(self.backend.to_str())
        return Tokenizer(copy, chat_template=self.chat_template, named=self.named, mask_id=mask_id)

    def encode(self, text: str) -> list[int]:
        try:
            return self.backend.encode(text, add_special_tokens=False).ids
        except Exception as reason:  # the backend raises plain Exception
            split = self.backend.pre_tokenizer
            pieces = text if split is None else [text[a:b] for _, (a, b) in split.pre_tokenize_str(text)]
            strange = next((piece for piece in pieces if not self._writes(piece)), None)
            why = str(reason) if strange is None else f"there is no token for {strange!r}"
            raise D5P4Error(f"{text[:40]!r} cannot be written in this model's tokens: {why}") from reason

    def _writes(self, character: str) -> bool:
        try:
            self.backend.encode(character, add_special_tokens=False)
        except Exception:
            return False
        return True

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids. Special tokens, the mask and ids without a token are left out."""
        kept = [i for i in map(int, ids) if i in self._ids and i not in self._special and i != self.mask_id]
        return self.backend.decode(kept, skip_special_tokens=False)

    def ids(self) -> set[int]:
        """Every id that has a token."""
        return self._ids

    def token_id(self, text: str) -> int | None:
        """Return the id of the token with this string, or None."""
        return self.backend.token_to_id(text)

    def special_id(self, text: str) -> int | None:
        """Return the id of the special token with this string, or None if there is no such token."""
        token_id = self.token_id(text)
        return token_id if token_id in self._special else None

    def padding(self) -> list[str]:
        """Return a list with the padding token, which ends a text. The list is empty if there is no padding
        token, or if the same token is also the unknown token or the beginning-of-text token."""
        pad = self.named.get("pad_token")
        return [] if pad is None or pad in map(self.named.get, ("unk_token", "bos_token")) else [pad]

    @property
    def mask_token(self) -> str | None:
        """The string that marks a position to be filled in a prompt."""
        return None if self.mask_id is None else self.backend.id_to_token(self.mask_id)

    @property
    def has_chat(self) -> bool:
        return self.chat_template is not None

    def chat(self, messages: Sequence[Mapping[str, str]]) -> str | None:
        """Return the prompt that asks for the next answer in a conversation, or None without a chat template."""
        if self.chat_template is None:
            return None
        if isinstance(messages, (str, Mapping)) or not all(isinstance(m, Mapping) and "role" in m for m in messages):
            raise D5P4Error(f"messages={messages!r} should be a list of objects with 'role' and 'content'")
        facts = {"tools": None, "documents": None, "add_generation_prompt": True, **self.named}
        try:
            return _compiled(self.chat_template).render(**facts, messages=[dict(m) for m in messages])
        except Exception as reason:  # a template may raise any error
            raise D5P4Error(f"the chat template could not be rendered: {type(reason).__name__}: {reason}") from reason


@lru_cache(maxsize=16)
def _compiled(template: str) -> jinja2.Template:
    """Compile a chat template, which is foreign code, in jinja2's sandbox. Compiling is slow, so results are cached."""
    import jinja2
    from jinja2 import nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """Renders the content of `{% generation %}` unchanged. This tag marks the assistant's words for training."""

        tags = {"generation"}

        def parse(self, parser: Any) -> nodes.Node:
            line = next(parser.stream).lineno
            return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)

    def raise_exception(reason: str) -> None:
        raise jinja2.TemplateError(reason)

    def tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **style: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **style)

    extensions = [Generation, loopcontrols]
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    environment.filters["tojson"] = tojson
    environment.globals |= {"raise_exception": raise_exception, "strftime_now": lambda f: datetime.now().strftime(f)}
    return environment.from_string(template)


def _byte_level(folder: Path, settings: Mapping[str, Any], qwen2: bool) -> tokenizers.Tokenizer:
    """Build a byte-level BPE tokenizer from vocab.json, merges.txt and the lists of added tokens."""
    try:
        vocabulary, merges = BPE.read_file(str(folder / "vocab.json"), str(folder / "merges.txt"))
        extra = read_json(folder / "added_tokens.json", missing={})
        added = {int(i): AddedToken(text) for text, i in extra.items()} | _listed(settings)
        # Added tokens are put into the vocabulary now, so that they keep their ids even if the ids have gaps.
        ids = {token.content: i for i, token in added.items()}
        backend = tokenizers.Tokenizer(BPE({**vocabulary, **ids}, merges))
    except D5P4Error:
        raise
    except Exception as reason:
        raise D5P4Error(f"the tokenizer files in {folder} cannot be read ({reason}): fetch them again") from reason
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


def _listed(settings: Mapping[str, Any]) -> dict[int, AddedToken]:
    """Return the added tokens of tokenizer_config.json, by their ids."""
    options = ("single_word", "lstrip", "rstrip", "normalized", "special")
    listed = (settings.get("added_tokens_decoder") or {}).items()
    return {int(i): AddedToken(e["content"], **{k: e[k] for k in options if k in e}) for i, e in listed}


def _add_listed(backend: tokenizers.Tokenizer, settings: Mapping[str, Any], folder: Path) -> None:
    """Add to the backend each token that tokenizer_config.json lists but tokenizer.json does not have."""
    try:
        listed = _listed(settings)
    except Exception as reason:
        raise D5P4Error(f"{folder / 'tokenizer_config.json'} lists added tokens that cannot be read") from reason
    for i, token in sorted(listed.items()):
        if backend.token_to_id(token.content) is None:
            _add(backend, token)
        actual = backend.token_to_id(token.content)
        if actual != i:
            raise D5P4Error(
                f"the tokenizer files in {folder} disagree: {token.content!r} has id {actual} in tokenizer.json "
                f"and id {i} in tokenizer_config.json; fetch the files again"
            )


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
    if text is None:
        ids = backend.get_vocab(with_added_tokens=True).values()
        if mask_id != max(ids, default=-1) + 1 or len(ids) != mask_id or backend.token_to_id(MASK_TEXT) is not None:
            return
        backend.add_special_tokens([AddedToken(MASK_TEXT, special=True, normalized=False)])
    else:
        _make_special(backend, [text])


def _chat_template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    """Return the template of chat_template.jinja, or else of tokenizer_config.json, or else of chat_template.json."""
    if (folder / "chat_template.jinja").is_file():
        return (folder / "chat_template.jinja").read_text(encoding="utf-8")
    template = settings.get("chat_template")
    if template is None:
        template = read_json(folder / "chat_template.json", missing={}).get("chat_template")
    if isinstance(template, list):
        template = {item.get("name"): item.get("template") for item in template if isinstance(item, dict)}
    if not isinstance(template, dict):
        return template if isinstance(template, str) else None
    if "default" in template or len(template) == 1:
        return template.get("default", next(iter(template.values())))
    # Prompts with chat=False need no template, so the error is raised only when the template is rendered.
    names = ", ".join(map(str, template))
    reason = f"none of the templates {names} is called default: write a chat_template.jinja, or use chat=False"
    return f"{{{{ raise_exception({json.dumps(reason)}) }}}}"


def _text(token: Any) -> str | None:
    """Return the string of a special token. Files store it as a string, or as an object with the key `content`."""
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else None
