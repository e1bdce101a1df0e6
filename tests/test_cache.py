"""The exact cache changes the cost and never the answers; the approximate ones are a function of the tokens."""

import itertools
import sys
from dataclasses import replace

import pytest
import torch

import d5p4
from d5p4.decode.cache import ApproximateCache, ExactCache
from d5p4.decode.pool import Call, Pool
from d5p4.decode.rows import WholeRows
from d5p4.options import Settings
from d5p4.prompts import Request, layout
from d5p4.rng import hash_tokens
from d5p4.types import Context, Hidden, Store
from tests import checkpoints
from tests.fake import FakeModel, Letters, block_model, fitting
from tests.layouts import COSTS, facts

front = sys.modules["d5p4.generate"]
PROMPTS = ["ab", "head", "", "abcdefghi", "ab", "cde"]
METHODS = list(d5p4.METHODS)
REVEALS = {"threshold": {"tau": 0.3}, "factor": {"factor": 2.0}, "entropy-bound": {"entropy_bound": 1.5}}
full = pytest.mark.full
pytestmark = pytest.mark.filterwarnings("ignore::d5p4.DuplicateAnswers")


def run(model, prompts, method="d5p4", **options):
    options = dict(k=2, w=2, gen_length=9, seed=3, logprobs=True) | options
    if method.endswith("smc") and options.get("reveal", "schedule") == "schedule":
        options["interval"] = 2
    return d5p4.generate(model, prompts, **fitting(dict(method=method) | options))


@pytest.mark.parametrize(
    "shifted, method, options",
    [
        *[
            (False, m, {}) if m in ("d5p4", "best-of-n", "e-smc") else pytest.param(False, m, {}, marks=full)
            for m in METHODS
        ],
        (True, "tree", {"reveal": "threshold"}),
        (True, "d5p4", {"guidance": 2.0, "guidance_window": (3, 7), "stop": True}),
        (False, "tree", {"spare": 2, "k": 4, "gen_length": 14, "temperature": 0.0}),
        *[
            pytest.param(shifted, method, {"reveal": reveal, "order": order, "guidance": guidance}, marks=full)
            for (shifted, method, reveal), (order, guidance) in zip(
                itertools.product((False, True), METHODS, ("schedule", *REVEALS)),
                itertools.cycle(
                    [("confidence", 1.0), ("margin", 1.5), ("margin", 1.0), ("ancestral", 1.5), ("left", 1.0)]
                ),
                strict=False,
            )
            if order != "ancestral" or reveal == "schedule"
        ],
    ],
)
def test_the_same_answers_with_and_without_the_exact_cache(shifted, method, options):
    model = block_model(shifted)
    options = REVEALS.get(options.get("reveal"), {}) | options
    cached, plain = run(model, PROMPTS, method, **options), run(model, PROMPTS, method, cache="none", **options)
    assert cached.settings.cache == "exact" and plain.settings.cache == "none"
    assert facts(cached, *COSTS) == facts(plain, *COSTS)
    assert int(cached.tokens_run.sum()) < int(plain.tokens_run.sum())
    check_layouts(model, method, cached, options)


def check_layouts(model, method, together, options):
    """Answers and costs do not depend on the batch or on the size of a forward."""
    for place in (0, 3):
        assert facts(run(model, PROMPTS[place : place + 1], method, **options))[0] == facts(together)[place]
    assert facts(run(model, PROMPTS, method, max_tokens_per_forward=8, **options)) == facts(together)


