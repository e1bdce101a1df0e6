"""`run_file`: every prompt of a file decoded once, however often the run is stopped and however many ranks share it."""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..distributed import Mesh, at_work, check_shared, connect
from ..errors import D5P4Error
from ..generate import chosen_seed, run_requests
from ..models import load
from ..options import Settings
from ..prompts import Prepared
from ..types import Model, Result, Snapshot
from .budget import default_budget
from .decoder import Decoder, Outcome
from .lines import answer_line, error_line
from .output import Output, Start, summarise, writing
from .plan import Item, Work, plan_work
from .reader import BadLine, PromptFile, PromptLine
from .report import Pace, Progress, Report
from .rows import RowStore

FEW = 20
"""So many failures at the beginning of a run, without one answer, are not the prompts' fault."""
REFUSED = ("prompts", "keys", "sets", "references", "scorer", "callback", "history", "beams")
OFTEN = 0.5  # seconds between two calls of `progress`


def run_file(
    model: Model | str | Path,
    input: str | Path,
    output: str | Path,
    *,
    seed: int | None = None,
    strict: bool = False,
    retry_errors: bool = False,
    mesh: Mesh | None = None,
    progress: Progress | None = None,
    **options: Any,
) -> Report:
    """Decode each prompt of a file into a line of another; call it again with the same arguments to go on.

    model         a loaded model, or a name for `d5p4.load`
    input         JSON lines with `prompt` or `messages`, if wanted `id` (which names the random stream) and anything
                  else, which is carried through; or a .txt file with a prompt a line
    output        JSON lines in the order of the input. Until all are there they are in `output`.parts; the header
                  (`answers.run.json` for `answers.jsonl`) says what they are made with
    seed          None draws one at the first start, which the header keeps
    strict        stop at the first prompt that fails; otherwise its line says why
    retry_errors  decode again what failed before
    mesh          of `d5p4.distributed.connect`, where several ranks share the prompts; by default this job's
    progress      called on the first rank with a `Pace`, at most every half second
    options       those of `d5p4.generate`; max_tokens_per_forward is chosen by the model's size (`jobs.budget`)
    """
    own = mesh is None
    mesh = connect() if mesh is None else mesh
    try:
        with at_work(mesh):
            if isinstance(model, (str, Path)):
                model = load(model, mesh.device, mapped=mesh.world > 1)
            run = Run(model, Path(input), Path(output), options, mesh, strict, progress)
        report = run.run(seed if seed is None else chosen_seed(seed), retry_errors)
    except BaseException as error:
        mesh.fail(error)
        raise
    if own:
        mesh.close()
    return report


