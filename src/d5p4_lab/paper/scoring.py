"""The stage that scores: what outside models say of decoded sets of answers.

A scorer is named `kind:model`. An experiment names the kinds, its settings the models.

ppl        mean nats a token of each answer under a causal judge (the paper's rule: clamped, first token unscored)
cos        cosines of sentence embeddings: among the answers, and of each answer to its nearest reference
features   the judge's last hidden state at each answer's last token, for MAUVE
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from d5p4.errors import D5P4Error

from .setup import Case, Setup, batches

Row = dict[str, Any]
Scorer = Callable[[Sequence[Row]], list[Row]]
AT_ONCE = 256  # sets between two writings
TOKENS = 1 << 13  # of a judge's batch
MAUVE_TOKENS = 1024


def scorer_names(setup: Setup, wanted: Sequence[str] | None = None) -> list[str]:
    """`kind:model` of every scorer of an experiment; `wanted`: kinds or full names to keep."""
    models = {"ppl": setup.settings.get("judges", ()), "cos": (setup.settings.get("encoder"),)}
    models["features"] = (models["ppl"] or (None,))[:1]
    names = [f"{kind}:{model}" for kind in setup.experiment.scorers for model in models[kind] if model]
    if wanted is None:
        return names
    for each in wanted:
        if each not in names and each not in setup.experiment.scorers:
            known = ", ".join((*setup.experiment.scorers, *names)) or "none"
            raise D5P4Error(f"{setup.experiment.name} has no scorer {each!r} (it has: {known})")
    return [name for name in names if name in wanted or name.split(":")[0] in wanted]


def score_cases(setup: Setup, wanted: Sequence[str] | None = None) -> bool:
    """Score what is missing of all cases; whether there was any."""
    worked = False
    work = [(name, case) for name in scorer_names(setup, wanted) for case in setup.cases]
    if work and not any(len(setup.rows(case)) for case in setup.cases):
        sets(setup, setup.cases[0])  # says what is missing
    for number, (name, case) in enumerate(work):
        rows, scores = setup.rows(case), setup.scores(case, slug(name))
        units = [unit for unit in range(case.units) if unit in rows and unit not in scores]
        for some in batches(units, AT_ONCE):
            setup.progress(number / len(work), f"{name}: {case.name}")
            score = _scorer(name, setup.device, bool(setup.settings.get("remote_code")))
            found = score([rows.rows[str(unit)] for unit in some])
            scores.add_all({str(unit): values for unit, values in zip(some, found, strict=True)})
            worked = True
    setup.progress(1.0, "scored")
    return worked


def slug(name: str) -> str:
    """A scorer's name as a folder's."""
    kind, _, model = name.partition(":")
    return f"{kind}-{model.rstrip('/').split('/')[-1]}"


@lru_cache(maxsize=8)
def _scorer(name: str, device: str | None, remote_code: bool) -> Scorer:
    kind, _, model = name.partition(":")
    if kind == "cos":
        return _cosines(model, device, remote_code)
    return {"ppl": _perplexity, "features": _features}[kind](model, device)


def _perplexity(model: str, device: str | None) -> Scorer:
    from d5p4.eval.perplexity import CausalJudge, paper_start

    judge = CausalJudge(model, device=device, start=paper_start(model))

    def score(rows: Sequence[Row]) -> list[Row]:
        texts = [text for row in rows for text in row["texts"]]
        nats = iter(judge.per_text(texts, max_tokens_per_batch=TOKENS).tolist())
        return [{"nats": [round(next(nats), 5) for _ in row["texts"]]} for row in rows]

    return score


def _features(model: str, device: str | None) -> Scorer:
    from d5p4.eval.mauve import last_token_features
    from d5p4.eval.perplexity import CausalJudge

    judge = CausalJudge(model, device=device)  # with a start, so that an empty text has a last token too

    def score(rows: Sequence[Row]) -> list[Row]:
        texts = [text for row in rows for text in row["texts"]]
        found = last_token_features(judge, texts, max_tokens=MAUVE_TOKENS, max_tokens_per_batch=TOKENS)
        places = np.cumsum([0, *(len(row["texts"]) for row in rows)])
        return [pack(found[a:b]) for a, b in zip(places[:-1], places[1:], strict=True)]

    return score


def pack(features: np.ndarray) -> Row:
    """[n, D] numbers in a JSON line, as 16-bit floats."""
    half = np.ascontiguousarray(features, dtype="<f2")
    return {"shape": list(half.shape), "float16": base64.b64encode(half.tobytes()).decode()}


def unpack(row: Mapping[str, Any]) -> np.ndarray:
    return np.frombuffer(base64.b64decode(row["float16"]), "<f2").reshape(row["shape"]).astype(np.float32)


def _cosines(model: str, device: str | None, remote_code: bool) -> Scorer:
    from d5p4.eval.encoder import Encoder

    encoder = Encoder(model, device=device, remote_code=remote_code)

    def score(rows: Sequence[Row]) -> list[Row]:
        texts = sorted({text for row in rows for text in (*row["texts"], *row.get("references", ()))})
        vectors = dict(zip(texts, encoder.encode(texts), strict=True))
        found = []
        for row in rows:
            answers = np.stack([vectors[text] for text in row["texts"]])
            values: Row = {"gram": np.round(answers @ answers.T, 5).tolist()}
            if row.get("references"):
                references = np.stack([vectors[text] for text in row["references"]])
                values["reference"] = np.round((answers @ references.T).max(1), 5).tolist()
            found.append(values)
        return found

    return score


# --- reading it back ---


def sets(setup: Setup, case: Case) -> list[Row]:
    """The decoded sets of a case, in the order of units."""
    return _all(setup, case, setup.rows(case), "decode")


def scored(setup: Setup, case: Case, name: str) -> list[Row]:
    """What the scorer `kind:model` said, in the order of units."""
    return _all(setup, case, setup.scores(case, slug(name)), "score")


def _all(setup: Setup, case: Case, lines: Any, stage: str) -> list[Row]:
    missing = [unit for unit in range(case.units) if unit not in lines]
    if missing:
        what = f"{len(missing)} of {case.units} rows of {case.name!r}"
        raise D5P4Error(f"{setup.experiment.name}: {what} are missing; run --stage {stage} ({lines.path})")
    return [lines.rows[str(unit)] for unit in range(case.units)]


def nats(setup: Setup, case: Case, judge: str) -> np.ndarray:
    """[units, k] mean nats a token."""
    return np.array([row["nats"] for row in scored(setup, case, f"ppl:{judge}")])


def self_cosine(setup: Setup, case: Case, keep: Sequence[Sequence[int]] | None = None) -> np.ndarray:
    """[units] S-COS: mean cosine of two different answers of a set; `keep` [units][k] looks at some of them."""
    rows = scored(setup, case, f"cos:{setup['encoder']}")
    grams = [np.array(row["gram"]) for row in rows]
    if keep is not None:
        grams = [gram[np.ix_(chosen, chosen)] for gram, chosen in zip(grams, keep, strict=True)]
    return np.array([(g.sum() - np.trace(g)) / max(1, len(g) * (len(g) - 1)) for g in grams])
