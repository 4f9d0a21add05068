"""Text from a saved model."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer, set_seed
from transformers.utils import logging

from depthroute.errors import nearest_path
from depthroute.models.saved import load_saved, saved_folder


def generate_text(
    folder: str | Path,
    prompt: str,
    *,
    max_new_tokens: int = 100,
    temperature: float = 0.8,
    top_p: float = 0.95,
    seed: int = 0,
) -> str:
    """Go on from `prompt` with a saved model and its own tokenizer; returns the new text alone.

    Args:
        folder: a model folder (the `final/` of a run), a run folder, or a name on the hub.
        prompt: the text to go on from; empty starts from the beginning-of-text token.
        max_new_tokens: how many tokens to generate at most.
        temperature: of the sampling; 0 takes the most likely token each time.
        top_p: samples from the smallest set of tokens with this probability.
        seed: of the sampling.

    Raises FileNotFoundError where there is no model or no tokenizer, ValueError for weights that are not whole, for
    settings out of range, and for more tokens than the model has positions.
    """
    _check_settings(max_new_tokens, temperature, top_p, seed)
    path = Path(folder)
    looks_like_a_path = path.exists() or path.is_absolute() or str(folder).startswith(".")
    name = str(saved_folder(folder) if looks_like_a_path else folder)
    tokenizer = _load_tokenizer(name)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    bar_shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # of the weights' way from the file
    try:
        model = load_saved(name)
    finally:
        if bar_shown:
            logging.enable_progress_bar()
    model = model.to(device).eval()
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    if ids.shape[1] == 0 and prompt:
        raise ValueError(f"prompt: the tokenizer beside {folder} makes no tokens of {prompt!r}")
    if ids.shape[1] == 0:
        ids = torch.tensor([[tokenizer.bos_token_id or tokenizer.eos_token_id]])
    ids = ids.to(device=device, dtype=torch.long)
    _check_length(model, ids.shape[1], max_new_tokens)
    set_seed(seed)
    sampling: dict[str, Any] = {"do_sample": False}
    if temperature > 0:  # transformers would sample from the 50 most likely tokens, if not told otherwise
        sampling = {"do_sample": True, "temperature": temperature, "top_p": top_p, "top_k": 0}
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_new_tokens, **sampling)
    return _new_text(tokenizer, out[0], ids.shape[1])


def _new_text(tokenizer: Any, ids: Tensor, prompt: int) -> str:
    """The text behind the first `prompt` ids. Read alone, its first word would lose its space with some tokenizers."""
    whole, before = (tokenizer.decode(part, skip_special_tokens=True) for part in (ids, ids[:prompt]))
    if whole.startswith(before):
        return whole[len(before) :]
    return tokenizer.decode(ids[prompt:], skip_special_tokens=True)  # a character of several ids lies across the border


def _check_settings(max_new_tokens: int, temperature: float, top_p: float, seed: int) -> None:
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens is {max_new_tokens}; wanted at least 1")
    if not 0 <= temperature < math.inf:
        raise ValueError(f"temperature is {temperature}; wanted a finite number of at least 0")
    if not 0 <= top_p <= 1:
        raise ValueError(f"top_p is {top_p}; wanted a number from 0 to 1")
    if not 0 <= seed < 2**32:
        raise ValueError(f"seed is {seed}; wanted a whole number from 0 to {2**32 - 1}")


def _check_length(model: Any, prompt: int, new: int) -> None:
    positions = getattr(model.config, "max_position_embeddings", None)
    if positions is not None and prompt + new > positions:
        raise ValueError(
            f"max_new_tokens is {new}, but the model has {positions} positions, of which the prompt takes {prompt}; "
            f"wanted at most {max(positions - prompt, 0)}"
        )


def _load_tokenizer(name: str) -> Any:
    try:
        return AutoTokenizer.from_pretrained(name)
    except OSError as error:
        if Path(name).exists():
            raise
        raise FileNotFoundError(
            f"{name}: neither a folder here nor a model of the hub that can be reached{nearest_path(name)} ({error})"
        ) from error
