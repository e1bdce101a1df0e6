"""The benchmark of files and ranks runs at tiny sizes, and the plan's arithmetic and simulation are right."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from d5p4 import D5P4Error
from d5p4_lab.bench import RESULTS, read, scale, scale_bytes, scale_plan
from d5p4_lab.bench.scale_schedule import Batches, Costs, Job, StepTime, World, fixed_shares, planned, play, simulate

STEP = StepTime(ms_per_row=10.0, least=20.0)
COSTS = Costs(plan=1e-3, find=1e-4, merge=1e-4, start=10.0, weights=16.0, server=4.0, hang=100.0, again=50.0)
SMALL = Job(prompts=3000, steps=8)


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """Two calls that write to the same file."""
    path = tmp_path_factory.mktemp("scale") / "scale.json"
    early = ["bytes", "host"]
    scale.run(scale.small_plan(), torch.device("cpu"), early, path, small=True)
    later = [name for name in scale.SECTIONS if name not in early]
    scale.run(scale.small_plan(), torch.device("cpu"), later, path, small=True)
    return json.loads(path.read_text(encoding="utf-8"))


def facts(results):
    return scale_plan.Facts(read(RESULTS / "gpu.json.xz"), results, read(RESULTS / "deterministic.json.xz"))


@pytest.mark.full
def test_every_section_is_measured_and_merged(measured):
    sections = measured["sections"]
    assert list(sections) == list(scale.SECTIONS)
    assert all(section["rows"] and section["small"] and "error" not in section for section in sections.values())
    for row in sections["rows"]["rows"]:
        assert row["prompts_per_s"] > 0 and 0 < row["distinct_share"] <= 1
        assert row["gain"] == 1 or row["prompts"] > 1
    for what in ("countdown", "8B, rows differ"):
        assert sum(row["enough"] for row in sections["budget"]["rows"] if row["what"] == what) == 1
    kinds = [row["what"].split(",")[0] for row in sections["batching"]["rows"]]
    assert kinds == ["one prompt at a time", "batched", "batched", "batched"]


def test_ranks_send_half_as_much_as_a_gather_and_less_if_rows_are_equal():
    sizes = scale.small_plan().exchange
    rows = {row["what"]: row for row in scale_bytes.measure(sizes)}
    differ, equal = rows["all rows differ"], rows["some rows are equal"]
    assert differ["sent"]["features"] == sizes.own_rows * sizes.length * sizes.width * 2 // 2
    assert differ["gather_mb"] == 2 * differ["sent"]["features"] / 1e6
    assert differ["authors_mb"] == 2 * differ["gather_mb"]
    assert equal["sent"]["features"] < differ["sent"]["features"]
    assert differ["first_step_mb"] < differ["sent_mb"]  # all rows of the first pool are equal
    assert rows["a vote before an exchange"]["ms"] > 0


def test_the_sizes_are_those_of_the_issue():
    sizes = scale_bytes.Sizes()
    assert (sizes.own_rows, sizes.length, sizes.width) == (60, 256, 4096)
    assert [round(sizes.gathered(itemsize) / 1e6) for itemsize in (2, 4)] == [126, 252]
    job = Job()
    assert (job.prompts, job.k, job.w, job.prompt, job.answer) == (10**6, 16, 4, 128, 256)
    sent = read(RESULTS / "scale.json.xz")["sections"]["bytes"]["rows"][0]
    assert sent["what"] == "all rows differ" and round(sent["sent_mb"]) == 63


def test_cost_is_rows_times_their_measured_time():
    job = Job(prompts=3600, k=2, w=2, prompt=128, answer=256, steps=3, share=0.5)
    assert job.rows == 1 + 2 * 4 * 0.5
    together = job.batch
    assert together == 8 * 8192 // 4 // 384
    first, later = max(20.0, together * 10.0), together * 4 * 0.5 * 10.0
    assert job.gpu_hours(STEP) == pytest.approx((first + 2 * later) / together / 1e3)
    assert job.seconds(STEP, 1) == pytest.approx((20 + 2 * 20) / 1e3)  # alone, the least step counts
    assert job.authors_hours(replace(STEP, authors=5.0)) == pytest.approx(3 * 4 * 5e-3)
    step = scale_plan.committed().step  # from the measured steps: 556 ms for 60 rows; 40 for one
    assert 9 < step.ms_per_row < 9.6 and 30 < step.least < 55
    assert step.seconds(60, 384) == pytest.approx(0.556, rel=0.02)


def test_the_schedule_takes_every_prompt_once_and_is_never_far_from_the_best():
    work = planned(SMALL, 0.5, 0.2, STEP)
    assert work.prompts.sum() == SMALL.prompts and (np.diff(work.window) >= 0).all()
    windows = int(work.window.max()) + 1
    assert windows == math.ceil(SMALL.prompts / 1024)
    even = planned(SMALL, 0.0, 0.0, STEP)
    assert np.bincount(even.prompts).argmax() == SMALL.batch  # prompts of one length

    alone = simulate(SMALL, 1, STEP, COSTS, World())  # one rank takes the sum of everything
    loading = 10.0 + 16.0 / 4.0
    expected = loading + windows * 1024 * 1e-3 + work.seconds.sum() + 3000 * 2e-4
    assert alone.wall * 3600 == pytest.approx(expected)
    assert alone.useful + alone.starting + alone.merging + alone.rest == pytest.approx(1) and alone.lost == 0

    for ranks in (2, 7, 64):  # no schedule beats the mean; a counter is at most one batch slower
        forever = np.full(ranks, np.inf)
        end = play(work, np.arange(len(work.seconds)), np.ones(ranks), 0.0, 0.0, forever).end
        mean = work.seconds.sum() / ranks
        assert mean <= end <= mean + work.seconds.max(), ranks


def test_slow_gpus_cost_little_with_a_counter_and_much_without():
    slow = World(slow=0.5)
    job = Job(prompts=20_000, steps=8)
    free = replace(COSTS, plan=0.0, find=0.0, merge=0.0, start=0.0, server=math.inf)
    assert simulate(job, 64, STEP, free, slow).useful > 0.95
    assert fixed_shares(job, 64, STEP, slow) < 0.55


def test_unfinished_batches_of_a_hung_rank_are_done_again():
    work = Batches(np.array([4.0, 4.0, 4.0, 4.0]), np.array([0, 0, 0, 0]), np.array([5, 5, 5, 5]))
    first = play(work, np.arange(4), np.ones(2), 0.0, 0.0, np.array([9.0, 2.0]))
    assert first.done.tolist() == [True, False, True, False] and first.end == 9.0
    rest = play(work, np.flatnonzero(~first.done), np.ones(2), 0.0, 20.0, np.full(2, np.inf))
    assert (first.done | rest.done).all() and not (first.done & rest.done).any() and rest.end == 24.0
    good, hung = (simulate(SMALL, 4, STEP, COSTS, world) for world in (World(), World(killed=0.5)))
    assert hung.lost > 0 and hung.wall > good.wall
    assert hung.wall * hung.useful == pytest.approx(good.wall * good.useful)  # the same answers


def test_unknown_sections_are_refused_and_missing_ones_are_named():
    with pytest.raises(D5P4Error, match="no section bites; choose from bytes"):
        scale.main(["--sections", "bites"])
    missing = scale_plan.tables(facts({}))["rows"]()
    assert "Not measured yet: `python -m d5p4_lab bench scale --sections rows`" in missing


@pytest.mark.full
def test_every_table_is_made_from_the_measurements(measured):
    tables = scale_plan.tables(facts(measured))
    assert all(table() for name, table in tables.items() if name not in ("simulation", "few"))
    assert "as measured with `countdown`" in tables["cost"]()


@pytest.mark.full
def test_the_drawing_can_be_made_before_and_after_measuring(measured, tmp_path):
    for name, results in (("full", measured), ("empty", {"sections": {}})):
        scale_plan.figure(results, tmp_path / f"{name}.svg")
        assert (tmp_path / f"{name}.svg").stat().st_size < 200_000
