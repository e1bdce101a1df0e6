"""The public configurations build models of the sizes their layouts add up to (on the meta device, no weights)."""

import json

import pytest
import torch

from d5p4.models import MDLM, Dream, LLaDA

MDLM_OWT = """{"vocab_size": 50258, "model_length": 1024, "hidden_dim": 768, "cond_dim": 128, "n_blocks": 12,
    "n_heads": 12, "dropout": 0.1, "time_conditioning": false}"""
LLADA_8B = """{"block_type": "llama", "d_model": 4096, "n_layers": 32, "n_heads": 32, "n_kv_heads": 32,
    "mlp_hidden_size": 12288, "activation_type": "silu", "layer_norm_type": "rms", "rms_norm_eps": 1e-5, "rope": true,
    "rope_theta": 500000.0, "rope_full_precision": true, "vocab_size": 126464, "embedding_size": 126464,
    "weight_tying": false, "include_bias": false, "include_qkv_bias": false, "scale_logits": false,
    "input_emb_norm": false, "attention_layer_norm": false, "max_sequence_length": 4096, "block_group_size": 1,
    "mask_token_id": 126336, "eos_token_id": 126081, "pad_token_id": 126081, "attention_dropout": 0.0,
    "residual_dropout": 0.0, "alibi": false}"""
DREAM_7B = """{"hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4,
    "intermediate_size": 18944, "vocab_size": 152064, "rope_theta": 1000000.0, "rms_norm_eps": 1e-6,
    "hidden_act": "silu", "tie_word_embeddings": false, "use_sliding_window": false, "max_position_embeddings": 131072,
    "mask_token_id": 151666, "eos_token_id": 151643, "pad_token_id": 151643, "rope_scaling": null,
    "use_mrope": false}"""


@pytest.mark.parametrize(
    ("build", "config", "parameters", "mask"),
    [
        (MDLM, MDLM_OWT, 169_627_218, 50257),
        (LLaDA, LLADA_8B, 8_015_581_184, 126336),
        (Dream, DREAM_7B, 7_615_616_512, 151666),
    ],
)
def test_public_sizes(build, config, parameters, mask):
    values = json.loads(config)
    with torch.device("meta"):
        model = build(values)
    assert sum(p.numel() for p in model.parameters()) == parameters
    assert model.mask_id == mask and model.head.weight.shape[0] == values["vocab_size"]
