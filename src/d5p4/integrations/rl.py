"""Rollouts for reinforcement learning: k answers per prompt, with what a trainer needs to know about each of them.

`rollout` decodes with the weights that are being trained, through `d5p4.load` or `d5p4.wrap`, without a copy.
`log_probabilities` computes their log-probabilities again, with gradients. `rollout_func` and `D5P4Sampler`
give the same rollouts to the trainers of TRL and dllm; `d5p4.integrations.trl` has a trainer with a likelihood that is
right for masked diffusion models.

A rollout reveals tokens step by step. Its log-probability is the sum, over its tokens, of log p(token | the state
before the step that revealed it). `Rollouts.policy` says what this number is (docs/rl.md says why):

"on-policy"            The log-probability of the sampler that drew the rollout. The rollouts are independent draws at
                       temperature 1, without filters or guidance, in an order that looks at the state alone
                       (`ON_POLICY`).
"without replacement"  The log-probability of the same sampler, from which a tree drew the rollouts of a prompt without
                       replacement (`WITHOUT_REPLACEMENT`). `Rollouts.weights` corrects for this.
"off-policy"           Neither: a method selected the rollouts, or the options change the sampler's distribution. No
                       weight corrects for this.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..errors import D5P4Error
from ..generate import chosen_seed, generate
from ..options import Settings, parameters_of, whole
from ..prompts import Name, split_prompts
from ..result import Result
from ..rng import key_of
from ..types import Model

ON_POLICY: Mapping[str, Any] = {
    "method": "independent",
    "temperature": 1.0,
    "order": "left",
    "reveal": "schedule",
    "eos": "free",
    "stop": True,
}
"""Options of independent draws whose log-probability is known exactly."""

WITHOUT_REPLACEMENT: Mapping[str, Any] = {
    "method": "tree",
    "temperature": 1.0,
    "order": "left",
    "reveal": "schedule",
    "eos": "free",
    "diversity": 0.0,
    "spare": 0,
}
"""Options of draws without replacement from the same sampler, whose importance weights are known."""

Wrap = Callable[[nn.Module], Model]
"""A function that makes a model of d5p4 from the module that a trainer trains, such as
`lambda module: d5p4.wrap(module, tokenizer, mask_id=...)`."""


@dataclass(frozen=True)
class Rollouts:
    """N rollouts. Those of a prompt are neighbours. Rows are left-padded to T tokens.

    sequences        [N, T] prompt and answer; attention_mask [N, T] is True at real tokens
    window           [N, T] True at the positions that were decoded
    completion_mask  [N, T] True at the answer, including the end-of-text token and excluding what follows it
    steps            [N, T] the step, counted from 1, that revealed each token; 0 at tokens that no step revealed
    logprobs         [N, T] the log-probability of each token at temperature 1 when it was revealed; 0 elsewhere
    prompt           [N] the index of the prompt
    weights          [N] importance weights: for any function f of a text, the sum of weight * f over the rollouts of a
                     prompt is an unbiased estimate of the mean of f over the sampler. NaN if the policy is
                     "off-policy", or if a tree merged rows of equal text (order="left" avoids this)
    plain            [N] True at independent samples that were added because a tree had fewer than k texts for the
                     prompt. Their weight is 0
    texts            [N] the texts
    policy, reason   "on-policy", "without replacement" or "off-policy", and one sentence that says why
    settings, seed   the resolved Settings and the seed
    rows             how many rows went through the model
    """

    sequences: Tensor
    attention_mask: Tensor
    window: Tensor
    completion_mask: Tensor
    steps: Tensor
    logprobs: Tensor
    prompt: Tensor
    weights: Tensor
    plain: Tensor
    texts: list[str]
    policy: str
    reason: str
    settings: Settings
    seed: int
    rows: int

    def __len__(self) -> int:
        return len(self.texts)

    def take(self, index: Tensor) -> Rollouts:
        """Return the rollouts with these indices."""
        tensors: dict[str, Any] = {name: getattr(self, name)[index] for name in _TENSORS}
        return replace(self, **tensors, texts=[self.texts[i] for i in index.tolist()])

    @staticmethod
    def join(parts: Sequence[Rollouts]) -> Rollouts:
        """Return the rollouts of several calls as one. Rows are padded to the length of the longest."""
        longest = max(part.sequences.shape[1] for part in parts)
        tensors: dict[str, Any] = {}
        for name in _TENSORS:
            values = [getattr(part, name) for part in parts]
            if name in _ROWS:
                values = [F.pad(value, (longest - value.shape[1], 0)) for value in values]
            tensors[name] = torch.cat(values)
        before = torch.tensor([0, *(1 + int(part.prompt.max()) for part in parts[:-1])]).cumsum(0).tolist()
        tensors["prompt"] = torch.cat([part.prompt + first for part, first in zip(parts, before, strict=True)])
        texts, rows = [text for part in parts for text in part.texts], sum(part.rows for part in parts)
        return replace(parts[0], **tensors, texts=texts, rows=rows)


_TENSORS = [field.name for field in fields(Rollouts) if field.type == "Tensor"]
_ROWS = ("sequences", "attention_mask", "window", "completion_mask", "steps", "logprobs")


def rollout(
    model: Model,
    prompts: Any,
    k: int = 8,
    *,
    seed: int | None = None,
    keys: Sequence[Name] | None = None,
    **options: Any,
) -> Rollouts:
    """Return k rollouts per prompt. The rollouts of prompt p have the indices p * k to p * k + k - 1.

    model      the result of `d5p4.load` or `d5p4.wrap`. Its module is decoded in evaluation mode and without gradients
    prompts    as in `d5p4.generate`
    seed       the seed of all random numbers. None draws a fresh seed. Use a different seed in every iteration
    keys       one name per prompt, which selects its random stream, as in `d5p4.generate`
    options    options of `d5p4.generate`, such as `**ON_POLICY` and gen_length
    """
    seed, prompts = chosen_seed(seed), split_prompts(prompts, None)
    with _evaluating(model):
        result = _generate(model, prompts, k, seed, keys, options)
        assert result.window is not None
        policy, reason = _policy(result.settings, int(result.window.sum(1).max()))
        rollouts = _rows(model, result, policy, reason)
        short = [p for p, answers in enumerate(result.answers) if len(answers) < k]
        if not short:
            return rollouts
        missing = [k - len(result.answers[p]) for p in short]
        names = None if keys is None else [keys[p] for p in short]
        plain = {name: value for name, value in options.items() if name not in _TREE_OPTIONS}
        plain |= {name: getattr(result.settings, name) for name in ("temperature", "order", "reveal", "eos", "stop")}
        plain |= {"method": "independent"}
        samples = _generate(model, [prompts[p] for p in short], max(missing), key_of(f"fill {seed}"), names, plain)
    added = _rows(model, samples, "on-policy", reason)
    added = replace(added, weights=torch.zeros_like(added.weights), plain=torch.ones_like(added.plain))
    joined = Rollouts.join([rollouts, added])
    source = torch.arange(len(rollouts))
    for place, (p, count) in enumerate(zip(short, missing, strict=True)):
        first = len(rollouts) + place * max(missing)
        source[p * k + k - count : (p + 1) * k] = torch.arange(first, first + count)
    return replace(joined.take(source.to(joined.prompt.device)), prompt=rollouts.prompt)


_TREE_OPTIONS = ("method", "diversity", "spare", "w")


def _generate(
    model: Model, prompts: list[Any], k: int, seed: int, keys: Sequence[Name] | None, options: Mapping[str, Any]
) -> Result:
    import warnings

    from ..errors import DuplicateAnswers

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DuplicateAnswers)  # independent rollouts may be equal
        return generate(model, prompts, k=k, seed=seed, keys=keys, **{**options, "logprobs": True})


@contextmanager
def _evaluating(model: Model) -> Iterator[None]:
    """Put the model's module into evaluation mode, without dropout, and restore its mode afterwards."""
    module = getattr(model, "module", model)
    training = [part for part in module.modules() if part.training] if isinstance(module, nn.Module) else []
    try:
        for part in training:
            part.training = False
        yield
    finally:
        for part in training:
            part.training = True


