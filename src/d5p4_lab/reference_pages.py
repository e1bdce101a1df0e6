"""The reference pages, written from the sources. The sources are read but not run, so no extra has to be installed.

`python -m d5p4_lab options` writes docs/options.md and the docstring of `generate` from the table of options. The
documentation site gets a page of all public names from `python_page`.
"""

import ast
import textwrap
from collections.abc import Mapping
from functools import cache
from importlib.util import find_spec, resolve_name
from pathlib import Path
from typing import Any

from d5p4.options import GROUPS, Parameter, public, registries

ROOT = Path(__file__).resolve().parents[2]
OPTIONS_PAGE = ROOT / "docs" / "options.md"
SOURCE = ROOT / "src" / "d5p4" / "generate.py"
START, STOP = "    <options>\n", "    </options>\n"
INTRODUCTION = """# Options

This page is written by `make options` from the table in `d5p4/options.py`. An option has the same name everywhere:
`generate(model, prompt, top_p=0.9)` in Python, `--top-p 0.9` on the command line, `"top_p": 0.9` over HTTP, and
`top_p=0.9` in lm-eval's `--model_args`. Only HTTP has other names for four options: `n` for `k`, `max_tokens` for
`gen_length`, `stop` for `stop_strings`, and `early_stop` for `stop`. A window is written `START:STOP` (a pair in
Python, a list over HTTP). It counts steps, such as `0:64`, or is a pair of shares between 0 and 1, such as `0:0.5`;
adaptive reveal rules take only shares. Several texts are given as a list; on the command line, repeat the option. There
and in lm-eval, `\\n`, `\\t` and `\\\\` in such a text stand for a line feed, a tab and a backslash.

The value of an option that is left out comes from the first of these that has one: the entry of the method under
`methods` in the entry `d5p4` of the model's `generation_config.json`, the entry `d5p4` itself, the method, this table.
The same rules check the values of the caller and of the model. A default in the entry `d5p4` that has no meaning for
the method has no effect.
"""
PYTHON_INTRODUCTION = """# Python

This page is written from the sources: every signature with its docstring. The options that
`generate` and `run_file` accept are in [options.md](options.md), and recipes are in [guide.md](guide.md). In shapes, P
is the number of prompts, k the number of answers, N the number of rows in a pool, and m the number of parents.
"""
# (heading, module, names). "" stands for the names in the module's __all__, or all its public classes and functions.
SECTIONS: list[tuple[str, str, str]] = [
    ("Decode", "d5p4", "load wrap generate run_file loglikelihood Result Snapshot"),
    ("Errors", "d5p4", "D5P4Error DuplicateAnswers NonFiniteLogits"),
    ("Extend", "d5p4", "register load_plugins METHODS ORDERS REVEALS Method Order Reveal Option Settings"),
    ("What a method sees and returns", "d5p4", "PoolView Choice Final Kept"),
    ("A model", "d5p4", "Model Head Hidden"),
    ("The loop", "d5p4", "prepare Prompts Arrivals make_schedule Table Adaptive Step decode"),
    ("Files", "d5p4.jobs", ""),
    ("Many processes", "d5p4.distributed", ""),
    ("Check answers", "d5p4.eval.graders", "grader grader_of register_grader Grader"),
    ("Measure answers", "d5p4.eval.report", "report Report Metric read_groups Group"),
    ("lm-evaluation-harness", "d5p4.integrations.lm_eval", "D5P4LM"),
    ("RL trainers", "d5p4.integrations.rl", ""),
    ("Ray Data", "d5p4.integrations.ray", ""),
]
KINDS = {
    int: "whole number",
    float: "number",
    bool: "true or false",
    str: "text",
    tuple: "START:STOP",
    list: "text or texts",
}


def options_page() -> str:
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
    for item in (registry[name] for registry in registries() for name in _own(registry)):
        lines += [f"| `{item.name}` {_row(p)}" for p in item.parameters.values()]
    return "\n".join(lines) + "\n"


