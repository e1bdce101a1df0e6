"""`d5p4 serve` up to the server, which tests/serve/test_process.py starts: what is wrong is one sentence and code 2."""

import re
import socket
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import d5p4.serve


@pytest.fixture
def served(monkeypatch):
    """What the command hands to the server, which does not start."""
    given_to_server = SimpleNamespace()

    def serve(load, *, started, **given):
        given_to_server.load, given_to_server.given = load, given
        started("http://127.0.0.1:8000")

    monkeypatch.setattr(d5p4.serve, "serve", serve)
    return given_to_server


def test_bad_options(fails, models):
    assert "'no-such-model'" in fails("serve", "--model", "no-such-model")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for options, expected in (
            (("--max-queue", 0), "--max-queue=0"),
            (("--timeout", "nan"), "--timeout=nan"),
            (("--grace", "inf"), "--grace=inf"),
            (("--api-key", " "), "--api-key=' ' is empty"),
            (("--host", "192.0.2.1"), "cannot listen at 192.0.2.1"),
            (("--port", 0, "--cache", "exact"), "--cache='exact' needs a block-causal model"),
            (("--port", port), f"cannot listen at 127.0.0.1 port {port}"),
        ):
            assert expected in fails("serve", "--quiet", "--model", models.llada, *options), options


def test_weights_that_cannot_be_read_end_it(fails, models, tmp_path):
    """The address is open while the model is being loaded; a failure closes it with a sentence."""
    for file in Path(models.llada).iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "model.safetensors").write_bytes(b"not weights")
    assert "model.safetensors" in fails("serve", "--quiet", "--model", tmp_path, "--port", 0)


def test_without_the_extra_it_says_how_to_get_it(fails, models, monkeypatch):
    for missing in ("fastapi", "uvicorn", "prometheus_client", "starlette"):
        with monkeypatch.context() as patch:
            patch.setattr(d5p4, "serve", d5p4.serve)
            for name in [name for name in sys.modules if name.startswith(("d5p4.serve", f"{missing}."))]:
                patch.delitem(sys.modules, name)
            patch.setitem(sys.modules, missing, None)
            message = fails("serve", "--quiet", "--model", models.llada, "--host", "192.0.2.1")
        command = re.fullmatch(rf"error: {missing} is missing: (\S+) -m pip install (?:-e )?'(.+)\[serve\]'\n", message)
        assert command and command[1] == sys.executable, message
        assert command[2] == "d5p4" or (Path(command[2]) / "src/d5p4/serve").is_dir(), message


def test_names_and_flags_reach_the_server(cli, models, served, tmp_path, monkeypatch):
    exposed, local = (cli("serve", "--model", models.llada, *host) for host in (("--host", "0.0.0.0"), ()))
    assert local.exit_code == 0 and "playground  http://127.0.0.1:8000/\n" in local.stderr
    assert "--api-key" in exposed.stderr and "--api-key" not in local.stderr  # an open address is worth a note
    assert served.given["name"] == "llada" and served.given["host"] == "127.0.0.1"
    assert served.given["limits"] == d5p4.serve.Limits()  # the defaults of the flags are those of the limits
    monkeypatch.setenv("D5P4_API_KEY", "k")
    (tmp_path / "served_plugin.py").write_text("import d5p4\nd5p4.eager = True\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    flags = ["--host", "0.0.0.0", "--name", "mine", "--max-pool", 3, "--max-work", 2.5, "--log-prompts"]
    flags += ["--allowed-host", "box.local", "--cors-origin", "https://a.example", "--cors-origin", "https://b.example"]
    flags += ["--deterministic", "--max-tokens-per-forward", 64, "--cache", "none", "--plugin", "served_plugin"]
    result = cli("serve", "--model", models.chat, *flags)
    assert d5p4.__dict__.pop("eager")
    assert result.exit_code == 0 and "note" not in result.stderr, result.output
    limits = served.given.pop("limits")
    assert limits == d5p4.serve.Limits(max_pool=3, max_work=2.5)
    assert served.given == {
        "name": "mine",
        "host": "0.0.0.0",
        "port": 8000,
        "api_key": "k",
        "hosts": ["box.local"],
        "cors_origins": ["https://a.example", "https://b.example"],
        "log_prompts": True,
        "deterministic": True,
        "cache": "none",
        "max_tokens_per_forward": 64,
    }
    assert served.load().generation_defaults["temperature"] == 0.8
