"""Numeric operations in plain torch. `kernels` has Triton versions of some operations under the same names."""
