"""What the processes of these tests do."""

from __future__ import annotations

import os
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch

import d5p4
from d5p4.decode.cache import ExactCache
from d5p4.decode.loop import Loop
from d5p4.distributed import connect
from d5p4.generate import arrivals
from d5p4.prompts import prepare
from tests import checkpoints
from tests.fake import FakeModel, block_model, fitting

d5p4.load_plugins(["d5p4_lab.methods"])

PROMPTS = ["abc", "a", "bcabbc", "cab", "abc"]
GPU_PROMPTS = ["the cat", "a", "two little words here", "the cat"] * 4


def answers(result: d5p4.Result) -> dict[str, Any]:
    """All of a result that must not depend on the number of ranks."""
    return {
        "answers": result.answers,
        "score": [[float(f"{x:.6g}") for x in row] for row in result.score.nan_to_num().tolist()],
        "logdet": [f"{x:.6g}" for x in result.logdet.tolist()],
        "distinct": result.distinct.tolist(),
        "lineage": [x.tolist() for x in result.lineage],
        "nfe": result.nfe.tolist(),
        "rows": result.rows.tolist(),
        "nominal": result.rows_nominal.tolist(),
        "tokens": result.tokens_run.tolist(),
        "logprobs": [[[float(f"{x:.6g}") for x in row] for row in rows] for rows in result.logprobs or []],
        "reveal_step": result.reveal_step,
        "values": [str(None if x is None else x.round(decimals=6).tolist()) for x in (result.perturbed, result.kappa)],
    }


def decode(cases: list[dict[str, Any]], mesh: list[int] | None = None) -> list[Any]:
    """The results of all cases, one after the other, in one set of processes."""
    ranks = connect(tuple(mesh) if mesh else None, timeout=60)
    collected = []
    for case in cases:
        options = dict(case)
        given = options.pop("model", {})
        if "kind" in given:
            with tempfile.TemporaryDirectory() as folder:
                model = d5p4.load(checkpoints.WRITERS[given["kind"]](Path(folder)), dtype="float64")
        else:
            model = block_model(**given) if "shifted" in given else FakeModel(**given)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", d5p4.DuplicateAnswers)
            common = dict(method="d5p4", k=4, w=2, gen_length=6, temperature=1.2, seed=3, logprobs=True)
            collected.append(answers(d5p4.generate(model, PROMPTS, ranks=ranks.ranks, **fitting(common | options))))
    ranks.close()
    return collected


class Breaking(FakeModel):
    """Fails on one rank only, at one forward."""

    def __init__(self, how: str, rank: int) -> None:
        super().__init__()
        self.how, self.left = how if int(os.environ["RANK"]) == rank else "", 3

    def body(self, tokens: torch.Tensor, attention_mask: torch.Tensor | None = None) -> Any:
        self.left -= 1
        if self.left == 0 and self.how == "memory":
            raise torch.OutOfMemoryError("no room")
        if self.left == 0 and self.how == "hang":
            time.sleep(600)
        if self.left == 0 and self.how == "die":
            os._exit(9)
        hidden = super().body(tokens, attention_mask)
        if self.left == 0 and self.how == "logits":
            hidden.states[0] = torch.nan
        return hidden


def break_one(breaks: list[tuple[str, int]], timeout: float = 60) -> list[list[str]]:
    """For each way to fail on a rank: the kind of error each rank meets, and that they can go on together."""
    mesh, outcomes = connect((1, int(os.environ["WORLD_SIZE"])), timeout=timeout), []
    options: Any = dict(method="d5p4", k=2, w=2, gen_length=6, seed=3)
    for how, rank in breaks:
        try:
            d5p4.generate(Breaking(how, rank), PROMPTS, ranks=mesh.ranks, **options)
            kind = "nothing"
        except (torch.OutOfMemoryError, d5p4.D5P4Error) as error:
            kind = type(error).__name__
            if kind == "RankLost":
                raise
        again = d5p4.generate(FakeModel(), PROMPTS, ranks=mesh.ranks, **options)
        outcomes.append([kind, *again.texts[0]])
    mesh.close()
    return outcomes


def count_and_meet(tickets: int) -> dict[str, Any]:
    """What the mesh promises besides ranks that divide forwards."""
    mesh = connect()
    mine = []
    while (ticket := mesh.ticket("work")) < tickets:
        mine.append(ticket)
        mesh.count("done", 1)
    mesh.meet()
    whole = mesh.share({"from": mesh.rank, "text": "x" * 9_000_000 if mesh.first else ""})
    shared = {"from": whole["from"], "size": len(whole["text"])}
    done = mesh.count("done")
    mesh.close()
    again = connect()  # a second job of the same processes starts from nothing
    assert again.share(mesh.rank + 7) == 7 and again.count("done") == 0
    again.close()
    return {"mine": mine, "shared": shared, "done": done, "first": mesh.first, "world": mesh.world}


