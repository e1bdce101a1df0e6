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
from dataclasses import MISSING, asdict, dataclass, field, fields, is_dataclass
from functools import cache
from importlib import import_module
from importlib.machinery import SourceFileLoader
from importlib.metadata import entry_points
from importlib.util import module_from_spec, spec_from_file_location
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Union, get_args, get_origin, get_type_hints

from .errors import ABSENT, D5P4Error, nearest

if TYPE_CHECKING:
    from .methods import Method
    from .project import Order, Reveal
    from .types import Model

GROUPS = {
    "basic": "Basic options",
    "search": "Search: how candidates are rated and chosen",
    "reveal": "Reveal: which tokens are drawn, and when",
    "research": "Research: measurements, memory and exact bits",
}
LARGEST_POOL = 1 << 14  # a pool has at most this many rows N, because the similarity matrix is N x N
DETERMINISTIC_TOKENS = 4096
"""The number of tokens per forward under `deterministic`. Every forward is padded to this size, so a small size wastes
little. But below about 2,000 tokens, a large model spends most of a forward on reading its weights."""
FORWARDS_PER_CALL = 8  # the pools of a decode call may hold as many tokens as this many forwards
STEP_WINDOW = "must be steps counted from 0, such as 0:64, or shares of the steps between 0 and 1, such as 0:0.5"
CARD = ("grader", "examples")  # entries among a model's defaults that describe the model and are no options

Window = tuple[float, float]
"""A pair (start, stop) means the steps start..stop-1, counted from 0. With an adaptive reveal rule, it means shares of
the revealed positions between 0 and 1. The text "START:STOP" is also accepted."""


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
    kind: type  # int, float, bool, str, tuple (a window) or object (anything)
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
        if self.kind is bool and not isinstance(value, bool):
            raise self._error("must be True or False", value)
        if self.kind is str:
            if not isinstance(value, str) or (self.choices and value not in self.choices):
                raise self._error(_unknown(value, self.choices) if self.choices else "must be text", value)
        elif self.kind in (int, float):
            self._number(value)
        return value

    def from_text(self, text: Any) -> Any:
        """Convert a text of the command line or lm-eval to the option's type. If it does not fit, return the text."""
        if not isinstance(text, str):
            return text
        if self.optional and text.lower() == "none":
            return None
        if self.kind is bool:
            return {"true": True, "false": False}.get(text.lower(), text)
        for kind in {int: (int,), float: (int, float)}.get(self.kind, ()):
            try:
                return kind(text)
            except ValueError:
                continue
        return text

    def range(self) -> str:
        """Return the allowed range as text, such as "of at least 1 and at most 9". The text is empty without limits."""
        option, parts = self.option, []
        if option.least is not None:
            parts.append(f"of at least {option.least:,}")
        if option.above is not None:
            parts.append(f"above {option.above:,}")
        if option.most is not None:
            parts.append(f"at most {option.most:,}" if parts else f"of at most {option.most:,}")
        return " and ".join(parts)

    def _number(self, value: Any) -> None:
        right = isinstance(value, int if self.kind is int else (int, float)) and not isinstance(value, bool)
        if right:
            low = -1e308 if self.option.least is None else self.option.least
            high = (2**31 if self.kind is int else 1e308) if self.option.most is None else self.option.most
            right = low <= value <= high and (self.option.above is None or value > self.option.above)
        if not right:
            kind = "a whole number" if self.kind is int else "a number"
            large = " and at most 2147483648" if isinstance(value, int) and value > 2**31 and self.kind is int else ""
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


def _unknown(value: Any, choices: Iterable[str], what: str = "is not known") -> str:
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
    kind = str if literals else get_origin(kind) or kind
    known = kind if kind in (int, float, bool, str, tuple) else object
    return Parameter(name, known, None if default is MISSING else default, optional, option, literals)


def validate(table: Any) -> None:
    """Raise an error if a parameter of a dataclass instance has a wrong value."""
    for name, parameter in parameters_of(table.__class__).items():
        parameter.check(getattr(table, name))


class Checked:
    """The base class of a dataclass of parameters. It checks each field against its type and range."""

    def __post_init__(self) -> None:
        validate(self)


