"""Projections Π turn the distributions of the selected parents into the tokens of the next pool."""

from .ancestral import ancestral
from .base import Children, Draw, Parents, Projection
from .distinct import distinct_children, keep_distinct
from .order import ORDERS, by_order

__all__ = [
    "ORDERS",
    "Children",
    "Draw",
    "Parents",
    "Projection",
    "ancestral",
    "by_order",
    "distinct_children",
    "keep_distinct",
    "projection",
]


def projection(order: str) -> Projection:
    """Return the projection for an order: "ancestral", or one of ORDERS."""
    return ancestral if order == "ancestral" else by_order
