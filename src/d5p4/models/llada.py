"""LLaDA: the layers of a Llama under names of its own, but with bidirectional attention (GSAI-ML/LLaDA-8B-Base)."""

from collections.abc import Mapping
from typing import Any

from ..errors import D5P4Error
from .base import flag, integer, only
from .qwen import QwenModel

SUPPORTED: dict[str, Any] = {"block_type": "llama", "layer_norm_type": "rms", "rope": True, "clip_qkv": None}
SUPPORTED |= {"layer_norm_with_affine": True, "block_group_size": 1}
SUPPORTED |= dict.fromkeys(("alibi", "include_bias", "bias_for_layer_norm", "attention_layer_norm"), False)
SUPPORTED |= dict.fromkeys(("input_emb_norm", "scale_logits"), False)
SPELLINGS = {  # keys of transformers for keys of LLaDA's config.json; iLLaDA may use either
    "d_model": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "mlp_hidden_size": "intermediate_size",
    "max_sequence_length": "max_position_embeddings",
    "weight_tying": "tie_word_embeddings",
    "activation_type": "hidden_act",
    "include_qkv_bias": "attention_bias",
}
# Parts of the names of parameters, and what they are in a checkpoint.
NAMES = {"model.embed_tokens": "wte", "model.norm": "ln_f", "model.layers": "blocks", "lm_head": "ff_out"}
NAMES |= {"input_layernorm": "attn_norm", "post_attention_layernorm": "ff_norm", "self_attn.o_proj": "attn_out"}
NAMES |= {"self_attn.": "", "mlp.gate_proj": "ff_proj", "mlp.up_proj": "up_proj", "mlp.down_proj": "ff_out"}


class LLaDA(QwenModel):
    """The LLaDA model. The hidden states after its last norm go to the head and also serve as features."""

    architecture = "llada"
    title = "LLaDA"
    head_name = "ff_out.weight"
    eps = 1e-5

    def __init__(self, config: Mapping[str, Any]) -> None:
        only(config, SUPPORTED, self.title)
        own = {key: other for key, other in SPELLINGS.items() if config.get(key) is not None}
        same = dict(config) | {other: config[key] for key, other in own.items()}
        if same.get("num_key_value_heads") is None and config.get("multi_query_attention"):
            same["num_key_value_heads"] = 1
        try:
            self.bias = flag(same, "attention_bias")
            if same.get("intermediate_size") is None:
                same["intermediate_size"] = integer(same, "mlp_ratio", 4) * integer(same, "hidden_size")
            super().__init__(same)
            only(config, {"head_dim": self.width // self.heads}, self.title)
        except D5P4Error as error:  # which names the key of transformers
            message = str(error)
            for key, other in own.items():
                message = message.replace(other, key)
            raise D5P4Error(message) from None

    def stored_names(self, name: str) -> str:
        for part, stored in NAMES.items():
            name = name.replace(part, stored)
        return f"model.transformer.{name}"


class ILLaDA(LLaDA):
    """iLLaDA: LLaDA with fewer key heads than query heads, and with a head that is its embedding."""

    architecture = "illada"
    title = "iLLaDA"
    default_mask = 5
