"""One decoder for the Llama, Qwen2, Qwen3 and Mistral families, with Hugging Face's parameter names."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from torch import Tensor, nn

from fourfold.memory import tokens_of_logits
from fourfold.models.attention import attention
from fourfold.models.batch import Microbatch
from fourfold.models.loss import cross_entropy_sum, sum_over_chunks
from fourfold.models.norm import RMSNorm
from fourfold.models.rope import Rotary, rotate
from fourfold.models.swiglu import swiglu
from fourfold.specs import ModelSpec


class Attention(nn.Module):
    """Grouped-query attention with rotary positions, and optional biases and norms on q and k.

    `attend` is the function that mixes positions. It is an attribute so that a plan that splits the sequence
    can put its own in place of `fourfold.models.attention.attention`.
    """

    def __init__(self, spec: ModelSpec):
        super().__init__()
        C, H, K, D = spec.hidden_size, spec.num_attention_heads, spec.num_key_value_heads, spec.head_dim
        self.q_proj = nn.Linear(C, H * D, bias=spec.attention_bias)
        self.k_proj = nn.Linear(C, K * D, bias=spec.attention_bias)
        self.v_proj = nn.Linear(C, K * D, bias=spec.attention_bias)
        self.o_proj = nn.Linear(H * D, C, bias=False)
        self.q_norm = RMSNorm(D, spec.rms_norm_eps) if spec.qk_norm else None
        self.k_norm = RMSNorm(D, spec.rms_norm_eps) if spec.qk_norm else None
        self.head_dim = D
        self.window = spec.sliding_window
        self.attend: Callable[..., Tensor] = attention

    def forward(
        self, x_BSC: Tensor, cos: Tensor, sin: Tensor, documents: tuple[tuple[int, ...], ...]
    ) -> Tensor:
        """Return the heads' outputs, projected back to (B, S, C)."""
        # The number of heads is read off the projections: a rank may hold only some of them.
        q_BSHD, k_BSKD, v_BSKD = (
            x.unflatten(-1, (x.shape[-1] // self.head_dim, self.head_dim))
            for x in (self.q_proj(x_BSC), self.k_proj(x_BSC), self.v_proj(x_BSC))
        )
        if self.q_norm is not None and self.k_norm is not None:
            q_BSHD, k_BSKD = self.q_norm(q_BSHD), self.k_norm(k_BSKD)
        q_BSHD, k_BSKD = rotate(q_BSHD, cos, sin), rotate(k_BSKD, cos, sin)
        out_BSHD = self.attend(
            q_BSHD, k_BSKD, v_BSKD, documents=documents, window=self.window, scale=self.head_dim**-0.5
        )
        return self.o_proj(out_BSHD.flatten(-2))


class MLP(nn.Module):
    """The gated feed-forward block, SwiGLU (Shazeer 2020)."""

    def __init__(self, spec: ModelSpec):
        super().__init__()
        self.gate_proj = nn.Linear(spec.hidden_size, spec.intermediate_size, bias=False)
        self.up_proj = nn.Linear(spec.hidden_size, spec.intermediate_size, bias=False)
        self.down_proj = nn.Linear(spec.intermediate_size, spec.hidden_size, bias=False)

    def forward(self, x_BSC: Tensor) -> Tensor:
        """Return (B, S, C)."""
        return self.down_proj(swiglu(self.gate_proj(x_BSC), self.up_proj(x_BSC)))


class DecoderLayer(nn.Module):
    """One block: attention and feed-forward, each normalised before and added to the residual stream."""

    def __init__(self, spec: ModelSpec):
        super().__init__()
        self.self_attn = Attention(spec)
        self.mlp = MLP(spec)
        self.input_layernorm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)

    def forward(
        self, x_BSC: Tensor, cos: Tensor, sin: Tensor, documents: tuple[tuple[int, ...], ...]
    ) -> Tensor:
        """Return the new residual stream, (B, S, C)."""
        x_BSC = x_BSC + self.self_attn(self.input_layernorm(x_BSC), cos, sin, documents)
        return x_BSC + self.mlp(self.post_attention_layernorm(x_BSC))


class Backbone(nn.Module):
    """Everything but the head; it holds the modules that Hugging Face names `model.*`."""

    def __init__(self, spec: ModelSpec):
        super().__init__()
        self.embed_tokens = nn.Embedding(spec.vocab_size, spec.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(spec) for _ in range(spec.num_hidden_layers))
        self.norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)


