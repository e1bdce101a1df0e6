"""Real processes that talk by gloo: `start` runs a function of a test module in each, with torchrun's environment."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def start(function: str, world: int, folder: Path, **given: Any) -> list[subprocess.Popen[str]]:
    """`world` processes that call `function` ("tests.module:name") with keyword arguments; each writes what it returns
    as JSON into folder/<rank>.json."""
    folder.mkdir(parents=True, exist_ok=True)
    port = str(free_port())
    environment = os.environ | {
        "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]),
    }  # fmt: skip
    command = [sys.executable, "-m", "tests.distributed.ranks", function, str(folder), json.dumps(given)]
    return [
        subprocess.Popen(
            command, env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)}, cwd=ROOT, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )
        for rank in range(world)
    ]  # fmt: skip


def finish(processes: list[subprocess.Popen[str]], timeout: float = 100) -> list[tuple[int, str]]:
    """Exit code and output of each; none is left behind."""
    try:
        return [(p.wait(), said) for p in processes for said, _ in [p.communicate(timeout=timeout)]]
    finally:
        for process in processes:
            process.kill()


def results(function: str, world: int, folder: Path, **given: Any) -> list[Any]:
    """What the function returned in each rank; all must end well."""
    for rank, (code, said) in enumerate(finish(start(function, world, folder, **given))):
        assert code == 0, f"rank {rank} ended with {code}:\n{said}"
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(world)]


def main() -> None:
    function, folder, given = sys.argv[1:]
    module, _, name = function.partition(":")
    found = getattr(__import__(module, fromlist=[name]), name)(**json.loads(given))
    Path(folder, f"{os.environ['RANK']}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
