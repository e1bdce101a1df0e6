"""Turn the options of a caller into settings: translate names of other libraries, add defaults, and check all rules.

`resolve` merges the options of the caller, the defaults of the model and the defaults of the library into `Settings`.
Then every rule of `RULES` checks the settings, wherever the values come from. So a value in a model's
generation_config.json is checked like an option of the caller.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch

from .constraint import Constraint, Vocabulary
from .errors import D5P4Error, nearest
from .ops import kernels
from .options import (
    DETERMINISTIC_TOKENS,
    FORMS,
    LARGEST_POOL,
    Registered,
    Settings,
    draws_first,
    parameters_of,
    plain_number,
    public,
    registered_parameters,
    registries,
    unknown_name,
)
from .search import Method
from .types import Model, block_of

CARD = ("grader", "examples")  # entries among a model's defaults that describe the model and are no options


def resolve(model: Model, given: Mapping[str, Any], budget: int | None = None) -> Settings:
    """Return the settings for the options of a caller. An option that is not given, or None, has its value from the
    model's entry for the method, or else from the model's defaults for all methods, the presets of the method, or the
    table of options. `budget` replaces the table's default of max_tokens_per_forward."""
    sampling = given.get("do_sample") is True
    given = translate({name: value for name, value in given.items() if value is not None}, model)
    defaults = {name: value for name, value in model.generation_defaults.items() if name not in CARD}
    if "length" in defaults:
        defaults["gen_length"] = defaults.pop("length")
    entries = defaults.pop("methods", {})
    if not isinstance(entries, Mapping) or not all(isinstance(entry, Mapping) for entry in entries.values()):
        raise D5P4Error(f"generation_config.json: 'methods' must map methods to parameters, not {entries!r}")
    for name in entries:
        try:
            registries()[0].named(name)
        except D5P4Error as error:
            raise D5P4Error(f"generation_config.json, entry 'methods': {error}") from None
    method = given.get("method", defaults.get("method", Settings.method))
    entry = dict(entries.get(method, {})) if isinstance(method, str) else {}
    if sampling and not (defaults | entry).get("temperature"):
        given.setdefault("temperature", Settings.temperature)
    try:
        settings = _merge(model, defaults, entry, given, budget or Settings.max_tokens_per_forward)
        check(settings, model)
    except D5P4Error as error:
        if error.option in given or error.option not in defaults | entry:
            raise
        reason = f"{error.reason} (the model's generation_config.json sets this value)"
        raise D5P4Error(reason, option=error.option, value=error.value) from None
    return settings


