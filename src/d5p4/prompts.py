"""Prompts as users write them -> token ids -> padded batches that share a schedule."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .errors import D5P4Error
from .rows import Prompts
from .settings import Settings, plain_number
from .types import Model

BUCKET = 64  # row lengths under `deterministic` are its multiples

Prompt = str | Sequence[int] | Sequence[Mapping[str, str]] | Tensor
"""A text, token ids (a mask id is a hole to fill), or chat messages."""


@dataclass(frozen=True)
class Request:
    """One prompt, ready to be laid out."""

    ids: list[int]
    append: int  # mask positions after the prompt

    @property
    def length(self) -> int:
        return len(self.ids) + self.append

    def window(self, mask_id: int) -> list[int]:
        """Positions to decode, in order: the holes of the prompt, then what follows it."""
        holes = [i for i, token in enumerate(self.ids) if token == mask_id]
        return holes + list(range(len(self.ids), len(self.ids) + self.append))


def split_prompts(prompts: Any, sets: int | None) -> list[Prompt]:
    """One entry a prompt. None is `sets` unconditional prompts."""
    if sets is not None and (not isinstance(sets, int) or isinstance(sets, bool) or sets < 1):
        raise D5P4Error(f"sets={sets!r} must be a whole number of at least 1")
    if prompts is None:
        return [[] for _ in range(sets or 1)]
    if sets is not None:
        raise D5P4Error("sets is for unconditional answers; repeat the prompt in the list instead")
    prompts = _as_list(prompts)
    if isinstance(prompts, (str, bytes, bytearray)):
        return [prompts]  # bytes are refused by `encode`
    if not isinstance(prompts, Sequence):
        raise D5P4Error(f"prompts of type {type(prompts).__name__} mean nothing here; give text, token ids or messages")
    prompts = [plain_number(part) for part in prompts]
    if not prompts:
        raise D5P4Error("there is no prompt: the list is empty (prompts=None asks for unconditional answers)")
    if all(isinstance(part, Mapping) for part in prompts) or all(_is_id(part) for part in prompts):
        return [prompts]
    return list(prompts)


def _as_list(value: Any) -> Any:
    """Tensors and arrays as lists."""
    return value.tolist() if hasattr(value, "tolist") else value


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def of_only_prompt(error: D5P4Error) -> str:
    """What is wrong with the only prompt of a call, without its number."""
    return re.sub(r"^prompt 0\b", "the prompt", str(error)).removeprefix("the prompt: ")


def encode(model: Model, prompt: Any, chat: bool | None, number: int) -> list[int]:
    """Token ids of one prompt; the chat template is applied to text where the model has one, unless chat=False."""
    try:
        ids = _ids_of(model, prompt, chat, number)
    except D5P4Error as reason:
        if str(reason).startswith("prompt "):
            raise
        raise D5P4Error(f"prompt {number}: {reason}") from reason
    size = model.head.weight.shape[0]
    wrong = next((i for i in ids if not 0 <= i < size), None)
    if wrong is not None:
        raise D5P4Error(f"prompt {number} holds token id {wrong}, outside the model's {size} ids")
    return ids


def _ids_of(model: Model, prompt: Any, chat: bool | None, number: int) -> list[int]:
    prompt = _as_list(prompt)
    if isinstance(prompt, str):
        return _encode_text(model, prompt, chat, number)
    if isinstance(prompt, Sequence) and prompt and all(isinstance(part, Mapping) for part in prompt):
        if chat is False:
            raise D5P4Error(f"prompt {number} is a conversation, but chat=False turns the chat template off")
        return _encode_chat(model, prompt, number)
    if isinstance(prompt, Sequence) and not isinstance(prompt, (bytes, bytearray)):
        ids = [plain_number(part) for part in prompt]
        if all(_is_id(part) for part in ids):
            return ids
    raise D5P4Error(f"prompt {number} ({type(prompt).__name__}) is neither text, token ids nor a list of messages")


def _encode_text(model: Model, text: str, chat: bool | None, number: int) -> list[int]:
    if model.tokenizer is None:
        raise D5P4Error("this model has no tokenizer: give prompts as token ids, or load it with tokenizer=")
    if chat is not False:
        rendered = model.tokenizer.chat([{"role": "user", "content": text}])
        if rendered is not None:
            return _encode_rendered(model, rendered, number)
        if chat:
            raise D5P4Error("chat=True, but this model has no chat template")
    return model.tokenizer.encode(text)


def _encode_chat(model: Model, messages: Sequence[Mapping[str, str]], number: int) -> list[int]:
    for message in messages:
        if not isinstance(message.get("role"), str) or not isinstance(message.get("content"), str):
            raise D5P4Error(f"prompt {number}: a message needs 'role' and 'content' as text, not {dict(message)!r}")
    text = model.tokenizer.chat(messages) if model.tokenizer is not None else None
    if text is None or model.tokenizer is None:
        raise D5P4Error(f"prompt {number} is a conversation, but this model has no chat template")
    return _encode_rendered(model, text, number)


def _encode_rendered(model: Model, text: str, number: int) -> list[int]:
    assert model.tokenizer is not None
    ids = model.tokenizer.encode(text)
    if model.mask_id in ids:
        raise D5P4Error(
            f"prompt {number} has the mask token in a chat prompt; to fill holes in a text use chat=False or token ids"
        )
    return ids


def plan(model: Model, ids: list[int], settings: Settings, length_given: bool, number: int) -> Request:
    """How many masks follow the prompt. A prompt with holes gets none unless gen_length was given by the caller."""
    if model.mask_id in ids and not length_given:
        append = 0
    elif length_given and settings.gen_length is not None:
        append = settings.gen_length
    else:  # a default gives way where the model has less room
        default = settings.gen_length or (model.max_length if model.carry_over else 128)
        append = min(default, model.max_length - len(ids))
    total = len(ids) + append
    if total > model.max_length or append < 0 or model.mask_id not in ids and append < 1:
        raise D5P4Error(
            f"prompt {number} has {len(ids)} tokens and asks for {max(append, 1)} more, but the model holds "
            f"{model.max_length}; shorten the prompt or gen_length"
        )
    return Request(ids, append)


def bucket(length: int, max_length: int) -> int:
    """The row length of a request of this length under `deterministic`."""
    return min(-(-length // BUCKET) * BUCKET, max_length)


def layout(
    requests: Sequence[Request], mask_id: int, pad_id: int, device: torch.device, fixed: int | None = None
) -> Prompts:
    """Left-padded rows of requests whose windows have one length; `fixed`: rows and forwards of just this length."""
    longest = max(r.length for r in requests) if fixed is None else fixed
    tokens, real, window = [], [], []
    for r in requests:
        row = r.ids + [mask_id] * r.append
        padding = longest - len(row)
        tokens.append([pad_id] * padding + row)
        real.append([False] * padding + [True] * len(row))
        window.append([padding + i for i in r.window(mask_id)])
    appended = [r.append for r in requests]
    tensors = (torch.tensor(x, device=device) for x in (tokens, real, window, appended))
    return Prompts(*tensors, fixed=fixed is not None)
