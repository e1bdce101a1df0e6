"""Modules that make d5p4 available inside other tools: the lm-evaluation-harness, Ray Data and RL trainers."""
