"""The lab trains the shipped models, repeats the paper's experiments and runs the benchmarks.

The repository and an editable install contain the lab. The wheel does not contain the lab.
"""

from . import methods  # noqa: F401 - registers the methods of the lab
