"""`load` turns a name, a folder or a hub id into a model that is ready for decoding."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ..errors import D5P4Error, nearest
from ..ops.precision import working_dtype
from .base import NativeModel
from .checkpoint import fill, read_json, stored_dtype
from .llada import ILLaDA, LLaDA
from .llada2 import LLaDA2
from .mdlm import MDLM
from .qwen import SDAR, Dream, FastDLLM, LLaDAMoE, SDARMoE
from .tokenizer import FILES, Tokenizer

KINDS: tuple[type[NativeModel], ...] = (MDLM, LLaDA, ILLaDA, LLaDAMoE, LLaDA2, Dream, SDAR, SDARMoE, FastDLLM)
ARCHITECTURES = {kind.architecture: kind for kind in KINDS}
FAMILIES = ", ".join(f"{kind.title} ({kind.architecture})" for kind in ARCHITECTURES.values())
CLASS_NAMES = {  # model_type and class names in small letters without "_" and "-", and the architecture that they mean
    "mdlm": "mdlm",
    "llada": "llada",
    "lladamodel": "llada",
    "lladamodellm": "llada",
    "dream": "dream",
    "dreammodel": "dream",
    "dreambasemodel": "dream",
    "dreamforcausallm": "dream",
    "dreamcoder": "dream",
    "dreamcodermodel": "dream",
    "diffucoder": "dream",
    "diffucodermodel": "dream",
    "sdar": "sdar",
    "sdarforcausallm": "sdar",
    "sdarmoe": "sdar_moe",
    "sdarmoeforcausallm": "sdar_moe",
    "fastdllmqwen": "fast_dllm",
    "fastdllmqwenforcausallm": "fast_dllm",
    "lladamoe": "llada_moe",
    "lladamoemodel": "llada_moe",
    "lladamoemodellm": "llada_moe",
    "llada2moe": "llada2_moe",
    "llada2moemodellm": "llada2_moe",
    "illada": "illada",
    "illadamodel": "illada",
    "illadamodellm": "illada",
    "illadaforcausallm": "illada",
    "illadaformaskedlm": "illada",
}
MORE_EXACT = ("llada_moe", "illada")  # the config.json of these models may have the model_type of LLaDA
REFUSED = {  # the keys are parts of model_type or of a class name, in small letters without "_" and "-"
    "diffusiongemma": "DiffusionGemma, which has no mask token: it starts from random tokens and replaces them, "
    "so d5p4 cannot decode it",
    "stablediffcoder": "Stable-DiffCoder, a block-causal diffusion model, which d5p4 does not support yet",
}
DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
DTYPES |= {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
OPTIONS = ("device", "dtype", "tokenizer", "mapped", "block_length", "torch_dtype", "device_map", "trust_remote_code")
QUANTISED = ("load_in_4bit", "load_in_8bit", "quantization_config")
SEVERAL_DEVICES = ("balanced", "balanced_low_0", "sequential")
HUB_FILES = ["*.json", "*.safetensors", "*.txt", "*.jinja"]
HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
GPT2_SIZES = (50257, 50258)  # the number of tokens in GPT-2's vocabulary, without and with a mask token
CHECKOUT_ONLY = ("books",)  # models that are in `models/` of the repository, but not in the wheel


def load(
    name_or_path: str | Path,
    device: str | torch.device | int | None = None,
    dtype: str | torch.dtype | None = None,
    tokenizer: str | Path | Tokenizer | None = None,
    mapped: bool = False,
    block_length: int | None = None,
    **others: Any,
) -> NativeModel:
    """Load a checkpoint of a masked diffusion model from a folder, a hub id or the name of a shipped model.

    The architectures are MDLM, LLaDA (also 1.5), iLLaDA, LLaDA-MoE, LLaDA2.0 and 2.1, Dream (also Dream-Coder and
    DiffuCoder), SDAR (also TraDo, and SDAR with experts) and Fast-dLLM v2.
    `device`: the default is the best device of this machine.
    `dtype`: the default is bfloat16 on CUDA and float32 elsewhere. "auto" means the dtype of the stored weights.
    `tokenizer`: a folder or a Tokenizer to use instead of the tokenizer of the checkpoint.
    `mapped`: saves memory when several processes on one host use a checkpoint on the CPU. Weights that are stored in
    the wanted dtype are mapped from their file, and the processes share that memory. Do not overwrite the file while a
    model uses it. MDLM maps only its embedding and head, because loading changes its other weights.
    `block_length`: the number of tokens per block of a block-causal model. The default is the number in config.json,
    or else the number at the end of the name (8 in SDAR-8B-Chat-b8), or else the architecture's usual number.
    `others`: keywords of `from_pretrained` in transformers. `torch_dtype` is used if `dtype` is None, and `device_map`
    ("auto" or one device) if `device` is None. `trust_remote_code` has no effect: code of a checkpoint never runs.
    """
    device, dtype = translate(device, dtype, others)
    device = choose_device(device)
    choose_dtype(dtype, device)  # raises an error for a wrong dtype before anything is downloaded
    model, folder, codec, generation = without_weights(name_or_path, tokenizer, block_length)
    dtype = choose_dtype(dtype, device, folder)
    fill(model, folder, device, working_dtype(dtype) if model.reads_wide else dtype, mapped)
    model.settle(dtype)
    model.attach(str(name_or_path), codec, generation)
    return model


def translate(device: Any, dtype: Any, others: Mapping[str, Any]) -> tuple[Any, Any]:
    """Apply the keywords of transformers to device and dtype. Raise an error for a keyword that is unknown."""
    for name, value in others.items():
        if name == "torch_dtype":
            dtype = value if dtype is None else dtype
        elif name == "device_map":
            device = _single_device(value) if device is None else device
        elif name == "trust_remote_code":
            if value:
                warnings.warn("trust_remote_code has no effect: d5p4 never runs a checkpoint's own code", stacklevel=3)
        elif name not in QUANTISED:
            raise D5P4Error(nearest(name, OPTIONS) or f"load takes {', '.join(OPTIONS)}", option=name)
        elif value:
            reason = "d5p4 does not quantise weights; use dtype='bfloat16', or quantise the model with transformers"
            raise D5P4Error(f"{reason} and pass that model to d5p4.wrap", option=name)
    return device, dtype


def _single_device(device_map: Any) -> Any:
    if isinstance(device_map, Mapping) and len(set(map(str, device_map.values()))) == 1:
        return next(iter(device_map.values()))
    if isinstance(device_map, Mapping) or device_map in SEVERAL_DEVICES:
        reason = "spreads a model over several devices, but d5p4 needs the whole model on one; use 'auto' or 'cuda:0'"
        raise D5P4Error(reason, option="device_map", value=device_map)
    return device_map


def without_weights(
    name_or_path: str | Path, tokenizer: str | Path | Tokenizer | None = None, block_length: int | None = None
) -> tuple[NativeModel, Path, Tokenizer, dict[str, Any]]:
    """Return a model without weights (on the meta device), its folder, its tokenizer and its generation_config.json."""
    folder = find(name_or_path)
    config = read_json(folder / "config.json")
    generation = read_json(folder / "generation_config.json", missing={})
    kind = ARCHITECTURES[architecture(config, folder)]
    config |= choose_block(kind, config, block_length, name_or_path, folder)
    if kind.mask_text is not None and config.get("mask_token_id") is None:
        config |= {"mask_token_id": mask_in_tokenizer(kind.mask_text, folder, tokenizer)}
    with torch.device("meta"), Undrawn():
        model = kind(config)
    return model, folder, find_tokenizer(folder, model, tokenizer), generation


def choose_block(
    kind: type[NativeModel], config: Mapping[str, Any], given: int | None, name_or_path: str | Path, folder: Path
) -> dict[str, int]:
    """Return the entry of config.json that sets the block length of a block-causal model, if config.json needs one."""
    if given is not None:
        if not kind.block_keys:
            reason = f"has no meaning here, because {kind.architecture} models have no blocks: leave it out"
            raise D5P4Error(reason, option="block_length", value=given)
        if isinstance(given, bool) or not isinstance(given, int) or given < 1:
            raise D5P4Error("should be a whole number from 1", option="block_length", value=given)
        return {"block_length": given}
    if not kind.block_keys or any(config.get(key) is not None for key in kind.block_keys):
        return {}
    numbers = [re.search(r"-b(\d+)$", name) for name in (str(name_or_path).rstrip("/"), folder.resolve().name)]
    return next(({"block_length": int(match[1])} for match in numbers if match is not None), {})


def mask_in_tokenizer(text: str, folder: Path, given: str | Path | Tokenizer | None) -> int | None:
    """Return the id of the mask token with this string in the given tokenizer or in the folder's, or None."""
    if not isinstance(given, Tokenizer):
        folder = folder if given is None else find(given)
        given = Tokenizer.read(folder) if Tokenizer.lies_in(folder) else None
    return None if given is None else given.token_id(text)


