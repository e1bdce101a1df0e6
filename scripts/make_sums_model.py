"""Make the small checkpoint that `make demo` runs on: ways to write a number as a sum, learned in seconds on a CPU.

    python scripts/make_sums_model.py FOLDER

Prompt `23=`, answer `5+18`: every question has many right answers. The layout is LLaDA's, the loss LLaDA's SFT loss
(each answer token is masked with chance p, its cross-entropy weighted by 1/p), so the demo takes the path a
public checkpoint takes: config.json, tokenizer.json, safetensors, `d5p4.load`.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # on a busy machine spinning threads would take minutes

import tokenizers  # noqa: E402
import torch  # noqa: E402
from safetensors.torch import save_file  # noqa: E402
from tokenizers import decoders, models, pre_tokenizers  # noqa: E402

from d5p4.models.llada import LLaDA  # noqa: E402

CHARACTERS = "0123456789+="
END, MASK = len(CHARACTERS), len(CHARACTERS) + 1
ANSWER = 6  # a+b and at least one end-of-text
SMALLEST, LARGEST = 10, 20
CONFIG = {
    "model_type": "llada", "architectures": ["LLaDAModelLM"], "d_model": 64, "n_layers": 2, "n_heads": 4,
    "n_kv_heads": 4, "mlp_hidden_size": 160, "rope_theta": 10000.0, "rms_norm_eps": 1e-5, "max_sequence_length": 32,
    "vocab_size": len(CHARACTERS) + 2, "embedding_size": len(CHARACTERS) + 2, "mask_token_id": MASK,
    "eos_token_id": END, "pad_token_id": END, "weight_tying": False,
}  # fmt: skip


def questions() -> torch.Tensor:
    """All token rows `N=a+b`, prompts right-aligned to 3 characters, answers filled up with end-of-text."""
    rows = []
    for total in range(SMALLEST, LARGEST + 1):
        for a in range(total + 1):
            answer = [CHARACTERS.index(c) for c in f"{a}+{total - a}"]
            prompt = [CHARACTERS.index(c) for c in f"{total}="]
            rows.append(prompt + answer + [END] * (ANSWER - len(answer)))
    return torch.tensor(rows)


def train(steps: int, seed: int = 0) -> LLaDA:
    print(f"making the demo model: {steps} steps of training, some seconds", flush=True)
    torch.manual_seed(seed)
    data, model = questions(), LLaDA(CONFIG)
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.98), weight_decay=0.01)
    for step in range(steps):
        for group in optimiser.param_groups:
            group["lr"] = 3e-3 * min(1.0, (step + 1) / 50, 2 * (1 - step / steps))
        rows = data[torch.randint(len(data), (128,))]
        chance = torch.rand(len(rows), 1) * 0.999 + 0.001
        masked = torch.rand(rows.shape) < chance
        masked[:, : rows.shape[1] - ANSWER] = False
        hidden = model.body(rows.masked_fill(masked, MASK)).states[masked]
        loss = torch.nn.functional.cross_entropy(hidden @ model.head.weight.T, rows[masked], reduction="none")
        loss = (loss / chance.expand_as(masked)[masked]).sum() / (len(rows) * ANSWER)
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        if (step + 1) % 100 == 0 and sys.stdout.isatty() or step + 1 == steps:
            print(f"\rtraining the demo model: step {step + 1} of {steps}, loss {loss.item():.3f}", end="", flush=True)
    print()
    return model


def write(model: LLaDA, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = {c: i for i, c in enumerate(CHARACTERS)} | {"<|endoftext|>": END, "<|mask|>": MASK}
    codec = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token=""))
    codec.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    codec.decoder = decoders.Fuse()
    codec.add_special_tokens(["<|endoftext|>", "<|mask|>"])
    codec.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=1))
    defaults = {"length": ANSWER, "order": "confidence"}
    (folder / "generation_config.json").write_text(json.dumps({"d5p4": defaults}, indent=1))
    weights = {LLaDA.prefix + name: value.contiguous() for name, value in model.state_dict().items()}
    save_file(weights, folder / "model.safetensors")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: make_sums_model.py FOLDER")
    write(train(1500), Path(sys.argv[1]))
