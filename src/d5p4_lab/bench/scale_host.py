"""What the host does around the decoding of a file: reading, planning, the store, the parts, the end. For one prompt.

Sizes are those of docs/scale.md: prompts of 128 tokens, lines with 16 answers of 256 tokens, parts of 512 ranks.
"""

from __future__ import annotations

import itertools
import json
import pickle
import random
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist

import d5p4
from d5p4.jobs.done import Done
from d5p4.jobs.parts import Parts
from d5p4.jobs.plan import Work, plan_work
from d5p4.jobs.reader import PromptFile
from d5p4.models import Tokenizer
from d5p4.settings import Settings
from d5p4.store import append, json_line

Row = dict[str, Any]
K, ANSWER_TOKENS, PROMPT_TOKENS = 16, 256, 128
LETTERS_A_TOKEN = 4.3  # of English under the usual vocabularies
CHAT = (
    "{% for message in messages %}{% set said = message['role'] + ': ' + message['content'] | trim + '\n' %}"
    "{% if loop.first %}{% set said = '# ' + said %}{% endif %}{{ said }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
WORDS = [
    "the", "of", "and", "to", "in", "is", "that", "for", "it", "was", "on", "as", "with", "at", "from", "or", "an",
    "which", "not", "have", "had", "they", "were", "would", "about", "when", "who", "some", "could", "time", "journey",
    "question", "answer", "train", "morning", "kilometre", "station", "twelve", "passenger", "ticket", "altogether",
]  # fmt: skip


@dataclass(frozen=True)
class Sizes:
    lines: int = 8_192  # of the input
    kept: int = 4_096  # lines in parts
    parts: int = 512
    requests: int = 4_000  # to the store
    finished: int = 1_000_000  # line numbers told to all ranks
    appends: int = 40


def measure(sizes: Sizes) -> list[Row]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        return [*_input(sizes, folder), *_parts(sizes, folder), *_store(sizes)]


def _timed(fn: Callable[[], Any], repeats: int = 3) -> tuple[float, Any]:
    """Seconds of the fastest of some calls, and the last one's result."""
    best = float("inf")
    for _ in range(repeats):
        began = time.perf_counter()
        found = fn()
        best = min(best, time.perf_counter() - began)
    return best, found


def _row(what: str, seconds: float, count: int, **more: Any) -> Row:
    row = {"what": what, "count": count, "us": seconds / count * 1e6} | more
    print("  " + ", ".join(f"{key} {value}" for key, value in row.items()), flush=True)
    return row


def _input(sizes: Sizes, folder: Path) -> list[Row]:
    """Counting and hashing the file; tokenising, hashing, sorting and batching it, which every rank does."""
    chance, path = random.Random(0), folder / "prompts.jsonl"
    with path.open("w", encoding="utf-8") as file:
        for number in range(sizes.lines):
            words = chance.choices(WORDS, k=int(PROMPT_TOKENS * 0.8))
            file.write(json.dumps({"id": f"p{number}", "prompt": " ".join(words)}) + "\n")
    books = d5p4.load("books", "cpu")  # for its tokenizer; its rows would be too short for such answers
    model: Any = SimpleNamespace(
        tokenizer=books.tokenizer, head=books.head, mask_id=books.mask_id, max_length=4096, carry_over=False,
        default_order="confidence", generation_defaults={},
    )  # fmt: skip
    settings = Settings.make(model, k=K, w=4, gen_length=ANSWER_TOKENS)
    scan, lines = _timed(lambda: PromptFile(path))
    work: list[Work] = []

    def planned() -> float:
        nonlocal work
        seconds, work = _timed(lambda: list(plan_work(lines, model, settings, True, bad_first=False)))
        return seconds

    plain = planned()
    tokens = sum(len(item.request.ids) for each in work for item in each.items) / sizes.lines
    model.tokenizer = Tokenizer(books.tokenizer.backend, chat_template=CHAT, mask_id=books.mask_id)
    chat = planned()
    return [
        _row("count and hash the input", scan, sizes.lines, bytes=path.stat().st_size / sizes.lines),
        _row("plan a prompt (tokenise, hash, sort, batch)", plain, sizes.lines, tokens=tokens),
        _row("plan a prompt with a chat template", chat, sizes.lines),
    ]


def _parts(sizes: Sizes, folder: Path) -> list[Row]:
    """Lines of many ranks, taken from the counter in turn: written, found again, put in order."""
    text = ("the answer is " * 100)[: round(ANSWER_TOKENS * LETTERS_A_TOKEN)]
    fields = {"id": "p", "prompt": "a" * round(PROMPT_TOKENS * LETTERS_A_TOKEN), "answers": [text] * K}
    known = {"score": [-0.123456] * K, "distance": 0.1, "distinct": K, "logdet": -1.0, "rows": 9000, "seed": 0}
    parts = Parts(folder / "answers.jsonl")
    parts.folder.mkdir()

    def line(number: int) -> bytes:
        return json_line(fields | {"line": number + 1} | known)

    size = len(line(0))
    appended, _ = _timed(
        lambda: [append(parts.folder / "trial", [line(i) for i in range(5)]) for _ in range(sizes.appends)]
    )
    batches = itertools.batched(range(sizes.kept), 5) if hasattr(itertools, "batched") else (
        range(i, min(i + 5, sizes.kept)) for i in range(0, sizes.kept, 5)
    )  # fmt: skip
    for number, batch in enumerate(batches):
        with parts.file(1, number % sizes.parts).open("ab") as file:
            file.writelines(map(line, batch))
    read, found = _timed(lambda: parts.read(lambda: None))
    merge, _ = _timed(lambda: parts.merge(found.places, lambda: None))
    tracemalloc.start()
    held = parts.read(lambda: None)
    memory = tracemalloc.get_traced_memory()[0] / len(held.places)
    tracemalloc.stop()
    return [
        _row("append a batch of 5 lines and wait for the disk", appended, sizes.appends, bytes=5 * size),
        _row(f"find a line in {sizes.parts} parts", read, sizes.kept, bytes=size, memory=memory),
        _row(f"merge a line of {sizes.parts} parts", merge, sizes.kept, bytes=size),
    ]


def _store(sizes: Sizes) -> list[Row]:
    """One client of torchrun's kind of store; and the lines an earlier start finished, as they are told to a rank."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30))
    client = dist.TCPStore("127.0.0.1", server.port, timeout=timedelta(seconds=30))
    asked, _ = _timed(lambda: [client.add("count", 1) for _ in range(sizes.requests)])
    scattered = random.Random(0).sample(range(1, sizes.finished + 1), sizes.finished // 2)  # the largest there can be
    told = pickle.dumps(Done(sizes.finished, scattered))

    def tell() -> None:
        client.set("finished", told)
        pickle.loads(client.get("finished"))

    seconds, _ = _timed(tell)
    return [
        _row("ask the store", asked, sizes.requests),
        _row("tell a rank which lines are finished", seconds, sizes.finished, bytes=len(told)),
    ]