class Registry(dict[str, Any]):
    """The methods, orders or reveal rules by name."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def add(self, item: Registered) -> None:
        if item.name in self:
            article = "an" if self.kind == "order" else "a"
            raise D5P4Error(f"there is already {article} {self.kind} {item.name!r}; choose another name")
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
        raise D5P4Error(_unknown(name, self, what), option=self.kind, value=name)


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
    """Return the methods, orders and reveal rules."""
    from .methods import METHODS
    from .project import ORDERS, REVEALS

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
    chat: Annotated[
        bool | None, Option("Apply the chat template.", "basic", unset="if there is one", hidden=("http", "lm-eval"))
    ] = None

    top_k: Annotated[int | None, Option("Sample only from this many of the likeliest tokens.", "reveal", 1)] = None
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
    history: Annotated[bool, Option("Return every step's pool.", hidden=("command", "http", "lm-eval"))] = False
    savings: Annotated[
        bool, Option("Run equal rows through the model only once.", hidden=("command", "http", "lm-eval", "python"))
    ] = True
    params: Mapping[str, Any] = field(default_factory=dict)

    @staticmethod
    def make(model: Model, **given: Any) -> Settings:
        """Fill in defaults and check values. Other names must be parameters of method, order or reveal rule."""
        sampling = given.get("do_sample") is True
        given = translate({name: value for name, value in given.items() if value is not None}, model)
        defaults = {name: value for name, value in model.generation_defaults.items() if name not in CARD}
        if "length" in defaults:
            defaults["gen_length"] = defaults.pop("length")
        by_method = defaults.pop("methods", {})
        if not isinstance(by_method, Mapping) or not all(isinstance(own, Mapping) for own in by_method.values()):
            raise D5P4Error(f"generation_config.json: 'methods' must map methods to parameters, not {by_method!r}")
        named = given.get("method", defaults.get("method", Settings.method))
        entry = dict(by_method.get(named, {})) if isinstance(named, str) else {}
        try:
            return _resolved(model, defaults, entry, given, sampling)
        except D5P4Error as error:
            if error.option in given or error.option not in defaults | entry:
                raise
            reason = f"{error.reason} (the model's generation_config.json sets this value)"
            raise D5P4Error(reason, option=error.option, value=error.value) from None

    @property
    def spec(self) -> Method:
        return registries()[0].named(self.method)

    @property
    def order_spec(self) -> Order:
        return registries()[1].named(self.order)

    @property
    def reveal_spec(self) -> Reveal:
        return registries()[2].named(self.reveal)

    @property
    def adaptive(self) -> bool:
        """Whether rows reveal different numbers of positions at a step."""
        return self.reveal_spec.adaptive or self.spec.tree

    @property
    def reserve(self) -> int:
        """The number of rows of a prompt that a tree keeps without running them."""
        return self.groups if self.spec.tree else 0

    @property
    def width(self) -> int:
        """The number of children of a row. A tree keeps at most K of them, and K may sleep. One more is the threshold
        of the importance weights."""
        return 2 * self.groups + 1 if self.spec.tree else self.w

    @property
    def pool_size(self) -> int:
        """The number N of rows in the pool of a prompt."""
        return self.groups * self.w if self.spec.branches else self.groups

    @property
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

    def check(self) -> None:
        """Raise an error if a value is not allowed, by itself or together with other values."""
        validate(self)
        if self.pool_size > LARGEST_POOL:
            size = f"with w={self.w}{f' and spare={self.spare}' if self.spare else ''}"
            reason = f"{size} makes a pool of more than {LARGEST_POOL} rows; lower one of them"
            raise D5P4Error(reason, option="k", value=self.k)
        if self.spec.tree and draws_first(self.order):
            reason = f"draws tokens before positions, but method {self.method} does not; use order top, or method d5p4"
            raise D5P4Error(reason, option="order", value=self.order)
        if self.order == "ancestral":
            chance = "needs another order, such as 'top'; the ancestral order reveals by chance"
            for option, usual in (("eos", ("free", "never")), ("reveal", ("schedule",)), ("start", ("order",))):
                if getattr(self, option) not in usual:
                    raise D5P4Error(chance, option=option, value=getattr(self, option))
        for option in ("guidance_window", "select_window"):
            window = getattr(self, option)
            steps = window is None or all(isinstance(x, int) for x in window)
            if window is not None and not (self.adaptive or steps) and window[1] > 1:
                raise D5P4Error(STEP_WINDOW, option=option, value=window)
            if window is not None and self.adaptive and window[1] > 1:
                reason = f"counts steps, but with reveal={self.reveal!r} it must be shares of the revealed positions"
                raise D5P4Error(f"{reason} between 0 and 1, such as 0:0.5", option=option, value=window)
        if not self.spec.tree and (
            not self.order_spec.random or (self.order == "tempered" and self.order_temperature == 0)
        ):
            self.check_random(f"order={self.order!r}")
        select = self.spec.build(self)  # the selector checks its own parameters
        if hasattr(select, "check_reveal"):
            select.check_reveal(self)
        self.reveal_spec.build(self)

    def check_random(self, cause: str) -> None:
        """The order of positions is known not to be random, and `cause` says why. Raise an error if the tokens are not
        random either, because all answers would then be equal."""
        if self.k > 1 and (self.temperature == 0 or self.top_k == 1) and not hasattr(self.spec.selector, "shift"):
            option = "temperature" if self.temperature == 0 else "top_k"
            reason = (
                f"with {cause} is deterministic and would give {self.k} equal answers; use order='tempered' (or "
                "'random') with several steps, a temperature above 0, or ask for one answer"
            )
            raise D5P4Error(reason, option=option, value=getattr(self, option))


def _resolved(
    model: Model, defaults: dict[str, Any], entry: dict[str, Any], given: dict[str, Any], sampling: bool
) -> Settings:
    """Return the settings that follow from what the caller gave and from the model's defaults: those for all methods,
    of which only those count that have a meaning for the method, and its own `entry`."""
    table = parameters_of(Settings)
    methods, orders, reveals = registries()
    method = methods.named(given.get("method", defaults.get("method", Settings.method)))
    presets: dict[str, Any] = {"order": model.default_order} | dict(method.presets)
    if method.tree and draws_first(defaults.get("order", "top")):
        defaults.pop("order")
    usable = {name: value for name, value in defaults.items() if name not in method.unused}
    chosen = presets | usable | entry | given
    if sampling and chosen.get("temperature") == 0 and "temperature" not in given:
        chosen["temperature"] = 1.0
    order = orders.named(chosen.get("order", Settings.order))
    reveal = reveals.named(chosen.get("reveal", Settings.reveal))
    if reveal.adaptive and "steps" in given and "reveal" not in given:
        # The caller's number of steps replaces the model's adaptive rule.
        reveal = reveals.named(Settings.reveal)
        chosen["reveal"] = reveal.name
    if unknown := sorted(set(defaults) - set(table) - set(order.parameters) - set(reveal.parameters)):
        raise D5P4Error(f"generation_config.json has unknown names under 'd5p4': {', '.join(unknown)}")
    # Ignore the model's default for a parameter of a rule or order that the caller has replaced.
    used = {name for item in (method, order, reveal) for name in item.parameters}
    known = registered_parameters()
    own = {
        name: value
        for name, value in chosen.items()
        if name not in table and (name in used or name in given or name not in known)
    }
    chosen = {name: value for name, value in chosen.items() if name in table}
    if chosen.get("deterministic") is True:
        chosen.setdefault("max_tokens_per_forward", DETERMINISTIC_TOKENS)
    if "eos" not in chosen:
        chosen["eos"] = "free" if model.carry_over or chosen["order"] == "ancestral" else "last"
    if method.tree:
        method.refuse(entry | given, chosen)
    chosen.setdefault("stop", reveal.adaptive or method.tree)
    if reveal.adaptive and chosen.pop("steps", None) is not None and "steps" in given:
        reason = f"has no meaning with reveal={reveal.name!r}, which takes as many steps as it needs; leave it out"
        raise D5P4Error(reason, option="steps", value=given["steps"])
    chosen = {name: table[name].check(value) for name, value in chosen.items()}
    _fit_to_attention(chosen, model)
    settings = Settings(**chosen, params=own_parameters((method, order, reveal), own))
    settings.check()
    return settings


def _fit_to_attention(chosen: dict[str, Any], model: Model) -> None:
    """Set block_length and cache where the attention of the model decides them. Raise an error if they do not fit."""
    from .types import block_of

    block, cacheable = block_of(model), getattr(model, "cache_shape", None) is not None
    if block and chosen.setdefault("block_length", block) != block:
        reason = (
            f"does not fit: this model attends in blocks of {block} tokens; leave it out, or write block_length into "
            "the model's config.json if it was trained with other blocks"
        )
        raise D5P4Error(reason, option="block_length", value=chosen["block_length"])
    fixed = chosen.get("deterministic") is True
    cache = chosen.setdefault("cache", "exact" if block and cacheable and not fixed else "none")
    reason = ""
    if cache == "none":
        return
    if fixed:
        reason = "does not fit: deterministic=True runs whole rows; leave out cache or deterministic"
    elif not cacheable:
        reason = f"is not possible: {model.name} cannot continue from stored keys and values; use 'none'"
    elif cache == "exact" and not block:
        reason = "needs a block-causal model, but this model attends to all positions; use 'prefix', 'dual' or 'none'"
    elif cache != "exact" and block:
        reason = "is an approximation, but the cache of a block-causal model is exact; use 'exact' or 'none'"
    elif cache != "exact" and chosen.get("block_length") is None:
        reason = "needs block_length, because keys and values are stored when a block begins; give one, such as 32"
    if reason:
        raise D5P4Error(reason, option="cache", value=cache)


def draws_first(order: str) -> bool:
    """Return whether an order draws tokens before it chooses positions, so that it cannot drive a tree."""
    return order == "ancestral" or registries()[1].named(order).draws_first


def own_parameters(items: Sequence[Registered], own: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters of the method, the order and the reveal rule: the caller's values `own`, and defaults for
    all other parameters."""
    table = {name: parameter for item in items for name, parameter in item.parameters.items()}
    for name in own:
        if name not in table:
            raise unknown_option(name, items)
    return {name: parameter.check(own.get(name, parameter.default)) for name, parameter in table.items()}


