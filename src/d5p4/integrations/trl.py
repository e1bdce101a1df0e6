"""TRL's GRPO trainer for masked diffusion models. It overrides private methods of trl 1.16.

TRL computes the log-probabilities of a causal model. This trainer computes those of `rl.log_probabilities` instead:
that of each token, given the state before the step that revealed it. Everything else (rewards, advantages, clipping,
KL, optimiser, checkpoints, logs) is TRL's.

A rollout may reveal tokens behind its end-of-text token. The states show them, but the loss leaves them out, because a
completion of TRL ends with its end-of-text token. In the order `left` there are no such tokens.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from trl import GRPOTrainer

from ..errors import D5P4Error
from ..types import Model
from .rl import ON_POLICY, Rollouts, Wrap, log_probabilities, rollout_func, weighted_advantages


class DiffusionGRPOTrainer(GRPOTrainer):
    """`trl.GRPOTrainer` for a masked diffusion model, with rollouts of d5p4.

    model, reward_funcs, ...   the arguments of `trl.GRPOTrainer`, except rollout_func
    wrap      makes a model of d5p4 from a module: `lambda module: d5p4.wrap(module, tokenizer, mask_id=...)`. It is
              called for the trained module and, with TRL's beta, for the reference model
    rollout   options of `rl.rollout`, by default `rl.ON_POLICY`. Off-policy rollouts are trained on as if they were
              on-policy, after a warning. Draws without replacement get the advantages of `rl.weighted_advantages`
    shrink    how many neighbouring steps share one state in the likelihood (`rl.log_probabilities`)
    """

    def __init__(
        self, model: Any, *args: Any, wrap: Wrap, rollout: Mapping[str, Any] = ON_POLICY, shrink: int = 1, **kwargs: Any
    ) -> None:
        if kwargs.get("rollout_func") is not None:
            raise D5P4Error(
                "this trainer has its own rollout function; give its options as rollout=", option="rollout_func"
            )
        self.wrap, self.shrink = wrap, shrink
        self._wrapped: dict[int, Model] = {}
        self._rollouts: dict[str, Rollouts] = {}
        self._index: Tensor | None = None
        func = rollout_func(self._model_of, keep=self._keep, **rollout)
        super().__init__(model, *args, **kwargs, rollout_func=func)  # type: ignore[misc]

    def _model_of(self, module: nn.Module) -> Model:
        if id(module) not in self._wrapped:
            self._wrapped[id(module)] = self.wrap(module)
        return self._wrapped[id(module)]

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
            output["advantages"] = weighted_advantages(output["advantages"], rollouts)
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
            raise D5P4Error("the load-balancing loss of experts is not supported; set router_aux_loss_coef to 0")
        inner = self.accelerator.unwrap_model(model)
        wrapped = self._model_of(inner)

        def compute() -> tuple[Tensor, Tensor]:
            with self.accelerator.autocast():
                return log_probabilities(wrapped, rollouts, shrink=self.shrink)

        values = compute() if inner is model else _call_in_forward(model, inner, compute)
        start = rollouts.window.long().argmax(1, keepdim=True)  # the first position of the window
        place = start + torch.arange(logits_to_keep, device=start.device)
        inside = place < rollouts.window.shape[1]
        place = place.clamp_max(rollouts.window.shape[1] - 1)
        inside &= rollouts.completion_mask.gather(1, place)
        logps, entropies = (torch.where(inside, value.gather(1, place), 0.0) for value in values)
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
