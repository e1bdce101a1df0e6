"""Measure the throughput and the waiting times of the server on loopback, and compare with decoding prompts one by one.

    python -m d5p4_lab bench serve --device cpu

First, puzzles are decoded one by one in this process with `d5p4.generate`, each with its own seed. A server without
batching cannot be faster than this. Then a server process answers the same puzzles for 1, 8 and 32 clients. Each client
sends a new request when it has received the answer to its previous request. Every answer is compared with the answer
decoded alone. During this time another client asks for /healthz repeatedly. The waiting time of that client shows how
long the event loop was blocked.
"""

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import httpx
import numpy as np

import d5p4
from d5p4.models.load import choose_device

from ..provenance import about
from ..puzzles import problems
from ..tables import Row, Tables, table_of
from ..timing import wall
from . import RESULTS, generate, make_parser, read, show, write

OPTIONS: dict[int, dict[str, Any]] = {  # the options of the requests for n = 4 and for n = 1
    4: {"k": 4, "method": "d5p4", "w": 4, "distinct": True, "spare": 4},
    1: {"k": 1, "method": "d5p4", "w": 4},
}
REQUESTS = {"cpu": {4: 16, 1: 32}, "cuda": {4: 32, 1: 64}}  # how many requests for n = 4 and for n = 1
CLIENTS = (1, 8, 32)
Request = tuple[str, int]  # prompt, seed


def waits(seconds: Sequence[float]) -> dict[str, float]:
    return {"p50": float(np.quantile(seconds, 0.5)), "p95": float(np.quantile(seconds, 0.95))}


def alone(model: Any, n: int, requests: Sequence[Request]) -> tuple[list[list[str]], list[float]]:
    """Decode each prompt alone. Return the answers and the seconds of each prompt."""
    texts, seconds = [], []
    for prompt, seed in requests:
        result, spent = wall(partial(generate, model, prompt, seed=seed, **OPTIONS[n]), model.device)
        seconds.append(spent)
        texts.append(result.texts[0])
    return texts, seconds


@contextmanager
def server(*options: str) -> Iterator[str]:
    """Start a server process, and yield its address when it is ready."""
    command = [sys.executable, "-m", "d5p4", "serve", "--model", "countdown", "--port", "0", *options]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            lines = [process.stderr.readline()]
            while lines[-1] and not lines[-1].startswith("playground"):
                lines.append(process.stderr.readline())
            if not lines[-1]:
                raise d5p4.D5P4Error(f"the server did not start: {''.join(lines)}")
            url = lines[-1].split()[-1].rstrip("/")
            threading.Thread(target=list, args=(process.stderr,), daemon=True).start()  # the pipe must not fill up
            while httpx.get(f"{url}/readyz").status_code != 200:
                time.sleep(0.1)
            yield url
        finally:
            process.terminate()


async def load(url: str, n: int, requests: Sequence[Request], clients: int) -> dict[str, Any]:
    """Send the requests from `clients` clients at the same time, and return the answers and the waiting times."""
    todo, texts, seconds, pings = list(enumerate(requests))[::-1], {}, [], []
    over = asyncio.Event()
    async with httpx.AsyncClient(timeout=None, limits=httpx.Limits(max_connections=None)) as http:

        async def client() -> None:
            while todo:
                number, (prompt, seed) = todo.pop()
                body = {"prompt": prompt, "seed": seed, "n": n}
                body |= {name: value for name, value in OPTIONS[n].items() if name != "k"}
                start = time.perf_counter()
                answer = await http.post(f"{url}/v1/completions", json=body)
                seconds.append(time.perf_counter() - start)
                answer.raise_for_status()
                texts[number] = [choice["text"] for choice in answer.json()["choices"]]

        async def pulse() -> None:
            while not over.is_set():
                start = time.perf_counter()
                await http.get(f"{url}/healthz")
                pings.append(time.perf_counter() - start)
                await asyncio.sleep(0.05)

        heart = asyncio.create_task(pulse())
        start = time.perf_counter()
        await asyncio.gather(*(client() for _ in range(clients)))
        elapsed = time.perf_counter() - start
        over.set()
        await heart
    row = {"clients": clients, "rate": len(requests) / elapsed, **waits(seconds)}
    row |= {"healthz_p95": waits(pings)["p95"], "healthz_most": max(pings)}
    return row | {"texts": [texts[i] for i in range(len(requests))]}


def batches(url: str) -> tuple[float, float]:
    """Return the number of decodes that the server has made, and the total number of prompts in these decodes."""
    metrics = dict(line.rsplit(" ", 1) for line in httpx.get(f"{url}/metrics").text.splitlines() if line[0] != "#")
    return float(metrics["d5p4_batch_prompts_count"]), float(metrics["d5p4_batch_prompts_sum"])


