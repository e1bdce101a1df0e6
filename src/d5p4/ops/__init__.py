"""Numeric operations in plain torch, one file each; `kernels` holds their Triton versions under the same names."""
