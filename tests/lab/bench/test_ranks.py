"""What two real ranks send in one step."""

import pytest

from tests.distributed.ranks import finish, start


@pytest.mark.full
def test_two_ranks_count_what_they_send(tmp_path):
    ranks = start("d5p4_lab.bench.ranks:main", 2, tmp_path, arguments=["--device", "cpu"])
    (code, printed), (other, nothing) = finish(ranks)
    assert (code, other, nothing) == (0, 0, ""), printed
    assert "what features of a step, 2 ranks, bytes 125829120" in printed  # 60 x 256 x 4,096 numbers of 2 bytes
    assert "draws and statistics of a step" in printed and "next pool of a step" in printed
