"""Rotary position embeddings (Su et al. 2021) and the ways to stretch them to longer texts.

Formulas and constants follow Hugging Face transformers (`modeling_rope_utils.py`), so that published weights
give the same numbers. Nothing is stored in the model: frequencies are computed from the spec when they are
needed, in float32 (float64 in a float64 model), so no cast and no empty allocation can spoil them.
"""

import math
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fourfold.models.batch import Microbatch
from fourfold.specs import ModelSpec, RopeScaling


class Rotary:
    """The angles of a model's microbatches: computed once for each, kept as long as the microbatch lives."""

    def __init__(self, spec: ModelSpec):
        self.spec = spec
        self._cache: WeakKeyDictionary[Microbatch, tuple[Tensor, Tensor]] = WeakKeyDictionary()

    def __reduce__(self) -> tuple[type["Rotary"], tuple[ModelSpec]]:
        """Copy and pickle without the cache, whose weak references cannot be pickled."""
        return Rotary, (self.spec,)

    def __call__(self, batch: Microbatch, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return cos (B, S, 1, D) and sin (B, S, 1, D/2) in `dtype`, on the batch's device."""
        found = self._cache.get(batch)
        if found is None or found[0].dtype != dtype:
            with torch.inference_mode(False), torch.no_grad():
                found = self._cache[batch] = cos_sin(self.spec, batch, dtype)
        return found


def cos_sin(spec: ModelSpec, batch: Microbatch, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return cos (B, S, 1, D) and sin (B, S, 1, D/2) of the batch's angles, times the attention factor."""
    high = torch.promote_types(dtype, torch.float32)
    positions_BS = batch.position_ids_BS
    lengths_BS = None
    if spec.rope_scaling is not None and spec.rope_scaling.rope_type in ("dynamic", "longrope"):
        lengths_BS = batch.token_lengths.to(positions_BS.device)
    frequencies = inverse_frequencies(spec, high, positions_BS.device, lengths_BS)
    angles_BS1D = (positions_BS.to(high)[..., None] * frequencies).unsqueeze(2)
    factor = attention_factor(spec)
    cos, sin = angles_BS1D.cos().mul_(factor), angles_BS1D.sin().mul_(factor)
    return torch.cat((cos, cos), -1).to(dtype), sin.to(dtype)


def inverse_frequencies(
    spec: ModelSpec,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    lengths: Tensor | None = None,
) -> Tensor:
    """Return the angle per position of each pair of channels: shape (D/2,).

    `dynamic` and `longrope` depend on how long the text is. It is the length of the document that a token is
    in, never the longest one at hand: that would differ with the layout. For them, integer `lengths` of any
    shape give frequencies of shape (*lengths.shape, D/2); without `lengths` the text counts as short.
    """
    exponents = torch.arange(0, spec.head_dim, 2, device=device).to(dtype) / spec.head_dim
    powers = spec.rope_theta**exponents
    scaling = spec.rope_scaling
    if scaling is None:
        return 1.0 / powers
    if scaling.rope_type == "linear":
        return 1.0 / powers / scaling.factor
    if scaling.rope_type == "dynamic":
        return _dynamic(spec, scaling, exponents, lengths)
    if scaling.rope_type == "llama3":
        return _llama3(scaling, 1.0 / powers)
    if scaling.rope_type == "yarn":
        return _yarn(spec, scaling, powers)
    assert scaling.rope_type == "longrope"
    return _longrope(scaling, powers, lengths)


T = TypeVar("T")


def _given(value: T | None) -> T:
    """Return a field that `RopeScaling` requires for the kind at hand."""
    assert value is not None
    return value


def attention_factor(spec: ModelSpec) -> float:
    """Return what cos and sin are multiplied by: other than 1 for `yarn` and `longrope` only."""
    scaling = spec.rope_scaling
    if scaling is None or scaling.rope_type not in ("yarn", "longrope"):
        return 1.0
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.rope_type == "longrope":
        original = _given(scaling.original_max_position_embeddings)
        return math.sqrt(1 + math.log(scaling.factor) / math.log(original))
    if scaling.mscale and scaling.mscale_all_dim:
        return _yarn_scale(scaling.factor, scaling.mscale) / _yarn_scale(
            scaling.factor, scaling.mscale_all_dim
        )
    return _yarn_scale(scaling.factor, 1.0)


def _yarn_scale(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0


def _dynamic(spec: ModelSpec, scaling: RopeScaling, exponents: Tensor, lengths: Tensor | None) -> Tensor:
    """Raise the base with the length of the text beyond the trained one ("NTK-aware" scaling)."""
    if lengths is None:
        return 1.0 / spec.rope_theta**exponents
    trained, dim = spec.max_position_embeddings, spec.head_dim
    length = lengths.clamp(min=trained).to(exponents.dtype)[..., None]
    base = spec.rope_theta * (scaling.factor * length / trained - (scaling.factor - 1)) ** (dim / (dim - 2))
    return 1.0 / base**exponents


def _llama3(scaling: RopeScaling, plain: Tensor) -> Tensor:
    """Keep short wavelengths, divide long ones by the factor, blend between (Llama 3.1)."""
    original = _given(scaling.original_max_position_embeddings)
    low, high = _given(scaling.low_freq_factor), _given(scaling.high_freq_factor)
    wavelengths = 2 * math.pi / plain
    blend = (original / wavelengths - low) / (high - low)
    blended = (1 - blend) * plain / scaling.factor + blend * plain
    scaled = torch.where(wavelengths > original / low, plain / scaling.factor, blended)
    return torch.where(wavelengths < original / high, plain, scaled)


def _yarn(spec: ModelSpec, scaling: RopeScaling, powers: Tensor) -> Tensor:
    """Divide slow channels by the factor and keep fast ones, with a ramp between (Peng et al. 2023)."""
    dim, original = spec.head_dim, _given(scaling.original_max_position_embeddings)

    def channel(rotations: float) -> float:
        """Return the (fractional) pair that turns so often within the original length."""
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(spec.rope_theta))

    first, last = channel(scaling.beta_fast or 32), channel(scaling.beta_slow or 1)
    if scaling.truncate is not False:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    if first == last:
        last += 0.001  # a step instead of a ramp
    steps = torch.arange(dim // 2, dtype=powers.dtype, device=powers.device)
    slow = ((steps - first) / (last - first)).clamp(0, 1)
    return slow / (scaling.factor * powers) + (1 - slow) / powers


def _longrope(scaling: RopeScaling, powers: Tensor, lengths: Tensor | None) -> Tensor:
    """Divide each channel by a number of its own, from the list for short or for long texts (LongRoPE)."""
    factors = powers.new_tensor(_given(scaling.short_factor))
    if lengths is not None:
        is_long = lengths[..., None] > _given(scaling.original_max_position_embeddings)
        factors = torch.where(is_long, powers.new_tensor(_given(scaling.long_factor)), factors)
    return 1.0 / (factors * powers)


class _Rotate(torch.autograd.Function):
    """The rotation with an explicit backward, which is the rotation by the negative angle."""

    @staticmethod
    def forward(ctx: Any, x_BSHD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotated(x_BSHD, cos, sin, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BSHD: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotated(grad_BSHD, cos, sin, -1), None, None


def _rotated(x_BSHD: Tensor, cos: Tensor, sin: Tensor, sign: int) -> Tensor:
    half = sin.shape[-1]
    out_BSHD = x_BSHD * cos
    out_BSHD[..., :half].addcmul_(x_BSHD[..., half:], sin, value=-sign)
    out_BSHD[..., half:].addcmul_(x_BSHD[..., :half], sin, value=sign)
    return out_BSHD


def rotate(x_BSHD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (i, i + D/2) of the last dimension by the angles of `Rotary`."""
    return _Rotate.apply(x_BSHD, cos, sin)
