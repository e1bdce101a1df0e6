"""A selection rule of your own: a function of the pool's view. Usage: own_method.py MODEL PROMPT

This one keeps, of each group, the child that is least like the rest of the pool.
"""

import sys

from torch import Tensor

import d5p4


def loners(pool: d5p4.PoolView, k: int, key: Tensor) -> d5p4.Choice:
    lonely = -pool.similarity.mean(-1)  # [P, N]
    width = pool.size // k
    best = lonely.view(-1, k, width).argmax(-1)  # [P, k]
    return pool.keep(best + width * best.new_tensor(range(k)))


d5p4.register(d5p4.Method("loners", loners, "the child least like the pool"))
_, folder, prompt = sys.argv
for text in d5p4.generate(d5p4.load(folder), prompt, method="loners", k=4, seed=0).texts[0]:
    print(repr(text))
