from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import d5p4
from d5p4.rng import mix
from d5p4_lab.methods.odd import Undrawn, gradient
from tests.fake import FakeModel

MASK, END, VOCABULARY = 10, 9, 11
PROMPTS = ["abc", "ahead", "c"]
pytestmark = pytest.mark.filterwarnings("ignore::d5p4.DuplicateAnswers")


def rows(prompts: int = 2, count: int = 4, positions: int = 5, seed: int = 0, done: float = 0.0) -> Undrawn:
    """Random rows with two revealed tokens each. The last position of every odd row is padding."""
    g = torch.Generator().manual_seed(seed)
    shape = prompts, count, positions
    logits = 2 * torch.randn(*shape, VOCABULARY, generator=g, dtype=torch.float64)
    logits[..., MASK] = -torch.inf
    opened = torch.ones(shape, dtype=torch.bool)
    opened[:, 1::2, -1] = False
    tokens = torch.full((prompts, count, positions + 2), MASK)
    tokens[..., :2] = torch.randint(0, MASK, (prompts, count, 2), generator=g)
    group = torch.rand(prompts, count, generator=g).argsort(-1)
    return Undrawn(logits, opened, tokens, group, mix(seed, group), done, MASK, torch.tensor([END]))


def features(logits: Tensor, opened: Tensor, tokens: Tensor) -> Tensor:
    shown = F.one_hot(tokens[tokens != MASK], VOCABULARY).to(logits.dtype)
    return F.normalize(torch.cat([logits[opened].softmax(-1), shown]).max(0).values, dim=0)


def by_autograd(seen: Undrawn) -> Tensor:
    """The formulas of the paper, row after row, differentiated by torch."""
    result = torch.zeros_like(seen.logits)
    for prompt in range(len(seen.logits)):
        basis: list[Tensor] = []
        for row in seen.group[prompt].argsort().tolist():
            logits = seen.logits[prompt, row].clone().requires_grad_()
            v = features(logits, seen.open[prompt, row], seen.tokens[prompt, row])
            u = v.detach()
            if basis:
                u = u - torch.stack(basis).T @ torch.linalg.lstsq(torch.stack(basis).T, u[:, None]).solution[:, 0]
                sure = logits[seen.open[prompt, row]].softmax(-1).max(-1).values.mean()
                grad = torch.autograd.grad(-(v @ F.normalize(u, dim=0)) * sure, logits)[0].nan_to_num()
                grad[:, END] = 0
                result[prompt, row] = grad / grad.norm(dim=-1).max()
            basis.append(v.detach())
    return result


def test_the_gradient_is_that_of_autograd() -> None:
    for seed in range(5):
        seen = rows(seed=seed)
        torch.testing.assert_close(gradient(seen), by_autograd(seen), rtol=0, atol=1e-10)


def run(method: str, **options: object) -> d5p4.Result:
    defaults = dict(k=4, gen_length=8, seed=3, logprobs=True, eos="never")
    return d5p4.generate(FakeModel(scale=2.5), PROMPTS, method=method, **defaults | options)  # type: ignore[arg-type]


@pytest.mark.parametrize("options", [{}, {"reveal": "threshold", "tau": 0.6, "block_length": 3}, {"distinct": True}])
def test_without_a_step_the_answers_are_independent(options: dict[str, object]) -> None:
    odd, independent = run("odd", alpha=0, **options), run("independent", **options)
    assert (odd.answers, odd.reveal_step) == (independent.answers, independent.reveal_step)
    torch.testing.assert_close(odd.score, independent.score)
    for ours, theirs in zip(odd.logprobs or [], independent.logprobs or [], strict=True):
        torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs))


def test_log_probabilities_are_those_of_the_model_without_the_shift() -> None:
    def first_tokens(**options: object) -> dict[int, float]:
        """The log-probability of each first token that is drawn."""
        result = run(gen_length=1, **options)  # type: ignore[arg-type]
        assert result.logprobs is not None
        return {a[0]: v[0] for a, v in zip(result.answers[0], result.logprobs[0], strict=True)}

    drawn = first_tokens(method="independent", k=200, temperature=3)
    shifted = first_tokens(method="odd", temperature=0)
    assert len(shifted) > 1 and all(drawn[token] == pytest.approx(value) for token, value in shifted.items())
