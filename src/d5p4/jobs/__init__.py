"""Whole files of prompts: decoded by one process or many, and continued after a stop."""

from .output import Pace, Report
from .reader import BadLine, PromptFile, PromptLine, read_prompts
from .run import run_file

__all__ = ["BadLine", "Pace", "PromptFile", "PromptLine", "Report", "read_prompts", "run_file"]
