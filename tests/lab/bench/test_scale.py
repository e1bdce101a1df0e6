"""The benchmark of many prompts runs at tiny sizes."""

import pytest

from d5p4_lab.bench import read_sections, rows_of, scale, sections


@pytest.mark.full
def test_every_section_is_measured_and_merged(tmp_path):
    path = tmp_path / "scale.jsonl"
    for names in (["distinct"], [name for name in scale.SECTIONS if name != "distinct"]):
        sections.run(scale.SECTIONS, scale.Bench(scale.SMALL, "cpu"), names, path, small=True)
    results = read_sections(path)
    assert list(results["sections"]) == list(scale.SECTIONS)
    assert all(x["rows"] and x["small"] and "error" not in x for x in results["sections"].values())
    for row in rows_of(results, "rows"):
        assert row["prompts_per_s"] > 0 and 0 < row["distinct_share"] <= 1
        assert row["gain"] == 1 or row["prompts"] > 1
    kinds = [row["what"].split(",")[0] for row in rows_of(results, "batching")]
    assert kinds == ["one prompt at a time", "batched", "batched", "batched"]
    assert all("tiny sizes" in table() for table in scale.tables(results).values())
    assert scale.tables({})["rows"]() == "not measured yet"
