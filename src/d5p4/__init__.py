"""d5p4: decode masked diffusion language models into sets of good answers that differ.

    model = d5p4.load("GSAI-ML/LLaDA-8B-Instruct")
    result = d5p4.generate(model, "Name a river.", k=4)
    print(result.texts[0])
"""

from . import select
from .__about__ import __version__
from .decode import decode
from .errors import D5P4Error, DuplicateAnswers, NonFiniteLogits
from .generate import generate
from .likelihood import loglikelihood
from .methods import METHODS, Method, register
from .models import load, wrap
from .rows import Prompts
from .schedule import make_schedule
from .settings import Settings
from .types import Choice, Final, Head, Hidden, HistoryStep, Kept, Model, PoolView, Result, Schedule, Snapshot, Step

__all__ = [
    "METHODS",
    "Choice",
    "D5P4Error",
    "DuplicateAnswers",
    "Final",
    "Head",
    "Hidden",
    "HistoryStep",
    "Kept",
    "Method",
    "Model",
    "NonFiniteLogits",
    "PoolView",
    "Prompts",
    "Result",
    "Schedule",
    "Settings",
    "Snapshot",
    "Step",
    "__version__",
    "decode",
    "generate",
    "load",
    "loglikelihood",
    "make_schedule",
    "register",
    "select",
    "wrap",
]
