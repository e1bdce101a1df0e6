"""Two expansions of log det K, compared with its exact value on pools of real decoding (App. dpp-theory).

K is the matrix of cosines of the k rows of a set, that is, the kernel without quality. The expansions are:

weak     K = I + C.       log det K = -tr C²/2 + tr C³/3 - …            if ‖C‖₂ < 1
shared   K = B + (1-ρ) C̃, B = (1-ρ) I + ρ 11ᵀ, H = B^-½ (K - B) B^-½
                          log det K = log det B + tr H - tr H²/2 + …    if ‖H‖₂ < 1
         tr H = -2ρ / (1 + (k-1)ρ) Σ_{i<j} c̃_ij

ρ is the part that all rows have in common. The paper does not say how to choose it. Here ρ is the mean cosine of two
rows of different groups of the pool, so it is the same for all sets of a pool. (If ρ were the mean cosine of the set
itself, Σ c̃ would be 0 and the expansion would have no first order.)
"""

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from d5p4.errors import D5P4Error, DuplicateAnswers
from d5p4.generate import generate
from d5p4.types import Snapshot

from ..statistics import Figure, figure, shifted, spearman
from ..tables import Table, listed, shown
from .drawing import Claim, Drawing, decided
from .rows import Row, Source, complete
from .setup import PAPER_SOLVER, SOLVER, Experiment, Setup
from .windows import chance

METHODS = {"d5p4": "pools of D5P4", "independent": "independent rows"}
EQUAL = 1e-6  # two rows with a cosine this near to 1 count as equal; a set with such rows has determinant 0
CONVERGES = 0.45  # the paper says that ‖H‖₂ < 1 up to this share of masked tokens
BINS = 10  # the number of bins of mask ratios
DIGITS = 4  # stored cosines c have this many significant digits of 1 - c
LEAST = 5  # a pool with fewer sets than this has no rank correlation


def orders(x: np.ndarray) -> tuple[float, tuple[float, ...]]:
    """Return ‖X‖₂, and the expansion of log det (I + X) to orders 1, 2 and 3, for a symmetric X [k, k]."""
    values = np.linalg.eigvalsh(x)
    terms = np.cumsum([values.sum(), -(values**2).sum() / 2, (values**3).sum() / 3])
    return float(np.abs(values).max()), tuple(terms.tolist())


def whitened(k: np.ndarray, rho: float) -> np.ndarray:
    """The matrix H = B^-½ (K - B) B^-½ [k, k] with B = (1-ρ) I + ρ 11ᵀ."""
    size = len(k)
    rest, common = (1 - rho) ** -0.5, (1 + (size - 1) * rho) ** -0.5
    root = rest * np.eye(size) + (common - rest) / size * np.ones((size, size))
    return root @ k @ root - np.eye(size)


Values = dict[str, float]
NORMS = ("‖C‖₂", "‖H‖₂")
ERRORS = ("weak, order 2", "weak, order 3", "shared, order 1", "shared, order 2", "shared, order 3")


def look_at(k: np.ndarray, rho: float) -> Values | None:
    """Compare the expansions with the exact log-determinant of a set with cosines K [k, k]; None if two rows are equal.

    "exact" is log det K, and "base" is log det B. `ERRORS` are |expansion - exact|, and `NORMS` must be below 1. The
    "bound" of the mean "cosine" of two rows is the paper's, √((1 - det K) / number of pairs).
    """
    size = len(k)
    apart = k[np.triu_indices(size, 1)]
    sign, exact = np.linalg.slogdet(k)
    if size < 2 or apart.max() > 1 - EQUAL or sign <= 0:
        return None
    weak_norm, weak = orders(k - np.eye(size))
    shared_norm, rest = orders(whitened(k, rho))
    base = (size - 1) * np.log1p(-rho) + np.log1p((size - 1) * rho)
    expansions = (*weak[1:], *(base + term for term in rest))
    values = {"exact": exact, "base": base, "cosine": apart.mean(), "‖C‖₂": weak_norm, "‖H‖₂": shared_norm}
    values |= {"bound": ((1 - np.exp(exact)) / len(apart)) ** 0.5, "second order alone": rest[1] - rest[0]}
    return values | {name: abs(value - exact) for name, value in zip(ERRORS, expansions, strict=True)}


def transversals(group: np.ndarray, size: int, count: int, source: np.random.Generator) -> Iterator[np.ndarray]:
    """Yield `count` random sets of `size` rows, with at most one row per group."""
    members = [np.flatnonzero(group == name) for name in np.unique(group)]
    for _ in range(count):
        chosen = source.permutation(len(members))[:size]
        yield np.array([source.choice(members[i]) for i in chosen])


# --- measuring the cosines of pools during decoding ---


