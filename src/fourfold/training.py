"""The training loop."""

import math
import resource
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch

from fourfold.allocator import keep_freed_memory
from fourfold.assembly import DEFAULT_SHARDING, parallelize
from fourfold.checkpoint.initial_weights import read_hugging_face_
from fourfold.checkpoint.progress import Progress
from fourfold.collectives import Wait, all_reduce_, log_waits, record
from fourfold.data import Dataset
from fourfold.errors import RunStopped
from fourfold.held import counting_memory
from fourfold.initialize import initialize_
from fourfold.learning_rate import learning_rate
from fourfold.measured import TimeSpent, time_spent
from fourfold.mesh import Mesh
from fourfold.models import Decoder, Microbatch
from fourfold.not_finite import first_not_finite
from fourfold.optimizer import Update, optimizers
from fourfold.parallel_model import ParallelModel
from fourfold.place import HERE
from fourfold.rank_memory import RankMemory
from fourfold.specs import BATCH_AXES, ModelSpec, RunSpec, ShardingSection
from fourfold.specs.recompute_name import NO_RECOMPUTATION, RecomputeName
from fourfold.traffic import Event


@dataclass(frozen=True)
class StepReport:
    """One training step: finished, or the one at which the run stops since loss or norm is not finite.

    Attributes:
        step: its number, counted from 1.
        loss: mean over the valid tokens of the global batch, before the update.
        grad_norm: of the whole gradient, before clipping.
        learning_rate: what the update used.
        tokens: input tokens of the global batch.
        valid_tokens: labels that counted.
        seconds: wall-clock time of the step.
        memory_bytes: peak memory of this rank, of the device, or on the CPU of the process.
        spent: where this rank's time went; None where that is not known.
        events: what this rank sent, in order.
        waits: when it waited for that, in order.
        held: what this rank held, counted; None where that was not asked for.
    """

    step: int
    loss: float
    grad_norm: float
    learning_rate: float
    tokens: int
    valid_tokens: int
    seconds: float
    memory_bytes: int
    spent: TimeSpent | None = None
    events: Sequence[Event] = ()
    waits: Sequence[Wait] = ()
    held: RankMemory | None = None

    @property
    def is_finite(self) -> bool:
        """Whether both loss and gradient are finite."""
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)


@dataclass(frozen=True)
class EvaluationReport:
    """The loss on the held-out tokens, after ``step`` training steps: mean over ``valid_tokens`` labels."""

    step: int
    loss: float
    valid_tokens: int


Report = StepReport | EvaluationReport


def train(
    run: RunSpec,
    model_spec: ModelSpec,
    mesh: Mesh,
    *,
    train_data: Dataset,
    eval_data: Dataset,
    on_report: Callable[[Report], None],
    on_init: Progress = lambda *_: None,
    on_start: Callable[[ParallelModel], None] = lambda _: None,
    resume: Callable[["Trainer"], int] = lambda _: 0,
    on_step: Callable[["Trainer", int], None] = lambda *_: None,
    on_skip: Callable[[str], None] = lambda _: None,
    on_stop: Callable[[], None] = lambda: None,
) -> ParallelModel:
    """Train to step ``run.training.steps`` and return the model.

    Called on every rank of ``mesh``, with the same arguments but for what is called back:

    Args:
        run: how to train.
        model_spec: the model.
        mesh: the ranks.
        train_data: gives the batch of every step.
        eval_data: the held-out tokens.
        on_report: is given every report.
        on_init: hears how far this rank is with reading the weights of ``run.model.init``.
        on_start: is given the model before its first step.
        resume: loads what was saved and returns the step after which it was; 0 to begin.
        on_step: is given the number of finished steps after each, evaluation included: the time to save.
        on_skip: is given what is wrong with a step that is passed over.
        on_stop: is called before the run stops at what is not finite.

    Raises:
        RunStopped: where loss or gradient are not finite in more steps in a row than
            ``training.skip_bad_steps``; no such step touches weights or moments, and the learning rate counts
            it. The message names the step, and the rank and the parameter where it began.
    """
    trainer = Trainer(run, model_spec, mesh, data=train_data, on_init=on_init)
    on_start(trainer.parallel)
    bad_steps = 0
    start = resume(trainer)
    for step in range(start, run.training.steps):
        report = trainer.step(step, counts_memory=step == start)
        on_report(report)
        bad_steps = 0 if report.is_finite else bad_steps + 1
        if bad_steps:
            diagnosis = trainer.diagnosis(step)
            if bad_steps > run.training.skip_bad_steps:
                on_stop()
                raise RunStopped(diagnosis)
            on_skip(f"{diagnosis}; passed over, {bad_steps} in a row")
        every, last = run.evaluation.every, report.step == run.training.steps
        if last or (every and report.step % every == 0):
            evaluation = evaluate(trainer.parallel, run, eval_data, step=report.step)
            on_report(evaluation)
            if not math.isfinite(evaluation.loss):
                on_stop()
                raise RunStopped(
                    f"the held-out loss after step {report.step} is {evaluation.loss}: the weights are "
                    "broken; try a lower optimizer.learning_rate"
                )
        HERE.begin(f"after step {report.step}", is_watched=True)
        on_step(trainer, report.step)
    HERE.begin("after the last step")
    return trainer.parallel


