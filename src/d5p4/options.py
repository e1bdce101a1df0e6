"""The table of all options of a decode. Each field of `Settings` is an option with type, default, range and help.

Other parts of the library are made from this table: the validation of options, the flags of the command line, the
fields of HTTP requests, the arguments of lm-eval, the list in the docstring of `generate`, and docs/options.md (by
`make options`). A "door" is one of the interfaces that take options: Python, the command line, HTTP and lm-eval. A
method is a dataclass that is read in the same way, so the fields of a method are options at every door, too.
"""

from __future__ import annotations

import os
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, asdict, dataclass, field, fields, is_dataclass
from functools import cache, cached_property
from importlib import import_module
from importlib.machinery import SourceFileLoader
from importlib.metadata import entry_points
from importlib.util import module_from_spec, spec_from_file_location
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Union, get_args, get_origin, get_type_hints

from .errors import ABSENT, D5P4Error, nearest

if TYPE_CHECKING:
    from .search import Method, Order, Reveal
    from .types import Model

GROUPS = {
    "basic": "Basic options",
    "search": "Search: how candidates are rated and chosen",
    "reveal": "Reveal: which tokens are drawn, and when",
    "research": "Research: measurements, memory and exact bits",
}
FORMS = ("json_schema", "regex", "grammar", "choices")  # a call has at most one of these constraints
LARGEST_POOL = 1 << 14  # a pool has at most this many rows N, because the similarity matrix is N x N
DETERMINISTIC_TOKENS = 4096
"""The number of tokens per forward under `deterministic`. Every forward is padded to this size, so a small size wastes
little. But below about 2,000 tokens, a large model spends most of a forward on reading its weights."""
ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "\\": "\\"}
FORWARDS_PER_CALL = 8  # the pools of a decode call may hold as many tokens as this many forwards

Window = tuple[float, float]
"""A pair (start, stop) means the steps start..stop-1, counted from 0. With an adaptive reveal rule, it means shares of
the revealed positions between 0 and 1. The text "START:STOP" is also accepted."""

Texts = tuple[str, ...]
"""One text, or several."""


@dataclass(frozen=True)
class Option:
    """The description of an option, written as `Annotated[float, Option("Temperature of the draw.", least=0)]`."""

    help: str = ""
    group: str = "research"
    least: float | None = None  # smallest value allowed
    above: float | None = None  # values must be larger than this
    most: float | None = None  # largest value allowed
    choices: Callable[[], Iterable[str]] | None = None  # returns the names that are allowed
    unset: str = ""  # the help shows this text instead of the default value
    alias: str = ""  # the name of the option in other libraries
    flag: str = ""  # a short flag on the command line, such as -k
    http: str = ""  # the name of the option in HTTP requests, if OpenAI's API has its own name
    hidden: tuple[str, ...] = ()  # interfaces without the option: "command", "http", "lm-eval" or "python"


