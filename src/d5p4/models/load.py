"""`load`: a name, folder or hub id to a model ready for decoding."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ..errors import D5P4Error
from .base import NativeModel
from .checkpoint import fill, read_json
from .dream import Dream
from .llada import LLaDA
from .mdlm import MDLM
from .tokenizer import FILES, Tokenizer

ARCHITECTURES: dict[str, type[NativeModel]] = {"mdlm": MDLM, "llada": LLaDA, "dream": Dream}
CLASS_NAMES = {"mdlm": "mdlm", "llada": "llada", "lladamodel": "llada", "lladamodellm": "llada", "dream": "dream"}
CLASS_NAMES |= {"dreammodel": "dream", "dreambasemodel": "dream"}
DTYPES = {
    "float64": torch.float64,
    "fp64": torch.float64,
    "float32": torch.float32,
    "fp32": torch.float32,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
    "float16": torch.float16,
    "fp16": torch.float16,
}
HUB_FILES = ["*.json", "*.safetensors", "*.txt", "*.jinja"]
HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
GPT2_VOCABULARY = 50257
CHECKOUT_ONLY = ("books", "judge")  # in `models/` of the repository, not in the wheel


def load(
    name_or_path: str | Path,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    tokenizer: str | Path | Tokenizer | None = None,
    mapped: bool = False,
) -> NativeModel:
    """Load an MDLM, LLaDA or Dream checkpoint from a folder, a shipped name or a hub id.

    `device`: the best there is by default. `dtype`: bfloat16 on CUDA and float32 elsewhere by default.
    `tokenizer`: a folder or a Tokenizer to use instead of the checkpoint's own.
    `mapped`: for several processes on one host. On the CPU, weights whose dtype in the file is the wanted one stay the
    file's pages, which the host holds once for all processes; the file must not be overwritten while the model lives
    (written to in place, a weight changes in this process only). Others are copied as always, and so are those that
    MDLM folds as it loads: all but embedding and head. On a GPU it changes nothing: every process has its own copy
    there, and reads the file through the host's page cache anyway.
    """
    device = choose_device(device)
    dtype = choose_dtype(dtype, device)
    model, folder, codec, generation = without_weights(name_or_path, tokenizer)
    ignore = ("rotary_emb.inv_freq", *(model.prefix + name for name in model.tied()))
    fill(model, folder, model.prefix, device, model.reading_dtype(dtype), ignore, mapped)
    model.settle(dtype)
    model.attach(str(name_or_path), codec, generation)
    return model


def without_weights(
    name_or_path: str | Path, tokenizer: str | Path | Tokenizer | None = None
) -> tuple[NativeModel, Path, Tokenizer, dict[str, Any]]:
    """A model on the meta device, its folder, tokenizer and generation_config.json: all that small files say."""
    folder = find(name_or_path)
    config = read_json(folder / "config.json")
    generation = read_json(folder / "generation_config.json", missing={})
    with torch.device("meta"), _Undrawn():
        model = ARCHITECTURES[architecture(config, folder)](config)
    return model, folder, find_tokenizer(folder, model, tokenizer), generation


class _Undrawn(TorchFunctionMode):
    """Initial weights that nobody will see are not drawn: on the meta device that alone would import a compiler."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        if getattr(func, "__module__", None) == "torch.nn.init":
            return args[0] if args else given["tensor"]
        return func(*args, **given)


def find(name_or_path: str | Path) -> Path:
    """The folder a name stands for, downloading it when it is a hub id."""
    if not isinstance(name_or_path, (str, Path)) or not str(name_or_path):
        raise D5P4Error(f"a model is named by text or a path, not {name_or_path!r}")
    name = str(name_or_path)
    folder = Path(name_or_path).expanduser()
    found = shipped(name)
    # A folder that only happens to have the name of a shipped model does not hide it.
    if folder.is_dir() and (found is None or (folder / "config.json").is_file()):
        if found is not None and isinstance(name_or_path, str):
            warnings.warn(f"{name!r}: the folder here is taken, not the model shipped with d5p4", stacklevel=2)
        return folder
    if found is not None:
        return found
    if folder.exists():
        raise D5P4Error(f"{name!r} is a file: give the folder that holds config.json and the weights")
    if name in CHECKOUT_ONLY:
        raise D5P4Error(f"{name!r} lies in models/ of d5p4's repository and not in its package: give the path to it")
    if not HUB_ID.fullmatch(name) or isinstance(name_or_path, Path):
        raise D5P4Error(
            f"{name!r} is no folder here, no model shipped with d5p4 and no hub id of the form org/name: "
            "check the spelling"
        )
    return download(name, HUB_FILES)


