"""The learning rate as a pure function of the step."""

import math

from fourfold.specs.sections import OptimizerSection


def learning_rate(step: int, *, spec: OptimizerSection, total_steps: int) -> float:
    """Return the learning rate of one optimizer step, the first step being 1.

    It rises linearly over ``warmup_steps``, reaching the full rate at the last of them, and ends at
    ``final_fraction`` of it at ``total_steps``: along half a cosine (Loshchilov and Hutter,
    arXiv:1608.03983), or on a line over the last ``decay_fraction`` of all steps (warm-up, stable, decay;
    Hu et al., arXiv:2404.06395). A constant rate stays. Nothing but the step decides: neither the
    number of ranks nor that of microbatches.
    """
    peak, warmup = spec.learning_rate, spec.warmup_steps
    if step < warmup:
        return peak * step / warmup
    if spec.schedule == "constant":
        return peak
    start = warmup
    if spec.schedule == "wsd":
        start = max(warmup, total_steps - round(spec.decay_fraction * total_steps))
    if step <= start:
        return peak
    progress = 1.0 if step >= total_steps else (step - start) / (total_steps - start)
    share = 0.5 * (1 + math.cos(math.pi * progress)) if spec.schedule == "cosine" else 1 - progress
    return peak * (spec.final_fraction + (1 - spec.final_fraction) * share)