@dataclass(frozen=True)
class Parameter:
    """One option, read from a field of a dataclass."""

    name: str
    kind: type  # int, float, bool, str, tuple (a window), list (texts) or object (anything)
    default: Any
    optional: bool  # whether None is allowed
    option: Option
    literals: tuple[str, ...] = ()

    @property
    def choices(self) -> tuple[str, ...]:
        return self.literals or tuple(self.option.choices() if self.option.choices else ())

    def check(self, value: Any) -> Any:
        """Return the value as a plain Python value, or raise an error that names the option and the value."""
        value = plain_number(value)
        if value is None and self.optional:
            return None
        if self.kind is tuple:
            return self._window(value)
        if self.kind is list:
            texts = (value,) if isinstance(value, str) else value
            empty = self.name in FORMS and not texts
            if empty or not isinstance(texts, (list, tuple)) or not all(isinstance(one, str) and one for one in texts):
                raise self._error("must be a text or a list of texts, none of them empty", value)
            return tuple(texts) or None
        if self.kind is bool and not isinstance(value, bool):
            raise self._error("must be True or False", value)
        if self.kind is str:
            if not isinstance(value, str) or (self.choices and value not in self.choices):
                raise self._error(unknown_name(value, self.choices) if self.choices else "must be text", value)
        elif self.kind in (int, float):
            self._number(value)
        return value

    def from_text(self, text: Any) -> Any:
        """Convert a text of the command line or lm-eval to the option's type. If it does not fit, return the text."""
        if isinstance(text, list):
            return [*map(unescaped, text)]
        if not isinstance(text, str):
            return text
        if self.optional and text.lower() == "none":
            return None
        if self.kind is list:
            return unescaped(text)
        if self.kind is bool:
            return {"true": True, "false": False}.get(text.lower(), text)
        for kind in {int: (int,), float: (int, float)}.get(self.kind, ()):
            with suppress(ValueError):
                return kind(text)
        return text

    def range(self) -> str:
        """Return the allowed range as text, such as "of at least 1 and at most 9". The text is empty without limits."""
        limits = ("at least", self.option.least), ("above", self.option.above), ("at most", self.option.most)
        text = " and ".join(f"{word} {limit:,}" for word, limit in limits if limit is not None)
        return f"of {text}" if text.startswith("at") else text

    def _number(self, value: Any) -> None:
        option, whole = self.option, self.kind is int
        low = -1e308 if option.least is None else option.least
        high = option.most if option.most is not None else 2**31 if whole else 1e308
        number = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
        if not (number and low <= value <= high and (option.above is None or value > option.above)):
            large = " and at most 2147483648" if number and whole and value > 2**31 else ""
            kind = "a whole number" if whole else "a number"
            raise self._error(f"must be {kind} {self.range()}{large}".strip(), value)

    def _window(self, value: Any) -> Window:
        pair = value.tolist() if hasattr(value, "tolist") else value
        if isinstance(pair, str):
            number = Parameter(self.name, float, ABSENT, False, self.option)
            pair = [number.from_text(part.strip()) for part in pair.split(":")]
        numbers = isinstance(pair, (list, tuple)) and all(type(x) in (int, float) for x in pair)
        if not numbers or len(pair) != 2 or not 0 <= pair[0] <= pair[1]:
            reason = "must be two numbers START:STOP with START <= STOP: steps counted from 0, such as 0:64"
            raise self._error(f"{reason}, or shares, such as 0:0.5", value)
        return pair[0], pair[1]

    def _error(self, reason: str, value: Any) -> D5P4Error:
        return D5P4Error(reason, option=self.name, value=value)


def unknown_name(value: Any, choices: Iterable[str], what: str = "is not known") -> str:
    hint = nearest(value, choices) if isinstance(value, str) else ""
    return f"{what}; {hint} Use one of {', '.join(choices)}" if hint else f"{what}; use one of {', '.join(choices)}"


@cache
def parameters_of(table: Any) -> Mapping[str, Parameter]:
    """Return the parameters of a dataclass by name. A field with `init=False` cannot be set, so it is no parameter."""
    if not is_dataclass(table):
        return {}
    hints = get_type_hints(table, include_extras=True)
    return {f.name: _read(f.name, hints[f.name], f.default) for f in fields(table) if f.init and f.name != "params"}


def _read(name: str, hint: Any, default: Any) -> Parameter:
    option = Option()
    if get_origin(hint) is Annotated:
        hint, *notes = get_args(hint)
        option = next((note for note in notes if isinstance(note, Option)), option)
    parts = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    optional, kinds = NoneType in parts, [kind for kind in parts if kind is not NoneType]
    kind = kinds[0] if len(kinds) == 1 else float if set(kinds) == {int, float} else object
    literals = tuple(get_args(kind)) if get_origin(kind) is Literal else ()
    kind = str if literals else list if kind == Texts else get_origin(kind) or kind
    known = kind if kind in (int, float, bool, str, tuple, list) else object
    return Parameter(name, known, None if default is MISSING else default, optional, option, literals)