def _own(table: Mapping[str, Any]) -> list[str]:
    """Return the names in a table without those that the plugin of the lab added."""
    modules = {name: getattr(getattr(item, "function", item), "__module__", "") for name, item in table.items()}
    return [name for name, module in modules.items() if not module.startswith("d5p4_lab.")]


def _row(parameter: Parameter) -> str:
    option = parameter.option
    aliases = f" (also `{option.alias}`)" if option.alias else ""
    return f"| `{parameter.name}` | {_values(parameter)} | {_default(parameter)} | {option.help}{aliases} |"


def _values(parameter: Parameter) -> str:
    if parameter.choices and parameter.name != "method":
        table = parameter.option.choices() if parameter.option.choices else None
        choices = _own(table) if isinstance(table, Mapping) else parameter.choices
        return ", ".join(f"`{choice}`" for choice in choices)
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


@cache
def parsed(module: str) -> tuple[ast.Module, list[str], bool]:
    """Return the syntax tree of a module, its lines, and whether it is a package."""
    spec = find_spec(module)
    if spec is None or spec.origin is None:
        raise LookupError(f"there is no module {module}")
    text = Path(spec.origin).read_text(encoding="utf-8")
    return ast.parse(text), text.splitlines(), spec.submodule_search_locations is not None


def definition(module: str, name: str) -> tuple[ast.stmt, list[str]]:
    """Return the statement that defines a name, and the lines of its file. Imports of the name are followed."""
    tree, lines, is_package = parsed(module)
    for node in tree.body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and node.name == name:
            return node, lines
        if isinstance(node, ast.Assign) and any(isinstance(x, ast.Name) and x.id == name for x in ast.walk(node)):
            return node, lines
        if isinstance(node, ast.ImportFrom) and name in [alias.asname or alias.name for alias in node.names]:
            package = module if is_package else module.rpartition(".")[0]
            return definition(resolve_name("." * node.level + (node.module or ""), package), name)
    raise LookupError(f"{module} does not define {name}")


def python_page() -> str:
    """Return the page of the public names of all sections: the head of each definition, with its docstring."""
    lines = [PYTHON_INTRODUCTION]
    for heading, module, names in SECTIONS:
        tree, _, _ = parsed(module)
        lines.append(f"## {heading}\n")
        for name in names.split() or public_names(tree):
            lines += [f"### {module}.{name}\n", "```python", *head(*definition(module, name)), "```\n"]
    return "\n".join(lines).rstrip() + "\n"


def public_names(tree: ast.Module) -> list[str]:
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "__all__":
            return list(ast.literal_eval(node.value))
    definitions = [node for node in tree.body if isinstance(node, (ast.ClassDef, ast.FunctionDef))]
    return [node.name for node in definitions if not node.name.startswith("_")]


def head(node: ast.stmt, file: list[str]) -> list[str]:
    """Return a function up to the end of its docstring, or a class with its fields and the heads of its methods."""
    first = min([node.lineno, *(decorator.lineno for decorator in getattr(node, "decorator_list", ()))]) - 1
    if isinstance(node, ast.FunctionDef):
        stop = node.body[0].end_lineno if ast.get_docstring(node) else max(node.body[0].lineno - 1, node.lineno)
        return file[first:stop]
    if not isinstance(node, ast.ClassDef):
        return file[first : node.end_lineno]
    parts = [head(part, file) for part in node.body if not getattr(part, "name", "").startswith("_")]
    return file[first : node.lineno] + [line for part in parts for line in part]


def write() -> None:
    OPTIONS_PAGE.write_text(options_page(), encoding="utf-8")
    SOURCE.write_text(source(SOURCE.read_text(encoding="utf-8")), encoding="utf-8")


def is_stale() -> bool:
    text = SOURCE.read_text(encoding="utf-8")
    return OPTIONS_PAGE.read_text(encoding="utf-8") != options_page() or source(text) != text
