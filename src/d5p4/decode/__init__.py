"""The loop and its parts. Read `loop.py` first; it meets the others in the order of a step.

loop      one step after the other: prompts join and leave, rows run, and the search makes the next pool
batch     the prompts that are decoded together, and what is kept for them from step to step
schedule  which positions a step may reveal, and when a prompt is finished
pool      what a call shares, and the rows of its prompts
ranks     the processes that divide the forwards of a call
rows      distinct rows through the body, guidance, and the states that complete rows keep
view      what a selector sees and chooses; measures computes quality and similarity
answers   costs, lineage, and the result
"""

from .loop import decode

__all__ = ["decode"]
