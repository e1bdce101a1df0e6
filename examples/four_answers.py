"""Four different answers to one prompt. Usage: four_answers.py MODEL PROMPT"""

import sys

import d5p4

_, folder, prompt = sys.argv
model = d5p4.load(folder)
result = d5p4.generate(model, prompt, k=4, seed=0)
for score, text in zip(result.score[0], result.texts[0], strict=True):
    print(f"{score:8.3f}  {text!r}")
print(f"{int(result.distinct[0])} of 4 differ; {int(result.rows[0])} rows instead of {int(result.rows_nominal[0])}")
