"""A stand-in for smol and its base: random weights of the toy shape, and code that is independent of the recipe's."""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from safetensors.torch import save_file

import d5p4
from d5p4.models.checkpoint import read_json
from d5p4.models.load import find
from d5p4.ops.vocab import logits_of
from d5p4_lab.train.smol import Body, Smol, random_base
from d5p4_lab.train.smol_data import MASK, toy_data
from tests.checkpoints import DREAM_SPECIALS, character_tokenizer, write_json

CPU = torch.device("cpu")
SHAPE = read_json(find("smol") / "config.json") | Smol.small


@cache
def base():
    return random_base(SHAPE)


def teacher():
    return Body(SHAPE, base(), 0, torch.float32).requires_grad_(False)


@cache
def rows():
    data = toy_data(teacher())
    return data._replace(held_out=np.arange(len(data.rows)) % 4 == 0)


def recipe(data=None, **options):
    return Smol(CPU, 0, True, base(), rows() if data is None else data, **options)


def write_base(folder):
    """Write the base as the checkpoint of a Llama."""
    folder.mkdir()
    write_json(folder / "config.json", SHAPE | {"model_type": "llama", "architectures": ["LlamaForCausalLM"]})
    save_file(base(), folder / "model.safetensors")
    character_tokenizer(DREAM_SPECIALS).save(str(folder / "tokenizer.json"))
    return folder


def load(folder, adapter):
    """Return the library's model, in which only the mask is banned, as in the recipe."""
    model = d5p4.load(folder, "cpu", "float32", adapter=adapter)
    model.banned = torch.arange(len(model.banned)) == MASK
    return model


def log_probabilities(model, row, hidden, at, banned=True):
    """Return log p [V] of the token at a position by the library's model. The row ends with the block of the position,
    and the hidden positions of that block are masked."""
    end = (at // model.block + 1) * model.block
    first = end - model.block
    tokens = torch.tensor([*row[:first], *(MASK if hidden[i] else row[i] for i in range(first, end))])
    states = model.body(tokens[None]).states[0, at : at + 1]
    weight = base()["model.embed_tokens.weight"]  # the model's own row of the mask is for its input
    return logits_of(states, weight, None, model.banned & banned)[0].log_softmax(-1)


@cache
def llama():
    """Return the base as a model of transformers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    keys = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size")
    keys += ("intermediate_size", "max_position_embeddings", "rms_norm_eps", "rope_theta", "tie_word_embeddings")
    model = LlamaForCausalLM(LlamaConfig(**{key: SHAPE[key] for key in keys}))
    model.load_state_dict({**base(), "lm_head.weight": base()["model.embed_tokens.weight"]})
    return model.eval().requires_grad_(False)


def next_log_probabilities(tokens):
    """Return log p [T, V] of the token behind each of the tokens by the base."""
    logits = llama()(torch.tensor([[*tokens]])).logits[0]
    return logits.log_softmax(-1)
