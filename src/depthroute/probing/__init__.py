"""What the queries of a model read and learned, found by watching the model run."""

from depthroute.probing.collinearity import source_collinearity
from depthroute.probing.disagreement import at_equal_sources, subspace_disagreement
from depthroute.probing.folder import probe_folder
from depthroute.probing.heads import head_maps
from depthroute.probing.read_weights import mean_read_weights
from depthroute.probing.table import print_probe
from depthroute.probing.taps import tap_reads

__all__ = [
    "at_equal_sources",
    "head_maps",
    "mean_read_weights",
    "print_probe",
    "probe_folder",
    "source_collinearity",
    "subspace_disagreement",
    "tap_reads",
]
