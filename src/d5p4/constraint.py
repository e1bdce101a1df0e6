"""Constraints: which tokens may follow a prefix, so that the whole answer obeys a form.

A form is a JSON schema, a regular expression, a grammar or a list of texts. The engine is `llguidance`. For a prefix of
tokens it gives a mask: the tokens after which some text of the form is still possible. With the order `left`, every row
of a pool is a prefix, so one matcher per row suffices.

The mask is applied before temperature and filters, and what is left is normalised again. So an answer has the
probability Π p(token | prefix) / Z(prefix), where Z is the mass of the allowed tokens. This is the locally renormalised
law. It is not p(answer | the answer has the form).

All ways to write a text in tokens stay open: the engine's own choice of one spelling is switched off, because it would
change this law. A token is forced only if its mask has no other token. End-of-text is allowed exactly where the form is
complete. The engine checks bytes, not tokens, so in a small vocabulary a prefix can be dead: no token may follow it.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import islice
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .errors import D5P4Error, shown

if TYPE_CHECKING:
    from .types import Model

LARGEST_TEXT = 1 << 18  # characters of a form
MOST_PARTS = 400  # references of a schema, or colons of a grammar: a chain of them may overflow the engine's stack
MOST_MULTIPLES = 100_000  # the least common multiple of all `multipleOf`, of which the engine makes an automaton
MOST_STATES = 20_000  # of the engine's automaton, about 2 kB each
FARTHEST = 512  # steps of the first closing probe
CLOSING = 64  # steps of later closing probes
LONGEST = 4096  # tokens of a closing probe, of which many may be forced
LOOKED_AT = 16  # allowed characters of which a closing probe finds out whether they complete the form
NEVER = 1 << 30  # the distance to an end that was not found
_WORDS = "[A-Za-z ]{1,20}"  # tokens that the engine allows at once where all of them fit, so that it need not walk them
_EXACT = '\n%llguidance {"no_forcing": true}\n'  # at the end, where it overrides what the form says
_CLOSERS = '"}])'  # a closing probe takes these before all others
_PRINTABLE = [*_CLOSERS, *(chr(c) for c in range(32, 127) if chr(c) not in _CLOSERS)]

Prefix = tuple[int, ...]
Words = NDArray[np.uint32]  # a mask: one bit per token id


class Vocabulary:
    """The tokens of a model as the engine needs them. `of` keeps one per model, because it takes time to make."""

    _made: WeakKeyDictionary[Any, Vocabulary] = WeakKeyDictionary()

    def __init__(self, model: Model) -> None:
        engine, codec, banned = _engine(), model.tokenizer, model.head.banned.cpu().numpy()
        if codec is None or not model.eos_ids:
            what = "a tokenizer" if codec is None else "an end-of-text token"
            raise D5P4Error(f"a constraint needs a model with {what}, and this model has none")
        self.size = size = len(banned)
        self.ends = tuple(sorted(model.eos_ids))
        try:  # byte-level and byte-fallback tokenizers
            tokens = codec.backend.to_str()  # type: ignore[attr-defined]
            self.tokens = engine.LLTokenizer(tokens, n_vocab=size, eos_token=list(self.ends))
            self.tokens = self.tokens.with_slices([_WORDS, *self.tokens.general_slices()])
        except (AttributeError, ValueError):
            tokens = engine.TokenizerWrapper(_Texts(codec, self.ends, banned))
            self.tokens = engine.LLTokenizer(tokens, n_vocab=size, eos_token=list(self.ends))
        ends = np.isin(np.arange(size), self.ends)
        self.closing, self.usable = _pack(ends), _pack(~banned & ~ends)
        written = {text: self.written(text.encode()) for text in _PRINTABLE}
        self.singles = {ids[0]: text for text, ids in written.items() if len(ids) == 1}  # tokens of one character

    @classmethod
    def of(cls, model: Model) -> Vocabulary:
        if model not in cls._made:
            cls._made[model] = cls(model)
        return cls._made[model]

    def written(self, text: bytes) -> list[int]:
        """Return the longest tokens that write a text; none if it is no text, or there are no tokens for it."""
        tokens = self.tokens.greedy_tokenize(text.decode(errors="replace")) if text else []
        usable = all(self.usable[i // 32] >> (i % 32) & 1 for i in tokens)
        return tokens if usable and self.tokens.decode_bytes(tokens) == text else []

    def mask(self, matcher: Any) -> Words:
        """Return the mask of a matcher without end-of-text, which the engine also allows in dead states."""
        words = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint32)  # the engine may add a word
        return words[: len(self.usable)] & self.usable


class _Texts:
    """A tokenizer for the engine, made of the texts of single tokens."""

    def __init__(self, codec: Any, ends: Sequence[int], banned: NDArray[np.bool_]) -> None:
        self.special_token_ids = sorted({*ends, *np.flatnonzero(banned).tolist()})
        texts = {i: codec.decode([i]) for i in sorted({*range(len(banned))} - {*self.special_token_ids})}
        if codec.decode(list(texts)) != "".join(texts.values()):
            raise D5P4Error("a constraint cannot follow this model's tokenizer, which writes a token by its neighbours")
        self.eos_token_id, self.bos_token_id = ends[0], None
        self.tokens = [texts[i].encode() if i in texts else b"<%d>" % i for i in range(len(banned))]

    def __call__(self, text: Any) -> list[int]:
        return []  # the engine asks for its favourite spelling, which is not used


class Constraint:
    """A form that has been checked. The automaton of a matcher grows with every prefix that it meets, so a form is
    compiled again for every call."""

    def __init__(self, vocabulary: Vocabulary, option: str, value: Any) -> None:
        """option: one of `options.FORMS`. A form that is wrong, has no text or is too large raises an error."""
        self.vocabulary, self.option, self.value = vocabulary, option, value
        try:
            self.grammar = _WRITE[option](value) + _EXACT
            self.grammar.encode()
        except (UnicodeEncodeError, RecursionError):
            raise self.error("is nested too deeply, or has half of a surrogate pair") from None
        except json.JSONDecodeError as reason:
            raise self.error(f"is not JSON: {reason}") from None
        except (TypeError, ValueError) as reason:
            raise self.error(f"cannot be used: {reason}") from None
        if len(self.grammar) > LARGEST_TEXT:
            raise self.error(f"has {len(self.grammar):,} characters, and the most are {LARGEST_TEXT:,}")
        start, matchers = self.matcher(), Matchers(self)
        if start.is_error():
            raise self.error(f"cannot be used: {_reason(start.get_error())}")
        run = tuple(matchers.forced((), CLOSING))
        if not (run and run[-1] in vocabulary.ends) and not matchers.words(run).any():
            raise self.error("matches no text that this model's tokens can write")
        if matchers.closing((), FARTHEST) == NEVER:
            raise self.error("has no end that was found; give a form with short answers")

    def matcher(self) -> Any:
        """Return a new matcher of the empty prefix."""
        engine = _engine()
        limits = engine.LLParserLimits(max_lexer_states=MOST_STATES, verbose_errors=False)
        return engine.LLMatcher(self.vocabulary.tokens, self.grammar, log_level=0, limits=limits)

    def error(self, reason: str) -> D5P4Error:
        return D5P4Error(reason, option=self.option, value=self.value)


@dataclass
class _State:
    """What is known about a prefix."""

    matcher: Any
    words: Words | None = None
    distance: float | None = None


@dataclass
class Matchers:
    """The matchers of the prefixes of a call, on the host. The oldest are forgotten, and made again when needed. A
    prefix has no end-of-text token."""

    constraint: Constraint
    most: int = 4096
    states: dict[Prefix, _State] = field(default_factory=dict)

    @property
    def end(self) -> int:
        """The end-of-text token that is written where only end-of-text may follow."""
        return self.constraint.vocabulary.ends[0]

    def state(self, prefix: Prefix) -> _State:
        state = self.states.pop(prefix, None) or self._made(prefix)
        self.states[prefix] = state  # now the youngest
        if len(self.states) > self.most:
            del self.states[next(iter(self.states))]
        return state

    def _made(self, prefix: Prefix) -> _State:
        for known in range(len(prefix) - 1, max(-1, len(prefix) - CLOSING), -1):
            if prefix[:known] in self.states:
                matcher = self.states[prefix[:known]].matcher.deep_copy()
                if matcher.consume_tokens(list(prefix[known:])):
                    return _State(matcher)
                break
        return _State(self._alone(prefix))

    def _alone(self, prefix: Prefix) -> Any:
        """Return a matcher with an automaton of its own. Copies share one, so that other rows could have filled it."""
        matcher = self.constraint.matcher()
        matcher.consume_tokens(list(prefix))
        self._check(matcher)
        return matcher

    def _check(self, matcher: Any) -> None:
        """Raise an error if a matcher has reached a limit. No other error says anything but that its prefix is dead."""
        if matcher.is_error() and not re.match("NoExtension|.* doesn't satisfy", matcher.get_error()):
            raise self.constraint.error("is too complex for the limits of its engine; simplify it")

    def words(self, prefix: Prefix) -> Words:
        """Return the mask of a prefix. It is empty if the prefix is dead."""
        state, vocabulary = self.state(prefix), self.constraint.vocabulary
        if state.words is None:
            words = vocabulary.mask(state.matcher)
            if state.matcher.is_error():
                state.matcher = self._alone(prefix)
                words = vocabulary.mask(state.matcher)
                self._check(state.matcher)
            words = np.zeros_like(words) if state.matcher.is_error() else words
            state.words = words | vocabulary.closing if state.matcher.is_accepting() else words
        return state.words

    def accepts(self, prefix: Prefix) -> bool:
        """Return whether the text of a prefix is a whole text of the form."""
        return self.state(prefix).matcher.is_accepting()

    def masks(self, prefixes: Sequence[Prefix]) -> Tensor:
        """Return the masks of R prefixes, [R, W] int32 (see `ops.vocab.unpack`)."""
        rows = [np.zeros((0, len(self.constraint.vocabulary.usable)), np.uint32), *map(self.words, prefixes)]
        return torch.from_numpy(np.vstack(rows).view(np.int32))

    def forced(self, prefix: Prefix, room: int) -> list[int]:
        """Return the tokens, at most `room`, that must follow a prefix because each is the only one allowed. If only
        end-of-text tokens are allowed, the first of them is taken, because all of them end the same text."""
        run = list[int]()
        while len(run) < room and run[-1:] != [self.end]:
            words = self.words(prefix + tuple(run))
            place = np.flatnonzero(words)
            if len(place) and not (words & ~self.constraint.vocabulary.closing).any():
                run.append(self.end)
            elif len(place) == 1 and int(words[place[0]]).bit_count() == 1:
                run.append(32 * int(place[0]) + int(words[place[0]]).bit_length() - 1)
            else:
                break
        return run

    def closes(self, prefix: Prefix, room: int) -> bool:
        """Return whether a prefix can become complete within `room` more tokens, as far as a probe finds out. No probe
        is made if there is room for `CLOSING` tokens."""
        return room >= CLOSING or self.closing(prefix) <= room

    def closing(self, prefix: Prefix, most: int = CLOSING) -> float:
        """Return how many tokens a fixed policy needs to complete the form: `NEVER` if that takes more than `most`
        steps, infinity if the policy comes to a dead prefix. A run of forced bytes is one step. The number need not be
        the smallest."""
        state = self.state(prefix)
        if state.distance is None or most != CLOSING:
            probe, vocabulary = state.matcher.deep_copy(), self.constraint.vocabulary
            state.distance = _close(probe, vocabulary, most)
            if state.distance == NEVER and self.constraint.option == "regex":
                written = [t for c in self.constraint.value for t in vocabulary.written(c.encode())]
                state.distance = _spell(state.matcher, written[-CLOSING:])
            self._check(probe)
        return state.distance


def _close(matcher: Any, vocabulary: Vocabulary, most: int) -> float:
    """Feed a matcher with closing tokens until it accepts, and return how many it took (see `Matchers.closing`).

    The policy takes forced bytes in the longest tokens; or else a single character of a list, namely one that completes
    the form or else the first that is allowed; or else the allowed token that was used the fewest times. A character
    that was used goes to the end of the list. Closing characters come first, and stay until they were used eight times.
    A letter after a letter, and a digit after a digit, come after all others, so that words and numbers end.
    """
    uses, count, singles, last = Counter[int](), 0, list(vocabulary.singles), ""
    for _ in range(most):
        if matcher.is_accepting():
            return count
        tokens = vocabulary.written(matcher.compute_ff_bytes()) or _next_token(matcher, vocabulary, uses, singles, last)
        last = vocabulary.tokens.decode_str(tokens[-1:])[-1:]
        if count + len(tokens) > LONGEST:
            return NEVER
        if not tokens or not matcher.consume_tokens(tokens):
            return math.inf
        count += len(tokens)
    return count if matcher.is_accepting() else NEVER


def _spell(matcher: Any, tokens: Sequence[int]) -> float:
    """Return how many of the tokens, one after the other up to the last one, complete the form; only those that are
    allowed are taken. The characters of a regular expression complete one that asks for a text in any place."""
    for start in range(len(tokens) - 1, -1, -1):
        probe, taken = matcher.deep_copy(), 0
        for token in tokens[start:]:
            if not probe.is_accepting() and probe.validate_tokens([token]):
                taken += probe.consume_token(token)
        if probe.is_accepting():
            return taken
    return NEVER


def _next_token(matcher: Any, vocabulary: Vocabulary, uses: Counter[int], singles: list[int], last: str) -> list[int]:
    letters, digits = last.isalpha(), last.isdigit()
    texts = vocabulary.singles
    order = sorted(singles, key=lambda token: letters and texts[token].isalpha() or digits and texts[token].isdigit())
    allowed = list(islice((token for token in order if matcher.validate_tokens([token])), LOOKED_AT))
    for token in allowed:
        complete = matcher.consume_token(token) and matcher.is_accepting()
        matcher.rollback(1)
        if complete:
            return [token]
    for token in allowed[:1]:
        uses[token] += 1
        if uses[token] % 8 == 0 or texts[token] not in _CLOSERS:
            singles.remove(token)
            singles.append(token)
        return [token]
    bits = np.unpackbits(vocabulary.mask(matcher).view(np.uint8), bitorder="little")
    rarest = sorted(np.flatnonzero(bits).tolist(), key=lambda token: uses[token])[:1]
    uses.update(rarest)
    return rarest


def canonical(text: str) -> str:
    """Return JSON in one way of writing, so that equal values have equal texts. Text that is no JSON is returned as it
    is. Numbers are compared by value, as in JSON Schema: 1, 1.0 and 1e0 are equal, and true is not 1. The order of the
    members of an object does not count."""

    def number(text: str) -> float:
        value = float(text)
        return int(value) if abs(value) < 2**53 and value.is_integer() else value

    try:
        return json.dumps(json.loads(text, parse_float=number), sort_keys=True)
    except (ValueError, RecursionError):
        return text


# ---- forms as grammars of the engine


def _schema(value: Any) -> str:
    """Return the grammar of a JSON schema, given as an object or as text. Values are written without spaces."""
    members = list[tuple[str, Any]]()  # of all objects inside the schema

    def seen(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        members.extend(pairs)
        return dict(pairs)

    schema = json.loads(value if isinstance(value, str) else json.dumps(value), object_pairs_hook=seen)
    if not isinstance(schema, (dict, bool)):
        raise ValueError("must be a JSON object, or its text")
    if sum(name == "$ref" for name, _ in members) > MOST_PARTS:
        raise ValueError(f"has more than {MOST_PARTS} references")
    numbers = [x for name, x in members if name == "multipleOf" and type(x) in (int, float) and math.isfinite(x)]
    steps = [Fraction(str(x)) for x in numbers]
    scale = math.lcm(*(step.denominator for step in steps))
    if math.lcm(*(int(step * scale) for step in steps)) > MOST_MULTIPLES:
        raise ValueError("has a multipleOf, or several together, with too many digits")
    if isinstance(schema, dict) and isinstance(own := schema.get("x-guidance", {}), dict):
        schema = schema | {"x-guidance": {"whitespace_flexible": False} | own}
    return f"start: %json {json.dumps(schema)}"


def _regex(value: str) -> str:
    """Return the grammar of a regular expression in the syntax of Rust, which the whole answer must match."""
    if (len(value) - len(value.rstrip("\\"))) % 2:
        raise ValueError("ends with a backslash")
    return f"start: /{_engine().regex_to_lark(value)}/"


def _grammar(value: str) -> str:
    """Return a Lark grammar in the dialect of the engine. Its start is the rule `start`."""
    if value.count(":") > MOST_PARTS or "multipleOf" in value:
        raise ValueError(f"has more than {MOST_PARTS} rules (or colons), or a multipleOf")
    return value


def _choices(value: Sequence[str]) -> str:
    """Return the grammar of a list of texts. All but letters, digits and spaces are written as code points."""
    texts = dict.fromkeys([value] if isinstance(value, str) else value)
    literal = (re.sub("[^A-Za-z0-9 ]", lambda match: f"\\x{{{ord(match[0]):x}}}", text) for text in texts)
    return f"start: /{'|'.join(literal)}/"


_WRITE = {"json_schema": _schema, "regex": _regex, "grammar": _grammar, "choices": _choices}


def _reason(message: str) -> str:
    """Return what an error of the engine says, without the place in the grammar that is written around the form."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    reason = next((line for line in lines if line.startswith("error: ")), lines[0] if lines else "no reason is known")
    return shown(re.sub(r"^((at )?\d+\(\d+\): |error: |failed to compile JSON schema: )+", "", reason))[1:-1]


def _engine() -> Any:
    try:
        import llguidance
    except ImportError:
        raise D5P4Error("a constraint needs the package llguidance: pip install 'd5p4[constrain]'") from None
    return llguidance


def _pack(allowed: NDArray[np.bool_]) -> Words:
    """Return bools [V] as a mask."""
    return np.packbits(np.pad(allowed, (0, -len(allowed) % 32)), bitorder="little").view(np.uint32)
