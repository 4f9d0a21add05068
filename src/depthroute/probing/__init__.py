"""What the queries of a model read, found by watching the model run."""

from depthroute.probing.read_weights import mean_read_weights
from depthroute.probing.taps import tap_reads

__all__ = ["mean_read_weights", "tap_reads"]
