"""The model `d5p4` for EleutherAI's lm-evaluation-harness, called the harness below (extra `lm-eval`).

    python -m d5p4.integrations.lm_eval --model d5p4 --model_args pretrained=countdown,k=4 --tasks ...

A task with `repeats: r` asks for r answers to each prompt. One decode with k = r gives these answers. A task without
repeats gets the best of k answers. This k comes from model_args and is 1 by default. See docs/lm-eval.md.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..__about__ import __version__
from ..errors import D5P4Error
from ..generate import generate
from ..likelihood import loglikelihood as likelihood_bound
from ..models import load
from ..options import load_plugins
from ..prompts import Prepared, default_length, encode
from ..resolve import typed
from ..types import Model

try:
    import lm_eval.models  # noqa: F401  # the harness registers its models only into an empty registry
    from lm_eval.api.model import LM
    from lm_eval.api.registry import MODEL_REGISTRY, register_model
    from lm_eval.utils import simple_parse_args_string
    from tqdm import tqdm
except ImportError as reason:
    raise D5P4Error(f"the lm-evaluation-harness is missing: pip install 'd5p4[lm-eval]' ({reason})") from reason

NAME = "d5p4"
TASK_MAY_SET = ("temperature", "top_k", "top_p", "min_p", "order", "order_temperature", "steps", "block_length")
IGNORED = ("batch_size", "max_batch_size", "trust_remote_code")
LENGTH_NAMES = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")

log = logging.getLogger(__name__)


class Question(NamedTuple):
    """One prompt of a task. A single decode answers all requests that repeat this prompt."""

    places: list[int]  # the indices of the requests that repeat the prompt
    prompt: str
    task: Mapping[str, Any]  # the task's generation_kwargs


class D5P4LM(LM):
    """A masked diffusion model for the harness. All arguments can come from `--model_args`.

    pretrained    a folder, a shipped name, a hub id, or a model from `d5p4.load` or `d5p4.wrap`
    device, dtype, tokenizer   see `d5p4.load`
    seed          the seed of all decodes and likelihoods
    mc_samples    the number of random masks per likelihood
    plugin        the names of modules that register methods, joined by +
    decoding      the options of docs/options.md and the parameters of the method. k, by default 1, is for tasks without
                  repeats. Options of other models, which the harness passes (`IGNORED`), have no effect
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
        plugin: str | None = None,
        **decoding: Any,
    ) -> None:
        super().__init__()
        load_plugins(str(plugin).split("+") if plugin else [])
        given = {name: x for name, x in decoding.items() if x is not None and name not in IGNORED}
        decoding = typed(given, "lm-eval")
        self.model: Any = pretrained
        if isinstance(pretrained, (str, Path)):
            self.model = load(pretrained, device, None if dtype == "auto" else dtype, tokenizer)
        self.seed, self.mc_samples, self._device = seed or 0, mc_samples, self.model.head.weight.device
        self.decoding = {"k": 1} | decoding
        prepared = Prepared(self.model, self.decoding)  # raises an error now if an option is wrong
        self._settings, length = prepared.settings, prepared.settings.gen_length
        if prepared.length_given and length is not None and length >= self.model.max_length:
            reason = f"leaves no room for a prompt: the model holds {self.model.max_length} tokens; use fewer"
            raise D5P4Error(reason, option="gen_length", value=length)

    @classmethod
    def create_from_arg_obj(cls, arg_dict: Mapping[str, Any], additional_config: Any = None) -> D5P4LM:
        """Create the model. model_args override the options of the harness, whose default device is cuda:0."""
        options = {name: value for name, value in (additional_config or {}).items() if value is not None}
        if str(options.get("device")).startswith("cuda") and not torch.cuda.is_available():
            log.info("CUDA is not available, so --device %s is ignored", options.pop("device"))
        return cls(**{**options, **arg_dict})

    @classmethod
    def create_from_arg_string(cls, arg_string: str, additional_config: Any = None) -> D5P4LM:
        return cls.create_from_arg_obj(simple_parse_args_string(arg_string), additional_config)

    # generation

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Return one answer per request. Requests that repeat a prompt get the answers of one decode, best first. If
        a tree has fewer texts than requests, the last answers are empty."""
        questions = _questions(requests)
        self._check_cache(questions)
        groups: dict[str, tuple[dict[str, Any], list[tuple[Question, list[int]]]]] = {}  # grouped by settings
        for question in questions:
            settings = self._settings_for(question)
            until = question.task.get("until") or []
            settings["stop_strings"] = [stop for stop in ([until] if isinstance(until, str) else until) if stop] or None
            ids, settings["gen_length"] = self._fit(question, settings.get("gen_length"))
            key = json.dumps(settings, sort_keys=True, default=repr)
            groups.setdefault(key, (settings, []))[1].append((question, ids))
        answers = [""] * len(requests)
        for settings, members in groups.values():
            settings |= {"seed": self.seed, "chat": False, "progress": not disable_tqdm}
            result = generate(self.model, [ids for _, ids in members], **settings)
            for (question, _), texts in zip(members, result.texts, strict=True):
                for place, text in zip(question.places, texts, strict=False):  # `texts` has the best first
                    answers[place] = text
                if len(question.places) == 1:
                    [place] = question.places
                    self.cache_hook.add_partial("generate_until", (question.prompt, question.task), answers[place])
        return answers

    def _check_cache(self, questions: Sequence[Question]) -> None:
        """Raise an error if a cache is used with repeats. The harness caches one answer per prompt and would return
        this answer for all repeats."""
        caching = getattr(self.cache_hook, "dbdict", None) is not None
        repeats = [len(q.places) for q in questions if len(q.places) > 1 and not q.task.get("do_sample")]
        if caching and repeats:
            raise D5P4Error(
                f"--use_cache keeps one answer per prompt, but the task asks {repeats[0]} times for each prompt; "
                "leave out --use_cache, or set do_sample: true in the task's generation_kwargs"
            )

    def _settings_for(self, question: Question) -> dict[str, Any]:
        """Return the options for decoding one question. If k is 1, the task may add options to those of model_args."""
        task, repeats = dict(question.task), len(question.places)
        settings = self.decoding | ({"k": repeats} if repeats > 1 else {})
        if settings["k"] > 1:
            return settings
        if task.get("do_sample") is False or ("do_sample" not in task and "temperature" not in task):
            task["temperature"] = 0.0  # a task without sampling asks for greedy decoding
        return {name: task[name] for name in TASK_MAY_SET if task.get(name) is not None} | settings

    def _fit(self, question: Question, fixed: int | None) -> tuple[list[int], int]:
        """Return the prompt's token ids and an answer length that fit the model. A length from model_args (`fixed`) is
        used unchanged. Any other length is reduced for a long prompt, but not below half of the model's length. If the
        prompt is still too long, its beginning is cut off, as in the harness's other models."""
        ids = encode(self.model, question.prompt, False)
        longest = self.model.max_length
        length = fixed
        if length is None:
            by_task = next((question.task[name] for name in LENGTH_NAMES if question.task.get(name) is not None), None)
            wanted = int(by_task or default_length(self.model, self._settings))
            length = min(wanted, max(longest - len(ids), longest // 2))
        return _keep_end(ids, longest - length, question.places[0]), length

    # likelihood

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Return per request a bound on log p(continuation | context) in nats, and False. The second value would say
        whether greedy decoding writes the continuation, which d5p4 does not check; it is True for an empty one."""
        pairs = [self._pair(request.args, number) for number, request in enumerate(requests)]
        values = ((self._bound(before, after), not after) for before, after in pairs)
        return self._collect("loglikelihood", requests, values, disable_tqdm)

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Return bounds on log p(text) in nats. A text that is too long for the model is cut into pieces, and the
        bounds of the pieces are added."""
        size = self.model.max_length
        texts = (encode(self.model, request.args[0], False) for request in requests)
        values = (sum(self._bound([], ids[at : at + size]) for at in range(0, len(ids), size)) + 0.0 for ids in texts)
        return self._collect("loglikelihood_rolling", requests, values, disable_tqdm)

    def _collect(self, kind: str, requests: Sequence[Any], values: Iterator[Any], disable_tqdm: bool) -> list[Any]:
        """Compute the values of all requests. Each value is added to the harness's cache as soon as it is computed."""
        computed = []
        for request, value in zip(tqdm(requests, "d5p4 likelihoods", disable=disable_tqdm), values, strict=True):
            computed.append(value)
            self.cache_hook.add_partial(kind, request.args, value)
        return computed

    def _pair(self, args: tuple[str, str], number: int) -> tuple[list[int], list[int]]:
        """Return the token ids of context and continuation. Spaces at the end of the context are moved to the
        continuation."""
        context, continuation = args
        stripped = context.rstrip()
        continuation = context[len(stripped) :] + continuation
        before = encode(self.model, stripped, False)
        both = encode(self.model, stripped + continuation, False)
        separate = both[: len(before)] == before  # False if a token spans the border between context and continuation
        after = both[len(before) :] if separate else encode(self.model, continuation, False)
        longest = self.model.max_length
        if len(after) > longest:
            raise D5P4Error(f"the continuation of request {number} has {len(after)} tokens; the model holds {longest}")
        return _keep_end(before, longest - len(after), number), after

    def _bound(self, before: list[int], after: list[int]) -> float:
        if not after:
            return 0.0
        samples = 1 if len(after) == 1 else self.mc_samples  # a single token can be masked in only one way
        options = {"seed": self.seed, "max_tokens_per_forward": self._settings.max_tokens_per_forward}
        return likelihood_bound(self.model, after, before or None, samples, chat=False, **options)

    # chat templates

    def apply_chat_template(self, chat_history: Sequence[Mapping[str, str]], add_generation_prompt: bool = True) -> str:
        """Return the conversation as a prompt. add_generation_prompt=False: the last message is the answer's start."""
        messages = list(chat_history)
        beginning = "" if add_generation_prompt else messages.pop()["content"]
        text = self.model.tokenizer.chat(messages) if self.model.tokenizer is not None else None
        if text is None:
            raise D5P4Error(f"{self.model.name} has no chat template; leave out --apply_chat_template")
        return text + beginning

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """Return the chat template, which the harness writes into its results."""
        return getattr(self.model.tokenizer, "chat_template", None) if chat_template else None

    @property
    def tokenizer_name(self) -> str:
        """The name of the tokenizer, which the harness puts into the file name of its prepared requests."""
        return str(self.model.name).replace("/", "__")

    def get_model_info(self) -> dict[str, Any]:
        """Return facts that the harness writes into its results."""
        return {
            "d5p4_version": __version__,
            "d5p4_settings": self._settings.to_dict(),
            "d5p4_seed": self.seed,
            "d5p4_mc_samples": self.mc_samples,
            "model_dtype": str(self.model.head.weight.dtype),
        }


def _keep_end(ids: list[int], room: int, number: int) -> list[int]:
    if len(ids) > room:
        log.warning("the prompt of request %d lost its first %d tokens to fit the model", number, len(ids) - room)
    return ids[max(0, len(ids) - room) :]


def _questions(requests: Sequence[Any]) -> list[Question]:
    """Group adjacent requests with the same prompt and document. The requests of a group are the repeats of a task."""
    named = ((place, (one.args, one.task_name, one.doc_id, one.idx)) for place, one in enumerate(requests))
    groups = groupby(named, lambda pair: pair[1])
    return [Question([place for place, _ in members], *identity[0]) for identity, members in groups]


def main() -> None:
    from lm_eval.__main__ import cli_evaluate

    try:
        cli_evaluate()
    except D5P4Error as reason:
        sys.exit(f"d5p4: {reason}")


if NAME not in MODEL_REGISTRY:  # newer harnesses have registered the model through its entry point
    register_model(NAME)(D5P4LM)

if __name__ == "__main__":
    main()
