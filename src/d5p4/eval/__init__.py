"""Measures answers: metrics of texts, graders, and the report that `d5p4 score` prints."""