@dataclass
class Piece:
    """A block of the model: the embedding, one layer, or the head with the loss; or several, joined.

    `modules` hold all its parameters. `forward` maps the previous piece's output (None for the first) and the
    microbatch to the next piece's input, (B, S, C); the last one's output is the sum of the tokens' losses.
    `is_lookup` says that its backward does not read its weights. `joined` are the names of the blocks.
    """

    name: str
    modules: tuple[nn.Module, ...]
    forward: Callable[[Tensor | None, Microbatch], Tensor]
    is_lookup: bool = False
    joined: tuple[str, ...] = ()

    @property
    def blocks(self) -> tuple[str, ...]:
        """The names of the blocks in it."""
        return self.joined or (self.name,)


def join(pieces: Sequence[Piece]) -> Piece:
    """Return neighbouring pieces as one, which computes what they compute one after the other."""
    if len(pieces) == 1:
        return pieces[0]

    def forward(x: Tensor | None, batch: Microbatch) -> Tensor:
        for piece in pieces:
            x = piece.forward(x, batch)
        assert x is not None
        return x

    modules = tuple(module for piece in pieces for module in piece.modules)
    names = tuple(name for piece in pieces for name in piece.blocks)
    return Piece(f"{names[0]} to {names[-1]}", modules, forward, joined=names)


class Decoder(nn.Module):
    """A causal language model built from a `ModelSpec`, on the current default device and dtype.

    Parameters have Hugging Face's names and lie in nn.Linear, nn.Embedding and RMSNorm only. There are no
    buffers. A tied head is the very parameter of the embedding. `cross_entropy` gives the loss from logits
    (N, V) and labels (N,): an attribute, so that a plan that cuts the vocabulary over `vocabulary_ranks` can
    put its own in place.
    """

    def __init__(self, spec: ModelSpec):
        super().__init__()
        self.spec = spec
        self.model = Backbone(spec)
        self.lm_head = nn.Linear(spec.hidden_size, spec.vocab_size, bias=False)
        self.rotary = Rotary(spec)
        self.cross_entropy: Callable[[Tensor, Tensor], Tensor] = cross_entropy_sum
        self.vocabulary_ranks = 1
        if spec.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, batch: Microbatch) -> Tensor:
        """Return the logits, (B, S, V)."""
        return self._logits(self.residual(batch))

    def residual(self, batch: Microbatch) -> Tensor:
        """Return the residual stream after the last layer, (B, S, C)."""
        x_BSC = self._embed(None, batch)
        for layer in self.model.layers:
            x_BSC = self._layer(layer, x_BSC, batch)
        return x_BSC

    def loss_sum(self, batch: Microbatch) -> Tensor:
        """Return the sum of the losses over the tokens that have a label, in float32 or higher."""
        return self._head(self.residual(batch), batch)

    def last_logits(self, x_BSC: Tensor) -> Tensor:
        """Return the logits (V,) after the last token of the only row, from the last layer's output."""
        return self._logits(x_BSC[:1, -1:])[0, -1]

    def pieces(self) -> list[Piece]:
        """Return the blocks in order; one after the other, they compute `loss_sum`."""
        pieces = [Piece("embed", (self.model.embed_tokens,), self._embed, is_lookup=True)]
        for index, layer in enumerate(self.model.layers):
            pieces.append(Piece(f"layer.{index}", (layer,), partial(self._layer, layer)))
        pieces.append(Piece("head", (self.model.norm, self.lm_head), self._head))
        return pieces

    def _embed(self, _: Tensor | None, batch: Microbatch) -> Tensor:
        return self.model.embed_tokens(batch.input_ids_BS)

    def _layer(self, layer: nn.Module, x_BSC: Tensor | None, batch: Microbatch) -> Tensor:
        assert x_BSC is not None
        cos, sin = self.rotary(batch, x_BSC.dtype)
        return layer(x_BSC, cos, sin, batch.documents)

    def _head(self, x_BSC: Tensor | None, batch: Microbatch) -> Tensor:
        assert x_BSC is not None
        self._check_tied()
        return sum_over_chunks(
            lambda x_NC, labels_N: self.cross_entropy(self.lm_head(x_NC), labels_N),
            self.model.norm(x_BSC),
            batch.labels_BS,
            parameters=[self.lm_head.weight],
            tokens=tokens_of_logits(
                self.spec.vocab_size, itemsize=x_BSC.itemsize, ranks=self.vocabulary_ranks
            ),
        )

    def _logits(self, x_BSC: Tensor) -> Tensor:
        self._check_tied()
        return self.lm_head(self.model.norm(x_BSC))

    def _check_tied(self) -> None:
        tied = self.lm_head.weight is self.model.embed_tokens.weight
        if self.spec.tie_word_embeddings and not tied:
            raise RuntimeError(
                "the head is not tied any more (to_empty makes a new parameter for each place): "
                "build the model on its device, or lay it out with fourfold.parallelize"
            )
