"""The base classes of our architectures, which are models as in `d5p4.types`, and functions that read config.json."""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..errors import D5P4Error, shown
from ..ops.precision import working_dtype
from ..types import Context, Head, Hidden
from .layers import Padding, Reading, last_state, read_padding, rotary, shift_right
from .tokenizer import Tokenizer

Config = Mapping[str, Any]
Parts = tuple[Callable[..., Tensor], Iterable[Callable[..., Any]], Callable[..., tuple[Tensor, Tensor]]]
LARGEST = 2**24  # a larger size in config.json is surely a mistake, and would fill the memory
MOST_LAYERS = 2**9  # the public models have fewer than 130; every layer takes time to build, even without weights
MOST_EXPERTS = 2**16  # of all layers together
OWN_CODE = "load the model with its own code and pass it to d5p4.wrap instead"


class WithHead:
    """Properties of a model that follow from its head: its device, its dtype and its padding id."""

    config: Mapping[str, Any]
    mask_id: int
    eos_ids: tuple[int, ...]
    banned: Tensor  # [V] bool

    @property
    def unembedding(self) -> tuple[Tensor, Tensor | None]:
        """The weight [V, D] and the bias [V] of the head. They are the model's own parameters, not copies."""
        raise NotImplementedError

    @property
    def head(self) -> Head:
        weight, bias = self.unembedding
        return Head(weight, bias, self.banned)

    @property
    def device(self) -> torch.device:
        return self.unembedding[0].device

    @property
    def dtype(self) -> torch.dtype:
        return self.unembedding[0].dtype

    @property
    def pad_id(self) -> int:
        """The id that is written at left padding. Attention hides these positions, so any valid id works."""
        pad = self.config.get("pad_token_id")
        if isinstance(pad, int) and 0 <= pad < self.banned.shape[0]:
            return pad
        return self.eos_ids[0] if self.eos_ids else self.mask_id

    def generate(self, *prompts: Any, **options: Any) -> Any:
        """Raise an error, because models of transformers have a method of this name."""
        raise D5P4Error("a model has no method generate; use d5p4.generate(model, 'TEXT')")


