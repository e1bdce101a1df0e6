"""Models: diffusion models from their public checkpoints, and a wrapper for modules already in memory."""

from .bert import ESM, Albert, Bert, Roberta
from .check import check
from .convert import convert
from .llada import ILLaDA, LLaDA
from .load import load
from .mdlm import MDLM
from .qwen import SDAR, Dream, FastDLLM, FastDLLMLlama, LLaDA2, LLaDAMoE, SDARMoE, StableDiffCoder
from .tokenizer import Tokenizer
from .wrap import wrap

__all__ = ["ESM", "MDLM", "SDAR", "Albert", "Bert", "Dream", "FastDLLM", "FastDLLMLlama", "ILLaDA", "LLaDA", "LLaDA2"]
__all__ += ["LLaDAMoE", "Roberta", "SDARMoE", "StableDiffCoder", "Tokenizer", "check", "convert", "load", "wrap"]
