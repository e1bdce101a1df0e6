"""The training loop. It averages the weights, prints progress lines, and saves states from which a run continues."""

import json
import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
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
LOG, LOG_STEPS = "log.jsonl", 25  # the file of losses in the folder of the model, and the steps per line of it


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
        self.losses: list[float] = []  # of the steps, without those of `pending`, which are still on the device
        self.pending: list[Tensor] = []
        fixed = ("name", "config", "seed", "rows", "data")  # what must be the same in a run and in its continuation
        self.terms = {name: getattr(recipe, name) for name in fixed} | {"budget": str(budget)}

    @property
    def progress(self) -> float:
        """The progress of the run: 0 at the start, 1 at the end."""
        steps, seconds = self.budget.steps, self.budget.seconds
        return min(1.0, self.step / steps if steps is not None else self.seconds / (seconds or 1.0))

    def save(self, path: Path) -> None:
        state = {name: vars(self)[name] for name in ("terms", "step", "seconds", "average", "losses")}
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
        self.step, self.seconds, self.losses = state["step"], state["seconds"], state["losses"]

    def advance(self, batch: Any) -> None:
        """Take one training step."""
        device = self.recipe.device.type
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda" and self.recipe.autocast):
            loss = self.recipe.loss(self.model, batch, self.recipe.generator(self.step))
        loss.backward()
        self.optimiser.step(rate_scale(self.step, self.progress))
        # In the first steps the average keeps less of its old value, because the first weights are noise.
        keep = min(self.recipe.average, (1 + self.step) / (10 + self.step))
        torch._foreach_lerp_(self.average, [p.detach() for p in self.model.parameters()], 1 - keep)
        self.step += 1
        self.pending.append(loss.detach())

    def settle(self) -> None:
        """Read the losses of the last steps, which waits for the device."""
        self.losses += torch.stack(self.pending).tolist() if self.pending else []
        self.pending.clear()
        if wrong := [loss for loss in self.losses if not math.isfinite(loss)]:
            raise D5P4Error(f"the loss is {wrong[0]} by step {self.step}: training failed, try another seed")

    def log(self) -> list[dict[str, float]]:
        """Return the mean loss of every LOG_STEPS steps, with the number of the last of them."""
        groups = [self.losses[first : first + LOG_STEPS] for first in range(0, self.step, LOG_STEPS)]
        return [{"step": i * LOG_STEPS + len(own), "loss": round(mean(own), 4)} for i, own in enumerate(groups)]

    @torch.no_grad()
    def finish(self, out: Path) -> dict[str, float]:
        """Write the averaged model and its card to a folder, and return its figures on held-out data."""
        recipe = self.recipe
        for parameter, average in zip(self.model.parameters(), self.average, strict=True):
            parameter.copy_(average)
        recipe.write_tokenizer(out)
        size = recipe.write(out, self.model)
        figures, log = recipe.validate(out), self.log()
        (out / LOG).write_text("".join(json.dumps(line) + "\n" for line in [*log, figures]), encoding="utf-8")
        facts = {
            "parameters": f"{sum(p.numel() for p in self.model.parameters()):,}",
            "weights": size,
            "seed": str(recipe.seed),
            "steps": f"{self.step:,} of {recipe.rows:,} rows x {recipe.row_length} tokens",
            f"mean loss of {LOG_STEPS} steps": f"{log[0]['loss']} at first, {log[-1]['loss']} at the end (`{LOG}`)",
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
    _steps(run, state, compiled, say)
    run.save(state)  # saved first, so that an error in validation does not lose the training
    figures = run.finish(out)
    state.unlink()
    for name, value in figures.items():
        say(f"{name}: {value:.4g}")
    say(f"written to {out}")
    return figures


def _steps(run: Run, state: Path, compiled: bool, say: Callable[[str], None]) -> None:
    tokens = run.recipe.rows * run.recipe.row_length
    last_line = last_save = run.seconds
    printed, first, clock = run.step, True, time.perf_counter()
    for batch in run.recipe.batches(run.step):
        if run.progress >= 1:
            break
        if first:  # the first step includes compilation, so its time is not counted
            _first(run, batch, compiled, say)
            run.settle()
            say(f"first step after {time.perf_counter() - clock:.0f} s, loss {run.losses[-1]:.4f}")
            printed, first, clock = run.step, False, time.perf_counter()
            continue
        run.advance(batch)
        now = time.perf_counter()
        run.seconds, clock = run.seconds + now - clock, now
        if run.seconds - last_line >= LINE_SECONDS or run.progress >= 1:
            run.settle()
            rate = (run.step - printed) * tokens / max(run.seconds - last_line, 1e-9)
            place = f"step {run.step:7,}  {run.progress:6.1%}  {run.seconds:5.0f} s"
            say(f"{place}  loss {mean(run.losses[printed:]):.4f}  {rate:12,.0f} tokens/s")
            printed, last_line = run.step, run.seconds
        if run.seconds - last_save >= SAVE_SECONDS:
            run.settle()  # raises an error before a bad state replaces a good state
            run.save(state)
            last_save, clock = run.seconds, time.perf_counter()
    run.settle()


def _first(run: Run, batch: Any, compiled: bool, say: Callable[[str], None]) -> None:
    """Take the first step. If it fails with compiled parts, take it without compilation, and so all later steps."""
    try:
        return run.advance(batch)
    except Exception as error:  # compilers raise errors of many classes
        if not compiled:
            raise
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    say(f"the compiled step failed ({reason}): the run goes on without compilation")
    torch.compiler.set_stance("force_eager")
    run.model.zero_grad()
    return run.advance(batch)
