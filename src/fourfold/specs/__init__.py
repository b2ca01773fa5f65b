"""What is asked for: the model, the layout, the run, the hardware. Nothing here needs torch."""

from fourfold.specs.hardware import dense_peak_flops
from fourfold.specs.layout import (
    AXES,
    AXIS_WORDS,
    BATCH_AXES,
    DATA_AXES,
    Layout,
)
from fourfold.specs.model import ModelSpec
from fourfold.specs.placement import PLACEMENTS, REPLICATED, Placement
from fourfold.specs.presets import PRESETS
from fourfold.specs.rope import RopeScaling
from fourfold.specs.run import RunSpec
from fourfold.specs.schedule_name import SCHEDULE_RULES, ScheduleName
from fourfold.specs.sections import (
    DataSection,
    EvaluationSection,
    LoggingSection,
    ModelSection,
    OptimizerSection,
    SampleSection,
    ShardingSection,
    TrainingSection,
)

__all__ = [
    "AXES",
    "AXIS_WORDS",
    "BATCH_AXES",
    "DATA_AXES",
    "PLACEMENTS",
    "PRESETS",
    "REPLICATED",
    "SCHEDULE_RULES",
    "DataSection",
    "EvaluationSection",
    "Layout",
    "LoggingSection",
    "ModelSection",
    "ModelSpec",
    "OptimizerSection",
    "Placement",
    "RopeScaling",
    "RunSpec",
    "SampleSection",
    "ScheduleName",
    "ShardingSection",
    "TrainingSection",
    "dense_peak_flops",
]
