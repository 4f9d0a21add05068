"""The two phases in Triton, under the names and signatures of `two_phase.algebra`."""

from depthroute.ops.kernels.gated import backward as gated_backward
from depthroute.ops.kernels.gated import forward as gated_forward
from depthroute.ops.kernels.inter import backward as inter_backward
from depthroute.ops.kernels.inter import forward as inter_forward
from depthroute.ops.kernels.merge import backward as merge_backward
from depthroute.ops.kernels.merge import forward as merge_forward
from depthroute.ops.kernels.settings import obstacle, weight_parts
from depthroute.ops.kernels.sums import sum_weights

__all__ = [
    "gated_backward",
    "gated_forward",
    "inter_backward",
    "inter_forward",
    "merge_backward",
    "merge_forward",
    "obstacle",
    "sum_weights",
    "weight_parts",
]
