"""Best of n by a scorer of your own: any function of texts. Usage: own_scorer.py MODEL"""

import sys

import d5p4


def shortest(texts: list[str]) -> list[float]:
    return [-float(len(text)) for text in texts]


model = d5p4.load(sys.argv[1])
result = d5p4.generate(model, "a story", method="best-of-n", k=2, w=8, scorer=shortest, gen_length=16, seed=0)
for text in result.texts[0]:
    print(len(text), repr(text))
