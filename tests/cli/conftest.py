from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import d5p4
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
def processes(tmp_path: Path) -> Callable[..., list[SimpleNamespace]]:
    """Run commands side by side, each in a process of its own.

    A command is (arguments, where standard output goes, more of an environment); output may be "" (kept), a path,
    "closed" or "unread".
    """

    def call(*commands: tuple[list[object], str, dict[str, str]]) -> list[SimpleNamespace]:
        place, started = os.environ | {"PYTHONPATH": str(Path(d5p4.__file__).parents[1]), "OMP_NUM_THREADS": "1"}, []
        for words, out, environment in commands:
            target = {"": '"$@"', "closed": '"$@" >&-', "unread": '"$@" | true; exit ${PIPESTATUS[0]}'}
            command = [
                "bash",
                "-c",
                target.get(out, f'"$@" >{out}'),
                "",
                sys.executable,
                "-m",
                "d5p4",
                *map(str, words),
            ]
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": tmp_path}
            started.append(subprocess.Popen(command, env=place | environment, **pipes))
        printed = [process.communicate(timeout=100) for process in started]
        return [
            SimpleNamespace(code=process.returncode, stdout=stdout, stderr=stderr)
            for process, (stdout, stderr) in zip(started, printed, strict=True)
        ]

    return call


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    def call(name: str, *lines: str) -> Path:
        path = tmp_path / name
        path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
        return path

    return call