class NativeModel(WithHead, nn.Module):
    """A stack of layers between an embedding and a norm. The subclass sets the attributes and the `parts`.

    Parameters have the names of the public checkpoint, without the checkpoint's `prefix`. A new model has random
    weights and no tokenizer. `d5p4.models.load` sets the weights and the tokenizer.
    """

    architecture: ClassVar[str]
    title: ClassVar[str]  # how messages name the model
    prefix: ClassVar[str]
    head_name: ClassVar[str]  # the head's weight; a checkpoint may store it even if it equals the embedding
    unused: ClassVar[re.Pattern[str]] = re.compile(r"rotary_emb\.inv_freq$")  # stored weights that are not needed
    renamed: ClassVar[Mapping[str, str]] = {}  # ends of stored names, and the ends of today's names
    wide: ClassVar[tuple[str, ...]] = ()  # the ends of names of parameters that stay in float32 or wider
    reads_wide: ClassVar[bool] = False  # whether weights are first read in float32 or wider, then converted
    default_mask: ClassVar[int | None] = None  # the mask id, if config.json and the tokenizer do not name it
    mask_text: ClassVar[str | None] = None  # the string of the mask token, if config.json may lack the mask id
    qwen2_text: ClassVar[bool] = False  # whether text is split like Qwen2's, whatever tokenizer_class says
    block_keys: ClassVar[tuple[str, ...]] = ()  # the keys of config.json for the block length, the strongest first
    default_block: ClassVar[int | None] = None
    block: int | None = None  # the number of tokens per block of a model with block-causal attention
    shifted: ClassVar[bool] = False  # whether the output at position i - 1 predicts token i; `body` moves the states
    causal_context: bool = False  # whether blocks without masks are read causally; config.json may say so
    next_token_first: bool = False  # whether the first token of a block is revealed alone; config.json may say so
    features_before_norm: ClassVar[bool] = False  # otherwise the features are the states
    cache_shape: tuple[int, int, int]  # layers, key heads and head width of what `body` keeps
    head_width: int
    rotary_width: int  # the number of elements of each head that are rotated
    rope_theta: float
    carry_over: bool = False  # config.json may set it to true
    fills: ClassVar[bool] = False  # whether the model fills masks in a text, and does not continue a text
    frame: tuple[list[int], ...] = ([], [])  # the ids before and after every text
    default_order = "confidence"
    max_length: int
    bits: str | None = None  # "int8" or "int4" if weights are quantised

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        self.config = dict(config)
        self.carry_over = self.carry_over or flag(config, "carry_over")
        self.name = self.architecture
        self.tokenizer: Tokenizer | None = None
        self.eos_ids: tuple[int, ...] = ()
        self.generation_defaults: Mapping[str, Any] = {}

    def parts(self) -> Parts:
        """Return the embedding, the layers and the last norm.

        A layer is called as `layer(x, delta, reading, number)`, where `delta` is a residual that is not yet added to x.
        It returns the new x and delta, and its keys and values. The norm is called as `norm(x, delta)`.
        """
        raise NotImplementedError

    def body(self, tokens: Tensor, attention_mask: Tensor | None = None, context: Context | None = None) -> Hidden:
        """Return the hidden states of `tokens` [R, T] int64. `attention_mask` [R, T] is False at padding, which is on
        the left of whole rows, and on the right of parts of rows (see `Context`)."""
        context = context or Context()
        embedding, layers, norm = self.parts()
        masked = tokens == self.mask_id if self.causal_context else None
        padding = read_padding(tokens, attention_mask, self.block, context.first, masked)
        x, delta, kept = self.embed(embedding, tokens, padding), None, []
        angles = rotary(padding.positions, self.rotary_width, self.rope_theta, x.dtype) if self.rotary_width else None
        reading = Reading(padding, angles, context, self.head_width)
        # Without cuDNN's attention: it makes a plan for every new shape, which takes longer than a forward of a few
        # rows, and shapes change at every step. Threads share the switch, so cuDNN may stay off.
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
            for number, layer in enumerate(layers):
                x, delta, pair = layer(x, delta, reading, number)
                if context.keep:
                    kept.append(pair)
        features, x = norm(x, delta)
        edge = last_state(x, padding.real) if self.shifted and context.keep else None
        if self.shifted:
            x = shift_right(x, padding, context)
        return Hidden(x, features if self.features_before_norm else x, kept if context.keep else None, edge)

    def embed(self, embedding: Any, tokens: Tensor, padding: Padding) -> Tensor:
        """Return the rows [R, T, D] that the first layer reads."""
        return embedding(tokens)

    def read_mask(self, config: Mapping[str, Any], vocabulary: int) -> int:
        """Return the mask id in config.json, or else the usual id of the architecture if the vocabulary has it."""
        usual = None if self.default_mask is None or self.default_mask >= vocabulary else self.default_mask
        return integer(config, "mask_token_id", usual, least=0, most=vocabulary - 1)

    @property
    def recordable(self) -> bool:
        """Whether `body` never waits for the device, so that a CUDA graph can record it."""
        return all(getattr(part, "recordable", True) for part in self.modules() if part is not self)

    def stored_names(self, name: str) -> str | list[str]:
        """Return the name under which a checkpoint stores a parameter. A list names tensors that are to be stacked."""
        owner, _, leaf = name.rpartition(".")
        names = getattr(self.get_submodule(owner), "stored_names", None) if owner else None
        return self.prefix + name if names is None else names(self.prefix + owner, leaf)

    def attach(self, name: str, tokenizer: Tokenizer | None, generation: Mapping[str, Any]) -> None:
        """Set the name, the tokenizer and everything that depends on the tokenizer and on generation_config.json."""
        self.name, self.tokenizer = name, tokenizer
        defaults = generation.get("d5p4")
        if defaults is not None and not isinstance(defaults, Mapping):
            raise D5P4Error(f"generation_config.json has d5p4={shown(defaults)}, which should be a JSON object")
        self.generation_defaults = dict(defaults or {})
        self.eos_ids = self.end_ids(generation, tokenizer)
        self.ban(tokenizer)

    def end_ids(self, generation: Mapping[str, Any], tokenizer: Tokenizer | None) -> tuple[int, ...]:
        """Return the ids that end a text: those in the configs, and those of the tokenizer."""
        listed = [source.get("eos_token_id") for source in (self.config, generation)]
        ids = [i for part in listed for i in (part if isinstance(part, list) else [part])]
        ids += tokenizer.end_ids() if tokenizer is not None else []
        size = self.unembedding[0].shape[0]
        return tuple(dict.fromkeys(i for i in ids if type(i) is int and 0 <= i < size and i != self.mask_id))

    def ban(self, tokenizer: Tokenizer | None = None) -> None:
        """Ban the mask id, ids from vocab_size upwards, and ids without a token in the tokenizer."""
        size = self.unembedding[0].shape[0]
        ids = [self.mask_id, *range(self.config.get("vocab_size", size), size)]
        self.register_buffer("banned", never_drawn(size, ids, tokenizer).to(self.device), persistent=False)

    def settle(self, dtype: torch.dtype) -> None:
        """Prepare the model for decoding: set its dtype and the evaluation mode, and switch gradients off."""
        wide = {name: parameter.data for name, parameter in self.named_parameters() if name.endswith(self.wide)}
        self.to(dtype).eval().requires_grad_(False)
        for name, data in wide.items():
            self.get_parameter(name).data = data.to(working_dtype(dtype))


