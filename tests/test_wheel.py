"""What users install: a wheel built from the repository, in an environment that holds nothing else, offline."""

import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PUZZLE = "86,28,13,31:96"


def run(*command, cwd, **environment):
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "D5P4"))}
    done = subprocess.run(list(map(str, command)), cwd=cwd, capture_output=True, text=True, env=kept | environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.full
def test_an_installed_wheel_solves_a_puzzle_offline(tmp_path):
    run(sys.executable, "-m", "build", "--wheel", "--outdir", tmp_path, ROOT, cwd=tmp_path)
    (wheel,) = tmp_path.glob("*.whl")
    venv.create(tmp_path / "empty", with_pip=True)
    binaries = tmp_path / "empty" / ("Scripts" if os.name == "nt" else "bin")
    run(binaries / "python", "-m", "pip", "install", "-qq", "-c", ROOT / "constraints.txt", wheel, cwd=tmp_path)
    offline = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "COLUMNS": "120"}
    call = [PUZZLE, "--model", "countdown", "--gen-length", "36", "--seed", "0"]
    answers = run(binaries / "d5p4", "generate", *call, cwd=tmp_path, **offline)
    assert "=96" in answers and "4 of 4 distinct" in answers
    compared = run(binaries / "d5p4", "compare", *call, "--methods", "independent,d5p4", cwd=tmp_path, **offline)
    assert "independent" in compared and "d5p4" in compared and "=96" in compared
    run(binaries / "d5p4", "trace", *call, "-o", "trace.html", cwd=tmp_path, **offline)
    assert "=96" in (tmp_path / "trace.html").read_text(encoding="utf-8")
