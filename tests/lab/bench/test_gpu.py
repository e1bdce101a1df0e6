"""The speed benchmark runs on a CPU at tiny sizes, its baseline is right, and its tables come from its JSON."""

import pytest
import torch

from d5p4 import D5P4Error
from d5p4.ops.problem import prepare
from d5p4.search.dpp import dpp_kernel
from d5p4_lab import baseline
from d5p4_lab.bench import gpu, read_sections, rows_of, sections, write_sections
from d5p4_lab.bench.gpu import SMALL, instances
from d5p4_lab.methods.exact import exhaustive


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """Two calls that write to the same file."""
    path = tmp_path_factory.mktemp("gpu") / "gpu.jsonl"
    for names in (["gram"], [name for name in gpu.SECTIONS if name != "gram"]):
        sections.run(gpu.SECTIONS, gpu.Bench(SMALL, "cpu"), names, path, small=True)
    return path


def test_every_section_is_measured_and_merged(measured):
    results = read_sections(measured)
    assert list(results["sections"]) == list(gpu.SECTIONS)
    for name, section in results["sections"].items():
        assert "error" not in section and section["rows"], name
        assert not [row["errors"] for row in section["rows"] if "errors" in row]
    for draw in gpu.tables(results).values():
        assert draw().startswith("| ") and draw().count("\n") > 2
    for name in ("vocab", "gram", "solver"):
        kinds = ("plain_ms", "baseline_ms", "floor_ms", "ours_ms")
        assert all(min(row[key] for key in kinds) > 0 for row in rows_of(results, name))
    steps = {row["what"] for row in rows_of(results, "step")}
    assert steps == {"step, logits in memory", "step, streamed head", "step, streamed head, half masked"}
    decoded = {row["what"]: row for row in rows_of(results, "decode")}
    first = decoded["confidence order, T 1"]["steps"][0]
    assert first["step"] == 0 and first["distinct"] == 1 and decoded["no duplicates"]["speedup"] > 0


def test_a_failed_section_does_not_lose_the_others(tmp_path, monkeypatch):
    def broken(bench):
        raise RuntimeError("no such kernel")

    monkeypatch.setitem(gpu.SECTIONS, "gram", broken)
    out = tmp_path / "gpu.jsonl"
    with pytest.raises(D5P4Error, match="these sections failed: gram"):
        gpu.main(["--device", "cpu", "--small", "--sections", "gram,vocab", "--out", str(out)])
    results = read_sections(out)["sections"]
    assert results["gram"]["error"] == "RuntimeError: no such kernel" and results["vocab"]["rows"]


def test_the_baseline_takes_one_of_each_group_and_comes_close_to_the_optimum():
    quality, similarity = instances(20, 4, 4, 16)
    kernel = dpp_kernel("additive", quality, similarity, 10.0)[0]
    problem = prepare(kernel, 4)
    sets = torch.stack([baseline.greedy_map(one, 4) for one in kernel])
    assert (sets // 4 == torch.arange(4)).all()
    best, value = (problem.score(sets[:, None])[1] for sets in (exhaustive(kernel, 4, None, quality), sets))
    assert (value <= best + 1e-9).all() and (value > best - 1e-9).double().mean() > 0.8
    for q, s in zip(quality[:5], similarity[:5], strict=True):
        alone = q.view(4, 4).argmax(-1) + 4 * torch.arange(4)
        assert baseline.mmr(q, s, 4, 0.0).equal(alone)  # without a penalty only quality counts
        assert (baseline.mmr(q, s, 4, 10.0) // 4).equal(torch.arange(4))


def test_the_baseline_scores_selects_and_draws():
    torch.manual_seed(0)
    logits, prompt = torch.randn(6, 5, 11), torch.randn(6, 2, 11)
    p = torch.softmax(logits.double(), -1)
    score = (p * p.log()).sum(-1).mean(-1)
    expected = (score - score.min()) / (score.max() - score.min())
    torch.testing.assert_close(baseline.quality(logits).double(), expected, atol=1e-5, rtol=0)
    parents, tokens = baseline.step(logits, torch.randn(6, 5, 3), 2, 3, 10.0, prompt)
    assert (parents // 3).tolist() == [0, 1] and tokens.shape == (2, 7, 3) and int(tokens.max()) < 11
    certain = torch.nn.functional.one_hot(torch.arange(4), 11).double().mul(1e4).expand(2, 4, 11)
    assert (baseline.sample(certain, 3) == torch.arange(4)[:, None]).all()


def test_results_of_another_machine_are_not_overwritten(measured, tmp_path):
    results, other = read_sections(measured), tmp_path / "gpu.jsonl"
    results["sections"]["gram"]["machine"] = "another machine"
    write_sections(other, results)
    with pytest.raises(D5P4Error, match="another machine.*; give another --out"):
        gpu.main(["--device", "cpu", "--small", "--sections", "machine", "--out", str(other)])
    assert read_sections(other) == results