def _policy(settings: Settings, length: int) -> tuple[str, str]:
    """Return what the log-probability of rollouts is (see the top of this file), and a sentence that says why. `length`
    is the number of positions that are decoded."""
    defaults = parameters_of(Settings)
    one_per_step = settings.reveal == "schedule" and (settings.steps or length) >= length
    for is_off_policy, reason in (
        (settings.temperature != 1, f"temperature={settings.temperature} is not 1"),
        (settings.top_k is not None, "top_k removes tokens"),
        (settings.top_p not in (None, 1.0), "top_p removes tokens"),
        (settings.guidance != defaults["guidance"].default, "guidance changes the distribution"),
        (settings.order_spec.draws_first, f"order={settings.order!r} looks at drawn tokens"),
        (settings.eos == "last", "eos='last' looks at drawn tokens"),
        (settings.start == "entropy" and settings.start_temperature not in (None, 1), "start_temperature is not 1"),
        (settings.cache in ("prefix", "dual"), f"cache={settings.cache!r} is an approximation"),
    ):
        if is_off_policy:
            return "off-policy", reason
    if settings.method == "independent":
        return "on-policy", "independent draws at temperature 1 in an order that looks at the state alone"
    tree = settings.method == "tree" and not settings.spare and not settings.params.get("diversity")
    if tree and one_per_step:
        return "without replacement", "a tree draws the rollouts of a prompt without replacement; use their weights"
    if tree:
        return "off-policy", "the tree takes the top token of sure positions; use reveal='schedule' without steps"
    return "off-policy", f"method={settings.method!r} selects the rollouts"


