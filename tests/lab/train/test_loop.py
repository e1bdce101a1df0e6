"""A run can be stopped anywhere and continued to the same weights, and nothing bad is kept or overwritten."""

from __future__ import annotations

import io
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import d5p4
from d5p4.errors import D5P4Error
from d5p4_lab.train import loop
from d5p4_lab.train.countdown import Countdown
from d5p4_lab.train.folder import STATE
from d5p4_lab.train.loop import Budget, train
from d5p4_lab.train.optimiser import Muon

STEPS, STOP = 12, 6
SHAPE = {"d_model": 16, "n_layers": 1, "n_heads": 2, "n_kv_heads": 2, "mlp_hidden_size": 32}


class Gone(BaseException):
    """The process is killed."""


class Tiny(Countdown):
    """Countdown at the smallest size; can end with an exception in the middle of step `stop`."""

    rows = 8

    def __init__(self, seed: int = 0, stop: int | None = None, how: type[BaseException] = KeyboardInterrupt) -> None:
        super().__init__(torch.device("cpu"), seed, toy=True)
        self.stop, self.how, self.losses = stop, how, 0
        self.drawn: list[int] = []  # the seeds of the masks, by step
        self.exact: dict[str, Tensor] = {}  # the final weights before rounding

    @property
    def config(self) -> dict[str, Any]:
        return super().config | SHAPE

    def loss(self, model: Any, batch: Any, generator: torch.Generator) -> Tensor:
        value = super().loss(model, batch, generator)
        if self.losses == self.stop:
            raise self.how
        self.losses += 1
        self.drawn.append(generator.initial_seed())
        return value

    def tensors(self, model: Any) -> dict[str, Tensor]:
        tensors = super().tensors(model)
        self.exact = {name: tensor.detach().clone() for name, tensor in tensors.items()}
        return tensors

    def validate(self, folder: Path) -> dict[str, float]:
        return {"figure": 0.5}


class NotANumber(Tiny):
    """The loss of step 3 and of all later steps is NaN."""

    def loss(self, model: Any, batch: Any, generator: torch.Generator) -> Tensor:
        value = super().loss(model, batch, generator)
        return value * (torch.nan if self.losses > 3 else 1.0)


def quiet(_: str) -> None:
    pass


def finished(recipe: Tiny, out: Path, steps: int = STEPS) -> dict[str, Tensor]:
    train(recipe, out, Budget(steps=steps), say=quiet)
    assert not (out / STATE).exists()
    return recipe.exact


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.fixture(scope="module")
def straight(tmp_path_factory) -> dict[str, Tensor]:
    return finished(Tiny(), tmp_path_factory.mktemp("straight"))


def stopped(out: Path, stop: int = STOP, how: type[BaseException] = KeyboardInterrupt) -> Path:
    with pytest.raises(how):
        train(Tiny(stop=stop, how=how), out, Budget(steps=STEPS), say=quiet)
    return out / STATE


def step_of(state: Path) -> int:
    return torch.load(state, weights_only=True)["step"]


def test_a_run_is_a_function_of_its_seed(straight, tmp_path: Path) -> None:
    again = Tiny()
    assert same(straight, finished(again, tmp_path / "again"))
    assert len(set(again.drawn)) == STEPS, "two steps have the same masks"
    assert not same(straight, finished(Tiny(seed=1), tmp_path / "other"))


@pytest.mark.parametrize("stop", [0, pytest.param(STOP, marks=pytest.mark.full), STEPS - 1])
def test_an_interrupted_run_continues_to_the_same_weights(straight, tmp_path: Path, stop: int) -> None:
    assert step_of(stopped(tmp_path, stop)) == stop
    assert same(straight, finished(Tiny(), tmp_path))


def test_an_interrupt_while_the_weights_change_waits_for_the_whole_step(straight, tmp_path: Path, monkeypatch) -> None:
    turn, steps = Muon.step, []

    def interrupted(self: Muon, scale: float) -> None:
        turn(self, scale)  # before AdamW and the average
        steps.append(scale)
        if len(steps) == STOP:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(Muon, "step", interrupted)
    outside = signal.signal(signal.SIGINT, signal.default_int_handler)  # shells ignore it in the background
    try:
        with pytest.raises(KeyboardInterrupt):
            train(Tiny(), tmp_path, Budget(steps=STEPS), say=quiet)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, outside)
    assert step_of(tmp_path / STATE) == STOP
    assert same(straight, finished(Tiny(), tmp_path))


