"""The tasks of the paper's experiments: prompts, reference answers, and the grader that judges answers.

Questions ask without their choices, the best reference comes first, and the data come from the hub unless a path is
given. `countdown` makes its own puzzles (held out). `books` continues paragraphs of a text: the prompt is the first
sentence (two if it is short), and the reference the rest of the paragraph.

Records of questions have the layout of the hub or of the authors' files.

The task books reads documents, and so do measurements on real text (`windows`). A text file has one paragraph per
line, and a line `<|endoftext|>` between documents. A JSON or parquet file has one document in the field `text` of each
record. A folder that `python -m d5p4_lab train corpus` made has the documents as tokens.
"""

import csv
import gzip
import hashlib
import io
import json
import lzma
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from d5p4.errors import D5P4Error
from d5p4.eval.countdown import WINDOW
from d5p4.models.load import HUB_ID
from d5p4.options import whole_number

from ..puzzles import problems
from ..train.corpus import END_TEXT, load, normalise

Gold = str | tuple[str, ...] | None  # the right answer in the form that the task's grader needs


@dataclass(frozen=True)
class Example:
    """A prompt to be answered, and what is known about good answers."""

    id: str  # names the example in its task; it is the same for every limit and seed
    prompt: str
    references: tuple[str, ...]  # texts that a good answer resembles, best first; may be empty
    gold: Gold = None


@dataclass(frozen=True)
class Task:
    """The examples of a task, in the order in which they are to be answered."""

    name: str
    examples: list[Example]
    grader: str | None  # a name in `eval.graders.GRADERS`; None if answers are only compared with the references
    source: str  # the path or hub id of the data, as the caller wrote it

    def __len__(self) -> int:
        return len(self.examples)


def shuffled(count: int, seed: int, purpose: str) -> list[int]:
    """Return the numbers 0..count-1 in an order that the seed determines. It is the same order on every machine."""
    return sorted(range(count), key=lambda i: hashlib.sha256(f"{purpose} {seed} {i}".encode()).digest())


# ---- questions with known answers


Question = tuple[str, tuple[str, ...], Gold]  # a question, its correct answers, the best first, and gold


def _truthfulqa(record: dict[str, Any]) -> Question:
    """Read a record of the hub (`correct_answers` is a list) or of the authors' CSV (correct answers joined by `;`)."""
    named = {key.lower().replace(" ", "_"): value for key, value in record.items() if isinstance(key, str)}
    correct = named["correct_answers"]
    listed = [named["best_answer"], *(correct.split(";") if isinstance(correct, str) else correct)]
    answers = dict.fromkeys(answer.strip() for answer in listed if answer.strip())  # `correct` often contains `best`
    return named["question"], tuple(answers), None


def choices_of(record: dict[str, Any]) -> tuple[str, dict[str, str], str]:
    """Return the question, the texts of the choices by label, and the right label. A record of the hub has the lists
    `label` and `text` in `choices`; in AI2's files, `question` has a `stem` and a list of choices."""
    question, key = record["question"], record["answerKey"]
    if isinstance(question, dict):
        question, choices = question["stem"], {one["label"]: one["text"] for one in question["choices"]}
    else:
        choices = dict(zip(record["choices"]["label"], record["choices"]["text"], strict=True))
    if key not in choices:
        raise D5P4Error(f"answerKey is {key!r}, but the choices are {', '.join(choices)}")
    return question, choices, key


def _choice(record: dict[str, Any]) -> Question:
    question, choices, key = choices_of(record)
    return question, (choices[key],), (choices[key],)


def _gsm8k(record: dict[str, Any]) -> Question:
    return record["question"], (record["answer"],), record["answer"]


@dataclass(frozen=True)
class Source:
    """A data set of questions in the layout of the hub: where its files are and how to read them."""

    hub_id: str
    split: str  # the split that the paper uses
    parse: Callable[[dict[str, Any]], Question]
    grader: str | None
    folder: str = "data"  # the subfolder that may contain the files
    prompt: str = "{question}"


SOURCES = {
    "truthfulqa": Source("truthfulqa/truthful_qa", "validation", _truthfulqa, None, "generation"),
    "arc-challenge": Source("allenai/ai2_arc", "test", _choice, "exact", "ARC-Challenge"),
    "commonsenseqa": Source("tau/commonsense_qa", "validation", _choice, "exact"),
    "gsm8k": Source("openai/gsm8k", "test", _gsm8k, "gsm8k", "main", "Question: {question}\nAnswer:"),
}