def _steps(setup: Setup) -> int:
    """The number of steps: at most one per token, because most decoding orders reveal a token or more per step."""
    return min(setup["steps"], setup["length"])


def looks(setup: Setup) -> list[int]:
    """The steps at which pools are measured. The first step is left out, because all rows are equal there."""
    return sorted({round(step) for step in np.linspace(1, _steps(setup) - 1, setup["looks"])})


def pools_of(setup: Setup, method: str) -> Source:
    made_with = setup.model_and("length", "steps", "k", "w", "beta", "looks", "prompt")
    keys = [str(unit) for unit in range(setup["units"])]
    make = partial(_decode, setup, method)
    return setup.source(method, keys, make, together=setup["together"], models=[setup.named], **made_with)


def brief(cosine: float) -> float:
    """Round a cosine so that 1 - cosine keeps `DIGITS` significant digits. Determinants need this of rows near 1."""
    rest = 1 - cosine
    return 1.0 if rest < 5e-9 else round(cosine, DIGITS - 1 - math.floor(math.log10(rest)))


def _decode(setup: Setup, method: str, keys: Sequence[str]) -> dict[str, Row]:
    seen: dict[str, dict[str, Row]] = {key: {} for key in keys}
    size = {name: setup[name] for name in ("k", "w", "beta", "solver")}
    if method == "independent":  # as many rows as in a pool of D5P4; every row is its own group
        size = {"k": setup["k"] * setup["w"]}

    def watch(shot: Snapshot) -> None:
        if shot.step not in looks(setup):
            return
        masked = (shot.tokens == setup.model.mask_id).double().mean((1, 2)).tolist()
        similarity = shot.view.similarity.double().cpu().numpy()
        group = shot.view.group.tolist()
        above = np.triu_indices(similarity.shape[1], 1)
        for place, number in enumerate(shot.prompts.tolist()):
            seen[keys[number]][str(shot.step)] = {
                "masked": round(masked[place], 6),
                "cosines": [brief(cosine) for cosine in similarity[place][above].tolist()],
                "group": group[place],
            }

    prompts = {"sets": len(keys)} if setup["prompt"] is None else {"prompts": [setup["prompt"]] * len(keys)}
    names = [f"{method} {key}" for key in keys]
    options = size | {"method": method, "gen_length": setup["length"], "steps": _steps(setup)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DuplicateAnswers)
        generate(setup.model, **prompts, keys=names, seed=setup.seed, callback=watch, **options)
    return {key: {"steps": steps} for key, steps in seen.items()}


# --- computing the expansions for the measured pools ---


class Pool(NamedTuple):
    """The measured sets of one pool."""

    unit: int
    masked: float
    rho: float
    sets: dict[str, np.ndarray]  # the values of `look_at`, one per random set without equal rows; {} if there is none


Column = Callable[[Mapping[str, np.ndarray]], np.ndarray]  # a value of each set of a pool, from the sets' columns


def pools(setup: Setup, method: str) -> list[Pool]:
    measured = []
    for unit, run in enumerate(complete(setup, pools_of(setup, method))):
        for step in looks(setup):
            row = run["steps"][str(step)]
            group = np.array(row["group"])
            similarity = np.eye(len(group))
            above = np.triu_indices(len(group), 1)
            similarity[above] = similarity.T[above] = row["cosines"]
            rho = max(0.0, float(similarity[group[:, None] != group].mean()))
            if rho > 1 - EQUAL:
                continue  # all rows of the pool are still equal
            source = chance("theory", setup.seed, method, unit, step)
            drawn = transversals(group, setup["k"], setup["sets"], source)
            sets = [look_at(similarity[np.ix_(rows, rows)], rho) for rows in drawn]
            kept = [one for one in sets if one is not None]
            columns = {name: np.array([one[name] for one in kept]) for name in (kept[0] if kept else ())}
            measured.append(Pool(unit, row["masked"], rho, columns))
    return measured


def by_unit(some_pools: Sequence[Pool], value: Callable[[Pool], float]) -> Figure:
    """The mean over runs, with an interval. A run counts with the mean of `value` over its pools; NaN is left out."""
    units: dict[int, list[float]] = {}
    for pool in some_pools:
        number = value(pool)
        if np.isfinite(number):
            units.setdefault(pool.unit, []).append(number)
    return figure([float(np.mean(values)) for values in units.values()])


def mean(some_pools: Sequence[Pool], column: str | Column) -> Figure:
    """The mean over runs of a value of sets: the name of a column, or a function of all columns."""
    value: Column = (lambda sets: sets[column]) if isinstance(column, str) else column
    return by_unit([pool for pool in some_pools if pool.sets], lambda pool: float(value(pool.sets).mean()))