def _merge(
    model: Model, defaults: dict[str, Any], entry: dict[str, Any], given: dict[str, Any], budget: int
) -> Settings:
    """Return settings that no rule has checked. A default of the model that has no meaning here has no effect.

    Deterministic forwards are padded to the whole budget. To pad less, a large budget is reduced, at most to a quarter.
    """
    table, (methods, orders, reveals) = dict(parameters_of(Settings)), registries()
    defaults = {name: table[name].check(value) if name in table else value for name, value in defaults.items()}
    method = methods.named(given.get("method", defaults.get("method", Settings.method)))
    presets = dict(method.presets)
    idle = {*_idle(method, (presets | defaults | entry | given).get("temperature"))}
    if method.tree and "order" in defaults and draws_first(defaults["order"]):
        idle.add("order")
    used = {name: value for name, value in defaults.items() if name not in idle}
    chosen = {"order": model.default_order, "reveal": Settings.reveal} | presets | used | entry | given
    if any(chosen.get(name) is not None for name in FORMS):
        chosen |= {"order": "left", "eos": "free", "stop": True, "steps": None, "start": "order"} | given
    if "steps" in given and "reveal" not in given:  # the caller's number of steps replaces the model's adaptive rule
        chosen["reveal"] = Settings.reveal if reveals.named(chosen["reveal"]).adaptive else chosen["reveal"]
    order, reveal = orders.named(chosen["order"]), reveals.named(chosen["reveal"])
    if reveal.adaptive and "steps" not in given:
        chosen.pop("steps", None)
    block, fixed = block_of(model), chosen.get("deterministic") is True
    chosen = {
        "eos": "free" if model.carry_over or order.name == "ancestral" else "last",
        "stop": reveal.adaptive or method.tree,
        "block_length": block,
        "cache": "exact" if block and not fixed and getattr(model, "cache_shape", None) else "none",
        "max_tokens_per_forward": max(budget // 4, min(budget, DETERMINISTIC_TOKENS)) if fixed else budget,
    } | chosen
    values = {name: table[name].check(value) for name, value in chosen.items() if name in table}
    if isinstance(values.get("json_schema"), (dict, bool)):
        with suppress(TypeError, ValueError, RecursionError):  # the rule says what is wrong
            values["json_schema"] = json.dumps(values["json_schema"])
    own = {name: parameter for part in (method, order, reveal) for name, parameter in part.parameters.items()}
    others = registered_parameters().keys() - given.keys()  # a default for a part that is not used has no effect
    if unknown := [name for name in chosen if name not in table | own and name not in others]:
        raise unknown_option(unknown[0], (method, order, reveal))
    params = {name: parameter.check(chosen.get(name, parameter.default)) for name, parameter in own.items()}
    return Settings(**values, params=params)


def _idle(method: Method, temperature: Any) -> tuple[str, ...]:
    return (*method.unused, "w") if method.tree and temperature != 0 else method.unused


Row = tuple[str, Any, str]
"""An option, whether its value is wrong, and the reason that the error gives."""


def check(settings: Settings, model: Model) -> None:
    """Raise an error if a rule finds a value wrong. Methods, orders and reveal rules check their own parameters."""
    for rule in RULES:
        require(settings, rule(settings, model))
    settings.spec.search(settings).check(settings)
    settings.reveal_spec.build(settings)


def require(settings: Settings, rows: Iterable[Row]) -> None:
    for option, wrong, reason in rows:
        if wrong:
            raise D5P4Error(reason, option=option, value=settings.value(option))


def _method(s: Settings, model: Model) -> Iterator[Row]:
    """Options that have no meaning for a tree must have their usual values."""
    spec, table = s.spec, parameters_of(Settings)
    what = f"has no meaning for {'a tree' if spec.name == 'tree' else f'method {spec.name}'}"
    reasons = {
        "w": "has no meaning at a temperature above 0, at which all tokens compete",
        "distinct": f"{what}, whose rows all differ",
        "stop": f"{what}, which always stops at the end of the text",
        "start_temperature": f"{what}, which draws no first token",
    } | dict.fromkeys(spec.without, what)
    for option in _idle(spec, s.temperature) if spec.tree else ():
        usual = True if option == "stop" else table[option].default
        reason = reasons.get(option, f"{what}, which chooses rows before it runs them")
        wrong = s.value(option) not in (usual, spec.presets.get(option, usual))
        yield option, wrong, f"{reason}; leave it out, or choose another method, such as d5p4"
    size = f"with w={s.w}{f' and spare={s.spare}' if s.spare else ''}"
    yield "k", s.pool_size > LARGEST_POOL, f"{size} makes a pool of more than {LARGEST_POOL} rows; lower one of them"


def _order(s: Settings, model: Model) -> Iterator[Row]:
    reason = f"draws tokens before positions, but method {s.method} does not; use order top, or method d5p4"
    yield "order", s.spec.tree and draws_first(s.order), reason
    for option, usual in (("eos", ("free", "never")), ("reveal", ("schedule",)), ("start", ("order",))):
        wrong = s.order == "ancestral" and s.value(option) not in usual
        yield option, wrong, "needs another order, such as 'top'; the ancestral order reveals by chance"
    if not s.spec.tree and (not s.order_spec.random or (s.order == "tempered" and s.order_temperature == 0)):
        yield equal_answers(s, f"order={s.order!r}")


def equal_answers(s: Settings, cause: str) -> Row:
    """Return the row of settings whose order of positions is not random, as `cause` says: if the tokens are not random
    either, all answers are equal."""
    option = "temperature" if s.temperature == 0 else "top_k" if s.top_k == 1 else "min_p"
    wrong = s.k > 1 and (s.temperature == 0 or s.top_k == 1 or s.min_p == 1) and not s.spec.search(s).separates
    reason = f"with {cause} is deterministic and would give {s.k} equal answers; use order='tempered' (or 'random')"
    return option, wrong, f"{reason} with several steps, a temperature above 0, or ask for one answer"


def _steps(s: Settings, model: Model) -> Iterator[Row]:
    reason = f"has no meaning with reveal={s.reveal!r}, which takes as many steps as it needs; leave it out"
    yield "steps", s.reveal_spec.adaptive and s.steps is not None, reason
    steps = "must be steps counted from 0, such as 0:64, or shares of the steps between 0 and 1, such as 0:0.5"
    shares = f"counts steps, but with reveal={s.reveal!r} it must be shares of the revealed positions between 0 and 1"
    for option in ("guidance_window", "select_window"):
        window = s.value(option) or (0, 0)
        whole_steps = not s.adaptive and all(isinstance(x, int) for x in window)
        yield option, window[1] > 1 and not whole_steps, f"{shares}, such as 0:0.5" if s.adaptive else steps


def _attention(s: Settings, model: Model) -> Iterator[Row]:
    block, approximate = block_of(model), s.cache in ("prefix", "dual")
    reason = f"does not fit: this model attends in blocks of {block} tokens; leave it out, or write block_length into"
    trained = "the model's config.json if it was trained with other blocks"
    yield "block_length", block and s.block_length != block, f"{reason} {trained}"
    if s.cache != "none":
        yield "cache", s.deterministic, "does not fit: deterministic=True runs whole rows; leave out one of them"
        reason = f"is not possible: {model.name} cannot continue from stored keys and values; use 'none'"
        yield "cache", not getattr(model, "cache_shape", None), reason
        yield "cache", not approximate and not block, "needs a block-causal model; use 'prefix', 'dual' or 'none'"
        reason = "is an approximation, but the cache of a block-causal model is exact; use 'exact' or 'none'"
        yield "cache", approximate and block, reason
        reason = "needs block_length, because keys and values are stored when a block begins; give one, such as 32"
        yield "cache", approximate and s.block_length is None, reason


def _device(s: Settings, model: Model) -> Iterator[Row]:
    """Without Triton, results on a GPU depend on the other prompts of a batch, except in float64: its rounding errors
    are far below 1e-9, the tolerance for ties."""
    if s.deterministic:
        weight, rows = model.head.weight.detach(), s.pool_size
        narrow = weight.is_cuda and weight.dtype != torch.float64
        reason = f"on {weight.device} needs the Triton kernels and pools of at most {kernels.MOST_ITEMS} rows"
        cure = "check that Triton runs and D5P4_KERNELS is not off, or load in float64"
        yield "deterministic", narrow and not kernels.usable(weight, rows), f"{reason} (got {rows}); {cure}"


def _form(s: Settings, model: Model) -> Iterator[Row]:
    """A constraint needs rows that are prefixes, and an end where the form is complete."""
    given = [name for name in FORMS if s.value(name) is not None]
    if not given:
        return
    yield given[-1], len(given) > 1, f"cannot be combined with {given[0]}: answers have one form; leave out one of them"
    what = f"does not fit {given[0]}, which"
    yield "order", s.order != "left", f"{what} is checked from left to right; use 'left' or leave it out"
    yield "steps", s.steps is not None, f"{what} takes as many steps as it needs; leave it out"
    yield "start", s.start != "order", f"{what} begins on the left; leave it out"
    yield "eos", s.eos == "never", f"{what} ends where the form is complete; leave it out"
    yield "stop", not s.stop, f"{what} ends where the form is complete; leave it out"
    yield "stop_strings", s.stop_strings is not None, f"{what} would be cut; leave it out"
    reason = f"does not fit method={s.method!r}; use a method of the library, such as tree, independent or d5p4"
    yield given[0], not s.spec.search(s).constrains, reason
    Constraint(Vocabulary.of(model), given[0], s.value(given[0]))


RULES: tuple[Callable[[Settings, Model], Iterable[Row]], ...] = (_form, _method, _order, _steps, _attention, _device)


def alike(model: Model, methods: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the options of methods that are compared, given their own options. All get the order, the reveal rule and
    the early stop of the first tree among them (or of the first method), unless their own options name others. A method
    that cannot have them keeps its defaults."""
    lead = next((name for name in methods if registries()[0].named(name).tree), next(iter(methods)))
    led = resolve(model, {**methods[lead], "method": lead})
    shared = {"order": led.order, "reveal": led.reveal, "stop": led.stop}
    shared |= {name: led.params[name] for part in (led.order_spec, led.reveal_spec) for name in part.parameters}
    result = {name: {**own, "method": name} for name, own in methods.items()}
    for name, own in result.items():
        try:
            resolve(model, shared | own)
            result[name] = shared | own
        except D5P4Error:
            with suppress(D5P4Error):
                resolve(model, own)
                continue
            raise
    return result


def unknown_option(name: str, items: Sequence[Registered]) -> D5P4Error:
    """Return the error for a name that is neither an option nor a parameter of the method, order or reveal rule."""
    method = items[0]
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
    "batch_size": "d5p4 makes batches by itself; use {max_tokens_per_forward} to limit memory",
    "repetition_penalty": "there is no penalty; use {diversity}, or another {method}, for answers that differ more",
    "temp": "use {temperature}",
    **dict.fromkeys(("until", "stop_words", "stop_sequences"), "use {stop_strings} for texts at which answers end"),
    "streamer": "use callback= in Python, which gets every step; d5p4 serve streams with stream=true",
    **dict.fromkeys(OF_LOAD, "it belongs to d5p4.load"),
    "eos_token_id": "end-of-text comes from the model's tokenizer; leave it out",
}
ALIASES = {p.option.alias: p.name for p in parameters_of(Settings).values() if p.option.alias}
TRANSLATED = (*ALIASES, *_ORDERS_ELSEWHERE, "cfg_scale")


def refused(name: str, spell: Callable[[str], str] = str) -> D5P4Error:
    """Return the error for an option of another library. `spell` turns the Python name of an option into its name at
    the caller's door."""
    text = REFUSED.get(name, "is true or false; use {stop_strings} for texts at which answers end")
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
        target = ALIASES.get(name, name)
        if name == "cfg_scale":
            target, value = "guidance", value + 1 if type(value) in (int, float) else value
        elif name in _ORDERS_ELSEWHERE:
            target, table = "order", _ORDERS_ELSEWHERE[name]
            if value not in table:
                raise D5P4Error(unknown_name(value, table), option=name, value=value)
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
    names, table = registries(), parameters_of(Settings)
    if not methods:
        named = given.get("method")
        methods = [names[0].named(named)] if named else [names[0][Settings.method], *names[0].values()]
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
