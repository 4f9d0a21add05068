"""Depth-routed decoders, composed from the modules of Hugging Face's own models."""

from depthroute.models import presets
from depthroute.models.causal_lm import DepthRoutedForCausalLM
from depthroute.models.configuration import DepthRoutedConfig
from depthroute.models.decoder import DepthRoutedModel

__all__ = ["DepthRoutedConfig", "DepthRoutedForCausalLM", "DepthRoutedModel", "presets"]
