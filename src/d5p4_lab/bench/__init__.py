"""The benchmarks, one file per table of figures. `python -m d5p4_lab bench NAME` runs the benchmark NAME.

This file has what all benchmarks share: options, results and a call of `generate`. A benchmark has a function
`main(arguments)`, which writes its results to RESULTS, and a function `tables(results)`, which `tables.py` lists.
Results are JSON lines, one object per row, compressed if the name of the file ends in .xz.
"""

import argparse
import json
import lzma
import warnings
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import d5p4
from d5p4 import D5P4Error
from d5p4.store import json_line, replace_file

from ..tables import Row, number

LAB = Path(__file__).resolve().parents[1]
CHECKOUT = LAB.parents[1]
RESULTS = LAB / "results" / "bench"


def make_parser(
    name: str, about: str | None, out: Path | None = None, device: bool = True, small: bool = False
) -> argparse.ArgumentParser:
    """Return a parser whose help shows `about`, the docstring of the benchmark, with the options of most benchmarks."""
    shape = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog=f"python -m d5p4_lab bench {name}", description=about, formatter_class=shape)
    if device:
        parser.add_argument("--device", help="default: cuda if there is a GPU")
    if small:
        parser.add_argument("--small", action="store_true", help="tiny sizes, to test that everything runs")
    if out is not None:
        parser.add_argument("--out", type=Path, default=out, help="the file of results")
    return parser


def chosen(text: str, known: Collection[str], what: str) -> list[str]:
    """Return the names in a comma-separated list. Raise an error if a name is unknown."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    if unknown := sorted(set(names) - set(known)):
        raise D5P4Error(f"there is no {what} {', '.join(unknown)}; choose from {', '.join(known)}")
    return names


def read(path: Path) -> list[Row]:
    """Return the rows of a file of results, or [] if there is no file. A last line without its end is left out."""
    try:
        stored = path.read_bytes()
        text = lzma.decompress(stored) if stored and path.suffix == ".xz" else stored
        rows = [json.loads(line) for line in text.split(b"\n")[:-1]]
    except FileNotFoundError:
        return []
    except (ValueError, lzma.LZMAError) as reason:
        raise D5P4Error(f"{path} is not a results file ({reason})") from reason
    if not all(isinstance(row, dict) for row in rows):
        raise D5P4Error(f"{path} is not a results file: each line must be a JSON object")
    return rows


def write(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write rows to a file of results at once. The same rows give the same bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = b"".join(map(json_line, rows))
    stored = lzma.compress(text, preset=9 | lzma.PRESET_EXTREME) if path.suffix == ".xz" else text
    replace_file(path, lambda file: file.write(stored))


def read_sections(path: Path) -> dict[str, Any]:
    """Return results that have sections: {"sections": {name: {"rows": [...], **facts}}, **facts of all sections}.

    A line of the file is a row with its "section", the facts of a "section", or the facts of all sections.
    """
    results: dict[str, Any] = {"sections": {}}
    for row in read(path):
        name = row.pop("section", None)
        section = results if name is None else results["sections"].setdefault(name, {"rows": []})
        if name is None or "facts" in row:
            section |= row.get("facts", row)
        else:
            section["rows"].append(row)
    return results


def write_sections(path: Path, results: Mapping[str, Any]) -> None:
    rows: list[Row] = [{name: value for name, value in results.items() if name != "sections"}]
    for name, section in results["sections"].items():
        rows.append({"section": name, "facts": {key: value for key, value in section.items() if key != "rows"}})
        rows += [{"section": name} | row for row in section.get("rows", ())]
    write(path, rows)


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
