"""A plan in numbers for people and for JSON: rates, utilization, why another one lost, its run file."""

from dataclasses import asdict, fields
from typing import Any

from fourfold.flops import Convention, model_flops
from fourfold.planner.plans import Plan, Question
from fourfold.planner.step_time import StepTime
from fourfold.program.actions import Kind
from fourfold.specs import DataSection, ModelSection, OptimizerSection, RunSpec, TrainingSection
from fourfold.specs.model import is_path
from fourfold.step_flops import StepWork

ERROR = 0.10
"""Of a step's time: the mean error against published runs; see ``docs/planner.md``."""

RUN_STEPS, LEARNING_RATE = 1000, 3e-4
"""Of a run file that is written; a plan knows nothing of them."""


def executed_flops(plan: Plan) -> int:
    """FLOPs that all devices execute in a step; see `fourfold.step_flops`."""
    step = plan.step
    work = StepWork(
        step.spec,
        step.layout,
        [],
        [((step.sequence_length,),) * step.rows],
        step.itemsize,
        keeps=step.recompute.not_again(tp=step.layout.tp),
    )
    layers = step.spec.num_hidden_layers
    runs = {
        (Kind.FORWARD, "layer", 0): layers,
        (Kind.BACKWARD, "layer", 0): layers,
        (Kind.RECOMPUTE, "layer", 0): 0 if step.recompute.is_none else layers,
        (Kind.FORWARD, "head", 0): 1,
        (Kind.BACKWARD, "head", 0): 1,
    }
    return work.of_runs(runs).executed * step.microbatches * step.layout.size("dp", "fsdp")


def utilization(plan: Plan, question: Question) -> dict[str, float]:
    """MFU by both conventions, and HFU, over the dense peak of the dtype that products run in."""
    step = plan.step
    peak = question.machine.peak_flops[question.practice.products or step.dtype]
    seconds = plan.time.total * peak * step.layout.world_size

    def used(convention: Convention) -> float:
        flops = model_flops(
            step.spec, batch=step.batch, sequence_length=step.sequence_length, convention=convention
        )
        return flops / seconds

    return {"mfu": used("pairs"), "mfu_square": used("square"), "hfu": executed_flops(plan) / seconds}


def parts(time: StepTime) -> dict[str, float]:
    """Shares of a step, what is nothing left out."""
    shares = {part.name: getattr(time, part.name) / time.total for part in fields(time)}
    return {name: share for name, share in shares.items() if share >= 0.0005}


def difference(plan: Plan, best: Plan) -> str:
    """How much longer than another one a plan takes, and which parts make most of it."""
    slower = plan.time.total / best.time.total - 1
    differences = {
        part.name: getattr(plan.time, part.name) - getattr(best.time, part.name) for part in fields(plan.time)
    }
    named = sorted(differences.items(), key=lambda one: -abs(one[1]))
    parts_of_it = [
        f"{_WORDS[name]} {seconds / best.time.total:+.1%}"
        for name, seconds in named[:2]
        if abs(seconds) / best.time.total > 0.002
    ]
    return f"{slower:+.1%} time ({', '.join(parts_of_it) or 'as fast'})"


_WORDS = {
    "compute": "computation",
    "launch": "waiting for the host",
    "tp": "collectives of tp",
    "cp": "collectives of cp",
    "data": "gathers and sums of the Batch axis",
    "bubble": "pipeline bubble",
    "optimizer": "update",
}
"""What the parts of a step are called where two plans are compared."""


def to_json(plan: Plan, question: Question) -> dict[str, Any]:
    """A plan as numbers and texts: seconds, bytes, fractions."""
    step = plan.step
    return {
        "layout": str(plan.layout),
        "microbatches": step.microbatches,
        "rows": step.rows,
        "recompute": str(step.recompute),
        "dtype": step.dtype,
        "step_seconds": plan.time.total,
        "step_seconds_interval": [plan.time.total * (1 - ERROR), plan.time.total * (1 + ERROR)],
        "tokens_per_second_per_device": plan.tokens_per_second,
        **utilization(plan, question),
        "seconds": asdict(plan.time),
        "memory_bytes": asdict(plan.memory) | {"reserved": plan.memory.reserved},
        "fullest_pipeline_rank": plan.worst_rank,
    }


def run_of(plan: Plan, model: str) -> RunSpec:
    """The run of a plan, for `fourfold.specs.RunSpec.to_toml`; ``model`` is as the command line has it."""
    step = plan.step
    spec, sizes = step.spec, dict[str, Any]()
    if step.sequence_length > spec.max_position_embeddings:
        sizes["max_position_embeddings"] = step.sequence_length
    if is_path(model):
        section = ModelSection(config=model, overrides=sizes)
    else:  # the vocabulary is spelled out: a tokenizer's would take the place of a preset's
        section = ModelSection(preset=model, overrides={"vocab_size": spec.vocab_size, **sizes})
    return RunSpec(
        layout=plan.layout,
        model=section,
        data=DataSection(sequence_length=step.sequence_length),
        training=TrainingSection.model_validate(
            {
                "steps": RUN_STEPS,
                "batch": step.batch,
                "microbatches": step.microbatches,
                "dtype": step.dtype,
                "recompute": step.recompute,
            }
        ),
        optimizer=OptimizerSection(learning_rate=LEARNING_RATE),
    )
