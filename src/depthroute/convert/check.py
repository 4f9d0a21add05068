"""How far a converted model's logits are from the original's, on real text."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from depthroute.data.sources import documents

# name: (dtype of the weights, whether bf16 autocast is on)
PRECISIONS = {
    "fp32": (torch.float32, False),
    "bf16": (torch.bfloat16, False),
    "bf16_autocast": (torch.float32, True),
}
_REFERENCE = "fp32"

_PROMPT_TOKENS = 16


def compare(
    original: PreTrainedModel,
    converted: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    sequences: int = 4,
    length: int = 256,
    new_tokens: int = 32,
) -> dict[str, Any]:
    """Run both models on the same text and compare their logits and what they generate; ready for JSON.

    The text is the beginning of `sequences` held-out documents of the embedded corpus through `tokenizer`; without a
    tokenizer, or with one whose ids the models do not have, random ids.

    For each precision, "fp32", "bf16" (the weights cast) and "bf16_autocast" (fp32 weights), over all tokens:
    `largest_absolute` is the largest difference of two logits, `largest_relative` the largest such difference
    divided by the largest logit of its token, `same_top_token` the share of tokens for which both find the same next
    one most likely, and `loss_original`, `loss_converted` the mean cross-entropy in nats. For the bf16 precisions
    `original_from_fp32` and `converted_from_fp32` say how far each model is from the original in fp32: what rounding
    alone does. `greedy` compares the greedy continuation of the beginning of each sequence in fp32.

    Both models are left as they were.
    """
    ids, text = _text(original, tokenizer, sequences, length)
    result: dict[str, Any] = {"text": text, "sequences": ids.shape[0], "tokens": ids.numel()}
    reference: list[Tensor] = []
    for name, (dtype, autocast) in PRECISIONS.items():
        ours, theirs = (_logits(model, ids, dtype, autocast) for model in (converted, original))
        result[name] = _deviation(theirs, ours)
        result[name]["loss_original"], result[name]["loss_converted"] = _loss(theirs, ids), _loss(ours, ids)
        if name == _REFERENCE:
            reference = theirs
            continue
        for who, logits in (("original", theirs), ("converted", ours)):
            result[name][f"{who}_from_fp32"] = _deviation(reference, logits)
    result["greedy"] = _greedy(original, converted, tokenizer, ids[:, :_PROMPT_TOKENS], new_tokens)
    return result


def describe(result: dict[str, Any]) -> str:
    """What `compare` found, in a few lines for the screen."""
    lines = [f"{result['tokens']} tokens of {result['text']}"]
    for name in PRECISIONS:
        found = result[name]
        lines.append(
            f"{name.replace('_', ' '):>13}: largest logit deviation {found['largest_absolute']:.3g}"
            f" (relative {found['largest_relative']:.3g}), same top token {found['same_top_token']:.2%},"
            f" loss {found['loss_original']:.5f} -> {found['loss_converted']:.5f}"
        )
        if name != _REFERENCE:
            apart = (found[f"{who}_from_fp32"]["largest_absolute"] for who in ("original", "converted"))
            lines.append("{:>15}from the original in fp32: original {:.3g}, converted {:.3g}".format("", *apart))
    greedy = result["greedy"]
    lines.append(f"greedy text: {greedy['equal']} of {greedy['prompts']} continuations equal")
    return "\n".join(lines)


def _text(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, sequences: int, length: int
) -> tuple[Tensor, str]:
    vocabulary, length = model.config.vocab_size, min(length, model.config.max_position_embeddings)
    if tokenizer is None:
        return _random_ids(vocabulary, sequences, length), "random token ids (the checkpoint has no tokenizer)"
    texts = list(documents("embedded", split="validation"))
    # Spread over the documents; eight characters a token are enough, more would only be cut off again.
    chosen = [texts[i * len(texts) // sequences][: 8 * length] for i in range(sequences)]
    rows = [tokenizer(text).input_ids[:length] for text in chosen]
    ids = torch.tensor([row[: min(map(len, rows))] for row in rows])
    if ids.max() >= vocabulary:
        return (
            _random_ids(vocabulary, sequences, length),
            "random token ids (the tokenizer has ids that the model does not)",
        )
    return ids, "the embedded corpus, validation documents, by the checkpoint's tokenizer"


def _random_ids(vocabulary: int, sequences: int, length: int) -> Tensor:
    return torch.randint(vocabulary, (sequences, length), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def _logits(model: PreTrainedModel, ids: Tensor, dtype: torch.dtype, autocast: bool) -> list[Tensor]:
    """The logits (T, V) of each sequence, in fp32 on the CPU."""
    kind = model.device.type
    with _weights_in(model, dtype), torch.autocast(kind, dtype=torch.bfloat16) if autocast else nullcontext():
        return [model(input_ids=row[None].to(model.device), use_cache=False).logits[0].float().cpu() for row in ids]


@contextmanager
def _weights_in(model: PreTrainedModel, dtype: torch.dtype) -> Iterator[None]:
    """The model in evaluation mode with its parameters cast; buffers stay, as when a model is loaded in `dtype`."""
    kept = [(parameter, parameter.data) for parameter in model.parameters()]
    training = model.training
    model.eval()
    try:
        for parameter, data in kept:
            parameter.data = data.to(dtype)
        yield
    finally:
        for parameter, data in kept:
            parameter.data = data
        model.train(training)


def _deviation(wanted: list[Tensor], got: list[Tensor]) -> dict[str, float]:
    largest, relative, same, tokens = [], [], 0, 0
    for a, b in zip(wanted, got, strict=True):
        difference = (a - b).abs().amax(-1)
        largest.append(difference.max())
        relative.append((difference / a.abs().amax(-1)).max())
        same += int((a.argmax(-1) == b.argmax(-1)).sum())
        tokens += len(a)
    return {
        "largest_absolute": torch.stack(largest).max().item(),
        "largest_relative": torch.stack(relative).max().item(),
        "same_top_token": same / tokens,
    }


def _loss(logits: list[Tensor], ids: Tensor) -> float:
    losses = [F.cross_entropy(row[:-1], wanted[1:]) for row, wanted in zip(logits, ids, strict=True)]
    return torch.stack(losses).mean().item()


def _greedy(
    original: PreTrainedModel,
    converted: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    prompts: Tensor,
    new_tokens: int,
) -> dict[str, Any]:
    continuations = []
    for model in (original, converted):
        with _weights_in(model, torch.float32):
            continuations.append([_continue(model, prompt, new_tokens) for prompt in prompts])
    pairs = list(zip(*continuations, strict=True))
    result: dict[str, Any] = {
        "prompts": len(prompts),
        "new_tokens": new_tokens,
        "equal": sum(a == b for a, b in pairs),
        "tokens_until_first_difference": [
            sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=True))) for a, b in pairs
        ],
    }
    if tokenizer is not None:
        result["example"] = {
            "prompt": tokenizer.decode(prompts[0]),
            "original": tokenizer.decode(pairs[0][0]),
            "converted": tokenizer.decode(pairs[0][1]),
        }
    return result


def _continue(model: PreTrainedModel, prompt: Tensor, new_tokens: int) -> list[int]:
    # Plain greedy, whatever the model's own generation configuration says.
    plain = GenerationConfig(max_new_tokens=new_tokens, min_new_tokens=new_tokens, do_sample=False, pad_token_id=0)
    ids = prompt[None].to(model.device)
    out = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=plain)  # type: ignore[operator]
    return out[0, len(prompt) :].tolist()
