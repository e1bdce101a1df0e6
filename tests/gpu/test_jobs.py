"""Whole files on CUDA: real shortage of memory, and the same bytes after a stop in half precision."""

import json

import pytest
import torch

import d5p4

pytestmark = pytest.mark.gpu
OPTIONS = dict(k=4, gen_length=24, steps=8, seed=5)


@pytest.fixture
def input(tmp_path):
    path = tmp_path / "p.jsonl"
    lines = [{"prompt": f"{n % 90 + 5},{n % 7 + 1},13,{n % 31 + 2}:{n % 60 + 10}"} for n in range(384)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_out_of_memory_halves_the_budget_and_goes_on(input, tmp_path):
    """In float64, so that answers cannot depend on how forwards are cut."""
    model = d5p4.load("countdown", "cuda", "float64")
    torch.cuda.empty_cache()
    before, budget = torch.cuda.memory_allocated(), 1 << 17
    torch.cuda.reset_peak_memory_stats()
    d5p4.run_file(model, input, tmp_path / "a.jsonl", method="d5p4", max_tokens_per_forward=budget, **OPTIONS)
    needed = torch.cuda.max_memory_allocated() - before
    torch.cuda.empty_cache()
    whole = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 0.4 * needed) / whole)
    try:
        report = d5p4.run_file(
            model, input, tmp_path / "b.jsonl", method="d5p4", max_tokens_per_forward=budget, **OPTIONS
        )
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert (tmp_path / "b.jsonl").read_bytes() == (tmp_path / "a.jsonl").read_bytes()
    note = f"the device was out of memory with a budget of {budget} tokens; the run went on with half of it"
    assert note in report.notes
    assert report.failed == 0


@pytest.mark.parametrize("method", ["tree", "d5p4"])
def test_a_stopped_run_ends_with_the_same_bytes_in_half_precision(input, tmp_path, method):
    """Batches are planned from the file alone, so that a resumed run regroups nothing."""
    model = d5p4.load("countdown", "cuda", "bfloat16")

    class Stopped(BaseException):
        pass

    def stop(pace) -> None:
        if pace.now >= 100:
            raise Stopped

    options = OPTIONS | {"method": method, "max_tokens_per_forward": 2048}
    d5p4.run_file(model, input, tmp_path / "a.jsonl", **options)
    with pytest.raises(Stopped):
        d5p4.run_file(model, input, tmp_path / "b.jsonl", progress=stop, **options)
    [part] = (tmp_path / "b.jsonl.parts").glob("part-*.jsonl")
    lines = part.read_bytes().splitlines(keepends=True)
    part.write_bytes(b"".join(lines[:-2]))  # in the middle of a batch
    report = d5p4.run_file(model, input, tmp_path / "b.jsonl", **options)
    assert report.before == len(lines) - 2 and report.now == 384 - report.before
    assert (tmp_path / "b.jsonl").read_bytes() == (tmp_path / "a.jsonl").read_bytes()
