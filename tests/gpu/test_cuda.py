"""What the CPU promises, on CUDA. Run by `make test-gpu` on a machine that has one."""

import warnings

import pytest
import torch

import d5p4
from d5p4.integrations import rl
from tests.checkpoints import write_dream, write_fast_dllm, write_llada, write_sdar
from tests.fake import fitting

pytestmark = pytest.mark.gpu

PROMPTS = ["the cat", "a", "two little words here"]


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
