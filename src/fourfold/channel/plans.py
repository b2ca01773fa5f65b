"""Which projections of a model are cut by columns and which by rows: plans, as data.

A *branch* is what the residual stream enters and leaves: attention, or the MLP. Inside it the first matrices
are cut by columns (out_features) and the last ones by rows (in_features), so that each branch has one
collective where the stream enters and one where it leaves, forward and backward (Shoeybi et al. 2019).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from fourfold.specs import ModelSpec

COUNTED_POSITIONS = "the model counts positions along the stream, and each rank would start at 0"
"""Of Hugging Face's models: why the stream stays whole."""


@dataclass(frozen=True)
class Columns:
    """A projection that is cut by columns.

    Attributes:
        groups: how many indivisible groups (heads) its outputs are; None where any output may go anywhere.
        copied: whether more ranks than groups are served by copies. That is for key/value heads: each copy
            serves other query heads.
        fused: how many matrices of that kind lie one after another in its outputs, as in a fused qkv.
    """

    groups: int | None = None
    copied: bool = False
    fused: int = 1


@dataclass(frozen=True)
class Branch:
    """A module between two collectives.

    Attributes:
        columns: the projections that read the stream, by their name in the module.
        rows: the names of those that write to it.
        scaled: attributes of the module that count heads or channels, and are divided by the number of ranks.
        groups: the attribute that says how many query heads (``q_proj``) read a key/value head (``k_proj``).
    """

    columns: Mapping[str, Columns]
    rows: tuple[str, ...]
    scaled: tuple[str, ...] = ()
    groups: str | None = None


@dataclass(frozen=True)
class Plan:
    """How a model is cut on the tp axis. Everything that is not named is held whole by every rank.

    Attributes:
        branches: by the names of their modules. ``*`` stands for a part of a name between dots, as a layer's
            number.
        embedding: the name of the token embedding, cut by vocabulary.
        head: the name of the projection to the vocabulary, cut by vocabulary too.
        last_norm: the name of the module before the head, where the stream enters it.
        transposed: whether weights lie as (in, out), as in GPT-2's Conv1D.
        whole_stream: why every rank needs the stream of all tokens, so that sequence parallelism is refused;
            None where outside of the branches each token is computed by itself.
    """

    branches: Mapping[str, Branch]
    embedding: str | None = None
    head: str | None = None
    last_norm: str | None = None
    transposed: bool = False
    whole_stream: str | None = None

    def branch(self, name: str) -> Branch | None:
        """The branch that a module is, None where it is none."""
        return next((branch for pattern, branch in self.branches.items() if fits(name, pattern)), None)


def fits(name: str, pattern: str) -> bool:
    """Whether a module's name is one of those that a branch's pattern stands for."""
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted))


def decoder_plan(spec: ModelSpec) -> Plan:
    """The plan of our decoder, whose names are those of the Llama, Qwen and Mistral families.

    It is told the positions of its tokens, whichever a rank has.
    """
    return replace(llama_plan(spec.num_attention_heads, spec.num_key_value_heads), whole_stream=None)


def llama_plan(heads: int, kv_heads: int) -> Plan:
    """The plan of Hugging Face's Llama, Qwen2, Qwen3 and Mistral models."""
    queries, keys = Columns(heads), Columns(kv_heads, copied=True)
    return Plan(
        branches={
            "model.layers.*.self_attn": Branch(
                {"q_proj": queries, "k_proj": keys, "v_proj": keys},
                rows=("o_proj",),
                groups="num_key_value_groups",
            ),
            "model.layers.*.mlp": Branch({"gate_proj": Columns(), "up_proj": Columns()}, ("down_proj",)),
        },
        embedding="model.embed_tokens",
        head="lm_head",
        last_norm="model.norm",
        whole_stream=COUNTED_POSITIONS,
    )


def gpt2_plan(heads: int) -> Plan:
    """The plan of Hugging Face's GPT-2, whose queries, keys and values are one matrix."""
    return Plan(
        branches={
            "transformer.h.*.attn": Branch(
                {"c_attn": Columns(heads, fused=3)},
                ("c_proj",),
                scaled=("num_heads", "split_size", "embed_dim"),
            ),
            "transformer.h.*.mlp": Branch({"c_fc": Columns()}, ("c_proj",)),
        },
        embedding="transformer.wte",
        head="lm_head",
        last_norm="transformer.ln_f",
        transposed=True,
        whole_stream=COUNTED_POSITIONS,
    )
