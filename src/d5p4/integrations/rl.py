"""Rollouts for reinforcement learning: k answers per prompt, with what a trainer needs to know about each of them.

`rollout` decodes with the weights that are being trained, without a copy. `log_probabilities` computes their
log-probabilities again, with gradients. examples/grpo_trl.py is a trainer that uses both, for TRL.

A rollout reveals tokens step by step. Its log-probability is the sum, over its tokens, of log p(token | the state
before the step that revealed it). `Rollouts.policy` says whether this is the log-probability of the sampler that drew
the rollout ("on-policy"), that of a sampler from which a tree drew without replacement ("without replacement";
`Rollouts.weights` corrects for this), or neither ("off-policy"). docs/rl.md says which options lead to which policy.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ..errors import D5P4Error, DuplicateAnswers
from ..generate import chosen_seed, generate
from ..options import Settings, whole_number
from ..prompts import split_prompts
from ..resolve import gives_length
from ..result import Result
from ..rng import key_of
from ..types import Model, block_of

ON_POLICY: Mapping[str, Any] = dict(
    method="independent", temperature=1.0, order="left", reveal="schedule", eos="free", stop=True
)
WITHOUT_REPLACEMENT: Mapping[str, Any] = dict(
    method="tree", temperature=1.0, order="left", reveal="schedule", eos="free", diversity=0.0, spare=0
)


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
    policy, reason   "on-policy", "without replacement" or "off-policy", and one sentence that says why
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
        """Return the rollouts with these indices, or those where a mask [N] is True."""
        tensors: dict[str, Any] = {name: getattr(self, name)[index] for name in _TENSORS}
        return replace(self, **tensors, texts=[self.texts[i] for i in torch.arange(len(self))[index.cpu()].tolist()])

    @staticmethod
    def join(parts: Sequence[Rollouts]) -> Rollouts:
        """Return the rollouts of several calls with the same policy as one. Rows are padded to the longest."""
        if len(policies := sorted({part.policy for part in parts})) > 1:
            fact = f"rollouts of different policies ({', '.join(policies)})"
            raise D5P4Error(f"{fact} cannot be joined; train on each alone")
        longest = max(part.sequences.shape[1] for part in parts)
        tensors: dict[str, Any] = {}
        for name in _TENSORS:
            values = [getattr(part, name) for part in parts]
            if values[0].dim() == 2:
                values = [F.pad(value, (longest - value.shape[1], 0)) for value in values]
            tensors[name] = torch.cat(values)
        before = accumulate((1 + int(part.prompt.max()) for part in parts[:-1]), initial=0)
        tensors["prompt"] = torch.cat([part.prompt + first for part, first in zip(parts, before, strict=True)])
        texts, rows = [text for part in parts for text in part.texts], sum(part.rows for part in parts)
        return replace(parts[0], **tensors, texts=texts, rows=rows)


_TENSORS = [field.name for field in fields(Rollouts) if field.type == "Tensor"]


def rollout(model: Model, prompts: Any, k: int = 8, *, seed: int | None = None, **options: Any) -> Rollouts:
    """Return k rollouts per prompt. The rollouts of prompt p have the indices p * k to p * k + k - 1.

    model      the result of `d5p4.load` or `d5p4.wrap`. Its module is decoded in evaluation mode and without gradients
    prompts    as in `d5p4.generate`
    seed       the seed of all random numbers. None draws a fresh seed. Use a different seed in every iteration
    options    options of `d5p4.generate`, such as `**ON_POLICY` and gen_length
    """
    seed, prompts = chosen_seed(seed), split_prompts(prompts, None)
    with _evaluating(model), warnings.catch_warnings():
        warnings.simplefilter("ignore", DuplicateAnswers)  # independent rollouts may be equal
        result = generate(model, prompts, k=k, seed=seed, **{**options, "logprobs": True})
        rollouts = _rows(model, result, *_policy(result))
        missing = {p: k - len(answers) for p, answers in enumerate(result.answers) if len(answers) < k}
        if not missing:
            return rollouts
        most, keys = max(missing.values()), options.get("keys")
        keys = None if keys is None else [keys[p] for p in missing]
        # Add independent draws with the settings of the search.
        search = {*result.settings.spec.parameters, "k", "w", "spare", "distinct"}
        search |= set() if gives_length(options) else {"gen_length"}
        plain = {name: value for name, value in result.settings.options().items() if name not in search}
        plain |= {"method": "independent", "temperature": result.settings.temperature or 1.0}
        added = generate(model, [prompts[p] for p in missing], k=most, seed=key_of(f"fill {seed}"), keys=keys, **plain)
    filling = replace(_rows(model, added, "on-policy", ""), policy=rollouts.policy)
    filling = replace(filling, weights=torch.zeros_like(filling.weights), plain=torch.ones_like(filling.plain))
    source = torch.arange(len(rollouts))
    for place, (p, count) in enumerate(missing.items()):
        source[(p + 1) * k - count : (p + 1) * k] = len(rollouts) + place * most + torch.arange(count)
    return replace(Rollouts.join([rollouts, filling]).take(source), prompt=rollouts.prompt)


@contextmanager
def _evaluating(model: Model) -> Iterator[None]:
    """Put the model's module into evaluation mode, without dropout, and restore its mode afterwards."""
    module = getattr(model, "module", model)
    training = [part for part in module.modules() if part.training] if isinstance(module, nn.Module) else []
    for part in training:
        part.training = False
    try:
        yield
    finally:
        for part in training:
            part.training = True


