"""Draw the tables and the figure of docs/scale.md: the cost of a large file on many GPUs.

    python -m d5p4_lab bench scale_plan                           print the tables
    python -m d5p4_lab bench scale_plan --page docs/scale.md --figure docs/scale.svg

Step times come from gpu.json.xz (LLaDA-8B's shape on one H200), the cost of `deterministic` from
deterministic.json.xz, and everything else from scale.json.xz. The arithmetic and the simulation are in
scale_schedule.py. On the page, each table stands between <!-- scale: NAME --> and <!-- end -->, where NAME is a key of
`tables`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np

from ..figures import pyplot, save
from . import RESULTS, Row, Tables, deterministic, fill_file, make_parser, markdown, read, rows_of, table_of
from .scale_schedule import RANKS_PER_HOST, Costs, Job, StepTime, World, fixed_shares, simulate

RANKS = (8, 64, 512)
STEPS = (256, 64)
LINKS = {
    "NVLink, 450 GB/s": 450e9,
    "InfiniBand, 50 GB/s": 50e9,
    "Ethernet, 1.25 GB/s": 1.25e9,
}  # the speed of a link in bytes per second and direction
TOKENS = {256: 1, 64: 4}  # {number of steps: tokens revealed per step}
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7")  # colour-blind readers can tell these colours apart


class Facts:
    """The results of the benchmarks gpu, scale and deterministic, from which the tables are computed."""

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
        """Return {description: share of distinct rows}: 1, and shares measured with TOKENS[steps] tokens per step."""
        shares = {"all rows differ": 1.0}
        for row in self.rows("distinct"):
            if row["tokens_a_step"] == TOKENS[steps]:
                shares[f"as measured with `{row['what']}`"] = row["distinct_share"]
        return shares

    @cached_property
    def body(self) -> tuple[Sequence[float], Sequence[float]]:
        """Two lists: the measured numbers of rows per forward, and the ms of these forwards. Rows have 384 tokens."""
        rows = [row for row in self.gpu["sections"]["body"]["rows"] if str(row.get("size")).endswith("× 384")]
        pairs = sorted((int(row["size"].split()[0]), row["ours_ms"]) for row in rows if row["what"] == "body")
        return [count for count, _ in pairs], [ms for _, ms in pairs]


def percent(value: float) -> str:
    return f"{100 * value:.1f} %"


def hours(value: float) -> str:
    return f"{value:.1f} h" if value < 48 else f"{value / 24:.1f} days"


def cost(facts: Facts) -> str:
    """Return the table of the GPU time for the whole file, for each number of steps and share of distinct rows."""
    rows = []
    for steps in STEPS:
        for what, share in facts.shares(steps).items():
            job = Job(steps=steps, share=share)
            total = job.gpu_hours(facts.step)
            rows.append(
                {
                    "steps": str(steps),
                    "share of distinct rows": what,
                    "": percent(share),
                    "rows per prompt": f"{job.rows:,.0f}",
                    "GPU-seconds per prompt": job.seconds(facts.step),
                    "GPU-hours": f"{total:,.0f}",
                    **{f"{ranks} GPUs": hours(total / ranks) for ranks in RANKS},
                    "GPU-hours one by one, every row, the paper's way": f"{job.authors_hours(facts.step):,.0f}",
                }
            )
    return table_of(rows)


def simulation(facts: Facts) -> str:
    """Return the table of simulated runs of the whole file: without faults, with slow GPUs, and with a hung rank."""
    rows, step, costs = [], facts.step, facts.costs
    for steps, share in ((256, 1.0), (64, 1.0), (64, 0.3)):
        for ranks in RANKS:
            job = Job(steps=steps, share=share)
            worlds = (World(), World(slow=0.7), World(killed=0.4))
            good, slow, killed = (simulate(job, ranks, step, costs, world) for world in worlds)
            rows.append(
                {
                    "steps": str(steps),
                    "distinct rows": percent(share),
                    "GPUs": str(ranks),
                    "wall time": hours(good.wall),
                    "efficiency": percent(good.useful),
                    "starting": percent(good.starting),
                    "merging": percent(good.merging),
                    "planning and tail": percent(good.rest),
                    "efficiency with slow GPUs": percent(slow.useful),
                    "the same, dealt out beforehand": percent(fixed_shares(job, ranks, step, World(slow=0.7))),
                    "efficiency with a hung rank and a restart": percent(killed.useful),
                    "its wall time": hours(killed.wall),
                }
            )
    return table_of(rows)


def few(facts: Facts) -> str:
    """Return the table of a file of only ten thousand prompts, for which waiting for the last batches matters."""
    rows = []
    for steps in STEPS:
        for ranks in RANKS:
            job = Job(prompts=10**4, steps=steps)
            outcome = simulate(job, ranks, facts.step, facts.costs, World())
            rows.append(
                {
                    "steps": str(steps),
                    "GPUs": str(ranks),
                    "batches per GPU": job.prompts / job.batch / ranks,
                    "wall time": hours(outcome.wall),
                    "efficiency": percent(outcome.useful),
                    "starting": percent(outcome.starting),
                    "planning and tail": percent(outcome.rest),
                }
            )
    return table_of(rows)


def saturation(facts: Facts) -> str:
    """Return a table of the work that 512 ranks do besides decoding.

    Its last two columns give this work as a share of the time of a long run and of a short run.
    """
    ranks, costs, step = RANKS[-1], facts.costs, facts.step
    hosts, prompts, batch = ranks // RANKS_PER_HOST, Job().prompts, Job().batch
    jobs = (Job(), Job(steps=64, share=0.3))
    long, short = (job.gpu_hours(step) / ranks * 3600 for job in jobs)
    host = {row["what"].split()[0]: row for row in facts.rows("host")}
    written = host.get("merge", {}).get("bytes", 18_500) * prompts
    ask = host.get("ask", {}).get("us", 30.0) / 1e6
    finished = host.get("tell", {})
    memory = host.get("find", {}).get("memory", 300) * prompts

    tails = [job.seconds(step) * job.batch for job in jobs]
    requests = [ranks / tail * 10 + ranks * 3 / 5 for tail in tails]  # per second: 10 per batch, 3 per rank every 5 s
    plan, find, merge = (seconds * prompts for seconds in (costs.plan, costs.find, costs.merge))
    hosts_load, ranks_load = (readers * 16 / 5 for readers in (hosts, ranks))
    transfer = finished.get("us", 0.14) / 1e6 * prompts
    rows: list[list[str]] = []

    def add(what: str, arithmetic: str, of_long: str = "", of_short: str = "") -> None:
        rows.append([what, arithmetic, of_long, of_short])

    def add_time(what: str, arithmetic: str, seconds: float) -> None:
        add(what, arithmetic, percent(seconds / long), percent(seconds / short))

    add("decoding", f"{long / 3600:.1f} h and {short / 3600:.1f} h")
    add_time("planning: every rank tokenises every prompt", f"{costs.plan * 1e6:.0f} µs × 10⁶ = {plan:.0f} s", plan)
    shares = percent(tails[0] / long), percent(tails[1] / short)
    add("waiting for the last batch (at most one)", f"{tails[0]:.0f} s and {tails[1]:.0f} s", *shares)
    arithmetic = f"{hosts} × 16 GB / 5 GB/s = {hosts_load:.0f} s"
    add_time("loading weights if each host reads them once from a file server of 5 GB/s", arithmetic, hosts_load)
    add_time(
        "loading weights if each rank reads them from the server",
        f"{ranks} × 16 GB / 5 GB/s = {ranks_load:.0f} s",
        ranks_load,
    )
    arithmetic = f"({costs.find * 1e6:.0f} + {costs.merge * 1e6:.0f}) µs × 10⁶ = {find + merge:.0f} s"
    add_time("at the end: rank 0 finds and merges all lines", arithmetic, find + merge)
    what = "after a kill: finding the finished lines, and planning up to the first open line (at most)"
    add_time(what, f"{find + plan:.0f} s", find + plan)
    what = "the store: requests per second from 512 ranks, and the most that one connection can make"
    shares = percent(requests[0] * ask), percent(requests[1] * ask)
    add(what, f"{requests[0]:.0f} and {requests[1]:.0f} of {1 / ask:,.0f}", *shares)
    size = f"{finished.get('bytes', 4.9e6) / 1e6:.1f} MB"
    arithmetic = f"{size}, {ranks} × {transfer:.2f} s = {ranks * transfer:.0f} s at worst"
    add_time("after a kill: the store tells each rank the finished lines", arithmetic, ranks * transfer)
    pace = f"{written / long / 1e6:.2f} MB/s", f"{written / short / 1e6:.1f} MB/s"
    add("the disk of the part files: bytes written", f"{written / 1e9:.0f} GB, twice that while merging", *pace)
    pace = f"{prompts / batch / long:.1f}/s", f"{prompts / batch / short:.0f}/s"
    add("the disk of the part files: appends that wait for the disk", f"10⁶ / {batch} = {prompts // batch:,}", *pace)
    add("memory of rank 0 at the end", f"{memory / 1e9:.1f} GB")
    return markdown(["what", "arithmetic for 10⁶ prompts on 512 GPUs", "of the longest run", "of the shortest"], rows)


def latency(facts: Facts) -> str:
    """Return the table of the time for one prompt (k = 16, w = 4) whose pool is divided among 1 to 16 ranks."""
    job, (counts, times) = Job(), facts.body
    decode = {row["what"]: row for row in facts.gpu["sections"]["decode"]["rows"]}
    rest = (decode["no duplicates"]["ours_ms"] - times[-1]) / counts[-1]  # ms per row of a step, without the forward
    exchange = {row["what"]: row for row in facts.rows("bytes")}
    vote = exchange.get("a vote before an exchange", {}).get("ms", 0.5)
    exchanges = exchange.get("all rows differ", {}).get("exchanges", 6)
    rows = []
    for ranks in (1, 2, 4, 8, 16):
        own = job.pool // ranks
        forward = float(np.interp(own, counts, times)) if own <= counts[-1] else times[-1] / counts[-1] * own
        sent = own * job.answer * 4096 * 2 * (ranks - 1) / ranks
        link = LINKS["NVLink, 450 GB/s" if ranks <= RANKS_PER_HOST else "InfiniBand, 50 GB/s"]
        step = forward + own * rest + (exchanges * vote + 1e3 * sent / link if ranks > 1 else 0)
        rows.append(
            {
                "GPUs that share the pool": str(ranks),
                "rows per GPU": str(own),
                "forward, ms": forward,
                "MB sent per step": sent / 1e6 if ranks > 1 else None,
                **{f"{name}: ms": 1e3 * sent / rate if ranks > 1 else None for name, rate in LINKS.items()},
                "step, ms": step,
                "seconds until the answers": step * job.steps / 1e3,
                "GPU-seconds per prompt": step * job.steps / 1e3 * ranks,
            }
        )
    return table_of(rows)


def fit(facts: Facts) -> str:
    """Return the table of the fitted numbers from which all step times are computed."""
    step = facts.step
    row = {"a row of 384 tokens, ms": f"{step.ms_per_row:.2f}", "least step, ms": f"{step.least:.1f}"}
    return table_of([row | {"a row the paper's way, ms": f"{step.authors:.2f}"}])


Cell = str | Callable[[Row], Any]
"""How to get a column's cell from a row: the key of the value, or a function of the row."""
COLUMNS: dict[str, dict[str, Cell]] = {
    "distinct": {
        "model": "what",
        "tokens per step": "tokens_a_step",
        "prompts": "prompts",
        "steps": "steps",
        "distinct rows": lambda row: percent(row["distinct_share"]),
    },
    "host": {"what": "what", "µs each": "us", "bytes each": "bytes"},
    "bytes": {
        "pool": "what",
        "rows sent per rank": "rows_sent",
        "features, MB": lambda row: row["sent"]["features"] / 1e6,
        "all else, MB": lambda row: f"{(sum(row['sent'].values()) - row['sent']['features']) / 1e6:.3f}",
        "sent per rank and step, MB": lambda row: f"{row['sent_mb']:.1f}",
        "all-gather in bf16, MB": lambda row: f"{row['gather_mb']:.0f}",
        "the authors' gather in fp32, MB": lambda row: f"{row['authors_mb']:.0f}",
        "times less than the authors'": lambda row: f"{row['authors_mb'] / row['sent_mb']:.1f}",
    },
    "rows": {
        "model": "what",
        "prompts together": "prompts",
        "distinct rows": lambda row: percent(row["distinct_share"]),
        "rows/s": "rows_per_s",
        "prompts/s": "prompts_per_s",
        "gain in rows/s": "gain",
        "peak, GB": "peak_gb",
    },
    "budget": {
        "model": "what",
        "tokens per forward": "budget",
        "rows/s": "rows_per_s",
        "prompts/s": "prompts_per_s",
        "peak, GB": "peak_gb",
        "": lambda row: "**enough**" if row["enough"] else "",
    },
    "batching": {
        "file of puzzles": "what",
        "prompts": "prompts",
        "seconds": "seconds",
        "prompts/s": "prompts_per_s",
        "gain": "gain",
        "prompts with the same answers as one by one": lambda row: (
            percent(row["same_share"]) if "same_share" in row else None
        ),
    },
}


