"""A Llama, Mistral, Qwen2 or Qwen3 model of Hugging Face on any layout, in a loop of one's own, and back.

    torchrun --nproc-per-node 4 examples/hugging_face_llama.py MODEL_FOLDER pp2,tp2 OUT

Its weights go into our decoder, every rank reading its own slices; OUT/model is then for transformers.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist

from fourfold import Layout, Mesh, Microbatch, ModelSpec, initialized, rank_batches
from fourfold.checkpoint import Saving, about_files, export_model, save
from fourfold.data import Tokenizer, load_tokenizer
from fourfold.optimizer import Update, optimizers
from fourfold.specs import OptimizerSection

LENGTH, BATCH, MICROBATCHES = 32, 8, 2


class OwnText:
    """One's own data: the batch of a step is the same on every layout, and a rank asks for its rows of it."""

    def __init__(self, tokenizer: Tokenizer, text: str) -> None:
        self.vocab_size = tokenizer.vocab_size
        self.ids = torch.from_numpy(tokenizer.encode(text).astype("int64"))

    def valid_tokens(self, step: int, batch: int) -> int:
        """How many labels count in the whole batch: here all of them."""
        return batch * LENGTH

    def rows(self, step: int, batch: int, rows: range) -> Microbatch:
        """Some rows of the batch of a step."""
        starts = torch.randint(
            len(self.ids) - LENGTH, (batch,), generator=torch.Generator().manual_seed(step)
        )[list(rows)]
        tokens_BS = self.ids[starts[:, None] + torch.arange(LENGTH + 1)]
        positions_BS = torch.arange(LENGTH).expand(len(rows), -1)
        return Microbatch(tokens_BS[:, :-1], tokens_BS[:, 1:], positions_BS, ((LENGTH,),) * len(rows))


def main(folder: str, layout: str, out: str, steps: int = 5) -> list[float]:
    """Train, export, and return the mean loss of every step. All ranks call it."""
    mesh = Mesh(Layout.parse(layout))
    spec, tokenizer = ModelSpec.from_config(folder), load_tokenizer(folder)
    data = OwnText(tokenizer, Path(__file__).read_text())
    model = initialized(
        spec,
        mesh,
        microbatches=MICROBATCHES,
        dtype="float32",
        seed=0,
        sequence_length=LENGTH,
        init=Path(folder),
    )
    update = Update(model, optimizers(model, OptimizerSection(learning_rate=1e-3)), clip_norm=1.0)
    losses = []
    for step in range(steps):
        update.learning_rate = 1e-3 * (1 - step / steps)
        batches = rank_batches(data, mesh, step=step, batch=BATCH, microbatches=MICROBATCHES)
        tokens = data.valid_tokens(step, BATCH)
        losses.append(float(model.step(batches, valid_tokens=tokens, update=update)) / tokens)
    saving = Saving(Path(out) / "checkpoints", run={}, files=about_files(spec, tokenizer))
    save(model, update, saving, step=steps)
    if mesh.rank == 0:
        export_model(Path(out), Path(out) / "model")
    return losses


if __name__ == "__main__":
    dist.init_process_group()
    found = main(*sys.argv[1:4])
    if dist.get_rank() == 0:
        print(f"loss {found[0]:.3f} in the first step, {found[-1]:.3f} in the last; {sys.argv[3]}/model")
