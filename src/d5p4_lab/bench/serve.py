"""Measure what requests to a running server cost each other: joins, turns, the queue and the memory.

    python -m d5p4_lab bench serve --device cpu

A server runs in a process of its own. On a CPU it has `countdown`, on CUDA a model with random weights and the shape of
LLaDA-8B. Each figure is a ratio of two sides that take turns in one run, because other work on the machine changes
times. `--sections` measures only some of the sections, and `--small` makes them tiny, to test that everything runs.
"""

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np
import torch

import d5p4
from d5p4.decode.loop import Loop
from d5p4.generate import arrivals
from d5p4.models.load import choose_device
from d5p4.prompts import prepare
from d5p4.serve import serve

from ..provenance import about
from ..puzzles import problems
from ..tables import Row, Tables, number, table_of
from . import RESULTS, chosen, make_parser, read, show, write
from .random_models import CONFIG, TINY, random_model

Body = dict[str, Any]
COSTLY = {"method": "d5p4", "n": 7, "w": 8, "max_tokens": 64}  # two of these once filled a server
TARGETS = {
    "short": ("p95 of short requests (n = 1) while n = 12 runs, against alone", "≤ 1.7"),
    "cheap": ("p50 of short requests beside four expensive ones, against alone", "≤ 5"),
    "throughput": ("requests per second of 64 that arrive within 10 s, against one batch of them", "≥ 0.85"),
    "join": ("host time of a join, against a step", "≤ 1"),
    "memory": ("memory after 2,000 requests, against after 500", "1"),
    "health": ("p95 of /health under load, against idle", ""),
}


class Sizes(NamedTuple):
    short: int  # requests per turn
    turns: int
    batch: int
    seconds: float  # in which the requests of the batch arrive
    many: int


FULL, SMALL = Sizes(10, 5, 64, 10.0, 2000), Sizes(2, 1, 3, 0.2, 8)


def build(device: str) -> Any:
    """Return the model that is served."""
    if device in ("cuda", "tiny"):
        kind, dtype = ("cuda", torch.bfloat16) if device == "cuda" else ("cpu", torch.float32)
        return random_model(CONFIG if device == "cuda" else TINY, torch.device(kind), dtype)
    return d5p4.load("countdown", device)


@contextmanager
def server(device: str) -> Iterator[tuple[str, int]]:
    """Start a server process, and yield its address and its process id when it is ready."""
    command = [sys.executable, "-m", __spec__.name, device]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            url = process.stdout.readline().strip()
            while httpx.get(f"{url}/readyz").status_code != 200:
                time.sleep(0.1)
            yield url, process.pid
        finally:
            process.terminate()


def bodies(device: str, count: int) -> list[Body]:
    """Return short requests, each with its own prompt and seed."""
    if device in ("cuda", "tiny"):
        prompts: list[Any] = np.random.default_rng(0).integers(1, 90, (count, 64)).tolist()
        own = {"max_tokens": 128 if device == "cuda" else 8}
    else:
        prompts, own = [problem.prompt for problem in problems(count, numbers=4, seed=7)], {"max_tokens": 24}
    return [{"prompt": prompt, "seed": number, "n": 1} | own for number, prompt in enumerate(prompts)]


class Client:
    """Sends requests to a server and remembers how long they take."""

    def __init__(self, url: str, device: str, sizes: Sizes, http: httpx.AsyncClient, pid: int) -> None:
        self.url, self.device, self.sizes, self.http, self.pid = url, device, sizes, http, pid

    async def ask(self, body: Body, delay: float = 0.0) -> float:
        """Send a request after a delay, and return the seconds until the answer."""
        await asyncio.sleep(delay)
        start = time.perf_counter()
        (await self.http.post(f"{self.url}/v1/completions", json=body)).raise_for_status()
        return time.perf_counter() - start

    async def arriving(self, some: Sequence[Body], interval: float, seed: int) -> list[float]:
        """Send requests that arrive at random, on average one per `interval` seconds. Return the seconds of each."""
        moments = np.random.default_rng(seed).exponential(interval, len(some)).cumsum()
        return list(await asyncio.gather(*map(self.ask, some, moments)))

    async def again(self, body: Body) -> None:
        """Send a request again and again, each time with another seed."""
        for seed in range(1 << 30):
            await self.ask(body | {"seed": seed})

    async def beside(self, others: Sequence[Body], work: Any) -> Any:
        """Return what `work` returns while the other requests are sent again and again."""
        tasks = [asyncio.create_task(self.again(body)) for body in others]
        await asyncio.sleep(0.5 if others else 0)
        try:
            return await work
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def pings(self) -> list[float]:
        seconds = []
        for _ in range(10 * self.sizes.turns):
            start = time.perf_counter()
            await self.http.get(f"{self.url}/health")
            seconds.append(time.perf_counter() - start)
            await asyncio.sleep(0.05)
        return seconds

    async def compared(self, others: Sequence[Body], quantile: float, spaced: bool) -> Row:
        """Compare short requests alone and beside others, in turns. Spaced ones arrive at random, a request and a half
        per time that one takes alone; others follow each other."""
        own, alone, crowded = bodies(self.device, self.sizes.short * self.sizes.turns), list[float](), list[float]()
        pace = float(np.median([await self.ask(body) for body in own[:3]])) * 1.5
        for turn in range(self.sizes.turns):
            some = own[turn * self.sizes.short :][: self.sizes.short]
            for seconds, busy in ((alone, []), (crowded, others)):
                work = self.arriving(some, pace, turn) if spaced else self.in_turn(some)
                seconds += await self.beside(busy, work)
        first, second = (float(np.quantile(seconds, quantile)) for seconds in (alone, crowded))
        return {"base": first, "value": second, "ratio": second / first, "requests": len(alone)}

    async def in_turn(self, some: Sequence[Body]) -> list[float]:
        return [await self.ask(body) for body in some]

    async def short(self) -> Row:
        return await self.compared([bodies(self.device, 1)[0] | {"n": 12, "max_tokens": 48}], 0.95, spaced=True)

    async def cheap(self) -> Row:
        others = [bodies(self.device, 1)[0] | COSTLY | {"temperature": 1 + i / 1000} for i in range(4)]
        return await self.compared(others, 0.5, spaced=False)

    async def throughput(self) -> Row:
        """One batch, then the same requests one by one within some seconds, then the batch again."""
        own, size = bodies(self.device, self.sizes.batch), self.sizes.batch
        whole = own[0] | {"prompt": [body["prompt"] for body in own]}
        before = await self.ask(whole)
        start, gap = time.perf_counter(), self.sizes.seconds / size
        await asyncio.gather(*(self.ask(body, number * gap) for number, body in enumerate(own)))
        spread = time.perf_counter() - start
        batch = (before + await self.ask(whole)) / 2
        return {"base": size / batch, "value": size / spread, "ratio": batch / spread, "requests": size}

    async def health(self) -> Row:
        idle = await self.pings()
        others = [body | {"n": 4} for body in bodies(self.device, 4)]
        loaded = await self.beside(others, self.pings())
        first, second = (float(np.quantile(seconds, 0.95)) for seconds in (idle, loaded))
        return {"base": first, "value": second, "ratio": second / first, "requests": len(idle)}

    async def memory(self) -> Row:
        """Send requests from sixteen clients, and look at the resident megabytes of the server."""
        own = bodies(self.device, min(self.sizes.many, 500))
        todo = [
            own[i % len(own)] | {"seed": i, "max_tokens": 4 + i % 9, "method": "independent"}
            for i in range(self.sizes.many)
        ]
        seen: dict[int, float] = {}

        async def client() -> None:
            while todo:
                await self.ask(todo.pop())
                seen[len(todo)] = resident(self.pid)

        await asyncio.gather(*(client() for _ in range(16)))
        early, late = seen[min(seen, key=lambda left: abs(left - 0.75 * self.sizes.many))], seen[min(seen)]
        return {"base": early, "value": late, "ratio": late / early, "requests": self.sizes.many}


