"""BERT, RoBERTa, ESM and ALBERT: models that fill masks in a text. They are masked diffusion models of one step.

The head of these models is a small network: states = norm(act(dense(x))), logits = states @ embedding.T + bias. The
first part is the end of the body here, so that the head stays one affine map.
"""

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..ops.precision import working_dtype
from .base import MOST_LAYERS, NativeModel, Parts, divides, flag, integer, number, only, wrong
from .layers import Output, Padding, Reading
from .tokenizer import Tokenizer

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"gelu": F.gelu, "relu": F.relu}
ACTIVATIONS["gelu_new"] = partial(F.gelu, approximate="tanh")
MASKED_IN_TRAINING = 0.15 * 0.8  # the share of masks in ESM's training rows


class Layer(nn.Module):
    """Attention and an MLP. Each adds to x; the sum is normalised (BERT), or the input is (ESM: `norm_first`)."""

    def __init__(self, model: "MaskedLM", inner: int) -> None:
        super().__init__()
        self.act, self.norm_first = model.act, model.norm_first
        self.query, self.key, self.value, self.out = (nn.Linear(model.width, model.width) for _ in range(4))
        self.up, self.down = nn.Linear(model.width, inner), nn.Linear(inner, model.width)
        self.norm1, self.norm2 = (nn.LayerNorm(model.width, model.eps) for _ in range(2))

    def forward(self, x: Tensor, delta: None, reading: Reading, layer: int) -> Output:
        h = self.norm1(x) if self.norm_first else x
        mixed, pair = reading.attend(self.query(h), self.key(h), self.value(h), layer)
        x = x + self.out(mixed)
        x, h = (x, self.norm2(x)) if self.norm_first else (self.norm1(x),) * 2
        x = x + self.down(self.act(self.up(h)))
        return x if self.norm_first else self.norm2(x), None, pair


