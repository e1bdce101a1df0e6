"""Text in, numbers out: metrics of answers, graders, and the report that `d5p4 score` prints."""
