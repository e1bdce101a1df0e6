"""The model `d5p4` of EleutherAI's lm-evaluation-harness (extra `lm-eval`).

    python -m d5p4.integrations.lm_eval --model d5p4 --model_args pretrained=countdown,k=4,w=4 --tasks ...

A task with `repeats: r` is answered by one diverse decode of k = r answers; a task that asks once gets the best of
model_args' k (1 when left out). docs/lm-eval.md says it at length.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..__about__ import __version__
from ..errors import D5P4Error
from ..generate import generate
from ..likelihood import loglikelihood as likelihood_bound
from ..methods import load_plugins, method_named
from ..models import load
from ..options import TRANSLATED, Settings, gives_length, public, unknown_option
from ..prompts import default_length, encode
from ..types import Model, Snapshot

try:
    import lm_eval.models  # noqa: F401  # the harness names its own models only while its registry is empty
    from lm_eval.api.model import LM
    from lm_eval.api.registry import MODEL_REGISTRY, register_model
    from lm_eval.utils import simple_parse_args_string
    from tqdm import tqdm
except ImportError as reason:
    raise D5P4Error(f"this needs the lm-evaluation-harness: pip install 'd5p4[lm-eval]' ({reason})") from reason

NAME = "d5p4"
TASK_MAY_SET = ("temperature", "top_k", "top_p", "order", "order_temperature", "steps", "block_length")
LENGTH_NAMES = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
DETERMINISTIC_ORDERS = ("confidence", "margin", "entropy")

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Asked:
    """One prompt of a task: adjacent equal requests, which one decode answers."""

    places: list[int]  # numbers of the requests
    args: tuple[str, Mapping[str, Any]]  # prompt and the task's generation_kwargs

    @property
    def context(self) -> str:
        return self.args[0]

    @property
    def task(self) -> Mapping[str, Any]:
        return self.args[1]

    @property
    def stops(self) -> list[str]:
        until = self.task.get("until") or []
        return [stop for stop in ([until] if isinstance(until, str) else until) if stop]

    def cut(self, answer: str) -> str:
        """The answer up to the first of the task's `until` strings."""
        return answer[: min((at for stop in self.stops if (at := answer.find(stop)) >= 0), default=len(answer))]


