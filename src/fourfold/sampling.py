"""Text generation from a trained decoder."""

import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from fourfold.errors import UserError
from fourfold.models.attention import attention
from fourfold.models.batch import IGNORE, Microbatch
from fourfold.models.decoder import Attention, Decoder
from fourfold.specs import ModelSpec


def generate(
    model: Decoder,
    prompt_ids: list[int],
    *,
    tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    seed: int = 0,
    stop: int | None = None,
    last_logits: Callable[[Microbatch], Tensor] | None = None,
    on_token: Callable[[int, int, float], None] = lambda *_: None,
) -> list[int]:
    """Return up to `tokens` new token ids that follow the prompt.

    Temperature 0 takes the likeliest token each time. `top_k` leaves that many candidates. Generation ends
    before the token `stop`. The same arguments give the same tokens. A new token costs the forward of that
    token alone. Where the text grows longer than the model's context, its latest half is read again; with
    rotary kinds that depend on the length of the text, all of it is read for every token. `last_logits`
    gives the logits (V,) after the last token of a row, in place of the model's own forward: so every rank of
    a pipeline generates the same text (`ParallelModel.last_logits`). `on_token` is given, after each new one,
    how many there are, how many there will be at most, and the seconds so far.

    Raises `UserError` for an empty prompt, ids outside the vocabulary, impossible settings, and logits that
    are not finite.
    """
    _check(model.spec, prompt_ids, tokens, temperature, top_k)
    generator = torch.Generator().manual_seed(seed)
    # A pipeline rank has only some of the weights.
    device = next(parameter.device for parameter in model.parameters() if not parameter.is_meta)
    logits_of = last_logits or torch.no_grad()(lambda row: model.last_logits(model.residual(row)))
    context, scaling = model.spec.max_position_embeddings, model.spec.rope_scaling
    depends_on_length = scaling is not None and scaling.rope_type in ("dynamic", "longrope")
    attentions = [module for module in model.modules() if isinstance(module, Attention)]
    before = [module.attend for module in attentions]
    was_training, began = model.training, time.perf_counter()
    text, start, kept = list(prompt_ids), 0, 0  # the caches hold text[start : start + kept]
    model.eval()
    try:
        while len(text) < len(prompt_ids) + tokens:
            if len(text) - start > context:
                start, kept = len(text) - (context + 1) // 2, 0
            if kept == 0 or depends_on_length:
                kept = 0
                for module in attentions:
                    module.attend = _KeyValueCache().attend
            logits_V = logits_of(_row(text[start + kept :], kept, device))
            if not logits_V.isfinite().all():
                raise UserError(_not_finite(model, len(text)))
            kept = len(text) - start
            token = _choose(logits_V, temperature, top_k, generator)
            if token == stop:
                break
            text.append(token)
            on_token(len(text) - len(prompt_ids), tokens, time.perf_counter() - began)
    finally:
        for module, attend in zip(attentions, before, strict=True):
            module.attend = attend
        model.train(was_training)
    return text[len(prompt_ids) :]


def _check(
    spec: ModelSpec, prompt_ids: list[int], tokens: int, temperature: float, top_k: int | None
) -> None:
    """Raise `UserError` for whatever cannot be generated from."""
    problems = []
    wrong = [token for token in prompt_ids if not 0 <= token < spec.vocab_size]
    if not prompt_ids:
        problems.append("the prompt is empty: give at least one token")
    if wrong:
        problems.append(
            f"token {wrong[0]} of the prompt is outside the vocabulary: use 0 to {spec.vocab_size - 1}"
        )
    if tokens < 0:
        problems.append(f"tokens={tokens}: use 0 or more")
    if not 0 <= temperature < float("inf"):
        problems.append(f"temperature={temperature}: use 0 (the likeliest token) or more")
    if top_k is not None and top_k < 1:
        problems.append(f"top_k={top_k}: use 1 or more, or leave it out for all tokens")
    if problems:
        raise UserError(*problems)


def _not_finite(model: Decoder, num_tokens: int) -> str:
    """Return the message for a model that does not know what comes next."""
    bad = [
        name
        for name, weights in model.named_parameters()
        if not (weights.is_meta or weights.isfinite().all())
    ]
    where = (
        f"weights are not finite, first in {bad[0]}"
        if bad
        else f"logits after {num_tokens} tokens are not finite"
    )
    return f"the model's {where}: its training diverged; train it again with a lower learning rate"


class _KeyValueCache:
    """Attention of one layer that keeps the keys and values of what it has read."""

    def __init__(self) -> None:
        self.kept: tuple[Tensor, Tensor] | None = None

    def attend(
        self,
        q_BSHD: Tensor,
        k_BSKD: Tensor,
        v_BSKD: Tensor,
        *,
        documents: tuple[tuple[int, ...], ...],
        window: int | None,
        scale: float,
    ) -> Tensor:
        """Attend within the text read first; after that, from one new token to all before it."""
        if self.kept is None:
            self.kept = k_BSKD, v_BSKD
            return attention(q_BSHD, k_BSKD, v_BSKD, documents=documents, window=window, scale=scale)
        self.kept = torch.cat((self.kept[0], k_BSKD), 1), torch.cat((self.kept[1], v_BSKD), 1)
        first = 0 if window is None else max(0, self.kept[0].shape[1] - window)
        k_BKSD, v_BKSD = (part[:, first:].transpose(1, 2) for part in self.kept)
        out_BHSD = F.scaled_dot_product_attention(
            q_BSHD.transpose(1, 2), k_BKSD, v_BKSD, scale=scale, enable_gqa=True
        )
        return out_BHSD.transpose(1, 2)


def _row(token_ids: list[int], position: int, device: torch.device) -> Microbatch:
    """Return a batch of one row, whose first token stands at `position`."""
    input_ids_BS = torch.tensor([token_ids], device=device)
    position_ids_BS = torch.arange(position, position + len(token_ids), device=device)[None]
    return Microbatch(
        input_ids_BS, torch.full_like(input_ids_BS, IGNORE), position_ids_BS, ((len(token_ids),),)
    )


def _choose(logits_V: Tensor, temperature: float, top_k: int | None, generator: torch.Generator) -> int:
    """Draw a token from the softmax of the logits over the temperature."""
    if temperature == 0:
        return int(logits_V.argmax())
    logits_V = logits_V.double().cpu() / temperature
    if top_k is not None and top_k < len(logits_V):
        values, token_ids = logits_V.topk(top_k)
    else:
        values, token_ids = logits_V, torch.arange(len(logits_V))
    return int(token_ids[torch.multinomial(values.softmax(0), 1, generator=generator)])
