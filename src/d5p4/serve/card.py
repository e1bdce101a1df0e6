"""What the server says of its model: facts, defaults, methods, limits, and prompts to try."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from ..eval.graders import grader_of
from ..methods import METHODS
from ..record import finite
from ..types import Model
from ..view import describe
from .ask import has_template
from .limits import Limits

ABOUT = {
    "books": "Continues a text in the manner of old novels.",
}
EXAMPLES: dict[str, list[dict[str, Any]]] = {
    "books": [
        {"label": "a cold morning", "prompt": "It was a cold morning and", "max_tokens": 48, "steps": 24},
        {"label": "a letter", "prompt": "My dear sister, I write to tell you that", "max_tokens": 48, "steps": 24},
        {"label": "at sea", "prompt": "The captain looked at the sea and said", "max_tokens": 48, "steps": 24},
    ],
}
TALK = [
    {"label": "a river", "prompt": "Name a river and say one thing about it."},
    {"label": "a riddle", "prompt": "Write a riddle about the wind."},
    {"label": "a sum", "prompt": "Tom has 3 boxes of 12 eggs and breaks 5. How many are left? Explain."},
]
"""For models that take a conversation."""


def card(model: Model, limits: Limits) -> dict[str, Any]:
    """The field `d5p4` of a model's entry; the playground is drawn from it."""
    chat, facts = has_template(model), describe(model)
    task = grader_of(model)  # it may bring a description and examples
    prompts = [{"label": label, "prompt": prompt} for label, prompt in task.examples] if task is not None else []
    fallback = TALK if chat else [{"label": "a beginning", "prompt": "It was a cold morning and", "max_tokens": 48}]
    methods = [
        {
            "name": method.name, "summary": method.summary, "section": method.section, "wide": method.wide,
            "parameters": dict(method.parameters) | dict(_own(model, method.name)),
        }
        for method in METHODS.values()
    ]  # fmt: skip
    return finite(
        facts
        | {
            "description": (task.about if task is not None else None) or ABOUT.get(facts["name"]),
            "chat": chat,
            "default_order": model.default_order,
            "defaults": dict(model.generation_defaults),
            "methods": methods,
            "limits": asdict(limits),
            "examples": prompts or EXAMPLES.get(facts["name"], fallback),
        }
    )


def _own(model: Model, method: str) -> dict[str, Any]:
    """What the model's files say of a method's parameters."""
    return model.generation_defaults.get("methods", {}).get(method, {})
