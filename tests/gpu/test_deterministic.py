"""In bf16 on CUDA, `deterministic=True` gives a prompt the same bits whatever else is in the batch."""

import random
import warnings

import pytest

import d5p4
from d5p4.eval.countdown import WINDOW
from d5p4.ops import kernels
from d5p4_lab.puzzles import problems
from tests.checkpoints import TINY_TEXT, write_llada
from tests.gpu.conftest import WRITERS

pytestmark = pytest.mark.gpu
PROMPTS = 32


def texts(seed=0):
    """Prompts of 1 to 80 characters: with the answer they fall into two row lengths."""
    source = random.Random(seed)
    return ["".join(source.choices(TINY_TEXT, k=1 + (17 * i) % 80)) for i in range(PROMPTS)]


@pytest.fixture(scope="module", params=[*WRITERS, "countdown"])
def scene(request, tmp_path_factory):
    """A model and 32 prompts."""
    if request.param == "countdown":
        asked = [problem.prompt for problem in problems(PROMPTS, numbers=4, seed=1)]
        return d5p4.load("countdown", "cuda", "bfloat16"), asked, dict(gen_length=WINDOW[4])
    options = {"model_length": 128} if request.param == "mdlm" else {}
    folder = WRITERS[request.param](tmp_path_factory.mktemp(request.param), **options)
    return d5p4.load(folder, "cuda", "bfloat16"), texts(), dict(gen_length=12)


def decode(scene, which, **options):
    model, asked, own = scene
    options = dict(method="d5p4", k=4, seed=3, temperature=1.2, deterministic=True) | own | options
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", d5p4.DuplicateAnswers)
        return d5p4.generate(model, [asked[i] for i in which], keys=list(which), logprobs=True, **options)


def facts(result):
    """Bits, prompt by prompt."""
    tensors = (result.score, result.similarity, result.lineage, result.rows)
    lists = [[tensor.tolist() for tensor in values] for values in tensors]
    return list(zip(result.answers, result.logprobs, result.reveal_step, *lists, strict=True))


def shares(scene, **options):
    """The share of prompts with equal bits in batches of 32, of 3, and alone."""
    order = random.Random(5).sample(range(PROMPTS), PROMPTS)
    together = facts(decode(scene, range(PROMPTS), **options))
    batches = {
        "shuffled": [order],
        "three": [order[i : i + 3] for i in range(0, 12, 3)],
        "alone": [[i] for i in order[:4]],
    }
    equal = {}
    for name, parts in batches.items():
        pairs = [pair for part in parts for pair in zip(part, facts(decode(scene, part, **options)), strict=True)]
        equal[name] = sum(together[i] == fact for i, fact in pairs) / len(pairs)
    return equal


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"method": "tree"},
        {"method": "tree", "temperature": 0.0, "spare": 4, "diversity": 1.0, "reveal": "threshold", "tau": 0.9},
        {"guidance": 1.5},
        {"top_p": 0.9, "temperature": 1.0},
        {"method": "d5p4x", "features": "mean", "quality": "self-certainty"},
        {"method": "k-dpp", "steps": 6},
        {"method": "e-smc", "interval": 2, "steps": 6},
        {"method": "best-of-n", "rank": "logprob", "steps": 6},
        {"distinct": True, "quality": "logprob", "max_tokens_per_forward": 1000, "steps": 6},
    ],
    ids=str,
)
def test_every_prompt_has_the_same_bits_in_any_batch(scene, options):
    assert shares(scene, **options) == {"shuffled": 1.0, "three": 1.0, "alone": 1.0}


def test_a_gpu_needs_it(tmp_path):
    """Without it, some prompt's numbers move with the batch: the tests above can fail."""
    model = d5p4.load(write_llada(tmp_path, d_model=256, mlp_hidden_size=512), "cuda", "bfloat16")
    equal = shares((model, texts(), dict(gen_length=12)), deterministic=False)
    assert min(equal.values()) < 1


def test_without_kernels_it_is_refused(scene):
    with kernels.off(), pytest.raises(d5p4.D5P4Error, match="needs the Triton kernels"):
        decode(scene, [0])
