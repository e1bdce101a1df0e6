"""The lab: what we do with d5p4. It trains the models in the box, runs the paper again, and measures.

It is part of the repository and of the editable install, and absent from the wheel.
"""