def unknown_option(name: str, items: Sequence[Registered]) -> D5P4Error:
    """Return the error for a name that is neither an option nor a parameter of the method, order or reveal rule."""
    method, *rest = items
    known = [*public("python"), *(own for item in items for own in item.parameters)]
    own = ", ".join(method.parameters) or "none"
    for registry in registries():
        if others := [other.name for other in registry.values() if name in other.parameters]:
            kind = "" if registry.kind == "method" else f"{registry.kind} "
            chosen = next((item.name for item in items if item.registry is registry), "")
            takes = f"method {method.name} takes {own}" if not kind else f"{registry.kind} is {chosen} here"
            return D5P4Error(f"it is a parameter of {kind}{', '.join(others)}; {takes}", option=name)
    hint = "this option is not offered here" if name in known else nearest(name, known)
    return D5P4Error(hint or f"there is no such option; the parameters of method {method.name} are {own}", option=name)


def public(door: str) -> dict[str, Parameter]:
    """Return the options that an interface (such as "http") offers, in the order of the table."""
    return {name: p for name, p in parameters_of(Settings).items() if door not in p.option.hidden}


_ORDERS_ELSEWHERE = {
    "remasking": {"low_confidence": "confidence", "random": "random"},
    "alg": {"origin": "ancestral", "maskgit_plus": "confidence", "topk_margin": "margin", "entropy": "entropy"},
}
OF_LOAD = ("dtype", "torch_dtype", "device", "device_map", "trust_remote_code")
REFUSED = {  # names of options elsewhere, and what to write instead; {k} is the option k as the caller's door spells it
    "max_length": "prompt and answer have their own lengths here; use {gen_length} for the answer",
    "pad_token_id": "d5p4 pads by itself; leave it out",
    "num_beams": "use {k} for the number of answers and {w} for the children of each",
    "n": "use {k} for the number of answers",
    "max_tokens": "use {gen_length} for the length of the answer",
    "threshold": "use {reveal}='threshold' with {tau}",
    "early_stop": "use {stop}; only HTTP says early_stop",
    "prompt": "the prompt has no name: d5p4.generate(model, 'TEXT') in Python, d5p4 generate 'TEXT' in a shell",
    "input_ids": "give the tokenizer's output as the prompt: generate(model, inputs)",
    "stop_strings": "answers end at end-of-text; cut the texts yourself, or ask d5p4 serve, which takes stop strings",
    "batch_size": "d5p4 makes batches by itself; use {max_tokens_per_forward} to limit memory",
    "repetition_penalty": "there is no penalty; use {diversity}, or another {method}, for answers that differ more",
    "streamer": "use callback= in Python, which gets every step; d5p4 serve streams with stream=true",
    **dict.fromkeys(OF_LOAD, "it belongs to d5p4.load"),
    "eos_token_id": "end-of-text comes from the model's tokenizer; leave it out",
}
ALIASES = {p.option.alias: p.name for p in parameters_of(Settings).values() if p.option.alias}
TRANSLATED = (*ALIASES, *_ORDERS_ELSEWHERE, "cfg_scale")


