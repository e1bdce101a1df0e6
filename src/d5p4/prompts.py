"""`prepare` turns prompts, as users write them, into requests.

A request holds token ids, the number of masks that follow the token ids, and the key of a random stream. Python, file
runs, the server, lm-eval and the lab all make their requests in this module.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .decode.schedule import Adaptive, Policy, make_schedule, reveals_of
from .decode.texts import Prompts, row_shape
from .errors import D5P4Error
from .options import Settings, plain_number, whole_number
from .resolve import equal_answers, gives_length, require, resolve
from .rng import hash_rows, key_of, mix
from .search.tree import ROUNDS
from .types import Model, block_of

Prompt = str | Sequence[int] | Sequence[Mapping[str, str]] | Mapping[str, Any] | Tensor
"""A text, token ids (in which each mask id is a hole to fill), chat messages, or a tokenizer's output (`input_ids`)."""
Name = int | str | None
"""The name that the caller gives a prompt. The name selects the random stream of the prompt."""


@dataclass(frozen=True)
class Request:
    """One prompt, ready to be decoded."""

    ids: list[int]
    append: int  # the number of mask positions after the prompt
    key: int = 0  # selects the random stream of the prompt
    extra: int = 0  # the most masks behind the answer that fill the last block of a block-causal model

    @property
    def length(self) -> int:
        return len(self.ids) + self.append

    def window(self, mask_id: int) -> list[int]:
        """Return the positions to decode, in order: the holes of the prompt, then the positions after the prompt."""
        holes = [i for i, token in enumerate(self.ids) if token == mask_id]
        return holes + list(range(len(self.ids), len(self.ids) + self.append))

    def offset(self, model: Model) -> int:
        """Return the number of prompt tokens in the first block of the window, if the model has blocks of its own."""
        block = block_of(model)
        return len(self.ids) % block if block else 0


class Prepared:
    """The model and the options that all prompts of a call share. `take` turns prompts into requests.

    `budget`: the default of max_tokens_per_forward. `judge`: the scorer and the references, for best-of-n.
    `numbered`: equal prompts without a name get different keys, even in different calls of `take`. If it is False, the
    key of a prompt without a name depends on its tokens alone.
    """

    def __init__(
        self, model: Model, options: Mapping[str, Any], numbered: bool = True, budget: int | None = None, **judge: Any
    ) -> None:
        if not hasattr(model, "body") or not hasattr(model, "head"):
            raise D5P4Error(f"model is a {type(model).__name__}; make a model with d5p4.load or d5p4.wrap")
        self.model = model
        self.settings = resolve(model, options, budget)
        self.settings.spec.search(self.settings).check_scorer(self.settings.method, **judge)
        self.length_given = gives_length(options)
        self.requests: list[Request] = []
        self.numbered = numbered
        self._taken = 0
        self._seen: Counter[int] = Counter()  # how often each row of token ids came before, by the row's hash
        self._possible: set[tuple[int, int]] = set()  # lengths and offsets that are known to have a schedule

    def take(self, prompts: Sequence[Any], names: Sequence[Name] | None = None) -> list[Request | D5P4Error]:
        chat = self.settings.chat
        rows = [self._attempt(place, encode, self.model, prompt, chat, True) for place, prompt in enumerate(prompts)]
        good = [place for place, row in enumerate(rows) if not isinstance(row, D5P4Error)]
        keys = self._keys([rows[place] for place in good], [names[place] if names else None for place in good])
        for place, key in zip(good, keys, strict=True):
            rows[place] = self._attempt(place, self._plan, rows[place], key)
        self._taken += len(prompts)
        return rows

    def _attempt(self, place: int, call: Callable[..., Any], *args: Any) -> Any:
        try:
            return call(*args)
        except D5P4Error as error:
            if error.option is None:  # otherwise the error is about an option, which all prompts share
                error.prompt = self._taken + place
            return error

    def _keys(self, rows: Sequence[Sequence[int]], names: Sequence[Name]) -> list[int]:
        """Return the key of each row. A key is made from the caller's name or, if there is none, from the token ids and
        the number of equal rows before it (0 unless `numbered`)."""
        hashes = hash_rows(rows)
        before = []
        for row in hashes.tolist():
            before.append(self._seen[row])
            if self.numbered:
                self._seen[row] += 1
        own = mix(hashes, torch.tensor(before, dtype=torch.int64)).tolist()
        return [key if name is None else key_of(name) for key, name in zip(own, names, strict=True)]

    def _plan(self, ids: list[int], key: int) -> Request:
        """Return the request of a prompt. After a prompt with holes, masks are added only if a length is given."""
        model, settings = self.model, self.settings
        holes, block = model.mask_id in ids, block_of(model)
        if getattr(model, "fills", False) and (not holes or (self.length_given and settings.gen_length)):
            mask = getattr(model.tokenizer, "mask_token", None) or f"id {model.mask_id}"
            reason = f"{model.name} fills holes in a text and does not continue it; write {mask} for each missing token"
            raise D5P4Error(f"{reason}, without gen_length")
        if holes and (block or settings.cache != "none"):
            reason = f"cache={settings.cache!r} can only continue a prompt; use cache='none'"
            if block:
                cure = "remove the mask tokens, or use a model with full attention"
                reason = f"{model.name} is block-causal and can only continue a prompt; {cure}"
            raise D5P4Error(f"the prompt has mask tokens to fill in, but {reason}")
        if holes and settings.form is not None:
            reason = "can only continue a prompt, and this one has holes; leave it out, or remove the mask tokens"
            raise D5P4Error(reason, option=settings.form[0], value=settings.form[1])
        if holes and not self.length_given:
            append = 0
        elif self.length_given and settings.gen_length is not None:
            append = settings.gen_length
        else:  # a default length is shortened to fit the model
            append = min(default_length(model, settings), model.max_length - len(ids))
        if len(ids) + append > model.max_length or append < (0 if holes else 1):
            reason = (
                f"the prompt has {len(ids)} tokens and asks for {max(append, 1)} more, but the model takes "
                f"at most {model.max_length} together; shorten the prompt or the answer"
            )
            at_fault = "gen_length" if self.length_given and len(ids) < model.max_length else None
            raise D5P4Error(reason, option=at_fault)
        request = Request(ids, append, key, extra=(block or 1) - 1)
        shape = len(request.window(model.mask_id)), request.offset(model)
        if shape not in self._possible:
            schedule_for(model, settings, *shape)
            self._possible.add(shape)
        return request


