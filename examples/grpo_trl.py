"""Train a masked diffusion model with TRL's GRPO trainer. Usage: grpo_trl.py STEPS (extra `rl`)

TRL computes the log-probabilities of a causal model. This trainer computes those of `rl.log_probabilities` instead:
that of each token, given the state before the step that revealed it. Everything else (rewards, advantages, clipping,
KL, optimiser, checkpoints, logs) is TRL's. The trainer overrides private methods of trl 1.16, so it is an example to
copy, and no part of the library. Several processes (torchrun) work; sharded weights do not.

A rollout may reveal tokens behind its end-of-text token. The states show them, but the loss leaves them out, because a
completion of TRL ends with its end-of-text token. In the order `left` there are no such tokens.
"""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from trl import GRPOConfig, GRPOTrainer

import d5p4
from d5p4.integrations.rl import ON_POLICY, Rollouts, log_probabilities, relative_weights, rollout
from d5p4.resolve import translate
from d5p4.rng import key_of
from d5p4.types import Model

Wrap = Callable[[nn.Module], Model]
"""Makes a model of d5p4 from the trained module, such as `lambda module: d5p4.wrap(module, tokenizer, mask_id=...)`."""


class DiffusionGRPOTrainer(GRPOTrainer):
    """`trl.GRPOTrainer` for a masked diffusion model, with rollouts of d5p4.

    model, reward_funcs, ...   the arguments of `trl.GRPOTrainer`, except rollout_func
    wrap      makes a model of d5p4 from a module: `lambda module: d5p4.wrap(module, tokenizer, mask_id=...)`. It is
              called for the trained module and, with TRL's beta, for the reference model
    rollout   options of `rl.rollout`, by default `rl.ON_POLICY`. Off-policy rollouts are trained on as if they were
              on-policy, after a warning. Draws without replacement get the advantages of `rl.weighted_advantages`,
              with the mean over all `num_generations` rollouts of a prompt, even if several processes drew them
    """

    def __init__(
        self, model: Any, *args: Any, wrap: Wrap, rollout: Mapping[str, Any] = ON_POLICY, **kwargs: Any
    ) -> None:
        if kwargs.get("rollout_func") is not None:
            raise d5p4.D5P4Error(
                "this trainer has its own rollout function; give its options as rollout=", option="rollout_func"
            )
        self.wrap = lru_cache(maxsize=2)(wrap)  # the trained module and the reference model
        self._rollouts: dict[str, Rollouts] = {}
        self._index: Tensor | None = None
        func = rollout_func(self.wrap, keep=self._keep, **rollout)
        super().__init__(model, *args, **kwargs, rollout_func=func)  # type: ignore[misc]

    @property
    def _mode(self) -> str:
        return "train" if getattr(self.model, "training", False) else "eval"

    def _keep(self, rollouts: Rollouts) -> None:
        if rollouts.policy == "off-policy" and not self._rollouts:
            note = "train on them only if you accept a biased gradient (docs/rl.md)"
            warnings.warn(f"the rollouts are off-policy: {rollouts.reason}; {note}", stacklevel=2)
        self._rollouts[self._mode] = rollouts
        self._index = torch.arange(len(rollouts), device=rollouts.sequences.device)

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        output = super()._generate_and_score_completions(inputs)
        rollouts = self._rollouts[self._mode]
        if rollouts.policy == "without replacement":
            k = self.num_generations if self._mode == "train" else self.num_generations_eval
            weights, own = relative_weights(rollouts).to(output["advantages"]), output["advantages"]
            means = self.accelerator.gather(weights * own).view(-1, k).mean(1).repeat_interleave(k)
            first = self.accelerator.process_index * len(own)
            output["advantages"] = weights * (own - means[first : first + len(own)])
        output["rollout_index"] = self._index  # TRL shuffles and divides all tensors of a batch together
        return output

    def _compute_loss(self, model: nn.Module, inputs: Any) -> Tensor:
        self._index = inputs["rollout_index"]
        return super()._compute_loss(model, inputs)

    def _get_per_token_logps_and_entropies(
        self,
        model: nn.Module,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        compute_entropy: bool = False,
        compute_aux_loss: bool = False,
        **others: Any,
    ) -> tuple[Tensor, Tensor | None, None]:
        """Return the log-probabilities and entropies [B, logits_to_keep] of the completions."""
        assert self._index is not None
        rollouts = self._rollouts[self._mode].take(self._index)
        if compute_aux_loss:
            raise d5p4.D5P4Error("the load-balancing loss of experts is not supported; set router_aux_loss_coef to 0")
        inner = self.accelerator.unwrap_model(model)
        wrapped = self.wrap(inner)

        def compute() -> tuple[Tensor, Tensor]:
            with self.accelerator.autocast():
                return log_probabilities(wrapped, rollouts)

        values = compute() if inner is model else _call_in_forward(model, inner, compute)
        done = rollouts.completion_mask
        order = (~done).int().argsort(dim=1, stable=True)  # the positions of the completion come first
        place = order[:, :logits_to_keep]
        logps, entropies = (value.gather(1, place) * done.gather(1, place) for value in values)
        logps, entropies = (F.pad(value, (0, logits_to_keep - place.shape[1])) for value in (logps, entropies))
        return logps, entropies if compute_entropy else None, None


