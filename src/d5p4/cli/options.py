"""Make the options of all decoding commands. They come from the table in `d5p4.options` and the methods' parameters.

`--help` shows the basic options, and `--help-all` shows all options. An option that the user does not give is not
passed to the library, so the defaults and the error messages are those of the library.
"""

import inspect
import re
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from ..errors import D5P4Error
from ..options import GROUPS, Option, Parameter, public, registered_parameters
from ..resolve import OF_LOAD, REFUSED, TRANSLATED, refused, typed
from ..search import METHODS

RUNNING = "Running"
TYPES = {int: "<int>", float: "<float>", str: "<str>", tuple: "START:STOP", list: "TEXT"}

_MODEL = "A folder, a hub id or a shipped model. [$D5P4_MODEL, or countdown]"
_shown = {"show_envvar": False, "show_default": False}
ModelName = Annotated[str, typer.Option("--model", "-m", metavar="MODEL", envvar="D5P4_MODEL", help=_MODEL, **_shown)]
DEFAULT_MODEL = "countdown"
Checkpoint = Annotated[str, typer.Argument(help="A folder, a hub id such as org/name, or a shipped model.")]
PromptText = typer.Argument(help="The prompt; - reads standard input.")
PROMPT_FILE = "File of prompts: JSON lines, or .txt with one per line."
MethodNames = Annotated[str, typer.Option(help="Names separated by commas; `d5p4 methods` lists them.")]
Device = Annotated[str | None, typer.Option(help="auto, cuda, cuda:0, mps or cpu.", rich_help_panel=RUNNING)]
Dtype = Annotated[
    str | None, typer.Option(help="bfloat16, float16, float32, float64, int8, int4 or auto.", rich_help_panel=RUNNING)
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print no progress and no notes.")]
Plugin = Annotated[
    list[str] | None, typer.Option(metavar="PLUGIN", help="Load own methods, orders and rules: a module or a .py file.")
]
Seed = Annotated[int | None, typer.Option(help="Random seed. The same seed gives the same answers.")]

Given = dict[str, Any]
"""The options of a decode that the user gave on the command line. `with_options` fills an argument of this type."""
SHOW_ALL = "d5p4.show_all"
OWN = "Parameters of methods"
UsageError: Any = typer.BadParameter.__base__  # of click, which newer versions of typer contain


class Decoding(TyperCommand):
    """A command that decodes. `--help` shows the basic options, and `--help-all` shows the options of all groups."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read arguments. A prompt that begins with a negative number, such as `-4 2>2 4|...:`, is not an option."""
        flags = [arg.partition("=")[0] for arg in (args[: args.index("--")] if "--" in args else args)]
        known = {name for param in self.params for name in param.opts}  # a plugin may have an option of such a name
        if wrong := [WRONG[name] for name in flags if name in WRONG and name not in known]:
            raise refused(wrong[0], flag)
        prompts = [arg for arg in args if re.match(r"-\d.*[ >]", arg)]
        if prompts and "--" not in args:
            args = [*(arg for arg in args if arg not in prompts), "--", *prompts]
        try:
            return super().parse_args(ctx, args)
        except UsageError:
            if "--stop" in flags:  # the switch was probably given a text to stop at
                raise refused("stop", flag) from None
            raise

    def format_options(self, ctx: Any, formatter: Any) -> None:
        sections: dict[str, list[Any]] = {"Arguments": [], "Options": [], **{title: [] for title in GROUPS.values()}}
        more = {OWN, *list(GROUPS.values())[1:]}
        for param in self.get_params(ctx):
            title = "Arguments" if param.param_type_name == "argument" else getattr(param, "rich_help_panel", None)
            record = param.get_help_record(ctx)
            if record and (title not in more or ctx.meta.get(SHOW_ALL)):
                names, _, negative = record[0].partition(" / --no-")
                names = names.replace("--", "--[no-]") if negative else names
                sections.setdefault(title or "Options", []).append((names, record[1]))
        for title, records in sections.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records, col_max=26)


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """Replace the argument `options` of a command by all options and all parameters of methods, --plugin (which `main`
    reads) and --help-all."""
    # a command with --methods still reads --method, so that an error can name --methods
    hidden = ["method"] if "methods" in inspect.signature(command).parameters else []
    table = [_option(p, None if p.name in hidden else GROUPS[p.option.group]) for p in public("command").values()]
    methods = [_option(p, OWN, users) for p, users in registered_parameters().values()]
    aliases = [_option(Parameter(name, str, None, True, Option()), None) for name in TRANSLATED]
    more = [_parameter("plugin", None, Plugin), _parameter("help_all", False, HelpAll)]
    return _filled(command, [*table, *methods, *aliases], more)


