"""Models of a large checkpoint's shape with random weights, made directly on the device, for benchmarks of time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from d5p4.models.load import ARCHITECTURES


def _config(width: int, heads: int, layers: int, inner: int, vocabulary: int, mask: int, end: int) -> dict[str, Any]:
    """Return the content of a config.json of LLaDA with these sizes and token ids."""
    sizes = {"d_model": width, "n_heads": heads, "n_kv_heads": heads, "n_layers": layers, "mlp_hidden_size": inner}
    sizes |= {"vocab_size": vocabulary, "embedding_size": vocabulary, "max_sequence_length": 4096}
    ids = {"mask_token_id": mask, "eos_token_id": end, "pad_token_id": end}
    rest = {"rope_theta": 500000.0, "rms_norm_eps": 1e-5, "weight_tying": False}
    return {"model_type": "llada", "architectures": ["LLaDAModelLM"], **sizes, **ids, **rest}


def _sdar(width: int, heads: int, layers: int, inner: int, vocabulary: int, ids: Sequence[int]) -> dict[str, Any]:
    """Return the content of a config.json of SDAR with these sizes, four query heads per key head, and the token ids of
    the mask and of the end."""
    sizes = {"hidden_size": width, "num_attention_heads": heads, "num_key_value_heads": heads // 4}
    sizes |= {"head_dim": width // heads, "num_hidden_layers": layers, "intermediate_size": inner}
    sizes |= {"vocab_size": vocabulary, "max_position_embeddings": 32768}
    rest = {"mask_token_id": ids[0], "eos_token_id": ids[1], "rope_theta": 1e6, "rms_norm_eps": 1e-6}
    return {"model_type": "sdar", "architectures": ["SDARForCausalLM"], "tie_word_embeddings": False, **sizes, **rest}


CONFIG = _config(4096, 32, 32, 12288, 126464, 126336, 126081)  # LLaDA-8B
TINY = _config(16, 2, 1, 32, 97, 96, 95)
SDAR = _sdar(4096, 32, 36, 12288, 151936, (151669, 151643))  # SDAR-8B
TINY_SDAR = _sdar(16, 4, 1, 32, 97, (96, 95))


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
