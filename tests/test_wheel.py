"""What users install: the library and its models in one wheel, without the lab; it works offline and alone."""

import json
import os
import signal
import socket
import subprocess
import time
import venv
import zipfile
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

ROOT = Path(__file__).resolve().parent.parent
LARGEST = 25 << 20  # bytes: packed, the weights take 15, 4 and 5 MiB, everything else less than one
LAB = {"d5p4_lab", "train", "paper", "bench", "results", "experiments", "benchmarks"}
PUZZLE = "86,28,13,31:96"


def test_the_wheel_holds_the_library_and_its_models_and_nothing_of_the_lab(tmp_path, monkeypatch):
    from hatchling.build import build_wheel  # what pip calls, without a second environment

    monkeypatch.chdir(ROOT)  # where pip calls it
    wheel = tmp_path / build_wheel(str(tmp_path))
    with zipfile.ZipFile(wheel) as content:
        files = {name for name in content.namelist() if ".dist-info/" not in name}
    source = [path.relative_to(ROOT / "src") for path in (ROOT / "src" / "d5p4").rglob("*") if path.is_file()]
    assert files == {path.as_posix() for path in source if "__pycache__" not in path.parts and path.name[0] != "."}
    assert not LAB & {part for name in files for part in name.split("/")}
    assert {"d5p4/view/page/index.html", "d5p4/py.typed"} <= files
    for name in ("countdown", "programs", "smol"):
        folder = f"d5p4/models/weights/{name}/"
        assert f"{folder}config.json" in files
        assert any(file.startswith(folder) and file.endswith(".safetensors") for file in files)
    assert wheel.stat().st_size < LARGEST


def environment(online=False):
    """What a process gets: nothing that leads to this checkout and, unless online, a network that answers nothing."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "D5P4"))}
    nowhere = "http://127.0.0.1:9"
    offline = {"HF_HUB_OFFLINE": "1", "HTTP_PROXY": nowhere, "HTTPS_PROXY": nowhere, "ALL_PROXY": nowhere}
    return kept | {"OMP_NUM_THREADS": "1", "COLUMNS": "120", "TERM": "dumb"} | ({} if online else offline)


def run(*command, cwd, online=False):
    words = list(map(str, command))
    done = subprocess.run(words, cwd=cwd, capture_output=True, text=True, env=environment(online))
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_a_wheel_in_an_empty_environment_does_everything_offline(tmp_path):
    venv.create(tmp_path / "empty", with_pip=True)
    binaries = tmp_path / "empty" / ("Scripts" if os.name == "nt" else "bin")
    pip = (binaries / "python", "-m", "pip")
    run(*pip, "wheel", "-qq", "--no-deps", "--wheel-dir", tmp_path, ROOT, cwd=tmp_path, online=True)
    (wheel,) = tmp_path.glob("*.whl")

    def install(what):
        run(*pip, "install", "-qq", "-c", ROOT / "constraints.txt", what, cwd=tmp_path, online=True)

    def d5p4(*words):
        return run(binaries / "d5p4", *words, cwd=tmp_path)

    install(wheel)
    call = [PUZZLE, "--model", "countdown", "--gen-length", "36", "--seed", "0"]
    answers = d5p4("generate", *call)
    assert "=96" in answers and "4 of 4 distinct" in answers
    compared = d5p4("compare", *call, "--methods", "independent,d5p4")
    assert "independent" in compared and "d5p4" in compared and "=96" in compared
    d5p4("trace", *call, "-o", "trace.html")
    assert "=96" in (tmp_path / "trace.html").read_text(encoding="utf-8")

    (tmp_path / "prompts.txt").write_text(f"{PUZZLE}\n{PUZZLE}\n")
    d5p4("run", "-i", "prompts.txt", "-o", "answers.jsonl", "--model", "countdown", "--gen-length", "36", "--seed", "0")
    lines = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [line["prompt"] for line in lines] == [PUZZLE, PUZZLE]
    program = "import importlib.util as u; print(u.find_spec('d5p4_lab'), u.find_spec('d5p4').origin)"
    lab, library = run(binaries / "python", "-c", program, cwd=tmp_path).split()
    assert lab == "None" and Path(library).is_relative_to(tmp_path / "empty")

    install(f"{wheel}[eval,serve]")
    assert "pass@" in d5p4("score", "answers.jsonl", "--grader", "countdown")
    serve_once(binaries / "d5p4", tmp_path)


def serve_once(command, folder):
    """Start a server, ask one question, stop it with Ctrl-C."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])

    def take_interrupts():  # a shell may have SIGINT ignored
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    words = [command, "serve", "--model", "countdown", "--port", port]
    server = subprocess.Popen(words, cwd=folder, env=environment(), preexec_fn=take_interrupts)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60, trust_env=False) as client:
            ready = False
            while not ready:  # a hang ends with the time limit of the test
                assert server.poll() is None
                time.sleep(0.1)
                with suppress(httpx.TransportError):
                    ready = client.get("/readyz").status_code == 200
            body = {"model": "countdown", "prompt": PUZZLE, "n": 2}
            assert len(client.post("/v1/completions", json=body).json()["choices"]) == 2
            assert "<title>" in client.get("/").text
        server.send_signal(signal.SIGINT)
        server.wait(60)
    finally:
        server.kill()
        server.wait()
