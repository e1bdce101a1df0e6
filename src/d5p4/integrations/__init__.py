"""Modules that make d5p4 available inside other tools. Most of them need an optional extra of the package.

lm_eval  a model for the lm-evaluation-harness (extra `lm-eval`)
ray      a class that decodes data sets in Ray Data (extra `ray`)
rl       rollouts for reinforcement learning, for TRL and other trainers (no extra; examples/grpo_trl.py needs `rl`)
"""
