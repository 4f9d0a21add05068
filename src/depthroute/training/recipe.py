"""Recipes: everything that decides a training run, in strict YAML.

A recipe file holds only what differs from its `base` (a path relative to the file, or the name of a shipped recipe);
what no file says has the default written here. A key that no section knows is an error.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from depthroute.training import strict_yaml
from depthroute.training.key_hints import nearest_key
from depthroute.training.shipped import find_recipe

# What pydantic's kinds of faults mean to the author of a recipe.
_WANTED = {
    "bool_type": "true or false",
    "dict_type": "a section of keys and values",
    "float_type": "a number",
    "int_type": "a whole number",
    "list_type": "a list",
    "missing": "a value",
    "string_too_short": "some text",
    "string_type": "text",
}

_RESIDUAL = {"scheme": "mhar", "num_heads": "kv"}  # of a recipe without one

Count = Annotated[int, Field(ge=1)]
Source = str | list[str]


class Section(BaseModel):
    """A part of a recipe: unknown keys and values of another type are refused, and it never changes."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class ModelRecipe(Section):
    """Where the decoder comes from: a preset, with fresh weights, or a pretrained checkpoint; exactly one of the two.

    A checkpoint is a folder, a GGUF file or a name on the hub. One of a stock decoder is converted to the recipe's
    `residual` as it stands; one that is depth-routed already must have this `residual`.
    """

    preset: str | None = "tiny"  # None where there is a checkpoint
    decoder: dict[str, Any] = Field(default_factory=dict)  # fields of its configuration that replace the preset's
    checkpoint: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _no_default_preset_beside_a_checkpoint(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("checkpoint") is not None:
            return {"preset": None, **values}
        return values

    @model_validator(mode="after")
    def _has_one_origin(self) -> ModelRecipe:
        if (self.preset is None) == (self.checkpoint is None):
            raise ValueError(
                f"model.preset is {self.preset!r} and model.checkpoint is {self.checkpoint!r}, "
                "but exactly one of them should be given, and the other null"
            )
        if self.checkpoint is not None and self.decoder:
            raise ValueError(
                f"model.decoder is {self.decoder!r}, but should be empty: the decoder is that of model.checkpoint"
            )
        return self


class DataRecipe(Section):
    """What is read, and how it becomes sequences of tokens."""

    train: Source = "embedded"  # "embedded", files (paths or globs, from the working directory), or a hub data set
    validation: Source | None = None  # None: a part of the training documents, split off by their hash
    held_out_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.01
    text_field: str = "text"
    subset: str | None = None  # of a hub data set: its configuration
    # "embedded", a folder or tokenizer.json, a name on the hub, or "checkpoint": the one beside model.checkpoint
    tokenizer: str = "embedded"
    sequence_length: Annotated[int, Field(ge=2)] = 2048
    max_tokens: Count | None = None  # stop reading the training stream there
    max_validation_tokens: Count | None = None


class OptimizerRecipe(Section):
    """AdamW and its schedule; the defaults are the paper's, but for the decay of the residual parameters."""

    learning_rate: Annotated[float, Field(gt=0)] = 1e-3
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    eps: Annotated[float, Field(gt=0)] = 1e-8
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    # Which parameters outside the residual decay: all; those with two dimensions, embeddings among them; or
    # "projections", the matrices of linear layers: no embedding (nor a head tied to it), no norm, no bias.
    decay: Literal["all", "matrices", "projections"] = "all"
    max_grad_norm: Annotated[float, Field(ge=0)] = 1.0  # 0: no clipping
    warmup_steps: Annotated[int, Field(ge=0)] = 1000
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    min_lr_ratio: Annotated[float, Field(ge=0, le=1)] = 0.1  # of each group's own peak rate
    residual_weight_decay: Annotated[float, Field(ge=0)] = 0.0
    residual_lr_multiplier: Annotated[float, Field(gt=0)] = 1.0
    z_loss: Annotated[float, Field(ge=0)] = 0.0  # weight of the mean of logsumexp(logits)^2; not in evaluations


class TrainingRecipe(Section):
    """How long, how large, how often."""

    steps: Count = 20_000
    batch_size: Count = 64  # sequences of one step, over all devices
    micro_batch_size: Count | None = None  # sequences on one device at once; None: batch_size / devices
    precision: Literal["fp32", "bf16"] = "fp32"  # bf16: autocast, with weights in fp32
    compile: bool = False
    cuda_graphs: bool = False  # replay each microbatch's kernels as CUDA graphs; needs compile, and one CUDA device
    gradient_checkpointing: bool = False
    # Over several devices: "none", each holds everything (DDP); "full", each holds a shard of weights, gradients and
    # optimizer (FSDP2); "hybrid", so within a host, and every host holds a copy.
    sharding: Literal["none", "full", "hybrid"] = "none"
    gather_precision: Literal["fp32", "bf16"] = "fp32"  # in which the layers' sharded weights travel; bf16 wants bf16
    reshard_after_forward: bool = True  # False keeps a gathered layer until its backward: less travels, more memory
    ema_decay: Annotated[float, Field(gt=0, lt=1)] | None = None  # of an average of the weights; None: no average
    evaluate_first: bool = False  # before the first step too
    evaluate_every: Count = 500  # and after the last step
    save_every: Count | None = None  # None: with each evaluation, and nothing is kept after the end
    log_every: Count = 10
    tail: Count = 11  # the last evaluations, whose mean is the result
    report_to: list[str] = Field(default_factory=list)  # names that transformers knows: tensorboard, wandb, trackio
    num_threads: Count | None = None  # of the CPU

    @model_validator(mode="after")
    def _divides(self) -> TrainingRecipe:
        if self.micro_batch_size is not None and self.batch_size % self.micro_batch_size:
            raise ValueError(
                f"training.micro_batch_size is {self.micro_batch_size}, "
                f"but should divide training.batch_size = {self.batch_size}"
            )
        if self.cuda_graphs and not self.compile:
            raise ValueError(
                "training.cuda_graphs is true, but should be false where training.compile is false: "
                "the compiler makes the graphs"
            )
        if self.gather_precision == "bf16" and self.precision != "bf16":
            raise ValueError(
                f"training.gather_precision is 'bf16', but should be 'fp32' where training.precision is "
                f"{self.precision!r}: the weights would be rounded"
            )
        return self


class Recipe(Section):
    """One training run. Two runs of the same recipe on the same machine give the same numbers."""

    name: Annotated[str, Field(min_length=1)]
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0  # of the shared weights and of the order of the data
    model: ModelRecipe = Field(default_factory=ModelRecipe)
    residual: dict[str, Any] = Field(default_factory=lambda: dict(_RESIDUAL))
    data: DataRecipe = Field(default_factory=DataRecipe)
    optimizer: OptimizerRecipe = Field(default_factory=OptimizerRecipe)
    training: TrainingRecipe = Field(default_factory=TrainingRecipe)

    @property
    def data_with_tokenizer(self) -> DataRecipe:
        """The data section with the tokenizer under its own name."""
        if self.data.tokenizer != "checkpoint" or self.model.checkpoint is None:
            return self.data
        return self.data.model_copy(update={"tokenizer": self.model.checkpoint})

    @model_validator(mode="before")
    @classmethod
    def _takes_the_tokenizer_of_its_checkpoint(cls, values: Any) -> Any:
        """Where none is given: a model goes on with the words that it knows. A GGUF file has none beside it."""
        if not isinstance(values, dict) or not isinstance(values.get("model"), dict):
            return values
        checkpoint, data = values["model"].get("checkpoint"), values.get("data", {})
        if checkpoint is None or str(checkpoint).endswith(".gguf") or not isinstance(data, dict):
            return values
        return {**values, "data": {"tokenizer": "checkpoint", **data}}

    @model_validator(mode="after")
    def _finds_its_tokenizer(self) -> Recipe:
        if self.data.tokenizer == "checkpoint" and self.model.checkpoint is None:
            raise ValueError("data.tokenizer is 'checkpoint', but model.checkpoint is null; wanted a tokenizer's name")
        if self.data.tokenizer == "checkpoint" and str(self.model.checkpoint).endswith(".gguf"):
            raise ValueError(
                "data.tokenizer is 'checkpoint', but model.checkpoint is a GGUF file; wanted the folder of a tokenizer"
            )
        return self

    @model_validator(mode="after")
    def _warms_up_within_the_run(self) -> Recipe:
        if self.optimizer.warmup_steps >= self.training.steps:
            raise ValueError(
                f"optimizer.warmup_steps is {self.optimizer.warmup_steps}, "
                f"but should be less than training.steps = {self.training.steps}"
            )
        return self


def load_recipe(source: str | Path | Mapping[str, Any], overrides: Iterable[str] | Mapping[str, Any] = ()) -> Recipe:
    """The recipe in a file (a path, or the name of a shipped one) or a mapping, with `overrides` on top.

    `overrides` are texts like "optimizer.learning_rate=5e-4" (the value is read as YAML), or a mapping whose keys may
    be dotted. A `residual` that names its scheme replaces the one below it as a whole, since the other keys belong to
    the scheme; everything else is merged key by key.
    Raises FileNotFoundError for a missing file, and ValueError in one line that names the key, what it is and what is
    wanted; the model and the scheme are checked too.
    """
    values = _with_bases(source)
    changes = _parse_overrides(overrides)
    recipe = make_recipe(_merge({"residual": _RESIDUAL, **values}, changes))
    _check_model(recipe)
    return recipe


def make_recipe(values: Mapping[str, Any]) -> Recipe:
    """The recipe that a complete mapping describes. ValueError names every key at fault, in one line."""
    _check_keys(values, Recipe, ())
    try:
        return Recipe.model_validate(dict(values))
    except ValidationError as error:
        raise ValueError(_explain(error)) from None


def recipe_text(recipe: Recipe) -> str:
    """The whole recipe as YAML, every default written out."""
    return strict_yaml.text_of(recipe.model_dump())


def differing_keys(a: Recipe, b: Recipe) -> list[str]:
    """The dotted keys whose values differ."""
    left, right = dict(_flatten(a.model_dump())), dict(_flatten(b.model_dump()))
    absent = object()
    return [key for key in {**left, **right} if left.get(key, absent) != right.get(key, absent)]


def _with_bases(source: str | Path | Mapping[str, Any], above: tuple[Path, ...] = ()) -> dict[str, Any]:
    if isinstance(source, Mapping):
        values = dict(source)
    else:
        path = find_recipe(source, above[-1].parent if above else None).resolve()
        if path in above:
            raise ValueError(f"base: {' -> '.join(map(str, (*above, path)))} is a circle")
        values, above = strict_yaml.read_mapping(path), (*above, path)
        if "arms" in values:
            raise ValueError(f"{path} is a study of several runs, not a recipe of one: `depthroute study` runs it")
    base = values.pop("base", None)
    if base is None:
        return values
    if not isinstance(base, str):
        raise ValueError(f"base is {base!r}, but should be the path or the name of a recipe")
    try:
        below = _with_bases(base, above)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"base of {above[-1] if above else 'the recipe'}: {error}") from None
    return _merge(below, values)


