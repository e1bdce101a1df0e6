"""Decode whole files of prompts, in one process or many, and continue after a stop.

A run decodes one file. Each call of `run_file` is a start of the run, and the next start continues where the last one
stopped. A rank is one process of a start. Each rank appends its finished lines to a file of its own, called a part.
"""

from .output import Pace, Report
from .reader import BadLine, PromptFile, PromptLine, read_prompts
from .run import run_file

__all__ = ["BadLine", "Pace", "PromptFile", "PromptLine", "Report", "read_prompts", "run_file"]
