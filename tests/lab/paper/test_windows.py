"""Windows of real text and masks over them."""

import random
from pathlib import Path

import pytest

from d5p4.distributed import Mesh
from d5p4.errors import D5P4Error
from d5p4_lab.paper import experiment
from d5p4_lab.paper.rows import Row, complete, fill
from d5p4_lab.paper.setup import Setup
from d5p4_lab.paper.windows import check_same_text, real_windows
from tests.checkpoints import write_mdlm


def write_texts(file: Path, documents: int = 4, seed: int = 0) -> Path:
    """Documents of random words, in characters that tiny models know."""
    source = random.Random(seed)

    def word() -> str:
        return "".join(source.choice("etaoinshrdlu") for _ in range(source.randint(2, 7)))

    texts = [" ".join(word() for _ in range(150)) for _ in range(documents)]
    file.write_text("\n<|endoftext|>\n".join(texts), encoding="utf-8")
    return file


def test_windows_are_pieces_of_all_documents_and_another_text_is_refused(tmp_path):
    model, file = str(write_mdlm(tmp_path / "tiny")), write_texts(tmp_path / "texts.txt")

    def windows(data: Path | None, count: int, out: str = "out") -> list[Row]:
        setup = Setup(experiment("features"), "box", tmp_path / out, model, data, "cpu")
        source = real_windows(setup, 20, count)
        check_same_text(setup, source, 20)
        fill(setup, [source], Mesh())
        return complete(setup, source)

    first = windows(file, 12)
    assert len(first) == 12 and all(len(window["ids"]) == 20 for window in first)
    documents = file.read_text().split("\n<|endoftext|>\n")
    owners = [next(i for i, text in enumerate(documents) if window["text"] in text) for window in first]
    assert all(owners.count(i) == 3 for i in range(4)) and len({window["text"] for window in first}) == 12
    assert windows(file, 5, "other") == first[:5]  # a smaller count gives the first windows
    assert windows(None, 12) == first  # stored windows need no file
    for data, count, message in (
        (None, 13, "give --data"),
        (write_texts(tmp_path / "b.txt", seed=1), 12, r"texts.jsonl was made from another text than .*b.txt"),
        (file, 9999, "windows of 20 tokens, but 9999 are needed"),
    ):
        with pytest.raises(D5P4Error, match=message):
            windows(data, count)
