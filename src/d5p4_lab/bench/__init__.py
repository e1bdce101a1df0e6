"""The benchmarks, one file per table of figures. `python -m d5p4_lab bench NAME` runs the benchmark NAME.

This file has what all benchmarks share: the folder of results, and functions for options, results and tables.
"""

from __future__ import annotations

import argparse
import json
import lzma
import os
import time
import traceback
import warnings
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import d5p4
from d5p4 import D5P4Error

from ..tables import Row as Row
from ..tables import Tables as Tables
from ..tables import fill as fill
from ..tables import fill_file as fill_file
from ..tables import half_width as half_width
from ..tables import markdown as markdown
from ..tables import number as number
from ..tables import table_of as table_of

LAB = Path(__file__).resolve().parents[1]
CHECKOUT = LAB.parents[1]
RESULTS = LAB / "results" / "bench"


def make_parser(name: str, about: str | None) -> argparse.ArgumentParser:
    """Return a parser of options whose help shows the first line of `about`, the docstring of the benchmark."""
    return argparse.ArgumentParser(prog=f"python -m d5p4_lab bench {name}", description=(about or "").split("\n")[0])


def chosen(text: str, known: Collection[str], what: str) -> list[str]:
    """Return the names in a comma-separated list. Raise an error if a name is unknown."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    if unknown := sorted(set(names) - set(known)):
        raise D5P4Error(f"there is no {what} {', '.join(unknown)}; choose from {', '.join(known)}")
    return names


def read(path: Path) -> dict[str, Any]:
    """Return the results in a file, compressed if its name ends in .xz, or {} if the file does not exist."""
    try:
        stored = path.read_bytes()
        results = json.loads(lzma.decompress(stored) if path.suffix == ".xz" else stored)
    except FileNotFoundError:
        return {}
    except (ValueError, lzma.LZMAError) as reason:
        raise D5P4Error(f"{path} is not a results file ({reason})") from reason
    if not isinstance(results, dict):
        raise D5P4Error(f"{path} is not a results file: its JSON is not an object")
    return results


def write(path: Path, results: Mapping[str, Any] | str) -> None:
    """Write results (or their JSON text) atomically, compressed if the name of the file ends in .xz.

    A killed process leaves either the old or the new file. The same results give the same bytes.
    """
    text = results if isinstance(results, str) else json.dumps(results, indent=1, ensure_ascii=False) + "\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    partial, stored = path.with_suffix(".partial"), text.encode()
    partial.write_bytes(lzma.compress(stored, preset=9 | lzma.PRESET_EXTREME) if path.suffix == ".xz" else stored)
    os.replace(partial, path)


def measure_section(name: str, measure: Callable[[], list[Row]], **facts: Any) -> dict[str, Any]:
    """Measure one section. Return the given facts, the measured rows (or the error), and the seconds of the section."""
    print(name, flush=True)
    section, began = dict(facts), time.perf_counter()
    try:
        section["rows"] = measure()
    except Exception as error:  # an error in one section must not stop the other sections
        traceback.print_exc()
        section["error"] = one_line(error)
    section["seconds"] = time.perf_counter() - began
    print(f"  {section['seconds']:.0f} s", flush=True)
    return section


def rows_of(results: Mapping[str, Any], section: str) -> list[Row]:
    """Return the rows of a section, or an empty list if the section was not measured."""
    return results.get("sections", {}).get(section, {}).get("rows", [])


def generate(model: Any, prompts: Any = None, **options: Any) -> d5p4.Result:
    """Call `d5p4.generate` with the paper's method, unless the options name another one, and without the warning about
    equal answers, because the benchmarks count these."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", d5p4.DuplicateAnswers)
        return d5p4.generate(model, prompts, **{"method": "d5p4"} | options)


def one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def show(row: Row) -> Row:
    """Print a row on one line and return it."""
    parts = (f"{key} {number(value)}" for key, value in row.items() if value is not None and value != [])
    print("  " + ", ".join(parts), flush=True)
    return row
