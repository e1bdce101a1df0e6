from .continuation import BOX, PAPER, pool, search
from .setup import Case, Experiment, Setup


def cases(setup: Setup) -> list[Case]:
    guidance = setup["guidance"]
    half = {"method": "d5p4-p", "beta": setup["beta"]}
    return [
        pool(setup, guidance),
        search(setup, "greedy beam", {"method": "greedy-beam"}, guidance),
        search(setup, "diverse beam", {"method": "diverse-beam", "alpha": setup["alpha"]}, guidance),
        search(setup, "D5P4+", {"method": "d5p4", "beta": setup["beta"]}, guidance),
        search(setup, "D5P4^P", half, guidance),
    ]


def draw(setup):
    raise NotImplementedError


EXPERIMENT = Experiment("qa", "Answers to prompts with references", "QA tables", {"box": BOX, "paper": PAPER}, draw, cases, scorers=("ppl", "cos"))
