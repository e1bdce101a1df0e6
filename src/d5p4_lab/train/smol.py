"""Turns SmolLM2-135M-Instruct, a causal chat model, into a block diffusion model: the adapter of `smol`.

The objective is that of Fast-dLLM v2. A noisy and a clean copy of a row run together: a noisy block sees itself and the
clean blocks before it, a clean block sees the clean blocks up to itself. Output i - 1 predicts token i; the first token
of a block is predicted by the clean copy. Half of the blocks hide a suffix, as decoding from the left does, and half
hide random positions. The number of hidden positions is uniform. Where no position to the right is visible, the target
is the teacher's distribution, which has the sampled token's expectation and less variance.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

from d5p4.errors import D5P4Error
from d5p4.models.checkpoint import read_json, weight_files
from d5p4.models.gguf import GGUF
from d5p4.models.load import find, locate
from d5p4.models.tokenizer import Tokenizer

from .folder import write_json
from .recipe import LAST_STEP, Recipe
from .smol_data import LENGTH, MASK, Data, make_data, toy_data

ALPHA = 2  # the change of a matrix is ALPHA * B @ A
OPTIONS = {"block": 8, "rank": 16, "causal": 1}  # causal: whether attention inside clean blocks is
MEASURED = 512  # held-out answers for the divergence
MATRICES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
PARTS = {name: f"self_attn.{name}" for name in MATRICES[:4]} | {name: f"mlp.{name}" for name in MATRICES[4:]}
NORMS = ("input_layernorm", "post_attention_layernorm")
Kept = list[tuple[Tensor, Tensor]]


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight).to(x.dtype)


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    left, right = x.float().chunk(2, -1)
    return torch.cat([left * cosine - right * sine, right * cosine + left * sine], -1).to(x.dtype)


class Layer(nn.Module):
    """One layer of Llama with frozen matrices and, with a rank, trained changes of low rank."""

    a: Any
    b: Any
    norms: Any

    def __init__(self, config: Mapping[str, Any], tensors: Mapping[str, Tensor], rank: int) -> None:
        super().__init__()
        self.head, self.eps = config["hidden_size"] // config["num_attention_heads"], config["rms_norm_eps"]
        self.a, self.b = nn.ParameterDict(), nn.ParameterDict()
        for name in MATRICES:
            weight = tensors[f"{PARTS[name]}.weight"]
            self.register_buffer(name, weight)
            if rank:
                self.a[name] = nn.Parameter(torch.randn(rank, weight.shape[1]) / math.sqrt(weight.shape[1]))
                self.b[name] = nn.Parameter(torch.zeros(weight.shape[0], rank))
        self.norms = nn.ParameterDict({name: nn.Parameter(tensors[f"{name}.weight"].clone()) for name in NORMS})

    def project(self, x: Tensor, name: str) -> Tensor:
        weight = getattr(self, name)
        if len(self.a):
            weight = weight + ALPHA * (self.b[name] @ self.a[name])
        return F.linear(x, weight.to(x.dtype))

    def forward(self, x: Tensor, angles: tuple[Tensor, Tensor], mask: Tensor, kept: Any, at: Tensor) -> Tensor:
        h = norm(x, self.norms["input_layernorm"], self.eps)
        query, key, value = (
            self.project(h, name).unflatten(-1, (-1, self.head)).transpose(1, 2) for name in MATRICES[:3]
        )
        query, key = rotate(query, *angles), rotate(key, *angles)
        if kept is not None:
            key, value = (old.index_copy_(2, at, new) for old, new in zip(kept, (key, value), strict=True))
        # The query heads of a key's head follow each other as queries of one head, because with a mask and fewer heads
        # of keys, CUDA has no fast kernel.
        groups = query.shape[1] // key.shape[1]
        query, mask = query.unflatten(1, (-1, groups)).flatten(2, 3), mask.repeat(1, 1, groups, 1)
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        mixed = mixed.unflatten(2, (groups, -1)).flatten(1, 2)
        x = x + self.project(mixed.transpose(1, 2).flatten(2), "o_proj")
        h = norm(x, self.norms["post_attention_layernorm"], self.eps)
        return x + self.project(F.silu(self.project(h, "gate_proj")) * self.project(h, "up_proj"), "down_proj")


class Body(nn.Module):
    """Llama over tensors of public names. With rank 0 it is the teacher, else the student with its own mask row."""

    table: Tensor
    cosine: Tensor
    sine: Tensor
    mask_row: Any
    stack: Any

    def __init__(self, config: Mapping[str, Any], tensors: Mapping[str, Tensor], rank: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.config, self.dtype, self.rank = config, dtype, rank
        self.register_buffer("table", tensors["model.embed_tokens.weight"].float())
        self.norm = nn.Parameter(tensors["model.norm.weight"].float().clone())
        self.mask_row = nn.Parameter(self.table.mean(0)) if rank else None
        kind = torch.float32 if rank else dtype  # the student's matrices are changed before they are rounded
        layers = []
        for number in range(config["num_hidden_layers"]):
            start = f"model.layers.{number}."
            part = {name[len(start) :]: t.float() for name, t in tensors.items() if name.startswith(start)}
            layers.append(Layer(config, {n: t.to(kind) if t.ndim == 2 else t for n, t in part.items()}, rank))
        self.stack = nn.ModuleList(layers)
        width = layers[0].head
        rates = config["rope_theta"] ** -(torch.arange(0, width, 2).float() / width)
        angles = torch.outer(torch.arange(config["max_position_embeddings"]).float(), rates)
        self.register_buffer("cosine", angles.cos())
        self.register_buffer("sine", angles.sin())

    def forward(self, tokens: Tensor, positions: Tensor, mask: Tensor, kept: Kept | None = None) -> Tensor:
        """Return the states [n, S, D] in float32. `kept` holds keys and values that are written at `positions`."""
        x = F.embedding(tokens, self.table)
        if self.mask_row is not None:
            x = torch.where((tokens == MASK)[..., None], self.mask_row, x)
        x, angles = x.to(self.dtype), (self.cosine[positions], self.sine[positions])
        for number, layer in enumerate(self.stack):
            x = layer(x, angles, mask, kept and kept[number], positions)
        return norm(x, self.norm, self.config["rms_norm_eps"]).float()

    def logits(self, states: Tensor) -> Tensor:
        with torch.autocast(states.device.type, enabled=False):
            return F.linear(states, self.table)

    def new_cache(self, rows: int, length: int) -> Kept:
        heads = self.config["num_key_value_heads"]
        empty = torch.zeros(rows, heads, length, self.stack[0].head, device=self.table.device, dtype=self.dtype)
        return [(empty.clone(), empty.clone()) for _ in self.stack]


def copies_mask(length: int, block: int, causal: bool, device: torch.device, copies: int = 1, first: int = 0) -> Tensor:
    """Return the attention mask [1, 1, S, S] of noisy copies of the positions from `first` and a clean copy of all.

    `causal`: whether attention inside clean blocks is causal, too.
    """
    place = torch.arange(length, device=device)
    at = torch.cat([place[first:].repeat(copies), place])
    copy = torch.arange(copies, device=device).repeat_interleave(length - first)
    copy = torch.cat([copy, torch.full_like(place, copies)])
    clean, query, key = copy == copies, (at // block)[:, None], at // block
    inside = at[:, None] >= at if causal else query >= key
    before = torch.where(clean[:, None], inside, query > key)
    return torch.where(clean, before, (copy[:, None] == copy) & (query == key))[None, None]


def learnt(start: Tensor, end: Tensor, length: int, block: int) -> Tensor:
    """Return True [n, T] at the answer up to the end of the block that holds its end token."""
    at = torch.arange(length, device=start.device)
    return (at >= start[:, None]) & (at // block <= end[:, None] // block)


def hide(learn: Tensor, block: int, generator: torch.Generator) -> Tensor:
    """Return the positions [n, T] to hide: per block a uniform number from 1, half as a suffix and half at random."""
    blocks = learn.unflatten(1, (-1, block))
    count = blocks.sum(-1, keepdim=True)
    n, m = blocks.shape[:2]

    def draw(*size: int) -> Tensor:
        return torch.rand(*size, generator=generator, device=learn.device)

    wanted = 1 + (draw(n, m, 1) * count).long().clamp(max=(count - 1).clamp(min=0))
    at = torch.arange(block, device=learn.device, dtype=torch.float32)
    score = torch.where(draw(n, m, 1) < 0.5, at.expand(n, m, -1), draw(n, m, block)).masked_fill(~blocks, -1.0)
    place = score.argsort(-1, descending=True).argsort(-1)
    return ((place < wanted) & blocks).flatten(1)


def nothing_right(hidden: Tensor, block: int) -> Tensor:
    """Return True at hidden positions [n, T] whose block shows nothing to the right of them."""
    shown = (~hidden).unflatten(1, (-1, block)).flip(-1).long().cumsum(-1).flip(-1).flatten(1)
    return hidden & (shown == 0)


def soft_cross_entropy(logits: Tensor, teacher: Tensor, targets: Tensor, soft: Tensor) -> Tensor:
    """Return the cross-entropy [M] with the teacher's distribution where `soft`, else with the target token."""
    scores = logits.log_softmax(-1)
    hard = -scores.gather(1, targets[:, None])[:, 0]
    return torch.where(soft, -(teacher.softmax(-1) * scores).sum(-1), hard)


