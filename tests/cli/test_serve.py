"""`d5p4 serve` before anything listens: what is wrong is one sentence and code 2."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest

import d5p4
from tests.serve.process import process


def test_the_options_are_explained(cli):
    found = cli("serve", "--help")
    assert found.exit_code == 0
    for flag in ("--host", "--port", "--api-key", "D5P4_API_KEY", "--max-queue", "--max-pool", "--grace", "--timeout"):
        assert flag in found.stdout, flag


def test_a_model_that_is_not_there(fails):
    assert "'no-such-model'" in fails("serve", "--model", "no-such-model")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (("--max-queue", 0), "max_queue=0"),
        (("--timeout", "nan"), "timeout=nan"),
        (("--grace", "inf"), "grace=inf"),
        (("--api-key", " "), "api_key=' ' is empty"),
        (("--host", "999.1.1.1"), "cannot listen at 999.1.1.1"),
        (("--host", "192.0.2.1"), "cannot listen at 192.0.2.1"),
    ],
)
def test_bad_options(fails, models, options, expected):
    assert expected in fails("serve", "--model", models.llada, *options)


def test_a_port_that_is_taken(fails, models):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"cannot listen at 127.0.0.1 port {port}" in fails("serve", "--model", models.llada, "--port", port)


def test_weights_that_cannot_be_read_end_it(models, tmp_path):
    """The address is open while the model is being loaded; a failure closes it with a sentence."""
    folder = tmp_path / "broken"
    folder.mkdir()
    for file in Path(models.llada).iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    (folder / "model.safetensors").write_bytes(b"not weights")
    with process("--model", folder, "--port", 0) as command:
        assert command.end(60) == 2
        assert command.stderr.splitlines()[-1].startswith("error: ")
        assert "Traceback" not in command.stderr and "model.safetensors" in command.stderr


REST = [pytest.param(name, marks=pytest.mark.full) for name in ("uvicorn", "prometheus_client", "starlette")]


@pytest.mark.parametrize("missing", ["fastapi", *REST])
def test_without_the_extra_it_says_how_to_get_it(models, missing):
    script = f"import sys; sys.modules[{missing!r}] = None; from d5p4.cli import main; main()"
    words = [sys.executable, "-c", script, "serve", "--model", models.llada]
    environment = {"PYTHONPATH": str(Path(d5p4.__file__).parents[1]), "PATH": "", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(words, capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"error: {missing} is missing: pip install 'd5p4[serve]'\n"


def test_an_open_address_is_worth_a_note(models):
    with process("--model", models.llada, "--host", "0.0.0.0", "--port", 0) as command:
        client = command.ready()
        assert "--api-key" in command.stderr
        assert client.get("/healthz", headers={"host": "any.name"}).status_code == 200


def test_names_and_flags_reach_the_server(models):
    with process(
        "--model", models.chat, "--port", 0, "--name", "mine", "--max-pool", 3, "--allowed-host", "box.local",
        environment={"D5P4_API_KEY": "k"},
    ) as command:  # fmt: skip
        client = command.ready()
        client.headers["authorization"] = "Bearer k"
        entry = client.get("/v1/models", headers={"host": "box.local"}).json()["data"][0]
        assert entry["id"] == "mine" and entry["d5p4"]["limits"]["max_pool"] == 3
        assert entry["d5p4"]["defaults"]["temperature"] == 0.8 and entry["d5p4"]["chat"] is True
        assert client.get("/v1/models", headers={"authorization": "Bearer l"}).status_code == 401
        assert "box.local" not in command.stderr