class Run:
    """One start of a run, on one rank."""

    start: Start

    def __init__(
        self,
        model: Model,
        input: Path,
        output: Path,
        options: dict[str, Any],
        mesh: Mesh,
        strict: bool = False,
        progress: Progress | None = None,
    ) -> None:
        if refused := [name for name in REFUSED if options.get(name) is not None]:
            raise D5P4Error("a whole file has no use for it; leave it out", option=refused[0])
        self.model, self.mesh, self.strict = model, mesh, strict
        self.prepared = Prepared(model, {name: x for name, x in options.items() if name not in REFUSED})
        given = dict(model.generation_defaults) | options
        if given.get("max_tokens_per_forward") is None:
            budget = default_budget(model, self.settings.deterministic)
            self.prepared.settings = replace(self.settings, max_tokens_per_forward=budget)
        _check_places(input, output)
        self.file = PromptFile(input)
        self.store = RowStore(output, summarise)
        self.progress = progress if mesh.first else None
        self.answered = False  # whether any prompt of the run is known to have answers
        self.held: list[bytes] = []  # lines of failed decodes until then, fewer than FEW and a batch's
        self.first_error = ""
        self.began = self.told = time.monotonic()

    @property
    def settings(self) -> Settings:
        return self.prepared.settings

    def run(self, seed: int | None, retry_errors: bool) -> Report:
        with ExitStack() as stack:
            output = None
            if self.mesh.first:
                stack.enter_context(self.store.locked())
                output = Output(self.store, self.file, self.mesh)
                with at_work(self.mesh):  # weights are hashed and lines copied
                    self.start = output.begin(self.prepared, seed, retry_errors)
            self.start = self.mesh.share(self.start if output else None)
            if self.start.report is not None:
                return self.start.report
            self._check_same_places()
            self.answered = self.start.answered > 0
            self.began = time.monotonic()
            self._work()
            self.mesh.meet()
            report = None
            if output:
                with at_work(self.mesh):
                    report = output.end(self.start, self._pace(), self._memory())
            return self.mesh.share(report)

    def _check_same_places(self) -> None:
        """All ranks must read the same input and see the same folder."""
        if self.file.digest != self.start.digest:
            raise D5P4Error(f"{self.file.path} is another file on rank {self.mesh.rank} than on rank 0; share one")
        with writing(self.store.folder):
            check_shared(self.store.folder, self.mesh, "--output")

    def _work(self) -> None:
        """Take batches that are not finished, one after the other, from the counter that all ranks share."""
        heard = self.progress is not None or self.mesh.world > 1
        callback = self._step if heard and self.mesh.beam == 1 else None  # groups of ranks beat by themselves
        patience = FEW if self.start.answered else 0  # what is left may be just the prompts that are too large

        def attempt(items: list[Item], settings: Settings) -> Result:
            requests = [item.request for item in items]
            return run_requests(
                self.model, requests, settings, self.start.seed, callback=callback, beams=self.mesh.beams
            )

        decoder = Decoder(attempt, self.settings, patience)
        ticket, number = self._ticket(), 0
        planned = plan_work(self.file, self.prepared, bad_first=self.strict)
        for place, work in enumerate(planned):
            self.mesh.beat()
            if work.bad and self.strict:
                self._stop(work.bad[0], work.bad[0].error)
            if place == 0:
                self._check_any_good(work)
            if self.start.finished.has_all(work.lines):
                continue
            if number == ticket:
                self._do(work, decoder)
                ticket = self._ticket()
            number += 1
        self._write([], with_held=True)

    def _check_any_good(self, first: Work) -> None:
        """Of a window the batches come first. Where there is none, all ranks find so and stop alike."""
        if not first.items and len(first.bad) >= FEW and not self.start.answered:
            raise D5P4Error(
                f"{self.file.path}: none of the first {len(first.bad)} prompts can be decoded, so the run stops and "
                f"none of them counts as finished; the first: line {first.bad[0].line}: {first.bad[0].error}"
            )

    def _do(self, work: Work, decoder: Decoder[Item]) -> None:
        """Decode a batch. Its lines are on the disk before the other ranks are asked anything: one may have failed."""
        done, settings = self.start.finished, self.start.settings
        outcome = decoder.decode(work.items) if work.items else Outcome()
        lines = [error_line(bad, bad.error, settings) for bad in work.bad if bad.line not in done]
        for item, result, place in outcome.answered:
            if item.line not in done:
                lines.append(answer_line(item.source, result, place, settings))
        for item, error in outcome.failed:
            self.first_error = self.first_error or f"line {item.line}: {error}"
            if item.line not in done and self.mesh.leader:
                self.held.append(error_line(item.source, error, settings))
        self.answered = self.answered or bool(outcome.answered)
        self._write(lines, with_held=self.answered and not self.strict)
        if outcome.failed and self.strict:
            item, error = outcome.failed[0]
            self._stop(item.source, error)
        self._look_at_failures(len(outcome.answered), len(outcome.failed))
        for size in decoder.too_large:
            self._count(f"memory {size}", 1)
        self._count("finished", sum(line not in done for line in work.lines))
        self._count("rows", sum(int(result.rows[place]) for _, result, place in outcome.answered))
        self._tell()

    def _stop(self, source: PromptLine | BadLine, error: str) -> None:
        raise D5P4Error(f"{self.file.path} line {source.line}: {error} (--strict stops here)")

    def _look_at_failures(self, answered: int, failed: int) -> None:
        """Where no rank of any start has an answer and decodes fail, settings or device are wrong: the run stops."""
        if not self.mesh.leader:  # the counts may not be the leader's yet
            return
        answered, failed = self._count("answered", answered), self._count("failed", failed)
        self.answered = self.answered or answered > 0
        if failed >= FEW and not self.answered:
            raise D5P4Error(
                f"the first {failed} prompts all failed, so the run stops and none of them counts as finished; "
                f"the first: {self.first_error}"
            )

    def _write(self, lines: list[bytes], with_held: bool) -> None:
        if with_held:
            lines, self.held = [*self.held, *lines], []
        if lines and self.mesh.leader:
            self.file.check_unchanged()  # lines are read as they are needed
            with writing(self.store.folder):
                self.store.append(self.start.number, self.mesh.rank, lines)

    def _step(self, shot: Snapshot) -> None:
        self.mesh.beat()
        if time.monotonic() - self.told >= OFTEN:
            self._tell(len(shot.prompts) * (shot.step + 1) / shot.steps)

    def _tell(self, part: float = 0.0) -> None:
        """Progress, with the part of this rank's batch that is decoded so far."""
        if self.progress is not None:
            self.told = time.monotonic()
            self.progress(self._pace(part))

    def _pace(self, part: float = 0.0) -> Pace:
        before = len(self.start.finished)
        now = min(self._count("finished") + part, self.file.count - before)
        return Pace(self.file.count, before, now, self._count("rows"), time.monotonic() - self.began)

    def _memory(self) -> list[int]:
        """Token budgets that were too large on some rank."""
        most = self.settings.max_tokens_per_forward
        sizes = [most >> halvings for halvings in range(most.bit_length())]
        return [size for size in sizes if self._count(f"memory {size}")]

    def _ticket(self) -> int:
        return self.mesh.ticket(self._name("batch"))

    def _count(self, what: str, more: int = 0) -> int:
        return self.mesh.count(self._name(what), more)

    def _name(self, what: str) -> str:
        """A name in the store of the ranks, which may see several runs and spell their places differently."""
        return f"{self.start.token}/{what}"


def _check_places(input: Path, output: Path) -> None:
    for what, path in (("input", input), ("output", output)):
        if str(path) == "-" or (path.exists() and not path.is_file() and not path.is_dir()):
            raise D5P4Error(f"{path} cannot be the {what}, which is read more than once: give a file on a disk")
    if not output.name or output.is_dir():
        raise D5P4Error(f"{output} is a folder; the output is a file such as {output / 'answers.jsonl'}")
    if not output.parent.is_dir():
        raise D5P4Error(f"there is no folder {output.parent} for the output")
    if output.resolve() == input.resolve():
        raise D5P4Error(f"{output} is both input and output; give another --output")
