"""Files of prompts."""

from .reader import PromptLine, read_prompts

__all__ = ["PromptLine", "read_prompts"]
