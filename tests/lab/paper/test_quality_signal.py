"""The model's own scores, their statistics, and the experiment around them."""

import zlib
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy import stats

import d5p4
from d5p4_lab.paper import quality_signal
from d5p4_lab.paper.quality_signal import regression, signals, stronger
from tests.checkpoints import write_llada, write_mdlm
from tests.lab.paper.smoke import smoke, write_truthfulqa
from tests.lab.paper.test_windows import write_texts

TINY = {"length": 24, "real": 5, "samples": [[1.0, 4], [0.5, 3]], "each": 3, "draws": 4, "judges": ["judge"]}


@pytest.mark.parametrize("write", [write_mdlm, write_llada])
def test_signals_against_plain_softmax(tmp_path, write):
    model = d5p4.load(write(tmp_path / "tiny"), device="cpu", dtype="float64")
    ids = torch.randint(0, 40, (9,), generator=torch.Generator().manual_seed(0))
    masked = torch.zeros(3, 9, dtype=torch.bool)
    masked[0, 2] = masked[1, ::2] = masked[2] = True
    measured = signals(model, ids.tolist(), masked)
    for i, mask in enumerate(masked):
        states = model.body(torch.where(mask, model.mask_id, ids)[None]).states[0]
        logits = states @ model.head.weight.T + (0 if model.head.bias is None else model.head.bias)
        logp = logits[:, ~model.head.banned].log_softmax(-1)
        entropy = -(logp.exp() * logp).sum(-1)
        scored = entropy * mask if model.carry_over else entropy
        assert measured["entropy"][i] == pytest.approx(-float(scored.mean()), abs=1e-6)
        assert measured["masked entropy"][i] == pytest.approx(-float(entropy[mask].mean()), abs=1e-6)
        plain = logits.log_softmax(-1)  # as the authors compute it: all ids, all positions
        assert measured["literal entropy"][i] == pytest.approx(float((plain.exp() * plain).sum(-1).mean()), abs=1e-6)
        assert measured["literal certainty"][i] == pytest.approx(-float(plain.mean()), abs=1e-6)
        assert measured["certainty"][i] == pytest.approx(-float(logp.mean(-1)[mask].mean()), abs=1e-6)
        truth = (logits.masked_fill(model.head.banned, -torch.inf).log_softmax(-1)).gather(1, ids[:, None])[:, 0]
        assert measured["bound"][i] == pytest.approx(float(truth[mask].mean()), abs=1e-6)


def test_statistics_against_scipy_and_numpy():
    source = np.random.default_rng(0)
    nats = source.normal(size=80).round(1)  # with ties
    good, poor = -nats + 0.3 * source.normal(size=80), -nats + 3 * source.normal(size=80)
    expected = stats.spearmanr(poor, nats)[0] - stats.spearmanr(good, nats)[0]
    lead = stronger(good, poor, nats)
    assert lead.value == pytest.approx(expected) and 0 < lead.low < lead.value < lead.high
    assert stronger(poor, good, nats).high < 0
    slope, intercept = regression(good, nats)
    assert (slope.value, intercept.value) == pytest.approx(tuple(np.polyfit(good, nats, 1)))
    assert slope.low < slope.value < slope.high < 0


@pytest.mark.parametrize("layout", ["mdlm", "llada"])
def test_quality_signal(tmp_path, monkeypatch, layout):
    """As in the paper: MDLM on a text, or LLaDA on questions with their answers."""

    def judge(name: str, *_: object) -> SimpleNamespace:
        return SimpleNamespace(per_text=lambda texts: torch.tensor([zlib.crc32(t.encode()) / 2**30 for t in texts]))

    monkeypatch.setattr(quality_signal, "_judge", judge)
    if layout == "mdlm":
        model, data, changes = write_mdlm(tmp_path / "mdlm"), write_texts(tmp_path / "texts.txt"), TINY
    else:
        model, data = write_llada(tmp_path / "llada"), write_truthfulqa(tmp_path / "qa.jsonl", 5)
        changes = TINY | {"texts": "truthfulqa", "samples": []}
    _, summary = smoke("quality-signal", tmp_path / "out", changes, model=str(model), data=data)
    tested = {claim["claim"].split("'")[0]: claim["n"] for claim in summary["claims"] if "agrees" in claim["claim"]}
    assert tested == ({"MDLM": [5], "LLaDA": []} if layout == "mdlm" else {"MDLM": [], "LLaDA": [5]})
