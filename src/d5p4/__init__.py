"""d5p4: decode masked diffusion language models into sets of good answers that differ.

model = d5p4.load("GSAI-ML/LLaDA-8B-Instruct")
result = d5p4.generate(model, "Name a river.", k=4)
print(result.texts[0])
"""

import os
import signal
import sys

# OpenMP reads this variable when torch starts. Threads that spin while they wait slow down a busy machine.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# Importing torch takes some seconds. On the command line, Ctrl-C in this time ends the process without a traceback.
_command = os.path.basename(sys.argv[0] if sys.argv else "") in ("d5p4", "d5p4.exe", "-m")
_command = _command and signal.getsignal(signal.SIGINT) is signal.default_int_handler
if _command:
    signal.signal(signal.SIGINT, signal.SIG_DFL)

from .__about__ import __version__  # noqa: E402
from .decode import decode  # noqa: E402
from .decode.answers import Final  # noqa: E402
from .decode.batch import Arrivals  # noqa: E402
from .decode.schedule import Adaptive, Step, Table, make_schedule  # noqa: E402
from .decode.texts import Prompts  # noqa: E402
from .decode.view import PoolView  # noqa: E402
from .errors import D5P4Error, DuplicateAnswers, NonFiniteLogits  # noqa: E402
from .generate import generate  # noqa: E402
from .jobs import run_file  # noqa: E402
from .likelihood import loglikelihood  # noqa: E402
from .models import load, wrap  # noqa: E402
from .options import Option, Settings, load_plugins, register  # noqa: E402
from .prompts import prepare  # noqa: E402
from .result import Result  # noqa: E402
from .search import METHODS, ORDERS, REVEALS, Method, Order, Reveal  # noqa: E402  # noqa: E402
from .types import Choice, Head, Hidden, Kept, Model, Snapshot  # noqa: E402

if _command:
    signal.signal(signal.SIGINT, signal.default_int_handler)

__all__ = ["METHODS", "ORDERS", "REVEALS", "Adaptive", "Arrivals", "Choice", "D5P4Error", "DuplicateAnswers", "Final"]
__all__ += ["Head", "Hidden", "Kept", "Method", "Model", "NonFiniteLogits", "Option", "Order", "PoolView"]
__all__ += ["Prompts", "Result", "Reveal", "Settings", "Snapshot", "Step", "Table", "__version__", "decode"]
__all__ += ["generate", "load", "load_plugins", "loglikelihood", "make_schedule", "prepare", "register", "run_file"]
__all__ += ["wrap"]
