"""Bytes of the blocks of a decoder on a rank: what they keep for their backward, and what they compute with.

[Note: what a tape holds] Of T tokens with C channels, H query and K key/value heads of D, and F channels in
the feed-forward, a layer keeps: its input and the stream between attention and feed-forward, and what enters
either branch, the norms' outputs (4 C in all); q, k and v as attention reads them, and its output; the two
projections of the feed-forward, 2 F, whose product is made again ([Note: made again]). In float32 or higher
it keeps a number a token for each norm, and one a token and head for attention. With norms on q and k, what
those read comes on top. The head keeps its input, the norm's output, and the logits of one chunk. Rotary
angles are shared by all layers, labels lie in the batch, and the weights are no part of a tape.

On tp, H, K and F are a rank's own. With sequence parallelism the stream between the branches is that of
T / tp tokens, and what enters a branch is gathered, of all T, unless that is done again. Ulysses keeps q, k
and v of all tokens and some heads, and its output both as attention made it and as it came back. Rows of
several documents, and a sliding window, have the output in parts and as a whole; a window has its masks.
"""

from dataclasses import dataclass

from fourfold.flops import pairs_in_blocks
from fourfold.memory import tokens_of_logits
from fourfold.specs.layout import Layout
from fourfold.specs.model import ModelSpec
from fourfold.specs.recompute_name import NO_RECOMPUTATION, RecomputeName

LOSS_ELEMENTS = {"cpu": 2**17, "cuda": 2**24}
"""Logits that the loss works on at once, by the type of the device; see `fourfold.models.loss`."""


@dataclass(frozen=True)
class BlockMemory:
    """Bytes of a block on one microbatch.

    Attributes:
        input: of its input.
        tape: of what its forward keeps, the input included, but not the logits.
        logits: of those that it keeps.
        kept: of what a forward that is to run again leaves beside its input.
        deferred: of what linear layers need for their weight gradients, once the rest of the tape is gone.
        deferred_logits: of the logits' gradients among it, which count as logits.
        forward: at most beside its input while it runs and keeps its tape, logits apart.
        evaluate: the same while it keeps nothing.
        loss: at most of logits and what the loss makes of them, while it runs.
        backward: at most beside its tape and its output's gradient while it goes back.
        halves: the same where weight gradients come later.
        product: of its largest weight gradient before that is added up, where it is in another dtype.
    """

    input: int
    tape: int
    logits: int
    kept: int
    deferred: int
    deferred_logits: int
    forward: int
    evaluate: int
    loss: int
    backward: int
    halves: int
    product: int