def _load_questions(name: str, path: str | Path | None, limit: int | None, shots: int) -> Task:
    """Load questions in the order of their file or, with a limit, the first questions of a seeded shuffle."""
    source = SOURCES[name]
    given = source.hub_id if path is None else path
    asked = list(_read(source, given).items())
    order = range(len(asked)) if limit is None else shuffled(len(asked), SEED, "limit")[:limit]
    solved = list(_read(replace(source, split="train"), given).values()) if shots else []
    before = [solved[i] for i in shuffled(len(solved), SEED, "shots")[:shots]]
    opening = "".join(f"{source.prompt.replace('{question}', text)} {answers[0]}\n\n" for text, answers, _ in before)
    examples = [
        Example(identity, opening + source.prompt.replace("{question}", text), correct, gold)
        for identity, (text, correct, gold) in (asked[i] for i in order)
    ]
    return Task(name, examples, source.grader, str(given))


def _read(source: Source, path: str | Path) -> dict[str, Question]:
    """Return {id: question} of a split. The id is the record's field `id` or, if ids are not unique, its number."""
    files = locate(path, source.split, folder=source.folder)
    records = [(f"{file} record {i}", record) for file in files for i, record in enumerate(read_records(file), 1)]
    if not records:
        raise D5P4Error(f"{path} has no question")
    own = [record.get("id") for _, record in records]
    ids = own if None not in own and len(set(map(str, own))) == len(own) else range(len(own))
    return {str(name): _parsed(source, *record) for name, record in zip(ids, records, strict=True)}


def _parsed(source: Source, place: str, record: dict[str, Any]) -> Question:
    try:
        question = source.parse(record)
        texts = (question[0], *question[1])
        if not all(isinstance(text, str) and text.strip() for text in texts) or len(texts) < 2:
            raise D5P4Error("the question or its answer is empty or not text")
        "".join(texts).encode()  # raises an error for half a surrogate pair, which no tokenizer can read
        return question
    except KeyError as missing:
        raise D5P4Error(f"{place} has no field {missing}; its fields are {', '.join(map(str, record))}") from None
    except (D5P4Error, TypeError, AttributeError, ValueError) as reason:
        raise D5P4Error(f"{place} cannot be read: {reason}") from None


# ---- paragraphs to be continued

PARAGRAPH, LONGER = 60, 140  # a paragraph to be continued has 60 to 60 + 140 words
PROMPT = (8, 40)  # a prompt has 8 to 40 words: one sentence, or two if the first has fewer than 8
CONTINUATION = 30  # the rest of the paragraph, after the prompt, has at least this many words

_STOP = re.compile(
    r"(?<![.!?\u2026])[.!?\u2026]+[\"'\u201d\u2019)\]*_]*(?P<gap>\s+)[\"'\u201c\u2018(\[*_]*(?P<next>\w)"
)
_SHORT = "Mr Mrs Ms Messrs Mme Mlle Dr St Rev Hon Prof Capt Col Gen Lt Lieut Sgt Maj Gov Sen Jr Sr Esq Vol Chap vs viz"
_ABBREVIATION = re.compile(rf"\b(?:{'|'.join(_SHORT.split())}|[A-HJ-Z])\.$")


def sentences(text: str) -> list[str]:
    """Split a paragraph into sentences, without the white space between them.

    A sentence ends after `.`, `!`, `?` or `…` and any closing quotes and brackets, if white space and a capital letter
    follow, but not after an abbreviation such as `Mr.` or an initial (any single capital letter but I).
    """
    ended, start = [], 0
    for stop in _STOP.finditer(text):
        end_of_word = text[max(start, stop.start() - 8) : stop.start() + 1]  # long enough for any abbreviation
        if stop["next"].isupper() and not _ABBREVIATION.search(end_of_word):
            ended.append(text[start : stop.start("gap")])
            start = stop.end("gap")
    return [*ended, text[start:]] if text[start:].strip() else ended


def continuation(paragraph: str) -> tuple[str, str] | None:
    """Split a paragraph of fitting length into its first sentence (two if it is short) and the rest, or return None."""
    paragraph = paragraph.strip()
    if not PARAGRAPH <= len(paragraph.split()) <= PARAGRAPH + LONGER:
        return None
    cut = 0
    for sentence in sentences(paragraph)[:2]:
        cut = paragraph.index(sentence, cut) + len(sentence)
        if len(paragraph[:cut].split()) >= PROMPT[0]:
            break
    prompt, rest = paragraph[:cut], paragraph[cut:].lstrip()
    if not PROMPT[0] <= len(prompt.split()) <= PROMPT[1] or len(rest.split()) < CONTINUATION:
        return None
    return prompt, rest


def read_documents(path: str | Path) -> list[str]:
    documents = list(each_document(path))
    if not documents:
        raise D5P4Error(f"{path} holds no text")
    return documents