class Checked:
    """The base class of a dataclass of parameters. It checks each field against its type and range."""

    def __post_init__(self: Any) -> None:
        for name, parameter in parameters_of(self.__class__).items():
            parameter.check(getattr(self, name))


class Registry(dict[str, Any]):
    """The methods, orders or reveal rules by name."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def add(self, item: Registered) -> None:
        if item.name in self:
            raise D5P4Error(f"{self.kind} {item.name!r} exists already; choose another name")
        if clash := sorted(set(item.parameters) & set(parameters_of(Settings))):
            reason = f"its parameter {clash[0]!r} has the name of an option; use a new name"
            raise D5P4Error(f"{self.kind} {item.name!r}: {reason}")
        self[item.name] = item

    def named(self, name: Any) -> Any:
        if isinstance(name, str) and name not in self:
            load_plugins()
        if isinstance(name, str) and name in self:
            return self[name]
        what = "is not a method" if self.kind == "method" else "is not known"
        raise D5P4Error(unknown_name(name, self, what), option=self.kind, value=name)


class Registered:
    """The base class of methods, orders and reveal rules. The second field of its dataclass is a function, or a
    dataclass whose fields are parameters and whose instances are functions."""

    registry: ClassVar[Registry]
    name: str

    @property
    def function(self) -> Any:
        return getattr(self, fields(self)[1].name)  # type: ignore[arg-type]

    @property
    def parameters(self) -> Mapping[str, Parameter]:
        """The item's own parameters by name."""
        return parameters_of(self.function) if isinstance(self.function, type) else {}

    @property
    def defaults(self) -> dict[str, Any]:
        return {name: parameter.default for name, parameter in self.parameters.items()}

    def build(self, settings: Settings) -> Any:
        """Return the function with the parameters of these settings."""
        function = self.function
        if not isinstance(function, type):
            return function
        return function(**{name: settings.params[name] for name in self.parameters})


def register(item: Registered) -> None:
    """Make your own `Method`, `Order` or `Reveal` available under its name in all interfaces of this process."""
    if not isinstance(item, Registered):
        raise D5P4Error(f"register takes a d5p4.Method, d5p4.Order or d5p4.Reveal, not {type(item).__name__}")
    if unknown := sorted(set(getattr(item, "statistics", ())) - {"entropy", "best", "margin", "certainty"}):
        raise D5P4Error(f"{item.registry.kind} {item.name!r}: there is no statistic {unknown[0]!r}")
    if not callable(item.function):
        raise D5P4Error(f"{item.registry.kind} {item.name!r}: it needs a dataclass or a function")
    item.registry.add(item)


_loaded: set[str] = set()


def load_plugins(modules: Sequence[str] = ()) -> None:
    """Load the plugins of installed packages (entry points `d5p4.plugins`), then the given modules, each of them once.

    A module is given by its name, such as "mine", or by its file, such as "./mine.py". A package that cannot be loaded
    causes only a warning, because the caller did not name it. A given module that cannot be loaded is an error.
    """
    if not _loaded:
        _loaded.add("")
        for entry in entry_points(group="d5p4.plugins"):
            try:
                entry.load()
            except Exception as reason:
                warnings.warn(f"the d5p4 plugin {entry.value} cannot be loaded: {reason}", stacklevel=2)
    for given in modules:
        is_file = given.endswith(".py") or os.path.basename(given) != given
        module = os.path.abspath(os.path.expanduser(given)) if is_file else given
        if is_file and not os.path.isfile(module):
            message = "is not a file; give a Python file, such as ./mine.py, or the name of a module, such as mine"
            raise D5P4Error(message, option="plugin", value=given)
        if module not in _loaded:
            try:
                _load_file(module) if is_file else import_module(module)
            except Exception as reason:
                message = " ".join(f"cannot be loaded: {type(reason).__name__}: {reason}".split())
                raise D5P4Error(message, option="plugin", value=given) from reason
            _loaded.add(module)