class Remembering:
    """A model that runs rows as a cache does, but stores nothing: it computes the context anew in each forward."""

    def __init__(self, model, block: int, dual: bool, prompts: dict[int, int]) -> None:
        self._model, self._block, self._dual, self._prompts = model, block, dual, prompts
        self.cache_shape = None

    def __getattr__(self, name):
        return getattr(self._model, name)

    def body(self, tokens, attention_mask=None):
        real = torch.ones_like(tokens, dtype=torch.bool) if attention_mask is None else attention_mask
        rows = [self._row(row[real[r]]) for r, row in enumerate(tokens)]
        pad = torch.nn.functional.pad
        return Hidden(
            *(
                torch.stack([pad(x, (0, 0, tokens.shape[1] - len(x), 0)) for x in part])
                for part in zip(*rows, strict=True)
            )
        )

    def _row(self, row):
        """Return the states and features of one row: those of its block are computed from the keys and values of other
        positions in a forward in which the block is all masks."""
        prompt = self._prompts[len(row)]
        first = prompt + int((row[prompt:] == self.mask_id).nonzero()[0]) // self._block * self._block
        stop = min(first + self._block, len(row)) if self._dual else len(row)
        masked = row.clone()
        masked[first : min(first + self._block, len(row))] = self.mask_id
        whole = self._model.body(masked[None], None, Context(keep=True))
        kv = torch.stack([torch.stack(pair) for pair in whole.kept])
        length, hole = torch.tensor([len(row) if self._dual else first]), torch.tensor([[first, stop]])
        store = Store(kv, torch.zeros(1, dtype=torch.int64), length, hole if self._dual else None)
        context = Context(torch.tensor([first]), (store,), whole.states[:, first])
        part = self._model.body(row[None, first:stop], None, context)
        rows = whole.states[0].clone(), whole.features[0].clone()
        for values, new in zip(rows, part[:2], strict=True):
            values[first:stop] = new[0]
        return rows


@pytest.mark.parametrize(
    "kind, cache",
    [
        ("dream", "prefix"),
        ("llada", "dual"),
        *[pytest.param(kind, "prefix", marks=full) for kind in ("llada", "mdlm")],
        *[pytest.param(kind, "dual", marks=full) for kind in ("dream", "mdlm")],
    ],
)
def test_approximate_caches_do_what_their_definition_says(tmp_path, kind, cache):
    """Every state is that of a plain computation from the definition, and a function of the tokens alone."""
    model = d5p4.load(checkpoints.WRITERS[kind](tmp_path), dtype="float64")
    options = dict(block_length=4, gen_length=10, order="margin")
    cached = run(model, PROMPTS, cache=cache, **options)
    prompts = {len(model.tokenizer.encode(text)) + 10: len(model.tokenizer.encode(text)) for text in PROMPTS}
    plain = run(Remembering(model, 4, cache == "dual", prompts), PROMPTS, **options)
    assert facts(cached, *COSTS) == facts(plain, *COSTS)
    assert cached.texts != run(model, PROMPTS, **options).texts, "an approximation"
    for method in ("d5p4", "tree"):
        own = {"cache": cache, **options} | ({"reveal": "threshold", "tau": 0.05} if method == "tree" else {})
        check_layouts(model, method, run(model, PROMPTS, method, **own), own)


def test_equal_prompts_and_children_of_one_row_share_their_keys():
    """The prompt is run once for all prompts that are equal, and a finished block once for all rows that share it."""
    options = dict(gen_length=8, temperature=0.0)
    result = run(block_model(), ["abcdefgh", "abcdefgh"], "independent", k=1, **options)
    assert result.rows.tolist() == [1 + 1 + 8] * 2, "the prompt, the first block of the answer, and eight steps"
    assert result.tokens_run.tolist() == [8 + 4 + 8 * 4] * 2, "two blocks of the prompt are one row"


def test_a_row_that_wakes_up_finds_its_context_again():
    """A tree goes back to a sleeping row of an earlier block, whose context is gone. It is computed again."""

    class Vague(Letters):
        """Many rows have the same text, so that rows of the tree are merged and others wake up."""

        def decode(self, ids):
            return "".join("ab"[i > 3] for i in ids)

    for seed in range(4):
        model = block_model(seed=seed, block=2)
        model.tokenizer = Vague()
        options = dict(k=6, gen_length=6, seed=seed, temperature=1.0)
        cached = run(model, ["ab"], "tree", **options)
        assert facts(cached, *COSTS) == facts(run(model, ["ab"], "tree", cache="none", **options), *COSTS)


def pool_of(call, prompts, tokens):
    """The pool of rows with these tokens [P, N, L]."""
    total = torch.arange(len(tokens))
    pool = Pool.start(call, prompts, total, total, total)
    return replace(pool, tokens=tokens, row_hash=hash_tokens(tokens, pool.positions[:, None]))