class MaskedLM(NativeModel):
    """The common parts. The subclasses are data: names of stored weights, and what a family has or lacks.

    Parameters have names of their own, because the four families store the same parts under different names.
    """

    prefix = ""
    head_name = "decoder.weight"
    unused = re.compile(
        r"(position_ids|inv_freq|(decoder|predictions|lm_head)\.bias)$|pooler|seq_relationship|sop_classifier|contact_head"
        r"|cls\.(species|chain|graft)\."  # further heads of AntiBERTy
    )
    renamed: ClassVar[Mapping[str, str]] = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}
    mask_text = "[MASK]"
    edges = ("[CLS]", "[SEP]")  # the tokens around a text
    fills = True
    outer_names: ClassVar[Mapping[str, str]]  # the stored names of the parts around the layers
    layers_name: ClassVar[str]  # and of a layer, with its number (ALBERT: the numbers of its group and in the group)
    layer_names: ClassVar[Mapping[str, str]]  # and of the parts of a layer
    norm_first: ClassVar[bool] = False
    head_acts: ClassVar[bool] = True  # whether the head uses `hidden_act` instead of the exact GELU
    positions_after_padding: ClassVar[bool] = False  # whether positions begin behind the id of the padding
    rotary_width = 0
    rope_theta = 10000.0
    token_dropout = False

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        only(config, {"is_decoder": False, "is_folding_model": False, "tie_word_embeddings": True}, self.title)
        only(config, {"position_embedding_type": "rotary" if self.rotary_width else "absolute"}, self.title)
        name = config.get("hidden_act") or "gelu"
        if name not in ACTIVATIONS:
            raise wrong("hidden_act", name, f"but d5p4's {self.title} implements {', '.join(ACTIVATIONS)}")
        self.act = ACTIVATIONS[name]
        self.width, heads = integer(config, "hidden_size"), integer(config, "num_attention_heads")
        self.head_width = divides(config, "num_attention_heads", self.width, heads)
        narrow = integer(config, "embedding_size", self.width)
        vocabulary, positions = integer(config, "vocab_size"), integer(config, "max_position_embeddings")
        self.eps = number(config, "layer_norm_eps", 1e-12)
        self.depth = integer(config, "num_hidden_layers", most=MOST_LAYERS)
        pad = integer(config, "pad_token_id", 1, least=0)
        self.first_position = pad + 1 if self.positions_after_padding else 0
        self.max_length = positions - self.first_position
        self.mask_id = self.read_mask(config, vocabulary)

        self.words = nn.Embedding(vocabulary, narrow)
        self.positions = None if self.rotary_width else nn.Embedding(positions, narrow)
        types = integer(config, "type_vocab_size", 2, least=0)
        self.types = nn.Embedding(types, narrow) if types else None
        self.norm = nn.LayerNorm(narrow, self.eps) if flag(config, "emb_layer_norm_before", True) else None
        self.widen = nn.Linear(narrow, self.width) if "widen" in self.outer_names else None
        groups = integer(config, "num_hidden_groups", self.depth, most=self.depth)
        self.group_size = integer(config, "inner_group_num", 1, most=MOST_LAYERS)
        # ALBERT runs a group of layers several times. In the other families each layer is a group.
        first = [int(i / (self.depth / groups)) * self.group_size for i in range(self.depth)]
        self.order = [i + j for i in first for j in range(self.group_size)]
        inner = integer(config, "intermediate_size")
        self.layers = nn.ModuleList(Layer(self, inner) for _ in range(groups * self.group_size))
        self.last_norm = nn.LayerNorm(self.width, self.eps) if self.norm_first else None
        self.dense, self.dense_norm = nn.Linear(self.width, narrow), nn.LayerNorm(narrow, self.eps)
        self.bias = nn.Parameter(torch.zeros(vocabulary))
        self.ban()

    @property
    def unembedding(self) -> tuple[Tensor, Tensor | None]:
        return self.words.weight, self.bias

    def embed(self, embedding: nn.Embedding, tokens: Tensor, padding: Padding) -> Tensor:
        """Add up the embeddings of words, positions and the first of the two types of text."""
        x = embedding(tokens)
        if self.token_dropout:  # in training, ESM zeroed the masks and scaled the rest like dropout, per row
            masked = tokens == self.mask_id
            real = torch.ones_like(masked) if padding.real is None else padding.real
            length = real.sum(-1, keepdim=True).clamp_min(1)
            shown = (real & ~masked).sum(-1, keepdim=True).clamp_min(1)  # a row of masks alone has only zeros
            scale = (1 - MASKED_IN_TRAINING) * length.to(working_dtype(x.dtype)) / shown
            x = (x * scale[..., None]).masked_fill(masked[..., None], 0).to(x.dtype)
        if self.positions is not None:
            x = x + self.positions(padding.positions + self.first_position)
        if self.types is not None:
            x = x + self.types.weight[0]
        x = x if self.norm is None else self.norm(x)
        return x if self.widen is None else self.widen(x)

    def parts(self) -> Parts:
        return self.words, [self.layers[i] for i in self.order], self.predict

    def predict(self, x: Tensor, delta: None) -> tuple[Tensor, Tensor]:
        """Return the states: the output of the head's network."""
        x = x if self.last_norm is None else self.last_norm(x)
        states = self.dense_norm((self.act if self.head_acts else F.gelu)(self.dense(x)))
        return states, states

    def stored_names(self, name: str) -> str:
        owner, _, leaf = name.rpartition(".")
        if owner.startswith("layers."):
            _, layer, part = owner.split(".")
            return f"{self.layers_name.format(*divmod(int(layer), self.group_size))}.{self.layer_names[part]}.{leaf}"
        return f"{self.outer_names[owner]}.{leaf}"

    def attach(self, name: str, tokenizer: Tokenizer | None, generation: Mapping[str, Any]) -> None:
        super().attach(name, tokenizer, generation)
        if tokenizer is not None:
            self.frame = tuple([i] if (i := tokenizer.token_id(text)) is not None else [] for text in self.edges)

    def end_ids(self, generation: Mapping[str, Any], tokenizer: Tokenizer | None) -> tuple[int, ...]:
        """Return no ids: a text ends behind its last hole."""
        return ()

    def ban(self, tokenizer: Tokenizer | None = None) -> None:
        """Also ban special tokens and unused places of the vocabulary, which stand in no text."""
        super().ban(tokenizer)
        if tokenizer is not None:
            self.banned[tokenizer.textless()] = True


