"""What a large file costs on many GPUs: the tables and the figure of docs/scale.md.

    python -m d5p4_lab bench scale_plan                           prints the tables
    python -m d5p4_lab bench scale_plan --page docs/scale.md --figure docs/scale.svg

Step times come from gpu.json (LLaDA-8B's shape on one H200), fixed shapes from deterministic.json, all else from
scale.json. The arithmetic and the simulation are in scale_schedule.py. A table lies on the page between
<!-- scale: NAME --> and <!-- end -->; NAME is one of TABLES.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np

from . import RESULTS, Row, Tables, deterministic, fill_file, make_parser, markdown, panels_of, read, rows_of
from .scale_schedule import RANKS_A_HOST, Costs, Job, StepTime, World, fixed_shares, simulate

RANKS = (8, 64, 512)
STEPS = (256, 64)
LINKS = {"NVLink, 450 GB/s": 450e9, "InfiniBand, 50 GB/s": 50e9, "Ethernet, 1.25 GB/s": 1.25e9}  # a direction
CALLED = {256: 1, 64: 4}  # tokens a step
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7")  # told apart by most eyes, on white


class Facts:
    """What was measured."""

    def __init__(self, gpu: Mapping[str, Any], scale: Mapping[str, Any], fixed: Mapping[str, Any]) -> None:
        self.gpu, self.scale, self.fixed = gpu, scale, fixed

    @cached_property
    def step(self) -> StepTime:
        return StepTime.of(self.gpu)

    @cached_property
    def costs(self) -> Costs:
        return Costs.of(self.scale)

    def rows(self, section: str) -> list[Row]:
        return rows_of(self.scale, section)

    def shares(self, steps: int) -> dict[str, float]:
        """Of rows that differ: the most there can be, and what the shipped models had at as many tokens a step."""
        found = {"all rows differ": 1.0}
        for row in self.rows("distinct"):
            if row["tokens_a_step"] == CALLED[steps]:
                found[f"as measured with `{row['what']}`"] = row["distinct_share"]
        return found

    @cached_property
    def body(self) -> tuple[Sequence[float], Sequence[float]]:
        """Rows of 384 tokens and milliseconds of the forward."""
        rows = [row for row in self.gpu["sections"]["body"]["rows"] if str(row.get("size")).endswith("× 384")]
        pairs = sorted((int(row["size"].split()[0]), row["ours_ms"]) for row in rows if row["what"] == "body")
        return [count for count, _ in pairs], [ms for _, ms in pairs]


def percent(value: float) -> str:
    return f"{100 * value:.1f} %"


def hours(value: float) -> str:
    return f"{value:.1f} h" if value < 48 else f"{value / 24:.1f} days"


def _measured(section: str, table: Callable[[Facts], str]) -> Callable[[Facts], str]:
    def made(facts: Facts) -> str:
        if not facts.rows(section):
            return f"Not measured yet: `python -m d5p4_lab bench scale --sections {section}`."
        held = facts.scale["sections"][section]
        small = ", tiny sizes" if held.get("small") else ""
        return f"{table(facts)}\n\nMeasured on: {held['machine']}, torch {held['torch']}{small}."

    return made


def cost(facts: Facts) -> str:
    rows = []
    for steps in STEPS:
        for what, share in facts.shares(steps).items():
            job = Job(steps=steps, share=share)
            total = job.gpu_hours(facts.step)
            rows.append([
                str(steps), what, percent(share), f"{job.rows:,.0f}", job.seconds(facts.step), f"{total:,.0f}",
                *(hours(total / ranks) for ranks in RANKS), f"{job.authors_hours(facts.step):,.0f}",
            ])  # fmt: skip
    header = ["steps", "share of distinct rows", "", "rows a prompt", "GPU-seconds a prompt", "GPU-hours"]
    return markdown(
        [*header, *(f"{ranks} GPUs" for ranks in RANKS), "GPU-hours one by one, every row, the paper's way"], rows
    )


def simulation(facts: Facts) -> str:
    """The whole file, in a good world and in two bad ones."""
    rows, step, costs = [], facts.step, facts.costs
    for steps, share in ((256, 1.0), (64, 1.0), (64, 0.3)):
        for ranks in RANKS:
            job = Job(steps=steps, share=share)
            good, slow, killed = (
                simulate(job, ranks, step, costs, world) for world in (World(), World(slow=0.7), World(killed=0.4))
            )
            dealt = fixed_shares(job, ranks, step, World(slow=0.7))
            rows.append([
                str(steps), percent(share), str(ranks), hours(good.wall), percent(good.useful), percent(good.starting),
                percent(good.merging), percent(good.rest), percent(slow.useful), percent(dealt),
                percent(killed.useful), hours(killed.wall),
            ])  # fmt: skip
    return markdown(
        ["steps", "distinct rows", "GPUs", "wall time", "efficiency", "starting", "merging", "planning and tail",
         "efficiency with slow GPUs", "the same, dealt out beforehand", "efficiency with a hung rank and a restart",
         "its wall time"], rows,
    )  # fmt: skip


def few(facts: Facts) -> str:
    """A file of ten thousand prompts, where the last batches count."""
    rows = []
    for steps in STEPS:
        for ranks in RANKS:
            job = Job(prompts=10**4, steps=steps)
            found = simulate(job, ranks, facts.step, facts.costs, World())
            batches = job.prompts / job.batch / ranks
            rows.append([str(steps), str(ranks), batches, hours(found.wall), percent(found.useful),
                         percent(found.starting), percent(found.rest)])  # fmt: skip
    return markdown(
        ["steps", "GPUs", "batches a GPU", "wall time", "efficiency", "starting", "planning and tail"], rows
    )


def saturation(facts: Facts) -> str:
    """Everything besides decoding, at 512 ranks, in the longest and in the shortest run of the plan."""
    ranks, costs, step = RANKS[-1], facts.costs, facts.step
    hosts, prompts = ranks // RANKS_A_HOST, Job().prompts
    long, short = (job.gpu_hours(step) / ranks * 3600 for job in (Job(), Job(steps=64, share=0.3)))
    host = {row["what"].split()[0]: row for row in facts.rows("host")}
    line = host.get("merge", {}).get("bytes", 18_500)
    ask = host.get("ask", {}).get("us", 30.0) / 1e6
    told = host.get("tell", {})
    batch = Job().batch

    def share(seconds: float) -> list[str]:
        return [percent(seconds / long), percent(seconds / short)]

    tail = [job.seconds(step) * job.batch for job in (Job(), Job(steps=64, share=0.3))]
    requests = [ranks / each * 10 + ranks * 3 / 5 for each in tail]  # 10 a batch; 3 every 5 s by the watchdog
    resumed = costs.find * prompts + costs.plan * prompts
    transfer = told.get("us", 0.14) / 1e6 * prompts
    rows = [
        ["decoding", f"{long / 3600:.1f} h and {short / 3600:.1f} h", "", ""],
        ["planning: every rank tokenises every prompt",
         f"{costs.plan * 1e6:.0f} µs × 10⁶ = {costs.plan * prompts:.0f} s", *share(costs.plan * prompts)],
        ["waiting for the last batch (at most one)", f"{tail[0]:.0f} s and {tail[1]:.0f} s",
         percent(tail[0] / long), percent(tail[1] / short)],
        ["loading weights: one file server of 5 GB/s, each host once",
         f"{hosts} × 16 GB / 5 GB/s = {hosts * 16 / 5:.0f} s", *share(hosts * 16 / 5)],
        ["the same if each rank read for itself", f"{ranks} × 16 GB / 5 GB/s = {ranks * 16 / 5:.0f} s",
         *share(ranks * 16 / 5)],
        ["the end on rank 0: find and merge all lines",
         f"({costs.find * 1e6:.0f} + {costs.merge * 1e6:.0f}) µs × 10⁶ = {(costs.find + costs.merge) * prompts:.0f} s",
         *share((costs.find + costs.merge) * prompts)],
        ["going on after a kill: find the lines, plan up to the first open one (at most)",
         f"{resumed:.0f} s", *share(resumed)],
        ["the store: requests a second of 512 ranks, of what one connection alone gets answered",
         f"{requests[0]:.0f} and {requests[1]:.0f} of {1 / ask:,.0f}", percent(requests[0] * ask),
         percent(requests[1] * ask)],
        ["the store at a resume: the finished lines, told to each rank",
         f"{told.get('bytes', 4.9e6) / 1e6:.1f} MB, {ranks} × {transfer:.2f} s = {ranks * transfer:.0f} s at worst",
         *share(ranks * transfer)],
        ["the parts' disk: bytes written", f"{line * prompts / 1e9:.0f} GB, twice while merging",
         f"{line * prompts / long / 1e6:.2f} MB/s", f"{line * prompts / short / 1e6:.1f} MB/s"],
        ["the parts' disk: appends that wait for it", f"10⁶ / {batch} = {prompts // batch:,}",
         f"{prompts / batch / long:.1f}/s", f"{prompts / batch / short:.0f}/s"],
        ["memory of rank 0 at the end", f"{host.get('find', {}).get('memory', 300) * prompts / 1e9:.1f} GB", "", ""],
    ]  # fmt: skip
    return markdown(
        ["what", "arithmetic for 10⁶ prompts on 512 GPUs", "of the longest run", "of the shortest"], rows
    )


def latency(facts: Facts) -> str:
    """One prompt of k = 16, w = 4 over R ranks: the forward of its rows, the rest of the step, the exchange."""
    job, (counts, times) = Job(), facts.body
    decode = {row["what"]: row for row in facts.gpu["sections"]["decode"]["rows"]}
    after = (decode["no duplicates"]["ours_ms"] - times[-1]) / counts[-1]  # ms a row besides the forward
    exchange = {row["what"]: row for row in facts.rows("bytes")}
    vote = exchange.get("a vote before an exchange", {}).get("ms", 0.5)
    exchanges = exchange.get("all rows differ", {}).get("exchanges", 6)
    rows = []
    for ranks in (1, 2, 4, 8, 16):
        own = job.pool // ranks
        forward = float(np.interp(own, counts, times)) if own <= counts[-1] else times[-1] / counts[-1] * own
        sent = own * job.answer * 4096 * 2 * (ranks - 1) / ranks
        link = LINKS["NVLink, 450 GB/s" if ranks <= RANKS_A_HOST else "InfiniBand, 50 GB/s"]
        moved = [1e3 * sent / rate if ranks > 1 else None for rate in LINKS.values()]
        step = forward + own * after + (exchanges * vote + 1e3 * sent / link if ranks > 1 else 0)
        rows.append([str(ranks), str(own), forward, sent / 1e6 if ranks > 1 else None, *moved, step,
                     step * job.steps / 1e3, step * job.steps / 1e3 * ranks])  # fmt: skip
    return markdown(
        ["GPUs that share the pool", "rows each", "forward, ms", "MB sent a step", *(f"{link}: ms" for link in LINKS),
         "step, ms", "seconds until the answers", "GPU-seconds a prompt"], rows,
    )  # fmt: skip


def sent(facts: Facts) -> str:
    rows = []
    for row in facts.rows("bytes"):
        if "sent" not in row:
            continue
        kinds = row["sent"]
        small = sum(value for kind, value in kinds.items() if kind != "features") / 1e6
        rows.append([row["what"], row["rows_sent"], kinds["features"] / 1e6, f"{small:.3f}", f"{row['sent_mb']:.1f}",
                     f"{row['gather_mb']:.0f}", f"{row['authors_mb']:.0f}",
                     f"{row['authors_mb'] / row['sent_mb']:.1f}"])  # fmt: skip
    return markdown(
        ["pool", "rows a rank sends", "features, MB", "all else, MB", "sent a rank and step, MB",
         "all-gather in bf16, MB", "the authors' gather in fp32, MB", "times less than the authors'"], rows,
    )  # fmt: skip


def rates(facts: Facts) -> str:
    return markdown(
        ["model", "prompts together", "distinct rows", "rows/s", "prompts/s", "gain in rows/s", "peak, GB"],
        [[row["what"], str(row["prompts"]), percent(row["distinct_share"]), row["rows_per_s"], row["prompts_per_s"],
          row["gain"], row.get("peak_gb")] for row in facts.rows("rows")],
    )  # fmt: skip


def budgets(facts: Facts) -> str:
    return markdown(
        ["model", "tokens a forward", "rows/s", "prompts/s", "peak, GB", ""],
        [[row["what"], str(row["budget"]), row["rows_per_s"], row["prompts_per_s"], row.get("peak_gb"),
          "**enough**" if row["enough"] else ""] for row in facts.rows("budget")],
    )  # fmt: skip


def files(facts: Facts) -> str:
    return markdown(
        ["file of puzzles", "prompts", "seconds", "prompts/s", "gain", "prompts with the same answers as one by one"],
        [[row["what"], str(row["prompts"]), row["seconds"], row["prompts_per_s"], row.get("gain"),
          percent(row["same_share"]) if "same_share" in row else None] for row in facts.rows("batching")],
    )  # fmt: skip


def shares(facts: Facts) -> str:
    return markdown(
        ["model", "tokens a step", "prompts", "steps", "distinct rows"],
        [[row["what"], str(row["tokens_a_step"]), str(row["prompts"]), str(row["steps"]),
          percent(row["distinct_share"])] for row in facts.rows("distinct")],
    )  # fmt: skip


def host(facts: Facts) -> str:
    return markdown(
        ["what", "µs each", "bytes each"], [[row["what"], row["us"], row.get("bytes")] for row in facts.rows("host")]
    )


def fit(facts: Facts) -> str:
    """The line that all step times come from."""
    step = facts.step
    return markdown(
        ["a row of 384 tokens, ms", "least step, ms", "a row the paper's way, ms"],
        [[f"{step.a_row:.2f}", f"{step.least:.1f}", f"{step.authors:.2f}"]],
    )


def bits(facts: Facts) -> str:
    """What `deterministic` keeps, and what it costs."""
    return deterministic.table(facts.fixed)


TABLES: dict[str, Callable[[Facts], str]] = {
    "fit": fit, "cost": cost, "distinct": _measured("distinct", shares), "simulation": simulation, "few": few,
    "saturation": saturation, "host": _measured("host", host), "latency": latency, "bytes": _measured("bytes", sent),
    "rows": _measured("rows", rates), "budget": _measured("budget", budgets), "batching": _measured("batching", files),
    "bits": bits,
}  # fmt: skip


def tables(facts: Facts) -> Tables:
    return {name: partial(table, facts) for name, table in TABLES.items()}


def figure(scale: Mapping[str, Any], path: Path) -> None:
    """Bytes a step, rows a second by prompts together, the gain of batching."""
    rows = partial(rows_of, scale)
    with panels_of(path, 1, 3, (13, 4)) as (chart, panels):
        _bytes(panels[0], [row for row in rows("bytes") if "sent" in row])
        _rates(panels[1], rows("rows"))
        _gains(panels[2], rows("rows"), rows("batching"))
        for panel in panels:
            panel.grid(alpha=0.3)
            if not panel.has_data():
                panel.text(0.5, 0.5, "not measured yet", ha="center", transform=panel.transAxes)
        where = {section["machine"] for name, section in scale["sections"].items() if name in ("rows", "batching")}
        if where:
            chart.suptitle(f"rows and gains: {', '.join(sorted(where))}", fontsize=10)


def _bytes(panel: Any, rows: Sequence[Row]) -> None:
    if not rows:
        return
    bars = {"authors' gather,\nfp32": rows[0]["authors_mb"], "all-gather,\nbf16": rows[0]["gather_mb"]}
    names = {"all rows differ": "ours", "some rows are equal": "ours, some\nrows equal"}
    bars |= {names[row["what"]]: row["sent_mb"] for row in rows if row["what"] in names}
    colours = ["#999999", "#999999", COLOURS[0], COLOURS[0]]
    drawn = panel.bar(list(bars), list(bars.values()), color=colours[: len(bars)])
    panel.bar_label(drawn, [f"{value:.3g}" for value in bars.values()])
    panel.set(title=f"sent a rank and step\n({rows[0]['size']})", ylabel="MB")
    panel.title.set_fontsize(10)
    panel.tick_params(axis="x", labelsize=8)
    panel.margins(y=0.12)


def _lines(panel: Any, rows: Sequence[Row], key: str) -> None:
    for colour, what in zip(COLOURS, dict.fromkeys(row["what"] for row in rows), strict=False):
        points = [(row["prompts"], row[key]) for row in rows if row["what"] == what]
        panel.loglog(*zip(*points, strict=True), "o-", color=colour, label=what, base=10)
    counts = sorted({row["prompts"] for row in rows})
    panel.set_xticks(counts[::2], [str(count) for count in counts[::2]])
    panel.minorticks_off()
    panel.legend(fontsize=8)


def _rates(panel: Any, rows: Sequence[Row]) -> None:
    if rows:
        _lines(panel, rows, "rows_per_s")
        panel.set(xlabel="prompts decoded together", ylabel="rows a second")
        panel.set_title("rows through the model", fontsize=10)


def _gains(panel: Any, rows: Sequence[Row], files: Sequence[Row]) -> None:
    if rows:
        _lines(panel, rows, "gain")
        top = max(row["gain"] for row in [*rows, *files] if "gain" in row)
        ticks = [tick for tick in (1, 2, 5, 10, 20, 50, 100, 200, 500) if tick <= 1.5 * top]
        panel.set_yticks(ticks, [str(tick) for tick in ticks])
        panel.set(xlabel="prompts decoded together", ylabel="times the rows a second of one")
    for row in files:
        if row["what"] == "batched, default budget":
            panel.axhline(row["gain"], color="#666666", linestyle=":", label="countdown, a whole file by run_file")
            panel.legend(fontsize=8)
    panel.set_title("gain over one prompt at a time", fontsize=10)


def committed() -> Facts:
    return Facts(*(read(RESULTS / f"{name}.json") for name in ("gpu", "scale", "deterministic")))


def main(arguments: Sequence[str]) -> None:
    parser = make_parser("scale_plan", __doc__)
    parser.add_argument("--page", type=Path, help="a page whose tables are made anew, such as docs/scale.md")
    parser.add_argument("--figure", type=Path, help="a drawing, such as docs/scale.svg; needs matplotlib")
    options = parser.parse_args(arguments)
    facts = committed()
    if options.page:
        fill_file(options.page, "scale", tables(facts))
    if options.figure:
        figure(facts.scale, options.figure)
    if not (options.page or options.figure):
        for name, table in tables(facts).items():
            print(f"### {name}\n\n{table()}\n", flush=True)
