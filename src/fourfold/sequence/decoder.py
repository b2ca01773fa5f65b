"""Our decoder cut on the cp axis."""

from fourfold.mesh import Mesh
from fourfold.models import Decoder
from fourfold.models.decoder import Attention
from fourfold.sequence.attention import ContextAttention


def cut_sequences_(model: Decoder, mesh: Mesh) -> ContextAttention | None:
    """Let the model attend over the ranks of cp."""
    if mesh.cp.size == 1:
        return None
    ring, ulysses = mesh.split("cp", mesh.layout.ulysses(model.spec))
    context = ContextAttention(ring=ring, ulysses=ulysses)
    for module in model.modules():
        if isinstance(module, Attention):
            module.attend = context
    return context
