"""Graders: is an answer right, and which answers are the same answer. Text is only matched, never evaluated.

| name      | right when                                                 | the same answer (`key`)           |
|-----------|------------------------------------------------------------|-----------------------------------|
| gsm8k     | its number is the number of a reference, as exact decimals | the number                        |
| exact     | stripped and case-folded it is a reference, treated alike  | the stripped and case-folded text |
| countdown | the checker of `eval.countdown` finds no fault             | the canonical form of the steps   |
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from ..errors import D5P4Error
from .countdown import Problem, canonical, is_right

LONGEST = 100  # characters of a number; a longer run of digits is no number

_MARK = "####"
# One way to match at each place and no nested repeats: time grows with the length of the text and no faster. A minus is
# a sign unless it follows something to subtract from; a comma belongs to a number only before exactly three digits.
_SIGN = r"(?:(?<![\w)\]}%.])[-\u2212])?"
_DIGITS = r"(?:[0-9]+(?:,[0-9]{3}(?![0-9]))*(?:\.[0-9]+)?|(?<![\w.])\.[0-9]+)"
_NUMBER = re.compile(rf"({_SIGN})\$?({_SIGN})({_DIGITS})")


@dataclass(frozen=True)
class Grader:
    """How the answers of a task are judged."""

    name: str
    right: Callable[[str, Any], bool]  # (text, reference): the reference is a text, or a list of which any one will do
    key: Callable[[str], Hashable]  # what majority voting counts and distinct answers differ in; None is no answer


def gsm8k_number(text: str) -> Decimal | None:
    """The number an answer to GSM8K ends with: the first after the last `####`, else the last in the text.

    `$1,234.50.` is 1234.5; a currency sign, a percent sign, the commas between thousands and a full stop go. Only the
    usual rule: of `1/2` the last number is 2, of `3:30` it is 30. None when there is no number, or when it is one of
    more than `LONGEST` characters.
    """
    if not isinstance(text, str):
        raise D5P4Error(f"an answer to grade is text, not {text!r:.60}")
    _, mark, tail = text.rpartition(_MARK)
    found = _NUMBER.search(tail) if mark else None
    if found is None:
        for found in _NUMBER.finditer(text):  # noqa: B007 (the last one is wanted)
            pass
    if found is None or len(found[0]) > LONGEST:
        return None
    digits = found[3].replace(",", "")
    return Decimal(f"-{digits}" if found[1] or found[2] else digits)


def grader(name: str) -> Grader:
    """A grader by its name."""
    if name not in GRADERS:
        raise D5P4Error(f"there is no grader {name!r}: choose one of {', '.join(GRADERS)}")
    return GRADERS[name]


def _each(reference: Any) -> list[Any]:
    """One reference or a list of them, as a list."""
    many = isinstance(reference, Sequence) and not isinstance(reference, (str, bytes))
    found = list(reference) if many else [reference]
    if not found:
        raise D5P4Error("there is no reference to compare an answer with: the list is empty")
    return found


def _gold(reference: Any) -> Decimal:
    is_number = isinstance(reference, (int, float)) and not isinstance(reference, bool)
    number = gsm8k_number(f"{Decimal(str(reference)):f}" if is_number else reference)
    if number is None:
        raise D5P4Error(f"the reference {reference!r:.60} holds no number to compare an answer with")
    return number


def _right_number(text: str, reference: Any) -> bool:
    number = gsm8k_number(text)
    return any([number == _gold(one) for one in _each(reference)])  # a list: every reference is checked


def _folded(text: str) -> str:
    if not isinstance(text, str):
        raise D5P4Error(f"answers and references to compare are text, not {text!r:.60}")
    return text.strip().casefold()


def _right_text(text: str, reference: Any) -> bool:
    return _folded(text) in [_folded(one) for one in _each(reference)]


def _right_steps(text: str, reference: Problem | str | Sequence[Problem | str]) -> bool:
    return any([is_right(one, text) for one in _each(reference)])


GRADERS = {
    made.name: made
    for made in (
        Grader("gsm8k", _right_number, gsm8k_number),
        Grader("exact", _right_text, _folded),
        Grader("countdown", _right_steps, canonical),
    )
}
