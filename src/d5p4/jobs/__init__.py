"""Decode whole files of prompts, in one process or many, and continue after a stop.

A run decodes one file. Each call of `run_file` for this file is a start of the run. A start continues where the last
start stopped. A rank is one process of a start. Each rank appends finished lines to its own file, called a part.
"""

from .output import Pace, Report
from .reader import PromptFile, PromptLine
from .run import run_file

__all__ = ["Pace", "PromptFile", "PromptLine", "Report", "run_file"]
