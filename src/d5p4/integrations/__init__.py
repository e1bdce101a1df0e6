"""d5p4 inside other tools. Each module needs an extra, which only its own users install."""
