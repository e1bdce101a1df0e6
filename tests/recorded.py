"""Decodes whose rows were recorded, and how to run them again.

`tests/recorded.json.xz` holds, for every case of `CASES`, the final rows of each prompt as the loop left them (before
answers are sorted or cut), the sorted answers, the costs and the lineage. Cases of `add_default` also hold the scores.
The models are float64, so that rounding changes no token. tests/test_recorded.py runs the cases again and compares.

    python -m tests.recorded

records the cases that the file does not have yet. It never records a case again: tests/test_recorded.py tells what
changed.
"""

from __future__ import annotations

import json
import lzma
import os
import tempfile
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import torch

import d5p4
from tests import checkpoints
from tests.fake import FakeModel, block_model

FILE = Path(__file__).with_name("recorded.json.xz")
FIXED = {"reveal": "schedule", "stop": False}
"""The reveal rule and early stop of the cases of `add`, which were recorded before there were others."""

MODELS: dict[str, dict[str, Any]] = {
    "order": dict(scale=0.7),  # reveals by order rules, as LLaDA does
    "carry": dict(scale=0.7, carry_over=True),  # revealed tokens have probability 1 and the order is ancestral: MDLM
    "chat": dict(scale=0.7, template=True),
    "ties": dict(vocabulary=5, ordered=False, seed=2, scale=1.0),  # permuted rows tie exactly
    "peaked": dict(scale=4.0),  # many children are equal
}
MASK = 11  # the mask id of the fake models with 12 tokens
PROMPTS = ["abc", "ahead", "c"]
PUZZLES = ["86,28,13,31:96", "3,7,25:82"]
SOLVED = ("d5p4", "d5p4x", "d5p4-p", "d5p3")  # methods with a solver

SCORERS = {
    "vowels": lambda texts: [sum(letter in "aei" for letter in text) for text in texts],
    "shared letters": lambda text, reference: len(set(text) & set(reference)),
}

CASES: dict[str, dict[str, Any]] = {}
QUICK: set[str] = set()  # names of the cases that run without `-m full`


def add(name: str, model: str = "order", prompts: Any = PROMPTS, *, quick: bool = False, **options: Any) -> None:
    """Add a case. An option that is None stays at the library's default."""
    base = dict(method="d5p4", k=3, w=3, gen_length=8, steps=6, temperature=2.5, seed=11)
    options = {option: value for option, value in (base | options).items() if value is not None}
    if options["method"] in SOLVED:
        options.setdefault("solver", "local-search")
    assert name not in CASES, f"two cases are called {name!r}"
    CASES[name] = {"model": model, "prompts": prompts, "options": options}
    if quick:
        QUICK.add(name)


def add_both(name: str, prompts: Any = PROMPTS, *, quick: str = "", **options: Any) -> None:
    """Add a case for each of the two kinds of models. `quick` names the model whose case runs without `-m full`."""
    for model in ("order", "carry"):
        add(f"{name}, {model}", model, prompts, quick=quick == model, **options)


# The names are written out: methods and orders that come later have no rows from before.
for method in ("d5p4", "d5p4x", "d5p4-p", "d5p3", "greedy-beam", "diverse-beam", "cat", "random", "k-dpp"):
    add_both(f"method {method}", quick="order", method=method)
add_both("method partition-sample", quick="carry", method="partition-sample")
add_both("method e-smc", quick="carry", method="e-smc", interval=2)
add_both("method best-of-n by entropy", quick="order", method="best-of-n", rank="entropy")
add_both("method best-of-n by logprob", quick="carry", method="best-of-n", rank="logprob")
add_both("method independent", quick="carry", method="independent")

for order in ("confidence", "margin", "entropy", "random", "tempered", "ancestral"):
    add_both(f"order {order}, d5p4", quick="carry" if order == "confidence" else "order", order=order, seed=12)
    for method in ("independent", "best-of-n"):
        add(f"order {order}, {method}", order=order, method=method, seed=12)
add("order_temperature", order="tempered", order_temperature=1.0)

