from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from tests.fake import FakeModel
from tests.serve.running import Running, running


@pytest.fixture(scope="package")
def server() -> Iterator[Running]:
    """A quick model behind a server of which nobody asks too much."""
    with running(FakeModel()) as server:
        yield server


@pytest.fixture(scope="package")
def client(server: Running) -> openai.OpenAI:
    return server.client()
