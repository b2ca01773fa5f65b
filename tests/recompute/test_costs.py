"""What a decoder's blocks keep for their backward, against what autograd saves."""

import pytest
import torch
from torch import Tensor

from fourfold.block_memory import BlockSizes
from fourfold.flops import forward_flops
from fourfold.models import Decoder, Microbatch
from fourfold.recompute.costs import decoder_blocks
from fourfold.specs import ModelSpec
from fourfold.weight_gradients import WeightGradients

ROWS, LENGTH = 2, 24


def saved_bytes(spec: ModelSpec, dtype: torch.dtype) -> list[int]:
    """Of each block: the storages that its forward saves, without weights, labels and rotary angles."""
    model = Decoder(spec).to(dtype)
    WeightGradients().attach_(model)
    ids = torch.randint(0, spec.vocab_size, (ROWS, LENGTH))
    batch = Microbatch(ids, ids, torch.arange(LENGTH).expand(ROWS, LENGTH), ((LENGTH,),) * ROWS)
    cos, sin = model.rotary(batch, dtype)
    shared = {t.untyped_storage().data_ptr() for t in (*model.parameters(), ids, cos, sin)}
    found = []
    x: Tensor | None = None
    for piece in model.pieces():
        storages: dict[int, int] = {}

        def keep(tensor: Tensor, storages: dict[int, int] = storages) -> Tensor:
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            y = piece.forward(None if x is None else x.detach().requires_grad_(), batch)
        found.append(sum(size for pointer, size in storages.items() if pointer not in shared))
        x = y.detach()
    return found


@pytest.mark.parametrize("name", ["tiny", "tiny-qwen2", "tiny-qwen3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_tapes_are_what_autograd_saves(name: str, dtype: torch.dtype) -> None:
    spec = ModelSpec.preset(name)
    blocks = decoder_blocks(BlockSizes(spec, ROWS, LENGTH, dtype.itemsize))
    assert [block.tape_bytes for block in blocks] == saved_bytes(spec, dtype)
    stream = ROWS * LENGTH * spec.hidden_size * dtype.itemsize
    assert [block.input_bytes for block in blocks] == [0, *[stream] * (spec.num_hidden_layers + 1)]
    assert [block.forward_seconds for block in blocks] == list(forward_flops(spec, LENGTH).segments)


def test_ranks_of_cp_and_tp_hold_less() -> None:
    # PLAN-08
    spec = ModelSpec.preset("tiny")
    whole = decoder_blocks(BlockSizes(spec, 2, 64, itemsize=4))
    for cp, tp in ((2, 1), (1, 2)):
        part = decoder_blocks(BlockSizes(spec, 2, 64, itemsize=4, cp=cp, tp=tp))
        assert part[1].input_bytes == whole[1].input_bytes // cp
        assert whole[1].tape_bytes // 2 <= part[1].tape_bytes < whole[1].tape_bytes
