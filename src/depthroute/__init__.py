"""Multi-head attention residuals for PyTorch: every sublayer reads a learned mix of all earlier outputs."""

from depthroute import residual
from depthroute.convert import convert_checkpoint
from depthroute.models import DepthRoutedConfig, DepthRoutedForCausalLM, DepthRoutedModel
from depthroute.ops import depth_mix

__version__ = "0.1.0"

__all__ = [
    "DepthRoutedConfig",
    "DepthRoutedForCausalLM",
    "DepthRoutedModel",
    "convert_checkpoint",
    "depth_mix",
    "residual",
]