def ordered(some_pools: Sequence[Pool], term: Column) -> Figure:
    """Spearman's correlation of `term` with log det K over the sets of a pool, as a mean over runs."""
    many = [pool for pool in some_pools if pool.sets and len(pool.sets["exact"]) >= LEAST]
    # Values are rounded, because ties must stay ties.
    return by_unit(many, lambda pool: spearman(term(pool.sets).round(6), pool.sets["exact"].round(6), draws=1).value)


def draw(setup: Setup) -> Drawing:
    by_method = {method: pools(setup, method) for method in METHODS}
    late = {method: [pool for pool in by_method[method] if pool.masked <= CONVERGES] for method in METHODS}
    figures: dict[str, Any] = {}
    for method, every_pool in by_method.items():
        if not any(pool.sets for pool in late[method]):
            where = f"{CONVERGES:.0%} masked tokens or fewer"
            raise D5P4Error(f"theory: {method} has no set of different rows at {where}; add units")
        of_method = _method_figures(every_pool, late[method])
        figures |= {f"{method}: {name}": value for name, value in of_method.items()}
    return Drawing([_table(setup, by_method)], None, figures, _claims(late, figures))


def _method_figures(every_pool: Sequence[Pool], late: Sequence[Pool]) -> dict[str, Figure | float | None]:
    figures: dict[str, Figure | float | None] = {}
    for name in (*ERRORS, *NORMS):
        kind = "error" if name in ERRORS else "norm"
        figures[f"{kind} {name}"] = mean(every_pool, name)
        figures[f"{kind} {name}, at most 45 % masked"] = mean(late, name)
    return figures | {
        "ρ": by_unit(every_pool, lambda pool: pool.rho),
        "mean cosine": mean(every_pool, "cosine"),
        "share of sets with ‖C‖₂ < 1": mean(every_pool, lambda sets: sets["‖C‖₂"] < 1),
        "share of sets with ‖H‖₂ < 1, at most 45 % masked": mean(late, lambda sets: sets["‖H‖₂"] < 1),
        "share of sets under the bound": mean(every_pool, lambda sets: sets["cosine"] <= sets["bound"]),
        "order of sets by mean cosine": ordered(every_pool, lambda sets: -sets["cosine"]),
        "order of sets by the second order alone": ordered(every_pool, lambda sets: sets["second order alone"]),
        "mask ratio at which ‖H‖₂ reaches 1": crossing(every_pool),
    }


def binned(some_pools: Sequence[Pool], name: str) -> list[tuple[float, Figure]]:
    """For each bin of mask ratios that contains pools: the middle of the bin, and the mean of a value over runs."""
    bins: dict[int, list[Pool]] = {}
    for pool in some_pools:
        if pool.sets:
            bins.setdefault(min(BINS - 1, int(BINS * pool.masked)), []).append(pool)
    return [((number + 0.5) / BINS, mean(inside, name)) for number, inside in sorted(bins.items())]


def crossing(some_pools: Sequence[Pool]) -> float | None:
    """The mask ratio at which the mean ‖H‖₂ first reaches 1, interpolated between bins. None if no mean reaches 1."""
    points = [(where, figure.value) for where, figure in binned(some_pools, "‖H‖₂")]
    for (a, low), (b, high) in pairwise(points):
        if high >= 1 > low:
            return a + (b - a) * (1 - low) / (high - low)
    return 0.0 if points and points[0][1] >= 1 else None


def _table(setup: Setup, by_method: dict[str, list[Pool]]) -> Table:
    rows = []
    for method, method_pools in by_method.items():
        columns = [dict(binned(method_pools, name)) for name in (*NORMS, *ERRORS)]
        for where in columns[0]:
            edges = f"{100 * where - 50 / BINS:.0f}–{100 * where + 50 / BINS:.0f}"
            rows.append([method, edges, *(shown(column[where], 3) for column in columns)])
    what = "texts without a prompt" if setup["prompt"] is None else "answers to one prompt"
    note = (
        f"{setup['units']} runs of each method: {what} of {setup['length']} tokens in {setup['steps']} steps, pools of "
        f"{setup['k'] * setup['w']} rows, {setup['sets']} random sets of {setup['k']} rows (at most one per group) "
        f"from each of {len(looks(setup))} steps. Errors are |expansion - log det K| in nats, averaged over sets; 95 % "
        "intervals over runs. Sets with two equal rows are left out, because their determinant is 0."
    )
    heads = ["pools of", "masked (%)", *NORMS, *(f"error: {name}" for name in ERRORS)]
    return Table("Spectral norms and errors by mask ratio", heads, rows, note)