class Trainer:
    """A model in training: its weights, its optimizer, its data.

    Args:
        run: how to train.
        model_spec: the model; its weights are initialised here.
        mesh: the ranks.
        data: gives the batch of every step.
        on_init: hears how far this rank is with reading weights.

    Attributes:
        parallel: the model on its ranks.
        update: its optimizer.
    """

    def __init__(
        self,
        run: RunSpec,
        model_spec: ModelSpec,
        mesh: Mesh,
        *,
        data: Dataset,
        on_init: Progress = lambda *_: None,
    ):
        training = run.training
        if mesh.device.type == "cpu":
            keep_freed_memory()
        self.parallel = initialized(
            model_spec,
            mesh,
            microbatches=training.microbatches,
            dtype=training.dtype,
            seed=run.seed,
            sharding=run.resolved_sharding,
            sequence_length=run.data.sequence_length,
            batch=training.batch,
            recompute=training.recompute,
            init=None if run.model.init is None else Path(run.model.init),
            on_init=on_init,
        )
        self._run = run
        self._data = data
        self.update = Update(
            self.parallel, optimizers(self.parallel, run.optimizer), clip_norm=run.optimizer.clip_norm
        )

    def step(self, step: int, *, counts_memory: bool = False) -> StepReport:
        """Train on the batch of ``step``, from 0. A step that is not finite leaves the weights alone.

        With ``counts_memory`` the report says what the rank held, and the step takes longer.
        """
        began = time.perf_counter()
        HERE.begin(f"in step {step + 1}", is_watched=True)
        training = self._run.training
        valid_tokens = self._data.valid_tokens(step, training.batch)
        batches = self._batches(step)
        data_seconds = time.perf_counter() - began
        update = self.update
        update.learning_rate = learning_rate(step + 1, spec=self._run.optimizer, total_steps=training.steps)
        with ExitStack() as stack:
            events, waits = stack.enter_context(record()), stack.enter_context(log_waits())
            ledger = None
            if counts_memory:
                counting = counting_memory(self.parallel, update, batches, events)
                ledger = stack.enter_context(counting)
            loss_sum = self.parallel.step(batches, valid_tokens=valid_tokens, update=update)
            loss = float(loss_sum) / max(valid_tokens, 1)
        del batches  # they are no part of what is held between steps
        seconds = time.perf_counter() - began
        trace = self.parallel.executor.trace
        return StepReport(
            step=step + 1,
            loss=loss,
            grad_norm=update.norm,
            learning_rate=update.learning_rate,
            tokens=training.batch * self._run.data.sequence_length,
            valid_tokens=valid_tokens,
            seconds=seconds,
            memory_bytes=peak_memory_bytes(self.parallel.mesh.device),
            spent=time_spent(trace, waits, seconds=seconds, data_seconds=data_seconds),
            events=events,
            waits=waits,
            held=None if ledger is None else ledger.memory,
        )

    @property
    def is_asked_to_end(self) -> bool:
        """Whether any rank was asked, by a signal, to end after the last step; the same on all ranks."""
        return float(self.parallel.executor.asked_to_end) > 0

    def diagnosis(self, step: int) -> str:
        """Where the loss or gradient of ``step`` that is not finite began. Called on every rank."""
        valid_tokens = self._data.valid_tokens(step, self._run.training.batch)
        where = first_not_finite(self.parallel, self._batches(step), valid_tokens=valid_tokens)
        return f"step {step + 1} is not finite; no weight was changed by it: {where}"

    def _batches(self, step: int) -> list[Microbatch]:
        training = self._run.training
        return rank_batches(
            self._data,
            self.parallel.mesh,
            step=step,
            batch=training.batch,
            microbatches=training.microbatches,
        )


