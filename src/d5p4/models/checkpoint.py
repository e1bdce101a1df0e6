"""Reads a checkpoint folder: JSON files and safetensors weights, but never pickle files."""

import json
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn

from ..errors import D5P4Error
from ..ops.precision import working_dtype
from .quant import quantise

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
SHOWN = 8
LARGEST_TEXT = 2**26  # bytes of a JSON or text file; the largest public ones have about 2**25


def regular(path: Path) -> Path:
    """Return the path of a text file, unless it is a pipe, a device or a file of more than `LARGEST_TEXT` bytes."""
    if not path.exists():
        raise D5P4Error(f"{path} does not exist, but a checkpoint folder needs this file")
    if not path.is_file() or path.stat().st_size > LARGEST_TEXT:
        raise D5P4Error(f"{path} should be a regular file of at most {LARGEST_TEXT >> 20} MiB: fetch it again")
    return path


@contextmanager
def refusing(what: str, cure: str = "") -> Iterator[None]:
    """Turn any error of another library, even a panic of Rust code, into one sentence."""
    try:
        yield
    except D5P4Error:
        raise
    except BaseException as reason:
        if not isinstance(reason, Exception) and type(reason).__name__ != "PanicException":
            raise
        raise D5P4Error(f"{what}: {str(reason) or type(reason).__name__}{cure and '; ' + cure}") from reason


def read_json(path: Path, missing: Any = None) -> Any:
    """Read the object in a JSON file. If no file exists, return `missing`, or raise an error if `missing` is None."""
    if missing is not None and not path.exists():
        return missing
    with refusing(f"{path} cannot be read as JSON", "fetch the file again"):
        content = json.loads(regular(path).read_text(encoding="utf-8"))
    if not isinstance(content, dict):
        raise D5P4Error(f"{path} holds a {type(content).__name__} where a JSON object is expected")
    return content


def weight_files(folder: Any) -> list[Any]:
    """Return the safetensors files of a folder: the single file, or the shards that the folder's index names. The only
    file of an open GGUF file is itself."""
    if not isinstance(folder, Path):
        return [folder]
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    if (folder / INDEX).is_file():
        weight_map = read_json(folder / INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise D5P4Error(f"{folder / INDEX} has no weight_map: fetch the file again")
        names = sorted({str(name) for name in weight_map.values()})
        absent = [name for name in names if Path(name).name != name or not (folder / name).is_file()]
        if absent:
            raise D5P4Error(f"{folder / INDEX} names files that the folder lacks: {_some(absent)}; fetch them")
        return [folder / name for name in names]
    pickles = sorted(path.name for pattern in PICKLES for path in folder.glob(pattern))
    if pickles:
        raise D5P4Error(f"{folder} has only pickle files ({_some(pickles)}), which can run code: use d5p4 convert")
    raise D5P4Error(f"{folder} has neither {SINGLE} nor {INDEX}: put the weights there")


def stored_dtype(folder: Any) -> torch.dtype | None:
    """Return the dtype of the first weight in a checkpoint, or None if d5p4 cannot run models in that dtype."""
    with _opened(weight_files(folder)[0]) as shard:
        first = next(iter(shard.keys()), None)
        return None if first is None else FLOATS.get(shard.get_slice(first).get_dtype())


def fill(
    model: Any, folder: Any, device: torch.device, dtype: torch.dtype, mapped: bool = False, adapter: Any = None
) -> None:
    """Read the weights of a folder or an open GGUF file into a model that is on the meta device.

    First the headers of the files are read, and their names and shapes are compared with those of the model. Then one
    shard is opened at a time, and each tensor goes directly to the device, so the host needs memory for about one
    shard.

    `mapped`: whether tensors on the CPU are mapped from the file (copy on write) if they need no conversion.
    `adapter`: an `Adapter`, which changes weights in float32 or wider, before they take their dtype.
    """
    files = weight_files(folder)
    places: dict[str, tuple[str, int | None]] = {}  # stored name to the parameter's name and the place in a stack
    wanted: dict[str, tuple[int, ...]] = {}
    for name, parameter in model.named_parameters():
        stored, shape = model.stored_names(name), tuple(parameter.shape)
        single = isinstance(stored, str)
        for i, part in enumerate([stored] if single else stored):
            places[part], wanted[part] = (name, None if single else i), shape if single else shape[1:]
    _compare(folder, wanted, files, model)
    if adapter is not None:
        adapter.check(wanted)
    for file in files:
        with _opened(file) as shard:
            stored = _stored(shard, model)
            for name in filter(places.__contains__, stored):
                full, place = places[name]
                kind = working_dtype(dtype) if full.endswith(model.wide) else dtype
                owner, _, leaf = full.rpartition(".")
                module, tensor = model.get_submodule(owner), shard.get_tensor(stored[name])
                own = not isinstance(file, Path)  # whether the tensor is in memory of its own, not in the file's
                if adapter is not None and name in adapter.changes:
                    tensor = adapter.apply(name, tensor.to(device, working_dtype(dtype), copy=not own), model.mask_id)
                    own = True
                if place is None:
                    # Without `mapped`, CPU tensors are copies, because the file may be overwritten while in use.
                    tensor = tensor.to(device=device, dtype=kind, copy=not (mapped or own))
                    setattr(module, leaf, nn.Parameter(tensor))
                    if model.bits is not None:
                        quantise(model, owner)
                    continue
                if getattr(module, leaf).is_meta:
                    empty = torch.empty(getattr(module, leaf).shape, device=device, dtype=kind)
                    setattr(module, leaf, nn.Parameter(empty))
                getattr(module, leaf).data[place].copy_(tensor)


def _stored(shard: Any, model: Any) -> dict[str, str]:
    """Return the names of the tensors in a file, by the names that newer checkpoints give them."""
    names = {}
    for name in list(shard.keys()):
        end = next((old for old in model.renamed if name.endswith(old)), "")
        names[name.removesuffix(end) + model.renamed[end] if end else name] = name
    return names


def _compare(folder: Any, wanted: dict[str, tuple[int, ...]], files: list[Any], model: Any) -> None:
    stored: dict[str, str] = {}
    misfits = []
    for file in files:
        with _opened(file) as shard:
            own = _stored(shard, model)
            stored |= own
            for name in filter(wanted.__contains__, own):
                piece = shard.get_slice(own[name])
                shape, dtype = tuple(piece.get_shape()), piece.get_dtype()
                if shape != wanted[name]:
                    misfits.append(f"{name} has shape {list(shape)}, expected {list(wanted[name])}")
                elif dtype not in FLOATS:
                    misfits.append(f"{name} has dtype {dtype}, expected one of {', '.join(FLOATS)}")
    missing = [name for name in wanted if name not in stored]
    head = model.prefix + model.head_name  # may be stored although it equals the embedding
    extra = [name for name in stored if name not in wanted and not name.endswith(head)]
    unexpected = [name for name in extra if not model.unused.search(name)]
    kinds = {"missing": missing, "unexpected": unexpected, "misshapen": misfits}
    complaints = "; ".join(f"{kind}: {_some(names)}" for kind, names in kinds.items() if names)
    if complaints:
        raise D5P4Error(f"the weights in {folder} do not fit its config.json; {complaints}")


def _opened(file: Any) -> Any:
    if not isinstance(file, Path):
        return nullcontext(file)
    with refusing(f"{file} is not a complete safetensors file", "fetch it again"):
        return safe_open(file, framework="pt", device="cpu")


def _some(names: list[str]) -> str:
    return ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")