class Undrawn(TorchFunctionMode):
    """Skips weight initialisation: a checkpoint follows, and on the meta device this would import a compiler."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        if getattr(func, "__module__", None) == "torch.nn.init":
            return args[0] if args else given["tensor"]
        return func(*args, **given)


def find(name_or_path: str | Path) -> Path:
    """Return the folder that a name or path stands for. The files of a hub id are downloaded."""
    if not isinstance(name_or_path, (str, Path)) or not str(name_or_path):
        raise D5P4Error(f"the name of a model must be text or a path, not {name_or_path!r}")
    name = str(name_or_path)
    folder = Path(name_or_path).expanduser()
    inside = shipped(name)
    # A folder with the name of a shipped model replaces that model only if the folder holds a checkpoint.
    if folder.is_dir() and (inside is None or (folder / "config.json").is_file()):
        if inside is not None and isinstance(name_or_path, str):
            warnings.warn(f"{name!r} is read from the folder of that name, not from the model in d5p4", stacklevel=2)
        return folder
    if inside is not None:
        return inside
    if folder.exists():
        raise D5P4Error(f"{name!r} is a file: give the folder that holds config.json and the weights")
    if name in CHECKOUT_ONLY:
        raise D5P4Error(f"{name!r} is in models/ of d5p4's repository, not in its package: give the path of the folder")
    if not HUB_ID.fullmatch(name) or isinstance(name_or_path, Path):
        known = sorted(shipped_models())
        hint = nearest(name, known)
        raise D5P4Error(
            f"{name!r} is neither a folder nor a hub id of the form org/name; "
            f"shipped models are {', '.join(known)}{hint and '; ' + hint}"
        )
    return download(name, HUB_FILES)


def shipped(name: str) -> Path | None:
    """Return the folder of a model that comes with d5p4, or None."""
    return shipped_models().get(name)


def shipped_models() -> dict[str, Path]:
    """Return the folders of the models in the package and, in a source checkout, of the models in `models/`."""
    here = Path(__file__).resolve()
    configs = (*(here.parent / "weights").glob("*/config.json"), *(here.parents[3] / "models").glob("*/config.json"))
    return {config.parent.name: config.parent for config in reversed(configs)}


def download(hub_id: str, patterns: list[str]) -> Path:
    """Download the files of a hub repository that match the patterns, and return the local folder."""
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(hub_id, allow_patterns=patterns))
    except Exception as reason:  # the hub client raises errors of many unrelated classes
        first = (str(reason).strip() or "no reason given").splitlines()[0].split(". ")[0].rstrip(".")
        raise D5P4Error(
            f"{hub_id!r} is not a local folder, and its download from the hub failed ({type(reason).__name__}: {first})"
        ) from reason


def architecture(config: Mapping[str, Any], folder: Path) -> str:
    """Return the key of ARCHITECTURES for the `model_type` and `architectures` of a config.json."""
    kind = str(config.get("model_type") or "")
    listed = config.get("architectures") or []
    classes = [str(name) for name in listed] if isinstance(listed, list) else [str(listed)]
    known = {CLASS_NAMES.get(_plain(name)) for name in classes}
    own = CLASS_NAMES.get(_plain(kind))
    if kind and not (own == "llada" and known in [{name} for name in MORE_EXACT]):
        known.add(own)
    # All names in the config must mean one architecture. Otherwise a mixture of experts could be read as a dense model.
    if len(known) == 1 and None not in known:
        return str(known.pop())
    family = next((family for part, family in REFUSED.items() if part in _plain(f"{kind} {classes}")), None)
    if family is not None:
        hint = f"this is {family}"
    else:
        hint = f"d5p4 loads {FAMILIES}; d5p4.wrap accepts other modules"
        if any(name.endswith("ForCausalLM") for name in classes):
            hint += "; a causal model cannot fill masks"
    raise D5P4Error(f"{folder / 'config.json'} has model_type={kind!r} and architectures={classes}; {hint}")


def _plain(name: str) -> str:
    return re.sub("[_-]", "", name.lower())


def find_tokenizer(folder: Path, model: NativeModel, given: str | Path | Tokenizer | None) -> Tokenizer:
    """Return the given tokenizer, or else the folder's. If an MDLM folder has no tokenizer, download GPT-2's."""
    if isinstance(given, Tokenizer):
        return given.for_model(model.mask_id)
    uses_gpt2 = model.architecture == "mdlm" and model.config.get("vocab_size") in GPT2_SIZES
    if given is not None:
        folder = find(given)
    elif uses_gpt2 and not Tokenizer.lies_in(folder):
        try:
            folder = download("gpt2", ["tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt"])
        except D5P4Error as reason:
            raise D5P4Error(f"{folder} has no tokenizer: put GPT-2's {FILES} there ({reason})") from reason
    # The tokenizer files of these models need text that is split like Qwen2's, whatever their tokenizer_class says.
    qwen2 = True if isinstance(model, (Dream, SDAR, FastDLLM)) and given is None else None
    return Tokenizer.read(folder, mask_id=model.mask_id, qwen2=qwen2)


def choose_device(device: str | torch.device | int | None) -> torch.device:
    """Return the device that the user names. None and "auto" mean the best device of this machine."""
    if device is None or device == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        chosen = torch.device(device)
    except (RuntimeError, TypeError) as reason:
        raise D5P4Error(
            "is not a device: use 'cuda', 'cuda:0', 'mps' or 'cpu'", option="device", value=device
        ) from reason
    counts = {"cuda": torch.cuda.device_count(), "mps": int(torch.backends.mps.is_available())}
    if chosen.type in counts and (chosen.index or 0) >= counts[chosen.type]:
        raise D5P4Error(
            f"does not exist: torch finds {counts[chosen.type]} {chosen.type} devices", option="device", value=device
        )
    if chosen.type not in ("cuda", "mps", "cpu", "xpu"):
        raise D5P4Error("cannot hold a model for decoding: use 'cuda', 'mps' or 'cpu'", option="device", value=device)
    return chosen


def choose_dtype(dtype: str | torch.dtype | None, device: torch.device, folder: Path | None = None) -> torch.dtype:
    """Return the dtype that the user names. "auto" means the dtype of the weights in `folder`, if given."""
    if dtype == "auto":
        dtype = None if folder is None else stored_dtype(folder)
    if dtype is None:
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    chosen = DTYPES.get(dtype.removeprefix("torch.")) if isinstance(dtype, str) else dtype
    if chosen is None or chosen not in DTYPES.values():
        raise D5P4Error(f"is not supported: use one of {', '.join(DTYPES)}", option="dtype", value=dtype)
    if chosen is torch.float64 and device.type == "mps":
        raise D5P4Error("does not exist on MPS: use 'float32', or device='cpu'", option="dtype", value=dtype)
    return chosen
