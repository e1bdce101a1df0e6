"""Conversations that a causal chat model writes: the data from which smol learns.

The teacher samples at temperature 1 from its whole vocabulary, so its probabilities are exact targets. A row starts
with one of these prefixes: the chat template up to the user's turn, the same with the first words of a question, a
question of GSM8K's training set, or plain text of a book without a template. The teacher writes the rest. Only
questions may be drawn at a lower temperature than 1.
"""

from __future__ import annotations

import hashlib
import json
import lzma
import random
import re
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from d5p4.errors import D5P4Error
from d5p4.models.tokenizer import Tokenizer

END, START, MASK = 2, 1, 7  # ids of SmolLM2's vocabulary: <|im_end|>, <|im_start|>, and one that no text has
SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
OPENING = f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n"
TURN = "\n<|im_start|>assistant\n"
LENGTH = 320  # tokens per row
ROWS, BATCH = 73_728, 3_072  # rows that the teacher writes, and how many at the same time
LONGEST_QUESTION = 96  # in tokens
HELD_OUT = 64  # one question in so many is held out, by a hash of its text
SHARES = {"free": 0.36, "stem": 0.44, "gsm8k": 0.08, "book": 0.12}  # of the rows
STEMS = """What is|What are|What does|What happens if you|What would happen if|What is the best|What is a good|Who is
Who was|Who wrote|Who invented|Why do|Why does|Why is|Why are|When did|When is|Where is|Where can I|Where do
Which|How do I|How does|How can I|How many|How old|How far|Is it true that|Is there|Are|Do|Does|Can|Could
Should I|Would|Will|Name|Name a|Name three|List|Give me|Suggest|Recommend|Describe|Explain|Tell me about
Tell me a story about|Write a short story about|Write a poem about|Write a letter to|Write a sentence with
Write a slogan for|Write a Python function that|Write a song about|Write a dialogue between
Write an email about|Invent|Imagine|Compare|Define|Translate|Rewrite|Summarize|Complete the sentence:
Correct the sentence:|In which|In the story of|I feel|I want to|I need|My friend|My dog|Help me|Please
Create|Design|Plan|Find|Make|The|If|A|On""".replace("\n", "|").split("|")


class Data(NamedTuple):
    """Rows of tokens [n, T] uint16. `start` [n] is the first position that the model learns, `end` [n] is the position
    of the end token, or T if the row has none. `held_out` [n] is True for held-out rows."""

    rows: np.ndarray
    start: np.ndarray
    end: np.ndarray
    held_out: np.ndarray

    @property
    def tokens(self) -> int:
        """The number of tokens of the answers."""
        return int((np.minimum(self.end.astype(np.int64) + 1, self.rows.shape[1]) - self.start).sum())

    def part(self, chosen: np.ndarray) -> Data:
        return Data(self.rows[chosen], self.start[chosen], self.end[chosen], self.held_out[chosen])

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.with_suffix(".half").open("wb") as file:
            np.savez_compressed(file, **self._asdict())
        path.with_suffix(".half").replace(path)

    @classmethod
    def read(cls, path: Path) -> Data:
        with np.load(path) as file:
            return cls(*(file[name] for name in cls._fields))


class Prefix(NamedTuple):
    ids: list[int]
    temperature: float  # of the question
    phase: int  # what comes next: see `QUESTION` to `PLAIN`


QUESTION, ANSWER, ENDED, PLAIN = range(4)  # the phases of a row


