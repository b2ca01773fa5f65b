"""What the software of a published run had at its release: `Practice` by source, and how it dealt layers."""

from typing import Any

from fourfold.planner.compute import FORWARD_KERNELS
from fourfold.planner.practice import Practice
from fourfold.planner.stages import Dealt

Row = dict[str, str]


def stack_of(source: str) -> str:
    """One name for the pages of one project."""
    names = {
        "llm-foundry": "llm-foundry",
        "dgxc-benchmarking maxtext": "MaxText",
        "dgxc-benchmarking paxml": "PaxML",
        "dgxc-benchmarking": "NeMo (dgxc)",
        "Megatron-Bridge": "Megatron-Bridge",
        "bigscience": "Megatron-DeepSpeed",
        "Zero Bubble": "Megatron (zero bubble)",
        "InternLM": "InternEvo",
        "Megatron-LM": "Megatron-LM",
        "Automodel": "Automodel",
        "ModelZoo": "Megatron MoE ModelZoo",
        "gpt-neox": "GPT-NeoX",
    }
    return next((name for part, name in names.items() if part in source), source.split("/")[0][:30])


def practice_of(row: Row) -> Practice:
    """Of a row's kernels, messages and sums.

    Megatron and DeepSpeed cut messages over tp (``scatter_gather_tensors``, ``PartitionedTensor``).
    DeepSpeed's pipelines sum gradients by an instruction of their own after the last backward. InternEvo sums
    them in their own dtype, and each rank broadcasts the matrices that it owns (``hybrid_zero_optim.py``).
    The paper on zero bubbles lets the optimizer's check of one step run behind the next step.
    """
    stack, pipelined = stack_of(row["source"]), int(row["pp"] or 1) > 1
    return Practice(
        products="float8" if "fp8" in row["precision"] else None,
        compiled=row["compile"] == "1",
        **kernels_of(row),
        sends_wait=_waits_for_messages(row),
        logits_again=False,
        reduced_itemsize=2 if row["zero_stage"] in ("2", "3") or stack == "InternEvo" else 4,
        messages_cut=True,
        owners_broadcast=stack == "InternEvo",
        sums_wait=stack == "Megatron-DeepSpeed" and pipelined,
        steps_overlap=row["schedule"].startswith("zb"),
        dealt=_dealt(row),
    )


EAGER_LAUNCH_SECONDS = 3.5e-3 / (4 * FORWARD_KERNELS["layer"])
"""Between two kernels: of a layer as many forward, as many again, and twice as many backward."""

_EARLY = {"fragmentation": 0.12}
_FLOAT16 = {"gradient_bytes": 2, "owned_gradient_bytes": 4}


def _dealt(row: Row) -> Dealt:
    """How a run's layers came to its stages.

    Megatron puts as many layers on each. Where they do not divide but would with two more, the embedding and
    the head counted as one each (405B has 126 layers on 128 stages; "Rebalancing layers" of BigScience).
    """
    layers, stages = int(row["n_layers"]), int(row["pp"] or 1) * chunks_of(row)
    return "blocks" if layers % stages and (layers + 2) % stages == 0 else "layers"


def chunks_of(row: Row) -> int:
    """Stages of a pipeline rank.

    The interleaved runs of the paper on zero bubbles have a layer on each: its script has
    ``--num-layers-per-virtual-pipeline-stage 1``. Where another source does not say how many, the least.
    """
    if not row["schedule"].startswith("interleaved"):
        return int(row["vpp_chunks"] or 1)
    if stack_of(row["source"]) == "Megatron (zero bubble)":
        return (int(row["n_layers"]) + 2) // int(row["pp"])
    return max(int(row["vpp_chunks"] or 1), 2)


def _waits_for_messages(row: Row) -> bool:
    """Megatron's 1F1B waits for each message, and before 2024 its interleaved schedule did so too."""
    stack, schedule = stack_of(row["source"]), row["schedule"]
    if stack in ("Megatron-DeepSpeed", "GPT-NeoX", "Megatron (zero bubble)"):
        return not schedule.startswith("zb")
    return stack in ("NeMo (dgxc)", "Megatron-Bridge", "Megatron-LM") and schedule == "1f1b"


def kernels_of(row: Row) -> dict[str, Any]:
    """What the software of a row had, by its release.

    FlashAttention 3, and cuDNN's of that speed, is of 2024. llm-foundry's tables are of 2023 and ran Triton's
    kernel, which ALiBi needed: 0.6 of FlashAttention 2 on A100, and on H100, for which it was not written, a
    third of FlashAttention 3 (Dao, arXiv:2307.08691, figures 4 to 7). Which kernel it was the tables do not
    say: their long rows do, whose time is attention. Megatron-DeepSpeed and GPT-NeoX are of 2022 and wrote
    scores to memory. The recipes of NeMo and Megatron-Bridge overlap tp's collectives with products, which
    hides 60 to 70%. The paper on zero bubbles keeps scores too: table 1 has sbh (34 + 5as/h) bytes a layer.

    Megatron and DeepSpeed keep gradients of float16 as such, and their optimizers a copy in float32 of what
    they own (4 + 16 / dp bytes a parameter); DeepSpeed those of bfloat16 as such and in float32.

    Megatron-DeepSpeed of 2022 ran without compiled kernels; a layer, run again and backward, took its host
    3.5 ms to start. BigScience trained on A100 with ``CUDA_LAUNCH_BLOCKING=1``: without it jobs of 320
    devices hung (its chronicles, "dealing with JZ hanging on the large model").

    Before expandable segments (PyTorch 2.1, end of 2023) an allocator reserved 5 to 20% more than was in use.
    """
    stack = stack_of(row["source"])
    if stack == "llm-foundry":
        return {"attention": 0.33 if row["gpu"].startswith("H100") else 0.6, **_EARLY}
    if stack in ("Megatron-DeepSpeed", "GPT-NeoX"):
        gradients = {"gradient_bytes": 6} if row["precision"].startswith("bf16") else _FLOAT16
        waits = stack == "Megatron-DeepSpeed" and row["gpu"].startswith("A100")
        return {
            "fused_attention": False,
            "launch_seconds": EAGER_LAUNCH_SECONDS,
            "launches_wait": waits,
            **gradients,
            **_EARLY,
        }
    if stack == "Megatron (zero bubble)":
        return {"fused_attention": False, **_FLOAT16, **_EARLY}
    if stack == "InternEvo":
        return _EARLY
    if stack in ("NeMo (dgxc)", "Megatron-Bridge", "Megatron-LM"):
        return {"tp_hidden": 0.65}
    return {}
