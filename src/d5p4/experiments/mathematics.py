from typing import Any

from .setup import Case, Experiment, Setup

BOX: dict[str, Any] = {
    "model": "countdown", "judges": ("smollm2",), "task": "countdown:5", "k": 4, "w": 4, "gen_length": 48, "steps": 48,
    "units": 1000, "guidance": 1.0, "beta": (25.0, 100.0), "alpha": (20.0, 100.0), "order_temperature": 0.1, "eos": "last",
}  # fmt: skip
PAPER: dict[str, Any] = BOX | {
    "model": "GSAI-ML/LLaDA-8B-Instruct", "judges": ("meta-llama/Meta-Llama-3-8B",), "task": "gsm8k", "gen_length": 256,
    "steps": 256, "units": 1319, "guidance": 2.5, "beta": (25.0,), "alpha": (20.0,), "eos": "free",
}  # fmt: skip
ORDERS = {
    "confidence": {"order": "confidence", "temperature": 1.0},
    "tempered": {"order": "tempered", "temperature": 1.0},
    "tempered argmax": {"order": "tempered", "temperature": 0.0},
}


def cases(setup: Setup) -> list[Case]:
    found = []
    for order, rule in ORDERS.items():
        common = {name: setup[name] for name in ("gen_length", "steps", "guidance", "eos")} | rule
        if order != "confidence":
            common["order_temperature"] = setup["order_temperature"]
        beam = common | {"k": setup["k"], "w": setup["w"]}
        ways = {
            "pool": common | {"method": "independent", "k": setup["k"] * setup["w"]},
            "greedy beam": beam | {"method": "greedy-beam"},
        }
        ways |= {f"diverse beam α {a:g}": beam | {"method": "diverse-beam", "alpha": a} for a in setup["alpha"]}
        ways |= {f"D5P4+ β {b:g}": beam | {"method": "d5p4", "beta": b} for b in setup["beta"]}
        found += [Case(f"{order}: {n}", options, setup["units"], setup["task"], order) for n, options in ways.items()]
    return found


def draw(setup):
    raise NotImplementedError


EXPERIMENT = Experiment("math", "Coverage of right answers", "GSM8K tables", {"box": BOX, "paper": PAPER}, draw, cases, scorers=("ppl",))
