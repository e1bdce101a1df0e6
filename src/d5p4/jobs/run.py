"""`run_file` decodes every prompt of a file once, even if the run is stopped and continued, or shared by many ranks.

The division of a file into batches depends only on the file, the settings and the token budget. A prompt is therefore
always decoded together with the same other prompts.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..distributed import Mesh, check_shared, connect
from ..errors import D5P4Error
from ..generate import batches, chosen_seed, run_requests
from ..models import load
from ..options import Settings
from ..prompts import Prepared
from ..result import Answers, Result
from ..types import Model, Snapshot
from .decoder import Decoder, default_budget
from .output import Output, Pace, Report, Start, output_line, writing
from .reader import PromptFile, PromptLine
from .rows import RowStore

WINDOW = 1024  # lines per window: they are sorted by length together and then divided into batches
FEW = 20  # if this many prompts fail before the first success, the run stops: settings or device must be wrong
REFUSED = ("prompts", "keys", "sets", "references", "scorer", "callback", "ranks")
STOPPED = "so the run stops and none of them counts as finished; the first failure is in"
OFTEN = 0.5  # during a batch, `progress` is called at most once in this number of seconds

Progress = Callable[[Pace], object]


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
    """Decode each prompt of a file into a line of another file. To continue a stopped run, repeat the same call.

    model         a loaded model, or a name or folder that `d5p4.load` accepts
    input         a .txt file with one prompt per line, or a file of JSON lines. Each JSON line has `prompt` or
                  `messages`, optionally `id` (which selects the random stream), and fields that the output repeats
    output        a file of JSON lines in the order of the input, such as `answers.jsonl`. Until the run is finished,
                  its lines are in the folder `answers.jsonl.parts`. The header `answers.run.json` holds the settings
    seed          the seed of all answers. None draws a seed at the first start, and the header keeps that seed
    strict        whether to stop at the first prompt that fails. If not, the output line of a failed prompt says why
    retry_errors  whether to decode the prompts that failed in earlier starts again
    mesh          the mesh of ranks that share the prompts. None calls `d5p4.distributed.connect`
    progress      a function that the first rank calls with a `Pace`, after each batch and about every half second
    options       options of `d5p4.generate`. The default of max_tokens_per_forward depends on the model's size
    """
    own_mesh = mesh is None
    mesh = connect() if mesh is None else mesh
    try:
        if isinstance(model, (str, Path)):
            model = load(model, mesh.device, mapped=mesh.world > 1)
        prepared = prepare_options(model, options)
        _check_places(Path(input), Path(output))
        shown = progress if mesh.first else None
        run = Run(prepared, PromptFile(input), RowStore(Path(output)), mesh, strict, shown)
        report = run.run(seed if seed is None else chosen_seed(seed), retry_errors)
    except BaseException as error:
        mesh.fail(error)
        raise
    if own_mesh:
        mesh.close()
    return report


def prepare_options(model: Model, options: Mapping[str, Any], numbered: bool = True) -> Prepared:
    """Return what all prompts of a file or data set share. The default token budget depends on the model's size."""
    if refused := [name for name in REFUSED if options.get(name) is not None]:
        raise D5P4Error("whole files and data sets do not accept this option; leave it out", option=refused[0])
    accepted = {name: value for name, value in options.items() if name not in REFUSED}
    return Prepared(model, accepted, numbered, default_budget(model))


