"""Tests of kernels that run in Triton's interpreter, which tests/conftest.py asks for where there is no CUDA."""

import os

import numpy
import pytest

from d5p4.ops import kernels

interpreted = pytest.mark.skipif(
    not kernels.installed() or os.environ.get("TRITON_INTERPRET") != "1", reason="needs Triton's interpreter"
)


@pytest.fixture
def bfloat16_products(monkeypatch):
    """Repairs the interpreter's products of bfloat16 numbers: it would multiply their bit patterns as integers."""
    from triton import language as tl
    from triton.runtime import interpreter

    real = interpreter.InterpreterBuilder.create_dot

    def widen(x):
        if x.dtype.scalar != tl.bfloat16:
            return x
        bits = x.data.astype(numpy.uint32) << 16
        return interpreter.TensorHandle(bits.view(numpy.float32), tl.float32)

    monkeypatch.setattr(
        interpreter.InterpreterBuilder, "create_dot", lambda self, a, b, *rest: real(self, widen(a), widen(b), *rest)
    )
