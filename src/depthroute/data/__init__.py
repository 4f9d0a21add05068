"""Text to packed tokens: sources of documents, tokenizers, held-out splits, and the order of training."""

from depthroute.data.order import EpochOrder
from depthroute.data.packing import PackedTokens
from depthroute.data.sources import documents
from depthroute.data.splits import Splits, prepare
from depthroute.data.tokenization import load_tokenizer

__all__ = ["EpochOrder", "PackedTokens", "Splits", "documents", "load_tokenizer", "prepare"]