def each_document(path: str | Path) -> Iterator[str]:
    """Yield the documents of a file, a folder (its validation split) or a prepared corpus (its held-out texts)."""
    folder = Path(path).expanduser()
    if (folder / "corpus.json").is_file():
        corpus = load(folder)
        ends = np.flatnonzero(corpus.val == corpus.tokenizer.token_to_id(END_TEXT))
        pieces = zip([0, *(ends + 1)], [*ends, len(corpus.val)], strict=True)
        decode = corpus.tokenizer.decode
        yield from (decode(corpus.val[a:b].tolist(), skip_special_tokens=False) for a, b in pieces)
    else:
        for file in locate(path, "validation", suffixes=TEXT_FILES):
            yield from _documents(file)


def _documents(file: Path) -> Iterator[str]:
    if suffix(file) in RECORDS:
        records = _parquet(file, ["text"]) if suffix(file) == ".parquet" else iter(read_records(file))
        for i, record in enumerate(records, 1):
            if not isinstance(text := record.get("text"), str):
                raise D5P4Error(f"{file} record {i} has no text in its field 'text'")
            yield from filter(None, [normalise(text)])
    else:
        texts = re.split(rf"^[^\S\n]*{re.escape(END_TEXT)}[^\S\n]*$", read_text(file), flags=re.MULTILINE)
        yield from filter(None, (normalise(str(text)) for text in texts))


def _continuations(books: Sequence[str]) -> list[Example]:
    """Books take turns, so the first n examples, for any n, come evenly from the books. Books and the paragraphs of
    each book are shuffled."""
    by_book = [
        [
            Example(f"{b}.{p}", halves[0], (halves[1],))
            for p, paragraph in enumerate(book.split("\n"))
            if (halves := continuation(paragraph)) is not None
        ]
        for b, book in enumerate(books)
    ]
    order = [by_book[i] for i in shuffled(len(by_book), SEED, "groups")]
    rows = [[examples[i] for i in shuffled(len(examples), SEED, "items")] for examples in order]
    return [example for turn in zip_longest(*rows) for example in turn if example is not None]


# ---- loading a task by its name

TASKS = (*SOURCES, "countdown", "books")
DATA = (*SOURCES, "text", "books")  # whose data the caller may name; `text` stands for measurements on real text
SEED = 0  # of all shuffles and of the problems of countdown
COUNTDOWN = 500  # the number of countdown problems if no limit is given


def load_task(name: str, path: str | Path | None = None, *, split: str | None = None, limit: int | None = None) -> Task:
    """Load a task by its name. The same arguments give the same examples on every machine.

    path        a file (JSON lines, parquet, text; plain, .xz or .gz), a folder with such files, or a hub id; by default
                a task of questions takes its data set from the hub
    split       for countdown: how many numbers a problem has, "3", "4" (the default) or "5"; for gsm8k: how many solved
                problems of the training split stand before each problem
    limit       the largest number of examples. A smaller limit gives the first examples of the same list. With a limit,
                questions are shuffled, as the paper does for GSM8K
    """
    if name not in TASKS:
        raise D5P4Error(f"there is no task {name!r}: choose one of {', '.join(TASKS)}")
    if limit is not None:
        whole_number("limit", limit)
    if split is not None and name not in ("countdown", "gsm8k"):
        raise D5P4Error(f"split={split!r} applies only to countdown and gsm8k, not to {name}: leave it out")
    if name in SOURCES:
        return _load_questions(name, path, limit, int(split or 0))
    if name == "countdown":
        if path is not None:
            raise D5P4Error(f"countdown makes its own problems: leave out the path {str(path)!r}")
        if split is not None and split not in map(str, WINDOW):
            numbers = ", ".join(map(str, WINDOW))
            raise D5P4Error(f"split={split!r} must be how many numbers a problem has, one of {numbers}")
        prompts = [problem.prompt for problem in problems(limit or COUNTDOWN, int(split or 4), SEED)]
        examples = [Example(prompt, prompt, (), prompt) for prompt in prompts]
        return Task(name, examples, name, "d5p4.eval.countdown")
    if path is None:
        raise D5P4Error(f"{name} needs the path of a text file or of a corpus (python -m d5p4_lab train corpus)")
    examples = _continuations(read_documents(path))
    if not examples:
        raise D5P4Error(f"{path} has no paragraph to be continued; it needs a line of {PARAGRAPH} words or more")
    return Task(name, examples[:limit], None, str(path))


# ---- the files of a data set, in a folder or on the hub, plain or compressed

RECORDS = (".jsonl", ".json", ".csv", ".parquet")
TEXT_FILES = (".txt", ".md", ".jsonl", ".json", ".parquet")  # in files of records, the field `text` contains the text
SPLITS = {"train": ("train",), "validation": ("validation", "valid", "val", "dev"), "test": ("test",)}

_OPENERS = {".xz": lzma.open, ".gz": gzip.open}
_SHARD = re.compile(r"-\d{5}-of-\d{5}\b")


