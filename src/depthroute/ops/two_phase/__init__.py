"""Reads of many sites at once: the two-phase split of a depth read.

The query of a site does not depend on the input. So cut the sites into tiles of consecutive sites, and read in two
phases: one `inter` read of all finished sources for all sites of a tile, then for each site one `merge` of its part of
that read with the few sources that were born inside the tile. It is a split softmax, exact for any number of heads.

algebra.py is the arithmetic in plain PyTorch, kernels/inter.py, merge.py and gated.py are the same in Triton,
register.py makes differentiable functions of either (operators.py is what the compiler sees of them), plan.py chooses
the tiles, engine.py runs a chain of sites.
"""

from depthroute.ops.two_phase.engine import Engine, kernels_for
from depthroute.ops.two_phase.gated import GatedEngine, gated_merge
from depthroute.ops.two_phase.plan import Plan
from depthroute.ops.two_phase.register import Merged, inter, merge, spread

__all__ = ["Engine", "GatedEngine", "Merged", "Plan", "gated_merge", "inter", "kernels_for", "merge", "spread"]