def _call_in_forward(model: nn.Module, inner: nn.Module, compute: Callable[[], Any]) -> Any:
    """Call `compute` inside the forward of the wrapper `model`. DistributedDataParallel, for example, prepares the
    exchange of gradients in its forward."""
    original = inner.__dict__.get("forward")

    def forward(*args: Any, **kwargs: Any) -> Any:
        restore()
        return compute()

    def restore() -> None:
        if original is None:
            inner.__dict__.pop("forward", None)
        else:
            inner.__dict__["forward"] = original

    inner.__dict__["forward"] = forward
    try:
        return model()
    finally:
        restore()


def rollout_func(wrap: Wrap, keep: Callable[[Rollouts], object] | None = None, **options: Any) -> Callable[..., Any]:
    """Return a function for `trl.GRPOTrainer(rollout_func=...)`, which decodes with the trainer's own weights.

    TRL repeats every prompt `num_generations` times. The function decodes these copies as one prompt with k answers,
    and returns one rollout per copy. Besides what TRL needs, it returns `reveal_step` (the step of each token, from 1)
    and `plain` (see `Rollouts`). TRL passes both to reward functions. The loss of a plain `GRPOTrainer` is that of a
    causal model, so use `DiffusionGRPOTrainer`.

    wrap     makes a model of d5p4 from the trainer's module. It is called once per module
    keep     a function that gets the rollouts of every call
    options  options of `rollout`. gen_length defaults to TRL's max_completion_length, but TRL's temperature, top_p and
             top_k are not used. Prompts are encoded as `d5p4.generate` does it: a chat template of the tokenizer of
             `wrap` is applied to text, too, unless chat=False. The random numbers depend on the seed (TRL's, if none is
             given), the process and the training step. So a resumed run continues with the numbers that it would have
             had, and evaluation does not change those of training
    """
    if wrong := [name for name in ("k", "keys") if name in options]:
        raise d5p4.D5P4Error("the trainer decides how many rollouts a prompt has; leave it out", option=wrong[0])
    model_of = lru_cache(maxsize=1)(wrap)
    calls: Counter[str] = Counter()
    seed = options.pop("seed", None)

    def roll_out(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        model = model_of(trainer.accelerator.unwrap_model(trainer.model))
        mode = "train" if trainer.model.training else "eval"
        most = trainer.num_generations if mode == "train" else trainer.num_generations_eval
        start = trainer.args.seed if seed is None else seed
        where = f"{start} {trainer.accelerator.process_index} {mode} {trainer.state.global_step}"
        calls[where] += 1
        given = {"gen_length": trainer.max_completion_length} | translate(options, model)
        rollouts = roll_out_runs(model, prompts, most, f"{where} {calls[where]}", given)
        if keep is not None:
            keep(rollouts)

        def lists(values: Tensor, mask: Tensor) -> list[Any]:
            return [row[shown].tolist() for row, shown in zip(values.cpu(), mask.cpu(), strict=True)]

        done = rollouts.completion_mask
        return {
            "prompt_ids": lists(rollouts.sequences, rollouts.attention_mask & ~rollouts.window),
            "completion_ids": lists(rollouts.sequences, done),
            "logprobs": lists(rollouts.logprobs, done),
            "reveal_step": lists(rollouts.steps, done),
            "plain": rollouts.plain.tolist(),
        }

    return roll_out


def roll_out_runs(model: Model, prompts: Sequence[Any], most: int, seed: str, options: Mapping[str, Any]) -> Rollouts:
    """Return one rollout per prompt. A run of equal neighbours is decoded as one prompt, at most `most` at a time."""
    counts = [(prompt, len(list(copies))) for prompt, copies in groupby(prompts)]
    runs = [(prompt, min(most, count - start)) for prompt, count in counts for start in range(0, count, most)]
    by_length = sorted(range(len(runs)), key=lambda place: runs[place][1])
    parts = []
    for k, places in groupby(by_length, key=lambda place: runs[place][1]):
        # Two runs of equal prompts must not have the same random numbers, so no keys are given here.
        parts.append(rollout(model, [runs[place][0] for place in places], k, seed=key_of(f"{seed} {k}"), **options))
    number = torch.tensor([place for place in by_length for _ in range(runs[place][1])])
    rollouts = Rollouts.join(parts).take(number.argsort(stable=True))
    return replace(rollouts, prompt=number.sort().values.to(rollouts.prompt.device))


def main(steps: int) -> None:
    """Train a tiny random Qwen2 over the characters of `countdown` to write equals signs."""
    characters = Path(d5p4.__file__).parent / "models" / "weights" / "countdown" / "tokenizer.json"
    names = {"eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>", "mask_token": "<|mask|>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(characters), **names)
    sizes = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
    sizes |= dict(num_key_value_heads=4, vocab_size=19, eos_token_id=17, pad_token_id=17)
    options: dict[str, Any] = dict(num_generations=4, per_device_train_batch_size=8, max_completion_length=12)
    options |= dict(use_cpu=True, bf16=False, report_to=[], save_strategy="no", disable_tqdm=True)
    trainer = DiffusionGRPOTrainer(
        Qwen2ForCausalLM(Qwen2Config(**sizes)),
        reward_funcs=lambda completions, **columns: [float("=" in text) for text in completions],
        args=GRPOConfig("grpo-out", max_steps=steps, **options),
        train_dataset=Dataset.from_dict({"prompt": ["86,28,13,31:96", "1,2,3:6"] * 8}),
        processing_class=tokenizer,
        wrap=lambda module: d5p4.wrap(module, tokenizer, mask_id=18, eos_ids=[17]),
    )
    trainer.train()
    print("updates:", trainer.state.global_step)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: grpo_trl.py STEPS")
    main(int(sys.argv[1]))
