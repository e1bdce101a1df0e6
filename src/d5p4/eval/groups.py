"""Reads files of answers in the formats of many programs. A group is a prompt with its answers and its references.

| made by               | field with the answers                                     | field with the references |
|-----------------------|------------------------------------------------------------|---------------------------|
| d5p4 generate, run    | `answers`                                                  | `reference`, `references` |
| other generators      | one of `LISTS`, which holds a list                         | one of `REFERENCES`       |
| one answer per line   | one of `SINGLES`; equal ids or prompts make a group        | one of `REFERENCES`       |
| lm-evaluation-harness | `resps` of a samples file, which holds nested lists        | `target`                  |
| OpenAI's API          | `choices`; in the file of a batch, `choices` of `response` | –                         |
"""

import ast
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import D5P4Error

LISTS = ("answers", "texts", "responses", "completions", "outputs", "samples", "generations")
SINGLES = ("answer", "text", "response", "completion", "output", "generation", "generated_text")
REFERENCES = ("references", "reference", "target", "correct_answers")
PROMPTS = ("prompt", "question", "problem", "input", "messages")
IDS = ("id", "doc_id", "task_id", "custom_id")
INSIDE = ("text", "message", "content", "generated_text")  # the fields of an answer object that may hold its text


@dataclass(frozen=True)
class Group:
    """The answers to one prompt, and the references with which the answers are compared."""

    prompt: str | None
    answers: tuple[str, ...]
    references: tuple[str, ...] = ()
    id: str | int | None = None


class Groups(list[Group]):
    """The groups of a file. `skipped` is the number of lines that hold an error instead of answers."""

    skipped = 0


def read_groups(path: str | Path, answers: str | None = None, references: str | None = None) -> Groups:
    """Read the groups of a file of JSON objects, in the order of the file.

    The file has one object per line, or is a list of objects. Blank lines are skipped, and lines with an `error` and no
    answers are skipped and counted. Of a folder, such as the parts of a run in progress, all .jsonl files are read.

    `answers` and `references` name the fields to read instead of the usual fields. Lines with a single answer form a
    group if they have the same id; without ids, or if no id repeats but some prompt does, if they have the same prompt.
    """
    if answers is not None and answers == references:
        raise D5P4Error(f"{answers!r} cannot be both the field of the answers and the field of the references")
    lines, kept_filter, failed = list[tuple[str, Group, bool]](), None, list[str]()
    for place, entry in _entries(Path(path)):
        if "resps" in entry and "filter" in entry:  # the harness writes a sample once per filter; we keep one filter
            kept_filter = kept_filter or entry["filter"]
            if entry["filter"] != kept_filter:
                continue
        try:
            lines.append((place, *_line(place, entry, answers, references)))
        except D5P4Error:
            if entry.get("error") is None:
                raise
            failed.append(f"{place}: {json.dumps(entry['error'], ensure_ascii=False)[:200]}")
    if not lines:
        why = f"all {len(failed)} lines are errors, the first is {failed[0]}" if failed else "every line is blank"
        raise D5P4Error(f"{path} holds no answers: {why}")
    single = [group for _, group, alone in lines if alone]
    prompts, ids = {group.prompt for group in single}, {group.id for group in single}
    by_prompt = len(ids) == len(single) and None not in prompts and len(prompts) < len(single)  # ids number the answers
    groups: dict[Any, Group] = {}
    for number, (place, group, alone) in enumerate(lines):
        key: Any = (number, None)
        if alone:
            key = group.prompt if by_prompt or group.id is None else group.id
            if key is None:
                raise D5P4Error(f"{place}: this line has a single answer, but no id or prompt to group it by")
            if (before := groups.get(key)) is not None:
                joined = tuple(dict.fromkeys(before.references + group.references))
                group = Group(before.prompt, before.answers + group.answers, joined, before.id)
        groups[key] = group
    result = Groups(groups.values())
    result.skipped = len(failed)
    return result