def _policy(result: Result) -> tuple[str, str]:
    """Return what the log-probability of rollouts is (see the top of this file), and a sentence that says why."""
    settings, length = result.settings, int(result.window.sum(1).max())
    one_per_step = settings.reveal == "schedule" and (settings.steps or length) >= length
    for is_off_policy, reason in (
        (settings.temperature != 1, f"temperature={settings.temperature} is not 1"),
        (settings.top_k is not None, "top_k removes tokens"),
        (settings.top_p not in (None, 1.0), "top_p removes tokens"),
        (bool(settings.min_p), "min_p removes tokens"),
        (settings.guidance != 1, "guidance changes the distribution"),
        (settings.order_spec.draws_first, f"order={settings.order!r} looks at drawn tokens"),
        (settings.eos == "last", "eos='last' looks at drawn tokens"),
        (settings.start == "entropy" and settings.start_temperature not in (None, 1), "start_temperature is not 1"),
        (settings.cache in ("prefix", "dual"), f"cache={settings.cache!r} is an approximation"),
        (settings.distinct, "distinct=True draws again where rows are equal"),
        (settings.spare > 0, f"spare={settings.spare} selects the rollouts"),
    ):
        if is_off_policy:
            return "off-policy", reason
    if settings.method == "independent":
        return "on-policy", "independent draws at temperature 1 in an order that looks at the state alone"
    tree = settings.method == "tree" and not settings.params.get("diversity")
    if tree and one_per_step:
        return "without replacement", "a tree draws the rollouts of a prompt without replacement; use their weights"
    if tree:
        return "off-policy", "the tree takes the top token of sure positions; use reveal='schedule' without steps"
    return "off-policy", f"method={settings.method!r} selects the rollouts"