# Blocks and steps.
add_both("blocks", quick="order", block_length=3, steps=5, gen_length=10)
add("blocks, one step per block", block_length=4, steps=3, gen_length=10)
add("blocks, independent", "carry", block_length=4, steps=7, gen_length=10, method="independent")
add("blocks, e-smc", block_length=4, steps=None, gen_length=9, method="e-smc", interval=2)
add_both("one step per position", quick="order", steps=None)
add("more steps than positions", "carry", quick=True, steps=20)
add("more steps than positions are not taken", steps=20)
add("more steps than positions, best-of-n", "carry", steps=20, method="best-of-n")
add_both("few steps", quick="order", steps=3)
add("one step", steps=1)

# Guidance and selection windows.
add_both("guidance", guidance=3.0)
add("guidance, best-of-n", "carry", guidance=3.0, method="best-of-n")
add_both("guidance window", quick="order", guidance=4.0, guidance_window=[1, 4])
add("d5p4-p, guidance 3", "carry", quick=True, method="d5p4-p", guidance=3.0, steps=7)
add_both("select window", quick="order", select_window=[1, 4])
add_both("select window from the third step, guidance", select_window=[2, 9], guidance=2.0)
add_both("select window, e-smc", method="e-smc", interval=1, select_window=[2, 4])
add("empty select window", select_window=[0, 0])

# Children that differ, and spare beams.
add_both("distinct", quick="order", distinct=True, temperature=0.8)
add("distinct, diverse-beam", "carry", distinct=True, method="diverse-beam")
add("distinct, d5p3", distinct=True, method="d5p3")
add("distinct, peaked", "peaked", quick=True, distinct=True, temperature=0.7)
add_both("spare", quick="carry", spare=2, temperature=0.8)
add("spare, best-of-n", "carry", spare=1, method="best-of-n")
add("spare and distinct, peaked", "peaked", spare=3, distinct=True, temperature=0.7)

# How a token is drawn.
for eos in ("last", "free", "never"):
    add(f"eos {eos}", quick=True, eos=eos, order="random", temperature=4.0, gen_length=10, steps=3)
add("eos never, carry", "carry", eos="never", temperature=4.0)
add("eos last in blocks", eos="last", order="random", block_length=4, steps=3, temperature=4.0, gen_length=10)
add("top_k", quick=True, top_k=2)
add("top_p", "carry", quick=True, top_p=0.6)
add("top_k and top_p", "carry", top_k=5, top_p=0.8)
add("temperature 0, order random", quick=True, temperature=0.0, order="random", steps=None)
add("temperature 0, order ancestral", "carry", temperature=0.0, steps=8)
add("temperature 0, one answer", temperature=0.0, k=1, w=1, method="independent")
add("temperature 2", quick=True, temperature=2.0)
add("temperature 1", "carry", temperature=1.0)

# Prompts. Rows of one call have different lengths and are left-padded.
HOLES = [[0, MASK, 1, MASK], [MASK, MASK, MASK, 2, 3], [4, MASK, 5, MASK, 6], [MASK]]
PADDED = {
    "input_ids": [[0, 0, 0, 1, 2], [3, 4, 5, 6, 7], [0, 0, 8, 0, 0]],
    "attention_mask": [[0, 0, 0, 1, 1], [1, 1, 1, 1, 1], [0, 0, 1, 1, 1]],
}
add_both("holes", HOLES, quick="order", gen_length=None, steps=None)
add_both("holes and a length", HOLES, quick="carry", gen_length=5)
add("holes, best-of-n", "order", HOLES[:2], gen_length=None, steps=None, method="best-of-n")
add("holes in blocks", "order", HOLES, gen_length=6, block_length=3, steps=5)
add("holes, guidance", "carry", HOLES[:3], gen_length=None, steps=None, guidance=2.0)
add_both("left padding", PADDED, quick="order")
add_both("prompts of many lengths", ["a", "abcdefgh", "cab", "hi", "deadbeefcafe"], quick="carry", guidance=1.5)
add("keys", "order", ["abc", "abc"], keys=["x", 7])
add_both("sets", None, quick="carry", sets=3)
add("chat template", "chat", quick=True)
add("chat off", "chat", quick=True, chat=False)
add("the longest row", "carry", ["abc"], gen_length=None, steps=12)  # a default length is shortened to fit the model

# How candidates are rated and compared.
for features in ("mean", "masked", "non-masked"):
    add_both(f"features {features}", quick="order" if features == "masked" else "", features=features, beta=2.0)
for quality in ("entropy", "self-certainty", "logprob"):
    masked = dict(quality=quality, positions="masked", beta=0.5)
    add_both(f"quality {quality}, masked", quick="carry" if quality == "logprob" else "", **masked)
