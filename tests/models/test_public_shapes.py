"""The public configurations build models of the sizes their layouts add up to (on the meta device, no weights)."""

import json

import pytest
import torch

from d5p4.models import MDLM, SDAR, Dream, FastDLLM, ILLaDA, LLaDA, LLaDA2, LLaDAMoE
from d5p4.models.load import SkipInit

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

SDAR_8B = """{"hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8,
    "head_dim": 128, "intermediate_size": 12288, "vocab_size": 151936, "rope_theta": 1000000, "rms_norm_eps": 1e-6,
    "hidden_act": "silu", "attention_bias": false, "tie_word_embeddings": false, "use_sliding_window": false,
    "max_window_layers": 36, "sliding_window": null, "rope_scaling": null, "max_position_embeddings": 32768}"""
SDAR_4B = {"hidden_size": 2560, "intermediate_size": 9728, "tie_word_embeddings": True}
SDAR_1_7B = {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16}
FAST_7B = """{"hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4,
    "intermediate_size": 18944, "vocab_size": 152064, "rope_theta": 1000000.0, "rms_norm_eps": 1e-6,
    "hidden_act": "silu", "tie_word_embeddings": false, "use_sliding_window": false, "max_position_embeddings": 32768,
    "bd_size": 32, "eos_token_id": 151645, "rope_scaling": null}"""
FAST_1_5B = {"hidden_size": 1536, "num_attention_heads": 12, "num_key_value_heads": 2, "intermediate_size": 8960}
FAST_1_5B |= {"vocab_size": 151936, "tie_word_embeddings": True}
LLADA2_MINI = """{"hidden_size": 2048, "num_hidden_layers": 20, "num_attention_heads": 16, "num_key_value_heads": 4,
    "head_dim": 128, "intermediate_size": 5120, "moe_intermediate_size": 512, "num_experts": 256,
    "num_experts_per_tok": 8, "num_shared_experts": 1, "n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5,
    "score_function": "sigmoid", "moe_router_enable_expert_bias": true, "norm_topk_prob": true, "router_dtype": "fp32",
    "first_k_dense_replace": 1, "partial_rotary_factor": 0.5, "rotary_dim": 64, "rope_theta": 600000,
    "rms_norm_eps": 1e-6, "use_qk_norm": true, "use_bias": false, "use_qkv_bias": false, "tie_word_embeddings": false,
    "max_position_embeddings": 16384, "norm_head": false, "sliding_window": 4096, "vocab_size": 157184,
    "hidden_act": "silu", "rope_scaling": null}"""
LLADA_MOE = """{"hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 16, "num_key_value_heads": 16,
    "expert_intermediate_size": 1024, "dense_intermediate_size": 8192, "shared_expert_intermediate_size": null,
    "num_experts": 64, "num_experts_per_tok": 8, "norm_topk_prob": null, "qk_layernorm": true, "clip_qkv": null,
    "partial_rotary_factor": 1, "moe_layer_freq": [1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1],
    "rope_theta": 50000, "rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": false,
    "attention_bias": false, "max_position_embeddings": 8192, "vocab_size": 157184, "rope_scaling": null}"""
ILLADA_8B = {"n_kv_heads": 8, "mlp_hidden_size": 14336, "vocab_size": 155136, "embedding_size": 155136}
ILLADA_8B |= {"weight_tying": True, "max_sequence_length": 8192, "mask_token_id": None}


def changed(config: str, changes: dict) -> str:
    return json.dumps({**json.loads(config), **changes})


@pytest.mark.parametrize(
    ("build", "config", "parameters", "mask"),
    [
        (MDLM, MDLM_OWT, 169_627_218, 50257),
        (LLaDA, LLADA_8B, 8_015_581_184, 126336),
        (Dream, DREAM_7B, 7_615_616_512, 151666),
        (SDAR, SDAR_8B, 8_190_735_360, 151669),
        (SDAR, changed(SDAR_8B, SDAR_4B), 4_022_468_096, 151669),
        (SDAR, changed(SDAR_8B, {**SDAR_4B, **SDAR_1_7B}), 1_720_574_976, 151669),
        (FastDLLM, FAST_7B, 7_615_616_512, 151665),
        (FastDLLM, changed(FAST_7B, FAST_1_5B), 1_543_714_304, 151665),
        (LLaDA2, LLADA2_MINI, 16_255_643_392, 156895),
        (LLaDAMoE, LLADA_MOE, 7_356_880_896, 156895),
        (ILLaDA, changed(LLADA_8B, ILLADA_8B), 7_615_025_152, 5),
    ],
)
def test_public_sizes(build, config, parameters, mask):
    values = json.loads(config)
    with torch.device("meta"), SkipInit():
        model = build(values)
    assert sum(p.numel() for p in model.parameters()) == parameters
    assert model.mask_id == mask and model.head.weight.shape[0] == values["vocab_size"]
