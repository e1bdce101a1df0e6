"""Register a selection rule of your own, a function of the pool. Usage: own_method.py MODEL PROMPT

This rule keeps one child per group: the one that is least like the rest of the pool.
"""

import sys

from torch import Tensor

import d5p4


def loners(pool: d5p4.PoolView, k: int, key: Tensor) -> d5p4.Choice:
    loneliness = -pool.similarity.mean(-1)  # [P, N]
    children = pool.size // k  # per group
    best = loneliness.view(-1, k, children).argmax(-1)  # [P, k]
    return pool.keep(best + children * best.new_tensor(range(k)))


d5p4.register(d5p4.Method("loners", loners, "the child least like the pool"))
if len(sys.argv) != 3:
    sys.exit("usage: own_method.py MODEL PROMPT")
_, folder, prompt = sys.argv
result = d5p4.generate(d5p4.load(folder), prompt, method="loners", k=4, distinct=True, spare=4, seed=0)
for text in result.texts[0]:
    print(repr(text))