def initialized(
    model_spec: ModelSpec,
    mesh: Mesh,
    *,
    microbatches: int,
    dtype: str,
    seed: int,
    sharding: ShardingSection = DEFAULT_SHARDING,
    sequence_length: int | None = None,
    batch: int = 1,
    recompute: RecomputeName = NO_RECOMPUTATION,
    init: Path | None = None,
    on_init: Progress = lambda *_: None,
) -> ParallelModel:
    """Build the model on ``mesh`` with its initial weights, the same on every layout.

    Each rank makes what it owns alone, or reads it from the Hugging Face folder ``init``: a sharded model is
    nowhere whole; ``on_init`` hears how far that is. ``batch`` is that of all ranks; only a memory budget
    depends on it.
    """
    with torch.device("meta"):
        model = Decoder(model_spec)
    parallel = parallelize(
        model,
        mesh=mesh,
        microbatches=microbatches,
        dtype=getattr(torch, dtype),
        sharding=sharding,
        sequence_length=sequence_length,
        rows=max(1, batch // (microbatches * mesh.data.size)),
        recompute=recompute,
    )
    if init is not None:
        read_hugging_face_(parallel, init, on_init)
    elif mesh.device.type != "meta":  # there, in a rehearsal, are no values
        initialize_(parallel.weights.masters(), model, seed=seed, std=model_spec.initializer_range)
        parallel.publish_()
    return parallel


def rank_batches(data: Dataset, mesh: Mesh, *, step: int, batch: int, microbatches: int) -> list[Microbatch]:
    """This rank's microbatches of the global batch of ``step``.

    Row j of the global batch belongs to microbatch ``j // (batch / M)``; within a microbatch the ranks of the
    data axes (dp x fsdp) take equal runs of rows in their order.
    """
    ranks = mesh.data.size
    rows = batch // (microbatches * ranks)
    first = [(m * ranks + mesh.data.rank) * rows for m in range(microbatches)]
    return [data.rows(step, batch, range(start, start + rows)).to(mesh.device) for start in first]


def evaluate(parallel: ParallelModel, run: RunSpec, data: Dataset, *, step: int) -> EvaluationReport:
    """The mean loss on the first ``run.evaluation.batches`` held-out batches, on all ranks together."""
    HERE.begin(f"in the evaluation after step {step}", is_watched=True)
    batch = run.training.batch
    total = torch.zeros((), dtype=torch.float64, device=parallel.mesh.device)
    valid_tokens = 0
    for index in range(run.evaluation.batches):
        valid_tokens += data.valid_tokens(index, batch)
        total += parallel.evaluate(
            rank_batches(data, parallel.mesh, step=index, batch=batch, microbatches=run.training.microbatches)
        )
    all_reduce_(total, parallel.mesh.joint("pp", *BATCH_AXES))
    return EvaluationReport(step, float(total) / max(valid_tokens, 1), valid_tokens)


def peak_memory_bytes(device: torch.device) -> int:
    """The most memory used so far: of the device on CUDA, resident memory of the process elsewhere."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
