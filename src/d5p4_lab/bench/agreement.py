"""Compare the answers of two machines or variants at the same seed, and explain every difference.

    python -m d5p4_lab bench agreement --a cpu --b cuda --prompts 200
    python -m d5p4_lab bench agreement --a cpu --b cpu:noise --prompts 20
    python -m d5p4_lab bench agreement --b cuda --keep FILE        on the other machine: write the runs to FILE
    python -m d5p4_lab bench agreement --b FILE                    on this machine: compare with the runs in FILE
    python -m d5p4_lab bench agreement --table                     print the table of the last run

A variant is a file that --keep wrote, or a device with options after colons:
    plain     use the plain versions of the operations even on a GPU, where our kernels would run
    small     run forwards of at most 512 tokens, so that the matrix products have other shapes
    noise=x   multiply each number of the hidden states by 1 + x cos(a keyed random angle); the default x is 3e-7

Two runs of a prompt may differ at some step and still end in the same answers. The first difference has a kind:
    selection  The runs chose different parents from the same pool. The margin is the difference between the objectives
               of the two sets (log det, or the total of diverse-beam), computed from Q and S of the first run.
    scores     The runs chose different parents, and the margin above is not small. But the raw scores and similarities
               of the runs differ only by rounding, and the selection rule, repeated on the numbers of each run, makes
               that run's choice again. (Min-max normalisation enlarges tiny differences between scores.) The margin is
               the largest difference between raw scores or similarities.
    token      A child of the same parent drew another token. The margin is the distance of the child's uniform number
               from the token's interval in the cumulative distribution.
    order      A child revealed another position. The margin says how much more a position that stayed masked is worth
               than a position that was revealed.
For token and order, the model in float64 on the CPU repeats the decision of each run with the run's random numbers, and
the larger margin of the two runs counts. A margin of at most --bound (--gap for selections) is a near-tie and explains
the difference. If a difference has no explanation, the exit status is 1.
"""

from __future__ import annotations

import gzip
import io
import math
import pickle
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import d5p4
from d5p4.eval.countdown import WINDOW, problems
from d5p4.methods.dpp import dpp_kernel
from d5p4.models.load import choose_device
from d5p4.ops import kernels
from d5p4.ops.ties import occurrence
from d5p4.prompts import Request, prepare
from d5p4.provenance import machine
from d5p4.rng import ORDER, SELECT, TOKEN, hash_tokens, key_of, mix, uniform

from . import RESULTS, Row, generate, make_parser, read, table_of, write

K = W = 4
NUMBERS = 4  # per puzzle
SMALL = 512
NOISE = 3e-7
BOUND, GAP = 1e-5, 1e-3
OPENINGS = ("It was a dark night, and", "The old captain", "My dear sister,", "In the garden there stood")
KINDS = ("token", "order", "scores", "selection")

Margin = tuple[float, str]
"""How far a decision is from a tie, and the kind of the decision: "token" or "order"."""
NONE, NEVER = (0.0, "token"), (math.inf, "order")


@dataclass(frozen=True)
class Case:
    """One call of `d5p4.generate`."""

    name: str
    model: str
    prompts: Sequence[Any]
    options: Mapping[str, Any]


