"""Programs: operations by example, text that is only matched, and which programs are the same."""

import random

from d5p4.eval.programs import (
    LARGEST,
    MOST_EXAMPLES,
    MOST_OPERATIONS,
    NAMES,
    Task,
    fault,
    function_of,
    is_right,
    output,
    read_examples,
    read_program,
)
from tests.refusals import refusal

PROMPT = "3 1 2>2 3|5 4 9>5 6|1 1 0>1 2:"
PROGRAM = "sort take 2 map +1"
NUMBERS = (3, -7, 8, 0, -4, 5, 3)
OUTPUTS = {  # of each operation for NUMBERS, by hand
    # fmt: off
    "sort": "-7 -4 0 3 3 5 8",
    "reverse": "3 5 -4 0 8 -7 3",
    "dedup": "3 -7 8 0 -4 5",
    "diff": "-10 15 -8 -4 9 -2",
    "sum": "8",
    "max": "8",
    "min": "-7",
    "take 1": "3",
    "take 2": "3 -7",
    "take 3": "3 -7 8",
    "drop 1": "-7 8 0 -4 5 3",
    "drop 2": "8 0 -4 5 3",
    "map +1": "4 -6 9 1 -3 6 4",
    "map -1": "2 -8 7 -1 -5 4 2",
    "map *2": "6 -14 16 0 -8 10 6",
    "map *3": "9 -21 24 0 -12 15 9",
    "map neg": "-3 7 -8 0 4 -5 -3",
    "map abs": "3 7 8 0 4 5 3",
    "map sq": "9 49 64 0 16 25 9",
    "map /2": "1 -4 4 0 -2 2 1",
    "map %3": "0 2 2 0 2 2 0",
    "keep even": "8 0 -4",
    "keep odd": "3 -7 5 3",
    "keep pos": "3 8 5 3",
    "keep neg": "-7 -4",
    "scan +": "3 -4 4 4 0 5 8",
    "scan max": "3 3 8 8 8 8 8",
    "scan min": "3 -7 -7 -7 -7 -7 -7",
    # fmt: on
}


def random_lists(count, largest=25, longest=8, seed=0):
    draw = random.Random(seed)
    return [tuple(draw.randint(-largest, largest) for _ in range(draw.randint(0, longest))) for _ in range(count)]


def test_operations_by_hand():
    assert tuple(OUTPUTS) == NAMES
    for name, expected in OUTPUTS.items():
        assert output((name,), NUMBERS) == tuple(map(int, expected.split())), name
        nothing = None if name in ("sum", "max", "min") else ()
        assert output((name,), ()) == nothing, name
        assert output((name, "keep pos", "keep neg", "max"), NUMBERS) is None, name
    for name, largest in (("map +1", 98), ("map *2", 49), ("map sq", 9), ("scan +", 49), ("sum", 49), ("diff", 49)):
        numbers = (-largest, largest) if name == "diff" else (largest, largest)
        assert output((name,), numbers) is not None, name
        assert output((name,), tuple(2 * v if v > 0 else v for v in numbers)) is None, name
    assert output(("map neg", "map neg"), (LARGEST, -LARGEST)) == (LARGEST, -LARGEST)


def test_a_program_is_read_by_the_table_alone():
    assert read_program(PROGRAM) == ("sort", "take 2", "map +1")
    assert read_program("scan max max") == ("scan max", "max")
    assert read_program(" ".join(["sort"] * MOST_OPERATIONS)) == ("sort",) * MOST_OPERATIONS
    bad = ["", " ", "sort ", " sort", "sort  take 2", "Sort", "take", "take 4", "map", "map 2", "sort,take 2", "sort\n"]
    bad += ["__import__('os')", "map +1 keep", " ".join(["sort"] * (MOST_OPERATIONS + 1)), "map +1 " * 10**5]
    for text in bad:
        assert read_program(text) is None and not is_right(PROMPT, text), text[:40]


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


def test_what_is_not_a_task_is_named():
    bad = ["", ":", ">", "1 2", "1 2>2 1", ">1:", "1  2>2:", "1 2 >2:", "01>1:", "-0>0:", "100>1:", "1>1||2>2:"]
    for text in (*bad, "1>1|:", "1,2>2:"):
        assert "written like" in refusal(Task.parse, text), text
    assert len(read_examples("|".join(["1>1"] * MOST_EXAMPLES))) == MOST_EXAMPLES
    refusal(read_examples, "|".join(["1>1"] * (MOST_EXAMPLES + 1)))
    refusal(read_examples, " ".join(["1"] * 33) + ">1")
    refusal(Task.parse, 7)
    refusal(Task.parse, PROMPT, ["1>1", 5])


def test_meaningless_differences_are_merged_and_others_are_not():
    for one, other, same in (
        ("map *2 reverse", "reverse map *2", True),
        ("map neg max", "min map neg", True),
        ("map +1 keep even", "keep odd map +1", True),
        ("sort reverse take 1", "max", True),
        ("map neg map neg sort", "sort", True),
        ("sort reverse", "reverse", False),
        ("take 2 sort", "sort take 2", False),
        ("map sq max", "max map sq", False),
        ("no program", "noprogram", False),
    ):
        assert (function_of(one) == function_of(other)) == same, (one, other)
