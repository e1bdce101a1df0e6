"""Windows of real text and masks over them."""

import random
from pathlib import Path

import numpy as np
import pytest

from d5p4.errors import D5P4Error
from d5p4_lab.paper import experiment
from d5p4_lab.paper.setup import Setup
from d5p4_lab.paper.windows import chance, random_masks, real_windows, spread_counts
from tests.checkpoints import write_mdlm


def write_texts(file: Path, documents: int = 4, seed: int = 0) -> Path:
    """Documents of random words, in characters that tiny models know."""
    source = random.Random(seed)

    def word() -> str:
        return "".join(source.choice("etaoinshrdlu") for _ in range(source.randint(2, 7)))

    texts = [" ".join(word() for _ in range(150)) for _ in range(documents)]
    file.write_text("\n<|endoftext|>\n".join(texts), encoding="utf-8")
    return file


def make(tmp_path: Path, data: Path | None, out: str = "out") -> Setup:
    if not (tmp_path / "tiny").exists():
        write_mdlm(tmp_path / "tiny")
    return Setup(experiment("features"), "box", tmp_path / out, str(tmp_path / "tiny"), data, "cpu")


def test_windows_are_pieces_of_all_documents_and_fewer_come_first(tmp_path):
    file = write_texts(tmp_path / "texts.txt")
    found = real_windows(make(tmp_path, file), 20, 12)
    assert len(found) == 12 and all(len(window.ids) == 20 for window in found)
    documents = file.read_text().split("\n<|endoftext|>\n")
    owners = [next(i for i, text in enumerate(documents) if window.text in text) for window in found]
    assert all(owners.count(i) == 3 for i in range(4))
    assert len({window.text for window in found}) == 12
    assert real_windows(make(tmp_path, file, "other"), 20, 5) == found[:5]


def test_kept_windows_need_no_file_and_another_file_is_an_error(tmp_path):
    found = real_windows(make(tmp_path, write_texts(tmp_path / "a.txt")), 20, 4)
    assert real_windows(make(tmp_path, None), 20, 4) == found
    with pytest.raises(D5P4Error, match="give --data"):
        real_windows(make(tmp_path, None), 20, 5)
    with pytest.raises(D5P4Error, match="another text"):
        real_windows(make(tmp_path, write_texts(tmp_path / "b.txt", seed=1)), 20, 4)
    with pytest.raises(D5P4Error, match="windows of 20 tokens, 9999 are asked for"):
        real_windows(make(tmp_path, tmp_path / "a.txt"), 20, 9999)


def test_masks_have_their_counts_and_streams_their_names():
    masks = random_masks(chance("x", 1), [0, 3, 8], 8)
    assert masks.sum(1).tolist() == [0, 3, 8]
    assert random_masks(chance("x", 1), [4], 8).equal(random_masks(chance("x", 1), [4], 8))
    assert chance("x", 1).random() != chance("x", 2).random() != chance("x 1").random()
    many = random_masks(chance("even"), [2] * 4000, 8).double().mean(0)
    np.testing.assert_allclose(many, 0.25, atol=0.04)  # 6 standard errors


def test_counts_of_masks_are_spread_over_all_lengths():
    assert sorted(spread_counts(chance(0), 16, 16)) == list(range(1, 17))
    for draws in (1, 5):
        found = spread_counts(chance("c", draws), draws, 100)
        assert len(found) == draws and min(found) >= 1 and max(found) <= 100
    gaps = np.diff(sorted(spread_counts(chance(1), 5, 100)))
    assert set(gaps) <= {19, 20, 21}
