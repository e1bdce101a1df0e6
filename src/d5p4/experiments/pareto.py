from .open_ended import BOX, PAPER, sweeps
from .setup import Experiment


def draw(setup):
    raise NotImplementedError


EXPERIMENT = Experiment("pareto", "Quality against diversity, open-ended", "Fig. pareto and dynamics", {"box": BOX, "paper": PAPER}, draw, sweeps, scorers=("ppl", "cos"))
