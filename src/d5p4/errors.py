"""The one exception family users meet: each message is a sentence that names the bad value and the cure."""


class D5P4Error(ValueError):
    """Something the caller can put right. The command line prints it and exits with code 2."""


class NonFiniteLogits(D5P4Error):
    """The model produced NaN or infinite logits."""


class DuplicateAnswers(UserWarning):
    """Fewer than k distinct answers came out for some prompts."""
