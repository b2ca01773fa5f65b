"""RunSpec: the run file, overrides, and every mistake in one error."""

import json

import pytest

from fourfold.errors import UserError
from fourfold.specs import (
    PRESETS,
    Layout,
    ModelSection,
    OptimizerSection,
    RunSpec,
    ShardingSection,
    TrainingSection,
)

RUN = """
[model]
preset = "tiny"
[training]
steps = 10
batch = 8
[optimizer]
learning_rate = 1e-3
"""


@pytest.fixture
def load(tmp_path):
    def load(text: str = RUN, overrides: tuple[str, ...] = (), layout: str | None = None) -> RunSpec:
        path = tmp_path / "quick.toml"
        path.write_text(text)
        return RunSpec.load(path, overrides, layout)

    return load


def messages(make, *arguments, **named) -> list[str]:
    with pytest.raises(UserError) as caught:
        make(*arguments, **named)
    return list(caught.value.messages)


def test_defaults(load):
    run = load()
    assert (run.layout, run.seed, run.folder) == (Layout(), 0, "runs/quick")
    assert run.model.spec() == PRESETS["tiny"]
    assert (run.data.source, run.data.tokenizer, run.data.sequence_length) == (
        ("python-stdlib",),
        "bytes",
        256,
    )
    assert (run.training.microbatches, run.training.dtype) == (1, "float32")
    assert (run.optimizer.name, run.optimizer.betas) == ("adamw", (0.9, 0.95))
    assert run.optimizer.schedule == "cosine"
    assert run.sharding == ShardingSection(pieces="auto", prefetch=1, accumulate="auto")


def test_the_same_run_in_python(load):
    run = RunSpec(
        folder="runs/quick",
        model=ModelSection(preset="tiny"),
        training=TrainingSection(steps=10, batch=8),
        optimizer=OptimizerSection(learning_rate=1e-3),
    )
    assert run == load()


def test_overrides_and_layout_win(load):
    run = load(
        overrides=(
            "training.steps=20",
            "model.num_hidden_layers=3",
            "data.source=some/folder",
            "optimizer.betas=[0.8, 0.9]",
            "optimizer.schedule=wsd",
            "logging.tensorboard=true",
            'sample.prompt=def f(x): # "hi", 3',
            "seed=7",
        ),
        layout="dp4",
    )
    assert run.layout == Layout(dp=4)
    assert run.training.steps == 20
    assert run.model.spec() == PRESETS["tiny"].replace({"num_hidden_layers": 3})
    assert run.data.source == ("some/folder",)
    assert run.optimizer.betas == (0.8, 0.9)
    assert run.optimizer.schedule == "wsd"
    assert run.logging.tensorboard is True
    assert run.sample.prompt == 'def f(x): # "hi", 3'
    assert run.seed == 7


def test_override_mistakes(load):
    assert messages(load, 'layout = "dp2"' + RUN, ("steps", "layout.x=1", ".a=2")) == [
        "override 'steps' is not section.key=value: write e.g. training.steps=100",
        "override 'layout.x=1': layout is a key, not a section",
        "override '.a=2' is not section.key=value: write e.g. training.steps=100",
    ]
    assert messages(load, RUN, ("training=5",)) == ["training=5 must be a table"]
    assert messages(load, RUN, ("checkpoint.keep=0",)) == ["checkpoint.keep=0 is too small: use 1 or more"]
    assert messages(load, RUN, ("training.steps=many",)) == ["training.steps='many' must be a whole number"]