@dataclass
class Run:
    """One start of a run, on one rank."""

    prepared: Prepared
    file: PromptFile
    store: RowStore
    mesh: Mesh
    strict: bool
    progress: Progress | None
    start: Start = field(init=False)
    done: NDArray[np.bool_] = field(init=False)
    answered: bool = False  # whether any prompt of the run is known to have answers
    failed_lines: list[bytes] = field(default_factory=list)  # error lines, held back until a prompt has answers
    first_error: str = ""
    began: float = 0.0
    last_progress: float = 0.0

    def run(self, seed: int | None, retry_errors: bool) -> Report:
        with ExitStack() as stack:
            output = None
            if self.mesh.first:
                stack.enter_context(self.store.locked())
                output = Output(self.store, self.file)
                self.start = output.begin(self.prepared, self.mesh, seed, retry_errors)
            self.start = self.mesh.share(self.start if output else None)
            if self.start.report is not None:
                return self.start.report
            if self.file.digest != self.start.digest:
                differs = f"{self.file.path} differs between rank 0 and rank {self.mesh.rank}"
                raise D5P4Error(f"{differs}; give all ranks the same file")
            with writing(self.store.folder):
                check_shared(self.store.folder, self.mesh, "--output")
            assert self.start.done is not None
            self.done, self.answered = self.start.done, self.start.answered > 0
            self.began = self.last_progress = time.monotonic()
            self._work()
            self.mesh.meet()
            report = None
            if output:
                budget = self.prepared.settings.max_tokens_per_forward
                sizes = [budget >> halvings for halvings in range(budget.bit_length())]
                too_large = [size for size in sizes if self._count(f"memory {size}")]
                report = output.end(self.start, self._pace(), too_large)
            return self.mesh.share(report)

    def _work(self) -> None:
        """Decode unfinished batches. Groups of ranks take the numbers of their batches from a shared counter."""
        shown = self.progress is not None
        callback = self._step if shown and self.mesh.rows == 1 else None  # all ranks of a group must call it, or none
        patience = FEW if self.start.answered else 0  # a continued run may have only prompts left that are too large

        def attempt(items: list[Any], settings: Settings) -> Result:
            requests, model = [item.request for item in items], self.prepared.model
            return run_requests(model, requests, settings, self.start.seed, callback=callback, ranks=self.mesh.ranks)

        decoder = Decoder(attempt, self.prepared.settings, patience)
        counter = f"{self.start.token}/batch"
        ticket, number = self.mesh.ticket(counter), 0
        for place, work in enumerate(plan_work(self.file, self.prepared, bad_first=self.strict)):
            if work[0].error and self.strict:
                self._stop(work[0], work[0].error)
            # If the first batch has no prompts, no line of the first window can be decoded. Then every rank stops.
            if place == 0 and work[0].error and len(work) >= FEW and not self.start.answered:
                fact = f"none of the first {len(work)} prompts can be decoded"
                raise D5P4Error(f"{self.file.path}: {fact}, {STOPPED} {work[0].name}: {work[0].error}")
            if self.done[[line.line for line in work]].all():
                continue
            if number == ticket:
                self._do(work, decoder)
                ticket = self.mesh.ticket(counter)
            number += 1
        self._write(self.failed_lines)

    def _do(self, work: list[PromptLine], decoder: Decoder) -> None:
        """Decode a batch and write its lines. Only then exchange counts with other ranks, as exchanges may fail."""
        settings, todo = self.start.settings, {line.line for line in work if not self.done[line.line]}
        outcome = decoder.decode([line for line in work if not line.error])
        answered = [entry for entry in outcome.answered if entry[0].line in todo]
        lines = [output_line(line, line.error, settings) for line in work if line.error and line.line in todo]
        lines += [output_line(line, Answers(result, place), settings) for line, result, place in answered]
        failed = [(line, error) for line, error in outcome.failed if line.line in todo]
        self.failed_lines += [output_line(line, error, settings) for line, error in failed]
        if outcome.failed and not self.first_error:
            self.first_error = f"{outcome.failed[0][0].name}: {outcome.failed[0][1]}"
        self.answered = self.answered or bool(outcome.answered)
        if self.answered and not self.strict:
            lines, self.failed_lines = [*self.failed_lines, *lines], []
        self._write(lines)
        if outcome.failed and self.strict:
            self._stop(*outcome.failed[0])
        if self.mesh.leader:  # only the leader of a group of ranks counts prompts
            self.answered = self._count("answered", len(outcome.answered)) > 0 or self.answered
            failures = self._count("failed", len(outcome.failed))
            if failures >= FEW and not self.answered:
                raise D5P4Error(f"the first {failures} prompts all failed, {STOPPED} {self.first_error}")
        for size in decoder.too_large:
            self._count(f"memory {size}", 1)
        self._count("finished", len(todo))
        self._count("rows", sum(int(result.rows[place]) for _, result, place in outcome.answered))
        self._show_progress()

    def _stop(self, source: PromptLine, error: str) -> None:
        message = f"{self.file.path} line {source.line}: {error} (--strict stops the run at the first failure)"
        raise D5P4Error(message, line=source.line)

    def _write(self, lines: list[bytes]) -> None:
        if lines and self.mesh.leader:
            self.file.check_unchanged()  # the answers must belong to the lines that were counted at the start
            with writing(self.store.folder):
                self.store.append(self.start.number, self.mesh.rank, lines)

    def _step(self, shot: Snapshot) -> None:
        if time.monotonic() - self.last_progress >= OFTEN:
            self._show_progress(sum(map(shot.done, range(len(shot.prompts)))))

    def _show_progress(self, part: float = 0.0) -> None:
        """Call `progress`. `part` is the decoded fraction of this rank's batch, times the batch's number of prompts."""
        if self.progress is not None:
            self.last_progress = time.monotonic()
            self.progress(self._pace(part))

    def _pace(self, part: float = 0.0) -> Pace:
        total, before = self.file.count, int(self.done.sum())
        now = min(self._count("finished") + part, total - before)
        return Pace(total, before, now, self._count("rows"), time.monotonic() - self.began)

    def _count(self, what: str, more: int = 0) -> int:
        """Add `more` to the counter `what`, which all ranks of this start share, and return the new value."""
        return self.mesh.count(f"{self.start.token}/{what}", more)


def _check_places(input: Path, output: Path) -> None:
    for what, path in (("input", input), ("output", output)):
        if str(path) == "-" or (path.exists() and not path.is_file() and not path.is_dir()):
            raise D5P4Error(f"{path} cannot be the {what}, which a run reads more than once; give a file on a disk")
    if not output.name or output.is_dir():
        raise D5P4Error(f"{output} is a folder; give a file as --output, such as {output / 'answers.jsonl'}")
    if not output.parent.is_dir():
        raise D5P4Error(f"there is no folder {output.parent} for the output; create it first")
    if output.resolve() == input.resolve():
        raise D5P4Error(f"{output} is both input and output; give another --output")


def plan_work(lines: Iterable[PromptLine], prepared: Prepared, bad_first: bool) -> Iterator[list[PromptLine]]:
    """Yield the lines of a file as batches. Batches are made inside windows of `WINDOW` consecutive lines. The lines of
    a window that cannot be decoded are a batch of their own: with `bad_first` its first batch, or else its last."""
    rest = iter(lines)
    while window := list(islice(rest, WINDOW)):
        bad, items = [line for line in window if line.error], list[PromptLine]()
        good = [line for line in window if not line.error]
        requests = prepared.take([line.prompt for line in good], [line.id for line in good])
        for line, request in zip(good, requests, strict=True):
            if isinstance(request, D5P4Error):
                bad.append(replace(line, error=request.phrase(place="")))
            else:
                items.append(replace(line, request=request))
        ready = [request for request in requests if not isinstance(request, D5P4Error)]
        planned = batches(prepared.model, ready, prepared.settings)
        works = [[items[i] for i in numbers] for numbers in planned]
        if bad:
            works.insert(0 if bad_first else len(works), sorted(bad, key=lambda line: line.line))
        yield from works
