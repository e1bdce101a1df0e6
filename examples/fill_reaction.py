"""Fill a gap in a reaction and say which products are molecules. Usage: fill_reaction.py MODEL [REACTION]

MODEL is a folder with rxnfp; docs/tutorials/fill.md makes one. Each underscore of REACTION is one token of SMILES.
Without REACTION, it is the coupling of an acid with an amine, with a gap at the new bond. It needs `pip install rdkit`.
"""

import sys

from rdkit import Chem, RDLogger

import d5p4

REACTION = "Nc1cccc2cnccc12.O=C(O)c1cccs1>>O=C(_______2cnccc12)c1cccs1"

if len(sys.argv) not in (2, 3):
    sys.exit("usage: fill_reaction.py MODEL [REACTION]")
RDLogger.DisableLog("rdApp.*")  # its complaints about fillings that are no molecules
model = d5p4.load(sys.argv[1])
reaction = sys.argv[2] if len(sys.argv) == 3 else REACTION
result = d5p4.generate(model, reaction.replace("_", model.tokenizer.mask_token), k=8, seed=1)
for text, score in zip(result.texts[0], result.score[0].tolist(), strict=True):
    product = text.partition(">>")[2]
    print(f"{score:6.2f}  {'molecule' if Chem.MolFromSmiles(product) else '-':8}  {product}")
