"""`train`: one recipe, from text to a finished run folder."""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerFast, TrainingArguments, set_seed
from transformers.utils import logging

from depthroute.data import EpochOrder, PackedTokens, prepare
from depthroute.files import alone_in, said_plainly, write_json, write_text
from depthroute.models import DepthRoutedForCausalLM
from depthroute.models.card import CARD
from depthroute.models.saved import load_saved
from depthroute.probing.read_weights import mean_read_weights
from depthroute.training import strict_yaml
from depthroute.training.callbacks import LogBeforeSave, MetricsWriter, ProgressLine, read_metrics
from depthroute.training.card import training_card
from depthroute.training.checkpoints import has_begun, last_complete, rotate
from depthroute.training.environment import describe_environment
from depthroute.training.garbage import FrozenHeap
from depthroute.training.hf_trainer import RecipeTrainer, shards_the_model, training_arguments
from depthroute.training.meter import Meter
from depthroute.training.model_building import build_model
from depthroute.training.optim import residual_parameters
from depthroute.training.recipe import Recipe, differing_keys, make_recipe, recipe_text
from depthroute.training.sharding import on_first_rank

logger = logging.get_logger(__name__)

# The read weights are a mean over this many held-out sequences, in batches that fit beside the model.
ENVIRONMENT = "environment.json"
_PROBED_SEQUENCES = 32
_PROBED_AT_ONCE = 8


def train(recipe: Recipe, out: str | Path) -> dict[str, Any]:
    """Train the model of a recipe in the folder `out`, and return the summary of the run.

    The folder is a run folder: recipe.yaml, environment.json, metrics.jsonl, held_out.jsonl (the loss of each held-out
    sequence, evaluation by evaluation), checkpoint-<step>/, and at the end final/ (model and tokenizer, for
    `AutoModelForCausalLM`), final-ema/ (the same with the averaged weights, where the recipe has them),
    read_weights.json where the scheme reads over depth, and summary.json. A run that was killed goes on from its last
    complete checkpoint; one that is finished returns its summary at once. With `save_every` the last two checkpoints
    stay in the folder, otherwise they go once the run is finished. Several processes started by torchrun or accelerate
    train together.
    Raises ValueError if `out` holds a run of another recipe, or of data that have changed since, RuntimeError if
    another process is training there.
    """
    started = time.perf_counter()
    out = Path(out)
    _refuse_another_recipe(out, recipe)
    if not (out / "summary.json").is_file():
        with _without_bars():
            _run(recipe, out, started)
    if recipe.training.save_every is None and int(os.environ.get("RANK", "0")) == 0:
        rotate(out, keep=0)
    return json.loads((out / "summary.json").read_text(encoding="utf-8"))


def _run(recipe: Recipe, out: Path, started: float) -> None:
    if recipe.training.num_threads is not None:
        torch.set_num_threads(recipe.training.num_threads)
    arguments = training_arguments(recipe, out)
    with ExitStack() as stack:
        if arguments.process_index == 0:
            out.mkdir(parents=True, exist_ok=True)
            stack.enter_context(alone_in(out, f"out: another process is training in {out}; wanted another folder"))
        stack.enter_context(said_plainly(out))
        _run_in(out, recipe, arguments, started)


def _run_in(out: Path, recipe: Recipe, arguments: TrainingArguments, started: float) -> None:
    is_main = arguments.process_index == 0
    if is_main:
        write_text(out / "recipe.yaml", recipe_text(recipe))
    with arguments.main_process_first(desc="tokenising"):
        splits = prepare(recipe.data_with_tokenizer, cache_folder())
    _refuse_other_data(out, splits.key)
    if is_main:
        found = {**describe_environment(), "processes": arguments.world_size, "data": splits.key}
        write_json(out / ENVIRONMENT, found)
    set_seed(recipe.seed)  # right before the model is built, so that arms of one seed share their weights
    model = _build(recipe, splits.tokenizer)
    arguments.use_cache = model.config.use_cache  # else Trainer switches it off, in checkpoints too
    meter = Meter(arguments.world_size)
    writer = MetricsWriter(out / "metrics.jsonl", _tokens_per_step(recipe), meter, started)
    closed: list[FrozenHeap | MetricsWriter | ProgressLine] = [writer, ProgressLine(recipe.name)] if is_main else []
    closed.append(FrozenHeap())  # behind the clock of the first step
    trainer = RecipeTrainer(
        recipe,
        model=model,
        args=arguments,
        train_dataset=EpochOrder(splits.train, recipe.seed, recipe.training.steps * recipe.training.batch_size),
        eval_dataset=splits.validation,
        meter=meter,
        callbacks=[LogBeforeSave(), *closed],
    )
    checkpoint = last_complete(out)
    arguments.eval_on_start = recipe.training.evaluate_first and checkpoint is None
    try:
        trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    finally:
        for callback in closed:
            callback.close()

    trainer.save_final(out / "final", splits.tokenizer)
    if trainer.ema is not None:
        with trainer.ema.in_the_model():
            trainer.save_final(out / "final-ema", splits.tokenizer)
    if is_main:
        _write_read_weights(out, splits.validation, arguments)
        summary = {
            "name": recipe.name,
            "seed": recipe.seed,
            "scheme": recipe.residual["scheme"],
            "parameters": sum(p.numel() for p in model.parameters()),
            "residual_parameters": sum(p.numel() for p in residual_parameters(model)),
            **_results(out, recipe),
            "unigram_entropy": splits.unigram_entropy,
            "seconds_to_first_step": writer.seconds_to_first_step,
        }
        for name in ("final", "final-ema"):
            if (out / name).is_dir():
                card = training_card(recipe, summary, model.config.residual, averaged=name == "final-ema")
                write_text(out / name / CARD, card)
        write_json(out / "summary.json", summary)
    trainer.accelerator.wait_for_everyone()