def cases(prompts: int) -> list[Case]:
    """Return the cases: puzzles solved by four methods, texts without a prompt, and texts that continue an opening."""
    puzzles = [problem.prompt for problem in problems(prompts, NUMBERS, seed=0)]
    window = WINDOW[NUMBERS]
    puzzle = dict(k=K, w=W, gen_length=window, steps=window, block_length=window, temperature=1.0, order="confidence")
    text = dict(k=K, w=W, method="d5p4", temperature=1.0, order="ancestral")
    sets = max(4, prompts // 25)
    return [
        Case("countdown, independent", "countdown", puzzles, puzzle | {"method": "independent"}),
        Case("countdown, d5p4", "countdown", puzzles, puzzle | {"method": "d5p4"}),
        Case("countdown, d5p4 distinct", "countdown", puzzles, puzzle | {"method": "d5p4", "distinct": True}),
        Case("countdown, diverse-beam", "countdown", puzzles, puzzle | {"method": "diverse-beam"}),
        Case("books, from nothing", "books", [[]] * sets, text | {"gen_length": 128, "steps": 64}),
        Case("books, continued", "books", [OPENINGS[i % 4] for i in range(sets)], text | {"gen_length": 64}),
    ]


class Noisy:
    """A model whose hidden states are changed slightly. Rows with equal tokens get equal changes."""

    def __init__(self, model: d5p4.Model, size: float) -> None:
        self._model, self._size = model, size

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def body(self, tokens: Tensor, attention_mask: Tensor | None = None) -> d5p4.Hidden:
        hidden = self._model.body(tokens, attention_mask)
        real = torch.ones_like(tokens, dtype=torch.bool) if attention_mask is None else attention_mask
        position = real.cumsum(-1) - 1
        row = mix(tokens, position).masked_fill(~real, 0).sum(-1, keepdim=True)
        dimension = torch.arange(hidden.states.shape[-1], device=tokens.device)
        angle = uniform(row, position)[..., None] + uniform(torch.zeros_like(dimension), dimension)
        states = hidden.states * (1 + self._size * torch.cos(2 * math.pi * angle)).to(hidden.states.dtype)
        return d5p4.Hidden(states, states if hidden.features is hidden.states else hidden.features)


@dataclass(frozen=True)
class Variant:
    """The device and the options of a run."""

    device: str
    plain: bool = False
    small: bool = False
    noise: float = 0.0

    @staticmethod
    def parse(spec: str) -> Variant:
        device, *options = spec.split(":")
        if options and options[0].isdigit():
            device = f"{device}:{options.pop(0)}"
        switches: dict[str, Any] = {}
        for option in options:
            name, _, value = option.partition("=")
            if name not in ("plain", "small", "noise") or (value and name != "noise"):
                raise d5p4.D5P4Error(f"variant {spec!r}: {option!r} is not one of plain, small, noise, noise=x")
            try:
                switches[name] = float(value or NOISE) if name == "noise" else True
            except ValueError:
                raise d5p4.D5P4Error(f"variant {spec!r}: {value!r} is not a number") from None
        return Variant(device, **switches)

    def load(self, name: str, dtype: str) -> Any:
        model = d5p4.load(name, self.device, dtype)
        return Noisy(model, self.noise) if self.noise else model


@dataclass(frozen=True)
class Record:
    """The pool and the choice of one prompt at one step, as tensors on the CPU."""

    tokens: Tensor  # [N, L]
    tie: Tensor  # [N]
    group: Tensor  # [N]
    parents: Tensor  # [m]
    children: int
    following: Tensor  # [m * children, L] the tokens of the next pool
    raw: Tensor | None = None  # [N]; raw, quality and similarity are None if the method selects nothing
    quality: Tensor | None = None  # [N]
    similarity: Tensor | None = None  # [N, N]


@dataclass
class Run:
    """The result of running a case with a variant: sorted answers [P][k] and records [P][steps]."""

    settings: d5p4.Settings
    answers: list[list[tuple[int, ...]]]
    records: list[list[Record]]


@dataclass
class Kept:
    """The runs of all cases with one variant. `save` writes them to a file for another machine."""

    about: dict[str, Any]
    runs: dict[str, Run]  # by case

    def save(self, path: Path) -> None:
        buffer = io.BytesIO()
        torch.save(self, buffer)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(gzip.compress(buffer.getvalue()))

    @staticmethod
    def load(path: str) -> Kept:
        """Read a file that `save` wrote. Reading unpickles the file, so open only files that you made yourself."""
        try:
            with gzip.open(path, "rb") as file:
                return torch.load(io.BytesIO(file.read()), weights_only=False)
        except (OSError, EOFError, pickle.UnpicklingError, RuntimeError) as error:
            raise d5p4.D5P4Error(f"{path} is not a file that --keep wrote: {error}") from None


def carry_out(case: Case, model: Any, variant: Variant, seed: int) -> Run:
    records: list[list[Record]] = [[] for _ in case.prompts]
    selects = case.options["method"] != "independent"

    def listen(snapshot: d5p4.Snapshot) -> None:
        view, choice = snapshot.view, snapshot.choice
        scores = (view.raw, view.quality, view.similarity) if selects else ()
        tensors = (snapshot.tokens, view.tie, view.group, choice.parents, snapshot.next_tokens, *scores)
        tokens, tie, group, parents, following, *numbers = (x.cpu() for x in tensors)
        for place, prompt in enumerate(snapshot.prompts.tolist()):
            own = [x[place].double() for x in numbers]
            records[prompt].append(
                Record(tokens[place], tie[place], group[place], parents[place], choice.children, following[place], *own)
            )

    size: dict[str, Any] = {"max_tokens_per_forward": SMALL} if variant.small else {}
    with kernels.off() if variant.plain else nullcontext():
        result = generate(model, list(case.prompts), seed=seed, callback=listen, **case.options, **size)
    return Run(result.settings, [sorted(map(tuple, answers)) for answers in result.answers], records)


@dataclass(frozen=True)
class Family:
    """One parent, its float64 token distribution at each position, and the uniform numbers that drew its C children."""

    tokens: Tensor  # [L]
    open: Tensor  # [L] bool: True at the masked positions of the block
    low: Tensor  # [L, V] a token is drawn by uniform numbers from low to high; low is inf if no number draws the token
    high: Tensor  # [L, V]
    worth: Tensor  # [L, V] the value of a position if it draws the token; high values are revealed first
    last_ids: Sequence[int]  # tokens of value 0; positions that draw such tokens are revealed from left to right
    u: Tensor  # [C, L]
    moves: Tensor | None  # [C, L] bool: the positions that each child reveals; None unless the rule is ancestral
    reveal: int  # the number of positions that a child reveals; unused if the rule is ancestral

    def margins(self, row: Tensor) -> list[Margin]:
        """Return the margin by which each of the C children misses `row` [L]; 0 if float64 gives exactly `row`."""
        new = row != self.tokens
        wrong = bool((new & ~self.open).any())
        if wrong or (self.moves is None and int(new.sum()) != min(self.reveal, int(self.open.sum()))):
            return [NEVER] * len(self.u)
        token = _largest(_outside(self.u[:, new], self.low[new, row[new]], self.high[new, row[new]]))
        pairs = zip(token.tolist(), self._order(row, new).tolist(), strict=True)
        return [max((t, "token"), (o, "order")) for t, o in pairs]

    def _order(self, row: Tensor, new: Tensor) -> Tensor:
        """Return [C]: the value of the best position that stays masked minus the value of the worst revealed position.

        Rounding may also have changed the token of a position that stays masked, and with the token the value. So the
        smallest margin over all tokens counts. The ancestral rule ignores the values, so its margin is 0 or inf.
        """
        if self.moves is not None:
            return torch.where((self.moves == new).all(-1), 0.0, torch.inf)
        hidden = self.open & ~new
        more = (self.worth[hidden] - self.worth[new, row[new]].min()).clamp_min(0)  # [H, V]
        ends = new & torch.isin(row, torch.tensor(self.last_ids, dtype=row.dtype))
        if ends.any():  # tokens in last_ids have exactly the value 0, so rounding cannot change their order
            earlier = hidden.nonzero()[:, 0] < ends.nonzero().max()
            more[earlier.nonzero(), torch.tensor(self.last_ids)] = torch.inf
        drawn = _outside(self.u[:, hidden, None], self.low[hidden], self.high[hidden])  # [C, H, V]
        return _largest(torch.maximum(drawn, more).amin(-1))


def _outside(u: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Return the distance of u from the interval [low, high]. The distance is 0 inside the interval."""
    return torch.maximum(low - u, u - high).clamp_min(0)


def _largest(x: Tensor) -> Tensor:
    """Return [C]: the largest value in each row of x [C, n], or 0 if n = 0."""
    return torch.nn.functional.pad(x, (1, 0)).amax(-1)


@dataclass(frozen=True)
class Arbiter:
    """Repeats the draws of children with the model in float64 on the CPU, to see how far each run was from them."""

    model: Any
    settings: d5p4.Settings
    requests: Sequence[Request]
    seed: int

    @staticmethod
    def make(model: Any, case: Case, settings: d5p4.Settings, seed: int) -> Arbiter:
        plain = settings.guidance == settings.temperature == 1 and settings.top_k is settings.top_p is None
        if not plain or settings.order not in ("confidence", "ancestral"):
            raise d5p4.D5P4Error(
                "only runs at temperature 1 in confidence or ancestral order, without guidance, top_k and top_p, "
                "can be traced"
            )
        return Arbiter(model, settings, prepare(model, list(case.prompts), case.options).requests, seed)

    def step(self, prompt: int, index: int) -> d5p4.Step:
        length, settings = len(self.requests[prompt].window(self.model.mask_id)), self.settings
        ancestral = settings.order == "ancestral"
        return d5p4.make_schedule(length, settings.steps, settings.block_length, ancestral).steps[index]

    def select_key(self, prompt: int, index: int) -> Tensor:
        """Return the key [1] from which a selection makes its random numbers."""
        return mix(key_of(self.seed), self.requests[prompt].key, SELECT, index)[None]

    @torch.no_grad()
    def families(self, prompt: int, index: int, record: Record) -> list[Family]:
        """Return one family for each parent that the record of a step names."""
        settings, step = self.settings, self.step(prompt, index)
        request, mask = self.requests[prompt], self.model.mask_id
        window = torch.tensor(request.window(mask))
        rows = record.tokens[record.parents]  # [m, L]
        row_hash = hash_tokens(rows, window)
        number = occurrence(row_hash[None], record.tie[record.parents][None])[0]
        stream = mix(key_of(self.seed), self.requests[prompt].key, index, row_hash, number)[:, None, None]
        child = torch.arange(4 * settings.w if settings.distinct else record.children)[:, None]
        u = uniform(mix(stream, TOKEN), window, child)  # [m, C, L]

        place = torch.arange(len(window))
        open_ = (rows == mask) & (place >= step.start) & (place < step.stop)
        moves: Sequence[Tensor | None] = [None] * len(rows)
        if settings.order == "ancestral":
            moves = list((uniform(mix(stream, ORDER), window, child) < step.move) & open_[:, None])
        p = self._probabilities(request, window, rows)
        high = p.cumsum(-1)
        low = (high - p).masked_fill(p == 0, torch.inf)
        last = self.model.eos_ids if settings.eos == "last" else ()
        worth = p.clone()
        worth[..., list(last)] = 0
        last_ids, reveal = [last] * len(rows), [step.reveal] * len(rows)
        return [Family(*part) for part in zip(rows, open_, low, high, worth, last_ids, u, moves, reveal, strict=True)]

    def _probabilities(self, request: Request, window: Tensor, rows: Tensor) -> Tensor:
        """Return the probabilities [m, L, V] of all tokens. `rows` [m, L] are the tokens at the window's positions."""
        whole = torch.tensor(request.ids + [self.model.mask_id] * request.append).repeat(len(rows), 1)
        whole[:, window] = rows
        head = self.model.head.ban(self.model.eos_ids if self.settings.eos == "never" else ())
        logits = self.model.body(whole).states[:, window] @ head.weight.T
        if head.bias is not None:
            logits = logits + head.bias
        return torch.softmax(logits.masked_fill(head.banned, -torch.inf), -1)


def children_margin(families: Sequence[Family], record: Record, other: Record) -> Margin:
    """Return the largest margin of a child of `record` that differs from the child of the same index in `other`."""
    worst = NONE
    for number, (row, theirs) in enumerate(zip(record.following, other.following, strict=True)):
        if not torch.equal(row, theirs):
            parent, child = divmod(number, record.children)
            worst = max(worst, families[parent].margins(row)[child])
    return worst


def distinct_margin(families: Sequence[Family], record: Record) -> Margin:
    """Return the largest margin among all children of a run with distinct branching.

    The parents draw in the order of their tie hashes. Each parent keeps only children that no earlier parent has.
    """
    rows = record.following.unflatten(0, (-1, record.children))
    taken: dict[tuple[int, ...], Tensor] = {}
    worst = NONE
    for parent in record.tie[record.parents].argsort(stable=True).tolist():
        kept = {tuple(row.tolist()): row for row in rows[parent]}
        if next(iter(kept)) in taken:  # this parent drew no new child, so copies of its first child fill its places
            worst, kept = max(worst, families[parent].margins(rows[parent][0])[0]), {}
        worst = max(worst, _keeping(families[parent], list(kept.values()), list(taken.values()), record.children))
        taken |= kept
    return worst


def _keeping(family: Family, kept: Sequence[Tensor], taken: Sequence[Tensor], places: int) -> Margin:
    """Return how large rounding errors must be (the margin) for the parent to keep exactly the children `kept`.

    The parent draws its children one after another. Each child must either be the next row of `kept`, or repeat a row
    of `taken` or an earlier row of `kept`. The margin is the largest margin of any child, in the best such assignment.
    reach[i] is the margin if the children so far gave i rows of `kept`. Children after the last place are ignored.
    """
    old, new = [family.margins(row) for row in taken], [family.margins(row) for row in kept]
    reach = [NONE] + [NEVER] * len(kept)
    for child in range(len(family.u)):
        after = []
        for i, so_far in enumerate(reach):
            again = min((row[child] for row in (*old, *new[:i])), default=NEVER)
            stay = so_far if i == places else max(so_far, again)
            after.append(min(stay, max(reach[i - 1], new[i - 1][child])) if i else stay)
        reach = after
    return reach[-1]


def objective(settings: d5p4.Settings, record: Record, chosen: Tensor) -> float:
    """Return the value of the chosen rows [m] of a pool under the objective that the selection rule maximises."""
    assert record.quality is not None and record.similarity is not None, "nothing was selected"
    quality, similarity = record.quality[chosen], record.similarity[chosen][:, chosen]
    if settings.method == "d5p4":
        kernel, _ = dpp_kernel("additive", quality[None], similarity[None], settings.params["beta"])
        return float(torch.linalg.slogdet(kernel[0]).logabsdet)
    return max(_mmr_total(quality, similarity, settings.params["alpha"], first) for first in range(len(chosen)))


def _mmr_total(quality: Tensor, similarity: Tensor, alpha: float, first: int) -> float:
    """Pick rows by the largest quality - alpha * mean similarity to earlier picks. Return the sum of these values."""
    picks, total = [first], float(quality[first])
    while len(picks) < len(quality):
        value = quality - alpha * similarity[picks].mean(0)
        value[picks] = -torch.inf
        picks.append(int(value.argmax()))
        total += float(value[picks[-1]])
    return total


def replay(settings: d5p4.Settings, record: Record, last: bool, key: Tensor) -> list[int]:
    """Repeat a run's selection on this machine, from the recorded scores and similarities; return the parents."""
    assert record.quality is not None and record.similarity is not None and record.raw is not None
    names = ("group", "tie", "quality", "similarity", "raw")
    tensors = {name: getattr(record, name)[None] for name in names}
    pool = d5p4.PoolView(**tensors, last=last, width=settings.w)
    return sorted(settings.spec.build(settings)(pool, settings.k, key).parents[0].tolist())


@dataclass(frozen=True)
class Difference:
    """The first difference between two runs of a prompt."""

    prompt: int
    healed: bool  # whether both runs give the same answers at the end, in spite of this difference
    step: int
    kind: str
    margin: float
    near_tie: bool
    details: dict[str, Any]


def parting(a: Sequence[Record], b: Sequence[Record]) -> tuple[int, str] | None:
    """Return the first step at which two runs of a prompt differ, and the kind of difference.

    Return None if the runs do not differ.
    """
    for index, (x, y) in enumerate(zip(a, b, strict=True)):
        if not torch.equal(x.tie, y.tie):
            return index, "lineage"
        if not torch.equal(x.parents, y.parents) or x.children != y.children:
            return index, "selection"
        if not torch.equal(x.following, y.following):
            return index, "children"
    return None


def trace(arbiter: Arbiter, prompt: int, a: Run, b: Run, bound: float, gap: float) -> Difference | None:
    """Find and explain the first difference between two runs of a prompt. Return None if the runs do not differ."""
    healed = a.answers[prompt] == b.answers[prompt]
    part = parting(a.records[prompt], b.records[prompt])
    if part is None:
        last = len(a.records[prompt]) - 1
        return None if healed else Difference(prompt, healed, last, "answers", math.inf, False, {})
    index, kind = part
    x, y = a.records[prompt][index], b.records[prompt][index]
    if kind == "selection":
        return Difference(prompt, healed, index, *_trace_selection(arbiter, prompt, index, x, y, bound, gap))
    if kind == "children":
        return Difference(prompt, healed, index, *_trace_children(arbiter, prompt, index, x, y, bound))
    return Difference(prompt, healed, index, kind, math.inf, False, {})


Cause = tuple[str, float, bool, dict[str, Any]]
"""The kind, the margin, near_tie and the details of a difference."""


def _trace_selection(
    arbiter: Arbiter, prompt: int, index: int, a: Record, b: Record, bound: float, gap: float
) -> Cause:
    settings, key = arbiter.settings, arbiter.select_key(prompt, index)
    if a.quality is None:
        return "selection", math.inf, False, {}
    margin = abs(objective(settings, a, a.parents) - objective(settings, a, b.parents))
    names = ("raw", "quality", "similarity")
    apart = {name: float((getattr(a, name) - getattr(b, name)).abs().max()) for name in names}
    last = arbiter.step(prompt, index).last
    replayed = all(replay(settings, run, last, key) == run.parents.tolist() for run in (a, b))
    rows = [sorted(run.tokens[run.parents].tolist()) for run in (a, b)]
    details = {"a": a.parents.tolist(), "b": b.parents.tolist(), "same_tokens": rows[0] == rows[1]}
    details |= {"gap": margin, "apart": apart, "replayed": replayed}
    rounding = max(apart["raw"], apart["similarity"])
    if not margin <= gap and replayed and rounding <= bound:  # two singular sets give NaN, for which `<=` is False
        return "scores", rounding, True, details
    return "selection", margin, margin <= gap, details


def _trace_children(arbiter: Arbiter, prompt: int, index: int, a: Record, b: Record, bound: float) -> Cause:
    families = arbiter.families(prompt, index, a)
    if arbiter.settings.distinct:
        margins = distinct_margin(families, a), distinct_margin(families, b)
    else:
        margins = children_margin(families, a, b), children_margin(families, b, a)
    margin, kind = max(margins)
    row = int((a.following != b.following).any(-1).nonzero()[0])
    places = (a.following[row] != b.following[row]).nonzero()[:, 0]
    details = {"row": row, "places": places.tolist()}
    for name, run, own in zip("ab", (a, b), margins, strict=True):
        details[name] = {"tokens": run.following[row, places].tolist(), "margin": own[0]}
    return kind, margin, margin <= bound, details


@dataclass
class Outcome:
    """The comparison of two runs of the same case."""

    name: str
    prompts: int
    equal_sets: int
    answers: int
    equal_answers: int
    differences: list[Difference]

    @property
    def unexplained(self) -> list[Difference]:
        return [difference for difference in self.differences if not difference.near_tie]


def compare(case: Case, a: Run, b: Run, exact: Any, seed: int, bound: float = BOUND, gap: float = GAP) -> Outcome:
    """Compare two runs of a case. `exact` is the model in float64 on the CPU."""
    pairs = list(zip(a.answers, b.answers, strict=True))
    shared = sum(sum((Counter(x) & Counter(y)).values()) for x, y in pairs)
    arbiter = Arbiter.make(exact, case, a.settings, seed)
    traced = [trace(arbiter, prompt, a, b, bound, gap) for prompt in range(len(pairs))]
    differences = [difference for difference in traced if difference is not None]
    equal_sets, answers = sum(x == y for x, y in pairs), sum(map(len, a.answers))
    return Outcome(case.name, len(pairs), equal_sets, answers, shared, differences)


def table(cases: Sequence[Row]) -> str:
    """Return Markdown with one row per case of a report."""
    rows = []
    for case in cases:
        kinds = Counter(difference["kind"] for difference in case["differences"])
        rows.append(
            {
                "case": case["name"],
                "prompts": str(case["prompts"]),
                "equal sets %": f"{100 * case['equal_sets'] / case['prompts']:.1f}",
                "equal answers %": f"{100 * case['equal_answers'] / case['answers']:.1f}",
                "parted": str(len(case["differences"])),
                **{kind: str(kinds[kind]) for kind in KINDS},
                "unexplained": str(case["unexplained"]),
                "largest margin": _worst(case, KINDS[:3]),
                "largest gap": _worst(case, KINDS[3:]),
            }
        )
    return table_of(rows)


def _worst(case: Row, kinds: Sequence[str]) -> str | None:
    """Return the largest margin among differences of the given kinds. A report stores an infinite margin as None."""
    margins = [d["margin"] for d in case["differences"] if d["kind"] in kinds]
    if not margins:
        return None
    return "∞" if None in margins else f"{max(margins):.1e}"


def report(outcomes: Sequence[Outcome], about: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of the results file. A margin that is not finite becomes null."""
    rows = []
    for outcome in outcomes:
        row = asdict(outcome)
        row["share_equal_sets"] = outcome.equal_sets / outcome.prompts
        row["share_equal_answers"] = outcome.equal_answers / outcome.answers
        row["kinds"] = dict(Counter(difference.kind for difference in outcome.differences))
        row["unexplained"] = len(outcome.unexplained)
        rows.append(row)
    return {**about, "cases": _plain(rows)}


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(part) for name, part in value.items()}
    if isinstance(value, list):
        return [_plain(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def main(arguments: Sequence[str]) -> int:
    """Run the comparison. Return 1 if a difference has no explanation, otherwise 0."""
    parser = make_parser("agreement", __doc__)
    parser.add_argument("--a", default="cpu", help="a variant: device[:plain][:small][:noise[=x]]")
    parser.add_argument("--b", default="cuda", help="a variant, or a file that --keep wrote, to compare with --a")
    parser.add_argument(
        "--prompts", type=int, default=200, help="number of puzzles; text cases have 1/25 as many texts, at least 4"
    )
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="run only the cases whose name contains this text")
    parser.add_argument(
        "--bound", type=float, default=BOUND, help="the largest margin of a near-tie between tokens or positions"
    )
    parser.add_argument("--gap", type=float, default=GAP, help="the largest margin of a near-tie between selections")
    parser.add_argument("--keep", type=Path, help="run only variant b, and write its runs to this file")
    parser.add_argument("--out", type=Path, default=RESULTS / "agreement.json.xz")
    parser.add_argument("--table", action="store_true", help="print the table of the last run")
    args = parser.parse_args(arguments)
    if args.table:
        print(table(read(args.out)["cases"]))
        return 0
    chosen = [case for case in cases(args.prompts) if args.only in case.name]
    if not chosen:
        raise d5p4.D5P4Error(f"no case has {args.only!r} in its name: change --only")
    if not Path(args.b).is_file() and "." in args.b.split(":")[0]:
        raise d5p4.D5P4Error(f"there is no file {args.b}: check --b")
    kept = Kept.load(args.b) if Path(args.b).is_file() else None
    variants = [Variant.parse(spec) for spec in (args.a, kept.about["b"] if kept else args.b)]
    about: dict[str, Any] = {"date": time.strftime("%Y-%m-%d"), "a": args.a, "b": kept.about["b"] if kept else args.b}
    here = variants[:1] if kept else variants
    about["machines"] = [machine(choose_device(variant.device)) for variant in here]
    about["torch"] = [torch.__version__] * 2
    about |= {name: getattr(args, name) for name in ("dtype", "seed", "bound", "gap", "prompts")}

    def carried_out(case: Case, variant: Variant) -> Run:
        return carry_out(case, variant.load(case.model, args.dtype), variant, args.seed)

    if args.keep:
        Kept(about, {case.name: carried_out(case, variants[1]) for case in chosen}).save(args.keep)
        print(f"wrote {len(chosen)} cases to {args.keep}; compare them elsewhere with --b {args.keep.name}")
        return 0
    if kept:
        wrong = [name for name in ("dtype", "seed", "prompts") if kept.about[name] != about[name]]
        if wrong:
            raise d5p4.D5P4Error(f"{args.b} was made with {wrong[0]} {kept.about[wrong[0]]!r}, not {about[wrong[0]]!r}")
        about |= {name: [about[name][0], kept.about[name][1]] for name in ("machines", "torch")}
        chosen = [case for case in chosen if case.name in kept.runs]
        if not chosen:
            raise d5p4.D5P4Error(f"{args.b} has {', '.join(kept.runs)}, but none of these names contains {args.only!r}")
    print(f"{args.a} ({about['machines'][0]}) against {about['b']} ({about['machines'][1]}), {args.dtype}", flush=True)
    outcomes: list[Outcome] = []
    for case in chosen:
        began = time.perf_counter()
        a, b = carried_out(case, variants[0]), kept.runs[case.name] if kept else carried_out(case, variants[1])
        middle = time.perf_counter()
        exact = d5p4.load(case.model, "cpu", "float64")
        outcome = compare(case, a, b, exact, args.seed, args.bound, args.gap)
        outcomes.append(outcome)
        write(args.out, report(outcomes, about))
        spent = f"{middle - began:.0f} s to run, {time.perf_counter() - middle:.0f} s to trace"
        parted = f"{outcome.equal_sets} of {outcome.prompts} sets equal, {len(outcome.differences)} differ at some step"
        print(f"{case.name}: {parted}, {spent}", flush=True)
        for difference in outcome.unexplained:
            print(f"  unexplained: {difference}", flush=True)
    print("\n" + table(report(outcomes, about)["cases"]))
    return int(any(outcome.unexplained for outcome in outcomes))
