"""Small checkpoints of the three first architectures, for tests on CUDA."""

import pytest

from tests.checkpoints import write_dream, write_llada, write_mdlm

WRITERS = {"llada": write_llada, "dream": write_dream, "mdlm": write_mdlm}


@pytest.fixture(scope="module", params=WRITERS)
def folder(request, tmp_path_factory):
    return WRITERS[request.param](tmp_path_factory.mktemp(request.param))
