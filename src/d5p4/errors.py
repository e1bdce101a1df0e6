"""The one exception family users meet: each message is a sentence that names the bad value and the cure."""

from collections.abc import Sequence


class D5P4Error(ValueError):
    """Something the caller can put right. The command line prints it and exits with code 2."""


class NonFiniteLogits(D5P4Error):
    """The model produced NaN or infinite logits; `prompts` are the numbers of the prompts it did so for."""

    def __init__(self, message: str, prompts: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.prompts = tuple(prompts)


class DuplicateAnswers(UserWarning):
    """Fewer than k distinct answers came out for some prompts."""
