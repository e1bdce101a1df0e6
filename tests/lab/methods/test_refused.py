"""What the lab's methods refuse, through the checks that a stranger's method has."""

from __future__ import annotations

import d5p4
from tests.fake import FakeModel
from tests.refusals import refusal

BAD = [
    ({"method": "ots", "segment": 0}, "segment=0 must be a whole number of at least 1"),
    ({"method": "ots", "spare": 200}, "k=2 with spare=200 makes 40804 children per search, more than 16384"),
    ({"method": "ots", "distinct": True}, "distinct=True does not fit method ots"),
    ({"method": "soar", "temperature": 1.0}, "temperature=1.0 has no meaning for method soar"),
    ({"method": "soar", "reveal": "schedule"}, "reveal='schedule' does not say which positions are sure"),
    ({"method": "soar", "steps": 3}, "reveal='schedule' does not say which positions are sure"),
    ({"method": "soar", "w": 2}, "w=2 has no meaning for method soar"),
    ({"method": "odd", "order": "ancestral", "eos": "free"}, "order='ancestral' chooses positions by chance"),
    ({"method": "sr-smc", "interval": 2.5}, "interval=2.5 must be a whole number of steps"),
    ({"method": "d5p3", "solver": "exact"}, "solver='exact' needs the partition"),
]


def test_options_that_do_not_fit_are_refused() -> None:
    for options, message in BAD:
        assert message in refusal(d5p4.generate, FakeModel(), "ab", k=2, gen_length=8, **options), options