def _merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    residual = above.get("residual")
    if isinstance(residual, Mapping) and "scheme" in residual:
        below = {key: value for key, value in below.items() if key != "residual"}
    return _merge_keys(below, above)


def _merge_keys(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for key, value in above.items():
        lower = merged.get(key)
        if isinstance(value, Mapping) and isinstance(lower, Mapping):
            value = _merge_keys(lower, value)
        merged[key] = value
    return merged


def _parse_overrides(overrides: Iterable[str] | Mapping[str, Any]) -> dict[str, Any]:
    if isinstance(overrides, str):
        raise TypeError(f"overrides is the text {overrides!r}, wanted a list of texts")
    items = overrides.items() if isinstance(overrides, Mapping) else map(_parse_override, overrides)
    changes: dict[str, Any] = {}
    for key, value in items:
        for part in reversed(str(key).split(".")):
            value = {part: value}
        changes = _merge_keys(changes, value)
    return changes


def _parse_override(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not equals or not key.strip() or not all(part.strip() for part in key.split(".")):
        raise ValueError(f"override {text!r} should look like key=value or section.key=value")
    return key.strip(), strict_yaml.parse(value, f"override {text!r}")


def _sections(of: type[Section], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], type[Section] | None]]:
    for key, field in of.model_fields.items():
        kind = field.annotation
        section = kind if isinstance(kind, type) and issubclass(kind, Section) else None
        yield (*path, key), section
        if section:
            yield from _sections(section, (*path, key))


