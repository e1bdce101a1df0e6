"""A grader says which answers to a prompt are right, and which right answers count as the same answer.

| name      | an answer is right when                                     | answers are the same when they share |
|-----------|-------------------------------------------------------------|--------------------------------------|
| gsm8k     | its number equals the number of a reference exactly         | the number                           |
| exact     | it equals a reference, both stripped and case-folded        | the stripped and case-folded text    |
| countdown | its steps solve the puzzle in the prompt (`eval.countdown`) | the canonical form of the steps      |
| programs  | it satisfies all examples (`eval.programs`)                 | the results for eight lists          |

`programs` takes examples from the prompt and from the reference, if there is one. Text is matched, never evaluated.
`register_grader` adds a grader of your own for `d5p4 score --grader NAME`. Commands that show answers use the grader
that the model's generation_config.json names: `{"d5p4": {"grader": "NAME"}}`.
"""

import re
import warnings
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from ..errors import D5P4Error, nearest
from . import countdown, programs

LONGEST = 100  # the most characters of a number; a longer run of digits is not read as a number

# No repeat of these patterns contains another repeat, so the time grows linearly with the length of the text.
# A minus is a sign, unless a letter, digit, closing bracket, percent sign or full stop stands directly before it.
# A comma belongs to a number only if exactly three digits follow it.
_SIGN = r"(?:(?<![\w)\]}%.])[-\u2212])?"
_DIGITS = r"(?:[0-9]+(?:,[0-9]{3}(?![0-9]))*(?:\.[0-9]+)?|(?<![\w.])\.[0-9]+)"
_NUMBER = re.compile(rf"({_SIGN})\$?({_SIGN})({_DIGITS})")

Grade = Callable[[Any, Sequence[str], Any], "list[bool] | None"]
"""`grade(prompt, texts, reference)` says for each text whether the text is right, or returns None if it cannot judge.

The prompt is what the user wrote: text, token ids or messages. The reference is one right value, a list of right
values, or None if no reference is known, as in `generate`, `compare`, `serve` and `view`.
"""


@dataclass(frozen=True)
class Grader:
    """The functions that tell which answers to a task are right and which are the same, and texts about the task."""

    name: str
    grade: Grade
    key: Callable[[str], Hashable] = str.strip  # texts with the same key are one answer; None means no answer
    needs: str = ""  # what the grader needs to judge a prompt, such as "a reference"; used in messages
    about: str = ""  # the task in one sentence; the playground shows it
    examples: Sequence[tuple[str, str]] = ()  # pairs (label, prompt) that the playground offers to try
    compares: bool = True  # whether references are answers; a report compares texts with them (F1, BLEU, R-COS)

    def count_right(self, texts: Sequence[str], right: Sequence[bool]) -> int:
        """Return the number of different right answers. `right` is what `grade` returned for these texts."""
        return len({self.key(text) for text, good in zip(texts, right, strict=True) if good})


GRADERS: dict[str, Grader] = {}


def register_grader(name: str, grade: Grade, **more: Any) -> Grader:
    """Register a grader under a name. The arguments are the fields of `Grader`."""
    new = Grader(name, grade, **more)
    if not isinstance(name, str) or not name or not callable(grade) or not callable(new.key):
        raise D5P4Error(f"a grader needs a name and two functions, got name={name!r:.60}, grade={grade!r}, {more}")
    if name in GRADERS:
        raise D5P4Error(f"there is already a grader {name!r}; choose another name")
    GRADERS[name] = new
    return new


def grader(name: str) -> Grader:
    """Return the grader of this name, or raise an error that names all graders."""
    if not isinstance(name, str) or name not in GRADERS:
        hint = nearest(str(name), GRADERS)
        raise D5P4Error(f"there is no grader {name!r:.60}; the graders are {', '.join(GRADERS)}{hint and '; ' + hint}")
    return GRADERS[name]


def grader_of(model: Any) -> Grader | None:
    """Return the grader that a model's generation_config.json names, or None. A wrong name causes a warning.

    It is not an error, because the model also works without a grader.
    """
    name = model.generation_defaults.get("grader")
    try:
        return None if name is None else grader(name)
    except D5P4Error as error:
        warnings.warn(f"answers of the model {model.name} are not marked right or wrong: {error}", stacklevel=2)
        return None


