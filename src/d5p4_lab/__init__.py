"""The lab trains the shipped models, repeats the paper's experiments and runs the benchmarks.

The repository and the editable install contain it; the wheel does not.
"""
