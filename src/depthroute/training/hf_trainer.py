"""Hugging Face's Trainer with our optimizer, order of the data, evaluation and checkpoints."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import DistributedType, FullyShardedDataParallelPlugin, PartialState
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Dataset, SequentialSampler
from transformers import PreTrainedTokenizerBase, PrinterCallback, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME

from depthroute.training.checkpoints import SHARDS, load_shards, rotate, save_shards, seal
from depthroute.training.compilation import compile_parts, whole_under_ddp
from depthroute.training.cuda_graphs import MODE, check_cuda_graphs, own_gradients
from depthroute.training.ema import WeightEma
from depthroute.training.evaluation import HeldOutLoss, summed_loss
from depthroute.training.meter import Meter
from depthroute.training.objective import return_objective
from depthroute.training.optim import build_optimizer, build_scheduler, clean_name
from depthroute.training.readings import read_parameters
from depthroute.training.recipe import Recipe
from depthroute.training.sharding import clip_grad_norm_, mesh_of, shard_from_first

KEPT_CHECKPOINTS = 2
# transformers 5.24 renamed the argument, and warns of the old name.
_CHECKPOINTING = next(
    name
    for name in ("activation_checkpointing", "gradient_checkpointing")
    if name in TrainingArguments.__dataclass_fields__
)


class RecipeTrainer(Trainer):
    """Trainer for one recipe: `steps` steps over `train_dataset`, which is walked from its start to its end.

    `train_dataset` has `steps * batch_size` sequences; the ranks and the accumulated batches of a step share one
    stretch of it, so what a step sees depends on neither. Under FSDP2 (`shards_the_model`) the model is cut here, and
    only the first rank's needs to have weights.
    """

    def __init__(
        self,
        recipe: Recipe,
        *,
        model: nn.Module,
        args: TrainingArguments,
        train_dataset: Dataset,
        eval_dataset: Dataset,
        meter: Meter,
        callbacks: Sequence[TrainerCallback],
    ) -> None:
        decay = recipe.training.ema_decay
        self.recipe = recipe
        self.ema = None if decay is None else WeightEma(decay)
        return_objective(model, recipe.optimizer.z_loss)
        if compiles_parts(recipe):
            compile_parts(model)
        elif recipe.training.compile and number_of_ranks() > 1:
            whole_under_ddp()
        super().__init__(
            model=model,
            args=args,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            callbacks=[*([] if self.ema is None else [self.ema]), *callbacks],
        )
        self.out = Path(str(args.output_dir))
        self.meter = meter
        self.remove_callback(PrinterCallback)
        if self.is_fsdp_enabled:
            self._shard()

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        state: Any = self.accelerator.state
        if shards_the_model(self.recipe) and state.distributed_type != DistributedType.FSDP:
            # On the CPU Accelerate would run DDP and say nothing.
            PartialState().distributed_type = state.distributed_type = DistributedType.FSDP
            state.fsdp_plugin = FullyShardedDataParallelPlugin(**(self.args.fsdp_plugin_args or {}))
            self.is_fsdp_enabled = True

    def _shard(self) -> None:
        """Cut the model as the recipe says, before Accelerate would do it in its own way."""
        plugin: Any = self.accelerator.state.fsdp_plugin
        _check_plugin(plugin)
        plugin.auto_wrap_policy = None
        training = self.recipe.training
        shard_from_first(
            self.model,
            self.args.device,
            mesh_of("full" if training.sharding == "none" else training.sharding, self.args.device.type),
            gather=torch.bfloat16 if training.gather_precision == "bf16" else torch.float32,
            reshard=plugin.reshard_after_forward,
        )
        if training.gradient_checkpointing:
            getattr(self.model, f"{_CHECKPOINTING}_enable")({"use_reentrant": False})

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        if self.optimizer is None:
            trained: Any = self.model if model is None else model
            self.optimizer = build_optimizer(trained, self.recipe.optimizer)
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> LRScheduler:
        if self.lr_scheduler is None:
            scheduled: Any = self.optimizer if optimizer is None else optimizer
            self.lr_scheduler = build_scheduler(scheduled, num_training_steps, self.recipe.optimizer)
            self._created_lr_scheduler = True  # else Trainer takes it for one of the caller's
        return self.lr_scheduler

    def _clip_grad_norm(self, model: nn.Module) -> Tensor:
        if not self.is_fsdp_enabled:
            return super()._clip_grad_norm(model)
        return clip_grad_norm_(model.parameters(), self.args.max_grad_norm)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Tensor | None = None) -> Any:
        if grad_norm is None and self.is_fsdp_enabled:  # a run that does not clip: its norm is logged all the same
            return clip_grad_norm_(model.parameters(), float("inf"))
        return super()._get_grad_norm(model, grad_norm)

    def _get_train_sampler(self, train_dataset: Any = None) -> SequentialSampler:
        walked: Any = self.train_dataset if train_dataset is None else train_dataset
        return SequentialSampler(walked)

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        """Without the head that is the embedding, which is not saved twice and so not missing."""
        model: Any = self.model
        tied = getattr(model, "all_tied_weights_keys", {})
        load_result.missing_keys[:] = [key for key in load_result.missing_keys if key not in tied]
        super()._issue_warnings_after_load(load_result)

    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Tensor:
        """Forward and backward of one microbatch; its loss, which Trainer adds to a sum of its own at once."""
        if not self.recipe.training.cuda_graphs or self.current_gradient_accumulation_steps == 1:
            return super().training_step(model, inputs, num_items_in_batch)
        is_first = all(parameter.grad is None for parameter in model.parameters())
        loss = super().training_step(model, inputs, num_items_in_batch)
        if is_first:
            own_gradients(model)
        return loss

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "loss" in logs:
            per_step = self.recipe.training.batch_size * self.recipe.data.sequence_length
            logs = {**logs, **self.meter.read(self.state.global_step * per_step)}
        super().log(logs, start_time)

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """The mean loss over the tokens of the held-out set; Trainer's own is a mean over batches.

        The average of the weights is evaluated too, where there is one. Callbacks also get the readings of the reads
        and the losses of the single sequences.
        """
        sequences = self.eval_dataset if eval_dataset is None else eval_dataset
        model: Any = self.model
        found: dict[str, float | None] = {}
        with self.meter.paused():
            began = time.perf_counter()
            readings = read_parameters(model)
            loss = self._held_out_loss(sequences)
            found |= {"loss": loss.mean, "stderr": loss.stderr, "num_tokens": loss.num_tokens}
            alone = {"losses": loss.sequences}
            if self.ema is not None:
                with self.ema.in_the_model():
                    averaged = self._held_out_loss(sequences)
                found |= {"ema_loss": averaged.mean, "ema_stderr": averaged.stderr}
                alone["ema_losses"] = averaged.sequences
            found["seconds"] = time.perf_counter() - began
        metrics: Any = {f"{metric_key_prefix}_{key}": value for key, value in found.items()}
        self.log({key: value for key, value in metrics.items() if value is not None})
        self.control = self.callback_handler.on_evaluate(
            self.args, self.state, self.control, {**metrics, "readings": readings, "sequences": alone}
        )
        return metrics

    def _held_out_loss(self, sequences: Any) -> HeldOutLoss:
        model: Any = self.model
        batch_size, ranks = self.args.per_device_eval_batch_size, self.args.world_size
        sums = summed_loss(model, sequences, batch_size, rank=self.args.process_index, ranks=ranks)
        if ranks > 1:
            sums = self.accelerator.reduce(sums, "sum")
        return HeldOutLoss.of(sums)

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """Not counted: Trainer would walk over all modules for every batch."""
        return 0

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        folder = self.out / f"checkpoint-{self.state.global_step}"
        with self.meter.paused():
            if self.args.should_save and folder.exists():  # what a kill has left of an earlier attempt
                shutil.rmtree(folder)
            self.accelerator.wait_for_everyone()
            super()._save_checkpoint(model, trial)
            if self.ema is not None:
                self.ema.save(folder, is_main=self.args.should_save)
            self.accelerator.wait_for_everyone()
            if self.args.should_save:
                seal(folder)
                rotate(self.out, KEPT_CHECKPOINTS)

    @property
    def _saves_shards(self) -> bool:
        """Whether checkpoints are for any number of devices: a run that may be sharded can go on on a single one."""
        return self.is_fsdp_enabled or self.recipe.training.sharding != "none"

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        if self._saves_shards:
            Path(str(output_dir)).mkdir(parents=True, exist_ok=True)  # the weights are among the shards
        else:
            super().save_model(output_dir, _internal_call)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if not self._saves_shards:
            super()._save_optimizer_and_scheduler(output_dir)
            return
        save_shards(Path(output_dir), *self._plain())
        if self.args.should_save:
            scheduler: Any = self.lr_scheduler
            torch.save(scheduler.state_dict(), Path(output_dir) / SCHEDULER_NAME)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if (Path(resume_from_checkpoint) / SHARDS).is_dir():
            return  # with the optimizer, once there is one
        if self._saves_shards:
            raise ValueError(
                f"{resume_from_checkpoint} was saved by a run that was not sharded, and goes on only without FSDP"
            )
        super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        # Through the CPU, on one rank as on many: transformers 5.17 cannot restore what "cpu:1" has saved.
        states: dict[str, Any] = {OPTIMIZER_NAME: self.optimizer, SCHEDULER_NAME: self.lr_scheduler}
        if (Path(checkpoint) / SHARDS).is_dir():
            load_shards(Path(checkpoint), *self._plain())
            del states[OPTIMIZER_NAME]
        for file, state in states.items():
            state.load_state_dict(torch.load(Path(checkpoint) / file, map_location="cpu", weights_only=True))

    def _plain(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Model and optimizer without what Accelerate and the compiler put around them."""
        optimizer: Any = self.optimizer
        model: Any = self.accelerator.unwrap_model(self.model, keep_torch_compile=False)
        return model, getattr(optimizer, "optimizer", optimizer)

    def save_final(self, folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
        """Save model and tokenizer for transformers, as a whole or not at all. All ranks take part."""
        model: Any = self.accelerator.unwrap_model(self.model, keep_torch_compile=False)
        # A compiled model puts its prefix into the names, and transformers would load none of the weights.
        state = {clean_name(name): value for name, value in self.accelerator.get_state_dict(self.model_wrapped).items()}
        for name in model.all_tied_weights_keys:  # gathered from shards it is a tensor of its own, and in no file
            state.pop(name, None)
        if self.args.should_save:
            draft = folder.with_name(f".{folder.name}.partial")
            for old in (draft, folder):
                shutil.rmtree(old, ignore_errors=True)
            model.save_pretrained(draft, state_dict=state)
            tokenizer.save_pretrained(draft)
            draft.rename(folder)


def training_arguments(recipe: Recipe, out: Path) -> TrainingArguments:
    """What Trainer needs to know of a recipe. Starts the process group where torchrun or accelerate asks for one.

    Raises ValueError if the batch cannot be dealt to the ranks in equal micro batches, and for CUDA graphs where they
    cannot be.
    """
    training = recipe.training
    ranks = number_of_ranks()
    if training.cuda_graphs:
        check_cuda_graphs(ranks)
    micro = training.micro_batch_size or training.batch_size // ranks
    if micro == 0 or training.batch_size % (micro * ranks):
        raise ValueError(
            f"training.batch_size is {training.batch_size}, but should be a multiple of "
            f"{max(micro, 1)} sequences at once on each of {ranks} devices"
        )
    sharded = shards_the_model(recipe)
    special: dict[str, Any] = {
        _CHECKPOINTING: training.gradient_checkpointing and not sharded,  # of shards: see RecipeTrainer
        f"{_CHECKPOINTING}_kwargs": {"use_reentrant": False},
    }
    if sharded:  # else the gradients would stay whole on every rank from one microbatch to the next
        special["accelerator_config"] = {"gradient_accumulation_kwargs": {"sync_each_batch": True}}
    if training.sharding != "none" and sharded:
        special["fsdp"] = True
        special["fsdp_config"] = {
            "version": 2,
            "auto_wrap_policy": "NO_WRAP",
            "reshard_after_forward": training.reshard_after_forward,
            "state_dict_type": "SHARDED_STATE_DICT",
        }
    # `accelerate launch` sets it by its own configuration, and Trainer would let that win over the recipe.
    os.environ["ACCELERATE_MIXED_PRECISION"] = "bf16" if training.precision == "bf16" else "no"
    arguments = TrainingArguments(
        output_dir=str(out),
        run_name=recipe.name,
        seed=recipe.seed,
        max_steps=training.steps,
        per_device_train_batch_size=micro,
        per_device_eval_batch_size=micro,
        gradient_accumulation_steps=training.batch_size // (micro * ranks),
        max_grad_norm=recipe.optimizer.max_grad_norm,
        bf16=training.precision == "bf16",
        torch_compile=training.compile and not compiles_parts(recipe),
        torch_compile_mode=MODE if training.cuda_graphs else None,
        logging_strategy="steps",
        logging_steps=training.log_every,
        logging_first_step=True,
        logging_nan_inf_filter=False,  # a loss that is not finite must be seen, and looking would stall the device
        eval_strategy="steps",
        eval_steps=training.evaluate_every,
        save_strategy="steps",
        save_steps=training.save_every or training.evaluate_every,
        report_to=training.report_to or "none",
        disable_tqdm=True,
        remove_unused_columns=False,
        use_cpu=not torch.accelerator.is_available(),
        ddp_find_unused_parameters=False,
        ddp_timeout=4 * 3600,  # the other ranks wait while the first one tokenises
        **special,
    )
    arguments._n_gpu = 1  # Trainer would deal each batch to all visible GPUs by DataParallel
    return arguments


def number_of_ranks() -> int:
    """The processes that torchrun or accelerate has started for this run."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def shards_the_model(recipe: Recipe) -> bool:
    """Whether FSDP2 is at work: the recipe or `accelerate launch --use_fsdp` asks for it, and there are more ranks."""
    asked = recipe.training.sharding != "none" or os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true"
    return asked and number_of_ranks() > 1


def compiles_parts(recipe: Recipe) -> bool:
    """Whether a model is compiled in parts, as FSDP2 needs it, and not as a whole."""
    return recipe.training.compile and shards_the_model(recipe)


def _check_plugin(plugin: FullyShardedDataParallelPlugin) -> None:
    """Raise ValueError for what `accelerate launch` may ask of FSDP and this does not do."""
    if plugin.fsdp_version != 2:
        raise ValueError(f"fsdp_version is {plugin.fsdp_version}, but should be 2 (accelerate launch --fsdp_version 2)")
    if plugin.activation_checkpointing:
        raise ValueError("fsdp_activation_checkpointing is true; wanted training.gradient_checkpointing=true instead")
    if isinstance(plugin.cpu_offload, CPUOffloadPolicy):
        raise ValueError("fsdp_offload_params is true, but parameters are not offloaded here; wanted false")
