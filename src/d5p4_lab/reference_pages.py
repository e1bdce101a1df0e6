"""The reference pages, written from the sources. The sources are read but not run, so no extra has to be installed.

`python -m d5p4_lab options` writes docs/options.md and the docstring of `generate` from the table of options. The
documentation site gets a page of all public names from `python_page`.
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.util import find_spec, resolve_name
from itertools import groupby
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
adaptive reveal rules take only shares. Several texts are given as a list; on the command line, repeat the option.

The value of an option that is left out comes from the first of these that has one: the entry of the method under
`methods` in the entry `d5p4` of the model's `generation_config.json`, the entry `d5p4` itself, the method, this table.
The same rules check the values of the caller and of the model. A default in the entry `d5p4` that has no meaning for
the method has no effect.
"""
PYTHON_INTRODUCTION = """# Python

This page is written from the sources. Each signature is followed by its docstring. The options that
`generate` and `run_file` accept are in [options.md](options.md), and recipes are in [guide.md](guide.md). In shapes, P
is the number of prompts, k the number of answers, N the number of rows in a pool, and m the number of parents.
"""
# (heading, module, names). "" stands for the names in the module's __all__, or all its public classes and functions.
SECTIONS: list[tuple[str, str, str]] = [
    ("Decode", "d5p4", "load wrap generate run_file loglikelihood Result HistoryStep Snapshot"),
    ("Errors", "d5p4", "D5P4Error DuplicateAnswers NonFiniteLogits"),
    ("Extend", "d5p4", "register load_plugins METHODS ORDERS REVEALS Method Order Reveal Option Settings"),
    ("What a method sees and returns", "d5p4", "PoolView Choice Final Kept"),
    ("A model", "d5p4", "Model Head Hidden"),
    ("The loop", "d5p4", "prepare Prompts make_schedule Table Adaptive Step decode"),
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
    """Return the page of the public names of all sections."""
    lines = [PYTHON_INTRODUCTION]
    for heading, module, names in SECTIONS:
        tree, _, _ = parsed(module)
        lines.append(f"## {heading}\n")
        if not names:
            lines += documented(ast.get_docstring(tree))
        for name in names.split() or public_names(tree):
            node, file = definition(module, name)
            lines += [f"### {module}.{name}\n", "```python", *stub(node, file), "```\n"]
            if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
                lines += documented(ast.get_docstring(node))
    return "\n".join(lines).rstrip() + "\n"


def public_names(tree: ast.Module) -> list[str]:
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "__all__":
            return list(ast.literal_eval(node.value))
    definitions = [node for node in tree.body if isinstance(node, (ast.ClassDef, ast.FunctionDef))]
    return [node.name for node in definitions if not node.name.startswith("_")]


def stub(node: ast.stmt, file: list[str]) -> list[str]:
    """Return the signature of a function, or a class with its fields and the signatures of its documented methods."""
    if isinstance(node, ast.FunctionDef):
        return signature(node, file)
    if not isinstance(node, ast.ClassDef):
        return file[node.lineno - 1 : node.end_lineno]
    lines = file[node.lineno - 1 : node.lineno]
    is_protocol = any(isinstance(base, ast.Name) and base.id == "Protocol" for base in node.bases)
    for inner in node.body:
        if isinstance(inner, ast.FunctionDef) and inner.name == "__init__":
            lines += signature(inner, file)
        elif isinstance(inner, ast.FunctionDef) and not inner.name.startswith("_"):
            docstring = inner.body[0]
            if ast.get_docstring(inner):
                lines += ["", *signature(inner, file), *file[docstring.lineno - 1 : docstring.end_lineno]]
            elif is_protocol:
                lines += ["", *signature(inner, file)]
        elif isinstance(inner, ast.AnnAssign) and not re.search(r"Annotated|ClassVar|^_", ast.unparse(inner)):
            lines += file[inner.lineno - 1 : inner.end_lineno]
    return lines


def signature(node: ast.FunctionDef, file: list[str]) -> list[str]:
    """Return the lines of a function before its docstring, with the decorators of methods."""
    start = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list if node.col_offset)])
    return file[start - 1 : max(node.body[0].lineno - 1, node.lineno)]


def documented(docstring: str | None) -> Iterator[str]:
    """Yield a docstring. A paragraph whose columns are aligned stays as it is; "name: text" becomes an item."""
    paragraphs = re.sub(r"^</?options>\n?", "", docstring or "", flags=re.M).strip().split("\n\n")
    for is_table, group in groupby(paragraphs, key=lambda text: bool(re.search(r"^ |\S  ", text, re.M))):
        if is_table:
            text = "\n\n".join(group)
            language = "text" if re.search(r"^\S", text, re.M) else "python"  # an example is indented
            yield f"```{language}\n{textwrap.dedent(text)}\n```\n"
            continue
        for paragraph in group:
            text = re.sub(r"([*<])(?=[^`]*(?:`[^`]*`[^`]*)*$)", r"\\\1", paragraph)
            items = re.split(r"^(?=`?\w+`?(?:, `?\w+`?)*: )", text, flags=re.M)
            text = items[0] + "".join(f"* {item}".replace("\n", "\n  ").rstrip() + "\n" for item in items[1:])
            yield text.rstrip() + "\n"


def write() -> None:
    OPTIONS_PAGE.write_text(options_page(), encoding="utf-8")
    SOURCE.write_text(source(SOURCE.read_text(encoding="utf-8")), encoding="utf-8")


def is_stale() -> bool:
    text = SOURCE.read_text(encoding="utf-8")
    return OPTIONS_PAGE.read_text(encoding="utf-8") != options_page() or source(text) != text
