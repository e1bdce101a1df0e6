"""Runs benchmarks that consist of sections, each a function from a `Bench` to rows, and draws their tables.

Several runs can add sections to the same file. A file has results of one machine and one size.
"""

import gc
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

from d5p4 import D5P4Error
from d5p4.models.load import choose_device
from d5p4.provenance import provenance

from ..tables import Row, Tables, markdown
from . import RESULTS, chosen, make_parser, one_line, read_sections, rows_of, write_sections

Cell = str | Callable[[Row], Any]
"""How to get a column's cell from a row: the key of the value, or a function of the row."""


class Bench:
    """What all sections of a benchmark share on one device."""

    def __init__(self, plan: Any, device: str | torch.device) -> None:
        self.plan, self.device = plan, torch.device(device)
        self.cuda = self.device.type == "cuda"
        self.dtype = torch.bfloat16 if self.cuda else torch.float32

    @property
    def facts(self) -> Row:
        """The facts of all sections, stored once per file."""
        return {}

    def free(self) -> None:
        """Return unused memory to the device, and forget the peak."""
        gc.collect()
        if self.cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def forget(self) -> None:
        """Free what only one section needed."""
        self.free()


B = TypeVar("B", bound=Bench)
Sections = Mapping[str, Callable[[B], list[Row]]]


def run(sections: Sections[B], bench: B, names: Sequence[str], out: Path, small: bool = False) -> dict[str, Any]:
    """Measure the named sections, and write the results after each section. Return all results of the file."""
    results = bench.facts | read_sections(out)
    facts = {"small": small} | provenance(bench.device)
    for old in results["sections"].values():
        if (old.get("small"), old.get("machine")) != (small, facts["machine"]):
            size = ", tiny sizes" * bool(old.get("small"))
            raise D5P4Error(f"{out} has results of {old.get('machine')}{size}; give another --out, or remove the file")
    for name in (name for name in sections if name in names):
        print(name, flush=True)
        began, measure = time.perf_counter(), sections[name]
        section: dict[str, Any] = {"about": " ".join((measure.__doc__ or "").split())} | facts
        try:
            section["rows"] = measure(bench)
        except Exception as error:  # an error in one section must not stop the other sections
            traceback.print_exc()
            section["error"] = one_line(error)
        section["seconds"] = time.perf_counter() - began
        print(f"  {section['seconds']:.0f} s", flush=True)
        known = results["sections"] | {name: section}
        results["sections"] = {key: known[key] for key in sections if key in known}
        write_sections(out, results)
        bench.forget()
    return results


def table(results: Mapping[str, Any], name: str, columns: Mapping[str, Cell]) -> str:
    """Return the table of one section."""
    if not (rows := rows_of(results, name)):
        return "not measured yet"
    cells = [[cell(row) if callable(cell) else row.get(cell) for cell in columns.values()] for row in rows]
    return markdown(list(columns), cells)


def main(
    name: str,
    about: str | None,
    sections: Sections[B],
    make_bench: Callable[[bool, torch.device], B],
    tables: Callable[[Mapping[str, Any]], Tables],
    arguments: Sequence[str],
) -> None:
    """Run the command `bench NAME`: measure sections, and print their tables and their errors."""
    parser = make_parser(name, about, RESULTS / f"{name}.jsonl.xz", small=True)
    parser.add_argument("--sections", default=",".join(sections), help="some of " + ",".join(sections))
    options = parser.parse_args(arguments)
    names = chosen(options.sections, sections, "section")
    bench = make_bench(options.small, choose_device(options.device))
    results = run(sections, bench, names, options.out, options.small)
    print("\n\n".join(f"### {key}\n{draw()}" for key, draw in tables(results).items() if key in names))
    for key in names:
        for row in rows_of(results, key):
            for what, error in row.get("errors", {}).items():
                print(f"{row['what']}, {row.get('size')}, {what} failed: {error}")
    if failed := [key for key in names if "error" in results["sections"][key]]:
        raise D5P4Error(f"these sections failed: {', '.join(failed)}; their errors are in {options.out}")