def measured(name: str, facts: Facts) -> str:
    """Return the table of one section of scale.json.xz, followed by the name of the machine that measured it."""
    rows = [row for row in facts.rows(name) if name != "bytes" or "sent" in row]
    if not rows:
        return f"Not measured yet: `python -m d5p4_lab bench scale --sections {name}`."
    cells = [[cell(row) if callable(cell) else row.get(cell) for cell in COLUMNS[name].values()] for row in rows]
    section = facts.scale["sections"][name]
    small = ", tiny sizes" if section.get("small") else ""
    table = markdown(list(COLUMNS[name]), cells)
    return f"{table}\n\nMeasured on: {section['machine']}, torch {section['torch']}{small}."


def bits(facts: Facts) -> str:
    """Return the table of the effect and the cost of the option `deterministic`."""
    return deterministic.table(facts.fixed)


COMPUTED = {table.__name__: table for table in (fit, cost, simulation, few, saturation, latency, bits)}


def tables(facts: Facts) -> Tables:
    computed = {name: partial(table, facts) for name, table in COMPUTED.items()}
    return computed | {name: partial(measured, name, facts) for name in COLUMNS}


def figure(scale: Mapping[str, Any], path: Path) -> None:
    """Draw three charts: bytes per step, rows per second by prompts decoded together, and the gain of batching."""
    rows = partial(rows_of, scale)
    chart, panels = pyplot().subplots(1, 3, figsize=(13, 4))
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
    save(chart, path)