def test_every_mistake_in_one_error(load):
    found = messages(
        load,
        """
        layout = "dp2,xx4"
        steps = 3
        sed = 4
        [model]
        preset = "tinyy"
        folder = "x"
        [data]
        source = ["a", 3]
        sequence_length = "256"
        [training]
        stepz = 4
        batch = 0
        dtype = "float16"
        learning_rate = 3
        [optimizer]
        betas = [0.9, 1.0]
        warmup_steps = -1
        final_fraction = 1.5
        eps = inf
        [sharding]
        pieces = "row"
        prefetch = -1
        accumulate = "all"
        [evaluation]
        every = true
        [logging]
        tensorboard = "yes"
        """,
    )
    assert [message.split(" Presets:")[0] for message in found] == [
        "steps does not exist: 'steps' belongs in [training]",
        "sed does not exist. Did you mean 'seed'? The file has: layout, seed, folder, model, data, training, "
        "sharding, optimizer, evaluation, "
        "checkpoint, sample, logging",
        "model.folder does not exist: 'folder' belongs at the top of the file, before the first section",
        "training.stepz does not exist. Did you mean 'steps'? "
        "[training] has: steps, batch, microbatches, dtype, recompute, skip_bad_steps",
        "training.learning_rate does not exist: 'learning_rate' belongs in [optimizer]",
        "model.preset 'tinyy' does not exist. Did you mean 'tiny'?",
        "data.source.1=3 must be a string in quotes",
        "data.sequence_length='256' must be a whole number",
        "training.steps is missing (optimizer steps): give it a value",
        "training.batch=0 is too small: use 1 or more",
        "training.dtype='float16' is not a choice: use 'float32', 'bfloat16' or 'float64'",
        "sharding.pieces='row' is not a choice: use 'auto', 'blocks', 'matrices', 'rows' or 'flat'",
        "sharding.prefetch=-1 is too small: use 0 or more",
        "sharding.accumulate='all' is not a choice: use 'auto', 'pieces' or 'whole'",
        "optimizer.learning_rate is missing (the highest rate of the schedule): give it a value",
        "optimizer.betas.1=1.0 is too large: use less than 1.0",
        "optimizer.eps=inf must be a finite number",
        "optimizer.warmup_steps=-1 is too small: use 0 or more",
        "optimizer.final_fraction=1.5 is too large: use 1.0 or less",
        "evaluation.every=True must be a whole number",
        "logging.tensorboard='yes' must be true or false",
        "layout 'dp2,xx4': axis 'xx' does not exist. Axes: pp, dp, fsdp, cp, tp",
    ]


def test_sharding_and_the_kind_of_optimizer(load):
    run = load(
        RUN + '[sharding]\npieces = "matrices"\n',
        ("sharding.prefetch=0", "sharding.accumulate=whole", "optimizer.name=muon"),
        "fsdp2:zero2",
    )
    assert run.sharding == ShardingSection(pieces="matrices", prefetch=0, accumulate="whole")
    assert run.optimizer.name == "muon"
    assert str(run.layout) == "fsdp2:zero2"
    assert load(run.to_toml()) == run
    assert messages(load, RUN, ("optimizer.name=adam",)) == [
        "optimizer.name='adam' is not a choice: use 'adamw' or 'muon'"
    ]


def test_mistakes_between_keys(load):
    assert messages(load, RUN, ("optimizer.warmup_steps=11", "data.held_out=0")) == [
        "data.held_out=0 is too small: use more than 0.0"
    ]
    assert messages(load, RUN, ("optimizer.warmup_steps=11",)) == [
        "optimizer.warmup_steps=11 is more than training.steps=10: use 10 or less"
    ]


def test_model_mistakes(load, tmp_path):
    assert messages(load, RUN, ("model.head_dim=15", "model.num_key_value_heads=3")) == [
        "model.num_key_value_heads=3 does not divide num_attention_heads=8: "
        "use num_key_value_heads=1, 2, 4 or 8",
        "model.head_dim=15 is odd, and rotary angles turn pairs of channels: use head_dim=14 or 16",
    ]
    assert messages(load, RUN, ("model.config=x",)) == [
        "model.preset and model.config are given together: leave only one"
    ]
    assert messages(load, RUN.replace("preset", "config")) == [
        "model.config: tiny does not exist: give a config.json or a folder that holds one"
    ]
    assert messages(load, RUN.replace('preset = "tiny"', "")) == [
        "model.preset is missing: give e.g. preset = 'small-2m', or config, or the sizes"
    ]
    assert messages(load, RUN.replace('preset = "tiny"', "num_hidden_layers = 2"))[0] == (
        "model.hidden_size is missing (channels of an activation): give it a value"
    )