def gsm8k_number(text: str) -> Decimal | None:
    """Return the number that an answer to GSM8K ends with, or None if there is none of at most `LONGEST` characters.

    This is the first number after the last `####`, or the last number of the text if no number follows a `####`.
    Currency and percent signs, commas between thousands and a final full stop are dropped: `$1,234.50.` is 1234.5.
    Fractions and times are not understood: the number read from `1/2` is 2, and the number read from `3:30` is 30.
    """
    if not isinstance(text, str):
        raise D5P4Error(f"an answer to grade must be text, not {text!r:.60}")
    _, mark, tail = text.rpartition("####")
    match = _NUMBER.search(tail) if mark else None
    if match is None:
        *_, match = (None, *_NUMBER.finditer(text))
    if match is None or len(match[0]) > LONGEST:
        return None
    digits = match[3].replace(",", "")
    return Decimal(f"-{digits}" if match[1] or match[2] else digits)


def fold(text: str) -> str:
    if not isinstance(text, str):
        raise D5P4Error(f"answers and references to compare must be text, not {text!r:.60}")
    return text.strip().casefold()


def _by_key(key: Callable[[str], Hashable], read: Callable[[Any], Hashable]) -> Grade:
    """Return a `grade` function: an answer is right if its `key` equals the key that `read` takes from a reference."""

    def grade(prompt: Any, texts: Sequence[str], reference: Any) -> list[bool] | None:
        if reference is None:
            return None
        is_list = isinstance(reference, Sequence) and not isinstance(reference, (str, bytes))
        right_keys = [read(one) for one in (reference if is_list else [reference])]
        if not right_keys:
            raise D5P4Error("there is no reference to compare an answer with: the list of references is empty")
        return [key(text) in right_keys for text in texts]

    return grade


def _reference_number(reference: Any) -> Decimal:
    if isinstance(reference, (int, float)) and not isinstance(reference, bool):
        reference = f"{Decimal(str(reference)):f}"
    if (number := gsm8k_number(reference)) is None:
        raise D5P4Error(f"the reference {reference!r:.60} holds no number to compare an answer with")
    return number


def _by_task(read: Callable[..., Any], is_right: Callable[[Any, str], bool]) -> Grade:
    """Return a `grade` function for tasks that `read` takes from a prompt and, maybe, a reference."""

    def grade(prompt: Any, texts: Sequence[str], reference: Any) -> list[bool] | None:
        try:
            read(prompt)
        except D5P4Error:
            return None
        task = read(prompt, reference)  # a reference that cannot be read raises an error
        return [is_right(task, text) for text in texts]

    return grade


register_grader("gsm8k", _by_key(gsm8k_number, _reference_number), key=gsm8k_number, needs="a reference")
register_grader("exact", _by_key(fold, fold), key=fold, needs="a reference")
register_grader(
    "countdown",
    _by_task(countdown.Problem.parse, countdown.is_right),
    key=countdown.canonical,
    needs="a prompt written like 86,28,13,31:96",
    about="Reach the number after the colon with + − × ÷, using every other number exactly once.",
    examples=(
        ("four numbers", "86,28,13,31:96"),
        ("four more", "25,8,3,50:77"),
        ("three numbers", "7,12,5:47"),
        ("five numbers, hard", "3,75,9,44,12:61"),
    ),
)
register_grader(
    "programs",
    _by_task(programs.Task.parse, programs.is_right),
    key=programs.function_of,
    needs="a prompt written like 3 1 2>1 2|5 4>4 5:",
    compares=False,
    about="Write a program of list operations that turns each list before a > into the list after it.",
    examples=(
        ("two operations", "4 -7 2 9>2 4 9|-3 8 -1 6 1>1 6 8|5 -2 7>5 7:"),
        ("two more", "3 8 1 6>5 7 5|-2 5 5 9 0>7 0 4 9|7 -1 4>8 5:"),
        ("three operations", "5 2 9 -4>-3 3|8 -6 1 3 0>-5 1|-1 7 7 2>0 3:"),
        ("three more", "2 5 -1 8>16 8 7 2|6 -3 4 4 1>18 17 13 9 6|9 0 -5>14 9 9:"),
    ),
)
