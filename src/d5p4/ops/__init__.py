"""Numeric operations in plain torch. `kernels` has Triton versions of some of them under the same names."""