def _check_keys(values: Any, of: type[Section], path: tuple[str, ...]) -> None:
    if not isinstance(values, Mapping):
        raise ValueError(
            f"{'.'.join(path)} is {values!r}, but should be a section with the keys {', '.join(of.model_fields)}"
        )
    children = {key[-1]: section for key, section in _sections(of) if len(key) == 1}
    for key, value in values.items():
        if key not in children:
            dotted = ".".join((*path, str(key)))
            sections = {key: section is not None for key, section in _sections(Recipe)}
            raise ValueError(f"unknown key {dotted!r} in the recipe{nearest_key(str(key), path, value, sections)}")
        section = children[key]
        if section is not None:
            _check_keys(value, section, (*path, key))


def _explain(error: ValidationError) -> str:
    known = {key for key, _ in _sections(Recipe)}
    messages: dict[str, str] = {}
    for fault in error.errors():
        if fault["type"] == "value_error":  # raised by a section, and complete
            messages[str(fault["ctx"]["error"])] = ""
            continue
        # Behind the key, pydantic names the member of a union that it tried.
        location = fault["loc"]
        key = next((location[:n] for n in range(len(location), 0, -1) if location[:n] in known), location)
        subject = f"{'.'.join(map(str, key))} is {fault['input']!r}, but should be "
        if fault["type"] == "missing":
            subject = f"{'.'.join(map(str, key))} is missing in the recipe, wanted "
        wanted = _WANTED.get(fault["type"], fault["msg"].removeprefix("Input should be "))
        messages[subject] = f"{messages[subject]} or {wanted}" if subject in messages else wanted
    return "; ".join(subject + wanted for subject, wanted in messages.items())


def _flatten(values: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _flatten(value, f"{path}{key}.")
        else:
            yield f"{path}{key}", value


def _check_model(recipe: Recipe) -> None:
    # Inside, so that reading a DataRecipe needs no transformers.
    from depthroute import residual
    from depthroute.models.presets import decoder_config
    from depthroute.training.pretrained import decoder_at_hand

    if recipe.model.preset is not None:
        residual.resolve(recipe.residual, decoder_config(recipe.model.preset, **recipe.model.decoder))
        return
    decoder = decoder_at_hand(str(recipe.model.checkpoint))
    if decoder is None:  # on the hub, or on the machine where this will run
        residual.check(recipe.residual)
    else:
        residual.resolve(recipe.residual, decoder)
