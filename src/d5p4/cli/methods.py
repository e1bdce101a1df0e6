"""`d5p4 methods` lists the methods."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from .common import print_json
from .options import Json, Plugin


def methods(json: Json = False, plugin: Plugin = None) -> None:
    """List the methods and their parameters."""
    from ..methods import METHODS
    from ..options import load_plugins

    load_plugins(plugin or [])
    described: list[dict[str, Any]] = [
        {
            "name": method.name,
            "summary": method.summary,
            "section": method.section,
            "parameters": method.defaults,
            "presets": dict(method.presets),
        }
        for method in METHODS.values()
    ]
    if json:
        print_json(described)
        return
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, header_style="bold")
    table.add_column("method", no_wrap=True)
    table.add_column("what it does", ratio=3)
    table.add_column("paper", no_wrap=True)
    table.add_column("parameters and defaults", ratio=2)
    for entry in described:
        values = [*entry["parameters"].items(), *entry["presets"].items()]
        own = ", ".join(f"{name} {_worded(value)}" for name, value in values)
        table.add_row(entry["name"], Text(entry["summary"]), entry["section"], Text(own or "–"))
    Console().print(table)


def _worded(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "–" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
