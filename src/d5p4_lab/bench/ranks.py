"""Count what ranks that divide a forward send per step, and time it. Rows are printed, not stored.

    torchrun --nproc-per-node 2 -m d5p4_lab bench ranks [--device cuda]

The step is one of d5p4 with 6 × 10 different rows of 256 positions and width 4,096 in bf16. Its model has no layers and
256 tokens, which changes nothing that is sent except the pools' shares of equal rows. Ranks without a GPU each send
through the host. The last row is computed: with R ranks, (R - 1)/R of a forward is saved (the forward is that of the
committed results of `bench gpu`), and the features of (R - 1)/R of the rows are received. At this network, both take
the same time, if copies take none. Without torchrun, only copies are timed.
"""

import os
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from d5p4.distributed import connect
from d5p4.provenance import machine
from d5p4.types import Snapshot

from ..timing import median_ms, wait_for
from . import RESULTS, generate, make_parser, read_sections, rows_of, show
from .random_models import TINY, random_model

SIZES = {"vocab_size": 256, "embedding_size": 256, "mask_token_id": 255, "eos_token_id": 254, "pad_token_id": 254}
POOL: dict[str, Any] = {"k": 6, "w": 10, "gen_length": 256, "distinct": True, "order": "random"}
ROWS, WIDTH, FORWARD = 60, 4096, "60 × 384"


def main(arguments: Sequence[str]) -> None:
    given = make_parser("ranks", __doc__).parse_args(arguments)
    with connect((1, int(os.environ.get("WORLD_SIZE", 1))), device=given.device) as mesh:
        device, ranks = mesh.device or torch.device(given.device or "cpu"), mesh.ranks
        model = random_model(TINY | SIZES | {"d_model": WIDTH, "n_heads": 32, "n_kv_heads": 32}, device, torch.bfloat16)
        model.model.layers = nn.ModuleList()
        sizes, spent = Counter[str](), dict[str, float]()

        def watch(name: str) -> None:
            send = getattr(ranks, name)

            def call(*given: Any) -> Any:
                ranks.agree_on(None)  # so that no rank waits for the work of another one
                wait_for(device)
                began, result = time.perf_counter(), send(*given)
                wait_for(device)
                features = any(x.shape[1:] == (POOL["gen_length"], WIDTH) for x in result)
                kind = "next pool" if name == "agree" else "features" if features else "draws and statistics"
                sizes[kind] += sum(x.nbytes for x in result)
                spent[kind] = spent.get(kind, 0.0) + time.perf_counter() - began
                return result

            setattr(ranks, name, call)

        def callback(shot: Snapshot) -> list[int]:
            if shot.step == 0:  # its rows are equal
                sizes.clear()
                spent.clear()
            return [0] if shot.step == 1 else []

        features = torch.zeros(ROWS, POOL["gen_length"], WIDTH, dtype=torch.bfloat16, device=device)
        times = {"copy_ms": median_ms(features.clone, device, 1.0)}
        if device.type == "cuda":
            times["to_host_ms"] = median_ms(features.cpu, device, 1.0)
        if ranks.size > 1:
            for name in ("join", "agree"):
                watch(name)
            generate(model, sets=1, seed=0, callback=callback, ranks=ranks, **POOL)
        if mesh.first:
            print(machine(device))
            show({"what": "features", "bytes": features.nbytes} | times)
            for kind, count in sizes.items():
                show({"what": f"{kind} of a step, {ranks.size} ranks", "bytes": count, "ms": 1e3 * spent[kind]})
            bodies = rows_of(read_sections(RESULTS / "gpu.jsonl.xz"), "body")
            saved = next(row["ours_ms"] for row in bodies if row["size"] == FORWARD)
            show({"what": "computed", "forward_ms": saved, "gbit_per_s": 8e-6 * features.nbytes / saved})
