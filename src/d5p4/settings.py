"""All options of a decode in one validated object, which `generate` and the command line build.

What the caller leaves out (None) comes from the model folder's generation_config.json, there only under its key `d5p4`
({"length": ..., "steps": ..., "order": ..., "methods": {"d5p4": {"beta": ...}}}), then from the method's presets, then
from the paper.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, get_args

from .errors import D5P4Error
from .methods import METHODS, Method, method_named
from .project import ORDERS
from .quality import KINDS, NORMALISERS, POSITIONS
from .select import Solver
from .similarity import FEATURES, SIMILARITIES
from .types import Model

SOLVERS = get_args(Solver)
LARGEST_POOL = 1 << 14  # similarity is N x N
FIXED_TOKENS = 4096
"""Tokens of every forward under `deterministic`, unless given. Each step fills its last forward up, half a forward on
average, so small is good; below about 2000 tokens the matrix units of a large model wait for its weights."""
FORWARDS_A_CALL = 8
_REMASKING = {"low_confidence": "confidence", "random": "random"}
_ALG = {"origin": "ancestral", "maskgit_plus": "confidence", "topk_margin": "margin", "entropy": "entropy"}


@dataclass(frozen=True)
class Settings:
    """Every field is what `d5p4.generate` documents under the same name; `params` are the method's own parameters."""

    method: str = "d5p4"
    k: int = 4
    w: int = 4
    spare: int = 0  # beams beyond k, of which the k best different ones are returned
    gen_length: int | None = None  # None: the model's length for MDLM, 128 otherwise
    steps: int | None = None  # total over all blocks; None: one a position
    block_length: int | None = None  # None: the whole window
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    order: str = "confidence"
    order_temperature: float = 0.1
    guidance: float = 1.0
    guidance_window: tuple[int, int] | None = None  # global steps start..stop-1
    select_window: tuple[int, int] | None = None  # global steps start..stop-1; the last step always selects
    distinct: bool = False
    eos: str = "last"
    quality: str = "entropy"
    positions: str = "all"
    normalise: str = "minmax"
    features: str = "flatten"
    feature_layer: str = "model"
    similarity: str = "cosine"
    gamma: float = 1.0
    solver: Solver = "local-search"
    max_tokens_per_forward: int = 16384  # 4096 with deterministic
    deterministic: bool = False
    chat: bool | None = None
    history: bool = False
    logprobs: bool = False
    savings: bool = True  # exact savings; False runs every row of every pool (for tests and measurements)
    params: Mapping[str, Any] = field(default_factory=dict)

    @staticmethod
    def make(model: Model, **given: Any) -> Settings:
        """Resolve and validate. Unknown names are method parameters; foreign ones are an error."""
        given = _without_aliases({name: plain_number(value) for name, value in given.items() if value is not None})
        defaults = dict(model.generation_defaults)
        if "length" in defaults:
            defaults["gen_length"] = defaults.pop("length")
        by_method = defaults.pop("methods", {})
        if not isinstance(by_method, Mapping) or not all(isinstance(own, Mapping) for own in by_method.values()):
            raise D5P4Error(f"generation_config.json: 'methods' must hold parameters by method, not {by_method!r}")
        method = method_named(given.get("method", defaults.get("method", Settings.method)))
        names = {f.name for f in fields(Settings)} - {"params"}
        unknown = sorted(set(defaults) - names)
        if unknown:
            raise D5P4Error(f"generation_config.json has unknown names under 'd5p4': {', '.join(unknown)}")
        own = {name: value for name, value in given.items() if name not in names}
        chosen = {"order": model.default_order} | dict(method.presets) | defaults
        chosen |= {name: value for name, value in given.items() if name in names}
        if chosen.get("deterministic") is True:
            chosen.setdefault("max_tokens_per_forward", FIXED_TOKENS)
        if "eos" not in chosen:
            chosen["eos"] = "free" if model.carry_over or chosen["order"] == "ancestral" else "last"
        chosen["params"] = _parameters(method, own, by_method.get(method.name, {}))
        if "solver" in given and not method.solver:
            raise D5P4Error(f"method {method.name!r} has no solver; leave solver={given['solver']!r} out")
        for name in ("guidance_window", "select_window"):
            window: Any = chosen.get(name)
            window = window.tolist() if hasattr(window, "tolist") else window
            chosen[name] = tuple(window) if isinstance(window, list) else window
        settings = Settings(**chosen)
        settings.check()
        return settings

    @property
    def spec(self) -> Method:
        return METHODS[self.method]

    @property
    def pool_size(self) -> int:
        """N."""
        return self.groups * self.w if self.spec.wide else self.groups

    @property
    def groups(self) -> int:
        """Beams kept at every step."""
        return self.k + self.spare

    @property
    def max_tokens_per_call(self) -> int:
        """Tokens that the pools of one decode call may have together.

        Deterministic results do not depend on it, so it is then no smaller than usual: what fills forwards up is shared
        by more prompts.
        """
        least = Settings.max_tokens_per_forward if self.deterministic else 0
        return FORWARDS_A_CALL * max(self.max_tokens_per_forward, least)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def options(self) -> dict[str, Any]:
        """Keyword arguments of `d5p4.generate` that give these settings, with the same model."""
        own = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("params", "savings")}
        if not self.spec.solver:
            del own["solver"]
        return {name: value for name, value in (own | dict(self.params)).items() if value is not None}

    def check(self) -> None:
        """Raise a sentence for the first value that cannot be."""
        _whole("k", self.k, 1)
        _whole("w", self.w, 1)
        _whole("spare", self.spare, 0)
        if self.pool_size > LARGEST_POOL:
            size = f"k={self.k}, w={self.w} and spare={self.spare}" if self.spare else f"k={self.k} and w={self.w}"
            raise D5P4Error(f"{size} make a pool of more than {LARGEST_POOL} rows; lower one")
        for name, most in (("gen_length", 2**31), ("steps", 10**6), ("block_length", 2**31), ("top_k", 2**31)):
            if getattr(self, name) is not None:
                _whole(name, getattr(self, name), 1, most)
        _whole("max_tokens_per_forward", self.max_tokens_per_forward, 1)
        _number("temperature", self.temperature, 0)
        _number("order_temperature", self.order_temperature, 0)
        _number("gamma", self.gamma, 0)
        if self.top_p is not None and not (_is_number(self.top_p) and 0 < self.top_p <= 1):
            raise D5P4Error(f"top_p={self.top_p!r} must lie in (0, 1]")
        if not (_is_number(self.guidance) and 1 <= self.guidance < math.inf):
            raise D5P4Error(
                f"guidance={self.guidance!r} must be a number of at least 1 (1 is off; cfg_scale is guidance - 1)"
            )
        _among("order", self.order, ("ancestral", *ORDERS))
        _among("eos", self.eos, ("last", "free", "never"))
        _among("quality", self.quality, KINDS)
        _among("positions", self.positions, POSITIONS)
        _among("normalise", self.normalise, NORMALISERS)
        _among("features", self.features, FEATURES)
        _among("feature_layer", self.feature_layer, ("model", "head"))
        _among("similarity", self.similarity, SIMILARITIES)
        _among("solver", self.solver, SOLVERS)
        _window("guidance_window", self.guidance_window)
        _window("select_window", self.select_window)
        for name in ("distinct", "history", "logprobs", "savings", "deterministic", "chat"):
            if not isinstance(getattr(self, name), bool) and not (name == "chat" and self.chat is None):
                raise D5P4Error(f"{name}={getattr(self, name)!r} must be True or False")
        if self.eos == "last" and self.order == "ancestral":
            raise D5P4Error("eos='last' needs an order to put the end-of-text last in; the ancestral rule has none")
        fixed_order = self.order in ("confidence", "margin", "entropy")
        if fixed_order or (self.order == "tempered" and self.order_temperature == 0):
            self.check_random(f"order={self.order!r}")
        self.spec.build(self)  # the selector checks its own parameters

    def check_random(self, fixed: str) -> None:
        """Raise when tokens are fixed too, so that k answers would be one; `fixed` says what fixes the order."""
        if self.k > 1 and (self.temperature == 0 or self.top_k == 1):
            cause = "temperature=0" if self.temperature == 0 else "top_k=1"
            raise D5P4Error(
                f"{cause} with {fixed} is deterministic and would give {self.k} equal answers; "
                "use order='tempered' (or 'random') with several steps, a temperature above 0, or k=1"
            )


