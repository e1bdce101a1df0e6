"""Questions with known answers: TruthfulQA, ARC-Challenge, CommonsenseQA, GSM8K; records of their files to examples.

Zero-shot the prompt is the raw question, of GSM8K `Question: …\\nAnswer:`. With shots it is as many solved examples and
the question, all as `Question: …\\nAnswer: …`, with a blank line between two.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from ...errors import D5P4Error
from .files import locate, read_records
from .task import Example, Task, shuffled


class Question(NamedTuple):
    """A question of a file."""

    text: str
    answers: tuple[str, ...]  # the best first
    gold: str | tuple[str, ...] | None
    meta: dict[str, Any]


def _truthfulqa(record: dict[str, Any]) -> Question:
    """The authors' CSV (`Best Answer`, `Correct Answers` joined by `;`) or the hub's (`best_answer`, a list)."""
    named = {key.lower().replace(" ", "_"): value for key, value in record.items() if isinstance(key, str)}
    best, correct, incorrect = named["best_answer"], named["correct_answers"], named.get("incorrect_answers") or []
    answers = tuple(dict.fromkeys(_stripped([best]) + _stripped(correct)))  # the best is most often a correct one too
    meta = {key: named[key] for key in ("type", "category", "source") if named.get(key)}
    return Question(named["question"], answers, None, {**meta, "incorrect": _stripped(incorrect)})


def _stripped(answers: Any) -> list[str]:
    listed = answers.split(";") if isinstance(answers, str) else answers
    return [answer.strip() for answer in listed if answer.strip()]


def _choice(record: dict[str, Any]) -> Question:
    """AI2's layout (`question` holds `stem` and a list of choices) or the hub's (`choices` holds two lists)."""
    question = record["question"]
    if isinstance(question, dict):
        stem, choices = question["stem"], {choice["label"]: choice["text"] for choice in question["choices"]}
        concept = question.get("question_concept")
    else:
        listed = record["choices"]
        stem, choices = question, dict(zip(listed["label"], listed["text"], strict=True))
        concept = record.get("question_concept")
    key = record.get("answerKey")
    if key not in choices:
        raise D5P4Error(f"answerKey is {key!r}, which is none of its choices {', '.join(choices)}")
    meta = {"choices": choices, "key": key} | ({"concept": concept} if concept else {})
    return Question(stem, (choices[key],), (choices[key],), meta)


def _gsm8k(record: dict[str, Any]) -> Question:
    solution = record["answer"]
    return Question(record["question"], (solution,), solution, {})


@dataclass(frozen=True)
class Source:
    """A data set of questions: where it lies and how it is read."""

    hub_id: str
    split: str  # the one the paper uses
    parse: Callable[[dict[str, Any]], Question]
    grader: str | None
    folders: Sequence[str] = field(default=("data",))  # in which the hub, or the authors' archive, has the files
    zero_shot: str = "{question}"


SOURCES = {
    "truthfulqa": Source("truthfulqa/truthful_qa", "validation", _truthfulqa, None, ("generation",)),
    "arc-challenge": Source("allenai/ai2_arc", "test", _choice, "exact", ("ARC-Challenge",)),
    "commonsenseqa": Source("tau/commonsense_qa", "validation", _choice, "exact"),
    "gsm8k": Source("openai/gsm8k", "test", _gsm8k, "gsm8k", ("main",), "Question: {question}\nAnswer:"),
}


def load_questions(
    name: str,
    path: str | Path | None,
    split: str | None,
    limit: int | None,
    shots: int,
    seed: int,
    shots_path: str | Path | None,
) -> Task:
    """The questions of a file, in its order; with a limit the first so many of a seeded shuffle."""
    source = SOURCES[name]
    given = source.hub_id if path is None else path
    asked = _read(source, given, split)
    solved = list(asked.values())
    if shots and shots_path is not None:
        solved = list(_read(source, shots_path, None, "train").values())
    solved = [solved[i] for i in shuffled(len(solved), seed, "shots")] if shots else []
    order = range(len(asked)) if limit is None else shuffled(len(asked), seed, "limit")[:limit]
    questions = list(asked.items())
    examples = []
    for identity, question in (questions[i] for i in order):
        prompt = _prompt(source, question, solved, shots)
        examples.append(Example(identity, prompt, question.answers, question.gold, question.meta))
    return Task(name, examples, source.grader, str(given))


def _prompt(source: Source, question: Question, solved: Sequence[Question], shots: int) -> str:
    if not shots:
        # Not str.format on the whole: a question may hold braces.
        return source.zero_shot.replace("{question}", question.text)
    # A question may come twice in a file: what must not be shown is its text, wherever it stands.
    others = (one for one in solved if one.text.strip() != question.text.strip())
    shown = [one for one, _ in zip(others, range(shots), strict=False)]
    if len(shown) < shots:
        raise D5P4Error(f"shots={shots} solved examples were asked for, and only {len(shown)} others are there")
    return "".join(f"Question: {one.text}\nAnswer: {one.answers[0]}\n\n" for one in shown) + (
        f"Question: {question.text}\nAnswer:"
    )


def _read(source: Source, path: str | Path, split: str | None, default: str | None = None) -> dict[str, Question]:
    """The questions of all files of a split by their ids: the records' own where they are all there and differ."""
    found = locate(path, split=split, default=default or source.split, folders=source.folders)
    records = [(f"{file} record {i}", record) for file in found for i, record in enumerate(read_records(file), 1)]
    if not records:
        raise D5P4Error(f"{path} holds no question")
    own = [record.get("id") for _, record in records]
    ids = [str(i) for i in (own if None not in own and len(set(map(str, own))) == len(own) else range(len(own)))]
    return {each: _parsed(source, *record) for each, record in zip(ids, records, strict=True)}


def _parsed(source: Source, place: str, record: dict[str, Any]) -> Question:
    try:
        question = source.parse(record)
        texts = (question.text, *question.answers)
        if not all(isinstance(text, str) and text.strip() for text in texts) or len(texts) < 2:
            raise D5P4Error("the question or its answer is not text, or empty")
        "".join(texts).encode()  # half a surrogate pair is found here, and not by a tokenizer later
        return question
    except KeyError as missing:
        raise D5P4Error(f"{place} has no {missing}; its fields are {', '.join(map(str, record))}") from None
    except D5P4Error as reason:
        raise D5P4Error(f"{place}: {reason}") from None
    except (TypeError, AttributeError, ValueError) as reason:
        raise D5P4Error(f"{place} is laid out otherwise than expected: {reason}") from None
