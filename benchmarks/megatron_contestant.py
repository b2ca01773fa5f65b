"""Megatron-core's tensor-parallel layers as a peer; no dependency: whoever has it sees its rows."""

import warnings

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.contestants import decoder, torch_attention, with_torch_layers_
from benchmarks.tensor_contestants import adamw
from benchmarks.workloads import MODEL, Workload
from fourfold.models import Microbatch
from fourfold.models.decoder import Attention, DecoderLayer
from fourfold.models.rope import rotate

with warnings.catch_warnings():  # of what it would like to be installed
    warnings.simplefilter("ignore")
    import megatron.core
    from megatron.core import ModelParallelConfig, parallel_state
    from megatron.core.tensor_parallel import (
        ColumnParallelLinear,
        RowParallelLinear,
        VocabParallelEmbedding,
        vocab_parallel_cross_entropy,
    )

VERSION = megatron.core.__version__


class MegatronTensorParallel:
    """The decoder of Megatron-core's layers as its GPT makes it: sequence first, queries, keys and values
    one matrix, gate and up one matrix, the vocabulary cut in embedding and loss, PyTorch's norms.

    Attention and rotary positions are our functions. Weights and AdamW are every contestant's.
    """

    def __init__(self, workload: Workload, rank: int, ranks: int, *, sequence_parallel: bool):
        # Its layers allocate "on the current CUDA device", which here is the CPU.
        torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment, return-value]
        warnings.filterwarnings("ignore", module="megatron")
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=ranks)
        config = ModelParallelConfig(
            tensor_model_parallel_size=ranks,
            sequence_parallel=sequence_parallel,
            use_cpu_initialization=True,
            perform_initialization=False,
        )
        self.workload, self.ranks = workload, ranks
        self.model = _Model(config, rank, ranks)
        self.optimizer = adamw(self.model)
        # With sequence parallelism each rank has the norms' gradients of its own tokens.
        self.summed = [p for p in self.model.parameters() if p.ndim == 1] if sequence_parallel else []

    def step(self, k: int) -> float:
        batch = self.workload.rows(k, self.workload.batch, range(self.workload.batch))
        loss = self.model(batch) / self.workload.tokens
        loss.backward()
        if self.summed:
            gradients = [p.grad for p in self.summed if p.grad is not None]
            flat = torch.cat(gradients)
            dist.all_reduce(flat)
            torch._foreach_copy_(gradients, list(flat.split([g.numel() for g in gradients])))
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss.detach()) * self.workload.tokens / self.ranks


class _Model(nn.Module):
    """Tokens to the sum of their losses."""

    def __init__(self, config: ModelParallelConfig, rank: int, ranks: int):
        super().__init__()
        plain = with_torch_layers_(decoder())
        self.embedding = VocabParallelEmbedding(
            MODEL.vocab_size,
            MODEL.hidden_size,
            init_method=nn.init.zeros_,
            reduce_scatter_embeddings=config.sequence_parallel,
            config=config,
        )
        _set_(self.embedding, [plain.model.embed_tokens.weight], 0, rank, ranks)
        self.layers = nn.ModuleList(_Layer(layer, config, rank, ranks) for layer in plain.model.layers)
        self.norm = plain.model.norm
        self.head = _columns([plain.lm_head], config, rank, ranks)
        self.rotary = plain.rotary
        self.is_cut = config.sequence_parallel

    def forward(self, batch: Microbatch) -> Tensor:
        x = self.embedding(batch.input_ids_BS)
        x_SBC = x if self.is_cut else x.transpose(0, 1).contiguous()
        cos, sin = self.rotary(batch, x_SBC.dtype)
        for layer in self.layers:
            x_SBC = layer(x_SBC, cos, sin, batch.documents)
        logits_SBV, _ = self.head(self.norm(x_SBC))
        losses_SB: Tensor = vocab_parallel_cross_entropy(logits_SBV, batch.labels_BS.t().contiguous())
        return losses_SB.sum()


class _Layer(nn.Module):
    """One block, (S, B, C) to (S, B, C), with S / ranks tokens where the stream is cut."""

    def __init__(self, layer: nn.Module, config: ModelParallelConfig, rank: int, ranks: int):
        super().__init__()
        assert isinstance(layer, DecoderLayer)
        at: Attention = layer.self_attn
        mlp = layer.mlp
        self.norm_1, self.norm_2 = layer.input_layernorm, layer.post_attention_layernorm
        self.qkv = _columns([at.q_proj, at.k_proj, at.v_proj], config, rank, ranks)
        self.out = _rows(at.o_proj, config, rank, ranks)
        self.gate_up = _columns([mlp.gate_proj, mlp.up_proj], config, rank, ranks)
        self.down = _rows(mlp.down_proj, config, rank, ranks)
        self.head_dim = at.head_dim
        self.sizes = [MODEL.num_attention_heads // ranks, *[MODEL.num_key_value_heads // ranks] * 2]

    def forward(
        self, x_SBC: Tensor, cos: Tensor, sin: Tensor, documents: tuple[tuple[int, ...], ...]
    ) -> Tensor:
        qkv, _ = self.qkv(self.norm_1(x_SBC))
        heads_BSHD = qkv.transpose(0, 1).unflatten(-1, (-1, self.head_dim))
        q_BSHD, k_BSKD, v_BSKD = heads_BSHD.split(self.sizes, 2)
        out_BSHD = torch_attention(rotate(q_BSHD, cos, sin), rotate(k_BSKD, cos, sin), v_BSKD)
        out, _ = self.out(out_BSHD.flatten(-2).transpose(0, 1).contiguous())
        x_SBC = x_SBC + out
        gate, up = self.gate_up(self.norm_2(x_SBC))[0].chunk(2, -1)
        return x_SBC + self.down(F.silu(gate) * up)[0]


def _columns(
    plain: list[nn.Linear], config: ModelParallelConfig, rank: int, ranks: int
) -> ColumnParallelLinear:
    """Some matrices as one, each cut by columns."""
    size = sum(linear.out_features for linear in plain)
    layer = ColumnParallelLinear(
        plain[0].in_features, size, config=config, init_method=nn.init.zeros_, bias=False
    )
    _set_(layer, [linear.weight for linear in plain], 0, rank, ranks)
    return layer


def _rows(plain: nn.Linear, config: ModelParallelConfig, rank: int, ranks: int) -> RowParallelLinear:
    layer = RowParallelLinear(
        plain.in_features,
        plain.out_features,
        config=config,
        init_method=nn.init.zeros_,
        bias=False,
        input_is_parallel=True,
        skip_bias_add=True,
    )
    _set_(layer, [plain.weight], 1, rank, ranks)
    return layer


@torch.no_grad()
def _set_(layer: nn.Module, weights: list[Tensor], dim: int, rank: int, ranks: int) -> None:
    """Give a layer its rank's parts of some whole weights."""
    assert isinstance(layer.weight, Tensor)
    layer.weight.copy_(torch.cat([weight.chunk(ranks, dim)[rank] for weight in weights], dim))