for quality in ("self-certainty", "logprob"):
    add(f"quality {quality}, greedy-beam", method="greedy-beam", quality=quality)
for normalise in ("absolute", "zscore"):
    add_both(f"normalise {normalise}", quick="order" if normalise == "zscore" else "", normalise=normalise)
add_both("rbf similarity", quick="carry", similarity="rbf", gamma=0.5)
add("rbf similarity of the head's input", similarity="rbf", gamma=2.0, feature_layer="head")
add("features of the head's input", "carry", feature_layer="head", method="diverse-beam")

# Parameters of methods. In the pools of 8 x 4 rows, local search does not always find the best set.
for solver in ("local-search", "one-start", "k-starts", "n-starts", "exact"):
    add(f"solver {solver}", prompts=PROMPTS[:1], k=8, w=4, solver=solver)
add("solver exhaustive", method="d5p3", solver="exhaustive", w=2)
add("beta 0", beta=0.0)
add("d5p4x, beta 0.3", "carry", method="d5p4x", beta=0.3)
add("alpha, largest similarity", method="diverse-beam", alpha=0.5, form="max")
add("score_temperature", method="cat", score_temperature=0.2)
add("k-dpp, multiplicative", method="k-dpp", kernel="multiplicative", beta=2.0)
add("partition-sample, chain", method="partition-sample", limit=0, moves=9, set_temperature=2.0, beta=1.0)
add("e-smc, textbook, systematic", method="e-smc", interval=1, weights="textbook", resampling="systematic")
add("e-smc, ess", "carry", method="e-smc", interval=1, lam=20.0, ess=0.9)
add("best-of-n without repeats", "peaked", method="best-of-n", repeats=False, temperature=0.7)
add("scorer", method="best-of-n", scorer="vowels")
add("scorer and references", method="best-of-n", scorer="shared letters", references=["fad", "big", "c"])

# Pools and layouts.
add("one answer", "order", k=1, w=4)
add("one child per beam", "carry", w=1)
add("a larger pool", "order", ["abc"], k=5, w=6, steps=4)
add("ties", "ties", [[0], [1, 2], [0, 1, 0, 2]], order="random", eos="free", gen_length=5, steps=None, w=4)
add("ties, diverse-beam", "ties", [[0], [1, 2]], order="random", eos="free", gen_length=5, method="diverse-beam")
add("peaked", "peaked", order="tempered", temperature=0.7)
add("small forwards", "carry", quick=True, max_tokens_per_forward=20, guidance=2.0)
add("without savings", "carry", savings=False)
add("deterministic", deterministic=True, max_tokens_per_forward=128)
add("a dropped prompt", quick=True, drop={"2": [1]})
add("prompts dropped one by one", "order", HOLES, gen_length=6, steps=5, drop={"0": [3], "1": [0, 2]})

# The model in the box.
TINY = dict(k=2, w=2, gen_length=20, steps=5, temperature=1.0, prompts=PUZZLES)
add("countdown, d5p4", "countdown", quick=True, **TINY)
add("countdown, blocks, guidance", "countdown", **TINY | dict(block_length=10, guidance=1.5))
add("countdown, diverse-beam, distinct", "countdown", **TINY | dict(method="diverse-beam", distinct=True))
add("countdown, best-of-n", "countdown", **TINY | dict(method="best-of-n"))
add("countdown, ancestral", "countdown", **TINY | dict(method="independent", order="ancestral"))


# Trees, adaptive rules, early stop, caches, block-causal and shifted models: with the defaults of today.
TREE = dict(method="tree", w=None, steps=None, temperature=1.0)
RULES: dict[str, dict[str, Any]] = {
    "threshold": dict(reveal="threshold", tau=0.4),
    "factor": dict(reveal="factor", factor=1.5),
    "entropy-bound": dict(reveal="entropy-bound", entropy_bound=1.0),
}
RAGGED = ["ab", "head", "abcdefghi", "ab"]
SEARCHES: dict[str, dict[str, Any]] = {"d5p4": dict(steps=None), "tree": TREE}
OWN: dict[str, Any] = dict.fromkeys(("w", "gen_length", "steps", "temperature", "k"))  # the model's defaults


