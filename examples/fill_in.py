"""Fill the holes of a text in several ways. Usage: fill_in.py MODEL"""

import sys

import d5p4

model = d5p4.load(sys.argv[1])
hole = model.tokenizer.mask_token * 6
result = d5p4.generate(model, f"the cat {hole} the mat", k=3, chat=False, seed=0)
for text in result.texts[0]:
    print(repr(text))
