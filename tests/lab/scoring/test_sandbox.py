"""Programs that models wrote run with limits, in a process of their own."""

import pytest

from d5p4_lab.scoring.sandbox import passes, without_network

WRITES = "open('left', 'w').write('x')\nimport os\nassert os.listdir() and 'HOME' not in os.environ"
SENDS = "import socket\nsocket.create_connection(('192.0.2.1', 9), 0.2)"
REFUSED = f"import errno\ntry:\n    {SENDS.splitlines()[0]}\n    {SENDS.splitlines()[1]}\nexcept OSError as e:\n"
REFUSED += "    assert e.errno == errno.ENETUNREACH"


@pytest.mark.parametrize(
    ("program", "passed"),
    [
        ("assert 1 + 1 == 2", True),
        ("assert 1 + 1 == 3", False),
        ("def broken(:", False),
        ("import sys; sys.exit(0)", False),  # the end is not reached
        ("while True: pass", False),
        ("x = bytearray(1 << 30)", False),
        ("open('large', 'w').write('x' * (1 << 21))", False),
        (WRITES, True),
        ("import subprocess; subprocess.Popen(['sleep', '60'])", True),  # it is killed with its parent
        ("print('half a surrogate: \ud800')", True),
    ],
)
def test_limits(program, passed):
    assert passes(program, seconds=2, memory=1 << 29) is passed


@pytest.mark.skipif(not without_network(), reason="this machine does not let `unshare` take the network away")
def test_there_is_no_network():
    assert passes(REFUSED, seconds=2)
