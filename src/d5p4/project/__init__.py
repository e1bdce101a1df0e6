"""Projections Π turn the distributions of the selected parents into the tokens of the next pool."""

from .ancestral import ancestral
from .children import Draw, Parents, Projection, distinct_children, drawn
from .orders import Order
from .reveal import OpenPositions, Reveal

__all__ = ["Draw", "OpenPositions", "Order", "Parents", "Reveal", "distinct_children", "drawn", "projection"]

ORDERS, REVEALS = Order.registry, Reveal.registry


def projection(order: str) -> Projection:
    """Return the projection that draws children by an order."""
    return ancestral if order == "ancestral" else drawn
