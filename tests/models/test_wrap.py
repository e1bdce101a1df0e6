"""A wrapped transformers model equals the native one."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tokenizers
import torch
import transformers
from torch import nn

from d5p4.models import load, wrap
from tests.checkpoints import write_dream, write_llada
from tests.models.references import llama_of, qwen_of
from tests.refusals import refusal

CASES = [(write_llada, llama_of, False), (write_dream, qwen_of, True)]


@pytest.mark.parametrize(("write", "foreign", "shift"), CASES)
@pytest.mark.parametrize("attention", ["sdpa", pytest.param("eager", marks=pytest.mark.full)])
def test_wrapped_equals_native(tmp_path: Path, write, foreign, shift: bool, attention: str) -> None:
    folder = write(tmp_path, dtype=torch.float64)
    native = load(folder, "cpu", "float64")
    module = foreign(folder, torch.float64)
    module.config._attn_implementation = attention
    model = wrap(module, native.tokenizer, mask_id=native.mask_id, shift=shift, eos_ids=native.eos_ids)
    assert torch.equal(model.head.banned, native.head.banned)
    assert model.head.weight is module.get_output_embeddings().weight
    assert (model.max_length, model.eos_ids, model.mask_id) == (128, native.eos_ids, native.mask_id)
    assert (model.dtype, model.device) == (torch.float64, torch.device("cpu"))

    tokens = torch.randint(0, 50, (3, 11), generator=torch.Generator().manual_seed(2))
    # transformers' eager attention takes its softmax in float32
    bound = 1e-10 if attention == "sdpa" else 1e-5
    with torch.no_grad():
        assert (model.body(tokens).states - native.body(tokens).states).abs().max() < bound
        real = torch.ones_like(tokens, dtype=torch.bool)
        real[0, :4] = False
        real[1, :1] = False
        ours, theirs = native.body(tokens, real).states, model.body(tokens, real).states
    assert theirs.isfinite().all()
    assert (ours - theirs)[real].abs().max() < bound


class Adapted(nn.Module):
    """A linear layer with an unmerged adapter, laid out as PEFT's."""

    def __init__(self, base_layer: nn.Linear) -> None:
        super().__init__()
        self.base_layer, self.weight = base_layer, base_layer.weight
        self.lora_A = nn.Linear(base_layer.in_features, 2, bias=False)
        self.lora_B = nn.Linear(2, base_layer.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base_layer(x) + self.lora_B(self.lora_A(x))


def peft(model: nn.Module, prompts: bool = False) -> Any:
    """What `wrap` asks of PEFT's wrapper around a model."""
    config = SimpleNamespace(is_prompt_learning=prompts)
    return SimpleNamespace(get_base_model=lambda: model, active_peft_config=config)


def test_unmerged_peft_model(tmp_path: Path) -> None:
    module = llama_of(write_llada(tmp_path, dtype=torch.float64), torch.float64)
    tokens = torch.arange(7)[None]
    plain = wrap(module, None, mask_id=51).body(tokens).states
    layer = module.model.layers[0].self_attn
    layer.q_proj = adapted = Adapted(layer.q_proj).double()
    states = wrap(peft(module), None, mask_id=51).body(tokens).states
    assert (states - plain).abs().max() > 1e-3, "the adapter is run"
    merged = adapted.base_layer
    merged.weight.data += adapted.lora_B.weight.data @ adapted.lora_A.weight.data
    layer.q_proj = merged
    assert (wrap(module, None, mask_id=51).body(tokens).states - states).abs().max() < 1e-12
    assert "learned prompt tokens" in refusal(wrap, peft(module, prompts=True), None, mask_id=51)
    module.lm_head = Adapted(module.lm_head)
    assert "unmerged adapter" in refusal(wrap, peft(module), None, mask_id=51)


def test_a_forward_without_positions_is_refused_at_once(tmp_path: Path) -> None:
    """LLaDA's own class ignores padding; `hidden=` takes it, and `load` reads its checkpoint."""
    module = llama_of(write_llada(tmp_path), torch.float32)
    inner = module.model.forward
    module.model.forward = lambda input_ids, attention_mask=None, use_cache=None: None
    assert "has no position_ids" in refusal(wrap, module, None, mask_id=51)
    rows = wrap(module, None, mask_id=51, hidden=lambda tokens, *_: inner(tokens).last_hidden_state)
    assert rows.body(torch.arange(5)[None]).states.shape == (1, 5, 32)


class Bare(nn.Module):
    """A module without transformers' structure."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(9, 4), nn.Linear(4, 9)

    def get_output_embeddings(self) -> nn.Module:
        return self.out


def test_hidden_callable_for_other_modules() -> None:
    module, seen = Bare(), []

    def hidden(tokens, attention_mask, position_ids):
        seen.extend((attention_mask.tolist(), position_ids.tolist()))
        return module.embed(tokens)

    model = wrap(module, None, mask_id=8, banned=[2], max_length=16, hidden=hidden, order="random", name="bare")
    tokens = torch.tensor([[1, 2, 3]])
    states = model.body(tokens, torch.tensor([[False, True, True]])).states
    assert torch.equal(states, module.embed(tokens)) and seen == [[[False, True, True]], [[0, 0, 1]]]
    assert model.head.banned.nonzero().flatten().tolist() == [2, 8] and model.head.bias is module.out.bias
    assert (model.name, model.default_order, model.max_length, model.pad_id) == ("bare", "random", 16, 8)


def test_refusals(tmp_path: Path) -> None:
    module = llama_of(write_llada(tmp_path), torch.float32)
    quantised = Bare()
    quantised.out.weight = nn.Parameter(torch.zeros(9, 4, dtype=torch.int8), requires_grad=False)
    for given, tokenizer, options, message in (
        (module, None, {"mask_id": 99}, "mask_id has 99"),
        (module, None, {"eos_ids": [-1]}, "eos_ids has -1"),
        (module, None, {"banned": 3}, "banned=3 must be a list"),
        (module, 3, {}, "tokenizer is a int"),
        (nn.Linear(2, 2), None, {}, "get_output_embeddings"),
        (Bare(), None, {"max_length": 4}, "hidden="),
        (Bare(), None, {"hidden": lambda *_: torch.zeros(1)}, "max_length=None"),
        (quantised, None, {}, "int8"),
    ):
        assert message in refusal(wrap, given, tokenizer, **{"mask_id": 1, **options})
    module.config._attn_implementation = "flash_attention_2"
    assert "attn_implementation='sdpa'" in refusal(wrap(module, None, mask_id=1).body, torch.arange(3)[None])
    module.config.logit_scale = 0.5
    assert "logit_scale=0.5" in refusal(wrap, module, None, mask_id=1)


def test_tokenizers_are_adapted(tmp_path: Path) -> None:
    folder = write_llada(tmp_path, chat=True)
    native = load(folder, "cpu")
    module = llama_of(folder, torch.float32)
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"),
        bos_token="<|startoftext|>",
        eos_token="<|endoftext|>",
        chat_template=native.tokenizer.chat_template,
    )
    text = "well, hello there<|eot_id|> 12"
    ids = native.tokenizer.encode(text)
    messages = [{"role": "user", "content": "hi"}]
    for given in (native.tokenizer, backend, fast):
        model = wrap(module, given, mask_id=native.mask_id)
        codec = model.tokenizer
        assert codec.encode(text) == ids
        assert codec.decode([*ids, native.mask_id, 53, 10**9]) == "well, hello there 12"
        assert codec.mask_token == "<|mdm_mask|>" and codec.token_id("<|eot_id|>") == 50
        assert 3 in codec.ids() and 53 not in codec.ids()
        assert torch.equal(model.head.banned, native.head.banned)
        assert codec.chat(messages) == (native.tokenizer.chat(messages) if codec.has_chat else None)
    assert wrap(module, fast, mask_id=51).tokenizer.has_chat
