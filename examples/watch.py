"""Watch the best draft being denoised, through the callback. Usage: watch.py MODEL"""

import sys

import d5p4

model = d5p4.load(sys.argv[1])


def show(shot: d5p4.Snapshot) -> None:
    draft = shot.next_tokens[0, 0].tolist()
    print(f"{shot.step + 1:3}/{shot.steps}", "".join("░" if t == model.mask_id else model.tokenizer.decode([t]) for t in draft))


d5p4.generate(model, "a story", k=2, gen_length=16, steps=8, seed=0, callback=show)
