from typing import Any

from .setup import Case, Experiment, Setup

BOX: dict[str, Any] = {
    "model": "countdown", "tasks": ("countdown:4", "countdown:5"), "k": 4, "units": 1000, "beta": 100.0,
    "w": (2, 4, 8, 16), "more": (4, 6, 8, 12, 16, 24, 32),
}  # fmt: skip
PAPER: dict[str, Any] = BOX | {
    "model": "GSAI-ML/LLaDA-8B-Instruct", "tasks": ("gsm8k",), "units": 1319, "beta": 25.0, "more": (4, 8, 16, 32),
}  # fmt: skip
LENGTHS = {"countdown:4": 36, "countdown:5": 48, "gsm8k": 256}


def cases(setup: Setup) -> list[Case]:
    found = []
    for task in setup["tasks"]:
        length = LENGTHS[task]
        common = {"gen_length": length, "steps": length, "temperature": 1.0, "order": "confidence"}
        beam = common | {"k": setup["k"], "method": "d5p4", "beta": setup["beta"]}
        ways = [("independent", f"{m} answers", common | {"method": "independent", "k": m}, m) for m in setup["more"]]
        ways += [("D5P4+", f"w {w}", beam | {"w": w}, w) for w in setup["w"]]
        ways += [("distinct", f"w {w}", beam | {"w": w, "distinct": True}, w) for w in setup["w"]]
        for group, name, options, value in ways:
            found.append(Case(f"{task} {group}, {name}", options, setup["units"], task, group, float(value)))
    return found


def draw(setup):
    raise NotImplementedError


EXPERIMENT = Experiment("budget", "Coverage against rows", "ours", {"box": BOX, "paper": PAPER}, draw, cases)
