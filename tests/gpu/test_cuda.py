"""What the CPU promises, on CUDA. Run by `make test-gpu` on a machine that has one."""

import warnings

import pytest
import torch

import d5p4
from d5p4.integrations import rl
from d5p4.ops.vocab import logits_of
from tests.checkpoints import write_dream, write_fast_dllm, write_llada, write_mdlm, write_sdar
from tests.fake import fitting

pytestmark = pytest.mark.gpu

WRITERS = {"llada": write_llada, "dream": write_dream, "mdlm": write_mdlm}
PROMPTS = ["the cat", "a", "two little words here"]


@pytest.fixture(scope="module", params=WRITERS)
def folder(request, tmp_path_factory):
    return WRITERS[request.param](tmp_path_factory.mktemp(request.param))


def run(model, method="d5p4", **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", d5p4.DuplicateAnswers)
        options = dict(k=3, w=3, gen_length=8, seed=2, temperature=1.2, method=method) | options
        return d5p4.generate(model, PROMPTS, **fitting(options))


@pytest.mark.parametrize("guidance", [1.0, 2.0])
@pytest.mark.parametrize("method", list(d5p4.METHODS))
def test_float64_gives_the_tokens_of_the_cpu(folder, method, guidance):
    here, there = (d5p4.load(folder, device, "float64") for device in ("cuda", "cpu"))
    for options in ({}, {"distinct": True, "steps": 5}):
        on_gpu, on_cpu = (run(model, method, guidance=guidance, **options) for model in (here, there))
        assert on_gpu.answers == on_cpu.answers
        torch.testing.assert_close(on_gpu.score.cpu(), on_cpu.score, atol=1e-9, rtol=0, equal_nan=True)
        assert on_gpu.rows.tolist() == on_cpu.rows.tolist()


@pytest.mark.parametrize("options", [rl.ON_POLICY, rl.WITHOUT_REPLACEMENT], ids=["independent", "tree"])
def test_rollouts_follow_the_weights_and_equal_those_of_the_cpu(tmp_path, options):
    """After a step in place, recorded forwards see the new weights. In float64, tokens are those of the CPU."""
    here, there = (
        d5p4.load(write_llada(tmp_path), device, "float64").requires_grad_(True) for device in ("cuda", "cpu")
    )
    for number in range(3):
        both = [rl.rollout(model, PROMPTS, 4, seed=number, gen_length=8, **options) for model in (here, there)]
        assert both[0].texts == both[1].texts and both[0].policy == both[1].policy
        torch.testing.assert_close(both[0].weights.cpu(), both[1].weights, atol=1e-7, rtol=1e-7)
        for model, rollouts in zip((here, there), both, strict=True):
            logp, _ = rl.log_probabilities(model, rollouts)
            torch.testing.assert_close(logp.detach(), rollouts.logprobs, atol=1e-8, rtol=0)
            optimiser = torch.optim.SGD(model.parameters(), 1e-4)
            (-logp.sum()).backward()
            optimiser.step()
            optimiser.zero_grad()


@pytest.mark.parametrize("write", [write_sdar, write_fast_dllm, write_llada, write_dream])
@pytest.mark.parametrize("method", ["tree", "d5p4"])
def test_caches_give_the_tokens_of_the_cpu(tmp_path, write, method):
    """In float64 without kernels; in float32, recorded forwards give the tokens of forwards that are not recorded."""
    folder = write(tmp_path)
    here, there, single, plain = (
        d5p4.load(folder, *where) for where in (("cuda", "float64"), ("cpu", "float64"), *[("cuda", "float32")] * 2)
    )
    for guidance in (1.0, 1.5):
        options = dict(method=method, gen_length=11, guidance=guidance)
        options |= {} if here.block else {"cache": "dual", "block_length": 4}
        on_gpu, on_cpu = run(here, **options), run(there, **options)
        assert on_gpu.answers == on_cpu.answers
        assert on_gpu.tokens_run.tolist() == on_cpu.tokens_run.tolist()
        torch.testing.assert_close(on_gpu.score.cpu(), on_cpu.score, atol=1e-9, rtol=0, equal_nan=True)
        plain.__class__ = type("Unrecorded", (type(plain),), {"recordable": False})
        assert run(single, **options).answers == run(plain, **options).answers


def test_a_cache_that_does_not_fit_is_refused_with_options(tmp_path, monkeypatch):
    model = d5p4.load(write_sdar(tmp_path))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (0, 1 << 40))
    monkeypatch.setattr(torch.cuda, "memory_reserved", torch.cuda.memory_allocated)
    with pytest.raises(d5p4.D5P4Error, match="GiB are free on cuda.*; use a smaller k, w or gen_length") as error:
        d5p4.generate(model, "the cat", k=2, gen_length=8, seed=0)
    assert error.value.option == "cache"


def test_default_is_bfloat16_on_cuda(folder):
    model = d5p4.load(folder)
    assert model.device.type == "cuda" and model.dtype == torch.bfloat16
    result = run(model, guidance=1.5, history=True, logprobs=True)
    assert torch.isfinite(result.score).all() and all(len(answers) == 3 for answers in result.answers)


@pytest.mark.parametrize("guided", [False, True])
def test_half_precision_head_adds_no_rounding_of_ours(guided):
    """Logits of bf16 weights against float64 from the same numbers; a plain bf16 product is off by 0.06 here."""
    g = torch.Generator(device="cuda").manual_seed(0)
    weight = torch.randn(5000, 1024, device="cuda", generator=g).mul(5 / 32).to(torch.bfloat16)
    states = torch.randn(64, 1024, device="cuda", generator=g)
    states = states if guided else states.to(torch.bfloat16)
    logits = logits_of(states, weight, None, torch.zeros(5000, dtype=torch.bool, device="cuda"))
    torch.testing.assert_close(logits.double(), states.double() @ weight.double().T, atol=1e-3, rtol=0)