def shipped(name: str) -> Path | None:
    """The folder of a model inside the package, or in `models/` of a source checkout."""
    if not re.fullmatch(r"[\w-][\w.-]*", name):
        return None
    here = Path(__file__).resolve()
    places = (here.parent / "weights" / name, here.parents[3] / "models" / name)
    return next((place for place in places if (place / "config.json").is_file()), None)


def download(hub_id: str, patterns: list[str]) -> Path:
    """The local copy of a hub repository's files."""
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(hub_id, allow_patterns=patterns))
    except Exception as reason:  # the hub client raises many unrelated kinds
        first = (str(reason).strip() or "no reason given").splitlines()[0].split(". ")[0].rstrip(".")
        raise D5P4Error(
            f"{hub_id!r} is no folder here, and fetching it from the hub failed ({type(reason).__name__}: {first})"
        ) from reason


def architecture(config: Mapping[str, Any], folder: Path) -> str:
    """One of ARCHITECTURES, from model_type and architectures."""
    kind = str(config.get("model_type") or "")
    listed = config.get("architectures") or []
    classes = [str(name) for name in listed] if isinstance(listed, list) else [str(listed)]
    known = {CLASS_NAMES.get(name.lower()) for name in (kind, *classes) if name}
    # Every name has to agree: a mixture-of-experts model must not be read as its dense cousin.
    if len(known) == 1 and None not in known:
        return str(known.pop())
    said = f"model_type={kind!r} and architectures={classes}"
    hint = "; LLaDA-MoE and LLaDA2 are not supported" if "llada" in said.lower() else ""
    if any(name.endswith("ForCausalLM") for name in classes):
        hint = "; a causal model can score texts (d5p4.eval.perplexity.CausalJudge)"
    raise D5P4Error(
        f"{folder / 'config.json'} has {said}; supported are MDLM (mdlm), LLaDA (llada) and Dream (dream), "
        f"and d5p4.wrap takes other modules{hint}"
    )


def find_tokenizer(folder: Path, model: NativeModel, given: str | Path | Tokenizer | None) -> Tokenizer:
    """The tokenizer for a checkpoint folder."""
    if isinstance(given, Tokenizer):
        return given.for_model(model.mask_id)
    if given is not None:
        folder = find(given)
    elif model.architecture == "mdlm" and not Tokenizer.lies_in(folder):
        folder = gpt2_files(folder, model)
    # Dream's own files are Qwen2's whatever tokenizer_class says; other folders speak for themselves.
    qwen2 = True if model.architecture == "dream" and given is None else None
    return Tokenizer.read(folder, mask_id=model.mask_id, qwen2=qwen2)


def gpt2_files(folder: Path, model: NativeModel) -> Path:
    """GPT-2's tokenizer files, which the public MDLM checkpoints use without shipping them."""
    missing = f"{folder} has no tokenizer: put {FILES} there, or pass tokenizer="
    if model.config.get("vocab_size") not in (GPT2_VOCABULARY, GPT2_VOCABULARY + 1):
        raise D5P4Error(missing)
    try:
        return download("gpt2", ["tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt"])
    except D5P4Error as reason:
        raise D5P4Error(f"{missing} (it uses GPT-2's, but {reason})") from reason


def choose_device(device: str | torch.device | None) -> torch.device:
    if device is None:
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        chosen = torch.device(device)
    except (RuntimeError, TypeError) as reason:
        raise D5P4Error(f"device={device!r} is not a device: use 'cuda', 'cuda:0', 'mps' or 'cpu'") from reason
    if chosen.type == "cuda" and not (chosen.index or 0) < torch.cuda.device_count():
        raise D5P4Error(f"device={device!r} is not there: this torch sees {torch.cuda.device_count()} CUDA devices")
    if chosen.type == "mps" and not torch.backends.mps.is_available():
        raise D5P4Error(f"device={device!r} is not there: this torch has no MPS; use 'cpu'")
    if chosen.type not in ("cuda", "mps", "cpu", "xpu"):
        raise D5P4Error(f"device={device!r} cannot hold a model for decoding: use 'cuda', 'mps' or 'cpu'")
    return chosen


def choose_dtype(dtype: str | torch.dtype | None, device: torch.device) -> torch.dtype:
    if dtype is None:
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    chosen = DTYPES.get(dtype.removeprefix("torch.")) if isinstance(dtype, str) else dtype
    if chosen is None or chosen not in DTYPES.values():
        raise D5P4Error(f"dtype={dtype!r} is not supported: use one of {', '.join(DTYPES)}")
    if chosen is torch.float64 and device.type == "mps":
        raise D5P4Error("dtype='float64' does not exist on MPS: use 'float32', or device='cpu'")
    return chosen
