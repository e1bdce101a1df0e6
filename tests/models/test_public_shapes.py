"""The public configurations build models of the sizes their layouts add up to (on the meta device, no weights)."""

import pytest
import torch

from d5p4.models import MDLM, SDAR, Dream, FastDLLM, ILLaDA, LLaDA, LLaDA2, LLaDAMoE, StableDiffCoder
from d5p4.models.load import SkipInit

MDLM_OWT = dict(vocab_size=50258, model_length=1024, hidden_dim=768, cond_dim=128, n_blocks=12, n_heads=12)
MDLM_OWT |= dict(dropout=0.1, time_conditioning=False)

LLADA_8B = dict(d_model=4096, n_layers=32, n_heads=32, n_kv_heads=32, mlp_hidden_size=12288, block_type="llama")
LLADA_8B |= dict(activation_type="silu", layer_norm_type="rms", rms_norm_eps=1e-5, rope=True, rope_theta=500000.0)
LLADA_8B |= dict(vocab_size=126464, embedding_size=126464, max_sequence_length=4096, mask_token_id=126336)
LLADA_8B |= dict(block_group_size=1, attention_dropout=0.0, residual_dropout=0.0, rope_full_precision=True)
LLADA_8B |= dict.fromkeys(("weight_tying", "include_bias", "include_qkv_bias", "scale_logits", "alibi"), False)
LLADA_8B |= dict(input_emb_norm=False, attention_layer_norm=False, eos_token_id=126081, pad_token_id=126081)
ILLADA_8B = LLADA_8B | dict(n_kv_heads=8, mlp_hidden_size=14336, vocab_size=155136, embedding_size=155136)
ILLADA_8B |= dict(weight_tying=True, max_sequence_length=8192, mask_token_id=None)

QWEN_7B = dict(hidden_size=3584, num_hidden_layers=28, num_attention_heads=28, num_key_value_heads=4)
QWEN_7B |= dict(intermediate_size=18944, vocab_size=152064, rope_theta=1000000.0, rms_norm_eps=1e-6, hidden_act="silu")
QWEN_7B |= dict(tie_word_embeddings=False, use_sliding_window=False, max_position_embeddings=32768, rope_scaling=None)
DREAM_7B = QWEN_7B | dict(max_position_embeddings=131072, mask_token_id=151666, use_mrope=False)
FAST_1_5B = QWEN_7B | dict(hidden_size=1536, num_attention_heads=12, num_key_value_heads=2, intermediate_size=8960)
FAST_1_5B |= dict(vocab_size=151936, tie_word_embeddings=True, bd_size=32, eos_token_id=151645)

STABLE_8B = dict(hidden_size=4096, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8)
STABLE_8B |= dict(intermediate_size=14336, vocab_size=155136, max_position_embeddings=8192, rope_theta=500000.0)
STABLE_8B |= dict(attention_bias=False, mlp_bias=False, rms_norm_eps=1e-6, tie_word_embeddings=False)

SDAR_8B = QWEN_7B | dict(hidden_size=4096, num_hidden_layers=36, num_attention_heads=32, num_key_value_heads=8)
SDAR_8B |= dict(head_dim=128, intermediate_size=12288, vocab_size=151936, attention_bias=False, max_window_layers=36)

LLADA2_MINI = QWEN_7B | dict(hidden_size=2048, num_hidden_layers=20, num_attention_heads=16, head_dim=128)
LLADA2_MINI |= dict(intermediate_size=5120, moe_intermediate_size=512, num_experts=256, num_experts_per_tok=8)
LLADA2_MINI |= dict(num_shared_experts=1, n_group=8, topk_group=4, routed_scaling_factor=2.5, score_function="sigmoid")
LLADA2_MINI |= dict(moe_router_enable_expert_bias=True, norm_topk_prob=True, router_dtype="fp32", use_qk_norm=True)
LLADA2_MINI |= dict(first_k_dense_replace=1, partial_rotary_factor=0.5, rotary_dim=64, use_bias=False)
LLADA2_MINI |= dict(use_qkv_bias=False, norm_head=False, sliding_window=4096, vocab_size=157184)

LLADA_MOE = QWEN_7B | dict(hidden_size=2048, num_hidden_layers=16, num_attention_heads=16, num_key_value_heads=16)
LLADA_MOE |= dict(expert_intermediate_size=1024, dense_intermediate_size=8192, shared_expert_intermediate_size=None)
LLADA_MOE |= dict(num_experts=64, num_experts_per_tok=8, norm_topk_prob=None, qk_layernorm=True, clip_qkv=None)
LLADA_MOE |= dict(partial_rotary_factor=1, moe_layer_freq=[1] * 16, attention_bias=False, vocab_size=157184)


@pytest.mark.parametrize(
    ("build", "config", "parameters", "mask"),
    [
        (MDLM, MDLM_OWT, 169_627_218, 50257),
        (LLaDA, LLADA_8B, 8_015_581_184, 126336),
        (ILLaDA, ILLADA_8B, 7_615_025_152, 5),
        (Dream, DREAM_7B, 7_615_616_512, 151666),
        (SDAR, SDAR_8B, 8_190_735_360, 151669),
        (FastDLLM, FAST_1_5B, 1_543_714_304, 151665),
        (StableDiffCoder, STABLE_8B, 8_250_462_208, 5),
        (LLaDA2, LLADA2_MINI, 16_255_643_392, 156895),
        (LLaDAMoE, LLADA_MOE, 7_356_880_896, 156895),
    ],
)
def test_public_sizes(build, config, parameters, mask):
    with torch.device("meta"), SkipInit():
        model = build(config)
    assert sum(p.numel() for p in model.parameters()) == parameters
    assert model.mask_id == mask and model.head.weight.shape[0] == config["vocab_size"]
