import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before any kernel is imported: on the CPU they run interpreted

torch.set_num_threads(1)  # tiny models: threads would only wait for each other


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    """Nothing in the tests may reach for a hub."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
