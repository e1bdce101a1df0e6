"""Modules that make d5p4 available inside other tools. Each module needs an optional extra of the package."""