def _bytes(panel: Any, rows: Sequence[Row]) -> None:
    if not rows:
        return
    bars = {"authors' gather,\nfp32": rows[0]["authors_mb"], "all-gather,\nbf16": rows[0]["gather_mb"]}
    names = {"all rows differ": "ours", "some rows are equal": "ours, some\nrows equal"}
    bars |= {names[row["what"]]: row["sent_mb"] for row in rows if row["what"] in names}
    colours = ["#999999", "#999999", COLOURS[0], COLOURS[0]]
    drawn = panel.bar(list(bars), list(bars.values()), color=colours[: len(bars)])
    panel.bar_label(drawn, [f"{value:.3g}" for value in bars.values()])
    panel.set(title=f"sent per rank and step\n({rows[0]['size']})", ylabel="MB")
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
        panel.set(xlabel="prompts decoded together", ylabel="rows per second")
        panel.set_title("rows through the model", fontsize=10)


def _gains(panel: Any, rows: Sequence[Row], files: Sequence[Row]) -> None:
    if rows:
        _lines(panel, rows, "gain")
        top = max(row["gain"] for row in [*rows, *files] if "gain" in row)
        ticks = [tick for tick in (1, 2, 5, 10, 20, 50, 100, 200, 500) if tick <= 1.5 * top]
        panel.set_yticks(ticks, [str(tick) for tick in ticks])
        panel.set(xlabel="prompts decoded together", ylabel="times the rows per second of one prompt")
    for row in files:
        if row["what"] == "batched, default budget":
            panel.axhline(row["gain"], color="#666666", linestyle=":", label="countdown, a whole file by run_file")
            panel.legend(fontsize=8)
    panel.set_title("gain over one prompt at a time", fontsize=10)


def committed() -> Facts:
    return Facts(*(read(RESULTS / f"{name}.json.xz") for name in ("gpu", "scale", "deterministic")))


def main(arguments: Sequence[str]) -> None:
    parser = make_parser("scale_plan", __doc__)
    parser.add_argument("--page", type=Path, help="a page to fill with the tables, such as docs/scale.md")
    parser.add_argument("--figure", type=Path, help="a figure to draw, such as docs/scale.svg; needs matplotlib")
    options = parser.parse_args(arguments)
    facts = committed()
    if options.page:
        fill_file(options.page, "scale", tables(facts))
    if options.figure:
        figure(facts.scale, options.figure)
    if not (options.page or options.figure):
        for name, table in tables(facts).items():
            print(f"### {name}\n\n{table()}\n", flush=True)