BERT_LAYER = {"query": "attention.self.query", "key": "attention.self.key", "value": "attention.self.value"}
BERT_LAYER |= {"out": "attention.output.dense", "norm1": "attention.output.LayerNorm", "up": "intermediate.dense"}
BERT_LAYER |= {"down": "output.dense", "norm2": "output.LayerNorm"}


def _names(body: str, dense: str, dense_norm: str, head: str, norm: str = "LayerNorm") -> dict[str, str]:
    """Return the names of the weights around the layers."""
    parts = {"words": "word_embeddings", "positions": "position_embeddings", "types": "token_type_embeddings"}
    names = {part: f"{body}.embeddings.{name}" for part, name in (parts | {"norm": norm}).items()}
    return names | {"dense": dense, "dense_norm": dense_norm, "": head}


class Bert(MaskedLM):
    """BERT, also AntiBERTy and rxnfp."""

    architecture = "bert"
    title = "BERT"
    outer_names = _names(
        "bert", "cls.predictions.transform.dense", "cls.predictions.transform.LayerNorm", "cls.predictions"
    )
    layers_name = "bert.encoder.layer.{}"
    layer_names = BERT_LAYER


class Roberta(Bert):
    """RoBERTa and XLM-RoBERTa: positions begin behind the id of the padding, and the head has the exact GELU."""

    architecture = "roberta"
    title = "RoBERTa"
    outer_names = _names("roberta", "lm_head.dense", "lm_head.layer_norm", "lm_head")
    layers_name = "roberta.encoder.layer.{}"
    mask_text = "<mask>"
    edges = ("<s>", "</s>")
    positions_after_padding = True
    head_acts = False


class ESM(MaskedLM):
    """ESM-2 (rotary positions) and ESM-1b: the input of a layer is normalised, and masks scale the other tokens."""

    architecture = "esm"
    title = "ESM"
    outer_names = _names("esm", "lm_head.dense", "lm_head.layer_norm", "lm_head", "layer_norm")
    outer_names |= {"last_norm": "esm.encoder.emb_layer_norm_after"}
    layers_name = "esm.encoder.layer.{}"
    layer_names = BERT_LAYER | {"norm1": "attention.LayerNorm", "norm2": "LayerNorm"}
    mask_text = "<mask>"
    edges = ("<cls>", "<eos>")
    positions_after_padding = True
    norm_first = True

    def __init__(self, config: Mapping[str, Any]) -> None:
        rotary = config.get("position_embedding_type") == "rotary"
        self.rotary_width = integer(config, "hidden_size") // integer(config, "num_attention_heads") if rotary else 0
        self.rope_theta = number(config, "rope_theta", self.rope_theta)
        self.token_dropout = flag(config, "token_dropout")
        plain = {"emb_layer_norm_before": flag(config, "emb_layer_norm_before"), "type_vocab_size": 0}
        super().__init__({**config, **plain, "embedding_size": None})


class Albert(MaskedLM):
    """ALBERT: narrow embeddings, and layers that run several times."""

    architecture = "albert"
    title = "ALBERT"
    outer_names = _names("albert", "predictions.dense", "predictions.LayerNorm", "predictions")
    outer_names |= {"widen": "albert.encoder.embedding_hidden_mapping_in"}
    layers_name = "albert.encoder.albert_layer_groups.{}.albert_layers.{}"
    layer_names = {name: f"attention.{name}" for name in ("query", "key", "value")}
    layer_names |= {"out": "attention.dense", "norm1": "attention.LayerNorm", "up": "ffn", "down": "ffn_output"}
    layer_names |= {"norm2": "full_layer_layer_norm"}