def _rows(model: Model, result: Result, policy: str, reason: str) -> Rollouts:
    """Return the answers of a result as rollouts. `rollout` replaces the rows of missing answers."""
    prompts, k = result.score.shape
    steps, window = (result.reveal_at + 1).flatten(0, 1), result.window.repeat_interleave(k, 0)
    kept = torch.arange(steps.shape[1], 0, -1, device=steps.device) >= (block_of(model) or 1)  # see `Result.window`
    lengths = [[*map(len, answers)] + [0] * (k - len(answers)) for answers in result.answers]
    value = 1 / k if policy == "on-policy" else torch.nan
    weights = torch.full((prompts, k), value, dtype=result.score.dtype, device=steps.device)
    if policy == "without replacement":
        weights = importance_weights(result)
    return Rollouts(
        result.sequences.flatten(0, 1),
        result.attention_mask.repeat_interleave(k, 0),
        window,
        window & kept & (window.cumsum(1) <= 1 + torch.tensor(lengths, device=steps.device).view(-1, 1)),
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
    q_i = 1 - exp(-exp(phi_i - kappa)), given the threshold kappa (`result.kappa`). Its weight is exp(phi_i) / q_i
    (Horvitz and Thompson; Kool et al. 2019). See `Rollouts.weights`. The weight is 0 where there is no answer.
    """
    if result.kappa is None:
        raise D5P4Error("the result has no weights; use method='tree' with a temperature above 0, diversity=0, spare=0")
    phi = result.logp.masked_fill(result.logp.isnan(), -torch.inf)
    gap = phi - result.kappa[:, None]
    log_q = torch.where(gap < -30, gap, (-torch.expm1(-gap.exp())).log())  # so that unlikely texts do not give 0 / 0
    weights = torch.where(phi == -torch.inf, 0.0, (phi - log_q).exp())
    return weights.masked_fill(result.kappa.isnan()[:, None], torch.nan)


def weighted_advantages(rewards: Tensor, rollouts: Rollouts) -> Tensor:
    """Return the advantages [N] of rollouts, for the loss -mean(advantage * log p).

    With weights w that are normalised to the mean 1 over the k rollouts of a prompt, it is w_i (r_i - mean(w r)). If
    the weights of a prompt are equal or unknown (NaN), this is the reward minus the mean reward of the prompt.
    Normalising makes the estimate biased, as the baseline of GRPO does, but lowers its variance.
    """
    if len(rewards) != len(rollouts):
        raise D5P4Error(f"there are {len(rewards)} rewards for {len(rollouts)} rollouts; give one reward per rollout")
    weights, values = relative_weights(rollouts), rewards.to(rollouts.weights)
    advantages = weights * (values - _prompt_means(weights * values, rollouts.prompt))
    return advantages.to(rewards.dtype if rewards.is_floating_point() else torch.get_default_dtype())


def relative_weights(rollouts: Rollouts) -> Tensor:
    """Return the weights [N], normalised to the mean 1 over the rollouts of each prompt. Unknown weights become 1."""
    means = _prompt_means(rollouts.weights, rollouts.prompt)
    return torch.where(means > 0, rollouts.weights / means, 1.0)  # a mean of NaN is not above 0


def _prompt_means(values: Tensor, prompt: Tensor) -> Tensor:
    """Return, for each rollout, the mean of the values [N] over the rollouts of its prompt."""
    total = values.new_zeros(int(prompt.max()) + 1).index_add(0, prompt, values)
    return (total / prompt.bincount())[prompt]


def log_probabilities(
    model: Model, rollouts: Rollouts, *, max_tokens_per_forward: int = 16384
) -> tuple[Tensor, Tensor]:
    """Return the log-probability [N, T] of each revealed token under the model as it is now, and the entropy [N, T] of
    the distribution that it was drawn from. Both are 0 at tokens that no step revealed, and both have gradients.

    The state before a step shows the tokens of earlier steps, and masks elsewhere. Equal states go through the model
    once. If `max_tokens_per_forward` makes several forwards of them, `backward` makes each forward again, so that it
    needs memory for one at a time.
    """
    whole_number("max_tokens_per_forward", max_tokens_per_forward)
    head = model.head.ban(model.eos_ids if rollouts.settings.eos == "never" else ())
    steps = rollouts.steps
    exists = torch.zeros(len(steps), int(steps.max()) + 1 if len(steps) else 1, dtype=torch.bool, device=steps.device)
    row, step = exists.scatter(1, steps, True)[:, 1:].nonzero().unbind(1)
    step = step[:, None] + 1
    hidden = rollouts.window[row] & ((steps[row] == 0) | (steps[row] >= step))
    states = rollouts.sequences[row].masked_fill(hidden, model.mask_id).masked_fill(~rollouts.attention_mask[row], -1)
    states, number = states.unique(dim=0, return_inverse=True)
    visible, tokens = states >= 0, states.clamp_min(0)

    pair, place = (steps[row] == step).nonzero().unbind(1)  # the tokens that each state reveals
    owner = number[pair]
    order = owner.argsort(stable=True)
    row, place, owner = row[pair][order], place[order], owner[order]
    truth = rollouts.sequences[row, place]
    # Like the sampler, compute logits in float32 at least, even if the model has half precision or autocast is on.
    dtype = torch.promote_types(head.weight.dtype, torch.float32)
    weight, bias = head.weight.to(dtype), None if head.bias is None else head.bias.to(dtype)
    size = max(1, max_tokens_per_forward // tokens.shape[1])

    def part(first: int) -> Tensor:
        here = slice(*torch.searchsorted(owner, torch.tensor([first, first + size], device=owner.device)).tolist())
        rows = model.body(tokens[first : first + size], visible[first : first + size]).states
        with torch.autocast(rows.device.type, enabled=False):
            logits = F.linear(rows[owner[here] - first, place[here]].to(dtype), weight, bias)
        logp = logits.masked_fill(head.banned, -torch.inf).log_softmax(-1)
        entropy = -(logp.exp() * logp.masked_fill(head.banned, 0)).sum(-1)
        return torch.stack([logp.gather(1, truth[here, None])[:, 0], entropy])

    again = torch.is_grad_enabled() and len(tokens) > size
    firsts = range(0, len(tokens), size)
    values = [checkpoint(part, first, use_reentrant=False) if again else part(first) for first in firsts]
    zeros = torch.zeros(steps.shape, dtype=dtype, device=steps.device)
    logp, entropy = (zeros.index_put((row, place), value) for value in torch.cat([zeros.new_zeros(2, 0), *values], 1))
    return logp, entropy
