from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from d5p4.cli import build
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
    """Run the command line in this process, a hundred columns wide whatever the terminal is."""
    monkeypatch.setenv("COLUMNS", "100")
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("FORCE_TERMINAL", "MAX_WIDTH"):  # read from the environment on import
        monkeypatch.setattr(f"typer.rich_utils.{name}", None, raising=False)

    def call(*arguments: object, stdin: str | None = None) -> Any:
        return CliRunner().invoke(build(), [str(a) for a in arguments], input=stdin)

    return call


@pytest.fixture
def fails(cli: Cli) -> Callable[..., str]:
    """Run a command that has to end in one sentence and code 2; the sentence."""

    def call(*arguments: object) -> str:
        outcome = cli(*arguments)
        assert outcome.exit_code == 2, (outcome.output, outcome.exception)
        assert isinstance(outcome.exception, SystemExit)
        assert outcome.stdout == ""
        assert outcome.stderr.startswith("error: ") and outcome.stderr.count("\n") == 1
        return outcome.stderr

    return call


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    def call(name: str, *lines: str) -> Path:
        path = tmp_path / name
        path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
        return path

    return call
