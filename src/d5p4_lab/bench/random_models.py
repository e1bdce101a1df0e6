"""Models of a large checkpoint's shape with random weights, made directly on the device, for benchmarks of time."""

from collections.abc import Mapping
from typing import Any

import torch

from d5p4.models.load import ARCHITECTURES
from d5p4.models.quant import plan, quantise

CONFIG: dict[str, Any] = {  # config.json of LLaDA-8B
    **{"model_type": "llada", "architectures": ["LLaDAModelLM"], "max_sequence_length": 4096, "weight_tying": False},
    **{"d_model": 4096, "n_heads": 32, "n_kv_heads": 32, "n_layers": 32, "mlp_hidden_size": 12288},
    **{"vocab_size": 126464, "embedding_size": 126464, "rope_theta": 500000.0, "rms_norm_eps": 1e-5},
    **{"mask_token_id": 126336, "eos_token_id": 126081, "pad_token_id": 126081},
}
SDAR: dict[str, Any] = {  # config.json of SDAR-8B
    **{"model_type": "sdar", "architectures": ["SDARForCausalLM"], "tie_word_embeddings": False},
    **{"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128},
    **{"num_hidden_layers": 36, "intermediate_size": 12288, "vocab_size": 151936, "max_position_embeddings": 32768},
    **{"mask_token_id": 151669, "eos_token_id": 151643, "rope_theta": 1e6, "rms_norm_eps": 1e-6},
}
_TINY = {"vocab_size": 97, "embedding_size": 97, "mask_token_id": 96, "eos_token_id": 95, "pad_token_id": 95}
TINY = CONFIG | _TINY | {"d_model": 16, "n_heads": 2, "n_kv_heads": 2, "n_layers": 1, "mlp_hidden_size": 32}
TINY_SDAR = SDAR | _TINY | {"hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 4}
TINY_SDAR |= {"num_hidden_layers": 1, "intermediate_size": 32}


def quantised_model(config: Mapping[str, Any], device: torch.device, dtype: torch.dtype, bits: str) -> Any:
    """Make such a model with weights in 8 or 4 bits, one weight at a time, as `d5p4.load` does."""
    with torch.device("meta"):
        model: Any = ARCHITECTURES[config["model_type"]](config)
    plan(model, bits)
    generator = torch.Generator(device).manual_seed(0)
    for name, parameter in list(model.named_parameters()):
        owner, _, leaf = name.rpartition(".")
        drawn = torch.ones(parameter.shape, dtype=dtype, device=device)
        if parameter.ndim > 1:
            drawn.normal_(0, parameter.shape[-1] ** -0.5, generator=generator)
        setattr(model.get_submodule(owner), leaf, torch.nn.Parameter(drawn))
        quantise(model, owner)
    model.settle(dtype)
    model.attach("random", None, {})
    return model


def random_model(config: Mapping[str, Any], device: torch.device, dtype: torch.dtype) -> Any:
    """Make a model with the shape in `config` on the device. Its weights are normal with variance 1 / fan-in."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            model = ARCHITECTURES[config["model_type"]](config)
    finally:
        torch.set_default_dtype(before)
    generator = torch.Generator(device).manual_seed(0)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data.normal_(0, parameter.shape[-1] ** -0.5, generator=generator)
    model.settle(dtype)
    model.attach("random", None, {})
    return model