def _claims(late: dict[str, list[Pool]], figures: dict[str, Any]) -> list[Claim]:
    def both(name: str, digits: int = 2) -> str:
        return listed(METHODS.values(), (figures[f"{method}: {name}"] for method in METHODS), digits)

    weak = figures["d5p4: share of sets with ‖C‖₂ < 1"]
    inside = figures["d5p4: share of sets with ‖H‖₂ < 1, at most 45 % masked"]
    gain = mean(late["d5p4"], lambda sets: sets["weak, order 2"] - sets["shared, order 2"])
    order = figures["d5p4: order of sets by mean cosine"]
    above, tested = beyond_bound()
    equal = look_at(np.full((3, 3), 0.1) + 0.9 * np.eye(3), 0.0) or {}
    ratios = [figures[f"{method}: mask ratio at which ‖H‖₂ reaches 1"] for method in METHODS]
    where = "; ".join(
        f"{name} {'never' if ratio is None else f'{ratio:.2f}'}"
        for name, ratio in zip(METHODS.values(), ratios, strict=True)
    )
    return [
        Claim(
            "The weak-correlation condition ‖C‖₂ < 1 is not always met (C: the matrix of cosines without its diagonal)",
            "stated without a figure",
            f"share of sets that meet the condition: {both('share of sets with ‖C‖₂ < 1')}",
            decided(shifted(-weak, 1)),
        ),
        Claim(
            "With the shared component factored out (H: the rest), ‖H‖₂ < 1 up to about 45 % masked tokens",
            "45 %",
            "share of sets with at most 45 % masked tokens that meet the condition: "
            f"{both('share of sets with ‖H‖₂ < 1, at most 45 % masked')}; "
            f"the mean ‖H‖₂ reaches 1 at a mask ratio of: {where}",
            decided(shifted(inside, -0.95)),
            "the claim holds if more than 95 % of the sets in D5P4's pools meet the condition",
        ),
        Claim(
            "Factoring out the shared component makes the expansion of log det describe real pools",
            "stated without a figure",
            f"the second-order error is {shown(gain)} nats lower with the shared component, for at most 45 % masked "
            f"tokens; the remaining error is {both('error shared, order 2, at most 45 % masked', 4)} nats",
            decided(gain),
        ),
        Claim(
            "A larger determinant goes with a lower mean cosine (the first-order term)",
            "derived to first order",
            "Spearman correlation of log det with minus the mean cosine, over the sets of a pool: "
            f"{both('order of sets by mean cosine')}; with the second-order term alone: "
            f"{both('order of sets by the second order alone')}",
            decided(order),
        ),
        Claim(
            "√((1 - det K) / pairs) is an upper bound of the mean cosine (K: the matrix of cosines)",
            "derived for weak correlation",
            f"{above:,} of {tested:,} random matrices with ‖C‖₂ < 1 are above it; three rows with cosines 0.1 have "
            f"{equal['cosine']:.3f} and a bound of {equal['bound']:.4f}",
            "holds" if above == 0 else "does not hold",
            "an exact count: Σ c² is about 1 - det K only if tr C³ is small beside tr C²; share of sets of real pools "
            f"below the bound (none has ‖C‖₂ < 1): {both('share of sets under the bound')}",
        ),
    ]


def beyond_bound(count: int = 20_000) -> tuple[int, int]:
    """Of random matrices of cosines with ‖C‖₂ < 1: how many have a mean cosine above the bound, and how many there are.

    The matrices have k = 3..8 rows, which share a random part of up to a half and have 8..64 dimensions.
    """
    source, above, tested = chance("bound"), 0, 0
    for _ in range(count):
        size, width = source.integers(3, 9), source.integers(8, 65)
        rows = source.normal(size=(size, width)) + source.random() * source.normal(size=width)
        rows /= np.linalg.norm(rows, axis=1, keepdims=True)
        values = look_at(rows @ rows.T, 0.0)
        if values is not None and values["‖C‖₂"] < 1:
            tested, above = tested + 1, above + (values["cosine"] > values["bound"])
    return above, tested


_BOX = {
    "model": "books",
    "prompt": None,
    "length": 64,
    "steps": 64,
    "k": 8,
    "w": 4,
    "beta": 10.0,
    "solver": SOLVER,
    "units": 8,
    "together": 4,  # the number of runs that are decoded in one call
    "looks": 16,  # the number of steps at which pools are measured
    "sets": 32,  # the number of random sets per pool
}
EXPERIMENT = Experiment(
    name="theory",
    title="Expansions of the log-determinant",
    paper="Appendix, theoretical link between DPP MAP and cosine similarity",
    settings={
        "box": _BOX,
        "paper": _BOX
        | {"model": "kuleshov-group/mdlm-owt", "length": 1024, "steps": 1024, "units": 16, "looks": 20}
        | {"solver": PAPER_SOLVER},
    },
    sources=lambda setup: [pools_of(setup, method) for method in METHODS],
    draw=draw,
)