def wait_for_one(rank: int, timeout: float = 60, ready: str = "", why: str = "") -> None:
    """The others wait for one rank, which sleeps, or stops with an error. The file `ready`: all are connected."""
    with connect(timeout=timeout) as mesh:
        if ready and mesh.first:
            Path(ready).touch()
        if mesh.rank == rank and why:
            raise d5p4.D5P4Error(why)
        if mesh.rank == rank:
            time.sleep(600)


def whole_pools() -> list[Any]:
    """What needs the rows of all ranks: a callback that drops a prompt, a scorer, the views, and a drawn seed."""
    mesh, dropped, scores = connect((1, int(os.environ["WORLD_SIZE"]))), [], []

    def drop(shot: Any) -> list[int]:
        dropped.append(shot.next_tokens.tolist())
        scores.append(shot.view.quality[0].tolist())
        return [3] if mesh.rank == 0 and shot.step == 2 else []  # the first rank decides

    options: Any = dict(k=3, gen_length=4, ranks=mesh.ranks)
    seen = d5p4.generate(FakeModel(), PROMPTS, method="d5p4", seed=1, callback=drop, **options)
    best = d5p4.generate(FakeModel(), PROMPTS, method="best-of-n", scorer=lambda texts: [*map(len, texts)], **options)
    mesh.close()
    return [seen.texts, dropped, scores, best.texts, best.score.tolist(), best.seed]


def compute_contexts(cases: list[dict[str, Any]]) -> list[Any]:
    """For each case: the contexts that this rank computed, each a prompt, a block and the tokens before it."""
    mesh, seen = connect((1, int(os.environ["WORLD_SIZE"]))), []

    def remember(self: Any, pool: Any, start: torch.Tensor, targets: list[Any]) -> None:
        for prompt, row, *_ in targets:
            block = int(start[prompt])
            seen[-1].append([int(pool.names[prompt]), block, *pool.tokens[prompt, row, :block].tolist()])
        compute(self, pool, start, targets)

    compute = ExactCache._compute
    ExactCache._compute = remember  # type: ignore[method-assign]
    for options in cases:
        seen.append([])
        common = dict(k=4, w=3, gen_length=16, seed=3, temperature=1.5, steps=12)
        d5p4.generate(block_model(), PROMPTS, ranks=mesh.ranks, **common | options)
    mesh.close()
    return seen


def join_requests(cases: list[dict[str, Any]]) -> list[Any]:
    """The answers to five prompts, three of which join while the others are decoded."""
    mesh, collected = connect((1, int(os.environ["WORLD_SIZE"]))), []
    for case in cases:
        options = dict(case)
        model = block_model() if options.pop("block", False) else FakeModel()
        prepared = prepare(model, PROMPTS, fitting(dict(k=3, w=2, gen_length=8, temperature=1.3) | options))
        got: dict[int, Any] = {}

        def deliver(result: d5p4.Result, names: list[int], got: dict[int, Any] = got) -> None:
            for place, name in enumerate(names):
                got[name] = [result.answers[place], int(result.rows[place]), int(result.nfe[place])]

        loop, begun = Loop(model, prepared.settings, deliver=deliver, ranks=mesh.ranks), 0
        with mesh.ranks.together():
            while loop.batch is not None or begun < len(PROMPTS):
                new = range(begun, min(begun + (1 if begun else 2), len(PROMPTS)))
                if new:
                    some = [prepared.requests[number] for number in new]
                    loop.join(arrivals(model, prepared.settings, some, [7 + number for number in new], new))
                    begun = new.stop
                loop.step()
        collected.append([got[number] for number in sorted(got)])
    mesh.close()
    return collected


def on_one_gpu(model_folder: str, beam: int, cases: list[dict[str, Any]]) -> list[Any]:
    """The same on CUDA in bf16; ranks that share a GPU exchange through the host."""
    mesh, collected = connect((1, beam), timeout=120), []
    model = d5p4.load(model_folder, "cuda", "bfloat16")
    for options in cases:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", d5p4.DuplicateAnswers)
            common = dict(method="d5p4", k=4, w=4, gen_length=12, seed=3, temperature=1.2, logprobs=True)
            common |= {"deterministic": True}
            result = d5p4.generate(model, GPU_PROMPTS, ranks=mesh.ranks, **common | options)
        collected.append(answers(result) | {"similarity": result.similarity.tolist()})
    mesh.close()
    return collected
