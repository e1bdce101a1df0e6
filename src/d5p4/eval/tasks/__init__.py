"""Tasks: what is asked, what a good answer looks like, and who judges it.

| name          | prompt                             | references                        | grader    | without a path  |
|---------------|------------------------------------|-----------------------------------|-----------|-----------------|
| truthfulqa    | the question                       | the best answer, all correct ones | none      | hub, validation |
| arc-challenge | the question, without its choices  | the text of the right choice      | exact     | hub, test       |
| commonsenseqa | the question, without its choices  | the text of the right choice      | exact     | hub, validation |
| gsm8k         | `Question: …\\nAnswer:`            | the whole solution                | gsm8k     | hub, test       |
| text          | none                               | a piece of a document             | none      | an error        |
| countdown     | `86,28,13,31:96`, held out         | none                              | countdown | made here       |
| books         | the first sentences of a paragraph | the rest of the paragraph         | none      | an error        |
"""

from __future__ import annotations

from pathlib import Path

from ...errors import D5P4Error
from ..countdown import WINDOW, problems
from .prose import PARAGRAPH, PIECE, continuation_examples, piece_examples, read_documents
from .questions import SOURCES, load_questions
from .task import Example, Task

__all__ = ["TASKS", "Example", "Task", "load_task"]

TASKS = (*SOURCES, "text", "countdown", "books")
COUNTDOWN = 500  # problems without a limit


def load_task(
    name: str,
    path: str | Path | None = None,
    *,
    split: str | None = None,
    limit: int | None = None,
    shots: int = 0,
    seed: int = 0,
    shots_path: str | Path | None = None,
    words: int | None = None,
) -> Task:
    """A task by its name. The same arguments give the same examples everywhere.

    path        a file (JSON lines, CSV, parquet, text; plain, .xz or .gz), a folder with such files, or a hub id;
                without it the questions' own hub id is fetched
    split       which files of a folder or of the hub: train, validation, test; by default the paper's.
                Of countdown: how many numbers, "3", "4" (the default) or "5"
    limit       at most so many examples, and a smaller limit gives the beginning of the same list. Questions then come
                in a shuffle of the seed, GSM8K as the paper has it and the others alike (without a limit they keep the
                order of the file); text and books take turns among their documents, always
    shots       of questions: so many solved examples before each, never itself, drawn by a shuffle of the seed from the
                same file, or from `shots_path` (of a folder: its train split)
    words       of text: words of a piece, 200; of books: the fewest words of a paragraph, 60 (it has up to 140 more)
    """
    if name not in TASKS:
        raise D5P4Error(f"there is no task {name!r}: choose one of {', '.join(TASKS)}")
    for option, value, least in (("limit", limit, 1), ("shots", shots, 0), ("seed", seed, 0), ("words", words, 1)):
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < least):
            raise D5P4Error(f"{option}={value!r} must be a whole number of at least {least}")
    if name not in SOURCES and (shots or shots_path is not None):
        raise D5P4Error(f"{name} has no solved examples to show: leave shots={shots} and shots_path out")
    if shots_path is not None and not shots:
        raise D5P4Error(f"shots_path={str(shots_path)!r} needs shots, the number of examples to take from it")
    if words is not None and name not in ("text", "books"):
        raise D5P4Error(f"words={words} is for text and books, not for {name}")
    if name in SOURCES:
        return load_questions(name, path, split, limit, shots, seed, shots_path)
    if name == "countdown":
        return _countdown(path, split, limit, seed)
    if path is None:
        raise D5P4Error(f"{name} needs the path of a text file or of a corpus (python -m d5p4_lab train corpus)")
    documents = read_documents(path, split)
    if name == "text":
        examples = piece_examples(documents, words or PIECE, seed)
    else:
        examples = continuation_examples(documents, words or PARAGRAPH, seed)
    if not examples:
        raise D5P4Error(f"{path} has no paragraph to be continued: one is a line of {words or PARAGRAPH} words or more")
    return Task(name, examples[:limit], None, str(path))


def _countdown(path: str | Path | None, split: str | None, limit: int | None, seed: int) -> Task:
    if path is not None:
        raise D5P4Error(f"countdown makes its own problems: leave out the path {str(path)!r}")
    if split is not None and split not in map(str, WINDOW):
        raise D5P4Error(f"split={split!r}: of countdown it is how many numbers, one of {', '.join(map(str, WINDOW))}")
    found = problems(limit or COUNTDOWN, int(split or 4), seed)
    return Task(
        "countdown", [Example(p.prompt, p.prompt, (), p.prompt) for p in found], "countdown", "d5p4.eval.countdown"
    )