def prefixes(
    encode: Callable[[str], list[int]], words: Sequence[str], texts: Path | None, count: int, seed: int, length: int
) -> list[Prefix]:
    """Return `count` prefixes in random order. `texts` holds gsm8k/train.jsonl and books/train.txt.xz, or is None."""
    draw = random.Random(seed)
    opening = encode(OPENING)
    counts = {name: round(share * count) for name, share in SHARES.items()}
    made: list[Prefix] = []
    if texts is not None:
        lines = (texts / "gsm8k" / "train.jsonl").read_text(encoding="utf-8").splitlines()
        for line in draw.sample(lines, min(counts["gsm8k"], len(lines))):
            ids = [*encode(OPENING + json.loads(line)["question"] + "<|im_end|>" + TURN)]
            if len(ids) <= length // 2:
                made.append(Prefix(ids, 1.0, ANSWER))
        for paragraph in _paragraphs(texts / "books" / "train.txt.xz", counts["book"], draw):
            made.append(Prefix(encode(paragraph)[: draw.randint(12, 64)], 1.0, PLAIN))
    for _ in range(counts["stem"]):
        text = draw.choice(STEMS) + (" " + draw.choice(words) if draw.random() < 0.6 else "")
        made.append(Prefix(opening + encode(text), draw.choice((0.7, 0.85, 1.0)), QUESTION))
    while len(made) < count:
        made.append(Prefix(opening, draw.choice((0.7, 0.85, 1.0)), QUESTION))
    draw.shuffle(made)
    return made[:count]


def _paragraphs(path: Path, count: int, draw: random.Random) -> Iterator[str]:
    with lzma.open(path, "rt", encoding="utf-8") as file:
        paragraphs = [line.strip() for line in file if len(line) > 300]
    yield from draw.sample(paragraphs, min(count, len(paragraphs)))