@dataclass(frozen=True)
class BlockSizes:
    """What the bytes of a block follow from.

    Attributes:
        spec: the model.
        rows: of a microbatch on a rank.
        sequence_length: tokens of a row, on all ranks of cp.
        itemsize: bytes of an element in the dtype that computation runs in.
        cp: over how many ranks the tokens are cut, of which ``ulysses`` exchange them for heads.
        tp: over how many ranks heads, feed-forward and vocabulary are cut.
        sequence_parallel: whether those divide the stream's tokens among them, too.
        regather: whether what enters a branch is gathered again for the backward, not kept.
        keeps: the names of the results of a layer that stay where its forward is to run again.
        device_type: ``cuda`` or ``cpu``: it decides how many logits the loss works on at once.
        packed: whether rows have several documents.
    """

    spec: ModelSpec
    rows: int
    sequence_length: int
    itemsize: int
    cp: int = 1
    ulysses: int = 1
    tp: int = 1
    sequence_parallel: bool = False
    regather: bool = False
    keeps: frozenset[str] = frozenset()
    device_type: str = "cuda"
    packed: bool = False

    @classmethod
    def of(
        cls,
        spec: ModelSpec,
        layout: Layout,
        *,
        rows: int,
        sequence_length: int,
        itemsize: int,
        recompute: RecomputeName = NO_RECOMPUTATION,
    ) -> "BlockSizes":
        """Those of a model on a layout."""
        return cls(
            spec,
            rows,
            sequence_length,
            itemsize,
            cp=layout.cp,
            ulysses=layout.ulysses(spec) if layout.cp > 1 else 1,
            tp=layout.tp,
            sequence_parallel=layout.sequence_parallel(sequence_length),
            regather=layout.options.get("tp") == "regather",
            keeps=recompute.keeps(tp=layout.tp),
        )

    @property
    def tokens(self) -> int:
        """Of a microbatch on a rank of cp: of the one that has most."""
        return self.rows * -(-self.sequence_length // self.cp)

    @property
    def high(self) -> int:
        """Bytes of an element in float32 or higher."""
        return max(self.itemsize, 4)

    @property
    def heads(self) -> int:
        """Query heads of a rank of tp."""
        return self.spec.num_attention_heads // self.tp

    @property
    def kv_heads(self) -> int:
        """Key/value heads of a rank of tp."""
        return max(1, self.spec.num_key_value_heads // self.tp)

    @property
    def inner(self) -> int:
        """Bytes of the channels of the feed-forward."""
        return self.tokens * self.itemsize * (self.spec.intermediate_size // self.tp)

    @property
    def entered(self) -> int:
        """Bytes of what enters a branch: the stream of all tokens."""
        return self.tokens * self.itemsize * self.spec.hidden_size

    @property
    def stream(self) -> int:
        """Bytes of the stream between branches."""
        return self.entered // (self.tp if self.sequence_parallel else 1)

    @property
    def gathered_twice(self) -> int:
        """Bytes of what enters a branch, where its tape does not keep them."""
        return self.entered if self.sequence_parallel and self.regather else 0

    @property
    def norm_numbers(self) -> int:
        """Bytes of what a norm keeps of its rows beside its input."""
        return self.tokens * self.high // (self.tp if self.sequence_parallel else 1)

    @property
    def queries(self) -> int:
        """Bytes of the queries, or of attention's output."""
        return self.tokens * self.itemsize * self.heads * self.spec.head_dim

    @property
    def keys(self) -> int:
        """Bytes of the keys and values."""
        return 2 * self.tokens * self.itemsize * self.kv_heads * self.spec.head_dim

    @property
    def attention(self) -> int:
        """Bytes of what attention keeps, its inputs and output included."""
        spec, tokens = self.spec, self.tokens
        window = spec.sliding_window or self.sequence_length
        kept = 2 * self.queries + self.keys * max(1, self.ulysses // self.kv_heads)
        kept += tokens * self.heads * self.high
        if self.ulysses > 1:
            kept += self.queries
        elif self.cp == 1:
            is_windowed = window < self.sequence_length
            kept += self.queries if is_windowed or self.packed else 0
            kept += self._masks(window) if is_windowed else 0
        if spec.qk_norm:
            kept += self.queries + self.keys // 2 + tokens * self.high * (self.heads + self.kv_heads)
        return kept

    @property
    def rotary(self) -> int:
        """Bytes of a microbatch's rotary angles: cosines, and sines of which one half is enough."""
        return self.tokens * self.spec.head_dim * 3 // 2 * self.itemsize

    @property
    def rotating(self) -> int:
        """Bytes while they are made: angles, cosines and sines, the cosines twice; then in their dtype."""
        made = self.tokens * self.spec.head_dim * 5 // 2 * self.high
        return made + self.tokens * self.spec.head_dim * (self.itemsize if self.itemsize < self.high else 0)

    def _masks(self, window: int) -> int:
        """Bytes of the masks of blocks of ``window`` queries."""
        return pairs_in_blocks(self.sequence_length, window) * self.itemsize

    def embed(self) -> BlockMemory:
        """The embedding: where its rows are cut, it keeps which ids are its own."""
        tape = self.tokens * (8 + 1) if self.tp > 1 else 0
        return BlockMemory(0, tape, 0, 0, 0, 0, tape + self.entered, self.entered, 0, 0, 0, 0)

    def layer(self) -> BlockMemory:
        """A layer. Most is held where the product of the feed-forward is made, or goes back."""
        is_cut = self.tp > 1
        entered = self.stream if self.gathered_twice else self.entered
        tape = 2 * self.stream + 2 * entered + 2 * self.norm_numbers + self.attention + 2 * self.inner
        # What a branch gives, and with sequence parallelism a copy of it in parts, until it is summed.
        leaving = (
            2 * self.entered if self.sequence_parallel else self.entered if is_cut else 0
        ) + self.stream
        evaluate = self.stream + self.entered + 3 * self.inner
        evaluate = max(evaluate, self.entered + 2 * (self.queries + self.keys))
        product = self._weight_product(self.spec.hidden_size * (self.spec.intermediate_size // self.tp))
        gathered = self.entered if self.sequence_parallel else 0
        gathered += self.gathered_twice
        attention, normed = self._attention_going_back()
        of_branch = 2 * self.inner + entered  # gone before attention goes back, if not deferred
        backward = gathered + max(
            3 * self.inner,
            2 * self.inner + product,
            gathered if self.rows > 1 else 0,
            attention - of_branch,
            normed - of_branch - self.queries,
        )
        deferred = 2 * self.entered + 2 * self.queries + self.keys + 3 * self.inner
        deferred += 2 * self.entered
        forward = tape + max(leaving, self.inner + leaving - self.stream) + self.gathered_twice
        return BlockMemory(
            input=self.stream,
            tape=tape,
            logits=0,
            kept=self._kept(),
            deferred=deferred,
            deferred_logits=0,
            forward=forward,
            evaluate=forward + self._kept_beside_tape() if self.keeps else evaluate + leaving,
            loss=0,
            backward=backward,
            halves=self.inner
            + max(gathered + max(3 * self.inner, attention, normed), 2 * gathered + 3 * self.entered),
            product=product,
        )

    def _attention_going_back(self) -> tuple[int, int]:
        """Bytes beside the tape when attention's kernel goes back, and when the norm of the queries does.

        The feed-forward is behind them: the stream between the branches and its norm's numbers are gone, and
        the stream's gradient is there. The kernel reads its output's gradient and makes those of q, k and v.
        Later, what it read is gone. On a CPU a norm goes back in float32 or higher.
        """
        kernel = 2 * self.queries + self.keys - self.norm_numbers
        if not self.spec.qk_norm:
            return kernel, 0
        numbers = self.tokens * self.high
        norm = self.queries - self.norm_numbers - self.keys // 2 - numbers * self.kv_heads
        if self.device_type == "cpu":
            norm += 2 * self.queries * self.high // self.itemsize
        return kernel, norm

    def _kept_beside_tape(self) -> int:
        """Bytes of the results by name that are not on the tape as well, while a forward keeps both."""
        rotated = {} if self.spec.qk_norm else {"q_proj": self.queries, "k_proj": self.keys // 2}
        sizes = rotated | {"o_proj": self.entered, "sum": self.stream}
        return sum(nbytes for name, nbytes in sizes.items() if name in self.keeps)

    def _kept(self) -> int:
        """Bytes of the results by name that stay; see `fourfold.specs.recompute_name`."""
        sizes = {
            "attention": self.queries + self.tokens * self.heads * self.high,
            "sum": 2 * self.stream,
            "gather": 2 * self.entered,
            "q_proj": self.queries,
            **dict.fromkeys(("k_proj", "v_proj"), self.keys // 2),
            **dict.fromkeys(("gate_proj", "up_proj"), self.inner),
            **dict.fromkeys(("o_proj", "down_proj"), self.entered),
        }
        return sum(sizes[name] for name in self.keeps)

    def head(self) -> BlockMemory:
        """The norm, the logits of one chunk of tokens after another, and their loss."""
        vocabulary = -(-self.spec.vocab_size // self.tp)
        chunk = min(
            self.tokens, tokens_of_logits(self.spec.vocab_size, itemsize=self.itemsize, ranks=self.tp)
        )
        logits = chunk * vocabulary * self.itemsize
        rows = min(chunk, max(1, LOSS_ELEMENTS[self.device_type] // vocabulary))
        # Log-probabilities, of which the last rows' are gone only then; the logits in float32 or higher.
        work = min(chunk, 2 * rows) + (rows if self.itemsize != self.high else 0)
        work = work * vocabulary * self.high + rows * 8  # and the labels' columns
        if self.tp > 1:  # whose columns the labels are in, and each rank's share
            logits += chunk * (self.high + 8 + 2)
        tape = self.stream + self.entered + self.norm_numbers
        gathered = self.entered if self.sequence_parallel else 0
        product = self._weight_product(vocabulary * self.spec.hidden_size)
        return BlockMemory(
            input=self.stream,
            tape=tape,
            logits=logits,
            kept=0,
            deferred=self.entered,
            deferred_logits=self.tokens * vocabulary * self.itemsize,
            forward=tape - self.stream,
            evaluate=self.entered,
            loss=logits + work,
            backward=self.entered + max(product, gathered),
            halves=self.entered + gathered,
            product=product,
        )

    def _weight_product(self, elements: int) -> int:
        """Bytes of a weight gradient before it is added up, where that is in another dtype."""
        return elements * self.itemsize if self.itemsize != self.high else 0