def _without_aliases(given: dict[str, Any]) -> dict[str, Any]:
    """Other libraries' names become ours; naming a thing twice is an error."""
    plain = {"num_return_sequences": "k", "max_new_tokens": "gen_length"}
    translated = {
        "cfg_scale": ("guidance", lambda s: s + 1 if _is_number(s) else s),
        "remasking": ("order", lambda name: _translate("remasking", name, _REMASKING)),
        "alg": ("order", lambda name: _translate("alg", name, _ALG)),
    }
    result = dict(given)
    for alias in (*plain, *translated):
        if alias not in result:
            continue
        name, change = translated.get(alias, (plain.get(alias, ""), lambda value: value))
        value = result.pop(alias)
        if name in result:
            raise D5P4Error(f"{alias} and {name} are the same setting; give one of them")
        result[name] = change(value)
    return result


def _translate(alias: str, name: Any, table: Mapping[str, str]) -> str:
    if not isinstance(name, str) or name not in table:
        raise D5P4Error(f"{alias}={name!r} is not known; use one of {', '.join(table)}")
    return table[name]


def _parameters(method: Method, own: dict[str, Any], configured: Mapping[str, Any]) -> dict[str, Any]:
    foreign = sorted((set(own) | set(configured)) - set(method.parameters))
    if foreign:
        known = ", ".join([*method.parameters, *(["solver"] if method.solver else [])]) or "none"
        raise D5P4Error(f"method {method.name!r} has no parameter {', '.join(foreign)} (its own: {known})")
    for name, value in {**configured, **own}.items():
        default = method.parameters[name]
        if isinstance(default, bool):
            fits = isinstance(value, bool)
        elif isinstance(default, int):
            fits = isinstance(value, int) and not isinstance(value, bool)
        elif isinstance(default, float):
            fits = _is_number(value)
        else:  # a name, or a number that may be left out
            fits = isinstance(value, str) or (default is None and _is_number(value))
        if not fits:
            raise D5P4Error(f"{name}={value!r} is not a value for method {method.name!r} (default {default!r})")
    return dict(method.parameters) | dict(configured) | own


def plain_number(value: Any) -> Any:
    """A numpy or torch scalar as the Python number it holds."""
    return value.item() if getattr(value, "ndim", None) == 0 and hasattr(value, "item") else value


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and -1e308 <= value <= 1e308


def _whole(name: str, value: Any, least: int, most: int = 2**31) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        limit = f" and at most {most}" if isinstance(value, int) and value > most else ""
        raise D5P4Error(f"{name}={value!r} must be a whole number of at least {least}{limit}")


def _number(name: str, value: Any, least: float) -> None:
    if not (_is_number(value) and least <= value < math.inf):
        raise D5P4Error(f"{name}={value!r} must be a number of at least {least:g}")


def _among(name: str, value: Any, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise D5P4Error(f"{name}={value!r} is not known; use one of {', '.join(choices)}")


def _window(name: str, value: Any) -> None:
    if value is None:
        return
    if not (isinstance(value, tuple) and len(value) == 2 and all(isinstance(x, int) for x in value)) or not (
        0 <= value[0] <= value[1]
    ):
        raise D5P4Error(f"{name}={value!r} must be two whole numbers, start <= stop, counted in steps from 0")