def locate(path: str | Path, split: str, *, folder: str = "data", suffixes: Sequence[str] = RECORDS) -> list[Path]:
    """Return the files of a split. `path` is a file, a folder or a hub id. The subfolder `folder` is searched first.

    A file belongs to a split if the file's name contains the split's name as a word: `dev_rand_split.jsonl` belongs to
    `validation`. If there are no such files, the files without a split in the name are returned.
    """
    here = Path(path).expanduser()
    if here.is_file():
        return [here]
    if not here.exists():
        # A name with the suffix of a data file is more likely a wrong path than the id of a data set.
        if isinstance(path, Path) or not HUB_ID.fullmatch(path) or suffix(here) in (*RECORDS, *TEXT_FILES):
            raise D5P4Error(f"{str(path)!r} does not exist: give a file, a folder or a hub id of the form org/name")
        here = _download(path, [f"*{name}*{ending}" for name in SPLITS[split] for ending in suffixes])
    # The subfolder comes first, because the folder itself may also contain files that describe the data.
    for place in (here / folder, here):
        files = [file for file in sorted(place.glob("*")) if file.is_file() and suffix(file) in suffixes]
        words = {file: set(re.split(r"[^a-z0-9]+", file.name.lower())) for file in files}
        every_name = {word for names in SPLITS.values() for word in names}
        chosen = [file for file in files if words[file] & set(SPLITS[split])]
        chosen = chosen or [file for file in files if not words[file] & every_name]
        if len(chosen) > 1 and not all(_SHARD.search(file.name) for file in chosen):
            listed = ", ".join(file.name for file in chosen)
            raise D5P4Error(f"{place} has several files that could be the {split} split ({listed}): give one path")
        if chosen:
            return chosen
    raise D5P4Error(f"{path} has no file of the {split} split ({', '.join(suffixes)}; also with .xz or .gz)")


def suffix(file: Path) -> str:
    return (Path(file.stem) if file.suffix.lower() in _OPENERS else file).suffix.lower()


def read_text(file: Path) -> str:
    opener: Any = _OPENERS.get(file.suffix.lower(), open)
    try:
        with opener(file, "rb") as stream:
            return stream.read().decode("utf-8-sig")
    except UnicodeDecodeError as reason:
        raise D5P4Error(f"{file} is not UTF-8 text: byte {reason.start} cannot be read") from None
    except (OSError, EOFError, lzma.LZMAError, zlib.error) as reason:
        raise D5P4Error(f"{file} cannot be read: {reason}") from reason


def read_records(file: Path) -> list[dict[str, Any]]:
    """Return the records of a file: JSON lines, a JSON list, CSV with a header line, or parquet."""
    if suffix(file) == ".parquet":
        return list(_parquet(file))
    text = read_text(file)
    if suffix(file) == ".csv":
        return list(csv.DictReader(io.StringIO(text, newline="")))
    if suffix(file) == ".json" and text.lstrip().startswith("["):
        entries = [(f"{file} entry {i}", entry) for i, entry in enumerate(_json(str(file), text), 1)]
    else:  # str.splitlines would also split at U+2028, which a JSON string may contain
        lines = [(f"{file} line {i}", line) for i, line in enumerate(text.split("\n"), 1) if line.strip()]
        entries = [(place, _json(place, line)) for place, line in lines]
    for place, entry in entries:
        if not isinstance(entry, dict):
            raise D5P4Error(f"{place} is not a JSON object")
    return [entry for _, entry in entries]


def _json(place: str, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as reason:
        raise D5P4Error(f"{place} is not valid JSON: {reason}") from None


def _parquet(file: Path, columns: Sequence[str] | None = None) -> Iterator[dict[str, Any]]:
    """Yield records, with these columns or all, batch by batch."""
    try:
        from pyarrow import ArrowException, parquet
    except ImportError as missing:
        raise D5P4Error(f"{file} is a parquet file; to read it, install pyarrow: pip install pyarrow") from missing
    try:
        with parquet.ParquetFile(file) as table:
            own = None if columns is None else [name for name in columns if name in table.schema_arrow.names]
            for batch in table.iter_batches(columns=own):
                yield from batch.to_pylist()
    except (OSError, ArrowException) as reason:
        raise D5P4Error(f"{file} cannot be read as parquet: {reason}") from reason


def _download(hub_id: str, patterns: Sequence[str]) -> Path:
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(hub_id, repo_type="dataset", allow_patterns=list(patterns)))
    except Exception as reason:  # the hub client raises many unrelated exceptions
        first = (str(reason).strip() or "no reason given").splitlines()[0].split(". ")[0].rstrip(".")
        raise D5P4Error(
            f"{hub_id!r} is not a file or folder on this machine, and fetching it from the hub failed "
            f"({type(reason).__name__}: {first}); give the path of its files instead"
        ) from reason