def _rows(model: Model, result: Result, policy: str, reason: str) -> Rollouts:
    """Return the answers of a result as rollouts. `rollout` replaces the rows of missing answers."""
    assert result.window is not None and result.reveal_at is not None and result.logprob_at is not None
    prompts, k = result.score.shape
    steps = (result.reveal_at + 1).flatten(0, 1)
    sequences, window = result.sequences.flatten(0, 1), result.window.repeat_interleave(k, 0)
    appended = window.flip(1).cumprod(1).flip(1).bool()
    ends = appended & torch.isin(sequences, torch.tensor(model.eos_ids, device=steps.device))
    weights = torch.full((prompts, k), 1 / k, dtype=result.score.dtype, device=steps.device)
    if policy == "without replacement":
        weights = importance_weights(result)
    elif policy == "off-policy":
        weights = torch.full_like(weights, torch.nan)
    return Rollouts(
        sequences,
        result.attention_mask.repeat_interleave(k, 0),
        window,
        window & ((ends.cumsum(1) - ends.long()) == 0),
        steps,
        result.logprob_at.flatten(0, 1),
        torch.arange(prompts, device=steps.device).repeat_interleave(k),
        weights.flatten(),
        torch.zeros(prompts * k, dtype=torch.bool, device=steps.device),
        [text for texts in result.texts for text in [*texts, *[""] * (k - len(texts))]],
        policy,
        reason,
        result.settings,
        result.seed,
        int(result.rows.sum()),
    )


def importance_weights(result: Result) -> Tensor:
    """Return the weights [P, k] of a tree's answers at a temperature above 0 with diversity=0 and spare=0.

    Answer i has log-probability phi_i (`result.logp`) and was in the set with probability
    q_i = 1 - exp(-exp(phi_i - kappa)), given the threshold kappa (`result.kappa`). Its weight is exp(phi_i) / q_i, so
    that the sum of weight * f over the answers is an unbiased estimate of the mean of f (Horvitz and Thompson; Kool et
    al. 2019). The weight is 0 where the sampler gave no answer, and NaN if rows of equal text were merged.
    """
    if result.logp is None or result.kappa is None:
        raise D5P4Error("the result has no weights; use method='tree' with a temperature above 0, diversity=0, spare=0")
    phi = result.logp.nan_to_num(nan=-torch.inf)
    inclusion = -torch.expm1(-torch.exp(phi - result.kappa[:, None]))
    weights = torch.where(phi == -torch.inf, 0.0, phi.exp() / inclusion)
    return weights.masked_fill(result.kappa.isnan()[:, None], torch.nan)


def weighted_advantages(rewards: Tensor, rollouts: Rollouts) -> Tensor:
    """Return the advantages [N] of rollouts of the policy "without replacement", for the loss -mean(advantage * log p).

    With weights w that are normalised to the mean 1 over the k rollouts of a prompt, the advantage of rollout i is
    w_i (r_i - mean(w r)). If all weights are equal, this is the usual advantage. Normalising makes the estimate biased,
    as the baseline of GRPO does, but lowers its variance. If the weights of a prompt are unknown (NaN), they count as
    equal.
    """
    weights = rollouts.weights.to(rewards)
    total, count, mean = (torch.zeros(int(rollouts.prompt.max()) + 1).to(rewards) for _ in range(3))
    count = count.index_add(0, rollouts.prompt, torch.ones_like(weights))
    total = total.index_add(0, rollouts.prompt, weights)
    known = total[rollouts.prompt] > 0  # False also where the sum is NaN
    weights = torch.where(known, weights * (count / total)[rollouts.prompt], 1.0)
    mean = mean.index_add(0, rollouts.prompt, weights * rewards) / count
    return weights * (rewards - mean[rollouts.prompt])


