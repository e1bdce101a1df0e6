"""The training loop. It averages the weights, prints progress lines, and saves a state that survives a kill."""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from d5p4.errors import D5P4Error

from ..provenance import command
from .folder import STATE, hardware, refuse_occupied, write_card, write_json, write_weights
from .optimiser import Optimiser, rate_scale
from .recipe import Recipe

AVERAGE = 0.999  # after each step, average = AVERAGE * average + (1 - AVERAGE) * weights
SAVE_SECONDS = 20.0
LINE_SECONDS = 10.0


@dataclass(frozen=True)
class Budget:
    """The length of a run: seconds of training, or a number of steps. Only a number of steps makes a run repeatable."""

    seconds: float | None = None
    steps: int | None = None

    def __str__(self) -> str:
        return f"{self.steps} steps" if self.steps is not None else f"{self.seconds} s"

    def progress(self, step: int, seconds: float) -> float:
        """Return the progress of a run: 0 at the start, 1 at the end."""
        if self.steps is not None:
            return min(1.0, step / self.steps)
        assert self.seconds is not None
        return min(1.0, seconds / self.seconds)


@dataclass
class Run:
    """One training run, with everything that is needed to continue it."""

    recipe: Recipe
    budget: Budget
    model: nn.Module
    optimiser: Optimiser
    average: list[Tensor]  # the running average of each parameter
    step: int = 0
    seconds: float = 0.0  # seconds of training, without compiling, saving and validating

    @classmethod
    def fresh(cls, recipe: Recipe, budget: Budget) -> Run:
        torch.manual_seed(recipe.seed)
        model = recipe.build().to(recipe.device)
        optimiser = Optimiser(model.named_parameters(), *recipe.rates)
        return cls(recipe, budget, model, optimiser, [p.detach().clone() for p in model.parameters()])

    def _terms(self) -> dict[str, Any]:
        """Return the facts that must be the same in a stopped run and in its continuation, such as the seed."""
        recipe = self.recipe
        return {
            "recipe": recipe.name,
            "config": recipe.config,
            "seed": recipe.seed,
            "rows": recipe.rows,
            "data": recipe.data,
            "budget": str(self.budget),
        }

    def save(self, path: Path) -> None:
        state = {
            "terms": self._terms(),
            "step": self.step,
            "seconds": self.seconds,
            "parameters": [p.detach() for p in self.model.parameters()],
            "average": self.average,
            "optimiser": self.optimiser.state_dict(),
        }
        half = path.with_suffix(".half")
        torch.save(state, half)
        os.replace(half, path)  # a kill during `torch.save` cannot damage the last complete state

    @torch.no_grad()
    def restore(self, path: Path) -> None:
        try:
            state = torch.load(path, map_location=self.recipe.device, weights_only=True)
            terms = dict(state["terms"])
        except Exception as reason:
            why = (str(reason).splitlines() or [type(reason).__name__])[0][:80]
            raise D5P4Error(f"{path} cannot be read ({why}): delete it to start again") from reason
        for name, now in self._terms().items():
            if terms.get(name) != now:
                raise D5P4Error(
                    f"{path} belongs to a run with {name}={terms.get(name)!r}, not {now!r}: "
                    "use the same settings or another folder"
                )
        for parameter, saved in zip(self.model.parameters(), state["parameters"], strict=True):
            parameter.copy_(saved)
        for mean, saved in zip(self.average, state["average"], strict=True):
            mean.copy_(saved)
        self.optimiser.load_state_dict(state["optimiser"])
        self.step, self.seconds = state["step"], state["seconds"]

    def advance(self, batch: Any, scale: float) -> Tensor:
        """Take one training step and return its loss."""
        autocast = torch.autocast(self.recipe.device.type, torch.bfloat16, enabled=self.recipe.device.type == "cuda")
        with autocast:
            loss = self.recipe.loss(self.model, batch, self.recipe.generator(self.step))
        loss.backward()
        with delayed_interrupts(), torch.no_grad():
            self.optimiser.step(scale)
            # In the first steps the average keeps less of its old value, because the first weights are noise.
            keep = min(AVERAGE, (1 + self.step) / (10 + self.step))
            torch._foreach_lerp_(self.average, [p.detach() for p in self.model.parameters()], 1 - keep)
            self.step += 1
        return loss.detach()

    @torch.no_grad()
    def use_average(self) -> None:
        for parameter, mean in zip(self.model.parameters(), self.average, strict=True):
            parameter.copy_(mean)