def prepare(
    model: Model,
    prompts: Any,
    options: Mapping[str, Any],
    *,
    keys: Sequence[Name] | None = None,
    sets: int | None = None,
    budget: int | None = None,
    **judge: Any,
) -> Prepared:
    """Return the requests of a call. Raise an error if a prompt is wrong. prompts=None means `sets` empty prompts."""
    prepared = Prepared(model, options, budget=budget, **judge)
    guidance = prepared.settings.guidance
    if prompts is None:
        if sets is None:  # with `sets`, the caller asks for answers without a prompt
            check_empty(model, prepared.settings.chat)
        if guidance != 1:
            raise D5P4Error("strengthens a prompt, but there is no prompt; use 1", option="guidance", value=guidance)
    listed = split_prompts(prompts, sets)
    check_lists(len(listed), keys=keys, references=judge.get("references"))
    for request in prepared.take(listed, None if keys is None else _names(keys)):
        if isinstance(request, D5P4Error):
            raise request
        prepared.requests.append(request)
    lengths = {request.append for request in prepared.requests}
    if prepared.settings.gen_length is None and len(lengths) == 1 and lengths != {0}:
        prepared.settings = replace(prepared.settings, gen_length=lengths.pop())  # so that results show the length
    return prepared


def check_empty(model: Model, chat: bool | None) -> None:
    """Raise an error if the model answers prompts and would write junk without one: it names a grader, or has a chat
    template that the caller has not turned off."""
    if "grader" in model.generation_defaults or (chat is not False and getattr(model.tokenizer, "has_chat", False)):
        raise D5P4Error(f"the prompt is empty, but {model.name} answers prompts; give it a text to answer")


def default_length(model: Model, settings: Settings) -> int:
    """Return how many tokens to append if the caller gives no length and the prompt has no holes."""
    return settings.gen_length or (model.max_length if model.carry_over else 128)


