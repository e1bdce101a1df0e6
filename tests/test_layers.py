"""The library never imports the lab, and its rooms import downwards only; imports inside functions count too.

An import for type checkers alone does not count: it never runs.
"""

import ast
from pathlib import Path

SOURCE = Path(__file__).resolve().parent.parent / "src"
IMPORTERS = {"import_module", "__import__", "run_module"}
DOORS = {"cli", "serve", "view", "jobs", "integrations"}  # through which people come in
# What a room may import of the library. A room that is not named may import every room but the doors.
MAY_IMPORT = {
    "errors": set(),
    "ops": set(),
    "models": {"errors", "ops", "types"},
    "eval": {"errors", "models"},
    "search": {"errors", "options", "types", "rng", "ops", "constraint", "decode"},
    "decode": {"errors", "options", "types", "rng", "ops", "constraint", "result"},
}
# What a search may import of decode: the types that it is given, never the loop, the runner or the answers.
TYPES_OF_DECODE = {"pool", "schedule", "texts", "view"}
# The doors that a door, or the package itself, may use; all others stay below them.
MAY_USE = {"cli": DOORS, "serve": {"jobs", "view"}, "integrations": {"jobs"}, "__init__": {"jobs"}, "__main__": {"cli"}}


def imported(file: Path) -> set[str]:
    """The full names that a file imports anywhere, such as d5p4.eval.tasks.load_task."""
    package = file.relative_to(SOURCE).parts[:-1]
    names = set()
    tree = ast.parse(file.read_text(encoding="utf-8"))
    unused = {id(node) for branch in ast.walk(tree) if is_for_type_checkers(branch) for node in ast.walk(branch)}
    for node in ast.walk(tree):
        if id(node) in unused:
            continue
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            module = [*above, *([node.module] if node.module else [])]
            names |= {".".join([*module, alias.name]) for alias in node.names}
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in IMPORTERS:
            names |= {argument.value for argument in node.args if isinstance(argument, ast.Constant)}
    return names


def is_for_type_checkers(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING" and not node.orelse


def rooms_of(names: set[str]) -> set[str]:
    """The rooms of the library that these names are in; what the package itself offers is in `__init__`."""
    rooms = set()
    for name in names:
        first, *rest = name.split(".")
        if first == "d5p4":
            room = rest[0] if rest else "__init__"
            known = (SOURCE / "d5p4" / room).is_dir() or (SOURCE / "d5p4" / f"{room}.py").is_file()
            rooms.add(room if known else "__init__")
    return rooms


def test_the_library_never_imports_the_lab_and_rooms_import_downwards_only():
    files = sorted((SOURCE / "d5p4").rglob("*.py"))
    assert files
    wrong = []
    for file in files:
        place = file.relative_to(SOURCE / "d5p4")
        room = place.parts[0].removesuffix(".py")
        names = imported(file)
        others = rooms_of(names) - {room}
        wrong += [f"{place} imports {name}" for name in names if name.split(".")[0] in ("d5p4_lab", "tests")]
        if room == "search":
            parts = {name.split(".")[2] for name in names if name.startswith("d5p4.decode.")}
            wrong += [f"{place} imports decode.{part}" for part in parts - TYPES_OF_DECODE]
        too_high = (others & DOORS) - MAY_USE.get(room, set())
        wrong += [f"{place} imports {other}" for other in too_high | others - MAY_IMPORT.get(room, others)]
    assert not wrong, "\n".join(wrong)