def resident(pid: int) -> float:
    """Return the megabytes of a process that are in memory."""
    pages = Path(f"/proc/{pid}/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGESIZE") / 2**20


def joins(device: str, sizes: Sizes) -> Row:
    """Compare a join with a step: the processor time of our own thread, so that other users do not count."""
    model, own = build(device), bodies(device, 6 * sizes.turns)
    prepared = prepare(model, [body["prompt"] for body in own], {"k": 1, "gen_length": own[0].get("max_tokens", 48)})
    loop, spent = Loop(model, prepared.settings), {"join": list[float](), "step": list[float]()}
    for name, one in enumerate(prepared.requests):
        start = time.thread_time()
        loop.join(arrivals(model, prepared.settings, [one], [name], [name]))
        middle = time.thread_time()
        loop.step()
        spent["join"].append(middle - start)
        spent["step"].append(time.thread_time() - middle)
    first, second = (float(np.median(spent[part][1:])) for part in ("step", "join"))
    return {"base": first, "value": second, "ratio": second / first, "requests": len(own)}


async def measure(section: str, url: str, pid: int, device: str, sizes: Sizes) -> Row:
    async with httpx.AsyncClient(timeout=None, limits=httpx.Limits(max_connections=None), trust_env=False) as http:
        client = Client(url, device, sizes, http, pid)
        await client.in_turn(bodies(device, 2))
        return dict(await getattr(client, section)())


def table(results: Sequence[Row]) -> str:
    """Return a Markdown table, followed by the origin of the figures."""
    head, *rows = results
    cells = []
    for row in rows:
        what, target = TARGETS[row["section"]]
        unit, scale = {"throughput": ("/s", 1), "memory": (" MB", 1)}.get(row["section"], (" ms", 1000))
        against, measured = (f"{number(scale * row[name])}{unit}" for name in ("base", "value"))
        sides = {"against": against, "measured": measured, "ratio": f"**{row['ratio']:.2f}**", "target": target}
        cells.append({"": what} | sides)
    origin = head["about"]
    where = (
        f"{origin['machine']}, torch {origin['torch']}, {origin['date']}, load {head['load']}; `{origin['command']}`"
    )
    return f"{table_of(cells)}\n\n({where})"


def tables() -> Tables:
    """Return the tables of the committed results."""
    return {"cpu": lambda: table(read(RESULTS / "serve.jsonl.xz"))}


def main(arguments: Sequence[str]) -> None:
    parser = make_parser("serve", __doc__, RESULTS / "serve.jsonl.xz", small=True)
    parser.add_argument("--sections", default=",".join(TARGETS), help=f"some of {', '.join(TARGETS)}")
    options = parser.parse_args(arguments)
    device, sizes = choose_device(options.device).type, SMALL if options.small else FULL
    device = "tiny" if options.small else device
    rows = list[Row]()
    with server(device) as (url, pid):
        for section in chosen(options.sections, list(TARGETS), "section"):
            row = joins(device, sizes) if section == "join" else asyncio.run(measure(section, url, pid, device, sizes))
            rows.append({"section": section} | row)
            show(rows[-1])
    facts = about("cpu" if device == "tiny" else device, ["bench", "serve", "--device", device])
    write(options.out, results := [{"about": facts, "load": round(os.getloadavg()[1], 1)}, *rows])
    print(table(results))


if __name__ == "__main__":  # the server process
    serve(lambda: build(sys.argv[1]), name="bench", port=0, started=lambda url: print(url, flush=True))
