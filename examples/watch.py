"""Watch a draft grow step by step, through the callback. Usage: watch.py MODEL PROMPT"""

import sys

import d5p4

if len(sys.argv) != 3:
    sys.exit("usage: watch.py MODEL PROMPT")
_, folder, prompt = sys.argv
model = d5p4.load(folder)


def show(snapshot: d5p4.Snapshot) -> None:
    draft = snapshot.next_tokens[0, 0].tolist()
    text = "".join("░" if token == model.mask_id else model.tokenizer.decode([token]) for token in draft)
    print(f"{snapshot.step + 1:3}/{snapshot.steps}", text)


d5p4.generate(model, prompt, k=2, seed=0, callback=show)
