"""The examples run as written."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.checkpoints import write_llada

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
SCRIPTS = sorted(p.name for p in EXAMPLES.glob("*.py") if p.name != "demo.py")  # `make demo` runs that one


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_llada(tmp_path_factory.mktemp("llada"), generation={"d5p4": {"length": 12}})


@pytest.mark.parametrize("script", SCRIPTS)
def test_runs(script, folder):
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(EXAMPLES / script), str(folder), "a __ cat"],
        capture_output=True, text=True, env=os.environ | {"PYTHONIOENCODING": "utf-8", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) >= 2


def test_there_are_examples():
    assert len(SCRIPTS) >= 5


def test_what_the_readme_calls_is_there():
    """`import d5p4` is enough for the names the README uses."""
    code = "import d5p4; d5p4.distributed.connect; d5p4.run_file; d5p4.select.partition_map; d5p4.loglikelihood"
    subprocess.run([sys.executable, "-c", code], check=True)
