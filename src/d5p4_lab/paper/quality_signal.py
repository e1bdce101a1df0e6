"""Do the model's own scores agree with an outside judge of texts? (Tables prelim_corr, score; Fig. mdlm_corr)

The texts are windows of real text, and the model's own samples, which differ more in quality. Each text is masked
several times. The numbers of masked tokens are spread evenly over 1..L, and are the same for all texts of a length, as
they are for all candidates of a decoding step. One forward per mask gives these signals:

    entropy          -(1/L) Σ_j H_j over all positions: the score of D5P4 (under MDLM, H = 0 at revealed positions)
    masked entropy   the mean of -H_j over masked positions, to be compared with
    self-certainty   the mean of -(1/V') Σ_v log p_j(v) over masked positions; V' counts all ids but the mask id
    literal ...      entropy and self-certainty as the authors' script has them: of the plain softmax over all ids, the
                     mask id too, at all positions, revealed ones too
    bound            the mean of log p_j(token) over masked positions; its mean over masks is the bound per token

The signals are not normalised. (The authors normalise them within a batch of masks, which removes most of the
difference between texts.) The judge computes the mean nats per token of a text. A good signal falls as nats rise.

The paper has two models: MDLM on web text, judged by GPT-2, and LLaDA on TruthfulQA, judged by Llama 3 (the scale
paper-llada).
"""

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import groupby, product
from typing import Any

import numpy as np
import torch
from scipy.stats import rankdata
from torch import Tensor

from d5p4.errors import D5P4Error, DuplicateAnswers
from d5p4.generate import generate
from d5p4.models.base import NativeModel
from d5p4.ops.vocab import vocab_stats

from ..statistics import Figure, Floats, pearson, pooled_figure, spearman
from ..tables import Table, listed, shown
from .drawing import Claim, Drawing, Evidence, agreed, decided, every
from .rows import Row, Source, complete, missing_keys
from .scoring import judge_dtype
from .setup import FULL_PRECISION, Experiment, Setup, real
from .windows import FORWARD, chance, check_same_text, random_masks, real_windows, spread_counts, text_length

TOGETHER = 16  # at most this many texts are measured before the results are written to the disk
REAL = "real"
SIGNALS = ("entropy", "masked entropy", "certainty", "literal entropy", "literal certainty")
LIKE, LITERAL = "masked entropy ahead of self-certainty", "literal entropy ahead of literal self-certainty"
COLUMNS = {  # the columns of the table, by the names of their figures
    **{f"Spearman {name}": name.replace("certainty", "self-certainty") for name in SIGNALS},
    LIKE: LIKE,
    LITERAL: LITERAL,
    "bound Pearson": "bound: Pearson",
    "bound slope": "slope",
    "bound intercept": "intercept",
}
SETS = ("all texts", "real texts", "samples")
WINDOWS = "text"  # the value of the setting `texts` for windows of a text file; other values name a task
STRONG = 0.89  # a correlation above this value is strong; the paper says "Spearman correlations above 0.89"
FOLLOWS = 0.9  # the bound follows the judge if Pearson's correlation is above this value; the paper's is .911


