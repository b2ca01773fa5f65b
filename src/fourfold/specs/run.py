"""RunSpec: everything a training run needs, as its run file says it.

The run file is TOML: a few keys at the top and one table a section. Paths in it are relative to the folder
that the command is started in, like paths on the command line.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, PlainSerializer

from fourfold.errors import UserError, nearest
from fourfold.specs.layout import Layout
from fourfold.specs.model import ModelSpec
from fourfold.specs.sections import (
    CheckpointSection,
    Count,
    DataSection,
    EvaluationSection,
    LoggingSection,
    ModelSection,
    OptimizerSection,
    SampleSection,
    ShardingSection,
    TrainingSection,
)
from fourfold.specs.spec import Spec


def _layout(value: object) -> Layout:
    """Read the notation. A ``ValueError`` is one problem among others to pydantic."""
    if isinstance(value, Layout):
        return value
    if not isinstance(value, str):
        raise ValueError(f"layout={value!r} must be a string in quotes, e.g. 'dp4'")
    try:
        return Layout.parse(value)
    except UserError as error:
        raise ValueError(str(error)) from None


class RunSpec(Spec):
    """A training run. ``RunSpec.load`` reads it from a run file.

    Making one checks every value alone and those that depend on each other; ``check`` also holds the layout
    against the model, the batch and the number of ranks.
    """

    layout: Annotated[Layout, BeforeValidator(_layout), PlainSerializer(Layout.__str__)] = Field(
        default=Layout(), description="how many ways each axis is cut, e.g. 'dp4'"
    )
    seed: Count = Field(default=0, description="of the weights, the order of the data and the sample")
    folder: str = Field(default="runs/run", min_length=1, description="where the run writes; runs/<run file>")
    model: ModelSection
    data: DataSection = DataSection()
    training: TrainingSection
    sharding: ShardingSection = ShardingSection()
    optimizer: OptimizerSection
    evaluation: EvaluationSection = EvaluationSection()
    checkpoint: CheckpointSection = CheckpointSection()
    sample: SampleSection = SampleSection()
    logging: LoggingSection = LoggingSection()

    @classmethod
    def load(
        cls,
        path: str | Path,
        overrides: Sequence[str] = (),
        layout: str | None = None,
        init: str | None = None,
    ) -> "RunSpec":
        """Read a run file, with ``section.key=value`` overrides and a layout on top.

        ``init``, a Hugging Face folder, takes the place of the file's model and tokenizer. Raises
        ``UserError`` with every problem at once.
        """
        from fourfold.specs.run_file import read_run_file

        return cls.model_validate(read_run_file(Path(path), overrides, layout, init))

    def to_toml(self) -> str:
        """Return the run file of this run, every key spelled out. It loads back equal."""
        from fourfold.specs.run_file import toml

        values = self.model_dump(mode="json", exclude_none=True)
        values["model"] |= values["model"].pop("overrides")
        return toml(values)

    def resolved(self, vocab_size: int) -> "RunSpec":
        """Return this run with the sizes of its model spelled out, no preset or config.json needed.

        The folder that its first weights come from stays.
        """
        sizes = self.model.spec(vocab_size).model_dump(mode="json", exclude_none=True)
        return self.model_copy(update={"model": ModelSection(init=self.model.init, overrides=sizes)})

    @classmethod
    def prepare(cls, values: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
        """Take out the keys that do not exist, each with a message that knows all sections."""
        problems = [_unknown_key("", key) for key in values if key not in cls.model_fields]
        values = {key: value for key, value in values.items() if key in cls.model_fields}
        for section, keys in SECTION_KEYS.items():
            if isinstance(values.get(section), dict):
                problems += [_unknown_key(section, key) for key in values[section] if key not in keys]
                values[section] = {key: value for key, value in values[section].items() if key in keys}
        return values, problems

    @property
    def resolved_sharding(self) -> ShardingSection:
        """How weights are cut. Muon updates whole matrices, so for it ``auto`` means ``blocks``."""
        if self.optimizer.name == "muon" and self.sharding.pieces == "auto":
            return self.sharding.model_copy(update={"pieces": "blocks"})
        return self.sharding

    def inconsistencies(self) -> list[str]:
        """Return the problems between sections."""
        problems = []
        steps = self.training.steps
        if self.optimizer.warmup_steps > steps:
            problems.append(
                f"optimizer.warmup_steps={self.optimizer.warmup_steps} is more than training.steps={steps}: "
                f"use {steps} or less"
            )
        if (
            self.optimizer.name == "muon"
            and self.layout.fsdp > 1
            and self.sharding.pieces in ("rows", "flat")
        ):
            problems.append(
                f"sharding.pieces='{self.sharding.pieces}' cuts matrices over fsdp={self.layout.fsdp} "
                "(Batch axis), and optimizer.name='muon' needs them whole: use sharding.pieces='blocks' or "
                "'auto', or optimizer.name='adamw'"
            )
        if self.optimizer.name == "muon" and self.layout.tp > 1:
            problems.append(
                f"tp={self.layout.tp} cuts every matrix (Channel axis), and optimizer.name='muon' needs them "
                "whole: use tp=1, or optimizer.name='adamw'"
            )
        return problems

    def problems(self, *, vocab_size: int | None = None, world_size: int | None = None) -> list[str]:
        """Return every rule between model, data and layout that this run breaks.

        ``vocab_size`` is the tokenizer's and ``world_size`` the number of ranks, None while not known.
        """
        try:
            model = self.model.spec(1 if vocab_size is None else vocab_size)
        except UserError as error:
            return list(error.messages)
        if vocab_size is None:  # whichever it is, tp is taken to cut it
            model = model.replace({"vocab_size": max(model.vocab_size, self.layout.tp)})
        problems = []
        length, longest = self.data.sequence_length, model.max_position_embeddings
        if length > longest:
            problems.append(
                f"data.sequence_length={length} is more than model.max_position_embeddings={longest}: "
                f"use data.sequence_length={longest} or less, "
                f"or model.max_position_embeddings={length} or more"
            )
        return [
            *problems,
            *self.layout.problems(
                model,
                batch=self.training.batch,
                microbatches=self.training.microbatches,
                sequence_length=self.data.sequence_length,
                world_size=world_size,
            ),
        ]

    def check(self, *, vocab_size: int | None = None, world_size: int | None = None) -> None:
        """Raise ``UserError`` with every one of ``problems``."""
        problems = self.problems(vocab_size=vocab_size, world_size=world_size)
        if problems:
            raise UserError(*problems)


SECTION_KEYS: dict[str, tuple[str, ...]] = {
    # The sizes stand in the section itself; `ModelSection.overrides` is for Python code.
    "model": ("preset", "config", "init", *ModelSpec.model_fields),
    "data": tuple(DataSection.model_fields),
    "training": tuple(TrainingSection.model_fields),
    "sharding": tuple(ShardingSection.model_fields),
    "optimizer": tuple(OptimizerSection.model_fields),
    "evaluation": tuple(EvaluationSection.model_fields),
    "checkpoint": tuple(CheckpointSection.model_fields),
    "sample": tuple(SampleSection.model_fields),
    "logging": tuple(LoggingSection.model_fields),
}


def _unknown_key(section: str, key: str) -> str:
    """Return the message for a key that its section, or the top of the file, does not have."""
    where = f"{section}.{key}" if section else key
    homes = [name for name, keys in SECTION_KEYS.items() if key in keys]
    if homes:
        return f"{where} does not exist: '{key}' belongs in [{homes[0]}]"
    if section and key in RunSpec.model_fields and key not in SECTION_KEYS:
        return f"{where} does not exist: '{key}' belongs at the top of the file, before the first section"
    own = SECTION_KEYS[section] if section else tuple(RunSpec.model_fields)
    elsewhere = [f"{name}.{other}" for name, keys in SECTION_KEYS.items() for other in keys]
    hint = nearest(key, own) or nearest(where, elsewhere)
    return f"{where} does not exist.{hint} {f'[{section}]' if section else 'The file'} has: {', '.join(own)}"