def add_default(name: str, model: str = "order", prompts: Any = PROMPTS, **options: Any) -> None:
    """Add a case without `FIXED`, whose record also has the scores."""
    add(name, model, prompts, **options)
    CASES[name]["scores"] = True


for model in ("order", "carry", "peaked", "block", "shifted"):
    add_default(f"tree, {model}", model, quick=True, **TREE)
    add_default(f"tree at temperature 0, {model}", model, **TREE | dict(temperature=0.0, w=2))
    add_default(f"tree with spare beams, {model}", model, **TREE | dict(spare=2, k=4))
add_default("tree with diversity", quick=True, **TREE, spare=2, diversity=1.0)
add_default("tree with diversity at temperature 0", **TREE | dict(diversity=0.5, temperature=0.0, k=5))
add_default("tree with spare beams and diversity in blocks", "block", RAGGED, **TREE, spare=3, diversity=2.0)
add_default("tree of one beam", **TREE | dict(k=1))
add_default("tree, steps and blocks", **TREE | dict(steps=4, block_length=4))
add_default("tree, few texts", "ties", [[0], [1, 2]], **TREE | dict(k=4, gen_length=2, temperature=2.0))
add_default("tree, holes", "order", HOLES, **TREE | dict(gen_length=None))
add_default("tree, end-of-text free", **TREE, eos="free")
add_default("tree, end-of-text never", **TREE, eos="never")
add_default("tree, top_k and top_p", **TREE, top_k=4, top_p=0.9)
add_default("tree from the least certain position", **TREE, start="entropy")
add_default(
    "tree, prompts dropped one by one", "order", HOLES, **TREE | dict(gen_length=6), drop={"0": [3], "1": [0, 2]}
)
add_default("tree, small forwards", "carry", RAGGED, **TREE, max_tokens_per_forward=20)
add_default("tree, deterministic", **TREE, deterministic=True, max_tokens_per_forward=128)
for order in ("left", "margin", "entropy", "random"):
    add_default(f"tree, order {order}", order=order, quick=order == "left", **TREE)
for rule, values in RULES.items():
    add_default(f"tree, {rule}", **TREE, **values)
    for method in ("d5p4", "independent", "best-of-n", "diverse-beam", "e-smc"):
        add_default(f"{method}, {rule}", quick=method == "d5p4", method=method, steps=None, **values)
    add_default(f"d5p4, {rule}, carry", "carry", steps=None, order="margin", **values)
    for search, own in SEARCHES.items():
        add_default(f"{search}, {rule}, shifted, guidance", "shifted", RAGGED, **own | values, guidance=2.0)
add_default("d5p4-p, threshold", quick=True, method="d5p4-p", steps=None, **RULES["threshold"])
add_default(
    "windows of shares", steps=None, select_window=[0.2, 0.7], guidance_window=[0, 0.5], guidance=2.0, **RULES["factor"]
)
add_default("threshold in blocks", "order", RAGGED, steps=None, block_length=3, **RULES["threshold"])
add_default("threshold, distinct, spare", "peaked", steps=None, distinct=True, spare=2, **RULES["threshold"])
add_default("threshold, holes", "carry", HOLES, steps=None, gen_length=None, order="top", **RULES["threshold"])

for method in ("d5p4", "independent", "best-of-n", "e-smc"):
    add_default(f"early stop, {method}", quick=method == "d5p4", method=method, stop=True, eos="free", temperature=4.0)
add_default(
    "early stop in blocks, carry", "carry", stop=True, eos="free", block_length=4, temperature=4.0, gen_length=10
)

for model in ("block", "shifted"):
    for search, own in SEARCHES.items():
        for guidance in (1.0, 2.0):
            for name in ("exact", "none"):
                where = f"{search}, {model}, cache {name}, guidance {guidance:g}"
                options = own | dict(cache=name, guidance=guidance, gen_length=10)
                add_default(where, model, RAGGED, quick=name == "exact" and guidance == 2, **options)
    add_default(f"independent, {model}, stop", model, RAGGED, method="independent", steps=None, stop=True)
    add_default(f"diverse-beam, {model}, steps", model, RAGGED, method="diverse-beam", steps=6)
    add_default(f"best-of-n, {model}, threshold", model, RAGGED, method="best-of-n", steps=None, **RULES["threshold"])
