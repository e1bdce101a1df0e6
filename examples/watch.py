"""Watch the best draft being denoised, through the callback. Usage: watch.py MODEL"""

import sys

import d5p4

model = d5p4.load(sys.argv[1])


def show(shot: d5p4.Snapshot) -> None:
    draft = shot.next_tokens[0, 0].tolist()
    text = "".join("░" if token == model.mask_id else model.tokenizer.decode([token]) for token in draft)
    print(f"{shot.step + 1:3}/{shot.steps}", text)


d5p4.generate(model, "a story", k=2, gen_length=16, steps=8, seed=0, callback=show)
