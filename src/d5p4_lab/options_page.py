"""`python -m d5p4_lab options`: write docs/options.md and the docstring of `generate` from the table of options."""

from __future__ import annotations

import textwrap
from pathlib import Path

from d5p4.options import GROUPS, Parameter, public, registries

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "options.md"
SOURCE = ROOT / "src" / "d5p4" / "generate.py"
START, STOP = "    <options>\n", "    </options>\n"
INTRODUCTION = """# Options

This page is written by `make options` from the table in `d5p4/options.py`. An option has the same name everywhere:
`generate(model, prompt, top_p=0.9)` in Python, `--top-p 0.9` on the command line, `"top_p": 0.9` in the body of an HTTP
request and `top_p=0.9` in lm-eval's `--model_args`. Only HTTP has other names for three options: OpenAI's `n` for `k`
and `max_tokens` for `gen_length`, and `early_stop` for `stop`, because OpenAI's `stop` means stop texts. A window of
steps is written `START:STOP`; Python also accepts a pair, and HTTP takes the list `[START, STOP]`. With an adaptive
reveal rule, a window is a pair of shares of the revealed positions, such as `0:0.5`.

The value of an option that is left out comes from the first of these that has one: the entry `d5p4` of the model's
`generation_config.json`, the method, this table.
"""
KINDS = {int: "whole number", float: "number", bool: "true or false", str: "text", tuple: "START:STOP"}


def page() -> str:
    lines = [INTRODUCTION]
    for group, title in GROUPS.items():
        lines += [f"## {title}\n", "| option | values | default | meaning |", "|---|---|---|---|"]
        lines += [_row(p) for p in public("python").values() if p.option.group == group]
        lines.append("")
    lines += [
        "## Parameters of methods and reveal rules\n",
        "A parameter belongs to the method or rule in the same row.\n",
    ]
    lines += ["| method or rule | parameter | values | default | meaning |", "|---|---|---|---|---|"]
    for item in (item for registry in registries() for item in registry.values()):
        lines += [f"| `{item.name}` {_row(p)}" for p in item.parameters.values()]
    return "\n".join(lines) + "\n"


def _row(parameter: Parameter) -> str:
    option = parameter.option
    aliases = f" (also {', '.join(f'`{alias}`' for alias in option.aliases)})" if option.aliases else ""
    return f"| `{parameter.name}` | {_values(parameter)} | {_default(parameter)} | {option.help}{aliases} |"


def _values(parameter: Parameter) -> str:
    if parameter.choices and parameter.name != "method":
        return ", ".join(f"`{choice}`" for choice in parameter.choices)
    return f"{KINDS.get(parameter.kind, 'anything')} {parameter.range()}".strip()


def _default(parameter: Parameter) -> str:
    if parameter.option.unset:
        return parameter.option.unset
    return "none" if parameter.default is None else f"`{str(parameter.default).lower()}`"


def docstring() -> str:
    """Return the basic options with their help, and the names of the other options."""
    table = public("python")
    lines = []
    for name, parameter in table.items():
        if parameter.option.group == "basic":
            words = f"{parameter.option.help} [{_default(parameter).strip('`')}]"
            lines.append(f"    {name:<13} {words}")
    others = ", ".join(name for name, p in table.items() if p.option.group != "basic")
    text = f"Others, described in docs/options.md: {others}; and the parameters of the method."
    return "\n".join([*lines, "", *textwrap.wrap(text, 116, initial_indent="    ", subsequent_indent="    ")]) + "\n"


def source(text: str) -> str:
    """Return the source of `generate` with a docstring made from the table of options."""
    before, _, rest = text.partition(START)
    _, _, after = rest.partition(STOP)
    return before + START + docstring() + STOP + after


def write() -> None:
    PAGE.write_text(page(), encoding="utf-8")
    SOURCE.write_text(source(SOURCE.read_text(encoding="utf-8")), encoding="utf-8")


def is_stale() -> bool:
    text = SOURCE.read_text(encoding="utf-8")
    return PAGE.read_text(encoding="utf-8") != page() or source(text) != text
