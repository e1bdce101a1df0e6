"""TRL's trainers decode equal prompts together. That of examples/grpo_trl.py has the gradients of the lab's loop."""

import copy
import os
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers

import d5p4
from d5p4.integrations import rl
from tests.distributed.ranks import free_port
from tests.fake import FakeModel

pytest.importorskip("trl")
full = pytest.mark.full
pytestmark = pytest.mark.filterwarnings("ignore")
ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "grpo_trl.py"
CHARACTERS, END, MASK = "0123456789+-*/=,:", 17, 18
PROMPTS = ["1+2:", "3*4:5", "7,8:", "9-1:"]
SMALL = dict(per_device_train_batch_size=8, num_generations=4, max_completion_length=6, max_steps=2, use_cpu=True)
SMALL |= dict(report_to=[], save_strategy="no", disable_tqdm=True, gradient_checkpointing=False)


def codec():
    from transformers import PreTrainedTokenizerFast

    vocabulary = {character: i for i, character in enumerate(CHARACTERS)} | {"<end>": END, "<mask>": MASK}
    inner = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="<end>"))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.Split("", "isolated"), decoders.Fuse()
    names = dict(eos_token="<end>", pad_token="<end>", mask_token="<mask>")
    return PreTrainedTokenizerFast(tokenizer_object=inner, **names)


def small_qwen():
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    sizes = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
    sizes |= dict(num_key_value_heads=2, max_position_embeddings=64, vocab_size=19)
    return Qwen2ForCausalLM(Qwen2Config(**sizes, tie_word_embeddings=False, eos_token_id=END, pad_token_id=END))


def wrap(module):
    return d5p4.wrap(module, codec(), mask_id=MASK, eos_ids=[END])


def ones(completions, **columns):
    assert len(columns["reveal_step"]) == len(columns["plain"]) == len(completions)
    return [float(text.count("1") + text.count("2")) for text in completions]


def trainer_of(folder, model=None, rollout=rl.ON_POLICY, evaluated=None, prompts=PROMPTS, **given):
    from datasets import Dataset
    from trl import GRPOConfig

    class Watched(runpy.run_path(str(EXAMPLE))["DiffusionGRPOTrainer"]):
        """Records the rollouts, advantages and weights of training losses, and the gradients of every step."""

        def _compute_loss(self, model, inputs):
            if self._mode == "train":
                rollouts = self._rollouts["train"].take(inputs["rollout_index"])
                weights = copy.deepcopy(self.accelerator.unwrap_model(self.model).state_dict())
                self.seen = getattr(self, "seen", []) + [(rollouts, inputs["advantages"], weights)]
            return super()._compute_loss(model, inputs)

        def training_step(self, *args):
            loss = super().training_step(*args)
            named = self.accelerator.unwrap_model(self.model).named_parameters()
            self.gradients = {name: parameter.grad.clone() for name, parameter in named}
            return loss

    options = SMALL | dict(loss_type="dr_grpo", scale_rewards="none", bf16=False, learning_rate=1e-2, logging_steps=1)
    arguments = GRPOConfig(str(folder), **options | given)
    data = Dataset.from_dict({"prompt": prompts * 4})
    model = small_qwen() if model is None else model
    common = dict(args=arguments, train_dataset=data, eval_dataset=evaluated, processing_class=codec())
    return Watched(model, ones, **common, wrap=wrap, rollout=rollout)


def gradients_of_our_loop(trainer):
    """Return the gradients that the loop of the lab computes for the last loss of a trainer."""
    from d5p4_lab.bench.rollouts import add_gradients

    rollouts, advantages, weights = trainer.seen[-1]
    module = small_qwen()
    module.load_state_dict(weights)
    add_gradients(wrap(module), rollouts, advantages, trainer.max_completion_length)
    return {name: p.new_zeros(p.shape) if p.grad is None else p.grad for name, p in module.named_parameters()}


def agree(ours, theirs):
    for name, gradient in theirs.items():
        torch.testing.assert_close(ours[name], gradient, atol=1e-6, rtol=1e-4, msg=lambda text, name=name: name + text)


@pytest.mark.parametrize("rollout", [rl.ON_POLICY, rl.WITHOUT_REPLACEMENT], ids=["on-policy", "tree"])
def test_a_step_has_the_gradient_of_our_own_loop(tmp_path, rollout):
    trainer = trainer_of(tmp_path, rollout=rollout)
    before = copy.deepcopy(trainer.model.state_dict())
    trainer.train()
    rollouts, advantages, _ = trainer.seen[-1]
    assert len(rollouts) == 8 and advantages.abs().max() > 0
    agree(gradients_of_our_loop(trainer), trainer.gradients)
    assert any(not torch.equal(before[name], value) for name, value in trainer.model.state_dict().items())
    if rollout is rl.WITHOUT_REPLACEMENT:  # TRL shuffles the rollouts of a batch
        for prompt in rollouts.prompt.unique():
            texts = [text for text, p in zip(rollouts.texts, rollouts.prompt.tolist(), strict=True) if p == prompt]
            assert len(set(texts)) == len(texts)
    rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    assert len(rewards) == 2


