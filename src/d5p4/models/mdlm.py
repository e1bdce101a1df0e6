"""MDLM: a diffusion transformer over tokens, for checkpoints such as kuleshov-group/mdlm-owt.

The network runs without time conditioning: sigma is 0 for every row, so the shifts, scales and gates of all adaLN
layers are constants of the checkpoint. A forward therefore uses *folded* weights: the gates are multiplied into the
output matrices, the scales into the input matrices, and the shifts go into the biases. `fold()` replaces the
weights for good. A model in training is not folded: it folds in every forward, so that gradients reach all weights.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..ops.kernels import usable
from ..ops.precision import working_dtype
from .base import MOST_LAYERS, NativeModel, Parts, divides, flag, integer, number, only
from .layers import Output, Reading
from .tokenizer import Tokenizer

FREQUENCIES = 256
NORM_EPS = 1e-5


class Block(nn.Module):
    adaLN_modulation: nn.Linear | None
    mlp: Any

    def __init__(self, width: int, cond: int, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout
        self.norm1 = nn.LayerNorm(width, bias=False)
        self.attn_qkv = nn.Linear(width, 3 * width, bias=False)
        self.attn_out = nn.Linear(width, width, bias=False)
        self.norm2 = nn.LayerNorm(width, bias=False)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU("tanh"), nn.Linear(4 * width, width))
        self.adaLN_modulation = _modulation(cond, 6 * width)

    def folded(self, condition: Tensor | None) -> tuple[Any, ...]:
        """Return the folded weights and biases of attn_qkv, attn_out (no bias), mlp.0 and mlp.2."""
        (up, _, down), qkv, out = self.mlp, self.attn_qkv, self.attn_out
        if self.adaLN_modulation is None or condition is None:
            return qkv.weight, qkv.bias, out.weight, up.weight, up.bias, down.weight, down.bias
        dtype, work = up.weight.dtype, condition.dtype
        vectors = _affine(condition, self.adaLN_modulation).chunk(6)
        shift_attn, scale_attn, gate_attn, shift_mlp, scale_mlp, gate_mlp = vectors
        weights = (
            qkv.weight.to(work) * (self.norm1.weight.to(work) * (1 + scale_attn)),
            qkv.weight.to(work) @ shift_attn,
            gate_attn[:, None] * out.weight.to(work),
            up.weight.to(work) * (self.norm2.weight.to(work) * (1 + scale_mlp)),
            up.bias.to(work) + up.weight.to(work) @ shift_mlp,
            gate_mlp[:, None] * down.weight.to(work),
            gate_mlp * down.bias.to(work),
        )
        return tuple(weight.to(dtype) for weight in weights)

    def fold(self, condition: Tensor) -> None:
        qkv, qkv_bias, out, *inner = map(nn.Parameter, self.folded(condition))
        self.attn_qkv.weight, self.attn_qkv.bias, self.attn_out.weight = qkv, qkv_bias, out
        self.mlp[0].weight, self.mlp[0].bias, self.mlp[2].weight, self.mlp[2].bias = inner
        self.adaLN_modulation = None
        for norm in (self.norm1, self.norm2):
            norm.register_parameter("weight", None)

    def forward(self, x: Tensor, delta: None, reading: Reading, layer: int, condition: Tensor | None) -> Output:
        qkv, qkv_bias, out, up, up_bias, down, down_bias = self.folded(condition)
        query, key, value = F.linear(_normalised(x), qkv, qkv_bias).chunk(3, dim=-1)
        mixed, pair = reading.attend(query, key, value, layer)
        x = x + F.dropout(F.linear(mixed, out), self.dropout, self.training)
        inner = F.gelu(F.linear(_normalised(x), up, up_bias), approximate="tanh")
        return x + F.dropout(F.linear(inner, down, down_bias), self.dropout, self.training), None, pair


class OutputLayer(nn.Module):
    adaLN_modulation: nn.Linear | None

    def __init__(self, width: int, vocabulary: int, cond: int, tied: bool) -> None:
        super().__init__()
        self.norm_final = nn.LayerNorm(width, bias=False)  # folding gives it a bias
        self.linear = nn.Linear(width, vocabulary)
        if tied:
            self.linear.register_parameter("weight", None)
        self.adaLN_modulation = _modulation(cond, 2 * width)

    def affine(self, condition: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the scale and shift [D] of the last norm. The head may share its matrix, so they are not folded in."""
        weight = self.norm_final.weight
        if self.adaLN_modulation is None or condition is None:
            assert self.norm_final.bias is not None
            return weight, self.norm_final.bias
        shift, scale = _affine(condition, self.adaLN_modulation).chunk(2)
        return (weight.to(condition.dtype) * (1 + scale)).to(weight.dtype), shift.to(weight.dtype)

    def fold(self, condition: Tensor) -> None:
        scale, shift = self.affine(condition)
        self.norm_final.weight, self.norm_final.bias = nn.Parameter(scale), nn.Parameter(shift)
        self.adaLN_modulation = None

    def forward(self, x: Tensor, delta: None, condition: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return x [R, T, D] and the normalised x."""
        scale, shift = self.affine(condition)
        work = working_dtype(x.dtype)
        normal = F.layer_norm(x.to(work), x.shape[-1:], eps=NORM_EPS)
        return x, (normal * scale.to(work) + shift.to(work)).to(scale.dtype)


class MDLM(NativeModel):
    """The MDLM model. Its states are the vectors after the last norm, and its features are those before that norm.

    MDLM is trained on concatenated documents, in which the end-of-text token only separates documents. So this token
    does not end an answer, and `eos_ids` is empty.
    """

    architecture = "mdlm"
    title = "MDLM"
    prefix = "backbone."
    head_name = "output_layer.linear.weight"
    reads_wide = True
    carry_over = True
    default_order = "ancestral"
    features_before_norm = True
    rope_theta = 10000.0
    sigma_map: Any  # the network that embeds the noise level; None after `fold`

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        only(config, {"time_conditioning": False}, "MDLM")
        width, heads, cond = integer(config, "hidden_dim"), integer(config, "n_heads"), integer(config, "cond_dim")
        vocabulary = integer(config, "vocab_size")
        self.head_width = self.rotary_width = divides(config, "n_heads", width, heads)
        self.max_length = integer(config, "model_length")
        self.mask_id = integer(config, "mask_token_id", vocabulary - 1, least=0, most=vocabulary - 1)
        self.cache_shape = (integer(config, "n_blocks", most=MOST_LAYERS), heads, self.head_width)
        dropout = number(config, "dropout", 0.1) if config.get("dropout") else 0.0

        embedding = nn.init.normal_(torch.empty(vocabulary, width), std=0.02)
        self.vocab_embed = nn.ParameterDict({"embedding": embedding})
        noise_level = nn.Sequential(nn.Linear(FREQUENCIES, cond), nn.SiLU(), nn.Linear(cond, cond))
        self.sigma_map = nn.ModuleDict({"mlp": noise_level})
        self.blocks = nn.ModuleList(Block(width, cond, dropout) for _ in range(self.cache_shape[0]))
        self.output_layer = OutputLayer(width, vocabulary, cond, flag(config, "tie_word_embeddings"))
        self.ban()

    @property
    def unembedding(self) -> tuple[Tensor, Tensor | None]:
        linear = self.output_layer.linear
        return (self.vocab_embed["embedding"] if linear.weight is None else linear.weight), linear.bias

    def end_ids(self, generation: Mapping[str, Any], tokenizer: Tokenizer | None) -> tuple[int, ...]:
        return ()

    @property
    def condition(self) -> Tensor | None:
        """The input [cond] of every adaLN layer, in float32 or wider. After `fold` it is None."""
        if self.sigma_map is None:
            return None
        first, _, last = self.sigma_map["mlp"]
        wave = torch.zeros(FREQUENCIES, device=first.weight.device, dtype=working_dtype(first.weight.dtype))
        wave[: FREQUENCIES // 2] = 1  # at sigma = 0 the cosines are ones and the sines are zeros
        return F.silu(_affine(F.silu(_affine(wave, first)), last))

    @torch.no_grad()
    def fold(self) -> None:
        """Replace the weights by the folded weights. A second call does nothing."""
        condition = self.condition
        if condition is not None:
            for part in (*self.blocks, self.output_layer):
                part.fold(condition)
            self.sigma_map = None

    def settle(self, dtype: torch.dtype) -> None:
        self.fold()
        super().settle(dtype)

    def parts(self) -> Parts:
        condition = self.condition
        blocks = [partial(block, condition=condition) for block in self.blocks]
        embedding = partial(F.embedding, weight=self.vocab_embed["embedding"])
        return embedding, blocks, partial(self.output_layer, condition=condition)


def _normalised(x: Tensor) -> Tensor:
    """Apply a LayerNorm without weight, computed in float32 or wider. The result has the dtype of x."""
    if usable(x):
        return F.layer_norm(x, x.shape[-1:], eps=NORM_EPS)  # the CUDA kernel computes in float32
    return F.layer_norm(x.to(working_dtype(x.dtype)), x.shape[-1:], eps=NORM_EPS).to(x.dtype)


def _modulation(cond: int, width: int) -> nn.Linear:
    """Return an adaLN layer of zeros. Its gates are 0, so before training every block returns its input."""
    linear = nn.Linear(cond, width)
    for parameter in linear.parameters():
        nn.init.zeros_(parameter)
    return linear


def _affine(x: Tensor, linear: nn.Linear) -> Tensor:
    """Apply a linear layer in the dtype of x."""
    return F.linear(x, linear.weight.to(x.dtype), linear.bias.to(x.dtype))
