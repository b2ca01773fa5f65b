"""The two standing workloads that every benchmark shares."""

from dataclasses import dataclass

import torch

from fourfold.models import Microbatch
from fourfold.specs import ModelSpec

MODEL = ModelSpec(
    vocab_size=4096,
    hidden_size=256,
    intermediate_size=688,
    num_hidden_layers=8,
    num_attention_heads=8,
    num_key_value_heads=4,
    max_position_embeddings=512,
)
"""7.9 million parameters, float32."""


@dataclass(frozen=True)
class Workload:
    """A dataset and a batch shape: how many sequences of which length make a step, over all ranks.

    ``rounds`` is how many steps of each contestant are measured unless told otherwise.
    """

    name: str
    sequence_length: int
    batch: int
    rounds: int

    @property
    def tokens(self) -> int:
        """Of a step, all valid."""
        return self.batch * self.sequence_length

    @property
    def vocab_size(self) -> int:
        """Token ids are below this."""
        return MODEL.vocab_size

    def valid_tokens(self, step: int, batch: int) -> int:
        """Every label counts."""
        return self.tokens

    def rows(self, step: int, batch: int, rows: range) -> Microbatch:
        """Rows of the global batch of ``step``: random tokens, one document a row."""
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(MODEL.vocab_size, (batch, self.sequence_length + 1), generator=generator)
        tokens = tokens[rows.start : rows.stop]
        return Microbatch(
            input_ids_BS=tokens[:, :-1].contiguous(),
            labels_BS=tokens[:, 1:].contiguous(),
            position_ids_BS=torch.arange(self.sequence_length).expand(len(rows), -1),
            documents=((self.sequence_length,),) * len(rows),
        )


WORKLOADS = {
    "dense": Workload("dense", sequence_length=512, batch=8, rounds=10),
    "chatty": Workload("chatty", sequence_length=128, batch=8, rounds=24),
}
"""``dense``: compute rules. ``chatty``: communication and overhead weigh four times as much."""
