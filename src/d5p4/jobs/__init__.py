"""Whole files of prompts: read, decoded by one process or many, stopped and carried on."""

from .reader import BadLine, PromptFile, PromptLine, read_prompts
from .report import Pace, Report
from .run import run_file

__all__ = ["BadLine", "Pace", "PromptFile", "PromptLine", "Report", "read_prompts", "run_file"]