def with_parameters(command: Callable[..., None], parameters: Iterable[Parameter]) -> Callable[..., None]:
    return _filled(command, [_option(parameter, "Options") for parameter in parameters], [])


def _filled(
    command: Callable[..., None], made: list[inspect.Parameter], more: list[inspect.Parameter]
) -> Callable[..., None]:
    """Return the command with the options `made`, which it gets as its argument `options`, and options `more`, which
    have an effect of their own."""
    signature = inspect.signature(command, eval_str=True)
    own = [p.replace(kind=p.KEYWORD_ONLY) for p in signature.parameters.values() if p.annotation is not Given]

    @wraps(command)
    def call(**values: Any) -> None:
        given = {option.name: values.pop(option.name) for option in made}
        values = {name: values[name] for name in signature.parameters if name in values}
        command(**values, options={name: value for name, value in given.items() if value not in (None, [])})

    call.__signature__ = signature.replace(parameters=[*own, *made, *more])  # type: ignore[attr-defined]
    return call


def flag(name: str) -> str:
    """Return the name of an option on the command line, such as --gen-length for gen_length."""
    return "--" + name.replace("_", "-")


WRONG = {flag(name): name for name in REFUSED if name not in OF_LOAD} | {"-n": "n"}
"""Flags of other programs. They answer with our names."""


def plugins(args: list[str]) -> list[str]:
    """Return the modules that --plugin names. These modules are loaded before options are read, because they may add
    options."""
    after = [args[i + 1] for i, arg in enumerate(args[:-1]) if arg == "--plugin"]
    return after + [arg.partition("=")[2] for arg in args if arg.startswith("--plugin=")]


def _option(parameter: Parameter, panel: str | None, users: Iterable[str] = ()) -> inspect.Parameter:
    """Make an option of the command line, which the help shows under `panel` or, without one, not at all. The option
    takes any text, because the library checks the value later."""
    name, switch = flag(parameter.name), parameter.kind is bool
    names = [parameter.option.flag] if parameter.option.flag else []
    made = typer.Option(
        *names,
        f"{name}/--no-{name[2:]}" if switch else name,
        help=_help(parameter, users),
        metavar=None if switch else TYPES.get(parameter.kind, "VALUE"),
        rich_help_panel=panel,
        hidden=panel is None,
        show_default=False,
    )
    kinds = {bool: bool | None, list: list[str] | None}
    return _parameter(parameter.name, None, Annotated[kinds.get(parameter.kind, str | None), made])


def _parameter(name: str, default: Any, annotation: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _help(parameter: Parameter, users: Iterable[str]) -> str:
    option, default = parameter.option, parameter.default
    text = option.help
    if parameter.choices and parameter.name != "method":
        text += f" One of {', '.join(parameter.choices)}."
    if users := list(users):
        return f"{text} ({', '.join(users)})"
    value = option.unset or ("" if default is None or isinstance(default, bool) else str(default))
    return f"{text} [{value}]" if value else text


def _show_all(ctx: typer.Context, value: bool) -> None:
    if value:
        ctx.meta[SHOW_ALL] = True
        typer.echo(ctx.get_help())
        raise typer.Exit


HelpAll = Annotated[
    bool, typer.Option("--help-all", callback=_show_all, is_eager=True, help="Show every option and exit.")
]


def share(methods: str, given: Given) -> dict[str, dict[str, Any]]:
    """Return the options of each named method, in the order of the names. A method gets only parameters that it has."""
    if given.get("method") is not None:
        raise D5P4Error("names one method; use --methods here", option="method", value=given["method"])
    names = [name.strip() for name in methods.split(",") if name.strip()] or [methods]
    try:
        specs = [METHODS.named(name) for name in names]
    except D5P4Error as error:
        error.option = "methods"
        raise
    own = set().union(*(spec.parameters for spec in specs))
    options = typed(given, "command", specs)
    return {
        spec.name: {name: value for name, value in options.items() if name not in own or name in spec.parameters}
        for spec in specs
    }
