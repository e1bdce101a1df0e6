"""Forwards over ranks: the same answers, scores, lineage and counts for every number of ranks."""

from __future__ import annotations

import pytest

import d5p4
from tests.distributed import work
from tests.distributed.ranks import results

MDLM = {"carry_over": True}
METHODS = [*d5p4.METHODS]  # with those of the lab
CASES = [
    *[{"method": name} for name in METHODS],
    *[{"method": name, "k": 3, "guidance": 1.5} for name in METHODS],  # no number of ranks divides these
    {"method": "e-smc", "interval": 1},  # resamples at the last step too
    {"method": "best-of-n", "rank": "logprob"},
    {"method": "d5p4", "distinct": True},
    {"method": "d5p3", "distinct": True, "w": 3},
    {"method": "d5p4", "guidance": 2.0, "block_length": 3, "steps": 4},
    {"method": "d5p4", "features": "masked", "similarity": "rbf", "savings": False},
    {"method": "d5p4", "select_window": (1, 3)},
    {"method": "diverse-beam", "model": {"ordered": False}},  # permuted rows tie exactly
    {"method": "d5p4", "model": MDLM, "quality": "self-certainty", "steps": 9},
    {"method": "e-smc", "model": MDLM, "interval": 2, "steps": 9, "guidance": 1.5},
    {"method": "best-of-n", "rank": "logprob", "model": MDLM},
    {"method": "d5p3", "model": MDLM, "steps": 12, "order": "ancestral"},
]
ADAPTIVE = {"steps": None, "reveal": "threshold", "tau": 0.4, "model": {"scale": 2.5, "seed": 3}}
CASES += [
    *[{"method": name, **ADAPTIVE} for name in METHODS],
    {"method": "d5p3", **ADAPTIVE, "block_length": 3, "order": "top", "savings": False},
    {"method": "d5p4", **ADAPTIVE, "distinct": True, "select_window": (0.2, 0.6), "block_length": 3},
    {"method": "k-dpp", **ADAPTIVE, "guidance": 2.0, "guidance_window": (0.0, 0.5)},
    {"method": "d5p3", "stop": True, "eos": "free"},
    {"method": "tree", **ADAPTIVE, "temperature": 0.0, "spare": 4, "diversity": 1.0},
    {"method": "tree", **ADAPTIVE, "guidance": 2.0, "guidance_window": (0.3, 1.0), "block_length": 3, "savings": False},
    {"method": "tree", "model": {"vocabulary": 4, "seed": 1}, "gen_length": 2, "eos": "free", "order": "left"},
]
BLOCKS = {"model": {"shifted": False}, "gen_length": 9}  # block-causal, with an exact cache
SURE = {"reveal": "threshold", "tau": 0.3}
CASES += [
    {"method": "d5p4", **BLOCKS, "guidance": 1.5},
    {"method": "tree", **BLOCKS, "spare": 4, "model": {"shifted": True}},
    {"method": "k-dpp", **BLOCKS, **SURE},
    {
        "method": "d5p4",
        **BLOCKS,
        "k": 5,
        "guidance": 2.0,
        "guidance_window": (0.2, 0.7),
        "reveal": "threshold",
        "tau": 0.3,
    },
    {"method": "tree", **BLOCKS, "spare": 3, "guidance": 2.0, "guidance_window": (0.4, 1.0), "savings": False},
    {"method": "d5p4", "cache": "dual", "model": {"kind": "llada"}, "gen_length": 9, "block_length": 3},
    {
        "method": "tree",
        "cache": "prefix",
        "model": {"kind": "dream"},
        "gen_length": 9,
        "block_length": 3,
        "guidance": 2.0,
    },
]
MORE = [
    {**case, **extra}
    for case in CASES
    for extra in ({"seed": 11}, {"order": "tempered", "seed": 5}, {"order": "ancestral", "eos": "free", "steps": 9})
    if not ("order" in case and "order" in extra) and not ("reveal" in case and "steps" in extra)
]


FULL = [pytest.param(*case, marks=pytest.mark.full) for case in ((2, 1, False), (4, 1, False), (2, 1, True))]


@pytest.mark.parametrize("world, every, more", [(2, 3, False), (4, 7, False), *FULL])
def test_answers_do_not_depend_on_the_number_of_ranks(tmp_path, world, every, more):
    cases = (MORE if more else CASES)[::every]
    alone = work.decode(cases)
    for answers in results("tests.distributed.work:decode", world, tmp_path, cases=cases, mesh=[1, world]):
        for case, one, many in zip(cases, alone, answers, strict=True):
            assert many == one, case


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.full)])
def test_constraints_do_not_depend_on_the_number_of_ranks(tmp_path, world):
    form = {"regex": "(a|b){1,3}c|d(ef|gh)*", "steps": None}
    cases = [{"method": "tree", **form}, {"method": "d5p4", **form, "guidance": 1.5}]
    cases += [{"method": method, **BLOCKS, **form, "regex": "(a|b)cdefgh(a|b)+"} for method in ("tree", "independent")]
    runs = {"regex": "[a-d][b-e]{1,5}", "steps": None, "reveal": "threshold", "tau": 0.4}
    cases += [{"method": method, **runs} for method in ("tree", "independent", "d5p4", "best-of-n")]
    alone = work.decode(cases)
    for answers in results("tests.distributed.work:decode", world, tmp_path, cases=cases, mesh=[1, world]):
        assert answers == alone


def test_a_rank_computes_a_context_at_most_once_and_most_contexts_stay_on_their_rank(tmp_path):
    cases = [{"method": "d5p4"}, {"method": "independent"}]
    (alone,) = results("tests.distributed.work:compute_contexts", 1, tmp_path / "one", cases=cases)
    both = results("tests.distributed.work:compute_contexts", 2, tmp_path / "two", cases=cases)
    for number, case in enumerate(cases):
        needed = {tuple(context) for context in alone[number]}
        computed = [[tuple(context) for context in rank[number]] for rank in both]
        assert all(len(set(contexts)) == len(contexts) for contexts in computed), case
        assert set().union(*computed) == needed and all(computed), case
        assert sum(map(len, computed)) < 1.5 * len(needed), case


def test_prompts_join_on_all_ranks_when_the_first_rank_has_them(tmp_path):
    cases = [{"method": "d5p4"}, {"method": "tree", "block": True}, {"method": "d5p4", "block": True, "guidance": 1.5}]
    (alone,) = results("tests.distributed.work:join_requests", 1, tmp_path / "one", cases=cases)
    assert [len(answers) for answers in alone] == [5, 5, 5]
    for answers in results("tests.distributed.work:join_requests", 2, tmp_path / "two", cases=cases):
        assert answers == alone