def test_the_tokenizer_sets_the_vocabulary_of_a_preset(load, tmp_path):
    assert load().model.spec(257).vocab_size == 257
    explicit = load(overrides=("model.vocab_size=300",)).model
    assert explicit.spec(257).vocab_size == 300
    assert messages(explicit.spec, 301) == [
        "model.vocab_size=300 is less than the tokenizer's: use 301 or more"
    ]
    config = tmp_path / "config.json"
    config.write_text(json.dumps(PRESETS["tiny"].to_config()))
    from_config = load(RUN.replace('preset = "tiny"', f'config = "{config}"')).model
    assert from_config.spec(60) == PRESETS["tiny"]
    assert messages(from_config.spec, 257) == [
        "model.vocab_size=67 is less than the tokenizer's: use 257 or more"
    ]


def test_files(tmp_path):
    (tmp_path / "run.toml").write_text("a = 1\nb\n")
    assert messages(RunSpec.load, tmp_path / "rum.toml") == [
        f"run file {tmp_path}/rum.toml does not exist. Did you mean '{tmp_path}/run.toml'?"
    ]
    assert messages(RunSpec.load, tmp_path) == [f"{tmp_path} is a folder: give a run file"]
    [message] = messages(RunSpec.load, tmp_path / "run.toml")
    assert message.startswith(f"run file {tmp_path}/run.toml is not valid TOML: ")
    assert "line 2" in message
    (tmp_path / "run.toml").write_bytes(b"\xff\xfe")
    assert "is not valid TOML" in messages(RunSpec.load, tmp_path / "run.toml")[0]


def test_written_run_loads_back_equal(load):
    prompt = 'tab\t "quote" back\\slash \x7f \x01 é 🙂\nline'
    run = load(overrides=("model.rope_scaling={rope_type = 'linear', factor = 2.0}", "optimizer.eps=1e-16"))
    run = run.model_copy(update={"sample": run.sample.model_copy(update={"prompt": prompt})})
    text = run.to_toml()
    assert load(text) == run
    assert 'preset = "tiny"' in text
    assert "overrides" not in text


def test_resolved_run_needs_no_preset(load):
    resolved = load(overrides=("model.sliding_window=8",)).resolved(vocab_size=257)
    again = load(resolved.to_toml())
    assert again == resolved
    assert again.model.preset is None
    assert again.model.spec(257) == PRESETS["tiny"].replace({"vocab_size": 257, "sliding_window": 8})


def test_check_holds_the_layout_against_the_run(load):
    fits = ("data.sequence_length=128",)
    load(RUN, fits, "dp4").check(vocab_size=257, world_size=4)
    assert messages(load(RUN, fits, "dp3,tp2").check, world_size=4) == [
        "dp=3 does not divide batch=8 (Batch axis): use batch=6 or 9, or dp=1, 2, 4 or 8",
        "layout dp3,tp2 needs 6 ranks, and there are 4: use dp2,tp2, or start 6 ranks",
    ]
    assert messages(load(overrides=("model.vocab_size=9",)).check, vocab_size=257) == [
        "model.vocab_size=9 is less than the tokenizer's: use 257 or more"
    ]


def test_a_sequence_longer_than_the_context(load):
    load(overrides=("data.sequence_length=128",)).check()
    assert messages(load(overrides=("data.sequence_length=129",)).check) == [
        "data.sequence_length=129 is more than model.max_position_embeddings=128: "
        "use data.sequence_length=128 or less, or model.max_position_embeddings=129 or more"
    ]
    load(overrides=("data.sequence_length=129", "model.max_position_embeddings=129")).check()


def test_overrides_are_no_key_of_a_run_file(load):
    [message] = messages(load, RUN, ("model.overrides={hidden_size = 64}",))
    assert message.startswith("model.overrides does not exist.")
    assert "overrides" not in message.partition(" has: ")[2]


@pytest.mark.parametrize("batch", [2_000_000_001, 1_000_000_007 * 998_244_353])
def test_a_huge_batch_has_a_short_answer_soon(load, batch):
    spec = load(overrides=("data.sequence_length=128", f"training.batch={batch}"), layout="dp2")
    [message] = messages(spec.check)
    assert message.startswith(
        f"dp=2 does not divide batch={batch} (Batch axis): use batch={batch - 1} or {batch + 1}, or dp=1"
    )
    assert len(message) < 200
