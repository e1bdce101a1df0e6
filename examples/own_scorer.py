"""Best of n by a scorer of your own, which is any function of texts. Usage: own_scorer.py MODEL PROMPT"""

import sys

import d5p4


def shortest(texts: list[str]) -> list[float]:
    return [-float(len(text)) for text in texts]


if len(sys.argv) != 3:
    sys.exit("usage: own_scorer.py MODEL PROMPT")
_, folder, prompt = sys.argv
result = d5p4.generate(d5p4.load(folder), prompt, method="best-of-n", k=2, w=8, scorer=shortest, seed=0)
for score, text in zip(result.score[0], result.texts[0], strict=True):
    print(f"{score:6.0f}  {text!r}")