def _load_file(path: str) -> None:
    """Run a Python file as a module. Its name is the path, so that it hides no other module, but without dots, so that
    pickle accepts the name."""
    name = path.replace(".", "_")
    spec = spec_from_file_location(name, path, loader=SourceFileLoader(name, path))
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = module_from_spec(spec)
    sys.path.append(os.path.dirname(path))  # a plugin may import files beside it
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise


def registries() -> tuple[Registry, Registry, Registry]:
    from .search import METHODS, ORDERS, REVEALS

    return METHODS, ORDERS, REVEALS


def registered_parameters() -> dict[str, tuple[Parameter, list[str]]]:
    """Return the parameters of all methods, orders and reveal rules, and the names of those that have them."""
    known: dict[str, tuple[Parameter, list[str]]] = {}
    for registry in registries():
        for item in registry.values():
            for name, parameter in item.parameters.items():
                known.setdefault(name, (parameter, []))[1].append(item.name)
    return known


def _names(place: int) -> Callable[[], Iterable[str]]:
    return lambda: registries()[place]


@dataclass(frozen=True)
class Settings:
    """All options of a decode, filled in and checked. `params` has the parameters of method, order and reveal rule.

    The default of an option is its value in the entry `d5p4` of the model's generation_config.json. If this entry does
    not have the option, the default comes from the method's presets, and otherwise from this table.
    """

    k: Annotated[int, Option("Answers per prompt.", "basic", 1, flag="-k", http="n", alias="num_return_sequences")] = 4
    method: Annotated[str, Option("Search method; `d5p4 methods` lists all.", "basic", choices=_names(0))] = "tree"
    w: Annotated[int, Option("Children per beam and step.", "basic", 1, flag="-w")] = 4
    gen_length: Annotated[
        int | None,
        Option(
            "Tokens to write per answer.",
            "basic",
            1,
            http="max_tokens",
            alias="max_new_tokens",
            unset="128; MDLM: its length",
        ),
    ] = None
    steps: Annotated[int | None, Option("Denoising steps.", "basic", 1, most=10**6, unset="one per token")] = None
    block_length: Annotated[
        int | None,
        Option("Tokens per block; blocks are decoded left to right.", "basic", 1, unset="the model's, or one block"),
    ] = None
    temperature: Annotated[float, Option("Temperature; 0 takes the likeliest token.", "basic", 0)] = 1.0
    top_p: Annotated[
        float | None, Option("Sample from the likeliest tokens of this total mass.", "basic", above=0, most=1)
    ] = None
    order: Annotated[
        str, Option("Which position is revealed next.", "basic", choices=_names(1), unset="the model's")
    ] = "confidence"
    reveal: Annotated[str, Option("How many positions to reveal per step.", "basic", choices=_names(2))] = "schedule"
    guidance: Annotated[float, Option("Scale of classifier-free guidance; 1 is off.", "basic", 1)] = 1.0
    distinct: Annotated[bool, Option("Draw children that differ (not for tree).", "basic")] = False
    spare: Annotated[int, Option("Extra beams; the k best answers are returned.", "basic", 0)] = 0
    stop_strings: Annotated[Texts | None, Option("Cut answers before these texts.", "basic", http="stop")] = None
    json_schema: Annotated[Any, Option("Write JSON that this JSON schema allows.", "basic", unset="free text")] = None
    regex: Annotated[str | None, Option("Write a text that this pattern matches.", "reveal", unset="free text")] = None
    grammar: Annotated[str | None, Option("Write a text of this Lark grammar.", "reveal", unset="free text")] = None
    choices: Annotated[Texts | None, Option("Write one of these texts.", "reveal", unset="free text")] = None
    chat: Annotated[
        bool | None, Option("Apply the chat template.", "basic", unset="if there is one", hidden=("http", "lm-eval"))
    ] = None

    top_k: Annotated[int | None, Option("Sample only from this many of the likeliest tokens.", "reveal", 1)] = None
    min_p: Annotated[
        float | None, Option("Sample only tokens with at least this share of the top probability.", "reveal", 0, most=1)
    ] = None
    order_temperature: Annotated[float, Option("Temperature of the tempered order.", "reveal", 0)] = 0.1
    stop: Annotated[
        bool | None,
        Option("Stop a row at its end-of-text.", "reveal", unset="for trees and adaptive rules", http="early_stop"),
    ] = None
    start: Annotated[
        Literal["order", "entropy"], Option("Position of the first reveal: by order, or the least certain.", "reveal")
    ] = "order"
    start_temperature: Annotated[
        float | None, Option("Temperature of the first reveal if start is entropy.", "reveal", 0, unset="temperature")
    ] = None
    eos: Annotated[
        Literal["last", "free", "never"],
        Option("When end-of-text may be revealed.", "reveal", unset="last; free for MDLM and the ancestral order"),
    ] = "last"
    guidance_window: Annotated[
        Window | None, Option("Apply guidance only during these steps (or shares).", "reveal", unset="every step")
    ] = None

    select_window: Annotated[
        Window | None,
        Option("Select parents only during these steps (or shares), and at the end.", "search", unset="every step"),
    ] = None
    quality: Annotated[
        Literal["entropy", "self-certainty", "logprob"], Option("How candidates are rated.", "search")
    ] = "entropy"
    positions: Annotated[Literal["all", "masked"], Option("Positions that the rating averages over.", "search")] = "all"
    normalise: Annotated[
        Literal["minmax", "absolute", "zscore"], Option("How ratings are scaled within a pool.", "search")
    ] = "minmax"
    features: Annotated[
        Literal["flatten", "mean", "masked", "non-masked"],
        Option("Features that candidates are compared by.", "search"),
    ] = "flatten"
    feature_layer: Annotated[
        Literal["model", "head"], Option("Compare the model's features, or the input of its head.", "search")
    ] = "model"
    similarity: Annotated[Literal["cosine", "rbf"], Option("How two candidates are compared.", "search")] = "cosine"
    gamma: Annotated[float, Option("Gamma of the rbf similarity exp(-gamma d^2).", "search", 0)] = 1.0

    max_tokens_per_forward: Annotated[
        int, Option("Most tokens per forward; `run` and `serve` choose by the model's size.", least=1, hidden=("http",))
    ] = 16384
    cache: Annotated[
        Literal["none", "exact", "prefix", "dual"],
        Option(
            "Keys and values to keep; prefix and dual change the answers.",
            unset="exact for block-causal models unless deterministic, otherwise none",
            hidden=("http",),
        ),
    ] = "none"
    deterministic: Annotated[
        bool, Option("On a GPU, give results that do not depend on the batch. Slower.", hidden=("http",))
    ] = False
    logprobs: Annotated[
        bool, Option("Return each token's log-probability and reveal step.", hidden=("http", "lm-eval"))
    ] = False
    savings: Annotated[
        bool, Option("Run equal rows through the model only once.", hidden=("command", "http", "lm-eval", "python"))
    ] = True
    params: Mapping[str, Any] = field(default_factory=dict)

    @staticmethod
    def make(model: Model, **given: Any) -> Settings:
        """Fill in defaults and check values. Other names must be parameters of method, order or reveal rule."""
        from .resolve import resolve

        return resolve(model, given)

    @property
    def spec(self) -> Method:
        return registries()[0].named(self.method)

    @property
    def order_spec(self) -> Order:
        return registries()[1].named(self.order)

    @property
    def reveal_spec(self) -> Reveal:
        return registries()[2].named(self.reveal)

    @cached_property
    def adaptive(self) -> bool:
        """Whether rows reveal different numbers of positions at a step."""
        return self.reveal_spec.adaptive or self.spec.tree or self.form is not None

    @cached_property
    def form(self) -> tuple[str, Any] | None:
        """The option that says which form the answers have, and its value; None if they are free."""
        return next(((name, value) for name in FORMS if (value := getattr(self, name)) is not None), None)

    @cached_property
    def reserve(self) -> int:
        """The number of rows of a prompt that a tree keeps without running them."""
        return self.groups if self.spec.tree else 0

    @cached_property
    def width(self) -> int:
        """The number of children of a row. A tree keeps at most K of them, and K may sleep. One more is the threshold
        of the importance weights."""
        return 2 * self.groups + 1 if self.spec.tree else self.w

    @cached_property
    def pool_size(self) -> int:
        """The number N of rows in the pool of a prompt."""
        return self.groups * self.w if self.spec.branches else self.groups

    @cached_property
    def groups(self) -> int:
        """The number of beams that are kept at every step."""
        return self.k + self.spare

    @property
    def max_tokens_per_call(self) -> int:
        """The most tokens that the pools of one decode call may have together. `deterministic` does not lower it,
        because its results do not depend on it, and a call with more prompts needs less padding."""
        least = Settings.max_tokens_per_forward if self.deterministic else 0
        return FORWARDS_PER_CALL * max(self.max_tokens_per_forward, least)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def options(self) -> dict[str, Any]:
        """Return the keyword arguments that make `d5p4.generate` use these settings with the same model."""
        own = {name: getattr(self, name) for name in parameters_of(Settings) if name != "savings"}
        return {name: value for name, value in (own | dict(self.params)).items() if value is not None}

    def value(self, option: str) -> Any:
        return self.params[option] if option in self.params else getattr(self, option)


