"""Fill the holes of a text in three ways. Usage: fill_in.py MODEL "text with ___ holes"

Each underscore is one token to fill. eos="never" keeps the end-of-text token, which shows nothing, out of the holes.
"""

import sys

import d5p4

if len(sys.argv) != 3:
    sys.exit("usage: fill_in.py MODEL TEXT")
_, folder, text = sys.argv
model = d5p4.load(folder)
holes = text.replace("_", model.tokenizer.mask_token)
result = d5p4.generate(model, holes, k=3, chat=False, eos="never", seed=0)
for text in result.texts[0]:
    print(repr(text))
