from __future__ import annotations

from typing import Any

import pytest
from typer.testing import CliRunner

import d5p4
from d5p4_lab.__main__ import app
from tests.cli.conftest import Cli, fails, models, write  # noqa: F401


@pytest.fixture(autouse=True)
def registries():
    """Benchmarks register variants of methods and rules. Other tests must not see them."""
    kinds = d5p4.METHODS, d5p4.ORDERS, d5p4.REVEALS
    before = [dict(kind) for kind in kinds]
    yield
    for kind, items in zip(kinds, before, strict=True):
        kind.clear()
        kind.update(items)


@pytest.fixture
def cli(monkeypatch) -> Cli:
    """Run the lab's command line in this process."""
    monkeypatch.setenv("COLUMNS", "100")

    def call(*arguments: object, stdin: str | None = None) -> Any:
        return CliRunner().invoke(app, [str(a) for a in arguments], input=stdin)

    return call
