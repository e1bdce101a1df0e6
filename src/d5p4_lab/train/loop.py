"""The training loop. It averages the weights, prints progress lines, and saves states from which a run continues."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from d5p4.errors import D5P4Error

from ..provenance import command, hardware
from .folder import STATE, refuse_occupied, write_card
from .optimiser import Optimiser, rate_scale
from .recipe import Recipe

SAVE_SECONDS = 20.0
LINE_SECONDS = 10.0


@dataclass(frozen=True)
class Budget:
    """The length of a run: seconds of training, or a number of steps. Only a number of steps makes a run repeatable."""

    seconds: float | None = None
    steps: int | None = None

    def __str__(self) -> str:
        return f"{self.steps} steps" if self.steps is not None else f"{self.seconds} s"


class Run:
    """One training run, with everything that is needed to continue it."""

    def __init__(self, recipe: Recipe, budget: Budget) -> None:
        torch.manual_seed(recipe.seed)
        self.recipe, self.budget = recipe, budget
        self.model = recipe.build().to(recipe.device)
        self.optimiser = Optimiser(self.model.named_parameters(), *recipe.rates)
        self.average = [p.detach().clone() for p in self.model.parameters()]  # the running average of each parameter
        self.step, self.seconds = 0, 0.0  # seconds of training, without compiling, saving and validating
        fixed = ("name", "config", "seed", "rows", "data")  # what must be the same in a run and in its continuation
        self.terms = {name: getattr(recipe, name) for name in fixed} | {"budget": str(budget)}

    @property
    def progress(self) -> float:
        """The progress of the run: 0 at the start, 1 at the end."""
        steps, seconds = self.budget.steps, self.budget.seconds
        return min(1.0, self.step / steps if steps is not None else self.seconds / (seconds or 1.0))

    def save(self, path: Path) -> None:
        state = {name: vars(self)[name] for name in ("terms", "step", "seconds", "average")}
        state |= {"parameters": [p.detach() for p in self.model.parameters()], "optimiser": self.optimiser.state_dict()}
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
        for name, now in self.terms.items():
            if terms.get(name) != now:
                raise D5P4Error(
                    f"{path} belongs to a run with {name}={terms.get(name)!r}, not {now!r}: "
                    "use the same settings or another folder"
                )
        for name, values in (("parameters", self.model.parameters()), ("average", self.average)):
            for value, saved in zip(values, state[name], strict=True):
                value.copy_(saved)
        self.optimiser.load_state_dict(state["optimiser"])
        self.step, self.seconds = state["step"], state["seconds"]

    def advance(self, batch: Any) -> Tensor:
        """Take one training step and return its loss."""
        device = self.recipe.device.type
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda" and self.recipe.autocast):
            loss = self.recipe.loss(self.model, batch, self.recipe.generator(self.step))
        loss.backward()
        self.optimiser.step(rate_scale(self.step, self.progress))
        # In the first steps the average keeps less of its old value, because the first weights are noise.
        keep = min(self.recipe.average, (1 + self.step) / (10 + self.step))
        torch._foreach_lerp_(self.average, [p.detach() for p in self.model.parameters()], 1 - keep)
        self.step += 1
        return loss.detach()

    @torch.no_grad()
    def finish(self, out: Path) -> dict[str, float]:
        """Write the averaged model and its card to a folder, and return its figures on held-out data."""
        recipe = self.recipe
        for parameter, mean in zip(self.model.parameters(), self.average, strict=True):
            parameter.copy_(mean)
        recipe.write_tokenizer(out)
        size = recipe.write(out, self.model)
        figures = recipe.validate(out)
        facts = {
            "parameters": f"{sum(p.numel() for p in self.model.parameters()):,}",
            "weights": size,
            "seed": str(recipe.seed),
            "steps": f"{self.step:,} of {recipe.rows:,} rows x {recipe.row_length} tokens",
            "training time": f"{self.seconds:.0f} s (without compiling)",
            "hardware": hardware(recipe.device),
            "command": f"`{command()}`",
        }
        write_card(out, recipe.name, recipe.data, facts, figures)
        return figures


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
    run = Run(recipe, budget)
    if state.exists():
        run.restore(state)
        say(f"continuing from step {run.step:,}, {run.seconds:.0f} s of training")
    size = sum(p.numel() for p in run.model.parameters())
    batch = f"{recipe.rows:,} rows x {recipe.row_length} tokens per step"
    say(f"{recipe.name}: {size:,} parameters, {batch}, on {hardware(recipe.device)}")
    if compiled:
        recipe.compile(run.model)
    _steps(run, state, say)
    run.save(state)  # saved first, so that an error in validation does not lose the training
    figures = run.finish(out)
    state.unlink()
    for name, value in figures.items():
        say(f"{name}: {value:.4g}")
    say(f"written to {out}")
    return figures


def _steps(run: Run, state: Path, say: Callable[[str], None]) -> None:
    tokens = run.recipe.rows * run.recipe.row_length
    losses, counted = torch.zeros((), device=run.recipe.device), 0
    last_line = last_save = run.seconds
    first, clock = True, time.perf_counter()
    for batch in run.recipe.batches(run.step):
        if run.progress >= 1:
            break
        losses += run.advance(batch)
        counted += 1
        if first:  # the first step includes compilation, so its time is not counted
            loss = _finite(losses, run.step)  # reading the loss waits until the device has finished the step
            say(f"first step after {time.perf_counter() - clock:.0f} s, loss {loss:.4f}")
            losses.zero_()
            counted, first, clock = 0, False, time.perf_counter()
            continue
        now = time.perf_counter()
        run.seconds, clock = run.seconds + now - clock, now
        if run.seconds - last_line >= LINE_SECONDS or run.progress >= 1:
            mean, rate = _finite(losses, run.step) / counted, counted * tokens / max(run.seconds - last_line, 1e-9)
            place = f"step {run.step:7,}  {run.progress:6.1%}  {run.seconds:5.0f} s"
            say(f"{place}  loss {mean:.4f}  {rate:12,.0f} tokens/s")
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
