"""What the server says of its model: facts, defaults, methods, limits, and prompts to try."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from ..methods import METHODS
from ..record import finite
from ..types import Model
from ..view import describe
from ..view.grade import speaks_countdown
from .ask import has_template
from .limits import Limits

ABOUT = {
    "countdown": "Reach the number behind the colon with + − × ÷, using each of the others exactly once.",
    "books": "Continues a text in the manner of old novels.",
}
EXAMPLES: dict[str, list[dict[str, Any]]] = {
    "countdown": [
        {"label": "four numbers", "prompt": "86,28,13,31:96"},
        {"label": "four more", "prompt": "25,8,3,50:77"},
        {"label": "three numbers", "prompt": "7,12,5:47"},
        {"label": "five numbers, hard", "prompt": "3,75,9,44,12:61"},
    ],
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
    kind = "countdown" if speaks_countdown(model) else facts["name"]
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
            "description": ABOUT.get(kind),
            "chat": chat,
            "default_order": model.default_order,
            "defaults": dict(model.generation_defaults),
            "methods": methods,
            "limits": asdict(limits),
            "examples": EXAMPLES.get(kind, fallback),
        }
    )


def _own(model: Model, method: str) -> dict[str, Any]:
    """What the model's files say of a method's parameters."""
    return model.generation_defaults.get("methods", {}).get(method, {})
