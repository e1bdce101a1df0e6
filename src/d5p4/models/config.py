"""Reads values from config.json. Errors name the key and the value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import D5P4Error

Config = Mapping[str, Any]
LARGEST = 2**24  # a larger size is surely a mistake in the file, and would fill the memory


def whole(config: Config, key: str, default: int | None = None, least: int = 1, most: int = LARGEST) -> int:
    """Return a whole number from `least` to `most`, or the default if the key is missing or null."""
    value = default if config.get(key) is None else config[key]
    if value is None:
        raise D5P4Error(f"config.json has no {key!r}, which this architecture needs: add it")
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise D5P4Error(f"config.json has {key}={value!r}, which should be a whole number from {least} to {most}")
    return value


def number(config: Config, key: str, default: float) -> float:
    """Return a positive number, or the default if the key is missing or null."""
    value = default if config.get(key) is None else config[key]
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
        raise D5P4Error(f"config.json has {key}={value!r}, which should be a number above 0")
    return float(value)


def flag(config: Config, key: str) -> bool:
    """Return true or false. A missing or null key means false."""
    value = config.get(key)
    if not isinstance(value, bool | None):
        raise D5P4Error(f"config.json has {key}={value!r}, which should be true or false")
    return bool(value)


def only(config: Config, supported: Mapping[str, Any], architecture: str) -> None:
    """Raise an error if a key has a value that this code does not implement. A key may also be missing or null."""
    for key, wanted in supported.items():
        value = config.get(key)
        if value is not None and value != wanted:
            raise D5P4Error(
                f"config.json has {key}={value!r}, but d5p4's {architecture} implements only {key}={wanted!r}; "
                "load the model with its own code and pass it to d5p4.wrap instead"
            )


def divides(config: Config, key: str, whole_part: int, parts: int) -> int:
    """Return the whole number divided by the number of parts, or raise an error if there is a remainder."""
    if whole_part % parts:
        raise D5P4Error(f"config.json has {key}={parts}, which should divide {whole_part} without a remainder")
    return whole_part // parts