def log_probabilities(
    model: Model, rollouts: Rollouts, *, shrink: int = 1, max_tokens_per_forward: int = 16384
) -> tuple[Tensor, Tensor]:
    """Return the log-probability [N, T] of each revealed token under the model as it is now, and the entropy [N, T] of
    the distribution that it was drawn from. Both are 0 at tokens that no step revealed, and both have gradients.

    The state before a step shows the tokens of earlier steps, and masks elsewhere. Equal states go through the model
    once.

    shrink    how many neighbouring steps share the state before the first of them. 1 is exact. Larger numbers need
              fewer forwards, but the distributions are then not those of the sampler
    max_tokens_per_forward   the largest number of tokens per forward. With gradients, all forwards of a call stay in
              memory, so pass few rollouts per call, and call `backward` after each call
    """
    whole("shrink", shrink)
    whole("max_tokens_per_forward", max_tokens_per_forward)
    head = model.head.ban(model.eos_ids if rollouts.settings.eos == "never" else ())
    group = torch.div(rollouts.steps + shrink - 1, shrink, rounding_mode="floor")  # 0: no step revealed the token
    has_group = torch.zeros(len(group), int(group.max()) + 1, dtype=torch.bool, device=group.device)
    row, step = has_group.scatter(1, group, True)[:, 1:].nonzero().unbind(1)
    step = step[:, None] + 1
    hidden = rollouts.window[row] & ((group[row] == 0) | (group[row] >= step))
    states = rollouts.sequences[row].masked_fill(hidden, model.mask_id)
    padded = torch.cat([states, rollouts.attention_mask[row].long()], 1)
    distinct, number = padded.unique(dim=0, return_inverse=True)
    tokens, visible = distinct.chunk(2, 1)

    pair, place = (group[row] == step).nonzero().unbind(1)  # the tokens that each state reveals
    owner, values = number[pair], []
    size = max(1, max_tokens_per_forward // tokens.shape[1])
    order = owner.argsort(stable=True)
    row, place, owner = row[pair][order], place[order], owner[order]
    truth = rollouts.sequences[row, place]
    for first in range(0, len(tokens), size):
        here = slice(*torch.searchsorted(owner, torch.tensor([first, first + size], device=owner.device)).tolist())
        rows = model.body(tokens[first : first + size], visible[first : first + size].bool()).states
        logits = F.linear(rows[owner[here] - first, place[here]], head.weight, head.bias)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32)).masked_fill(head.banned, -torch.inf)
        logp = logits.log_softmax(-1)
        entropy = -(logp.exp() * logp.masked_fill(head.banned, 0)).sum(-1)
        values.append(torch.stack([logp.gather(1, truth[here, None])[:, 0], entropy]))
    zeros = torch.zeros(group.shape, dtype=values[0].dtype, device=group.device)
    logp, entropy = (zeros.index_put((row, place), value) for value in torch.cat(values, 1))
    return logp, entropy


def runs_of_equals(prompts: Sequence[Any], most: int) -> list[tuple[Any, int]]:
    """Return each run of equal neighbours as its prompt and its length. A run longer than `most` is divided."""
    runs = [(prompt, len(list(copies))) for prompt, copies in groupby(prompts)]
    return [(prompt, min(most, count - start)) for prompt, count in runs for start in range(0, count, most)]