class Smol(Recipe):
    name = "smol"
    rates = (0.0, 1e-3)  # no matrix is trained whole
    batch_rows = (96, 4)
    average, autocast = 0.99, False
    small = dict(hidden_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, vocab_size=64)
    small |= dict(intermediate_size=96, max_position_embeddings=128)
    row_length = LENGTH

    def __init__(
        self, device: torch.device, seed: int, toy: bool, base: Mapping[str, Tensor], data: Data, **options: int
    ) -> None:
        super().__init__(device, seed, toy)
        if unknown := sorted(options.keys() - OPTIONS.keys()):
            raise D5P4Error(f"smol has no option {unknown[0]!r}: choose from {', '.join(OPTIONS)}")
        self.options, self.base = OPTIONS | options, base
        self.block, self.rank, causal = (self.options[name] for name in ("block", "rank", "causal"))
        self.row_length = data.rows.shape[1]
        self.learning, self.held_out = data.part(~data.held_out), data.part(data.held_out)
        written = f"{self.learning.tokens:,} tokens of {len(self.learning.rows):,} answers"
        self.data = (
            f"{written} that the base wrote; {len(self.held_out.rows):,} answers to other questions are held out"
        )
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.teacher = Body(self.config, base, 0, self.dtype).to(device).requires_grad_(False)
        at = torch.arange(self.row_length, device=device)
        self.positions, self.causal_mask = at, (at[:, None] >= at)[None, None]
        self.causal, self.double = bool(causal), copies_mask(self.row_length, self.block, bool(causal), device)
        self._soft = soft_cross_entropy
        if device.type == "cuda":
            torch.set_float32_matmul_precision("high")  # of the head; `divergence` sets it back

    @property
    def config(self) -> dict[str, Any]:
        options = getattr(self, "options", OPTIONS)
        return {**super().config, "bd_size": options["block"], "causal_context": bool(options["causal"])}

    def new_model(self) -> Body:
        return Body(self.config, self.base, self.rank, self.dtype)

    def compile(self, model: Any) -> None:
        for layer in (*model.stack, *self.teacher.stack):
            layer.compile()
        self._soft = torch.compile(soft_cross_entropy, dynamic=True)

    def batches(self, start: int) -> Iterator[list[Tensor]]:
        """Yield batches. Every epoch has its own order."""
        rows = len(self.learning.rows)
        parts = [self.moved(column) for column in self.learning[:3]]
        steps, epoch, order = max(1, rows // self.rows), -1, torch.arange(rows)
        for step in range(start, LAST_STEP):
            if step // steps != epoch:
                epoch = step // steps
                order = torch.randperm(rows, generator=torch.Generator().manual_seed(self.seed + epoch))
            chosen = order[step % steps * self.rows :][: self.rows].to(self.device)
            yield [part[chosen] for part in parts]

    def both(self, model: Body, rows: Tensor, hidden: Tensor, first: int = 0) -> Tensor:
        """Return the student's states [n, c, T - first, D] that predict the tokens from `first`, the start of a block.

        `hidden` [n, c, T - first] says what each of c noisy copies of a row hides.
        """
        copies, length = hidden.shape[1:]
        noisy = rows[:, None, first:].masked_fill(hidden, MASK).flatten(1)
        mask = self.double
        if first or copies > 1:
            mask = copies_mask(self.row_length, self.block, self.causal, rows.device, copies, first)
        places = torch.cat([self.positions[first:].repeat(copies), self.positions])
        states, clean = model(torch.cat([noisy, rows], 1), places, mask).split([copies * length, self.row_length], 1)
        edge = (self.positions[first:] % self.block == 0)[:, None]
        shifted = states.unflatten(1, (copies, length)).roll(1, 2)
        return torch.where(edge, clean.roll(1, 1)[:, None, first:], shifted)

    def taught(self, rows: Tensor, teacher: Body | None = None) -> Tensor:
        """Return the teacher's state [n, T, D] that predicts each token of the rows."""
        return (teacher or self.teacher)(rows, self.positions, self.causal_mask).roll(1, 1)

    def loss(self, model: Any, batch: Any, generator: torch.Generator) -> Tensor:
        rows, start, end = batch
        learn = learnt(start, end, self.row_length, self.block)
        hidden = hide(learn, self.block, generator)
        soft = nothing_right(hidden, self.block) & (self.positions <= end[:, None])
        with torch.no_grad():
            goals = self.taught(rows)
        states = self.both(model, rows, hidden[:, None])[:, 0]
        counts = hidden.unflatten(1, (-1, self.block)).sum(-1)
        weights = (1 / counts.clamp(min=1)).repeat_interleave(self.block, 1) / (counts > 0).sum()
        at = hidden.nonzero(as_tuple=True)
        with torch.no_grad():
            teacher = model.logits(goals[at])
        losses = self._soft(model.logits(states[at]), teacher, rows[at], soft[at])
        return (losses * weights[at]).sum()

    @torch.no_grad()
    def divergences(self, model: Body, teacher: Body, batch: int = 16) -> dict[str, np.ndarray]:
        """Return sums over the tokens of held-out answers: KL(teacher || student from the left) in nats and the number
        of tokens, by row and offset in the block, the teacher's entropy and the student's nats of the padding.

        A noisy copy hides the block's suffix from one offset on, so that the position at the offset is predicted as in
        decoding from the left. The padding behind the end token is counted apart.
        """
        torch.set_float32_matmul_precision("highest")
        data = self.held_out.part(np.argsort(self.held_out.start[:MEASURED], kind="stable"))
        rows, block = len(data.rows), self.block
        sums = {name: torch.zeros(rows, block, dtype=torch.float64) for name in ("kl", "tokens", "entropy", "padding")}
        for low in range(0, rows, batch):
            tokens, start, end = (self.moved(column[low : low + batch]) for column in data[:3])
            first = int(start[0]) // block * block  # the rows are in the order of their starts
            goals = self.taught(tokens, teacher)[:, first:]
            learn, places = learnt(start, end, self.row_length, block)[:, first:], self.positions[first:]
            for offsets in self.positions[:block].split(8):
                hidden = learn[:, None] & (places % block >= offsets[:, None])
                states = self.both(model, tokens, hidden, first)
                row, at = (learn & torch.isin(places % block, offsets)).nonzero(as_tuple=True)
                scores = self.log_probabilities(model, states[row, places[at] % block - offsets[0], at])
                truth = self.log_probabilities(teacher, goals[row, at])
                inside = places[at] <= end[row]
                nats = -scores.gather(1, tokens[row, first + at][:, None])[:, 0]
                terms = {"kl": (truth.exp() * (truth - scores)).sum(-1) * inside, "tokens": inside}
                terms |= {"entropy": -(truth.exp() * truth).sum(-1) * inside, "padding": nats * ~inside}
                for name, values in terms.items():
                    index = (low + row.cpu(), (places[at] % block).cpu())
                    sums[name].index_put_(index, values.double().cpu(), accumulate=True)
        return {name: values.numpy() for name, values in sums.items()}

    def divergence(self, model: Body, teacher: Body) -> dict[str, float]:
        """Return means of `divergences`."""
        sums = self.divergences(model, teacher)
        kl, tokens, total = sums["kl"].sum(0), sums["tokens"].sum(0), sums["tokens"].sum()
        figures = {"KL per token": kl.sum() / total, "entropy of the teacher per token": sums["entropy"].sum() / total}
        figures |= {f"KL at offset {i}": kl[i] / max(1, tokens[i]) for i in range(self.block)}
        return figures | {"nats of all padding per answer": sums["padding"].sum() / len(sums["padding"])}

    def log_probabilities(self, model: Body, states: Tensor) -> Tensor:
        """Return log-probabilities in which the mask token has about none."""
        logits = model.logits(states)
        logits[:, MASK] = -1e4
        return logits.log_softmax(-1)

    def moved(self, column: np.ndarray) -> Tensor:
        return torch.from_numpy(column.astype(np.int64)).to(self.device)

    def write_tokenizer(self, folder: Path) -> None:
        """Write the default options. The tokenizer is the base's."""
        for name in ("generation_config.json", "adapter_config.json"):
            write_json(folder / name, read_json(find(self.name) / name) | self.ranked(name))

    def ranked(self, name: str) -> dict[str, int]:
        return {"r": self.rank, "lora_alpha": ALPHA * self.rank} if name.startswith("adapter") else {}

    def write(self, folder: Path, model: Any) -> str:
        tensors = adapter(model)
        save_file(tensors, folder / "adapter_model.safetensors")
        (folder / "adapter_model.safetensors").chmod(0o644)  # safetensors lets only the owner read its files
        write_json(folder / "config.json", self.config)
        return f"{sum(tensor.nbytes for tensor in tensors.values()) / 2**20:.2f} MiB, int8 with a scale per row"

    def validate(self, folder: Path) -> dict[str, float]:
        """Measure the written adapter in float32."""
        return self.divergence(*self.written(folder))

    def written(self, folder: Path) -> tuple[Body, Body]:
        """Return the student of a folder and its teacher in float32."""
        student, teacher = (
            Body(self.config, self.base, rank, torch.float32).to(self.device) for rank in (self.rank, 0)
        )
        restore(student, load_file(folder / "adapter_model.safetensors"))
        return student, teacher


def quantised(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return int8 numbers and a float16 scale per row, the one of some scales that has the least error."""
    wide = matrix.detach().float().cpu()
    largest = wide.abs().amax(1, keepdim=True).clamp(min=1e-12)
    best, error = largest / 127, torch.full_like(largest, torch.inf)
    for share in (1.0, 0.95, 0.9, 0.85):
        scale = (largest * share / 127).half().float().clamp(min=2**-24)
        miss = ((wide / scale).round().clamp(-127, 127) * scale - wide).square().sum(1, keepdim=True)
        best, error = torch.where(miss < error, scale, best), torch.minimum(miss, error)
    return (wide / best).round().clamp(-127, 127).to(torch.int8), best[:, 0].half()


def adapter(model: Body) -> dict[str, Tensor]:
    """Return the tensors of the adapter under PEFT's names: int8 matrices with scales, norms and the mask's row."""
    start = "base_model.model.model."
    tensors = {f"{start}norm.weight": model.norm, f"{start}embed_tokens.mask_row": model.mask_row}
    for number, layer in enumerate(model.stack):
        for name in NORMS:
            tensors[f"{start}layers.{number}.{name}.weight"] = layer.norms[name]
    tensors = {name: tensor.detach().half().cpu() for name, tensor in tensors.items()}
    for number, layer in enumerate(model.stack):
        for name in MATRICES:
            for side, matrix in (("A", layer.a[name]), ("B", layer.b[name])):
                key = f"{start}layers.{number}.{PARTS[name]}.lora_{side}.weight"
                tensors[key], tensors[f"{key}_scale"] = quantised(matrix)
    return tensors


@torch.no_grad()
def restore(model: Body, tensors: Mapping[str, Tensor]) -> None:
    """Set the student's parameters from the tensors of an adapter."""

    def value(key: str) -> Tensor:
        tensor, scale = tensors[f"base_model.model.model.{key}"], tensors.get(f"base_model.model.model.{key}_scale")
        return tensor.float() if scale is None else tensor.float() * scale.float()[:, None]

    model.norm.copy_(value("norm.weight"))
    model.mask_row.copy_(value("embed_tokens.mask_row"))
    for number, layer in enumerate(model.stack):
        for name in NORMS:
            layer.norms[name].copy_(value(f"layers.{number}.{name}.weight"))
        for name in MATRICES:
            layer.a[name].copy_(value(f"layers.{number}.{PARTS[name]}.lora_A.weight"))
            layer.b[name].copy_(value(f"layers.{number}.{PARTS[name]}.lora_B.weight"))


@cache
def base() -> tuple[dict[str, Tensor], Tokenizer]:
    """Return the tensors of smol's base, in float32 and under their public names, and its tokenizer."""
    source = locate("smol").base
    if isinstance(source, GGUF):
        return {name: source.get_tensor(name) for name in source.tensors}, source.tokenizer()
    tensors: dict[str, Tensor] = {}
    for file in weight_files(source):
        tensors |= {name: tensor.float() for name, tensor in load_file(file).items()}
    return tensors, Tokenizer.read(source)


def random_base(config: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the tensors of a model of this shape with random weights."""
    draw, width, inner = torch.Generator().manual_seed(0), config["hidden_size"], config["intermediate_size"]
    keys = width // config["num_attention_heads"] * config["num_key_value_heads"]
    rows = dict(zip(MATRICES, (width, keys, keys, width, inner, inner, width), strict=True))
    tensors = {"model.embed_tokens.weight": 0.15 * torch.randn(config["vocab_size"], width, generator=draw)}
    tensors["model.norm.weight"] = torch.ones(width)
    for number in range(config["num_hidden_layers"]):
        start = f"model.layers.{number}."
        tensors |= {f"{start}{name}.weight": torch.ones(width) for name in NORMS}
        for name in MATRICES:
            columns = inner if name == "down_proj" else width
            weight = 2 * torch.randn(rows[name], columns, generator=draw) / math.sqrt(columns)
            tensors[f"{start}{PARTS[name]}.weight"] = weight
    return tensors


def recipe(
    device: torch.device,
    seed: int,
    toy: bool,
    texts: Path | None,
    kept: Path,
    say: Callable[[str], None],
    **options: int,
) -> Smol:
    """Return the recipe. The base writes its data into the file `kept`, unless an earlier run has done so."""
    config = read_json(find("smol") / "config.json") | (Smol.small if toy else {})
    tensors, tokenizer = (random_base(config), None) if toy else base()
    if not kept.exists():
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        teacher = Body(config, tensors, 0, dtype).to(device).requires_grad_(False)
        written = toy_data(teacher) if tokenizer is None else make_data(teacher, tokenizer, texts, seed, say)
        written.save(kept)
    return Smol(device, seed, toy, tensors, Data.read(kept), **options)