def test_a_reference_model_and_several_iterations(tmp_path):
    """The rollouts of a batch are used twice, and the reference model is wrapped, too."""
    folder = tmp_path / "model"
    small_qwen().save_pretrained(folder)
    codec().save_pretrained(folder)
    options = dict(beta=0.1, num_iterations=2, max_steps=4, steps_per_generation=2, loss_type="grpo")
    trainer = trainer_of(tmp_path / "out", str(folder), **options)
    trainer.train()
    assert all(entry["kl"] >= 0 for entry in trainer.state.log_history if "kl" in entry)
    assert trainer.wrap.cache_info().misses == 2  # once per module


def test_the_rollout_function_of_trl_decodes_runs_of_equal_prompts_as_one():
    """At most `num_generations` at a time. Every call and step has random numbers of its own, but a run can be made
    again."""
    rollout_func = runpy.run_path(str(EXAMPLE))["rollout_func"]
    model, kept = FakeModel(), []
    trainer = SimpleNamespace(
        accelerator=SimpleNamespace(unwrap_model=lambda module: module, process_index=0),
        model=torch.nn.Linear(1, 1),  # in training mode; the functions of this test do not use its weights
        num_generations=2,
        args=SimpleNamespace(seed=1),
        state=SimpleNamespace(global_step=0),
        max_completion_length=5,
    )
    prompts, outputs = ["ab", "ab", "ab", "cd", "ab"], []
    for _ in range(2):
        function = rollout_func(lambda module: model, keep=kept.append, **rl.WITHOUT_REPLACEMENT)
        outputs += [function(prompts, trainer), function(prompts, trainer)]
    assert outputs[:2] == outputs[2:] and outputs[0] != outputs[1]
    assert kept[0].prompt.tolist() == [0, 0, 1, 2, 3] and kept[0].texts[0] != kept[0].texts[1]
    names = ("prompt_ids", "completion_ids", "reveal_step")
    for prompt, ids, row, steps in zip(prompts, *(outputs[0][name] for name in names), strict=True):
        assert ids == model.tokenizer.encode(prompt) and len(row) == len(steps) <= 5 and min(steps) >= 1
    with pytest.raises(d5p4.D5P4Error, match="k: the trainer decides"):
        rollout_func(lambda module: model, k=3)


def test_a_resumed_run_and_one_with_evaluation_draw_what_an_uninterrupted_run_draws(tmp_path):
    """The random numbers depend on the training step, not on how often this process has decoded before."""
    from datasets import Dataset

    options = dict(max_steps=3, save_strategy="steps", save_steps=2)
    once = trainer_of(tmp_path, **options)
    once.train()
    resumed = trainer_of(tmp_path, **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    checked = dict(eval_strategy="steps", eval_steps=1, per_device_eval_batch_size=8)
    evaluated = trainer_of(tmp_path, **options, **checked, evaluated=Dataset.from_dict({"prompt": PROMPTS}))
    evaluated.train()
    texts = [sorted(rollouts.texts) for rollouts, _, _ in once.seen]
    assert [sorted(rollouts.texts) for rollouts, _, _ in resumed.seen] == texts[2:] and len(set(map(str, texts))) == 3
    assert [sorted(rollouts.texts) for rollouts, _, _ in evaluated.seen] == texts


def test_the_example_runs_as_a_script(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), "1"])
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    assert "updates: 1" in capsys.readouterr().out


@full
@pytest.mark.parametrize("sampler, per_device", [("on-policy", 4), ("tree", 1)])
def test_two_processes_exchange_gradients(tmp_path, sampler, per_device):
    """Under torchrun, the gradient is the mean of what our own loop gives on both ranks. With one rollout of a tree per
    process, the mean of a prompt's rewards is still that of all its rollouts."""
    place = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={free_port()}"]
    command += [__file__, str(tmp_path), sampler, str(per_device)]
    done = subprocess.run(command, env=place, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("the gradients agree") == 2


def main(folder, sampler, per_device):
    rollout = {"on-policy": rl.ON_POLICY, "tree": rl.WITHOUT_REPLACEMENT}[sampler]
    sizes = dict(per_device_train_batch_size=int(per_device), num_generations=min(4, 2 * int(per_device)))
    trainer = trainer_of(folder, rollout=rollout, max_steps=8, **sizes)
    trainer.train()
    assert torch.distributed.get_world_size() == 2 and type(trainer.model_wrapped).__name__ != "Qwen2ForCausalLM"
    ours = gradients_of_our_loop(trainer)
    for gradient in ours.values():
        torch.distributed.all_reduce(gradient)
        gradient /= 2
    agree(ours, trainer.gradients)
    assert any(float(advantages.abs().max()) > 0.01 for _, advantages, _ in trainer.seen)
    print("the gradients agree", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
