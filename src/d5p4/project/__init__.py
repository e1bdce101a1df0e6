"""Projections Π turn the distributions of the selected parents into the tokens of the next pool."""

from .ancestral import ancestral
from .children import Draw, Parents, Projection, distinct_children, drawn
from .enumerated import enumerated
from .orders import Order
from .reveal import OpenPositions, Reveal

__all__ = ["Draw", "OpenPositions", "Order", "Parents", "Reveal", "distinct_children", "drawn", "projection"]

ORDERS, REVEALS = Order.registry, Reveal.registry


def projection(order: str, children: str = "drawn") -> Projection:
    """Return the projection for an order and a children rule."""
    if order == "ancestral":
        return ancestral
    return {"drawn": drawn, "enumerated": enumerated}[children]