def refused(name: str, spell: Callable[[str], str] = str) -> D5P4Error:
    """Return the error for an option of another library. `spell` turns the Python name of an option into its name at
    the caller's door."""
    text = REFUSED["stop_strings" if name == "stop" else name]
    return D5P4Error(re.sub(r"\{(\w+)\}", lambda match: spell(match[1]), text), option=name)


def translate(given: Mapping[str, Any], model: Model) -> dict[str, Any]:
    """Replace the names of options in other libraries by our names. Raise an error if an option is given twice."""
    result: dict[str, Any] = {}
    for name, value in given.items():
        value = plain_number(value)
        if name == "eos_token_id" and value in (*model.eos_ids, list(model.eos_ids)):
            continue
        if name in REFUSED or (name == "stop" and isinstance(value, (str, list, tuple))):
            raise refused(name)
        target = name
        if name in ALIASES:
            target = ALIASES[name]
        elif name == "cfg_scale":
            target, value = "guidance", value + 1 if isinstance(value, (int, float)) else value
        elif name in _ORDERS_ELSEWHERE:
            target, table = "order", _ORDERS_ELSEWHERE[name]
            if value not in table:
                raise D5P4Error(_unknown(value, table), option=name, value=value)
            value = table[value]
        elif name == "do_sample":
            if not isinstance(value, bool):
                raise D5P4Error("must be True or False", option=name, value=value)
            if value:
                continue
            target, value = "temperature", 0.0
        if target in result or (target != name and target in given):
            raise D5P4Error(f"{name} and {target} are the same setting; give one of them", option=name)
        result[target] = value
    return result


