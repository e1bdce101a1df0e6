"""Numeric kernels: plain torch references; each file is one operation under one name."""
