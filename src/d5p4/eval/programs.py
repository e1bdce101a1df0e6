"""Programs from examples: the language, its interpreter, generated tasks, the checker, and the canonical form.

A task shows examples of a function from lists to lists. The prompt `4 -7 2 9>2 4 9|-3 8 -1 6 1>1 6 8|5 -2 7>5 7:` has,
among others, the answer `keep pos sort`. A program is a pipeline of operations: each one takes the list of the one
before it.

| operation                                        | result                                                           |
|--------------------------------------------------|------------------------------------------------------------------|
| `sort`, `reverse`                                | the numbers in ascending order, or in reversed order             |
| `dedup`                                          | each number once, where it first occurs                          |
| `diff`                                           | each number minus the number before it, from the second one on   |
| `sum`, `max`, `min`                              | a list of one number                                             |
| `take 1`, `take 2`, `take 3`, `drop 1`, `drop 2` | the first numbers, or all others                                 |
| `map +1`, `map -1`, `map *2`, `map *3`           | each number changed                                              |
| `map neg`, `map abs`, `map sq`                   | the negative, the absolute value, the square of each number      |
| `map /2`, `map %3`                               | each number divided by 2 and rounded down, or modulo 3 (0, 1, 2) |
| `keep even`, `keep odd`, `keep pos`, `keep neg`  | the numbers for which this is true                               |
| `scan +`, `scan max`, `scan min`                 | the sum, maximum or minimum of all numbers up to each place      |

A program has no result for a list if a number leaves -99..99, or if it takes the sum, maximum or minimum of no numbers.
Text is matched, never evaluated; a program has at most eight operations and a list at most 32 numbers, so every check
ends after a bounded number of steps.

An answer is right if it is a program with the wanted output for every example. A task of a benchmark also has hidden
examples, which are its reference: `Task.reference` writes them like a prompt, and the grader `programs` takes them from
the field `reference` of a file (`d5p4 score`). Without a reference, as for a prompt that a user types, an answer is
right if it satisfies the examples of the prompt.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import D5P4Error

LARGEST = 99  # numbers are -99..99
LONGEST_LIST, MOST_OPERATIONS, MOST_EXAMPLES = 32, 8, 32  # the most that a prompt or a program may have

_NUMBER = "-?[1-9][0-9]?|0"
_LIST = f"(?:{_NUMBER})(?: (?:{_NUMBER}))*"
_EXAMPLE = re.compile(f"({_LIST})>({_LIST})?")
_FAR = 1 << 20  # a number beyond all others

List = tuple[int, ...]
Example = tuple[List, List]  # input and output


# ---- the language


class Lists(NamedTuple):
    """R lists of at most W numbers."""

    values: NDArray[np.int32]  # [R, W]; numbers behind the end of a list have no meaning
    lengths: NDArray[np.int32]  # [R]; -1 if there is no result

    @property
    def inside(self) -> NDArray[np.bool_]:
        """bool [R, W], True at the numbers of the lists."""
        return np.arange(self.values.shape[1]) < self.lengths[:, None]

    def take(self, rows: NDArray[np.integer]) -> Lists:
        return Lists(self.values[rows], self.lengths[rows])


Operation = Callable[[Lists], Lists]


def _sort(x: Lists) -> Lists:
    return Lists(np.sort(np.where(x.inside, x.values, _FAR), axis=1), x.lengths)


def _reverse(x: Lists) -> Lists:
    place = x.lengths[:, None] - 1 - np.arange(x.values.shape[1])
    return Lists(np.take_along_axis(x.values, place.clip(0), axis=1), x.lengths)


def _only(x: Lists, kept: NDArray[np.bool_]) -> Lists:
    kept = kept & x.inside
    order = np.argsort(~kept, axis=1, kind="stable")
    return Lists(np.take_along_axis(x.values, order, axis=1), kept.sum(axis=1, dtype=np.int32))


def _dedup(x: Lists) -> Lists:
    width = x.values.shape[1]
    earlier = np.tri(width, k=-1, dtype=bool)
    return _only(x, ~((x.values[:, :, None] == x.values[:, None, :]) & earlier).any(axis=2))


def _diff(x: Lists) -> Lists:
    values = x.values.copy()
    values[:, :-1] = x.values[:, 1:] - x.values[:, :-1]
    return Lists(values, (x.lengths - 1).clip(0))


def _fold(fold: Callable[..., NDArray[np.integer]], neutral: int) -> Operation:
    def operation(x: Lists) -> Lists:
        values = x.values.copy()
        values[:, 0] = fold(np.where(x.inside, x.values, neutral), axis=1)
        return Lists(values, np.where(x.lengths > 0, 1, -1).astype(np.int32))

    return operation


def _take(count: int) -> Operation:
    return lambda x: Lists(x.values, np.minimum(x.lengths, count))


def _drop(count: int) -> Operation:
    return lambda x: Lists(np.roll(x.values, -count, axis=1), (x.lengths - count).clip(0))


def _map(change: Callable[[NDArray[np.int32]], NDArray[np.int32]]) -> Operation:
    return lambda x: Lists(change(x.values), x.lengths)


def _keep(test: Callable[[NDArray[np.int32]], NDArray[np.bool_]]) -> Operation:
    return lambda x: _only(x, test(x.values))


def _scan(scan: np.ufunc) -> Operation:
    return lambda x: Lists(scan.accumulate(x.values, axis=1), x.lengths)


TABLE: dict[str, Operation] = {
    "sort": _sort,
    "reverse": _reverse,
    "dedup": _dedup,
    "diff": _diff,
    "sum": _fold(np.sum, 0),
    "max": _fold(np.max, -_FAR),
    "min": _fold(np.min, _FAR),
    **{f"take {count}": _take(count) for count in (1, 2, 3)},
    **{f"drop {count}": _drop(count) for count in (1, 2)},
    "map +1": _map(lambda x: x + 1),
    "map -1": _map(lambda x: x - 1),
    "map *2": _map(lambda x: x * 2),
    "map *3": _map(lambda x: x * 3),
    "map neg": _map(lambda x: -x),
    "map abs": _map(np.abs),
    "map sq": _map(lambda x: x * x),
    "map /2": _map(lambda x: x // 2),
    "map %3": _map(lambda x: x % 3),
    "keep even": _keep(lambda x: x % 2 == 0),
    "keep odd": _keep(lambda x: x % 2 == 1),
    "keep pos": _keep(lambda x: x > 0),
    "keep neg": _keep(lambda x: x < 0),
    "scan +": _scan(np.add),
    "scan max": _scan(np.maximum),
    "scan min": _scan(np.minimum),
}
NAMES = tuple(TABLE)  # a program is a row of indices into this tuple


def apply(name: str, lists: Lists) -> Lists:
    """Apply one operation to lists. Lists that have no result stay without one."""
    after = TABLE[name](lists)
    bad = (lists.lengths < 0) | (after.inside & (np.abs(after.values) > LARGEST)).any(axis=1)
    # Zeros behind the ends keep the numbers there from growing.
    return Lists(np.where(after.inside, after.values, 0), np.where(bad, -1, after.lengths).astype(np.int32))


def read_program(text: str) -> tuple[str, ...] | None:
    """Return the operations of a program, such as ("sort", "take 2"), or None if the text is not a program."""
    words = text.split(" ", 2 * MOST_OPERATIONS)
    names, place = list[str](), 0
    while place < len(words):
        size = 1 if words[place] in TABLE else 2
        names.append(" ".join(words[place : place + size]))
        if names[-1] not in TABLE:
            return None
        place += size
    return tuple(names) if len(names) <= MOST_OPERATIONS else None


def outputs(program: Sequence[str], inputs: Sequence[Sequence[int]]) -> list[List | None]:
    """Return the output of a program for each input, or None where there is no result."""
    lists = pack(inputs)
    for name in program:
        lists = apply(name, lists)
    return [tuple(row[:n]) if n >= 0 else None for row, n in zip(lists.values.tolist(), lists.lengths, strict=True)]


def pack(lists: Sequence[Sequence[int]]) -> Lists:
    """Return lists of numbers as `Lists`."""
    values = np.zeros((len(lists), max([1, *map(len, lists)])), np.int32)
    for row, numbers in zip(values, lists, strict=True):
        row[: len(numbers)] = numbers
    return Lists(values, np.array([len(numbers) for numbers in lists], np.int32))


# ---- tasks and answers


@dataclass(frozen=True)
class Task:
    """Examples of a function: those that the prompt shows, and those that are hidden."""

    visible: tuple[Example, ...]
    hidden: tuple[Example, ...] = ()

    @property
    def prompt(self) -> str:
        return f"{write_examples(self.visible)}:"

    @property
    def reference(self) -> str | None:
        """The hidden examples as text, as the grader `programs` reads them, or None if there are none."""
        return write_examples(self.hidden) if self.hidden else None

    @classmethod
    def parse(cls, prompt: str, reference: str | Sequence[str] | None = None) -> Task:
        """Return the task of a prompt. The reference, or each of several references, has hidden examples."""
        if not isinstance(prompt, str) or not prompt.endswith(":"):
            raise D5P4Error(f"a task is written like 3 1 2>1 2|5 4>4 5:, got {_shown(prompt)}")
        references = () if reference is None else (reference,) if isinstance(reference, str) else tuple(reference)
        hidden = tuple(example for text in references for example in read_examples(text))
        return cls(read_examples(prompt[:-1]), hidden)


def write_examples(examples: Sequence[Example]) -> str:
    return "|".join(f"{' '.join(map(str, given))}>{' '.join(map(str, wanted))}" for given, wanted in examples)


def read_examples(text: str) -> tuple[Example, ...]:
    """Return the examples in a text like `3 1 2>1 2|5 4>4 5`. An output may be empty."""
    examples = []
    for piece in text.split("|", MOST_EXAMPLES) if isinstance(text, str) else [None]:
        match = _EXAMPLE.fullmatch(piece) if piece is not None and len(piece) <= 8 * LONGEST_LIST else None
        if match is None:
            raise D5P4Error(f"examples are written like 3 1 2>1 2|5 4>4 5, got {_shown(piece)}")
        given, wanted = (tuple(map(int, (side or "").split())) for side in match.groups())
        examples.append((given, wanted))
    if len(examples) > MOST_EXAMPLES or max(max(map(len, example)) for example in examples) > LONGEST_LIST:
        raise D5P4Error(f"a task has at most {MOST_EXAMPLES} examples, and a list at most {LONGEST_LIST} numbers")
    return tuple(examples)


def is_right(task: Task | str, answer: str) -> bool:
    return fault(task, answer) is None


def fault(task: Task | str, answer: str) -> str | None:
    """Return the first fault of an answer in a few words, or None when the answer is right.

    `task` is a task or its prompt. A prompt has no hidden examples.
    """
    if not isinstance(task, Task):
        task = Task.parse(task)
    program = read_program(answer)
    if program is None:
        return f"{_shown(answer)} is not a program"
    examples = (*task.visible, *task.hidden)
    results = outputs(program, [given for given, _ in examples])
    for number, ((given, wanted), result) in enumerate(zip(examples, results, strict=True), 1):
        if result != wanted:
            gives = "has no result" if result is None else f"gives {' '.join(map(str, result)) or 'nothing'}"
            kind = "example" if number <= len(task.visible) else "hidden example"
            return f"{kind} {' '.join(map(str, given))}: {gives}, not {' '.join(map(str, wanted)) or 'nothing'}"
    return None


def _shown(text: object) -> str:
    return repr(text[:39] + "…" if isinstance(text, str) and len(text) > 40 else text)


# ---- the canonical form
#
# A rule replaces neighbouring operations by operations with the same results, wherever both sides have a result. Some
# rules swap two operations, mostly to move `keep` to the front and `map` to the back. The others shorten a program or
# replace an operation.

_FOLDS, _SCANS, _KEEPS = ("sum", "max", "min"), ("scan +", "scan max", "scan min"), ("keep even", "keep odd")
_LINEAR = ("map *2", "map *3", "map neg")  # f(a + b) = f(a) + f(b), and different numbers stay different
_RISING = ("map +1", "map -1", "map *2", "map *3", "map /2")  # f(a) <= f(b) for a <= b
_SAME_PARITY = ("map *3", "map neg", "map abs", "map sq")


@cache
def rules() -> dict[tuple[str, ...], tuple[str, ...]]:
    """Return {operations: equivalent operations}."""
    table = dict[tuple[str, ...], tuple[str, ...]]()

    def swap(first: Sequence[str], second: Sequence[str]) -> None:
        """Replace `a b` by `b a` for every a in `first` and b in `second`."""
        table.update({(a, b): (b, a) for a in first for b in second})

    def absorb(words: Sequence[str], into: Sequence[str], after: bool = False) -> None:
        """Drop a from `a b` (or, with `after`, from `b a`) for every a in `words` and b in `into`."""
        table.update({((b, a) if after else (a, b)): (b,) for a in words for b in into})

    maps = [name for name in NAMES if name.startswith("map")]
    takes = [name for name in NAMES if name.startswith("take")]
    signs = ("keep pos", "keep neg")
    swap(maps, ("reverse", "drop 1", "drop 2", *takes))
    swap(_RISING, ("sort", "max", "min", "scan max", "scan min"))
    swap(("map +1", "map -1", *_LINEAR), ("dedup",))
    swap(_LINEAR, ("diff", "sum", "scan +"))
    swap(_SAME_PARITY, _KEEPS)
    swap(("map *2", "map *3"), signs)
    swap(("dedup", "sort", "reverse"), (*_KEEPS, *signs))
    swap(signs, _KEEPS)
    swap(("sort",), ("dedup",))
    swap(_SCANS, takes)
    swap(("map *3",), ("map *2",))
    swap(("map neg",), ("map *2", "map *3"))
    swap(("drop 2",), ("drop 1",))
    absorb(("reverse",), ("sort",))
    absorb(("sort", "reverse"), _FOLDS)
    absorb(("dedup",), ("max", "min"))
    absorb(("map +1", "map -1"), ("diff",))
    absorb(("map neg", "map abs"), ("map sq",))
    absorb(("map neg",), ("map abs",))
    absorb(("scan max",), ("max",))
    absorb(("scan min",), ("min",))
    absorb(("map abs",), ("map sq", "map %3", "keep pos"), after=True)
    absorb(("sort", "reverse", "dedup", *_FOLDS, *_SCANS, *takes), _FOLDS, after=True)
    absorb(("sort", "reverse", "dedup", *_FOLDS, *_SCANS), ("take 1",), after=True)
    absorb(("sort",), ("scan max",), after=True)
    absorb(("scan max",), ("sort",), after=True)
    for name in ("sort", "dedup", "map abs", "map %3", *_KEEPS, *signs, "scan max", "scan min"):
        table[name, name] = (name,)
    for pair in (("reverse", "reverse"), ("map neg", "map neg"), ("map +1", "map -1"), ("map -1", "map +1")):
        table[pair] = ()
    table["map *2", "map /2"] = ()
    table["map *2", "keep even"] = ("map *2",)
    table["drop 1", "drop 1"] = ("drop 2",)
    table["sort", "take 1"] = ("min",)
    table["sort", "reverse", "take 1"] = ("max",)
    table["keep neg", "map abs"] = ("keep neg", "map neg")
    for many in (2, 3):
        for few in range(1, many + 1):
            table[f"take {many}", f"take {few}"] = table[f"take {few}", f"take {many}"] = (f"take {few}",)
    for shift in ("map +1", "map -1"):
        table[shift, "keep even"], table[shift, "keep odd"] = ("keep odd", shift), ("keep even", shift)
    for low, high in (("max", "min"), ("scan max", "scan min"), ("keep pos", "keep neg")):
        table["map neg", low], table["map neg", high] = (high, "map neg"), (low, "map neg")
    return table


def canonical(answer: str) -> str:
    """Return the canonical form of a program.

    Programs that differ by the rules above have the same form: `map *2 reverse` and `reverse map *2`, or `sort max` and
    `max`. Other programs may also compute the same function. A text that is not a program is returned unchanged.
    """
    program = read_program(answer)
    return answer if program is None else " ".join(reduced(program))


def reduced(program: tuple[str, ...]) -> tuple[str, ...]:
    """Apply the rules, the leftmost place first, until none applies."""
    table, place = rules(), 0
    while place < len(program) - 1:
        for size in (2, 3):
            if (new := table.get(program[place : place + size])) is not None:
                program = (*program[:place], *new, *program[place + size :])
                place = max(-1, place - 3)
                break
        place += 1
    return program