def schedule_for(model: Model, settings: Settings, length: int, offset: int) -> Policy:
    """Return the schedule for answers of this length, whose first block has `offset` tokens of the prompt. Raise an
    error if there is no schedule, or if the schedule would make the k answers equal."""
    extra, alone = (block_of(model) or 1) - 1, getattr(model, "next_token_first", False)
    block = settings.block_length or length
    widest = None if settings.form is None or settings.reveal_spec.adaptive else 1
    if settings.spec.tree:
        reveals: tuple[int, ...] = ()
        if not settings.reveal_spec.adaptive:
            shown = min(block, length + extra)  # a short answer may have a whole block of open positions
            reveals = reveals_of(make_schedule(max(length, shown), settings.steps, shown, False), shown)
        return Adaptive(length + extra, rounds=ROUNDS, reveals=reveals, widest=widest)
    if settings.adaptive:
        return Adaptive(length + extra, widest=widest)
    length += -(offset + length) % (extra + 1)
    ancestral, stop = settings.order == "ancestral", bool(settings.stop)
    schedule = make_schedule(length, settings.steps, settings.block_length, ancestral, stop, offset, alone)
    if not schedule.random:
        require(settings, [equal_answers(settings, "one step per block")])
    return schedule


def check_lists(prompts: int, **given: Any) -> None:
    for name, value in given.items():
        listed = hasattr(value, "__getitem__") and hasattr(value, "__len__") and not isinstance(value, (str, Mapping))
        if value is not None and not listed:
            raise D5P4Error(f"give a list with one entry per prompt, not {type(value).__name__}", option=name)
        if value is not None and len(value) != prompts:
            raise D5P4Error(f"there are {len(value)} entries for {prompts} prompts", option=name)


def _names(keys: Sequence[Name]) -> list[Name]:
    names = [plain_number(key) for key in keys]
    for name in names:
        if name is not None and (not isinstance(name, (int, str)) or isinstance(name, bool)):
            raise D5P4Error(f"key {name!r} must be a whole number or text", option="keys")
    counts = Counter(key_of(name) for name in names if name is not None)
    if twice := [name for name in names if name is not None and counts[key_of(name)] > 1]:
        reason = f"key {twice[0]!r} names two prompts; use different keys, which start different random streams"
        raise D5P4Error(reason, option="keys")
    return names


def split_prompts(prompts: Any, sets: int | None) -> list[Prompt]:
    """Return prompts of any form as a list with one entry per prompt. prompts=None gives `sets` empty prompts."""
    if sets is not None:
        whole_number("sets", sets)
    if prompts is None:
        return [[] for _ in range(sets or 1)]
    if sets is not None:
        raise D5P4Error(
            "works only without a prompt; to get several sets, repeat the prompt in the list", option="sets"
        )
    if isinstance(prompts, Mapping):
        return _tokenized(prompts)
    prompts = _as_list(prompts)
    if isinstance(prompts, (str, bytes, bytearray)):
        return [prompts]  # text is one prompt; bytes are not allowed, and `encode` raises the error
    if not isinstance(prompts, Sequence):
        raise D5P4Error(f"prompts cannot be a {type(prompts).__name__}; give text, token ids or chat messages")
    prompts = [plain_number(part) for part in prompts]
    if not prompts:
        raise D5P4Error("there is no prompt: the list is empty (prompts=None asks for unconditional answers)")
    messages = all(isinstance(part, Mapping) and "input_ids" not in part for part in prompts)
    if messages or all(_is_id(part) for part in prompts):
        return [prompts]
    return [row for part in prompts for row in (_tokenized(part) if isinstance(part, Mapping) else [part])]


def _tokenized(output: Mapping[str, Any]) -> list[Prompt]:
    """Return the rows of token ids in a tokenizer's output, without padding."""
    if "input_ids" not in output:
        if "role" in output:
            return [[output]]  # one chat message
        raise D5P4Error("a prompt that is a dict needs 'input_ids' (a tokenizer's output), or 'role' and 'content'")
    rows, mask = _as_list(output["input_ids"]), _as_list(output.get("attention_mask"))
    if rows and _is_id(rows[0]):
        rows, mask = [rows], None if mask is None else [mask]
    if mask is None:
        return list(rows)
    try:
        return [[i for i, real in zip(row, m, strict=True) if real] for row, m in zip(rows, mask, strict=True)]
    except (TypeError, ValueError):
        raise D5P4Error("input_ids and attention_mask must have the same shape") from None


