"""Scorers: outside models that score decoded sets of answers.

A scorer is named `kind:model`. An experiment names the kinds, and its settings name the models. The kinds are:

ppl        mean nats per token of each answer under a causal judge (as in the paper: clamped, without the first token)
cos        cosines of sentence embeddings, between two answers and between an answer and its nearest reference
features   the judge's last hidden state at each answer's last token, for MAUVE

As in the paper, a judge reads no token before a text.
"""

import base64
import gc
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch

from .rows import Row
from .setup import FULL_PRECISION, Setup

Scorer = Callable[[Sequence[Row]], list[Row]]
AT_ONCE = (16, 128)  # a rank scores this many sets at a time, on a CPU or on a GPU
TOKENS = 1 << 13  # at most this many tokens per batch of a judge


def scorer_names(setup: Setup) -> list[str]:
    """The names `kind:model` of an experiment's scorers."""
    return models_of(setup, setup.experiment.scorers)


def models_of(setup: Setup, kinds: Sequence[str]) -> list[str]:
    models = {"ppl": setup.settings.get("judges", ()), "cos": (setup.settings.get("encoder"),)}
    models["features"] = (models["ppl"] or (None,))[:1]
    return [f"{kind}:{model}" for kind in kinds for model in models[kind] if model]


def judge_dtype(setup: Setup) -> str:
    return str(setup.settings.get("judge_dtype", FULL_PRECISION))


def scorer_slug(setup: Setup, scorer: str) -> str:
    """The name of a scorer's files: its kind, its model without its folder, and its dtype if it is not float32."""
    kind, _, model = scorer.partition(":")
    short = f"{kind}-{model.rstrip('/').split('/')[-1]}"
    return short if kind == "cos" or judge_dtype(setup) == FULL_PRECISION else f"{short}-{judge_dtype(setup)}"


@lru_cache(maxsize=8)
def make_scorer(name: str, device: str | None, dtype: str = FULL_PRECISION) -> Scorer:
    kind, _, model = name.partition(":")
    if kind == "cos":
        return _cosines(model, device)
    return {"ppl": _perplexity, "features": _features}[kind](model, device, dtype)


def release() -> None:
    make_scorer.cache_clear()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _perplexity(model: str, device: str | None, dtype: str) -> Scorer:
    from ..scoring.perplexity import CausalJudge

    judge = CausalJudge(model, device=device, dtype=dtype, start="")

    def score(rows: Sequence[Row]) -> list[Row]:
        texts = [text for row in rows for text in row["texts"]]
        nats = iter(judge.per_text(texts, max_tokens_per_batch=TOKENS).tolist())
        return [{"nats": [round(next(nats), 5) for _ in row["texts"]]} for row in rows]

    return score


def _features(model: str, device: str | None, dtype: str) -> Scorer:
    read = feature_reader(model, device, dtype)

    def score(rows: Sequence[Row]) -> list[Row]:
        features = read([text for row in rows for text in row["texts"]])
        places = np.cumsum([0, *(len(row["texts"]) for row in rows)])
        return [pack(features[a:b]) for a, b in zip(places[:-1], places[1:], strict=True)]

    return score


def feature_reader(model: str, device: str | None, dtype: str) -> Callable[[Sequence[str]], np.ndarray]:
    """Return a function that computes the features [n, D] of n texts, for MAUVE."""
    from ..scoring.perplexity import CausalJudge
    from .measures import last_token_features

    judge = CausalJudge(model, device=device, dtype=dtype, start="")
    return partial(last_token_features, judge, max_tokens_per_batch=TOKENS)


def pack(features: np.ndarray) -> Row:
    """Pack numbers [n, D] as 16-bit floats in base64, for a JSON line."""
    return {"shape": list(features.shape), "float16": base64.b64encode(features.astype("<f2").tobytes()).decode()}


def unpack(row: Mapping[str, Any]) -> np.ndarray:
    return np.frombuffer(base64.b64decode(row["float16"]), "<f2").reshape(row["shape"]).astype(np.float32)


def _cosines(model: str, device: str | None) -> Scorer:
    from ..scoring.encoder import Encoder

    encoder = Encoder(model, device=device)

    def score(rows: Sequence[Row]) -> list[Row]:
        texts = sorted({text for row in rows for text in (*row["texts"], *row.get("references", ()))})
        vectors = dict(zip(texts, encoder.encode(texts), strict=True))
        scored = []
        for row in rows:
            answers = np.stack([vectors[text] for text in row["texts"]])
            values: Row = {"gram": np.round(answers @ answers.T, 5).tolist()}
            if row.get("references"):
                references = np.stack([vectors[text] for text in row["references"]])
                values["reference"] = np.round((answers @ references.T).max(1), 5).tolist()
            scored.append(values)
        return scored

    return score


def self_cosine(gram: Sequence[Sequence[float]], places: Sequence[int] | None = None) -> float:
    """S-COS: the mean cosine over pairs of answers of a set, or over pairs of the answers at the given places."""
    matrix = np.array(gram) if places is None else np.array(gram)[np.ix_(places, places)]
    count = len(matrix)
    return float((matrix.sum() - np.trace(matrix)) / max(1, count * (count - 1)))
