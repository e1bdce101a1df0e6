"""d5p4 as a part of other people's tools. Each module needs an extra and is imported only by who has it."""
