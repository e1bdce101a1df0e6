"""`d5p4 info` prints facts about a checkpoint, `d5p4 check` tests its model, `d5p4 convert` reads pickle
weights, and `d5p4 methods` lists the methods."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..eval.graders import GRADERS
from ..models.base import NativeModel
from ..models.check import check as try_out
from ..models.checkpoint import read_json
from ..models.convert import convert as write_safetensors
from ..models.load import choose_device, choose_dtype, packaged, shipped_models, without_weights
from ..options import load_plugins
from ..search import METHODS, Method
from .common import print_json, run, visible
from .options import DEFAULT_MODEL, Checkpoint, Device, Dtype, Json, Plugin

Named = Annotated[
    str | None, typer.Argument(help="A folder, a hub id such as org/name, or a shipped model. [lists the models]")
]


def info(model: Named = None, device: Device = None, dtype: Dtype = None, json: Json = False) -> None:
    """Show facts about a model without reading its weights, or list the models in the box.

    d5p4 loads MDLM, LLaDA, iLLaDA, LLaDA-MoE, LLaDA2, Dream, SDAR, Fast-dLLM v2 and Stable-DiffCoder, and BERT, ESM,
    RoBERTa and ALBERT, which fill holes.

    Example: d5p4 info countdown
    """
    facts = models_in_the_box() if model is None else describe(model, device, dtype)
    if json:
        print_json(facts)
        return
    table = Table.grid(padding=(0, 2))
    if isinstance(facts, list):
        for fact in facts:
            needs = f"\nneeds {fact['needs']}" if fact["needs"] else ""
            task = Text.assemble(fact["task"], needs, "\n", (fact["example"], "dim"))
            table.add_row(Text(fact["name"], style="bold"), f"{fact['weight_bytes'] / 1e6:.1f} MB", task)
    else:
        for name, value in facts.items():
            table.add_row(Text(name.replace("_", " "), style="dim"), Text(_worded(name, value)))
    Console().print(table)


def models_in_the_box() -> list[dict[str, Any]]:
    listed = []
    for name, folder in sorted(shipped_models().items(), key=lambda pair: (pair[0] != DEFAULT_MODEL, pair[0])):
        _, *sentences = (folder / "README.md").read_text(encoding="utf-8").split("\n\n")
        config = read_json(folder / "generation_config.json", {"d5p4": {}})["d5p4"]
        grader, examples = GRADERS.get(config.get("grader", "")), config.get("examples")
        prompt = grader.examples[0][1] if grader else "The old man put down his cup, and"
        prompt = examples[0]["prompt"] if examples else prompt
        size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
        task = " ".join(sentences[0].split()).partition(". ")[0].rstrip(".")
        example = f'd5p4 generate "{prompt}" -m {name}'
        listed.append({"name": name, "task": task, "weight_bytes": size, "example": example})
        listed[-1]["needs"] = packaged(folder)[1] or None
    return listed


def describe(name: str, device: str | None = None, dtype: str | None = None) -> dict[str, Any]:
    """Return facts about a checkpoint, with the device and dtype that `d5p4.load` would choose."""
    chosen = choose_device(device)
    model, source, tokenizer, generation = without_weights(name)
    kind = choose_dtype(dtype, chosen, source.base)
    model.attach(name, tokenizer, generation)
    vocabulary, width = model.unembedding[0].shape
    return {
        "name": name,
        "folder": str(source.folder),
        "architecture": model.architecture,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "layers": model.cache_shape[0] if hasattr(model, "cache_shape") else len(list(model.parts()[1])),
        "width": width,
        "vocabulary": vocabulary,
        "mask_id": model.mask_id,
        "mask_token": tokenizer.mask_token,
        "eos_ids": list(model.eos_ids),
        "max_length": model.max_length,
        "block_length": model.block,
        "chat_template": tokenizer.has_chat,
        "default_order": model.generation_defaults.get("order", model.default_order),
        "defaults": {name: value for name, value in model.generation_defaults.items() if name != "examples"},
        "device": str(chosen),
        "dtype": str(kind).removeprefix("torch."),
        "weight_bytes": sum(path.stat().st_size for path in source.files()),
    }


def _worded(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, dict):
        return visible(", ".join(f"{key}={item}" for key, item in value.items())) or "none"
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    if name in ("parameters", "weight_bytes"):
        return f"{value:,}"
    if name == "block_length" and value is None:
        return "none, because every token reads all others"
    return "unknown" if value is None else visible(str(value))


def check(model: Checkpoint, device: Device = None, dtype: Dtype = None) -> None:
    """Load a model, test it on one prompt, and decode with its own settings. The exit code is 1 if a test fails.

    Example: d5p4 check countdown
    """
    console = Console()
    lines = try_out(model, device, dtype, decode_once)
    for line in lines:
        mark = ("pass", "green") if line.passed else ("fail", "red")
        console.print(Text.assemble(mark, "  ", (line.name, "bold"), ": ", visible(line.detail)), soft_wrap=True)
    passed = all(line.passed for line in lines)
    console.print(Text("pass" if passed else "fail", style="bold green" if passed else "bold red"))
    if not passed:
        raise typer.Exit(1)


def convert(
    folder: Annotated[Path, typer.Argument(help="The folder with config.json and pytorch_model.bin.")],
    out: Annotated[Path, typer.Argument(help="A new folder.")],
    vocab: Annotated[Path | None, typer.Option(help="A vocab.txt that is in another folder.")] = None,
) -> None:
    """Write pickle weights as safetensors, which d5p4 loads. Code in the pickle is never run.

    Example: d5p4 convert bert_pretrained rxnfp
    """
    write_safetensors(folder, out, vocab)


def decode_once(model: NativeModel, text: str) -> str:
    """Decode two answers with the model's own settings, and return what they took."""
    text += (model.tokenizer.mask_token or "") * 8 if model.fills and model.tokenizer is not None else ""
    length = {} if model.fills or "gen_length" in model.generation_defaults else {"gen_length": 16}
    result, seconds = run(model, text, "", False, k=2, **length)
    own, rows = result.settings, int(result.rows[0])
    how = f"{own.method}, order {own.order}, temperature {own.temperature:g}, {rows} rows in {seconds:.1f} s"
    return f"{how}: {result.texts[0][0]!r}"


FIRST = ("tree", "d5p4", "independent", "best-of-n")  # the methods that most users need


def methods(json: Json = False, plugin: Plugin = None) -> None:
    """List the methods. `d5p4 generate --help-all` shows their parameters.

    Example: d5p4 methods --plugin ./mine.py
    """
    load_plugins(plugin or [])
    order = [*FIRST, *(name for name in METHODS if name not in FIRST)]
    if json:
        print_json([_described(METHODS[name]) for name in order])
        return
    table = Table.grid(padding=(0, 2))
    for name in order:
        if name == order[len(FIRST)]:
            table.add_row()
            table.add_row(Text("research", style="dim"))
        table.add_row(Text(name, style="bold"), Text(METHODS[name].summary))
    Console().print(table)


def _described(method: Method) -> dict[str, Any]:
    own = {"parameters": method.defaults, "presets": dict(method.presets)}
    return {"name": method.name, "summary": method.summary, "section": method.section} | own
