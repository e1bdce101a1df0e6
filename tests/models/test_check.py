"""`check` passes on sound checkpoints and notices unsound ones."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from d5p4.models import check
from tests.checkpoints import write_dream, write_fast_dllm, write_llada, write_llada2, write_mdlm
from tests.models.references import PlainMDLM, causal_logits, llama_of, qwen2_of
from tests.refusals import refusal

CASES = [(write_llada, "bf16"), (write_dream, "float32"), (write_mdlm, "float32"), (write_fast_dllm, "float32")]
CASES += [(write_llada2, "bf16")]
FULL_CASES = [(write_llada, "float32"), (write_dream, "bf16"), (write_mdlm, "bf16")]


@pytest.mark.parametrize(
    ("write", "dtype"), CASES + [pytest.param(*case, marks=pytest.mark.full) for case in FULL_CASES]
)
def test_sound_checkpoints_pass(tmp_path: Path, write, dtype: str) -> None:
    lines = check(write(tmp_path), "cpu", dtype)
    assert [line.name for line in lines] == [
        "load",
        "logits finite",
        "knows something",
        "padding changes nothing",
        *(["stored tokens change nothing"] if write is not write_mdlm else []),
        "tokenizer round trip",
        "mask token",
    ]
    assert all(line.passed for line in lines), lines
    assert "parameters" in lines[0].detail and "on cpu" in lines[0].detail


def test_own_code_of_a_block_causal_model_is_not_compared(tmp_path: Path) -> None:
    assert "leave out --compare-remote" in refusal(check, write_fast_dllm(tmp_path), "cpu", compare_remote=True)


def failed(lines: list) -> set[str]:
    return {line.name for line in lines if not line.passed}


def test_unsound_checkpoints_fail(tmp_path: Path) -> None:
    folder = write_llada(tmp_path)
    weights = load_file(folder / "model.safetensors")
    name = "model.transformer.ff_out.weight"
    save_file({**weights, name: weights[name] * 1e-4}, folder / "model.safetensors")
    assert failed(check(folder, "cpu")) == {"knows something"}
    save_file({**weights, name: weights[name] * torch.nan}, folder / "model.safetensors")
    assert {"logits finite", "padding changes nothing"} <= failed(check(folder, "cpu"))


def test_a_mask_without_a_string_is_reported(tmp_path: Path) -> None:
    folder = write_mdlm(tmp_path, vocab_size=60)
    assert failed(check(folder, "cpu")) == {"mask token"}


CHECK = sys.modules["d5p4.models.check"]
WRITERS = {"llada": write_llada, "dream": write_dream, "mdlm": write_mdlm}


@pytest.mark.parametrize("kind", WRITERS)
def test_comparison_with_an_independent_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    folder = WRITERS[kind](tmp_path)
    if kind == "mdlm":
        plain = PlainMDLM(folder, torch.float32)
    else:
        module = {"llada": llama_of, "dream": qwen2_of}[kind](folder, torch.float32)

    for factor, passes in ((1.0, True), (1.5, False), (-1.0, False)):

        def run(input_ids: torch.Tensor, factor: float = factor, **extra: object) -> SimpleNamespace:
            logits = plain(input_ids[0])[0][None] if kind == "mdlm" else causal_logits(module, input_ids)
            return SimpleNamespace(logits=logits * factor)

        monkeypatch.setattr(CHECK, "own_module", lambda name, model, run=run: run)
        last = check(folder, "cpu", compare_remote=True)[-1]
        assert last.name == "same as its own code"
        assert last.passed == passes, last


# Written for transformers 4: no post_init, tie_weights without arguments, rotary frequencies called "default".
OWN_CODE = """
import torch
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import MaskedLMOutput
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from d5p4.models import Dream, LLaDA, MDLM


class Config(PretrainedConfig):
    def __init__(self, fault=None, **values):
        super().__init__(**values)
        self.fault, self.values = fault, values


class Model(PreTrainedModel):
    config_class = Config

    def __init__(self, config):
        super().__init__(config)
        kind = config.fault.split()[0]
        native = {"llada": LLaDA, "dream": Dream, "mdlm": MDLM}[kind](config.values)
        self.native = [native]  # in a list, so that its parameters are listed once, under the checkpoint's names
        if kind == "dream":
            self.model, self.lm_head = native.model, native.lm_head
            self.frequency, self.scale = ROPE_INIT_FUNCTIONS["default"](config, None)
        elif kind == "llada":
            self.model = torch.nn.ModuleDict({"transformer": native})
        else:
            self.backbone = native

    def tie_weights(self):
        pass

    def forward(self, input_ids, timesteps=None):
        native, fault = self.native[0], self.config.fault
        assert "broken" not in fault, "no flash attention"
        states = native.body(input_ids).states
        if fault == "dream":
            states = torch.cat((states[:, 1:], states[:, -1:]), dim=1)  # before the shift
            exponents = torch.arange(0, native.head_width, 2) / native.head_width
            assert self.scale == 1 and torch.allclose(self.frequency, native.rope_theta ** -exponents)
        logits = torch.nn.functional.linear(states, *native.unembedding)
        return MaskedLMOutput(logits=logits * (1.5 if "wrong" in fault else 1.0))
"""


@pytest.fixture
def own_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Writes a checkpoint of a kind with code of its own beside it."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr("sys.path", [*sys.path])

    def write(fault: str) -> Path:
        names = {"AutoConfig": "own_code.Config", "AutoModel": "own_code.Model"}
        folder = WRITERS[fault.split()[0]](tmp_path / fault.replace(" ", "_"), auto_map=names, fault=fault)
        (folder / "own_code.py").write_text(OWN_CODE)
        return folder

    return write


@pytest.mark.parametrize("kind", WRITERS)
def test_own_code_runs_under_the_installed_transformers(own_code, kind: str) -> None:
    line = check(own_code(kind), "cpu", compare_remote=True)[-1]
    assert line.passed and line.name == "same as its own code" and "differ by up to 0.00e+00" in line.detail, line


def test_own_code_that_differs_fails_or_is_missing(tmp_path: Path, own_code) -> None:
    assert failed(check(own_code("llada wrong"), "cpu", compare_remote=True)) == {"same as its own code"}
    message = refusal(check, own_code("llada broken"), "cpu", compare_remote=True)
    assert "no flash attention" in message and transformers.__version__ in message and "4.57" in message
    assert "no code to compare with" in refusal(check, write_llada(tmp_path), "cpu", compare_remote=True)