@dataclass(frozen=True)
class ServerLimits(Checked):
    """The limits of a server. Every field is a flag of `d5p4 serve`."""

    max_queue: Annotated[int, Option("Prompts that may wait. Further prompts get status 429.", least=1)] = 256
    max_pool: Annotated[int, Option("Rows per pool, (n + spare) * w, that a request may ask for.", least=1)] = 256
    max_prompt_tokens: Annotated[int | None, Option("Tokens per prompt.", least=1, unset="the model's limit")] = None
    max_gen_length: Annotated[int | None, Option("Tokens per answer.", least=1, unset="the model's limit")] = None
    max_steps: Annotated[int, Option("Denoising steps per request.", least=1)] = 1024
    max_work: Annotated[
        float | None, Option("Operations per request, in units of 10^12.", above=0, unset="CPU 6, GPU 100000")
    ] = None
    max_body: Annotated[int, Option("Bytes per request.", least=1)] = 1 << 20
    timeout: Annotated[float, Option("Seconds per request, waiting included.", above=0)] = 300.0
    grace: Annotated[float, Option("Seconds that running requests have to finish when the server stops.", above=0)] = (
        30.0
    )


def draws_first(order: str) -> bool:
    """Return whether an order draws tokens before it chooses positions, so that it cannot drive a tree."""
    return order == "ancestral" or registries()[1].named(order).draws_first


def public(door: str) -> dict[str, Parameter]:
    """Return the options that an interface (such as "http") offers, in the order of the table."""
    return {name: p for name, p in parameters_of(Settings).items() if door not in p.option.hidden}


def unescaped(text: str) -> str:
    """Return a text in which `\\n`, `\\r`, `\\t` and two backslashes are the characters that they stand for."""
    return re.sub(r"\\([nrt\\])", lambda escape: ESCAPES[escape[1]], text)


def plain_number(value: Any) -> Any:
    """Return a numpy or torch scalar as a Python number, and any other value as it is."""
    return value.item() if getattr(value, "ndim", None) == 0 and hasattr(value, "item") else value


def whole_number(option: str, value: Any, least: int = 1) -> int:
    """Return the value of an argument, or raise an error if it is not a whole number of at least `least`."""
    return Parameter(option, int, ABSENT, False, Option(least=least)).check(value)
