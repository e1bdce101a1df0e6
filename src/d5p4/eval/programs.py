"""Programs from examples: the language, its interpreter, and the checker of answers.

A task shows examples of a function from lists to lists. The prompt `4 -7 2 9>2 4 9|-3 8 -1 6 1>1 6 8|5 -2 7>5 7:` has,
among others, the answer `keep pos sort`. A program is a pipeline of operations (`TABLE`): each one takes the list of
the one before it. A program has no result for a list if a number leaves -99..99, or if it takes the sum, maximum or
minimum of no numbers. An answer is right if it is a program with the wanted output for every example: those of the
prompt, and hidden ones if the task has a reference. Text is matched, never evaluated, and its length is limited.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from ..errors import D5P4Error, shown

LARGEST = 99  # numbers are -99..99
LONGEST_LIST, MOST_OPERATIONS, MOST_EXAMPLES = 32, 8, 32  # the most that a prompt or a program may have

_NUMBER = "-?[1-9][0-9]?|0"
_LIST = f"(?:{_NUMBER})(?: (?:{_NUMBER}))*"
_EXAMPLE = re.compile(f"({_LIST})>({_LIST})?")

List = tuple[int, ...]
Example = tuple[List, List]  # input and output
Operation = Callable[[List], Iterable[int]]

TABLE: dict[str, Operation] = {
    "sort": sorted,
    "reverse": lambda numbers: numbers[::-1],
    "dedup": dict.fromkeys,
    "diff": lambda numbers: [after - before for before, after in pairwise(numbers)],
    "sum": lambda numbers: [sum(numbers)],
    "max": lambda numbers: [max(numbers)],
    "min": lambda numbers: [min(numbers)],
    "take 1": lambda numbers: numbers[:1],
    "take 2": lambda numbers: numbers[:2],
    "take 3": lambda numbers: numbers[:3],
    "drop 1": lambda numbers: numbers[1:],
    "drop 2": lambda numbers: numbers[2:],
    "map +1": lambda numbers: [x + 1 for x in numbers],
    "map -1": lambda numbers: [x - 1 for x in numbers],
    "map *2": lambda numbers: [x * 2 for x in numbers],
    "map *3": lambda numbers: [x * 3 for x in numbers],
    "map neg": lambda numbers: [-x for x in numbers],
    "map abs": lambda numbers: [abs(x) for x in numbers],
    "map sq": lambda numbers: [x * x for x in numbers],
    "map /2": lambda numbers: [x // 2 for x in numbers],
    "map %3": lambda numbers: [x % 3 for x in numbers],
    "keep even": lambda numbers: [x for x in numbers if x % 2 == 0],
    "keep odd": lambda numbers: [x for x in numbers if x % 2 == 1],
    "keep pos": lambda numbers: [x for x in numbers if x > 0],
    "keep neg": lambda numbers: [x for x in numbers if x < 0],
    "scan +": accumulate,
    "scan max": lambda numbers: accumulate(numbers, max),
    "scan min": lambda numbers: accumulate(numbers, min),
}
NAMES = tuple(TABLE)
FOLDS = ("sum", "max", "min")
PROBES: tuple[List, ...] = (  # the lists whose results tell functions apart
    (3, -7, 8, 0, -4, 5),
    (-2, 6, 6, 1, -9),
    (9, 4, -1, -6),
    (-5, -8, 2),
    (7, 7, -3, 8, 2, -2),
    (1, -4, -4, 9, 3),
    (0, 2, 5, -1, 6, -8),
    (4, 1, -3, 2),
)


def output(program: Iterable[str], numbers: List) -> List | None:
    """Return the output of a program, given as names of operations. The output is None if there is no result."""
    for name in program:
        if not numbers and name in FOLDS:
            return None
        numbers = tuple(TABLE[name](numbers))
        if numbers and (max(numbers) > LARGEST or min(numbers) < -LARGEST):
            return None
    return numbers


def read_program(text: str) -> tuple[str, ...] | None:
    """Return the operations of a program, such as ("sort", "take 2"), or None if the text is not a program."""
    words = text.split(" ", 2 * MOST_OPERATIONS)
    names = list[str]()
    while words:
        size = 1 if words[0] in TABLE else 2
        names.append(" ".join(words[:size]))
        words = words[size:]
    return tuple(names) if len(names) <= MOST_OPERATIONS and TABLE.keys() >= set(names) else None


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
            raise D5P4Error(f"a task is written like 3 1 2>1 2|5 4>4 5:, got {shown(prompt)}")
        references = [reference] if isinstance(reference, str) else reference or ()
        return cls(read_examples(prompt[:-1]), tuple(one for text in references for one in read_examples(text)))


def write_examples(examples: Sequence[Example]) -> str:
    return "|".join(f"{' '.join(map(str, given))}>{' '.join(map(str, wanted))}" for given, wanted in examples)


def read_examples(text: str) -> tuple[Example, ...]:
    """Return the examples in a text like `3 1 2>1 2|5 4>4 5`. An output may be empty."""
    examples = []
    for piece in text.split("|", MOST_EXAMPLES) if isinstance(text, str) else [None]:
        match = _EXAMPLE.fullmatch(piece) if piece is not None and len(piece) <= 8 * LONGEST_LIST else None
        if match is None:
            raise D5P4Error(f"examples are written like 3 1 2>1 2|5 4>4 5, got {shown(piece)}")
        given, wanted = (tuple(map(int, (side or "").split())) for side in match.groups())
        examples.append((given, wanted))
    if len(examples) > MOST_EXAMPLES or max(max(map(len, example)) for example in examples) > LONGEST_LIST:
        raise D5P4Error(f"a task has at most {MOST_EXAMPLES} examples, and a list at most {LONGEST_LIST} numbers")
    return tuple(examples)


def is_right(task: Task | str, answer: str) -> bool:
    return fault(task, answer) is None


def fault(task: Task | str, answer: str) -> str | None:
    """Return the first fault of an answer to a task (or its prompt) in a few words, or None if the answer is right."""
    task = task if isinstance(task, Task) else Task.parse(task)
    if (program := read_program(answer)) is None:
        return f"{shown(answer)} is not a program"
    for number, (given, wanted) in enumerate((*task.visible, *task.hidden), 1):
        if (result := output(program, given)) != wanted:
            gives = "has no result" if result is None else f"gives {' '.join(map(str, result)) or 'nothing'}"
            kind = "example" if number <= len(task.visible) else "hidden example"
            return f"{kind} {' '.join(map(str, given))}: {gives}, not {' '.join(map(str, wanted)) or 'nothing'}"
    return None


def function_of(answer: str) -> Hashable:
    """Return the results of a program for `PROBES`, or the text itself if it is not a program.

    Programs of the same function, such as `map *2 reverse` and `reverse map *2`, have the same results.
    """
    program = read_program(answer)
    return answer if program is None else tuple(output(program, probe) for probe in PROBES)
