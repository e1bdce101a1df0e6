"""Muon updates matrices and AdamW the rest; the rate warms up, falls along a cosine and ends at zero."""

import torch
from torch import nn

from d5p4_lab.train.optimiser import Optimiser, orthogonalised

LLADA = {"d_model": 8, "n_layers": 2, "n_heads": 2, "n_kv_heads": 2, "mlp_hidden_size": 12, "vocab_size": 7}
LLADA |= {"embedding_size": 7, "mask_token_id": 6, "max_sequence_length": 16, "rope_theta": 10000.0}
LLADA |= {"rms_norm_eps": 1e-5, "weight_tying": False}
DIT = {"hidden_dim": 8, "n_blocks": 2, "n_heads": 2, "cond_dim": 4, "vocab_size": 7, "model_length": 16}


def test_singular_values_come_near_one_and_singular_vectors_stay():
    draw = torch.Generator().manual_seed(0)
    for shape in ((32, 32), (96, 32), (8, 64)):
        matrices = torch.randn(4, *shape, generator=draw) * torch.tensor([1e-3, 1.0, 10.0, 1e3])[:, None, None]
        values = torch.linalg.svdvals(orthogonalised(matrices))
        # A square matrix has singular values near zero, which five rounds cannot bring up.
        assert values.max() < 1.3 and values.min() > (0.6 if shape[0] != shape[1] else 0.0), shape
        assert (values > 0.6).float().mean() > 0.9, shape


def stepped(names, weights, gradients):
    """The matrices after one step."""
    parameters = [nn.Parameter(weight.clone()) for weight in weights]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient.clone()
    other = nn.Parameter(torch.zeros(1))
    other.grad = torch.zeros(1)
    Optimiser([*zip(names, parameters, strict=True), ("bias", other)], 0.1, 0.1).step(1.0)
    return [parameter.detach() for parameter in parameters]


def test_stacked_queries_keys_and_values_are_orthogonalised_separately():
    width = 16
    # The maps have very different sizes: as one matrix, the small ones would hardly move.
    sizes = torch.tensor([1.0, 1e-2, 1e-4])[:, None, None]
    gradient = torch.randn(3, width, width, generator=torch.Generator().manual_seed(2)) * sizes
    zeros = torch.zeros(3, width, width)
    (stacked,) = stepped(["blocks.0.attn_qkv.weight"], [zeros.flatten(0, 1)], [gradient.flatten(0, 1)])
    alone = stepped([f"blocks.0.{x}_proj.weight" for x in "qkv"], zeros, gradient)
    torch.testing.assert_close(stacked, torch.cat(alone))
    (as_one,) = stepped(["blocks.0.up.weight"], [zeros.flatten(0, 1)], [gradient.flatten(0, 1)])
    assert as_one[2 * width :].abs().max() < 0.1 * stacked[2 * width :].abs().max()
