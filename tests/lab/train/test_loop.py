"""A run can be stopped anywhere and continued to the same weights, and nothing bad is kept or overwritten."""

import json

import pytest
import torch

import d5p4
from d5p4_lab.train import loop
from d5p4_lab.train.countdown import Countdown
from d5p4_lab.train.folder import STATE
from d5p4_lab.train.loop import Budget, train
from tests.refusals import refusal

STEPS, STOP = 12, 6


class Gone(BaseException):
    """The process is killed."""


class Tiny(Countdown):
    """Countdown at the smallest size; can end with an exception in the middle of step `stop`."""

    small = {"d_model": 16, "n_layers": 1, "n_heads": 2, "n_kv_heads": 2, "mlp_hidden_size": 32}
    batch_rows = (8, 8)

    def __init__(self, seed=0, stop=None, bad=None):
        super().__init__(torch.device("cpu"), seed, toy=True)
        self.stop, self.bad, self.losses = stop, bad, 0
        self.drawn = []  # the seeds of the masks, by step
        self.exact = {}  # the final weights before rounding

    def loss(self, model, batch, generator):
        value = super().loss(model, batch, generator)
        if self.losses == self.stop:
            raise Gone
        self.losses += 1
        self.drawn.append(generator.initial_seed())
        return value * (torch.nan if self.bad is not None and self.losses > self.bad else 1.0)

    def tensors(self, model):
        tensors = super().tensors(model)
        self.exact = {name: tensor.detach().clone() for name, tensor in tensors.items()}
        return tensors

    def validate(self, folder):
        return {"figure": 0.5}


def quiet(_):
    pass


def finished(recipe, out, steps=STEPS):
    train(recipe, out, Budget(steps=steps), say=quiet)
    assert not (out / STATE).exists()
    return recipe.exact


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    return finished(Tiny(), tmp_path_factory.mktemp("straight"))


@pytest.fixture
def every_step(monkeypatch):
    """A state is saved after every step but the first."""
    monkeypatch.setattr(loop, "SAVE_SECONDS", 0.0)


def stopped(out):
    with pytest.raises(Gone):
        train(Tiny(stop=STOP), out, Budget(steps=STEPS), say=quiet)
    return out / STATE


def test_a_run_is_a_function_of_its_seed(straight, tmp_path):
    again = Tiny()
    assert same(straight, finished(again, tmp_path / "again"))
    assert len(set(again.drawn)) == STEPS, "two steps have the same masks"
    assert not same(straight, finished(Tiny(seed=1), tmp_path / "other"))


def test_a_stopped_run_continues_from_its_last_state_to_the_same_weights(straight, tmp_path, every_step):
    state = stopped(tmp_path)
    assert torch.load(state, weights_only=True)["step"] == STOP
    (tmp_path / "training.half").write_bytes(state.read_bytes()[:1000])  # the process died while it wrote again
    lines, again = [], Tiny()
    train(again, tmp_path, Budget(steps=STEPS), say=lines.append)
    assert lines[0].startswith(f"continuing from step {STOP},") and again.losses == STEPS - STOP
    assert same(straight, again.exact) and not list(tmp_path.glob("*.half"))
    finished(Tiny(), tmp_path / "straight")
    assert (tmp_path / loop.LOG).read_text() == (tmp_path / "straight" / loop.LOG).read_text()


def test_a_failing_validation_does_not_lose_the_training(straight, tmp_path):
    class Fails(Tiny):
        def validate(self, folder):
            raise Gone

    with pytest.raises(Gone):
        train(Fails(), tmp_path, Budget(steps=STEPS), say=quiet)
    again = Tiny()
    assert same(straight, finished(again, tmp_path))
    assert again.losses == 0, "nothing was trained twice"


def test_a_state_cut_short_or_of_other_settings_does_not_continue_a_run(tmp_path, every_step):
    class Wider(Tiny):
        small = Tiny.small | {"mlp_hidden_size": 48}

    class Longer(Tiny):
        batch_rows = (9, 9)

    state = stopped(tmp_path)
    before = state.read_bytes()
    assert "budget='12 steps', not '3 steps'" in refusal(train, Tiny(), tmp_path, Budget(steps=3), say=quiet)
    for recipe, expected in ((Tiny(seed=3), "seed=0, not 3"), (Wider(), "config="), (Longer(), "rows=8, not 9")):
        assert expected in refusal(train, recipe, tmp_path, Budget(steps=STEPS), say=quiet)
    assert state.read_bytes() == before
    for kept in (0, len(before) // 2, len(before) - 1):
        state.write_bytes(before[:kept])
        assert "delete it to start again" in refusal(train, Tiny(), tmp_path, Budget(steps=STEPS), say=quiet)


def test_a_loss_that_is_no_number_writes_no_model_and_replaces_no_good_state(tmp_path, every_step):
    assert "the loss is nan by step 4" in refusal(train, Tiny(bad=3), tmp_path, Budget(steps=STEPS), say=quiet)
    assert [path.name for path in tmp_path.iterdir()] == [STATE]
    state = torch.load(tmp_path / STATE, weights_only=True)
    assert state["step"] == 3 and all(tensor.isfinite().all() for tensor in state["parameters"])


def test_the_loss_falls_and_is_printed(tmp_path, monkeypatch):
    monkeypatch.setattr(loop, "LINE_SECONDS", 1e-9)

    class Roomy(Tiny):
        batch_rows = (32, 32)

    lines = []
    train(Roomy(), tmp_path, Budget(steps=40), say=lines.append)
    losses = [float(line.split("loss ")[1].split()[0]) for line in lines if "tokens/s" in line]
    assert len(losses) == 39, "a line for every step after the first"
    assert sum(losses[-10:]) < 0.85 * sum(losses[:10]) and "figure: 0.5" in lines
    *log, figures = map(json.loads, (tmp_path / loop.LOG).read_text().splitlines())
    assert [line["step"] for line in log] == [25, 40] and figures == {"figure": 0.5}
    assert log[1]["loss"] == pytest.approx(sum(losses[-15:]) / 15, abs=1e-4)
    assert f"| {log[0]['loss']} at first, {log[1]['loss']} at the end" in (tmp_path / "README.md").read_text()


def test_a_run_goes_on_when_its_parts_cannot_be_compiled(straight, tmp_path):
    class Broken(Tiny):
        def compile(self, model):
            def compiler(graph, inputs):
                raise RuntimeError("no compiler\nhere")

            for layer in model.modules():
                layer.compile(backend=compiler)

    recipe, lines = Broken(), []
    try:
        train(recipe, tmp_path, Budget(steps=STEPS), compiled=True, say=lines.append)
    finally:
        torch.compiler.set_stance("default")
    assert any("the compiled step failed" in line and "no compiler here" in line for line in lines)
    assert same(straight, recipe.exact)


def test_what_is_written_is_the_average_and_says_how_it_was_made(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["__main__.py", "train", "tiny"])
    recipe = Tiny(seed=5)
    exact = finished(recipe, tmp_path)
    model = d5p4.load(tmp_path, device="cpu")
    loaded = {model.stored_names(name): weight for name, weight in model.named_parameters()}
    assert {name: loaded[name].shape for name in exact} == {name: exact[name].shape for name in loaded}
    assert all(torch.equal(loaded[name], exact[name].bfloat16().float()) for name in exact)
    card = (tmp_path / "README.md").read_text()
    command = "| command | `python -m d5p4_lab train tiny"
    for fact in ("| seed | 5 |", f"| steps | {STEPS} of 8 rows", command, "| hardware | ", "| figure | 0.5 |"):
        assert fact in card
