"""Between stock checkpoints and depth-routed models, with a check of what a conversion changes."""

from depthroute.convert.check import compare
from depthroute.convert.folder import convert_folder, describe_conversion
from depthroute.convert.from_hf import convert_checkpoint
from depthroute.convert.to_hf import to_stock

__all__ = ["compare", "convert_checkpoint", "convert_folder", "describe_conversion", "to_stock"]