def test_a_killed_run_continues_from_its_last_state(straight, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(loop, "SAVE_SECONDS", 0.0)
    assert step_of(stopped(tmp_path, how=Gone)) == STOP
    lines: list[str] = []
    again = Tiny()
    train(again, tmp_path, Budget(steps=STEPS), say=lines.append)
    assert lines[0].startswith(f"continuing from step {STOP},")
    assert again.losses == STEPS - STOP
    assert same(straight, again.exact)


def test_a_crash_while_saving_leaves_the_state_before(straight, tmp_path: Path, monkeypatch) -> None:
    state = stopped(tmp_path)
    whole = state.read_bytes()

    def dies(content: Any, path: Path) -> None:
        buffer = io.BytesIO()
        write(content, buffer)
        Path(path).write_bytes(buffer.getvalue()[: len(buffer.getvalue()) // 2])
        raise Gone

    write = torch.save
    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", dies)
        patch.setattr(loop, "SAVE_SECONDS", 0.0)
        with pytest.raises(Gone):
            train(Tiny(), tmp_path, Budget(steps=STEPS), say=quiet)
    assert state.read_bytes() == whole
    assert same(straight, finished(Tiny(), tmp_path))
    assert not list(tmp_path.glob("*.half"))


def test_a_failing_validation_does_not_lose_the_training(straight, tmp_path: Path) -> None:
    class Fails(Tiny):
        def validate(self, folder: Path) -> dict[str, float]:
            raise Gone

    with pytest.raises(Gone):
        train(Fails(), tmp_path, Budget(steps=STEPS), say=quiet)
    again = Tiny()
    assert same(straight, finished(again, tmp_path))
    assert again.losses == 0, "nothing was trained twice"


def test_a_state_cut_short_or_of_other_settings_does_not_continue_a_run(tmp_path: Path) -> None:
    class Wider(Tiny):
        @property
        def config(self) -> dict[str, Any]:
            return super().config | {"mlp_hidden_size": 48}

    class Longer(Tiny):
        rows = 9

    state = stopped(tmp_path)
    before = state.read_bytes()
    for recipe, message in (
        (Tiny(seed=3), "seed=0, not 3"),
        (Wider(), "config=.*'mlp_hidden_size': 32.*not .*'mlp_hidden_size': 48"),
        (Longer(), "rows=8, not 9"),
    ):
        with pytest.raises(D5P4Error, match=message):
            train(recipe, tmp_path, Budget(steps=STEPS), say=quiet)
    assert state.read_bytes() == before
    for kept in (0, 10, len(before) // 2, len(before) - 1):
        state.write_bytes(before[:kept])
        with pytest.raises(D5P4Error, match=r"training\.state cannot be read.*delete it to start again"):
            train(Tiny(), tmp_path, Budget(steps=STEPS), say=quiet)


def test_a_loss_that_is_no_number_writes_no_model_and_replaces_no_good_state(tmp_path: Path, monkeypatch) -> None:
    with pytest.raises(D5P4Error, match="the loss is nan by step 6"):
        train(NotANumber(), tmp_path, Budget(steps=6), say=quiet)
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(loop, "SAVE_SECONDS", 0.0)
    with pytest.raises(D5P4Error, match="the loss is nan by step 4"):
        train(NotANumber(), tmp_path, Budget(steps=STEPS), say=quiet)
    state = torch.load(tmp_path / STATE, weights_only=True)
    assert state["step"] == 3
    assert all(tensor.isfinite().all() for tensor in state["parameters"])


def test_the_loss_falls_and_is_printed(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(loop, "LINE_SECONDS", 1e-9)

    class Roomy(Tiny):
        rows = 32

    lines: list[str] = []
    train(Roomy(), tmp_path, Budget(steps=40), say=lines.append)
    losses = [float(line.split("loss ")[1].split()[0]) for line in lines if "tokens/s" in line]
    assert len(losses) == 39, "a line for every step after the first"
    assert sum(losses[-10:]) < 0.85 * sum(losses[:10])
    assert "figure: 0.5" in lines


def test_what_is_written_is_the_average_and_says_how_it_was_made(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("sys.argv", ["__main__.py", "train", "tiny"])
    recipe = Tiny(seed=5)
    finished(recipe, tmp_path)
    loaded = dict(d5p4.load(tmp_path, device="cpu").named_parameters())
    rounded = {name: tensor.bfloat16().float() for name, tensor in recipe.exact.items()}
    assert all(torch.equal(loaded[name.removeprefix("model.transformer.")], rounded[name]) for name in rounded)
    card = (tmp_path / "README.md").read_text()
    command = "| command | `python -m d5p4_lab train tiny"
    for fact in ("| seed | 5 |", f"| steps | {STEPS} of 8 rows", command, "| hardware | ", "| figure | 0.5 |"):
        assert fact in card


def test_the_average_forgets_the_first_weights(tmp_path: Path, monkeypatch) -> None:
    """Steps 0, 1, 2 keep 1/10, 2/11, 3/12 of the old average."""
    seen: list[Tensor] = []
    advance = loop.Run.advance

    def watched(self: loop.Run, batch: Any, scale: float) -> Tensor:
        if not seen:
            seen.append(next(self.model.parameters()).detach().clone())
        value = advance(self, batch, scale)
        seen.append(next(self.model.parameters()).detach().clone())
        return value

    monkeypatch.setattr(loop.Run, "advance", watched)
    average = next(iter(finished(Tiny(), tmp_path, steps=3).values()))
    mean = seen[0]
    for step, now in enumerate(seen[1:]):
        keep = (1 + step) / (10 + step)
        mean = keep * mean + (1 - keep) * now
    torch.testing.assert_close(average, mean)