def typed(given: Mapping[str, Any], door: str, methods: Sequence[Method] = ()) -> dict[str, Any]:
    """Convert options that were written as text into keyword arguments of `d5p4.generate`.

    The parameters of `methods` are allowed; by default these are the parameters of the method that `given` names. If it
    names none, those of every method are allowed, because only the model says which method is its default.
    """
    names = registries()
    if not methods:
        named = given.get("method")
        methods = [names[0].named(named)] if named else [names[0][Settings.method], *names[0].values()]
    table = parameters_of(Settings)
    items: list[Registered] = [*methods, *(item for registry in names[1:] for item in registry.values())]
    known = {name: p for item in items for name, p in item.parameters.items()} | public(door)
    known |= {alias: table[name] for alias, name in ALIASES.items()} | {"cfg_scale": table["guidance"]}
    for name in given:
        if name not in known and name not in TRANSLATED:
            raise unknown_option(name, methods[:1])
    return {name: known[name].from_text(value) if name in known else value for name, value in given.items()}


def gives_length(options: Mapping[str, Any]) -> bool:
    """Return whether the options of the caller include the number of tokens to append."""
    return any(options.get(name) is not None for name in ("gen_length", "max_new_tokens"))


def plain_number(value: Any) -> Any:
    """Return a numpy or torch scalar as a Python number, and any other value as it is."""
    return value.item() if getattr(value, "ndim", None) == 0 and hasattr(value, "item") else value


def whole(option: str, value: Any, least: int = 1) -> int:
    """Return the value of an argument, or raise an error if it is not a whole number of at least `least`."""
    return Parameter(option, int, ABSENT, False, Option(least=least)).check(value)
