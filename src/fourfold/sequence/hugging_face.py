"""Hugging Face's models with their tokens cut over the ranks of cp.

    context = context_parallel_(model, mesh)          # in place
    logits = model(**context.inputs(batch)).logits    # of this rank's tokens
    loss = cross_entropy_sum(logits, context.own(batch).labels_BS)

``batch`` holds whole rows, the same ones on all ranks of cp. Our attention is entered in their registry of
attention functions; the rest of such a model works on each token alone, given its position. As in data
parallelism a rank's gradients are those of its own tokens: `fourfold.shard` sums them, over cp too.

[Note: nothing is kept on the modules] What attention needs besides queries, keys and values comes with the
call: the models hand keyword arguments that they do not know through to the attention function. A model that
is called without them has nobody to ask for the other tokens, and is refused.
"""

from typing import Any

from torch import Tensor, nn

from fourfold.errors import UserError, choices
from fourfold.mesh import Mesh
from fourfold.models import Microbatch
from fourfold.sequence.attention import ContextAttention
from fourfold.specs import ModelSpec

NAME = "fourfold"
"""Of our function in the registry; a model's ``config._attn_implementation``."""

FAMILIES = ("gpt2", "llama", "mistral", "qwen2", "qwen3")
"""The models whose layers mix tokens by causal attention alone; a test holds each against one process."""

OF_THE_LONGEST = ("dynamic", "longrope")
"""Kinds of rotary positions whose frequencies follow the longest position of a call: it differs by rank."""


class ModelContext:
    """What a model is called with on this rank; made by `context_parallel_`.

    Attributes:
        attend: attention over the ranks of cp.
    """

    def __init__(self, attend: ContextAttention):
        self.attend = attend

    def own(self, batch: Microbatch) -> Microbatch:
        """This rank's tokens of whole rows, with their labels and positions."""
        return batch.take(self.attend.columns(batch.documents))

    def inputs(self, batch: Microbatch) -> dict[str, Any]:
        """The arguments of the model for this rank's tokens of whole rows."""
        mine = self.own(batch)
        return {
            "input_ids": mine.input_ids_BS,
            "position_ids": mine.position_ids_BS,
            "use_cache": False,
            "attend": self.attend,
            "documents": batch.documents,
        }


def context_parallel_(model: nn.Module, mesh: Mesh) -> ModelContext:
    """Let a model of Hugging Face attend over the ranks of cp; all ranks call it alike.

    By ring or by Ulysses, as the layout says. A sliding window is the model's own.

    Args:
        model: one of `FAMILIES`, its base model or with a causal language head, and no dropout of attention
            weights.
        mesh: the ranks.

    Raises UserError with all that the model has that cannot be cut.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING, AttentionInterface, PreTrainedModel

    if not isinstance(model, PreTrainedModel):
        raise UserError(
            f"{type(model).__name__} is no model of Hugging Face (Sequence axis): "
            f"use one, or put {ContextAttention.__module__}.ContextAttention in place of its attention"
        )
    if model.config.model_type not in FAMILIES:
        raise UserError(
            f"model_type='{model.config.model_type}' (Sequence axis): nobody has checked that its layers mix "
            f"tokens by attention alone; use {choices(FAMILIES)}"
        )
    spec = _spec(model.config)
    mappings: tuple[Any, ...] = (MODEL_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING)
    known = [mapping[type(model.config)] for mapping in mappings]
    problems = _problems(model.config, spec, mesh)
    if not isinstance(model, tuple(known)):
        problems.append(
            f"{type(model).__name__} looks for certain tokens of a row, which one rank has (Sequence axis): "
            f"use {choices([each.__name__ for each in known])}"
        )
    if problems:
        raise UserError(*problems)
    AttentionInterface.register(NAME, _attention)
    model.set_attn_implementation(NAME)
    model.register_forward_pre_hook(_without_labels, with_kwargs=True)
    ring, ulysses = mesh.split("cp", mesh.layout.ulysses(spec))
    return ModelContext(ContextAttention(ring=ring, ulysses=ulysses))


def attends_over_cp(module: nn.Module) -> bool:
    """Whether the attention of a module is that of `context_parallel_`."""
    return getattr(getattr(module, "config", None), "_attn_implementation", None) == NAME


def _spec(config: Any) -> ModelSpec:
    """The sizes that a layout has rules for."""
    heads = config.num_attention_heads
    return ModelSpec(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=getattr(config, "intermediate_size", None) or 4 * config.hidden_size,
        num_hidden_layers=config.num_hidden_layers,
        num_attention_heads=heads,
        num_key_value_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=2,  # no rule is about it
    )


def _problems(config: Any, spec: ModelSpec, mesh: Mesh) -> list[str]:
    problems = mesh.layout.problems(
        spec, batch=mesh.data.size, microbatches=1, sequence_length=1, world_size=None
    )
    for name in ("attention_dropout", "attn_pdrop"):
        if value := getattr(config, name, 0):
            problems.append(
                f"{name}={value}: which attention weights are dropped would depend on the layout "
                f"(Sequence axis): use {name}=0"
            )
    if not getattr(config, "is_causal", True):
        problems.append(
            "is_causal=False: attention over the ranks of cp is causal here (Sequence axis): "
            "use is_causal=True"
        )
    kind = (getattr(config, "rope_parameters", None) or {}).get("rope_type")
    if kind in OF_THE_LONGEST:
        problems.append(
            f"rope_type='{kind}' follows the longest position of a call, which differs by rank "
            "(Sequence axis): use another one, such as yarn"
        )
    return problems


def _without_labels(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse labels: the model would shift them by one among this rank's tokens, which are not neighbours."""
    if kwargs.get("labels") is not None:
        raise UserError(
            "labels=... are shifted inside of the model, among tokens that are no neighbours on this rank "
            "(Sequence axis): leave them out, and take "
            "fourfold.models.loss.cross_entropy_sum(logits, context.own(batch).labels_BS)"
        )


def _attention(
    module: nn.Module,
    query_BHSD: Tensor,
    key_BKSD: Tensor,
    value_BKSD: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    attend: ContextAttention | None = None,
    documents: tuple[tuple[int, ...], ...] | None = None,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """What the models call: the heads' outputs, (B, S, H, D), and no attention weights."""
    if attend is None or documents is None:
        raise UserError(
            "this model's tokens are cut over the ranks of cp: call it as model(**context.inputs(batch)), "
            "with what context_parallel_ returned"
        )
    if attention_mask is not None or key_BKSD.shape[2] != query_BHSD.shape[2]:
        raise UserError(
            "attention over the ranks of cp takes no attention_mask and no cache (Sequence axis): the "
            "batch's documents say what belongs together; generate from a model without context_parallel_"
        )
    out_BSHD = attend(
        query_BHSD.transpose(1, 2),
        key_BKSD.transpose(1, 2),
        value_BKSD.transpose(1, 2),
        documents=documents,
        window=sliding_window,
        scale=scaling,
    )
    return out_BSHD, None
