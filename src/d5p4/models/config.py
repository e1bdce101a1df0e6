"""Reading values out of config.json, with errors that name the key and the value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import D5P4Error

Config = Mapping[str, Any]
LARGEST = 2**24  # no size of a model is larger; a slip of the pen must not fill the memory


def whole(config: Config, key: str, default: int | None = None) -> int:
    """A positive whole number; a missing or null key gives the default."""
    value = config.get(key)
    value = default if value is None else value
    if value is None:
        raise D5P4Error(f"config.json has no {key!r}, which this architecture needs: add it")
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= LARGEST:
        raise D5P4Error(f"config.json has {key}={value!r}, which should be a whole number from 1 to {LARGEST}")
    return value


def number(config: Config, key: str, default: float) -> float:
    """A positive number; a missing or null key gives the default."""
    value = config.get(key)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
        raise D5P4Error(f"config.json has {key}={value!r}, which should be a number above 0")
    return float(value)


def token(config: Config, key: str, vocabulary: int, default: int | None = None) -> int:
    """A token id inside the vocabulary."""
    value = config.get(key)
    value = default if value is None else value
    if value is None:
        raise D5P4Error(f"config.json has no {key!r}, which decoding needs: add the id")
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < vocabulary:
        raise D5P4Error(f"config.json has {key}={value!r}, which is not an id of its {vocabulary} tokens")
    return value


def flag(config: Config, key: str, default: bool = False) -> bool:
    value = config.get(key)
    value = default if value is None else value
    if not isinstance(value, bool):
        raise D5P4Error(f"config.json has {key}={value!r}, which should be true or false")
    return value


def only(config: Config, supported: Mapping[str, Any], architecture: str) -> None:
    """Refuse a key whose value is neither absent, null nor the one this code implements."""
    for key, wanted in supported.items():
        value = config.get(key)
        if value is not None and value != wanted:
            raise D5P4Error(
                f"config.json has {key}={value!r}, but d5p4's {architecture} implements only {key}={wanted!r}; "
                "load the model with its own code and pass it to d5p4.wrap instead"
            )


def divides(config: Config, key: str, whole_part: int, parts: int) -> int:
    """whole_part / parts, refused when it leaves a remainder."""
    if whole_part % parts:
        raise D5P4Error(f"config.json has {key}={parts}, which does not divide {whole_part}")
    return whole_part // parts
