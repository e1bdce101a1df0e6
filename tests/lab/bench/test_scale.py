"""The benchmark of many prompts runs at tiny sizes."""

import pytest
import torch

from d5p4_lab.bench import read_sections, rows_of, scale


@pytest.mark.full
def test_every_section_is_measured_and_merged(tmp_path):
    path = tmp_path / "scale.jsonl"
    for names in (["distinct"], [name for name in scale.SECTIONS if name != "distinct"]):
        scale.run(scale.SMALL, torch.device("cpu"), names, path, small=True)
    results = read_sections(path)
    sections = results["sections"]
    assert list(sections) == list(scale.SECTIONS)
    assert all(section["rows"] and section["small"] and "error" not in section for section in sections.values())
    for row in rows_of(results, "rows"):
        assert row["prompts_per_s"] > 0 and 0 < row["distinct_share"] <= 1
        assert row["gain"] == 1 or row["prompts"] > 1
    kinds = [row["what"].split(",")[0] for row in rows_of(results, "batching")]
    assert kinds == ["one prompt at a time", "batched", "batched", "batched"]
    assert all("tiny sizes" in table() for table in scale.tables(results).values())
    missing = scale.tables({})["rows"]()
    assert missing == "Not measured yet: `python -m d5p4_lab bench scale --sections rows`."