def _build(recipe: Recipe, tokenizer: PreTrainedTokenizerFast) -> DepthRoutedForCausalLM:
    if shards_the_model(recipe):
        return on_first_rank(lambda: build_model(recipe, tokenizer))
    return build_model(recipe, tokenizer)


def _refuse_another_recipe(out: Path, recipe: Recipe) -> None:
    if not has_begun(out):  # a recipe there is that of a run which failed or was killed before its first step
        return
    file = out / "recipe.yaml"
    if not file.is_file():
        raise ValueError(f"out: {out} holds a run without its recipe.yaml; wanted another folder")
    differ = differing_keys(make_recipe(strict_yaml.read_mapping(file)), recipe)
    if differ:
        raise ValueError(f"out: {out} holds a run of another recipe ({', '.join(differ)}); wanted another folder")


def _refuse_other_data(out: Path, key: str) -> None:
    """A run goes on with the tokens that it began with: others may hold what it is evaluated on."""
    file = out / ENVIRONMENT
    if has_begun(out) and file.is_file():
        before = json.loads(file.read_text(encoding="utf-8")).get("data", key)
        if before != key:
            raise ValueError(
                f"data: files or tokenizer have changed since the run in {out} began; wanted those, or another folder"
            )


@contextmanager
def _without_bars() -> Iterator[None]:
    """Without the bars that transformers shows for every file that it writes or reads."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def cache_folder() -> Path:
    """Where token files are kept: DEPTHROUTE_CACHE, else ~/.cache/depthroute."""
    chosen = os.environ.get("DEPTHROUTE_CACHE")
    return Path(chosen) if chosen else Path.home() / ".cache" / "depthroute"


def _tokens_per_step(recipe: Recipe) -> int:
    return recipe.training.batch_size * recipe.data.sequence_length


def _results(out: Path, recipe: Recipe) -> dict[str, Any]:
    """What metrics.jsonl says of the whole run, over all sessions that it took."""
    lines = read_metrics(out / "metrics.jsonl")
    steps = [line for line in lines if line["kind"] == "train"]
    evaluations = [line for line in lines if line["kind"] == "evaluation"]
    tail = [line["loss"] for line in evaluations if line["step"] > 0][-recipe.training.tail :]
    # The first line is of the first step alone, which compiles and warms up.
    speeds = [line["tokens_per_second"] for line in steps[1:] or steps]
    return {
        "steps": recipe.training.steps,
        "tokens": recipe.training.steps * _tokens_per_step(recipe),
        "final_loss": evaluations[-1]["loss"],
        "final_stderr": evaluations[-1].get("stderr"),
        **{f"final_{key}": evaluations[-1][key] for key in ("ema_loss", "ema_stderr") if key in evaluations[-1]},
        "tail_loss": statistics.fmean(tail),
        "tail_evaluations": len(tail),
        "tokens_per_second": statistics.median(speeds),
        "peak_memory_bytes": max(line["peak_memory_bytes"] for line in steps),
        "seconds": steps[-1]["seconds"] + sum(line["seconds"] for line in evaluations),
    }


def _fits(model: torch.nn.Module, device: torch.device) -> bool:
    if device.type != "cuda":
        return True
    torch.cuda.empty_cache()
    return sum(p.numel() * p.element_size() for p in model.parameters()) < torch.cuda.mem_get_info(device)[0]


def _write_read_weights(out: Path, validation: PackedTokens, arguments: TrainingArguments) -> None:
    """What the saved model's reads weigh on held-out text, where its scheme has reads."""
    model = load_saved(out / "final")
    if not _fits(model, arguments.device):
        logger.warning("read_weights.json is left to `depthroute probe`: beside its shards the model does not fit")
        return
    model.to(arguments.device)
    indices = range(min(_PROBED_SEQUENCES, len(validation)))
    batches = (
        torch.stack([validation[i]["input_ids"] for i in indices[start : start + _PROBED_AT_ONCE]])
        for start in indices[::_PROBED_AT_ONCE]
    )
    with torch.autocast(arguments.device.type, torch.bfloat16, enabled=arguments.bf16):
        weights = mean_read_weights(model, batches)
    if weights:
        write_json(out / "read_weights.json", weights)
