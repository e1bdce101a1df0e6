"""Projections Π: how the selected parents' distributions become the next pool's tokens."""

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
    """The projection for an order: "ancestral", or one of ORDERS."""
    return ancestral if order == "ancestral" else by_order
