"""Fill a gap in an antibody with eight different loops. Usage: fill_antibody.py MODEL [CHAIN]

MODEL is a folder with AntiBERTy or another protein model; docs/tutorials/fill.md makes one. Each underscore of CHAIN is
one amino acid to fill. Without CHAIN, it is the heavy chain of trastuzumab with a gap in the loop CDR-H3.
"""

import sys

import d5p4

CHAIN = (
    "EVQLVESGGGLVQPGGSLRLSCAASGFNIKDTYIHWVRQAPGKGLEWVARIYPTNGYTRYADSVKG"
    "RFTISADTSKNTAYLQMNSLRAEDTAVYYCSR________DYWGQGTLVTVSS"
)

if len(sys.argv) not in (2, 3):
    sys.exit("usage: fill_antibody.py MODEL [CHAIN]")
model = d5p4.load(sys.argv[1])
chain = sys.argv[2] if len(sys.argv) == 3 else CHAIN
result = d5p4.generate(model, chain.replace("_", model.tokenizer.mask_token), k=8, seed=1)
start, end = chain.index("_"), chain.rindex("_") + 1
for text, score in zip(result.texts[0], result.score[0].tolist(), strict=True):
    print(f"{score:6.2f}  {text[start - 5 : start].lower()}{text[start:end]}{text[end : end + 5].lower()}")