def compared(row: dict[str, Any], expected: list[list[str]]) -> dict[str, Any]:
    """Replace the texts by `equal` (how many requests were answered as expected) and `different` (distinct answers)."""
    texts = row.pop("texts")
    equal = sum(a == b for a, b in zip(texts, expected, strict=True))
    return row | {"equal": equal, "different": sum(len(set(answers)) for answers in texts)}


def measure(n: int, count: int, device: str) -> dict[str, Any]:
    """Measure requests for n answers each: first decoded one by one, then served to 1, 8 and 32 clients."""
    prompts = [problem.prompt for problem in problems(count, numbers=4, seed=7)]
    requests = [(prompt, 1000 + number) for number, prompt in enumerate(prompts)]
    model = d5p4.load("countdown", device)
    alone(model, n, requests[:2])  # warm up
    expected, seconds = alone(model, n, requests)
    baseline = {"rate": count / sum(seconds), **waits(seconds)}
    baseline["all_different"] = sum(len(set(texts)) == n for texts in expected)
    print(f"n = {n}, one by one: {baseline['rate']:.2f} requests/s", flush=True)
    rows = []
    with server("--device", device) as url:
        asyncio.run(load(url, n, requests[:2], 1))
        for clients in CLIENTS:
            before = batches(url)
            row = compared(asyncio.run(load(url, n, requests, clients)), expected)
            decodes, decoded = (now - then for now, then in zip(batches(url), before, strict=True))
            rows.append(row | {"batch": decoded / decodes, "ratio": row["rate"] / baseline["rate"]})
            show(rows[-1])
    few = requests[: count // 2]
    exact = alone(d5p4.load("countdown", device, "float64"), n, few)[0]
    with server("--device", device, "--dtype", "float64") as url:
        double = compared(asyncio.run(load(url, n, few, CLIENTS[-1])), exact)
    show(double)
    facts = {"n": n, "dtype": str(model.dtype).removeprefix("torch."), "requests": count, "asked": OPTIONS[n]}
    return facts | {"alone": baseline, "served": rows, "float64": double | {"requests": len(few)}}


def table(results: Sequence[Row]) -> str:
    """Return a Markdown table, followed by notes and the origin of the figures."""
    (head, *parts), rows, notes = results, [], []

    def add(n: int, what: str, row: Row, **more: str) -> None:
        cells = {"n": str(n), "": what, "requests/s": f"{row['rate']:.2f}", "against one by one": "1"}
        cells |= {"p50": f"{row['p50']:.2f} s", "p95": f"{row['p95']:.2f} s", "prompts per decode": "1"}
        rows.append(cells | {"as decoded alone": "", "/healthz p95, most": ""} | more)

    for part in parts:
        n, count, base, double = part["n"], part["requests"], part["alone"], part["float64"]
        add(n, "`d5p4.generate`, one by one", base)
        for row in part["served"]:
            clients = f"{row['clients']} client{'s' * (row['clients'] > 1)}"
            more = {"against one by one": f"**{row['ratio']:.2f} ×**", "prompts per decode": f"{row['batch']:.1f}"}
            more["as decoded alone"] = f"{row['equal']} of {count}"
            more["/healthz p95, most"] = f"{1000 * row['healthz_p95']:.0f}, {1000 * row['healthz_most']:.0f} ms"
            add(n, clients, row, **more)
        different = f" {base['all_different']} of {count} puzzles got {n} different texts." if n > 1 else ""
        notes.append(
            f"n = {n}: {count} held-out puzzles of four numbers, each with its own seed, in {part['dtype']}."
            f"{different} In float64 with {CLIENTS[-1]} clients, "
            f"{double['equal']} of {double['requests']} requests got the answers that were decoded alone."
        )
    origin = head["about"]
    where = f"({origin['machine']}, torch {origin['torch']}, {origin['date']}; `{origin['command']}`)"
    return "\n".join([table_of(rows), "", *notes, where])


def tables() -> Tables:
    """Return the tables of the committed results."""
    return {
        "cpu": lambda: table(read(RESULTS / "serve.jsonl.xz")),
        "gpu": lambda: table(read(RESULTS / "serve-gpu.jsonl.xz")),
    }


def main(arguments: Sequence[str]) -> None:
    options = make_parser("serve", __doc__, RESULTS / "serve.jsonl.xz").parse_args(arguments)
    device = choose_device(options.device).type
    parts = [measure(n, count, device) for n, count in REQUESTS[device].items()]
    results = [{"about": about(device, ["bench", "serve", "--device", device])}, *parts]
    write(options.out, results)
    print(table(results))