@torch.no_grad()
def signals(model: NativeModel, ids: Sequence[int], masked: Tensor) -> dict[str, list[float]]:
    """Compute each signal of a text of L tokens (`ids`) under each of R masks (`masked` [R, L])."""
    row = torch.tensor(ids, device=model.device)
    masked = masked.to(model.device)
    unbanned = replace(model.head, banned=torch.zeros_like(model.head.banned))
    parts = []
    for part in masked.split(max(1, FORWARD // len(ids))):
        predicted = part if model.carry_over else torch.ones_like(part)
        every = model.body(row.masked_fill(part, model.mask_id)).states
        truth = row.expand_as(part)[predicted][:, None]
        stats = vocab_stats(every[predicted], model.head, ("entropy", "certainty"), truth)
        entropy, certainty, token = (
            torch.zeros(part.shape, dtype=torch.float64).masked_scatter(predicted.cpu(), values.double().cpu())
            for values in (stats["entropy"], stats["certainty"], stats["token"][:, 0])
        )
        hidden = part.cpu()
        count = hidden.sum(1)
        masked_means = [(values * hidden).sum(1) / count for values in (-entropy, certainty, token)]
        plain = vocab_stats(every.flatten(0, 1), unbanned, ("entropy", "certainty"))
        literal = [plain[name].double().cpu().view(part.shape).mean(1) for name in ("entropy", "certainty")]
        means = [-entropy.mean(1), *masked_means[:2], -literal[0], literal[1], masked_means[2]]
        parts.append(torch.stack(means, 1))
    columns = zip((*SIGNALS, "bound"), torch.cat(parts).T.tolist(), strict=True)
    return {name: [round(x, 7) for x in column] for name, column in columns}


# --- measuring ---


def kinds(setup: Setup) -> dict[str, tuple[float, int]]:
    return {f"T={temperature:g}, {steps} steps": (temperature, steps) for temperature, steps in setup["samples"]}


def keys_of(setup: Setup) -> list[str]:
    """The keys of all texts: real texts first, then the model's samples of each kind."""
    real = [f"{REAL} {number}" for number in range(setup["real"])]
    return real + [f"{name} {number}" for name in kinds(setup) for number in range(setup["each"])]


def real_texts(setup: Setup) -> Source:
    """The source of windows of a text file, or of the first questions of a task, each with its best answer."""
    if setup["texts"] == WINDOWS:
        return real_windows(setup, text_length(setup), setup["real"])

    def make(keys: Sequence[str]) -> dict[str, Row]:
        task, codec = setup.task(setup["texts"], setup["real"]), setup.outline.tokenizer
        if codec is None:
            raise D5P4Error(f"{setup.named!r} has no tokenizer, so it cannot read text")
        rows = {}
        for key in keys:
            example = task.examples[int(key)]
            ids = codec.encode(f"{example.prompt} {example.references[0]}")[: text_length(setup)]
            rows[key] = {"ids": ids, "text": codec.decode(ids)}
        return rows

    keys = [str(number) for number in range(setup["real"])]
    made_with = setup.model_and("length", "texts", "real")
    return setup.source("texts", keys, make, together=len(keys), kept=False, early=True, **made_with)


def samples(setup: Setup) -> Source:
    def make(keys: Sequence[str]) -> dict[str, Row]:
        rows = {}
        for name, group in groupby(keys, lambda key: key.rsplit(" ", 1)[0]):
            temperature, steps = kinds(setup)[name]
            names = list(group)
            options: dict[str, Any] = {"gen_length": text_length(setup), "steps": steps, "temperature": temperature}
            options |= {"sets": len(names), "keys": names, "seed": setup.seed}
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DuplicateAnswers)
                result = generate(setup.model, method="independent", k=1, **options)
            for place, key in enumerate(names):
                rows[key] = {"ids": result.sequences[place, 0].tolist(), "text": result.texts[place][0]}
        return rows

    own = keys_of(setup)[setup["real"] :]
    return setup.source("samples", own, make, together=TOGETHER, kept=False, **setup.model_and("length"))


def _texts(setup: Setup, keys: Sequence[str]) -> list[Row]:
    """Rows with the tokens (`ids`) and the decoded `text`."""
    real, own = setup.rows(real_texts(setup)), setup.rows(samples(setup))
    return [real[key.removeprefix(f"{REAL} ")] if key.startswith(f"{REAL} ") else own[key] for key in keys]


def signals_of(setup: Setup) -> Source:
    def make(keys: Sequence[str]) -> dict[str, Row]:
        rows = {}
        for key, text in zip(keys, _texts(setup, keys), strict=True):
            length = len(text["ids"])
            counts = spread_counts(chance("quality-signal", setup.seed), setup["draws"], length)
            masked = random_masks(chance("quality-signal", setup.seed, key), counts, length)
            rows[key] = signals(setup.model, text["ids"], masked)
        return rows

    return setup.source(
        "signals", keys_of(setup), make, models=[setup.named], signals=SIGNALS, **setup.model_and("length", "draws")
    )


def judged(setup: Setup, name: str) -> Source:
    def make(keys: Sequence[str]) -> dict[str, Row]:
        judge = _judge(name, setup.device, setup["start"], judge_dtype(setup))
        nats = judge.per_text([row["text"] for row in _texts(setup, keys)])
        return {key: {"nats": round(value, 6)} for key, value in zip(keys, nats.tolist(), strict=True)}

    file = f"judge-{name.rstrip('/').rsplit('/', 1)[-1]}"
    made_with = setup.model_and("length", "start") | {"judge": name}
    if judge_dtype(setup) != FULL_PRECISION:
        made_with["dtype"] = judge_dtype(setup)
    return setup.source(file, keys_of(setup), make, together=TOGETHER, models=[name], **made_with)


@lru_cache(maxsize=1)
def _judge(name: str, device: str | None, start: str | None, dtype: str) -> Any:
    from ..scoring.perplexity import CausalJudge

    return CausalJudge(name, device=device, dtype=dtype, start=start)


def sources(setup: Setup) -> list[Source]:
    if setup["texts"] == WINDOWS:
        check_same_text(setup, real_texts(setup), text_length(setup))
    wanted = [signals_of(setup), *(judged(setup, judge) for judge in setup["judges"])]
    if any(missing_keys(setup, source) for source in wanted):  # otherwise the texts themselves are not needed
        wanted = [real_texts(setup), samples(setup), *wanted]
    return wanted


# --- statistics ---


def stronger(a: Floats, b: Floats, nats: Floats) -> Figure:
    """Spearman(b, nats) - Spearman(a, nats) for columns [n]: positive if `a` falls more strongly than `b` as nats rise.

    For the interval, texts are resampled but keep their ranks in the whole sample. So a resample needs only new sums.
    """
    ranks = [rankdata(column) for column in (a, b, nats)]
    x, y, z = ((rank - rank.mean()) / (rank.std() or 1) for rank in ranks)
    parts = np.stack([np.ones(len(x)), x, y, z, x * x, y * y, z * z, x * z, y * z], axis=1)

    def statistic(sums: Floats) -> Floats:
        n, x, y, z, xx, yy, zz, xz, yz = sums.T

        def correlation(s: Floats, ss: Floats, sz: Floats) -> Floats:
            return (sz - s * z / n) / np.sqrt((ss - s * s / n) * (zz - z * z / n))

        return correlation(y, yy, yz) - correlation(x, xx, xz)

    return pooled_figure(parts, statistic)


def regression(x: Floats, y: Floats) -> tuple[Figure, Figure]:
    """Return the slope and the intercept of the least-squares line y ≈ slope x + intercept, for x and y [n]."""
    parts = np.stack([np.ones(len(x)), x, y, x * x, x * y], axis=1)

    def slope(sums: Floats) -> Floats:
        n, x, y, xx, xy = sums.T
        return (xy - x * y / n) / (xx - x * x / n)

    def intercept(sums: Floats) -> Floats:
        return (sums[:, 2] - slope(sums) * sums[:, 1]) / sums[:, 0]

    return pooled_figure(parts, slope), pooled_figure(parts, intercept)


# --- drawing ---


class Columns:
    """The measurements as columns [n] with one value per text: the signals, the nats, and the sets of texts."""

    def __init__(self, setup: Setup) -> None:
        real = np.array([key.startswith(f"{REAL} ") for key in keys_of(setup)])
        self.inside = dict(zip(SETS, (np.ones_like(real), real, ~real), strict=True))
        rows = complete(setup, signals_of(setup))
        self.signal = {name: np.array([np.mean(row[name]) for row in rows]) for name in (*SIGNALS, "bound")}
        # Two estimates of each text's bound: one from the masks of even number, one from the masks of odd number.
        self.halves = [np.array([np.mean(row["bound"][start::2]) for row in rows]) for start in (0, 1)]
        self.nats = {
            judge: np.array([row["nats"] for row in complete(setup, judged(setup, judge))]) for judge in setup["judges"]
        }


def draw(setup: Setup) -> Drawing:
    columns, rows = Columns(setup), []
    figures: dict[str, Any] = {}
    for (judge, nats), (which, inside) in product(columns.nats.items(), columns.inside.items()):
        if inside.any():
            measured = _measured({name: x[inside] for name, x in columns.signal.items()}, nats[inside])
            figures |= {f"{judge}: {name}, {which}": value for name, value in measured.items()}
            rows.append([judge, which, str(int(inside.sum())), *(shown(measured[name]) for name in COLUMNS)])
    halves = figures["bound: correlation of its two halves"] = pearson(columns.halves[0], columns.halves[1])
    table = Table(
        "Scores against the judge's nats per token",
        ["judge", "texts", "n", *COLUMNS.values()],
        rows,
        "The first columns are Spearman correlations. A good signal has a negative correlation, because a better score "
        "goes with fewer nats. Differences are positive if entropy is the better signal. The paper reports -.776 "
        "(entropy) and -.290 (self-certainty) with GPT-2's perplexity, and "
        f".906 (entropy) with its likelihood, which is minus nats. There are {setup['draws']} masks per text. The last "
        "columns compare the bound per token (x) with the judge's log-likelihood per token (y). The paper reports "
        "Pearson .911 and y ≈ .95 x + .17. Noise in x makes slopes smaller; the bounds from two halves of the masks "
        f"correlate at {shown(halves)}. The tokens of smollm2 differ from those of the model.",
    )
    return Drawing([table], None, figures, _claims(setup, list(columns.nats), figures))


def _measured(signal: Mapping[str, Floats], nats: Floats) -> dict[str, Figure]:
    measured: dict[str, Figure] = {}
    for name in SIGNALS:
        measured[f"Spearman {name}"] = spearman(signal[name], nats)
    measured[LIKE] = stronger(signal["masked entropy"], signal["certainty"], nats)
    measured[LITERAL] = stronger(signal["literal entropy"], signal["literal certainty"], nats)
    bound = signal["bound"]
    measured["bound Pearson"] = pearson(bound, -nats)
    return measured | dict(zip(("bound slope", "bound intercept"), regression(bound, -nats), strict=True))


def _claims(setup: Setup, judges: Sequence[str], figures: Mapping[str, Figure]) -> list[Claim]:
    tested = SETS[:2]

    def values(text: str, which: str = "real texts") -> str:
        return listed(judges, (figures[f"{judge}: {text}, {which}"] for judge in judges))

    def likelihood(which: str) -> list[Figure]:
        return [-figures[f"{judge}: Spearman entropy, {which}"] for judge in judges]

    def better(claim: str, paper: str, ahead: str, entropy: str, certainty: str, note: str) -> Claim:
        by_set = [[decided(figures[f"{judge}: {ahead}, {which}"]) for which in tested] for judge in judges]
        lead = "; ".join(f"{which}, {values(ahead, which)}" for which in tested)
        correlations = ", ".join(f"{name} {values(f'Spearman {name}', 'all texts')}" for name in (entropy, certainty))
        text = f"by how much its Spearman correlation is stronger: {lead}"
        return Claim(
            claim, paper, text, agreed(map(every, by_set)), f"correlations on all texts: {correlations}; {note}"
        )

    def verdict(figures: Iterable[Figure], above: float) -> Evidence:
        return agreed([decided(figure, above) for figure in figures])

    bound = [figures[f"{judge}: bound Pearson, real texts"] for judge in judges]
    mdlm = "MDLM's", ".906 on web text, with GPT-2", "not measured in this run, which has another model"
    llada = (
        "LLaDA's",
        ".892 on TruthfulQA, with Llama 3",
        "not measured: no judge reads the texts of the small model with LLaDA's layout",
    )
    measured, other = (mdlm, llada) if setup["texts"] == WINDOWS else (llada, mdlm)
    strong = [
        Claim(
            f"{measured[0]} entropy agrees strongly with the judge's likelihood (Spearman above {STRONG})",
            measured[1],
            f"Spearman correlation of the entropy score with log-likelihood on real texts: "
            f"{listed(judges, likelihood('real texts'))}",
            verdict(likelihood("real texts"), STRONG),
            f"on all texts: {listed(judges, likelihood('all texts'))}",
        ),
        Claim(
            f"{other[0]} entropy agrees strongly with the judge's likelihood (Spearman above {STRONG})",
            other[1],
            other[2],
            "not measured",
        ),
    ]
    return [
        better(
            "Entropy is a better signal of quality than self-certainty (both at masked positions)",
            "not measured",
            LIKE,
            "masked entropy",
            "certainty",
            "self-certainty leaves out the mask id",
        ),
        better(
            "As the authors compute them, entropy is a better signal than self-certainty (all positions, all ids)",
            "-.776 against -.290",
            LITERAL,
            "literal entropy",
            "literal certainty",
            "the model was never trained to predict revealed positions",
        ),
        *(strong if setup["texts"] == WINDOWS else strong[::-1]),
        Claim(
            f"The Monte-Carlo likelihood bound follows the judge's likelihood (Pearson above {FOLLOWS} on real texts)",
            "Pearson .911, y ≈ .95 x + .17",
            f"Pearson correlation {listed(judges, bound)}; slope {values('bound slope')}; "
            f"intercept {values('bound intercept')}",
            verdict(bound, FOLLOWS),
            f"on all texts: {values('bound Pearson', 'all texts')}",
        ),
    ]


_BOX = {
    "model": "books",
    "length": 256,
    "texts": WINDOWS,  # windows of the text file, or the name of a task with questions and answers
    "real": 128,
    "samples": [[0.7, 16], [1.0, 16], [1.0, 4], [1.3, 16]],  # for each kind of sample: temperature and steps
    "each": 8,  # the number of samples of each kind
    "draws": 12,  # the number of masks per text
    "judges": ["smollm2"],
    "start": None,  # the token that a judge reads before each text; None means the judge's own start token
}
_PAPER = {
    "model": "kuleshov-group/mdlm-owt",
    "length": 1024,
    "real": 1000,
    "samples": [],  # no samples: the paper uses only real texts (FineWeb)
    "each": 0,
    "draws": 128,
    "judges": ["openai-community/gpt2-large"],
    "start": "",  # no start token, so the first token is not scored
    "judge_dtype": "float32",
}
_LLADA = {
    "model": "GSAI-ML/LLaDA-8B-Instruct",
    "texts": "truthfulqa",
    "real": 817,
    "length": 128,
    "judges": ["meta-llama/Meta-Llama-3-8B"],
    "judge_dtype": "bfloat16",
}
EXPERIMENT = Experiment(
    name="quality-signal",
    title="The model's own scores against an outside judge",
    paper="Tables prelim_corr and score, Fig. mdlm_corr",
    settings={
        "box": _BOX,
        "paper": _BOX | _PAPER,
        "paper-llada": _BOX | _PAPER | _LLADA,
        "smol": real(_BOX, texts="truthfulqa", real=200, length=128, samples=[], draws=32)["smol"],
    },
    sources=sources,
    measured_by=("ppl",),
    draw=draw,
    needs_text=("box", "paper", "paper-llada", "smol"),
)