def _as_list(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else value


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def encode(model: Model, prompt: Any, chat: bool | None, answered: bool = False) -> list[int]:
    """Return the token ids of one prompt. If the model has a chat template, it is applied to text unless chat=False.
    `answered`: the prompt must not be empty if the model answers prompts."""
    if answered and _is_empty(prompt):
        check_empty(model, chat)
    ids = _ids_of(model, _as_list(prompt), chat)
    size = model.head.weight.shape[0]
    wrong = next((i for i in ids if not 0 <= i < size), None)
    if wrong is not None:
        raise D5P4Error(f"token id {wrong} of the prompt is outside the model's {size} ids")
    return ids


def _ids_of(model: Model, prompt: Any, chat: bool | None) -> list[int]:
    if isinstance(prompt, str):
        return _encode_messages(model, [{"role": "user", "content": prompt}], chat)
    if isinstance(prompt, Sequence) and prompt and all(isinstance(part, Mapping) for part in prompt):
        if chat is False:
            raise D5P4Error("turns off the chat template, which a conversation needs", option="chat", value=False)
        for message in prompt:
            if not isinstance(message.get("role"), str) or not isinstance(message.get("content"), str):
                raise D5P4Error(f"a message needs 'role' and 'content' as text, not {dict(message)!r}")
        return _encode_messages(model, prompt, chat)
    if isinstance(prompt, Sequence) and not isinstance(prompt, (bytes, bytearray)):
        ids = [plain_number(part) for part in prompt]
        if all(_is_id(part) for part in ids):
            return ids
    raise D5P4Error(f"a prompt must be text, token ids or a list of messages, not {type(prompt).__name__}")


def _encode_messages(model: Model, messages: Sequence[Mapping[str, str]], chat: bool | None) -> list[int]:
    """Return the token ids of a conversation. Without a chat template, a single message of the user is the prompt."""
    if model.tokenizer is None:
        raise D5P4Error("this model has no tokenizer: give prompts as token ids, or load it with tokenizer=")
    text = None if chat is False else model.tokenizer.chat(messages)
    if text is not None:
        ids = model.tokenizer.encode(text)
        if model.mask_id in ids:
            raise D5P4Error("a chat prompt holds the mask token; to fill holes in a text use chat=False or token ids")
        return ids
    if chat:
        raise D5P4Error("needs a chat template, which this model does not have", option="chat", value=True)
    if len(messages) > 1 or messages[0]["role"] != "user":
        reason = "the prompt is a conversation, but this model has no chat template"
        raise D5P4Error(f"{reason}; give one message with the role user, or a text")
    before, after = getattr(model, "frame", ([], []))
    return [*before, *model.tokenizer.encode(messages[0]["content"]), *after]


def _is_empty(prompt: Any) -> bool:
    """Return whether a prompt is a text or a conversation that says nothing. A list of no token ids is not meant."""
    if isinstance(prompt, str):
        return not prompt.strip()
    messages = prompt if isinstance(prompt, (list, tuple)) else []
    contents = [part.get("content") if isinstance(part, Mapping) else None for part in messages]
    return bool(contents) and all(isinstance(content, str) and not content.strip() for content in contents)


def layout(
    requests: Sequence[Request], mask_id: int, pad_id: int, device: torch.device, fixed: int | None = None
) -> Prompts:
    """Return requests as left-padded rows. All rows are as long as the longest row, or have the length `fixed` if it is
    given."""
    extra, windows = requests[0].extra, [r.window(mask_id) for r in requests]
    columns, size = row_shape([(r.length + extra, len(own) + extra) for r, own in zip(requests, windows, strict=True)])
    columns = columns if fixed is None else fixed
    tokens, real, window = [], [], []
    for r, own in zip(requests, windows, strict=True):
        row = r.ids + [mask_id] * (r.append + extra)
        padding = columns - len(row)
        tokens.append([pad_id] * padding + row)
        real.append([False] * padding + [True] * len(row))
        places = [padding + i for i in (*own, *range(r.length, r.length + extra))]
        window.append(places + [0] * (size - len(places)))
    ends = [len(own) for own in windows]
    firsts = [end - r.append for r, end in zip(requests, ends, strict=True)]
    tensors = [torch.tensor(x, device=device) for x in (tokens, real, window, firsts, ends)]
    if extra == 0 and len(set(ends)) == 1:
        tensors.pop()
    return Prompts(*tensors, extra=extra, fixed=fixed is not None)
