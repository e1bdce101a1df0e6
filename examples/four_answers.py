"""Print four different answers to one prompt. Usage: four_answers.py MODEL PROMPT

The answers of the model `countdown` are checked and marked right or wrong.
"""

import sys

import d5p4
from d5p4.eval.countdown import is_right

if len(sys.argv) != 3:
    sys.exit("usage: four_answers.py MODEL PROMPT")
_, folder, prompt = sys.argv
model = d5p4.load(folder)
result = d5p4.generate(model, prompt, seed=0)
for score, text in zip(result.score[0], result.texts[0], strict=True):
    mark = "" if model.name != "countdown" else "right  " if is_right(prompt, text) else "wrong  "
    print(f"{score:8.3f}  {mark}{text!r}")
print(f"{int(result.distinct[0])} different answers, {int(result.rows[0])} rows through the model")
