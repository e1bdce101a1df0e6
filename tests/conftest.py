"""What every test starts from, whatever the machine, the terminal and the order of files."""

import os
import random
import secrets

import pytest
import torch

torch.set_num_threads(1)  # tiny models: threads would only wait for each other
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before any kernel is imported: on the CPU they run interpreted

# Nothing in the tests may reach for a hub. Libraries look when they are imported; processes of tests inherit it all.
os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(16)}
for name in ("CLICOLOR_FORCE", "FORCE_COLOR", "GITHUB_ACTIONS", "PY_COLORS", "TERMINAL_WIDTH", "TTY_COMPATIBLE"):
    os.environ.pop(name, None)  # no colours and no width but what a test asks for


import d5p4  # noqa: E402 - after the environment is set

d5p4.load_plugins(["d5p4_lab.methods"])  # tests of all methods are tests of the lab's rivals, too


@pytest.fixture(scope="session", autouse=True)
def terminal():
    """The same for all tests, whatever the environment of the caller."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "100")
        patch.setenv("LINES", "40")
        patch.setenv("TERM", "xterm")
        patch.delenv("NO_COLOR", raising=False)
        yield


def pytest_configure(config):
    if hasattr(config.option, "loadscopereorder"):  # or files with few but slow tests would come last, on one core
        config.option.loadscopereorder = False


def pytest_collection_modifyitems(items):
    """SHUFFLE_FILES=7 runs the files in another order, the same on all workers; tests of a file stay together."""
    if seed := os.environ.get("SHUFFLE_FILES"):
        files = sorted({item.path for item in items})
        random.Random(int(seed)).shuffle(files)
        place = {path: number for number, path in enumerate(files)}
        items.sort(key=lambda item: place[item.path])
    else:
        items.sort(key=lambda item: item.path.name != "test_shipped.py")  # its full tests take longest: they come first