class Writer:
    """The teacher writes rows [batch, length] behind prefixes. On CUDA, each step is a recorded graph."""

    def __init__(self, teacher: Any, turn: list[int], length: int, batch: int) -> None:
        device = teacher.table.device
        self.teacher, self.length, self.device = teacher, length, device
        self.turn = torch.tensor(turn, device=device)  # what follows a question
        self.kept = teacher.new_cache(batch, length)
        self.rows = torch.zeros(batch, length, dtype=torch.long, device=device)
        self.known, self.phase, self.wait = torch.zeros(3, batch, dtype=torch.long, device=device)
        self.temperature = torch.ones(batch, device=device)
        self.at = torch.zeros(1, dtype=torch.long, device=device)
        self.seen = [
            min(length, -(-(step + 1) // 64) * 64) for step in range(length - 1)
        ]  # positions that a step reads
        self.graphs: dict[int, Any] = {}

    @torch.no_grad()
    def write(self, given: Sequence[Prefix]) -> np.ndarray:
        self.start(given)
        if self.device.type == "cuda" and not self.graphs:
            for seen in sorted(set(self.seen)):
                self.step(seen)
                torch.cuda.synchronize()
                self.graphs[seen] = torch.cuda.CUDAGraph()
                with torch.cuda.graph(self.graphs[seen]):
                    self.step(seen)
            self.start(given)
        for seen in self.seen:
            if self.graphs:
                self.graphs[seen].replay()
            else:
                self.step(seen)
        return self.rows.to("cpu", torch.int32).numpy().astype(np.uint16)

    def start(self, given: Sequence[Prefix]) -> None:
        table = torch.zeros(self.rows.shape, dtype=torch.long)
        for row, prefix in zip(table, given, strict=True):
            row[: len(prefix.ids)] = torch.tensor(prefix.ids)
        self.rows.copy_(table)
        self.known.copy_(torch.tensor([len(prefix.ids) for prefix in given]))
        self.phase.copy_(torch.tensor([prefix.phase for prefix in given]))
        self.temperature.copy_(torch.tensor([prefix.temperature for prefix in given]))
        self.wait.zero_()  # the number of tokens of `turn` that are still to be written
        self.at.zero_()

    def step(self, seen: int) -> None:
        at, phase, following = self.at, self.phase, (self.at + 1).clamp(max=self.length - 1)
        mask = (torch.arange(seen, device=self.device) <= at)[None, None, None]
        kept = [(key[:, :, :seen], value[:, :, :seen]) for key, value in self.kept]
        logits = self.teacher.logits(self.teacher(self.rows.index_select(1, at), at, mask, kept)[:, 0])
        logits[:, MASK] = -torch.inf
        scale = torch.where(phase == QUESTION, self.temperature, 1.0)[:, None]
        drawn = (logits / scale - torch.empty_like(logits).exponential_().log()).argmax(-1)
        drawn = torch.where(phase == ENDED, END, drawn)
        turning, inside = self.wait > 0, at + 1 < self.known
        place = (len(self.turn) - self.wait).clamp(max=len(self.turn) - 1)
        drawn = torch.where(turning, self.turn[place], drawn)
        new = torch.where(inside, self.rows.index_select(1, following)[:, 0], drawn)
        ends = (new == END) & ~turning & ~inside
        self.wait += torch.where(ends & (phase == QUESTION), len(self.turn), 0) - turning.long()
        phase += (ends & (phase <= ANSWER)).long()
        self.rows.index_copy_(1, following, new[:, None])
        at += 1


def sample(
    teacher: Any, given: Sequence[Prefix], turn: list[int], length: int, batch: int, say: Callable[[str], None]
) -> np.ndarray:
    """Return the rows [n, length] that the teacher writes behind the prefixes, in whole batches."""
    writer, rows, clock = Writer(teacher, turn, length, batch), [], time.perf_counter()
    for first in range(0, len(given) - batch + 1, batch):
        rows.append(writer.write(given[first : first + batch]))
        say(f"{first + batch:,} rows after {time.perf_counter() - clock:.0f} s")
    return np.concatenate(rows)


def sift(
    rows: np.ndarray, given: Sequence[Prefix], opening: int, turn: int, decode: Callable[[list[int]], str]
) -> Data:
    """Keep rows of one question and one answer, or of plain text, without special tokens, each question once."""
    length = rows.shape[1]
    kept, seen = [], set()
    for row, prefix in zip(rows, given, strict=False):
        ids = row.tolist()
        if prefix.phase == PLAIN:
            start, end, text, inner = len(prefix.ids), length, decode(prefix.ids), ids[len(prefix.ids) :] + [3]
            if END in inner:
                continue
        else:
            if END not in ids[opening:]:
                continue
            asked = ids.index(END, opening)
            start = asked + 1 + turn
            end = ids.index(END, start) if END in ids[start:] else length
            text, inner = decode(ids[opening:asked]).strip(), ids[opening:asked] + ids[start:end]
            if not 3 <= asked - opening <= LONGEST_QUESTION + (prefix.phase == ANSWER) * length or end - start < 2:
                continue
        key = " ".join(text.lower().split())
        if min(inner) < 3 or key in seen:  # ids below 3 are special tokens
            continue
        seen.add(key)
        held_out = int(hashlib.sha256(key.encode()).hexdigest(), 16) % HELD_OUT == 0
        kept.append((row, start, end, held_out))
    if not kept:
        raise D5P4Error("the teacher wrote no row that can be kept")
    columns = list(zip(*kept, strict=True))
    starts, ends = (np.array(column, np.uint16) for column in columns[1:3])
    return Data(np.stack(columns[0]), starts, ends, np.array(columns[3]))


def make_data(teacher: Any, tokenizer: Tokenizer, texts: Path | None, seed: int, say: Callable[[str], None]) -> Data:
    """Let the teacher write the data."""
    vocabulary = tokenizer.backend.get_vocab()
    words = sorted(text[1:] for text in vocabulary if re.fullmatch("\u0120[A-Za-z]{4,}", text))  # \u0120 is a space
    given = prefixes(tokenizer.encode, words, texts, ROWS, seed, LENGTH)
    turn, opening = (tokenizer.encode(text) for text in (TURN, OPENING))
    torch.manual_seed(seed)
    rows = sample(teacher, given, turn, LENGTH, BATCH, say)
    return sift(rows, given, len(opening), len(turn), tokenizer.decode)


def toy_data(teacher: Any) -> Data:
    """Return rows of a toy teacher behind random ids."""
    draw, kinds = random.Random(0), (QUESTION, ANSWER, PLAIN)
    given = [Prefix([3, 4, *(draw.randint(8, 63) for _ in range(9))], 1.0, draw.choice(kinds)) for _ in range(1024)]
    given = [p._replace(ids=[*p.ids, END, 5, 6]) if p.phase == ANSWER else p for p in given]
    torch.manual_seed(0)
    rows = sample(teacher, given, [5, 6], 64, 512, lambda line: None)
    return sift(rows, given, 2, 2, str)