def rollout_func(wrap: Wrap, keep: Callable[[Rollouts], object] | None = None, **options: Any) -> Callable[..., Any]:
    """Return a function for `trl.GRPOTrainer(rollout_func=...)`, which decodes with the trainer's own weights.

    TRL repeats every prompt `num_generations` times. The function decodes these copies as one prompt with k answers,
    and returns one rollout per copy. Besides what TRL needs, it returns `reveal_step` (the step of each token, from 1)
    and `plain` (see `Rollouts`). TRL passes both to reward functions. TRL's own loss is that of a causal model, so
    train with `d5p4.integrations.trl.DiffusionGRPOTrainer`.

    wrap     makes a model of d5p4 from the trainer's module. It is called once
    keep     a function that gets the rollouts of every call
    options  options of `rollout`. gen_length defaults to TRL's max_completion_length, and seed to TRL's seed. Every
             call has its own random numbers
    """
    models: dict[int, Model] = {}
    calls = 0
    seed = options.pop("seed", None)

    def roll_out(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        nonlocal calls
        module = trainer.accelerator.unwrap_model(trainer.model)
        if id(module) not in models:
            models.clear()
            models[id(module)] = wrap(module)
        model = models[id(module)]
        calls += 1
        stream = f"{trainer.args.seed if seed is None else seed} {trainer.accelerator.process_index} {calls}"
        given = {"gen_length": trainer.max_completion_length} | options
        most = trainer.num_generations if trainer.model.training else trainer.num_generations_eval
        runs = runs_of_equals(prompts, most)
        parts: dict[int, Rollouts] = {}
        for k in sorted({count for _, count in runs}):
            places = [place for place, (_, count) in enumerate(runs) if count == k]
            # Without keys, two runs of the same prompt have different random numbers.
            part = rollout(model, [runs[place][0] for place in places], k, seed=key_of(f"{stream} {k}"), **given)
            parts |= {place: part.take((part.prompt == i).nonzero()[:, 0]) for i, place in enumerate(places)}
        rollouts = Rollouts.join([replace(parts[p], prompt=0 * parts[p].prompt) for p in range(len(runs))])
        if keep is not None:
            keep(rollouts)
        rows = range(len(rollouts))
        answer, prompt = rollouts.completion_mask, rollouts.attention_mask & ~rollouts.window
        return {
            "prompt_ids": [rollouts.sequences[i][prompt[i]].tolist() for i in rows],
            "completion_ids": [rollouts.sequences[i][answer[i]].tolist() for i in rows],
            "logprobs": [rollouts.logprobs[i][answer[i]].tolist() for i in rows],
            "reveal_step": [rollouts.steps[i][answer[i]].tolist() for i in rows],
            "plain": rollouts.plain.tolist(),
        }

    return roll_out


@dataclass
class D5P4Sampler:
    """A sampler for the GRPO trainer of dllm. The trainer sets `model`, and calls `sample` with a list of left-padded
    prompts, in which equal neighbours are copies of one prompt.

    wrap     makes a model of d5p4 from the module
    options  options of `rollout`. They override those of dllm's config (max_new_tokens, steps, block_size, temperature,
             cfg_scale, remasking)
    rollouts the rollouts of the last call
    """

    wrap: Wrap
    options: Mapping[str, Any] = field(default_factory=dict)
    model: Any = None
    tokenizer: Any = None
    scheduler: Any = None
    rollouts: Rollouts | None = None

    def sample(self, inputs: Sequence[Any], config: Any = None, **given: Any) -> Any:
        """Return sequences [B, P + max_new_tokens], or an object that has them as `sequences` with return_dict=True."""
        return self._run(inputs, {name: given.get(name, getattr(config, name, None)) for name in _DLLM})

    def infill(self, inputs: Sequence[Any], config: Any = None, **given: Any) -> Any:
        """Fill the mask tokens of the inputs, and return the rows as `sample` does."""
        names = [name for name in _DLLM if name != "max_new_tokens"]
        return self._run(inputs, {name: given.get(name, getattr(config, name, None)) for name in names})

    def _run(self, inputs: Sequence[Any], values: Mapping[str, Any]) -> Any:
        options = {_DLLM[name]: value for name, value in values.items() if _DLLM[name] and value is not None}
        options |= self.options
        model, pad = self.wrap(self.model), getattr(self.tokenizer, "pad_token_id", None)
        rows = [[int(i) for i in row] for row in inputs]
        width = max(map(len, rows))
        prompts = [row[next((i for i, token in enumerate(row) if token != pad), 0) :] for row in rows]
        parts, seed = [], chosen_seed(options.pop("seed", None))
        for number, (prompt, k) in enumerate(runs_of_equals(prompts, len(prompts))):
            parts.append(rollout(model, [prompt], k, seed=key_of(f"{seed} {number}"), **options))
        self.rollouts = Rollouts.join(parts)
        sequences = self.rollouts.sequences
        length = width + int(self.rollouts.window[0].sum()) * (model.mask_id not in prompts[0])
        fill = model.pad_id if pad is None else pad
        left = max(0, length - sequences.shape[1])
        is_real = F.pad(self.rollouts.attention_mask, (left, 0))[:, -length:]
        padded = torch.where(is_real, F.pad(sequences, (left, 0))[:, -length:], fill)
        return _SamplerOutput(padded) if values["return_dict"] else padded


@dataclass
class _SamplerOutput:
    sequences: Tensor
    histories: None = None


_DLLM = {
    "max_new_tokens": "gen_length",
    "steps": "steps",
    "block_size": "block_length",
    "temperature": "temperature",
    "cfg_scale": "cfg_scale",
    "remasking": "remasking",
    "return_dict": "",
}
