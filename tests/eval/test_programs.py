"""Programs: operations by a plain definition, text that is only matched, rules by what they preserve, tasks by seed."""

import itertools
import random
import time

import pytest

from d5p4.eval import programs
from d5p4.eval.programs import (
    LARGEST,
    MOST_EXAMPLES,
    MOST_OPERATIONS,
    NAMES,
    Task,
    canonical,
    fault,
    is_right,
    outputs,
    read_examples,
    read_program,
    rules,
)
from tests.refusals import refusal

PROMPT = "3 1 2>2 3|5 4 9>5 6|1 1 0>1 2:"
PROGRAM = "sort take 2 map +1"
PLAIN = {  # one list at a time, in plain Python
    "sort": sorted,
    "reverse": lambda x: x[::-1],
    "dedup": lambda x: list(dict.fromkeys(x)),
    "diff": lambda x: [b - a for a, b in itertools.pairwise(x)],
    "sum": lambda x: [sum(x)] if x else None,
    "max": lambda x: [max(x)] if x else None,
    "min": lambda x: [min(x)] if x else None,
    "take 1": lambda x: x[:1],
    "take 2": lambda x: x[:2],
    "take 3": lambda x: x[:3],
    "drop 1": lambda x: x[1:],
    "drop 2": lambda x: x[2:],
    "map +1": lambda x: [v + 1 for v in x],
    "map -1": lambda x: [v - 1 for v in x],
    "map *2": lambda x: [v * 2 for v in x],
    "map *3": lambda x: [v * 3 for v in x],
    "map neg": lambda x: [-v for v in x],
    "map abs": lambda x: [abs(v) for v in x],
    "map sq": lambda x: [v * v for v in x],
    "map /2": lambda x: [v // 2 for v in x],
    "map %3": lambda x: [v % 3 for v in x],
    "keep even": lambda x: [v for v in x if v % 2 == 0],
    "keep odd": lambda x: [v for v in x if v % 2],
    "keep pos": lambda x: [v for v in x if v > 0],
    "keep neg": lambda x: [v for v in x if v < 0],
    "scan +": lambda x: list(itertools.accumulate(x)),
    "scan max": lambda x: list(itertools.accumulate(x, max)),
    "scan min": lambda x: list(itertools.accumulate(x, min)),
}


def plain(program, numbers):
    """The output of a program by the plain definition, or None."""
    for name in program:
        numbers = PLAIN[name](list(numbers))
        if numbers is None or any(abs(v) > LARGEST for v in numbers):
            return None
    return tuple(numbers)


def random_lists(count, largest=25, longest=8, seed=0):
    draw = random.Random(seed)
    return [tuple(draw.randint(-largest, largest) for _ in range(draw.randint(0, longest))) for _ in range(count)]


# ---- the language


def test_operations_do_what_the_plain_definition_says():
    assert tuple(PLAIN) == NAMES
    lists = [*random_lists(200), (LARGEST,) * 32, (-LARGEST, 0, LARGEST)]
    for name in NAMES:
        assert outputs((name,), lists) == [plain((name,), numbers) for numbers in lists], name


def test_a_program_is_read_by_the_table_alone():
    assert read_program(PROGRAM) == ("sort", "take 2", "map +1")
    assert read_program("scan max max") == ("scan max", "max")
    assert read_program(" ".join(["sort"] * MOST_OPERATIONS)) == ("sort",) * MOST_OPERATIONS
    for text in (
        "",
        " ",
        "sort ",
        " sort",
        "sort  take 2",
        "Sort",
        "take",
        "take 4",
        "map",
        "map 2",
        "sort,take 2",
        "sort\n",
        "__import__('os')",
        "map +1 keep",
        " ".join(["sort"] * (MOST_OPERATIONS + 1)),
        "map +1 " * 10**5,
    ):
        assert read_program(text) is None, text[:40]
        assert not is_right(PROMPT, text)


def test_random_text_is_judged_quickly_and_raises_nothing():
    draw, began = random.Random(2), time.monotonic()
    words = [*(word for name in NAMES for word in name.split()), "", "9" * 5000, "é", "\0", "|", ">", ":"]
    for _ in range(2000):
        text = " ".join(draw.choices(words, k=draw.randint(0, 12)))
        assert is_right(PROMPT, text) in (True, False)
        assert isinstance(canonical(text), str)
    characters = "0123456789 -+>|:sortake\n"
    for _ in range(2000):
        text = "".join(draw.choices(characters, k=draw.randint(0, 40)))
        try:
            task = Task.parse(text)
        except programs.D5P4Error:
            continue
        assert task.prompt.endswith(":")
    for text in ("1 " * 10**6, "1>" * 10**6, "|" * 10**6, "9" * 10**6 + ">1:"):
        refusal(Task.parse, text)
        assert canonical(text) == text
    assert time.monotonic() - began < 60


# ---- tasks and answers


def test_an_answer_is_right_if_it_satisfies_all_examples():
    task = Task.parse(PROMPT)
    assert task.visible[0] == ((3, 1, 2), (2, 3)) and task.prompt == PROMPT and task.reference is None
    assert fault(task, PROGRAM) is None and is_right(PROMPT, "map +1 sort take 2")
    assert fault(task, "sort take 2") == "example 3 1 2: gives 1 2, not 2 3"
    assert fault(task, "keep neg max") == "example 3 1 2: has no result, not 2 3"
    assert fault(task, "keep neg") == "example 3 1 2: gives nothing, not 2 3"
    assert fault(task, "solve") == "'solve' is not a program"
    hidden = Task.parse(PROMPT, "9 8 -1>0 9")
    assert is_right(hidden, PROGRAM) and hidden.reference == "9 8 -1>0 9"
    many = Task.parse(PROMPT, ["9 8 -1>0 9", "7 6 5>5 6"])
    assert fault(many, PROGRAM) == "hidden example 7 6 5: gives 6 7, not 5 6"
    assert is_right("3 -1>|5>:", "drop 2 keep neg") and is_right("-5>:", "keep pos")


@pytest.mark.parametrize(
    "text",
    [
        "",
        ":",
        ">",
        "1 2",
        "1 2>2 1",
        ">1:",
        "1  2>2:",
        "1 2 >2:",
        "01>1:",
        "-0>0:",
        "100>1:",
        "1>1||2>2:",
        "1>1|:",
        "1,2>2:",
    ],
)
def test_what_is_not_a_task_is_named(text):
    message = refusal(Task.parse, text)
    assert "written like" in message


def test_tasks_have_limits():
    assert len(read_examples("|".join(["1>1"] * MOST_EXAMPLES))) == MOST_EXAMPLES
    refusal(read_examples, "|".join(["1>1"] * (MOST_EXAMPLES + 1)))
    refusal(read_examples, " ".join(["1"] * 33) + ">1")
    refusal(Task.parse, 7)
    refusal(Task.parse, PROMPT, ["1>1", 5])


# ---- the canonical form


def test_rules_keep_the_result_of_every_list():
    lists = random_lists(1500)
    for before, after in rules().items():
        pairs = list(zip(outputs(before, lists), outputs(after, lists), strict=True))
        both = [(a, b) for a, b in pairs if a is not None and b is not None]
        assert len(both) > 100 and all(a == b for a, b in both), (before, after)


def test_the_form_is_a_fixed_point_and_keeps_results():
    lists, draw = random_lists(60, largest=9), random.Random(4)
    sample = [tuple(draw.choices(NAMES, k=draw.randint(1, MOST_OPERATIONS))) for _ in range(400)]
    for program in [*itertools.product(NAMES, repeat=2), *sample]:
        form = canonical(" ".join(program))
        assert canonical(form) == form
        names = read_program(form) if form else ()
        for a, b in zip(outputs(program, lists), outputs(names, lists), strict=True):
            assert a is None or b is None or a == b, (program, form)


def test_meaningless_differences_are_merged_and_others_are_not():
    for one, other in (
        ("map *2 reverse", "reverse map *2"),
        ("sort max", "max"),
        ("map neg max", "min map neg"),
        ("keep pos keep even", "keep even keep pos"),
        ("map +1 keep even", "keep odd map +1"),
        ("reverse reverse sort", "sort"),
        ("sort reverse take 1", "max"),
    ):
        assert canonical(one) == canonical(other), (one, other)
    assert canonical("map neg map neg") == ""
    assert canonical("no program") == "no program"
    for one, other in (("sort reverse", "reverse"), ("take 2 sort", "sort take 2"), ("map sq max", "max map sq")):
        assert canonical(one) != canonical(other)
