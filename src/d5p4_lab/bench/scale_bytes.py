"""Measures the bytes per step that two ranks send when they share a pool, in real processes with gloo.

`SpreadBeams.sent` counts the bytes. Instead of a model, a table look-up makes a feature row from token and position.
This look-up is enough, because the size of the exchange depends only on the number of distinct rows.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from d5p4.distributed import connect
from d5p4.types import Head, Hidden

from ..tables import Row
from . import generate


@dataclass(frozen=True)
class Sizes:
    """The sizes of a pool that several ranks share. Every rank has `groups` groups of `w` rows."""

    ranks: int = 2  # the number of processes
    groups: int = 6
    w: int = 10
    length: int = 256  # L, the number of positions per row
    width: int = 4096  # D, the number of features per position
    vocabulary: int = 32
    steps: int = 5

    @property
    def k(self) -> int:
        return self.ranks * self.groups

    @property
    def own_rows(self) -> int:
        return self.groups * self.w

    def gathered(self, itemsize: int) -> int:
        """Return the bytes that a rank sends in a plain gather, which gives all features to every rank."""
        return self.own_rows * self.length * self.width * itemsize * (self.ranks - 1)

    def __str__(self) -> str:
        return f"{self.ranks} ranks of {self.groups}×{self.w} rows, L {self.length}, D {self.width}"


CASES: dict[str, dict[str, Any]] = {
    "all rows differ": {"order": "random"},
    "some rows are equal": {"order": "confidence", "temperature": 0.08},
    "no partition, all rows differ": {"order": "random", "method": "d5p3"},
}


class LookUp:
    """A model without layers. The features at a position are a row for the token plus a row for the position."""

    name, max_length, carry_over, default_order, tokenizer = "look-up", 1 << 16, False, "confidence", None
    generation_defaults: dict[str, Any] = {}

    def __init__(self, sizes: Sizes) -> None:
        g = torch.Generator().manual_seed(0)

        def table(rows: int, scale: float = 1.0) -> Tensor:
            return (torch.randn(rows, sizes.width, generator=g) * scale).bfloat16()

        self.embedding, self.place = table(sizes.vocabulary), table(sizes.length + 8)
        banned = torch.zeros(sizes.vocabulary, dtype=torch.bool)
        banned[-1] = True
        self.head = Head(table(sizes.vocabulary, sizes.width**-0.5), None, banned)
        self.mask_id, self.pad_id, self.eos_ids = sizes.vocabulary - 1, 0, ()
        self.at_forward: Any = lambda: None

    def body(self, tokens: Tensor, attention_mask: Tensor | None = None) -> Hidden:
        self.at_forward()
        rows = self.embedding[tokens] + self.place[: tokens.shape[1]]
        return Hidden(rows, rows)


def work(sizes: Sizes) -> dict[str, Any]:
    """Run one rank's part of all cases. A step's bytes are those sent from one forward to the next."""
    torch.set_num_threads(1)
    mesh = connect((1, sizes.ranks), timeout=120, device="cpu")
    beams: Any = mesh.beams
    model: Any = LookUp(sizes)
    measured: dict[str, Any] = {}
    for what, options in CASES.items():
        marks: list[Counter[str]] = []
        model.at_forward = partial(_mark, marks, beams)
        shape = dict(k=sizes.k, w=sizes.w, gen_length=sizes.length, steps=sizes.steps)
        generate(model, [[0]], **shape, seed=1, beams=beams, max_tokens_per_forward=1 << 24, **options)
        measured[what] = [dict(after - before) for before, after in zip(marks, marks[1:], strict=False)]
    mesh.close()
    return measured


def _mark(marks: list[Counter[str]], beams: Any) -> None:
    marks.append(Counter(beams.sent))


def start(sizes: Sizes, folder: Path) -> list[dict[str, Any]]:
    """Run `work` in one process per rank, and return one result per rank."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    world = {"WORLD_SIZE": str(sizes.ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    environment = os.environ | world | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "d5p4_lab.bench.scale_bytes", str(folder), json.dumps(asdict(sizes))]
    processes = [
        subprocess.Popen(command, env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(sizes.ranks)
    ]
    try:
        codes = [process.wait(timeout=240) for process in processes]
    finally:
        for process in processes:
            process.kill()
    if any(codes):
        raise RuntimeError(f"a rank failed; the exit codes are {codes}")
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(sizes.ranks)]


def measure(sizes: Sizes) -> list[Row]:
    """Return the bytes that the busiest rank sends per step (without step 1) in each case, and in a plain gather."""
    with tempfile.TemporaryDirectory() as folder:
        ranks = start(sizes, Path(folder))
    rows = []
    for what in CASES:
        kinds = sorted({kind for rank in ranks for step in rank[what] for kind in step})
        sent = [
            {kind: statistics.mean(step.get(kind, 0) for step in rank[what][1:]) for kind in kinds} for rank in ranks
        ]
        busiest = max(sent, key=lambda rank: sum(rank.values()))
        one_row = sizes.length * sizes.width * 2 / sizes.ranks * (sizes.ranks - 1)
        row: Row = {"what": what, "size": str(sizes), "sent": busiest, "sent_mb": sum(busiest.values()) / 1e6}
        row["rows_sent"] = busiest["features"] / one_row
        row["first_step_mb"] = max(sum(rank[what][0].values()) for rank in ranks) / 1e6
        rows.append(row | {"gather_mb": sizes.gathered(2) / 1e6, "authors_mb": sizes.gathered(4) / 1e6})
    return rows


if __name__ == "__main__":  # one rank
    folder, sizes = sys.argv[1:]
    Path(folder, f"{os.environ['RANK']}.json").write_text(json.dumps(work(Sizes(**json.loads(sizes)))))
