"""Tests of kernels that run in Triton's interpreter, which tests/conftest.py asks for where there is no CUDA."""

import os

import pytest

from d5p4.ops import kernels

interpreted = pytest.mark.skipif(
    not kernels.installed() or os.environ.get("TRITON_INTERPRET") != "1", reason="needs Triton's interpreter"
)
