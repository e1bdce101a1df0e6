from .continuation import BOX, PAPER, pool, search
from .setup import Case, Experiment, Setup

STRENGTHS = {"guidances": (1, 1.5, 2, 2.5, 3)}


def cases(setup: Setup) -> list[Case]:
    found = []
    for guidance in setup["guidances"]:
        found += [
            pool(setup, guidance),
            search(setup, "greedy beam", {"method": "greedy-beam"}, guidance),
            search(setup, "D5P4+", {"method": "d5p4", "beta": setup["beta"]}, guidance),
        ]
    return found


def draw(setup):
    raise NotImplementedError


EXPERIMENT = Experiment("guidance", "Diversity and accuracy under guidance", "Fig. cfg and appendix", {"box": dict(BOX) | STRENGTHS, "paper": dict(PAPER) | STRENGTHS}, draw, cases, scorers=("ppl", "cos"))
