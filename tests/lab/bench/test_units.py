"""Units run in several processes; a unit that fails does not stop the others."""

import json
from dataclasses import dataclass

from d5p4_lab.bench.units import read_lines, run_units

factor = 0


@dataclass(frozen=True)
class Unit:
    number: int


def start(value):
    global factor
    factor = value


def work(unit):
    return {"product": factor // unit.number, "shown": "divided"}


def plan(lines):
    """The unit 9 is known only after the unit 3."""
    yield from map(Unit, (3, 0, 2))
    if Unit(3) in lines:
        yield Unit(9)


def test_units_run_in_processes(tmp_path, capsys):
    path = tmp_path / "new" / "lines.jsonl"
    lines = {}
    run_units(path, lines, plan, work, start, (18,), processes=2)
    assert {unit.number: line["product"] for unit, line in lines.items()} == {3: 6, 2: 9, 9: 2}
    assert read_lines(Unit, [path]) == lines
    assert json.loads(path.read_text().splitlines()[0]) == {"unit": {"number": 3}, "product": 6}
    shown = capsys.readouterr().out
    assert "Unit(number=0): ZeroDivisionError" in shown and "3 units are finished, 1 failed" in shown
