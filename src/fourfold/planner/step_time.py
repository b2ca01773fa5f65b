"""How long a step takes, and where its time goes."""

from dataclasses import dataclass, fields


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step on the rank that is busiest, by what they are for; they add up to the step.

    Attributes:
        compute: matrix products, attention and element-wise work, forwards that run again included.
        launch: what kernels wait for the host beyond that.
        tp: collectives of the Channel axis that nothing hides.
        cp: the same of the Sequence axis.
        data: the same of the Batch axis: gathers of weights and sums of gradients.
        messages: of the pipeline, that nothing hides.
        bubble: what a rank of the pipeline stands idle.
        optimizer: the update.
    """

    compute: float = 0.0
    launch: float = 0.0
    tp: float = 0.0
    cp: float = 0.0
    data: float = 0.0
    messages: float = 0.0
    bubble: float = 0.0
    optimizer: float = 0.0

    @property
    def total(self) -> float:
        """The whole step."""
        return sum(getattr(self, part.name) for part in fields(self))
