"""Modules that make d5p4 available inside other tools. Each module needs an optional extra of the package.

lm_eval  a model for the lm-evaluation-harness (extra `lm-eval`)
ray      a class that decodes data sets in Ray Data (extra `ray`)
"""
