"""Our decoder cut on the tp axis."""

from functools import partial

from fourfold.channel.plans import decoder_plan
from fourfold.channel.tensor_parallel import TensorParallel, tensor_parallel_
from fourfold.channel.vocabulary import vocabulary_parallel_cross_entropy_sum
from fourfold.mesh import Mesh
from fourfold.models import Decoder


def cut_channels_(model: Decoder, mesh: Mesh, sequence_length: int) -> TensorParallel | None:
    """Cut the model on the tp axis, and its loss with it."""
    if mesh.tp.size == 1:
        return None
    sequence_parallel = mesh.layout.sequence_parallel(sequence_length)
    parallel = tensor_parallel_(
        model,
        decoder_plan(model.spec),
        mesh.tp,
        sequence_parallel=sequence_parallel,
        regather=sequence_parallel and mesh.layout.options.get("tp") == "regather",
    )
    ((first, _),) = parallel.cuts["model.embed_tokens.weight"].runs[mesh.tp.rank]
    model.cross_entropy = partial(
        vocabulary_parallel_cross_entropy_sum, axis=mesh.tp, first=first, vocab_size=model.spec.vocab_size
    )
    model.vocabulary_ranks = mesh.tp.size
    return parallel