def train(
    recipe: Recipe, out: Path, budget: Budget, compiled: bool = False, say: Callable[[str], None] = print
) -> dict[str, float]:
    """Train a model, write it to `out` and return its figures. If `out` has the state of a stopped run, continue it."""
    refuse_occupied(out)
    state = out / STATE
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as reason:
        raise D5P4Error(f"the folder {out} cannot be created ({reason.strerror})") from reason
    run = Run.fresh(recipe, budget)
    if state.exists():
        run.restore(state)
        say(f"continuing from step {run.step:,}, {run.seconds:.0f} s of training")
    size = sum(p.numel() for p in run.model.parameters())
    batch = f"{recipe.rows:,} rows x {recipe.row_length} tokens per step"
    say(f"{recipe.name}: {size:,} parameters, {batch}, on {hardware(recipe.device)}")
    if compiled:
        recipe.compile(run.model)
    try:
        _steps(run, state, say)
    except KeyboardInterrupt:
        run.save(state)
        say(f"stopped at step {run.step:,}; the same command continues from here")
        raise
    run.save(state)  # saved first, so that an error in validation does not lose the training
    run.use_average()
    return _finish(run, out, say)


def _steps(run: Run, state: Path, say: Callable[[str], None]) -> None:
    recipe, budget = run.recipe, run.budget
    tokens = recipe.rows * recipe.row_length
    losses = torch.zeros((), device=recipe.device)
    counted, last_line, last_save = 0, run.seconds, run.seconds
    first = True
    clock = time.perf_counter()
    for batch in recipe.batches(run.step):
        progress = budget.progress(run.step, run.seconds)
        if progress >= 1:
            break
        losses += run.advance(batch, rate_scale(run.step, progress))
        counted += 1
        now = time.perf_counter()
        if first:  # the first step includes compilation, so its time is not counted
            loss = _finite(losses, run.step)  # reading the loss waits until the device has finished the step
            now = time.perf_counter()
            say(f"first step after {now - clock:.0f} s, loss {loss:.4f}")
            losses.zero_()
            counted, first = 0, False
        else:
            run.seconds += now - clock
        clock = now
        if run.seconds - last_line >= LINE_SECONDS or (counted and budget.progress(run.step, run.seconds) >= 1):
            mean = _finite(losses, run.step) / counted
            rate = counted * tokens / max(run.seconds - last_line, 1e-9)
            done = budget.progress(run.step, run.seconds)
            say(f"step {run.step:7,}  {done:6.1%}  {run.seconds:5.0f} s  loss {mean:.4f}  {rate:12,.0f} tokens/s")
            losses.zero_()
            counted, last_line = 0, run.seconds
        if run.seconds - last_save >= SAVE_SECONDS:
            _finite(losses, run.step)  # raises an error before a bad state replaces a good state
            run.save(state)
            last_save, clock = run.seconds, time.perf_counter()
    _finite(losses, run.step)


def _finite(losses: Tensor, step: int) -> float:
    total = float(losses)
    if not math.isfinite(total):
        raise D5P4Error(f"the loss is {total} by step {step}: training failed, try another seed")
    return total


def _finish(run: Run, out: Path, say: Callable[[str], None]) -> dict[str, float]:
    recipe = run.recipe
    recipe.write_tokenizer(out)
    size = write_weights(out, recipe.tensors(run.model))
    write_json(out / "config.json", recipe.config)
    figures = recipe.validate(out)
    facts = {
        "parameters": f"{sum(p.numel() for p in run.model.parameters()):,}",
        "weights": f"{size / 2**20:.1f} MiB, bfloat16",
        "seed": str(recipe.seed),
        "steps": f"{run.step:,} of {recipe.rows:,} rows x {recipe.row_length} tokens",
        "training time": f"{run.seconds:.0f} s (without compiling)",
        "hardware": hardware(recipe.device),
        "command": f"`{command()}`",
    }
    write_card(out, recipe.card, facts, figures)
    recipe.tidy()
    (out / STATE).unlink()
    for name, value in figures.items():
        say(f"{name}: {value:.4g}")
    say(f"written to {out}")
    return figures


@contextmanager
def delayed_interrupts() -> Iterator[None]:
    """Delay Ctrl-C until the end of the block, so that a half-finished step is never saved."""
    if threading.current_thread() is not threading.main_thread():  # signals reach only the main thread
        yield
        return
    signals: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: signals.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if signals:
        signal.raise_signal(signal.SIGINT)