def never_drawn(size: int, ids: Sequence[int], codec: Any) -> Tensor:
    """Return bool [size] that is True at the given ids and, given a tokenizer, at ids without a token."""
    never = torch.full((size,), codec is not None)
    if codec is not None:
        never[[i for i in codec.ids() if 0 <= i < size]] = False
    never[list(ids)] = True
    return never


def wrong(key: str, value: Any, reason: str) -> D5P4Error:
    """Return the error about a value in config.json."""
    return D5P4Error(f"config.json has {key}={shown(value)}, {reason}")


def integer(config: Config, key: str, default: int | None = None, least: int = 1, most: int = LARGEST) -> int:
    """Return a whole number from `least` to `most`, or the default if the key is missing or null."""
    value = default if config.get(key) is None else config[key]
    if value is None:
        raise D5P4Error(f"config.json has no {key!r}, which this architecture needs: add it")
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise wrong(key, value, f"which should be a whole number from {least} to {most}")
    return value


def number(config: Config, key: str, default: float) -> float:
    """Return a positive number, or the default if the key is missing or null."""
    value = default if config.get(key) is None else config[key]
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise wrong(key, value, "which should be a number above 0")
    return float(value)


def flag(config: Config, key: str, default: bool = False) -> bool:
    """Return true or false, or the default if the key is missing or null."""
    value = default if config.get(key) is None else config[key]
    if not isinstance(value, bool):
        raise wrong(key, value, "which should be true or false")
    return value


def only(config: Config, supported: Mapping[str, Any], architecture: str) -> None:
    """Raise an error if a key has a value that this code does not implement. A key may also be missing or null."""
    for key, value in supported.items():
        if config.get(key) is not None and config[key] != value:
            raise wrong(key, config[key], f"but d5p4's {architecture} implements only {key}={value!r}; {OWN_CODE}")


def divides(config: Config, key: str, whole_part: int, parts: int) -> int:
    """Return the whole number divided by the number of parts, or raise an error if there is a remainder."""
    if whole_part % parts:
        raise wrong(key, parts, f"which should divide {whole_part} without a remainder")
    return whole_part // parts


def rope_theta(config: Config, title: str) -> float:
    """Return the rotary base, from the key that transformers 4 writes or the table that transformers 5 writes."""
    for key in ("rope_scaling", "rope_parameters"):
        table = config.get(key) or {}
        if not isinstance(table, Mapping) or table.get("rope_type", table.get("type", "default")) != "default":
            raise wrong(key, table, f"but d5p4's {title} implements plain rotary positions only; {OWN_CODE}")
    table = config.get("rope_parameters") or {}
    return number(config if config.get("rope_theta") is not None else table, "rope_theta", 10000.0)
