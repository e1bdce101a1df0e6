"""The exceptions that users meet. The fields of an error hold its facts, so that no program has to parse its message.

`str(error)` is the message for Python. It says what is wrong, which value is wrong, and what to do. The command line
and the server make their own messages from the same fields (`D5P4Error.phrase`).
"""

import difflib
import reprlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

ABSENT: Any = type("Absent", (), {"__repr__": lambda self: "ABSENT"})()


class D5P4Error(ValueError):
    """An error that the caller can correct. The command line prints it and exits with code 2.

    reason   the message without its subject, such as "must be a whole number of at least 1"
    option   the Python name of the option that is wrong
    value    the value of that option
    prompt   the number of the prompt that is wrong, counted from 0
    line     the number of the wrong line in a file, counted from 1
    """

    def __init__(
        self,
        reason: str,
        *,
        option: str | None = None,
        value: Any = ABSENT,
        prompt: int | None = None,
        line: int | None = None,
    ) -> None:
        super().__init__(reason)
        self.reason, self.option, self.value, self.prompt, self.line = reason, option, value, prompt, line

    def phrase(self, rename: Callable[[str], str] = str, place: str | None = None) -> str:
        """Return the message. `rename` turns the Python name of the option into the name to show. `place` replaces
        "prompt 3" (or another number) at the start of the message. An empty `place` removes this start."""
        text = self.reason
        if self.option is not None:
            name = rename(self.option)
            text = f"{name}: {text}" if self.value is ABSENT else f"{name}={shown(self.value)} {text}"
        if place is None and self.prompt is not None:
            place = f"prompt {self.prompt}"
        return f"{place}: {text}" if place else text

    def __str__(self) -> str:
        return self.phrase()


class NonFiniteLogits(D5P4Error):
    """The model produced NaN or infinite logits. `prompts` are the numbers of the prompts with such logits."""

    def __init__(self, message: str, prompts: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.prompts = tuple(prompts)


class DuplicateAnswers(UserWarning):
    """A warning that some prompts have fewer than k distinct answers."""


def nearest(name: str, known: Iterable[str]) -> str:
    """Return a text such as "did you mean temperature?", or an empty text if no known name is close."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"did you mean {close[0]}?" if close else ""


def shown(value: Any) -> str:
    """Return a value as text for a message. Long or deeply nested values are shortened."""
    return _SHORT.repr(value)


_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 80
_SHORT.maxlevel = 3
_SHORT.maxtuple = _SHORT.maxlist = _SHORT.maxdict = 8
