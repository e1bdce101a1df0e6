"""The kernels compile for an H200. Needs no GPU: Triton brings the assembler."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton comes with the dev extra on Linux")

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize("what", ["some", pytest.param("all", marks=pytest.mark.full)])
def test_kernels_compile_for_an_h200(what, tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
    program = [sys.executable, str(Path(__file__).with_name("compile_all.py")), what]
    done = subprocess.run(program, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert {"_solve", "_draw", "_products", "_norm_rotate", "_attend_stored"} <= set(done.stdout.split())