def _entries(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the objects of a file, or of all files of a folder, each with its place (file and line) for messages."""
    files = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
    if not files:
        raise D5P4Error(f"{path} is a folder without .jsonl files: give a file of answers")
    for place, entry in (pair for file in files for pair in _values(file)):
        if isinstance(entry, list) and all(isinstance(item, str) for item in entry):
            entry = {"answers": entry}
        if not isinstance(entry, dict):
            wanted = 'an object such as {"prompt": "…", "answers": ["…", "…"]}, or a list of answers'
            raise D5P4Error(f"{place}: expected {wanted}, got {entry!r:.40}")
        yield place, entry


def _values(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield the JSON values of a file. The file has one value per line, or is one list of values, or one value."""
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as reason:
        raise D5P4Error(f"{path} is not UTF-8 text: byte {reason.start} cannot be read") from None
    except OSError as reason:
        raise D5P4Error(f"{path} cannot be read: {reason.strerror or reason}") from None
    if path.parent.name.endswith(".parts"):
        text = text[: text.rfind("\n") + 1]  # drop an incomplete last line, which a run is still writing
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if value is not None:
        many = isinstance(value, list) and not (value and all(isinstance(item, str) for item in value))
        kind, values = ("entry", value) if many else ("line", [value])
        yield from ((f"{path} {kind} {i}", entry) for i, entry in enumerate(values, start=1))
        return
    # We do not use splitlines, because it also splits at characters such as U+2028, which JSON text may contain.
    for i, line in enumerate(text.split("\n"), start=1):
        place = f"{path} line {i}"
        if line.strip():
            try:
                yield place, json.loads(line)
            except (ValueError, RecursionError) as reason:
                raise D5P4Error(f"{place}: not valid JSON: {reason}") from None


def _line(place: str, entry: dict[str, Any], answers: str | None, references: str | None) -> tuple[Group, bool]:
    """Return the group of a line, and whether other lines may belong to the same group."""
    for named in (answers, references):
        if named is not None and named not in entry:
            raise D5P4Error(f"{place}: there is no field {named!r}; the fields are {', '.join(entry)}")
    others = {key: x for key, x in entry.items() if key != references}  # this field is not searched for answers
    name, value, alone = _answers(place, others, answers)
    texts = tuple(_texts(value, f"{place}: {name!r}"))
    if not texts:
        raise D5P4Error(f"{place}: the field {name!r} holds no answer")
    _, prompt = _first(entry, PROMPTS)
    source, wanted = (references, entry[references]) if references is not None else _first(entry, REFERENCES)
    if name == "resps":
        prompt, wanted = next(iter(_harness_arguments(entry)), None), _harness_target(wanted)
    named, number = _first(entry, IDS)
    if number is not None and (not isinstance(number, (str, int)) or isinstance(number, bool)):
        raise D5P4Error(f"{place}: {named!r} must be text or a whole number, not {number!r:.40}")
    goals = tuple(_texts(wanted, f"{place}: {source!r}", numbers=True)) if wanted is not None else ()
    return Group(_prompt(prompt), texts, goals, number), alone or isinstance(value, str)


def _answers(place: str, entry: dict[str, Any], answers: str | None) -> tuple[str, Any, bool]:
    """Return the name and value of a line's field with answers, and whether other lines may belong to its group."""
    name, value = (answers, entry.get(answers)) if answers is not None else _first(entry, LISTS)
    if name is not None:
        return name, value, False
    batch = entry.get("response")
    if isinstance(batch, dict):  # a line of an OpenAI batch has its answers in `response`
        body = batch.get("body", batch)
        if not isinstance(body, dict) or "choices" not in body:
            raise D5P4Error(f"{place}: 'response' holds no choices (status {batch.get('status_code')})")
        return "response", body["choices"], False
    name, value = _first(entry, ("resps", "choices"))
    if name is not None:
        asked = _harness_arguments(entry) if name == "resps" else []
        if len(asked) > 1 and not isinstance(asked[1], dict):  # a task that generates has an object of settings
            raise D5P4Error(f"{place}: 'resps' holds log-likelihoods, because the task does not generate answers")
        return name, value, False
    single = [name for name in SINGLES if entry.get(name) is not None]
    if len(single) == 1:
        return single[0], entry[single[0]], True
    if single:
        raise D5P4Error(
            f"{place}: {' and '.join(map(repr, single))} may each be the answer: name the field of the answers with "
            "answers= (--answers) and the field of the references with references= (--references)"
        )
    usual = ", ".join((*LISTS, "resps", "choices", *SINGLES))
    raise D5P4Error(
        f"{place}: there are no answers: expected one of the fields {usual}, got {', '.join(entry) or 'nothing'}; "
        "if the answers have another field, name it with answers= (--answers)"
    )


def _texts(value: Any, what: str, numbers: bool = False) -> Iterator[str]:
    """Yield all texts in a JSON value. The value is a text, a list of values, or an object such as a message."""
    if isinstance(value, str):
        yield value.encode("utf-8", "replace").decode()  # replaces half surrogate pairs, which models cannot read
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _texts(item, what, numbers)
    elif isinstance(value, dict) and (name := next((n for n in INSIDE if n in value), None)):
        inside = value[name]
        if inside is None:  # a message without content is a refusal or a tool call
            yield ""
        elif name == "content" and isinstance(inside, list):  # a message whose content is a list of parts
            yield "".join(_texts(inside, what))
        else:
            yield from _texts(inside, what, numbers)
    elif numbers and isinstance(value, (int, float)) and not isinstance(value, bool):
        yield str(value)
    else:
        raise D5P4Error(f"{what} holds {json.dumps(value)[:40]} where text is expected")


def _first(entry: Mapping[str, Any], names: tuple[str, ...]) -> tuple[str | None, Any]:
    return next(((name, entry[name]) for name in names if entry.get(name) is not None), (None, None))


def _prompt(value: Any) -> str | None:
    """Return a prompt as text. The prompt of a conversation is its last message."""
    if isinstance(value, list) and value:
        value = value[-1].get("content") if isinstance(value[-1], dict) else value[-1]
    return value if isinstance(value, str) else None if value is None else json.dumps(value, ensure_ascii=False)


def _harness_arguments(entry: Mapping[str, Any]) -> list[Any]:
    """Return the arguments of a sample's first request. The first argument is the context."""
    asked = entry.get("arguments") or ()
    first = next(iter(asked.values() if isinstance(asked, dict) else asked), None) or ()
    return list(first.values() if isinstance(first, dict) else first)


def _harness_target(target: Any) -> Any:
    """Read a target that the harness wrote. The harness writes a list of targets as Python prints a list."""
    try:
        targets = ast.literal_eval(target) if isinstance(target, str) and target.startswith("[") else None
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return target
    return targets if isinstance(targets, list) and all(isinstance(item, str) for item in targets) else target
