"""Fill the holes of a text, written as _, in three ways. Usage: fill_in.py MODEL "text with ___ holes"

End-of-text is not drawn here (eos="never"), so every hole gets a token that shows.
"""

import sys

import d5p4

_, folder, text = sys.argv
model = d5p4.load(folder)
holes = text.replace("_", model.tokenizer.mask_token)
for filled in d5p4.generate(model, holes, k=3, chat=False, distinct=True, eos="never", seed=0).texts[0]:
    print(repr(filled))
