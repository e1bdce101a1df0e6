"""Tasks with a checker, and the figures they are reported by."""
