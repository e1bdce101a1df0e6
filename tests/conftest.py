import pytest
import torch

torch.set_num_threads(1)  # tiny models: threads would only wait for each other


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    """Nothing in the tests may reach for a hub."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
