"""What happens between a forward and the next pool: the searches, the methods, the orders and the reveal rules by name.

base        what a search owns, and the children of chosen rows
beam, tree  the two searches: `Beam` selects rows and draws their children, `TreeSearch` enumerates and prunes them
constrained what a constraint changes before a forward
children    drawn children; enumerated has those of a tree
orders      which position comes first; reveal has the rules that say how many are revealed
dpp, mmr, smc, best_of_n
            the methods of the paper

A method is a dataclass whose fields are its parameters, called as `select(pool, k, key)`; it returns a `Choice`.
`register(Method("mine", Mine))` makes your own method available everywhere, and `load_plugins` loads the modules that
call `register`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from ..errors import D5P4Error
from ..options import Registered, Registry, Settings
from .base import Search
from .beam import Beam, Categorical, GreedyBeam, Identity, Random
from .best_of_n import BestOfN, Scorer
from .children import Draw, Parents, distinct_children, drawn
from .dpp import D5P3, D5P4, KDPP, SOLVERS, D5P4x, PartitionDPP
from .mmr import MMR
from .orders import Order
from .reveal import OpenPositions, Reveal
from .smc import ESMC
from .tree import Tree, TreeSearch

__all__ = ["ESMC", "KDPP", "METHODS", "MMR", "SOLVERS", "Beam", "BestOfN", "Categorical", "Draw", "GreedyBeam"]
__all__ += ["Identity", "Method", "OpenPositions", "Order", "Parents", "PartitionDPP", "Random", "Reveal", "Scorer"]
__all__ += ["Search", "Tree", "TreeSearch", "distinct_children", "drawn"]

NOT_FOR_TREES = (
    *("select_window", "quality", "positions", "normalise", "features", "feature_layer", "similarity", "gamma"),
    "start_temperature",
)
HALF_GUIDED = {"guidance": 2.0, "guidance_window": (0, 0.5)}


@dataclass(frozen=True)
class Method(Registered):
    """A way to decode.

    selector     a dataclass whose fields are the method's parameters and whose instances are called as
                 `select(pool, k, key)`, or a plain function with these arguments. A dataclass that is also a `Search`
                 (`Beam` or `TreeSearch`) may choose the answers, check settings, and make children in its own way
    branches     whether the pool has k*w rows (True) or k rows (False)
    presets      values of options that this method uses unless the caller gives other values
    without      further options that have no meaning for a tree method
    """

    registry: ClassVar[Registry] = Registry("method")

    name: str
    selector: Callable[..., Any]
    summary: str = ""
    section: str = "–"  # the section of the paper that describes the method
    branches: bool = True
    presets: Mapping[str, Any] = field(default_factory=dict)
    without: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        hooks = {"branching", "check_reveal", "finish", "prune"} & set(dir(self.selector))
        if hooks and not (isinstance(self.selector, type) and issubclass(self.selector, Search)):
            raise D5P4Error(f"method {self.name!r} has {min(hooks)!r}; derive it from d5p4.search.Beam or TreeSearch")

    @property
    def tree(self) -> bool:
        return isinstance(self.selector, type) and issubclass(self.selector, TreeSearch)

    @property
    def unused(self) -> tuple[str, ...]:
        """The options that have no meaning for this method, whatever the values of others are."""
        if self.tree:
            return (*NOT_FOR_TREES, "distinct", "stop", *self.without)
        return () if self.branches else ("w",)

    def search(self, settings: Settings) -> Search:
        """Return a new search with the parameters of these settings."""
        select = self.build(settings)
        return select if isinstance(select, Search) else Beam(select)


for _method in (
    Method("tree", Tree, "a tree of different rows, pruned before they run", "ours", False, {"order": "top"}),
    Method("d5p4", D5P4, "partition DPP, additive kernel diag(Q) + beta S (D5P4+)", "3.3"),
    Method("d5p4x", D5P4x, "partition DPP, multiplicative kernel e^(Q/beta) S e^(Q/beta)", "3.3"),
    Method("d5p4-p", D5P4, "d5p4 with guidance on the first half of the steps", "4.2", presets=HALF_GUIDED),
    Method("d5p3", D5P3, "d5p4 without the partition: lineages may die out", "App. E"),
    Method("greedy-beam", GreedyBeam, "the best candidate of each group", "4, App. B.4"),
    Method("diverse-beam", MMR, "quality minus alpha times similarity to candidates already chosen", "4, App. B.4"),
    Method("cat", Categorical, "one candidate per group drawn by softmax(Q / score_temperature)", "4.1"),
    Method("random", Random, "a random candidate of each group", "5"),
    Method("k-dpp", KDPP, "k candidates sampled from the unconstrained k-DPP", "App. B.4"),
    Method("e-smc", ESMC, "particles resampled by e^(lam * certainty); the k best are kept", "App. E"),
    Method("best-of-n", BestOfN, "k*w independent answers; the k best are kept", "4, App. B.4"),
    Method("independent", Identity, "k independent answers: no selection", "4", branches=False),
):
    Method.registry.add(_method)

METHODS, ORDERS, REVEALS = Method.registry, Order.registry, Reveal.registry
