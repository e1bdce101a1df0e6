"""Files of prompts."""

from .reader import PromptLine, prompt_keys, read_prompts

__all__ = ["PromptLine", "prompt_keys", "read_prompts"]
