"""spare: more beams than answers; the k best different answers are returned."""

import itertools

import pytest
import torch

from d5p4 import METHODS, generate
from tests.fake import FakeModel

COMMON = dict(gen_length=6, w=3, seed=3)
pytestmark = pytest.mark.filterwarnings("ignore::d5p4.DuplicateAnswers")


def different(texts, k):
    """Places of the k best: each text once before any comes again."""
    first = [i for i, text in enumerate(texts) if text not in texts[:i]]
    again = [i for i in range(len(texts)) if i not in first]
    return [*first, *again][:k]


QUICK = [("d5p4", False), ("d5p4", True), ("best-of-n", False), ("e-smc", False)]


EVERY = itertools.product([name for name in METHODS if not METHODS[name].tree], (False, True))  # a tree ends at k texts


@pytest.mark.parametrize(
    "method, carry_over", [pytest.param(*case, marks=[pytest.mark.full] * (case not in QUICK)) for case in EVERY]
)
def test_the_k_best_different_answers_of_a_wider_decode(method, carry_over):
    """Nothing else changes: a decode with k + spare beams that returns k answers with all their numbers."""
    model, prompts = FakeModel(carry_over=carry_over, scale=4.0), ["ab", "cdef"]
    wide = generate(model, prompts, k=5, method=method, logprobs=True, **COMMON)
    result = generate(model, prompts, k=3, spare=2, method=method, logprobs=True, **COMMON)
    for p in range(len(prompts)):
        places = different(wide.texts[p], 3)
        assert result.texts[p] == [wide.texts[p][i] for i in places]
        assert result.answers[p] == [wide.answers[p][i] for i in places]
        assert result.logprobs[p] == [wide.logprobs[p][i] for i in places]
        assert result.score[p].tolist() == wide.score[p][places].tolist()
        assert torch.equal(result.lineage[p], wide.lineage[p][places])
        assert torch.equal(result.similarity[p], wide.similarity[p][places][:, places])
    assert result.rows.tolist() == wide.rows.tolist() and result.rows_nominal.tolist() == wide.rows_nominal.tolist()
    assert result.sequences.shape[1] == 3
