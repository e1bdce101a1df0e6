"""Which measure of two texts agrees with a reader who is asked: "would I call these two the same answer?"

    python -m d5p4_lab bench pairs

One reader of the project has labelled the pairs of `RESULT` in random order, without seeing their measures. They are
answers of smol, books and countdown, and pairs that the same reader had written: near copies by a comma or a word,
clauses in another order, paraphrases, and equal openings with other endings. A pair counts as the same answer if its
distance is below a threshold. The threshold is the one with the fewest errors on one half of the prompts, and the table
shows the errors on the other half. The cosines by MiniLM are stored with the pairs (`--encode` computes them again).
"""

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from itertools import pairwise
from zlib import crc32

from d5p4.eval.lexical import distances, words

from ..tables import Row, Tables, table_of
from . import RESULTS, make_parser, read, write

RESULT = RESULTS / "pairs.jsonl.xz"
LENGTHS = (5, 50, 500)  # of texts about different subjects, in words
COMMON = """a an and are as at be by can for from had has have he i in is it its my not of on one or she that the they
this to was we were with you your"""


def edits(a: str, b: str) -> float:
    """Return the number of words that must be inserted, deleted or replaced, per word of the longer text."""
    one, other = words(a), words(b)
    before = list(range(len(other) + 1))
    for i, word in enumerate(one, 1):
        row = [i]
        for j, there in enumerate(other):
            row.append(min(before[j + 1] + 1, row[-1] + 1, before[j] + (word != there)))
        before = row
    return before[-1] / max(1, len(one), len(other))


def unshared(a: Sequence[Hashable], b: Sequence[Hashable]) -> float:
    """Return the share of two lists of units that they do not share, in any order."""
    return 1 - 2 * (Counter(a) & Counter(b)).total() / (len(a) + len(b)) if len(a) + len(b) else 0.0


def content(text: str) -> list[str]:
    return [word for word in words(text) if word.isalnum() and word not in COMMON.split()]


def triples(text: str) -> list[str]:
    plain = f"  {' '.join(words(text))} "
    return [plain[i : i + 3] for i in range(len(plain) - 2)]


MEASURES: dict[str, Callable[[str, str], float]] = {
    "words in order (`distance`)": lambda a, b: distances([a, b])[0][1],
    "word edit distance": edits,
    "content words": lambda a, b: unshared(content(a), content(b)),
    "pairs of words": lambda a, b: unshared([*pairwise(["", *words(a), ""])], [*pairwise(["", *words(b), ""])]),
    "triples of letters": lambda a, b: unshared(triples(a), triples(b)),
}
COSINE = "1 - cosine by MiniLM"


def fitted(rows: Sequence[Row], values: Sequence[float]) -> float:
    """Return the threshold with the fewest errors: the middle between two neighbouring values."""
    known = sorted(set(values))
    between = [known[0] / 2, *((low + high) / 2 for low, high in pairwise(known)), 1.0]
    return min(between, key=lambda limit: sum(errors(rows, values, limit)))


def errors(rows: Sequence[Row], values: Sequence[float], limit: float) -> tuple[int, int]:
    """Return how many pairs with the same answer are missed, and how many other pairs are below the threshold."""
    below = [(value < limit, row["same"]) for row, value in zip(rows, values, strict=True)]
    return below.count((False, True)), below.count((True, False))


def halves(rows: Sequence[Row]) -> tuple[list[Row], list[Row]]:
    """Divide the pairs by their prompts, so that no prompt is in both halves."""
    return tuple([row for row in rows if crc32(row["prompt"].encode()) % 2 == half] for half in (0, 1))  # type: ignore


def values_of(name: str, rows: Sequence[Row]) -> list[float]:
    return [1 - row["cosine"] if name == COSINE else MEASURES[name](row["a"], row["b"]) for row in rows]


def table(rows: Sequence[Row]) -> str:
    first, second = halves(rows)
    model = [row for row in second if row["kind"] != "written"]
    subjects = [" ".join(dict.fromkeys(row["a"] for row in half if row["kind"] == "smol")) for half in (first, second)]
    lines = []
    for name in (*MEASURES, COSINE):
        limit = fitted(first, values_of(name, first))
        missed, wrong = errors(second, values_of(name, second), limit)
        share = sum(errors(model, values_of(name, model), limit)) / len(model)
        line = {
            "measure": name,
            "threshold": limit,
            "same, but above": f"{missed} of {sum(row['same'] for row in second)}",
            "different, but below": f"{wrong} of {sum(not row['same'] for row in second)}",
            "errors": f"{100 * (missed + wrong) / len(second):.0f} %",
            "on answers of models": f"{100 * share:.0f} %",
        }
        for length in LENGTHS:
            parts = [" ".join(text.split()[:length]) for text in subjects]
            line[f"{length} words"] = None if name == COSINE else MEASURES[name](*parts)
        lines.append(line)
    return table_of(lines)


def tables(rows: Sequence[Row]) -> Tables:
    return {"measures": lambda: table(rows)}


def main(arguments: Sequence[str]) -> None:
    parser = make_parser("pairs", __doc__, device=False)
    parser.add_argument("--encode", action="store_true", help="compute the cosines again")
    rows = read(RESULT)
    if parser.parse_args(arguments).encode:
        from ..scoring.encoder import Encoder

        encoder = Encoder(device="cpu")
        for row in rows:
            one, other = encoder.encode([row["a"], row["b"]])
            row["cosine"] = round(float(one @ other), 4)
        write(RESULT, rows)
    print(table(rows))