for name in ("prefix", "dual"):
    for model in ("llada", "dream", "mdlm"):
        for search, own in SEARCHES.items():
            options = own | dict(cache=name, block_length=4, gen_length=10, order="margin", chat=False)
            add_default(f"{search}, {model}, cache {name}", model, RAGGED, quick=model == "dream", **options)
    add_default(f"llada, cache {name}, guidance", "llada", RAGGED, cache=name, block_length=4, guidance=1.5, steps=None)

CHECKPOINTS = dict(llada=checkpoints.write_llada, dream=checkpoints.write_dream, mdlm=checkpoints.write_mdlm)
CHECKPOINTS |= dict(sdar_moe=checkpoints.write_sdar_moe, llada2=checkpoints.write_llada2)
for model in CHECKPOINTS:
    for search, own in SEARCHES.items():
        add_default(f"{search}, checkpoint {model}", model, RAGGED, **own | dict(guidance=1.5))
for method in ("tree", "d5p4", "independent"):
    add_default(
        f"countdown with its own defaults, {method}", "countdown", PUZZLES, quick=method == "tree", **OWN, method=method
    )


@cache
def model_named(name: str) -> Any:
    if name in ("block", "shifted"):
        return block_model(name == "shifted")
    if name in CHECKPOINTS:
        with tempfile.TemporaryDirectory() as folder:
            return d5p4.load(CHECKPOINTS[name](folder), device="cpu", dtype=torch.float64)
    if name == "countdown":
        return d5p4.load("countdown", device="cpu", dtype=torch.float64)
    return FakeModel(**MODELS[name])


def run(case: dict[str, Any]) -> list[dict[str, Any]]:
    """Decode a case and return one record per prompt.

    last_rows   [k or N][L] window tokens after the last step in which the prompt took part, in the order of the pool
    answers     [k] token ids, sorted and cut as users get them; rows, nfe and lineage are those of the `Result`
    """
    options = dict(case["options"])
    options |= {} if case.get("scores") else FIXED
    drop: dict[str, list[int]] = options.pop("drop", {})
    if "scorer" in options:
        options["scorer"] = SCORERS[options["scorer"]]
    elif options.get("method") == "best-of-n":
        options.setdefault("rank", "entropy")  # what "auto" was for all models when the cases were recorded
    last_rows: dict[int, list[list[int]]] = {}

    def keep_rows(snapshot: d5p4.Snapshot) -> list[int] | None:
        last_rows.update(zip(snapshot.prompts.tolist(), snapshot.next_tokens.tolist(), strict=True))
        return drop.get(str(snapshot.step))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", d5p4.DuplicateAnswers)
        result = d5p4.generate(model_named(case["model"]), case["prompts"], callback=keep_rows, **options)
    return [
        {
            "last_rows": last_rows[prompt],
            "answers": result.answers[prompt],
            "rows": int(result.rows[prompt]),
            "nfe": int(result.nfe[prompt]),
            "lineage": result.lineage[prompt].tolist(),
            **({"scores": rounded(result.score[prompt].tolist())} if case.get("scores") else {}),
        }
        for prompt in range(len(result))
    ]


def rounded(scores: list[float]) -> list[float | None]:
    """Return the scores to the digits on which all machines agree. A missing answer has no score."""
    return [None if score != score else round(score, 7) for score in scores]


def read() -> dict[str, Any]:
    """Return the file: by name of the case, the case itself and the records of its prompts."""
    return json.loads(lzma.decompress(FILE.read_bytes()))


def main() -> None:
    torch.set_num_threads(1)
    before = read()
    records = {name: before.get(name) or json.loads(json.dumps(record_of(case))) for name, case in CASES.items()}
    for kind, names in (("added", CASES.keys() - before.keys()), ("removed", before.keys() - CASES.keys())):
        for name in sorted(names):
            print(f"{kind}: {name}")
    content = json.dumps(records, separators=(",", ":"), sort_keys=True).encode()
    draft = FILE.with_suffix(".new")
    draft.write_bytes(lzma.compress(content, preset=9 | lzma.PRESET_EXTREME))
    os.replace(draft, FILE)
    print(f"{len(records)} cases ({len(QUICK)} quick), {FILE.stat().st_size:,} bytes")


def record_of(case: dict[str, Any]) -> dict[str, Any]:
    return {"case": case, "prompts": run(case)}


if __name__ == "__main__":
    main()
