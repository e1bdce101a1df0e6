from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from d5p4.cli import app
from tests.checkpoints import write_llada, write_mdlm

Cli = Callable[..., Any]


@pytest.fixture(scope="session")
def models(tmp_path_factory) -> SimpleNamespace:
    """Paths of tiny checkpoints."""
    root = tmp_path_factory.mktemp("models")
    defaults = {"d5p4": {"k": 3, "temperature": 0.8}}
    broken = write_llada(root / "broken")
    weights = load_file(broken / "model.safetensors")
    weights["model.transformer.ff_out.weight"][5] = torch.nan
    save_file(weights, broken / "model.safetensors")
    return SimpleNamespace(
        llada=str(write_llada(root / "llada")),
        chat=str(write_llada(root / "chat", chat=True, generation=defaults)),
        mdlm=str(write_mdlm(root / "mdlm")),
        broken=str(broken),
    )


@pytest.fixture
def cli(monkeypatch) -> Cli:
    """Run the command line in this process."""
    monkeypatch.setenv("COLUMNS", "100")

    def call(*arguments: object, stdin: str | None = None) -> Any:
        return CliRunner().invoke(app, [str(a) for a in arguments], input=stdin)

    return call


@pytest.fixture
def fails(cli: Cli) -> Callable[..., str]:
    """Run a command that has to end in one sentence and code 2; the sentence."""

    def call(*arguments: object) -> str:
        found = cli(*arguments)
        assert found.exit_code == 2, (found.output, found.exception)
        assert isinstance(found.exception, SystemExit)
        assert found.stdout == ""
        assert found.stderr.startswith("error: ") and found.stderr.count("\n") == 1
        return found.stderr

    return call


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    def call(name: str, *lines: str) -> Path:
        path = tmp_path / name
        path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
        return path

    return call