class D5P4LM(LM):
    """A masked diffusion model for the harness. All arguments may come from `--model_args`.

    pretrained    a folder, a shipped name, a hub id, or a model that `d5p4.load` or `d5p4.wrap` made
    device, dtype, tokenizer   as `d5p4.load` takes them
    seed          of decodes and likelihoods (0)
    mc_samples    masks drawn for each likelihood (128)
    greedy_check  whether `loglikelihood` decodes greedily to say if the continuation is what comes out; otherwise it
                  always says no
    decoding      settings and method parameters of `d5p4.generate`; windows as START:STOP. k is for tasks that ask
                  once (1); `repeats` goes before it

    batch_size, max_batch_size and trust_remote_code are taken and not used: forwards are cut to
    max_tokens_per_forward, and no remote code is ever run.
    """

    def __init__(
        self,
        pretrained: str | Path | Model,
        *,
        device: str | None = None,
        dtype: str | None = None,
        tokenizer: str | None = None,
        seed: int | None = 0,
        mc_samples: int = 128,
        greedy_check: bool = False,
        batch_size: Any = None,
        max_batch_size: Any = None,
        trust_remote_code: Any = None,
        plugin: str | None = None,
        **decoding: Any,
    ) -> None:
        super().__init__()
        load_plugins(str(plugin).split("+") if plugin else [])
        decoding = _typed({name: value for name, value in decoding.items() if value is not None})
        self.model: Any = pretrained
        if isinstance(pretrained, (str, Path)):
            self.model = load(pretrained, device, None if dtype == "auto" else dtype, tokenizer)
        self.seed = seed or 0
        self.mc_samples = mc_samples
        self.greedy_check = greedy_check
        self.decoding = {"k": 1} | decoding
        self._settings = Settings.make(self.model, **self.decoding)  # says at once what cannot be
        length = self._settings.gen_length
        if gives_length(decoding) and length is not None and length >= self.model.max_length:
            reason = f"leaves no room for a prompt: the model holds {self.model.max_length} tokens"
            raise D5P4Error(reason, option="gen_length", value=length)

    @property
    def device(self) -> torch.device:
        return self.model.head.weight.device

    @classmethod
    def create_from_arg_obj(cls, arg_dict: Mapping[str, Any], additional_config: Any = None) -> D5P4LM:
        """model_args go before the command line's own options, whose device is cuda:0 where nobody named one."""
        options = {name: value for name, value in (additional_config or {}).items() if value is not None}
        if str(options.get("device")).startswith("cuda") and not torch.cuda.is_available():
            log.info("there is no CUDA here; --device %s is not used", options.pop("device"))
        return cls(**{**options, **arg_dict})

    @classmethod
    def create_from_arg_string(cls, arg_string: str, additional_config: Any = None) -> D5P4LM:
        return cls.create_from_arg_obj(simple_parse_args_string(arg_string), additional_config)

    # generation

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """An answer to each request; r adjacent equal requests get r answers of one decode, best first."""
        asked = list(_adjacent(requests))
        self._check_cache(asked)
        groups: dict[str, tuple[dict[str, Any], list[tuple[Asked, list[int]]]]] = {}
        for one in asked:
            settings = self._settings_for(one)
            ids, settings["gen_length"] = self._fit(one, settings.get("gen_length"))
            key = json.dumps(settings, sort_keys=True, default=repr)
            groups.setdefault(key, (settings, []))[1].append((one, ids))
        answers = [""] * len(requests)
        with _bar(len(asked), "d5p4 decodes", disable_tqdm) as bar:
            for settings, members in groups.values():
                prompts = [ids for _, ids in members]
                result = generate(
                    self.model, prompts, seed=self.seed, chat=False, callback=_ticking(bar, disable_tqdm), **settings
                )
                for (one, _), texts in zip(members, result.texts, strict=True):
                    for place, text in zip(one.places, texts, strict=False):  # asked once: the best of k
                        answers[place] = one.cut(text)
                    if len(one.places) == 1:
                        self.cache_hook.add_partial("generate_until", one.args, answers[one.places[0]])
        return answers

    def _check_cache(self, asked: Sequence[Asked]) -> None:
        """The harness's cache knows one answer a prompt, and would give it r times on the next run."""
        caching = getattr(self.cache_hook, "dbdict", None) is not None
        repeated = next((one for one in asked if len(one.places) > 1 and not one.task.get("do_sample")), None)
        if caching and repeated is not None:
            raise D5P4Error(
                f"--use_cache keeps one answer a prompt, but the task asks {len(repeated.places)} times for each; "
                "leave --use_cache out, or say do_sample: true in the task's generation_kwargs"
            )

    def _settings_for(self, one: Asked) -> dict[str, Any]:
        """Settings of the decode of one prompt: model_args, and for a single answer the task's where those say none."""
        settings = dict(self.decoding)
        if len(one.places) > 1:
            settings["k"] = len(one.places)
        if settings["k"] > 1:
            return settings
        task = dict(one.task)
        if task.get("do_sample") is False or ("do_sample" not in task and "temperature" not in task):
            task["temperature"] = 0.0  # the harness's way to say greedy
        return {name: task[name] for name in TASK_MAY_SET if task.get(name) is not None} | settings

    def _fit(self, one: Asked, fixed: int | None) -> tuple[list[int], int]:
        """Prompt ids and answer length that fit the model.

        A length from model_args is kept. The task's, or the model's own, gives way to the prompt down to half the
        model's length; then the prompt loses its beginning, as with the harness's other models.
        """
        ids = encode(self.model, one.context, False)
        longest = self.model.max_length
        length = fixed
        if length is None:
            asked = next((one.task[name] for name in LENGTH_NAMES if one.task.get(name) is not None), None)
            wanted = int(asked or default_length(self.model, self._settings))
            length = min(wanted, max(longest - len(ids), longest // 2))
        return self._keep_end(ids, longest - length, one.places[0]), length

    def _keep_end(self, ids: list[int], room: int, number: int) -> list[int]:
        if len(ids) > room:
            log.warning("the prompt of request %d lost its first %d tokens to fit the model", number, len(ids) - room)
        return ids[max(0, len(ids) - room) :]

    # likelihood

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """(bound on log p(continuation | context) in nats, whether greedy decoding gives it) for each request."""
        pairs = [self._pair(request.args, number) for number, request in enumerate(requests)]
        greedy = self._greedy(pairs) if self.greedy_check else [not after for _, after in pairs]
        values = []
        with _bar(len(requests), "d5p4 likelihoods", disable_tqdm) as bar:
            for request, pair, is_greedy in zip(requests, pairs, greedy, strict=True):
                values.append((self._bound(*pair), is_greedy))
                self.cache_hook.add_partial("loglikelihood", request.args, values[-1])
                bar.update(1)
        return values

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Bound on log p(text) in nats: the sum over pieces of the model's length, each without what came before."""
        values = []
        with _bar(len(requests), "d5p4 likelihoods", disable_tqdm) as bar:
            for request in requests:
                ids, size = encode(self.model, request.args[0], False), self.model.max_length
                values.append(sum(self._bound([], ids[at : at + size]) for at in range(0, len(ids), size)) + 0.0)
                self.cache_hook.add_partial("loglikelihood_rolling", request.args, values[-1])
                bar.update(1)
        return values

    def _pair(self, args: tuple[str, str], number: int) -> tuple[list[int], list[int]]:
        """Token ids of context and continuation. Spaces between them belong to the continuation."""
        context, continuation = args
        stripped = context.rstrip()
        continuation = context[len(stripped) :] + continuation
        before = encode(self.model, stripped, False)
        whole = encode(self.model, stripped + continuation, False)
        apart = whole[: len(before)] == before  # otherwise a token would span both
        after = whole[len(before) :] if apart else encode(self.model, continuation, False)
        if len(after) > self.model.max_length:
            raise D5P4Error(
                f"request {number} asks for the likelihood of {len(after)} tokens; the model holds "
                f"{self.model.max_length}"
            )
        return self._keep_end(before, self.model.max_length - len(after), number), after

    def _bound(self, before: list[int], after: list[int]) -> float:
        if not after:
            return 0.0
        samples = 1 if len(after) == 1 else self.mc_samples  # one token has one mask: nothing is left to chance
        size = {"max_tokens_per_forward": self._settings.max_tokens_per_forward}
        return likelihood_bound(self.model, after, before or None, samples, seed=self.seed, chat=False, **size)

    def _greedy(self, pairs: Sequence[tuple[list[int], list[int]]]) -> list[bool]:
        """Whether each continuation is what one token a step at temperature 0 writes in a window of its length."""
        answers: list[bool] = [not after for _, after in pairs]
        order = self._settings.order if self._settings.order in DETERMINISTIC_ORDERS else "confidence"
        kept = {name: self.decoding[name] for name in ("block_length", "eos") if name in self.decoding}
        for length in sorted({len(after) for _, after in pairs if after}):
            numbers = [number for number, (_, after) in enumerate(pairs) if len(after) == length]
            options: dict[str, Any] = {"k": 1, "method": "independent", "temperature": 0.0, "order": order} | kept
            contexts = [pairs[number][0] for number in numbers]
            result = generate(self.model, contexts, gen_length=length, seed=self.seed, chat=False, **options)
            for number, (answer,) in zip(numbers, result.answers, strict=True):
                answers[number] = answer == pairs[number][1]
        return answers

    # chat templates

    def apply_chat_template(self, chat_history: Sequence[Mapping[str, str]], add_generation_prompt: bool = True) -> str:
        """The prompt for the next answer; without the generation prompt, one that the last message has begun."""
        messages = list(chat_history)
        begun = "" if add_generation_prompt else messages.pop()["content"]
        text = self.model.tokenizer.chat(messages) if self.model.tokenizer is not None else None
        if text is None:
            raise D5P4Error(f"{self.model.name} has no chat template; leave --apply_chat_template out")
        return text + begun

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """The template itself, which the harness writes into its results."""
        return getattr(self.model.tokenizer, "chat_template", None) if chat_template else None

    @property
    def tokenizer_name(self) -> str:
        """Names the harness's file of prepared requests."""
        return str(self.model.name).replace("/", "__")

    def get_model_info(self) -> dict[str, Any]:
        """What the harness writes beside its results."""
        return {
            "d5p4_version": __version__,
            "d5p4_model": str(self.model.name),
            "d5p4_settings": self._settings.to_dict(),
            "d5p4_seed": self.seed,
            "d5p4_mc_samples": self.mc_samples,
            "model_dtype": str(self.model.head.weight.dtype),
        }


def _typed(decoding: Mapping[str, Any]) -> dict[str, Any]:
    """The decoding options of model_args. The harness turns numbers into numbers and leaves everything else as text."""
    method = method_named(decoding.get("method", Settings.method))
    known = public("lm-eval") | dict(method.parameters)
    for name in decoding:
        if name not in known and name not in TRANSLATED:
            raise unknown_option(name, method)
    return {name: known[name].from_text(value) if name in known else value for name, value in decoding.items()}


def _adjacent(requests: Sequence[Any]) -> Iterator[Asked]:
    """Runs of requests for the same prompt of the same document: the harness repeats one request r times."""
    last: Any = None
    for place, request in enumerate(requests):
        names = (request.args, request.task_name, request.doc_id, request.idx)
        if last is None or names != last[0]:
            if last is not None:
                yield last[1]
            last = names, Asked([], request.args)
        last[1].places.append(place)
    if last is not None:
        yield last[1]


def _bar(total: int, label: str, disabled: bool) -> Any:
    shape = "{desc}: {percentage:3.0f}%|{bar}| [{elapsed}<{remaining}]"
    return tqdm(total=total, desc=label, disable=disabled, bar_format=shape)


def _ticking(bar: Any, disabled: bool) -> Callable[[Snapshot], None] | None:
    """A callback that moves the bar by each prompt's share of a step."""

    def tick(shot: Snapshot) -> None:
        bar.update(min(len(shot.prompts) / shot.steps, bar.total - bar.n))  # rounding must not overshoot

    return None if disabled else tick


def main() -> None:
    """The harness's own command line, with this model known to it."""
    from lm_eval.__main__ import cli_evaluate

    try:
        cli_evaluate()
    except D5P4Error as reason:
        sys.exit(f"d5p4: {reason}")


if NAME not in MODEL_REGISTRY:  # later harnesses know it already, from the entry point
    register_model(NAME)(D5P4LM)

if __name__ == "__main__":
    main()
