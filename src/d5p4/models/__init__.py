"""Models: MDLM, LLaDA and Dream from their public checkpoints, and a wrapper for modules already in memory."""

from __future__ import annotations

from .check import CheckLine, check
from .dream import Dream
from .llada import LLaDA
from .load import load
from .mdlm import MDLM
from .tokenizer import Tokenizer
from .wrap import wrap

__all__ = ["MDLM", "CheckLine", "Dream", "LLaDA", "Tokenizer", "check", "load", "wrap"]
