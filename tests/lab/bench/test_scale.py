"""The benchmark of files and ranks runs at tiny sizes."""

import pytest
import torch

from d5p4_lab.bench import RESULTS, read_sections, rows_of, scale, scale_bytes


@pytest.mark.full
def test_every_section_is_measured_and_merged(tmp_path):
    path = tmp_path / "scale.jsonl"
    for names in (["bytes"], [name for name in scale.SECTIONS if name != "bytes"]):
        scale.run(scale.small_plan(), torch.device("cpu"), names, path, small=True)
    results = read_sections(path)
    sections = results["sections"]
    assert list(sections) == list(scale.SECTIONS)
    assert all(section["rows"] and section["small"] and "error" not in section for section in sections.values())
    for row in rows_of(results, "rows"):
        assert row["prompts_per_s"] > 0 and 0 < row["distinct_share"] <= 1
        assert row["gain"] == 1 or row["prompts"] > 1
    for what in ("countdown", "8B, rows differ"):
        assert sum(row["enough"] for row in rows_of(results, "budget") if row["what"] == what) == 1
    kinds = [row["what"].split(",")[0] for row in rows_of(results, "batching")]
    assert kinds == ["one prompt at a time", "batched", "batched", "batched"]
    assert all("tiny sizes" in table() for table in scale.tables(results).values())
    missing = scale.tables({})["rows"]()
    assert missing == "Not measured yet: `python -m d5p4_lab bench scale --sections rows`."


def test_ranks_send_half_as_much_as_a_gather_and_less_if_rows_are_equal():
    sizes = scale.small_plan().exchange
    rows = {row["what"]: row for row in scale_bytes.measure(sizes)}
    differ, equal = rows["all rows differ"], rows["some rows are equal"]
    assert differ["sent"]["features"] == sizes.own_rows * sizes.length * sizes.width * 2 // 2
    assert differ["gather_mb"] == 2 * differ["sent"]["features"] / 1e6
    assert differ["authors_mb"] == 2 * differ["gather_mb"]
    assert equal["sent"]["features"] < differ["sent"]["features"]
    assert differ["first_step_mb"] < differ["sent_mb"]  # all rows of the first pool are equal


def test_the_committed_bytes_are_those_of_the_documented_pool():
    sizes = scale_bytes.Sizes()
    assert (sizes.own_rows, sizes.length, sizes.width) == (60, 256, 4096)
    assert [round(sizes.gathered(itemsize) / 1e6) for itemsize in (2, 4)] == [126, 252]
    sent = rows_of(read_sections(RESULTS / "scale.jsonl.xz"), "bytes")[0]
    assert sent["what"] == "all rows differ" and round(sent["sent_mb"]) == 63
