"""Runs the units of a benchmark in several processes and keeps one JSON line per finished unit.

A *unit* is one call of `d5p4.generate`, described by a frozen dataclass. A *plan* is a function of the finished units:
it yields all units that are known by now, the most important first. A unit whose settings depend on other units (the
best temperature, say) is yielded as soon as these are finished. The line of a unit is written when the unit ends, and
finished units are not repeated, so the same command continues a killed benchmark.
"""

import json
import multiprocessing
import time
from argparse import ArgumentParser
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor, wait
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import d5p4

from ..tables import Row
from . import one_line, read

U = TypeVar("U")
Lines = dict[U, Row]


def add_options(parser: ArgumentParser, results: Path) -> None:
    """Add the options of benchmarks that run units. `results` is the committed file of figures."""
    parser.add_argument("--tf32", action="store_true", help="allow tf32 in float32 matrix products on a GPU")
    parser.add_argument("--processes", type=int, default=1, help="units that run at the same time")
    parser.add_argument("--out", type=Path, action="append", required=True, help="file of lines; --draw takes several")
    parser.add_argument("--draw", action="store_true", help="compute the figures of --out and write --results")
    parser.add_argument("--results", type=Path, default=results)


def read_lines(kind: type[U], paths: Iterable[Path]) -> Lines[U]:
    """Return the finished units of all files and their lines."""
    lines: Lines[U] = {}
    for path in paths:
        try:
            lines |= {kind(**line["unit"]): line for line in read(path)}
        except (KeyError, TypeError) as reason:
            raise d5p4.D5P4Error(f"{path} has a line that is no line of this benchmark ({reason})") from reason
    return lines


def run_units(
    path: Path,
    lines: Lines[U],
    plan: Callable[[Mapping[U, Row]], Iterable[U]],
    work: Callable[[U], Row],
    start: Callable[..., None],
    arguments: Sequence[Any],
    processes: int = 1,
) -> None:
    """Run all units of the plan that have no line yet, and add their lines to the file and to `lines`.

    start, work   functions of a module. `start(*arguments)` runs once per process, then `work(unit)` runs every unit.
                  `work` returns the fields of the line and a text for the terminal in the field "shown".
    processes     how many units run at the same time; a single one runs in this process

    A unit that raises an error is reported and left out, and the other units go on.
    """
    if processes < 1:
        raise d5p4.D5P4Error(f"processes={processes} must be at least 1")
    began, failed = time.perf_counter(), set[U]()
    pool: Executor = ThreadPoolExecutor(1, initializer=start, initargs=tuple(arguments))
    if processes > 1:  # a forked process could not use CUDA
        pool = ProcessPoolExecutor(processes, multiprocessing.get_context("spawn"), start, tuple(arguments))
    running: dict[Future[Row], U] = {}
    path.parent.mkdir(parents=True, exist_ok=True)
    with pool, path.open("ab+") as file:
        file.seek(0)
        file.truncate(file.read().rfind(b"\n") + 1)  # removes a last line that a kill cut short
        while True:
            taken = failed | set(running.values())
            waiting = [u for u in dict.fromkeys(plan(lines)) if u not in lines and u not in taken]
            for unit in waiting[: processes - len(running)]:
                running[pool.submit(work, unit)] = unit
            if not running:
                break
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                unit, error = running.pop(future), future.exception()
                if error is not None:
                    failed.add(unit)
                    shown = one_line(error)
                else:
                    line = future.result()
                    shown = line.pop("shown")
                    lines[unit] = {"unit": asdict(unit)} | line  # type: ignore[call-overload]
                    file.write(json.dumps(lines[unit], ensure_ascii=False).encode() + b"\n")
                    file.flush()
                print(f"{time.perf_counter() - began:6.1f} s  {unit}: {shown}", flush=True)
    print(f"{len(lines)} units are finished, {len(failed)} failed", flush=True)
