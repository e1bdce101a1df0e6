from .open_ended import BOX, PAPER, independent, sweep
from .scoring import pack
from .setup import Case, Experiment, Setup

REFERENCE = "reference"


def cases(setup: Setup) -> list[Case]:
    units = {value: setup["units_fidelity"] for value in setup["beta_fidelity"]}
    return [
        independent(setup, setup["units_fidelity"]),
        *sweep(setup, "D5P4+", {"method": "d5p4"}, "beta", setup["beta_fidelity"], units=units),
    ]


def reference(setup: Setup):
    """Features of real text, as many texts as a case has, each cut to the length that is generated."""
    return setup.measured(REFERENCE, judge=setup["judges"][0], length=setup["gen_length"], model=setup.weights)


def measure(setup: Setup) -> None:
    from ..eval.mauve import last_token_features
    from ..eval.perplexity import CausalJudge

    held, count = reference(setup), setup["units_fidelity"] * setup["k"]
    missing = [unit for unit in range(count) if unit not in held]
    if not missing:
        return
    setup.progress(0.0, "features of real text")
    codec, judge = setup.model.tokenizer, CausalJudge(setup["judges"][0], device=setup.device)
    examples = setup.task("text", count).examples
    texts = [codec.decode(codec.encode(examples[unit].references[0])[: setup["gen_length"]]) for unit in missing]
    features = last_token_features(judge, texts, max_tokens=1024, max_tokens_per_batch=1 << 13)
    held.add_all({str(unit): pack(row[None]) for unit, row in zip(missing, features, strict=True)})


def draw(setup):
    raise NotImplementedError


EXPERIMENT = Experiment("fidelity", "Fidelity to real text", "Fig. mauve", {"box": BOX, "paper": PAPER}, draw, cases, measure, scorers=("features",))