@pytest.mark.parametrize(
    "kind, cache", [("block", "exact"), ("shifted", "exact"), ("dream", "dual"), ("llada", "prefix")]
)
def test_prompts_join_a_cache_at_any_step(tmp_path, kind, cache):
    """Prompts leave and join, also longer ones, and every state is that of a cache that begins with these prompts."""
    blocks = cache == "exact"
    model = (
        block_model(kind == "shifted") if blocks else d5p4.load(checkpoints.WRITERS[kind](tmp_path), dtype="float64")
    )
    settings = Settings.make(model, method="independent", k=3, cache=cache, block_length=4, gen_length=12)
    call = Call(model, model.head, settings, torch.tensor([10]))
    ids = [[1] * 5, [2, 3], [1, 2, 3, 4, 5, 6, 7, 8, 9], [3] * 13, [2, 3], [4, 5, 6, 7, 8, 9, 1, 2]]
    stays = [(0, 1), (0, 1, 2), (1, 2, 3), (3, 2), (3, 2, 4, 5)]  # the prompts of each step, which begin a block
    generator = torch.Generator().manual_seed(0)
    answers = torch.randint(0, 9, (len(ids), 3, 12), generator=generator)
    answers[:, 1, :4] = answers[:, 0, :4]  # two rows share their first block
    done, last, joined = dict.fromkeys(range(len(ids)), 0), (), None
    for now in stays:
        prompts = layout([Request(ids[p], 12) for p in now], model.mask_id, model.pad_id, torch.device("cpu"))
        if joined is None:
            joined = (ExactCache if blocks else ApproximateCache)(model, prompts, settings, 3, model.body)
        else:
            stayed = [last.index(p) for p in now if p in last]
            joined = joined.part(torch.tensor(stayed), prompts.take(torch.arange(len(stayed))))
            joined.join(prompts)
        before = [len(ids[p]) % 4 if blocks else 0 for p in now]
        start = torch.tensor([max(0, 4 * done[p] - b) for p, b in zip(now, before, strict=True)])
        stop = torch.tensor([4 * done[p] + 4 - b for p, b in zip(now, before, strict=True)])
        place = torch.arange(12)
        tokens = answers[list(now)].masked_fill((place > start[:, None])[:, None], model.mask_id)
        pool = pool_of(call, prompts, tokens)
        running = torch.ones(len(now), 3, dtype=torch.bool)
        chosen = running.nonzero()
        alone = type(joined)(model, prompts, settings, 3, model.body)
        hidden, others = (x.run(pool, start, chosen, running)[0].states for x in (joined, alone))
        seen = (place < stop[:, None]) & (place < 12)
        assert (hidden - others)[seen[chosen[:, 0]]].abs().max() < 1e-10
        if blocks:
            whole = WholeRows(model, prompts, 10_000, model.body).run(pool, start, chosen, running)[0].states
            assert (hidden - whole)[seen[chosen[:, 0]]].abs().max() < 1e-10
        done, last = {p: n + (p in now) for p, n in done.items()}, now


HOLE = [[0, 11, 2]]
REFUSED = [  # model, prompts, options, the option that is named, reason
    ("block", "ab", {"block_length": 8}, "block_length", "this model attends in blocks of 4 tokens"),
    ("block", "ab", {"block_length": "8"}, "block_length", "must be a whole number"),
    ("block", "ab", {"cache": "dual"}, "cache", "the cache of a block-causal model is exact"),
    ("block", "ab", {"cache": "exact", "deterministic": True}, "cache", "deterministic=True runs whole rows"),
    ("block", "ab", {"cache": "duel"}, "cache", "is not known; did you mean dual"),
    ("block", HOLE, {}, None, "sdar is block-causal and can only continue a prompt; remove the mask tokens"),
    ("llada", [[1, 51, 2]], {"cache": "dual", "block_length": 4}, None, "cache='dual' can only continue a prompt"),
    ("llada", "ab", {"cache": "dual"}, "cache", "needs block_length"),
    ("llada", "ab", {"cache": "exact"}, "cache", "needs a block-causal"),
    ("fake", "ab", {"cache": "prefix", "block_length": 4}, "cache", "cannot continue from stored keys and values"),
]


def test_what_does_not_fit_a_model_or_its_cache_is_refused(tmp_path):
    models = {"block": block_model(), "llada": d5p4.load(checkpoints.write_llada(tmp_path)), "fake": FakeModel()}
    for name, prompts, options, option, reason in REFUSED:
        with pytest.raises(d5p4.D5P4Error, match=reason) as error:
            run(models[name], prompts, "tree", **options)
        assert option in (None, error.value.option), options
    assert run(models["block"], "ab", "tree", deterministic=True).settings.cache == "none"
