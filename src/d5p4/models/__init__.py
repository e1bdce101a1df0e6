"""Models: diffusion models from their public checkpoints, and a wrapper for modules already in memory."""

from .check import check
from .llada import ILLaDA, LLaDA
from .load import load
from .mdlm import MDLM
from .qwen import SDAR, Dream, FastDLLM, FastDLLMLlama, LLaDA2, LLaDAMoE, SDARMoE, StableDiffCoder
from .tokenizer import Tokenizer
from .wrap import wrap

__all__ = ["MDLM", "SDAR", "Dream", "FastDLLM", "FastDLLMLlama", "ILLaDA", "LLaDA", "LLaDA2", "LLaDAMoE"]
__all__ += ["SDARMoE", "StableDiffCoder", "Tokenizer", "check", "load", "wrap"]
