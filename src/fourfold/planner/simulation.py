"""Run a program on paper, on devices that compute and send at once: when what happens, and why it waits.

One rank of each pipeline stage stands for all of them. A rank has a lane for what it computes, in the order
of the program, and lanes for what runs behind that: one for the collectives of the Batch axis, one for each
pair of stages and kind of message. What tp and cp send inside of an action stands on the action's way.

[Note: what slows what] Everything under way advances at a rate. On accelerators computation is slower by
`Devices.interference` while the same rank sends or receives. Where ranks share cores, what is sent takes
cores, too: of the share of a core that all things under way on all ranks need, each gets its part. So four
ranks on two cores compute at half the rate while all of them compute, and faster while some wait.

[Note: those that meet] The loss, the norm and what several stages hold are sums over the pipeline: they begin
when the last stage has come to them.
"""

import heapq
from collections import deque
from dataclasses import dataclass, field

from fourfold.planner.simulated import COMPUTING, Devices, Inside, Load, Phase, Simulation
from fourfold.program.actions import COMPUTE, RECEIVES, SENDS, TRANSFERS, Action, Kind
from fourfold.program.clock import Span, Timeline
from fourfold.program.program import Program

Key = tuple[int | None, Action]


class _Task:
    """An action under way."""

    __slots__ = ("action", "began", "index", "left", "phases", "rank", "rate", "since", "started", "version")

    def __init__(self, rank: int, action: Action, phases: tuple[Phase, ...]):
        self.rank, self.action, self.phases = rank, action, phases
        self.index, self.version = -1, 0
        self.left = self.rate = self.since = self.began = self.started = 0.0


@dataclass
class _Rank:
    """How far a rank has come."""

    position: int = 0
    waits_for: Key | None = None
    waits_since: float = 0.0
    sending: int = 0
    computing: _Task | None = None
    reduced: Key | None = None
    at_update: float = 0.0
    parts: dict[str, float] = field(default_factory=dict)


def simulate(program: Program, load: Load, devices: Devices) -> Simulation:
    """Run ``program``.

    Args:
        program: of a step, with transfers.
        load: what each action takes. RECV and FREE take nothing.
        devices: what they run on.

    Raises:
        ValueError: where ranks wait for each other for ever.
    """
    return _Simulator(program, load, devices).run()


class _Simulator:
    def __init__(self, program: Program, load: Load, devices: Devices):
        self._program, self._load, self._devices = program, load, devices
        self._now, self._shared, self._needed, self._number = 0.0, 1.0, 0.0, 0
        self._ranks = [_Rank() for _ in program.ranks]
        self._done: set[Key] = set()
        self._waiting: dict[Key, list[int]] = {}
        self._ready: deque[int] = deque()
        self._active: dict[_Task, None] = {}
        self._queues: dict[tuple[object, ...], deque[_Task]] = {}
        self._gates: dict[Action, list[_Task]] = {}
        self._at_update = 0
        self._events: list[tuple[float, int, _Task, int]] = []
        self._lane_of: dict[Key, str] = {}
        self._spans: list[Span] = []
        self._inside: list[Inside] = []

    def run(self) -> Simulation:
        self._ready.extend(range(len(self._ranks)))
        self._advance()
        while self._events:
            time, _, task, version = heapq.heappop(self._events)
            if version != task.version:
                continue
            self._now = time
            self._end_phase(task)
            self._advance()
        stuck = [
            str(actions[state.position])
            for state, actions in zip(self._ranks, self._program.ranks, strict=True)
            if state.position < len(actions)
        ]
        if stuck:
            raise ValueError(f"the ranks of this program wait for ever at {', '.join(stuck)}")
        for state in self._ranks:
            idle = max(0.0, self._now - sum(state.parts.values()))  # since it came to its end
            state.parts["bubble"] = state.parts.get("bubble", 0.0) + idle
        spans = tuple(sorted(self._spans, key=lambda span: (span.start_seconds, span.rank)))
        return Simulation(
            Timeline(spans, {}, len(self._ranks)),
            tuple(self._inside),
            tuple(state.parts for state in self._ranks),
        )

    # How ranks go through their actions.

    def _advance(self) -> None:
        """Let every rank that can go on issue its actions until it computes or waits."""
        while self._ready:
            rank = self._ready.popleft()
            state, actions = self._ranks[rank], self._program.ranks[rank]
            while state.computing is None and state.position < len(actions):
                action = actions[state.position]
                if (missing := self._missing(rank, action)) is not None:
                    state.waits_for, state.waits_since = missing, self._now
                    self._waiting.setdefault(missing, []).append(rank)
                    break
                state.position += 1
                self._issue(rank, action)

    def _missing(self, rank: int, action: Action) -> Key | None:
        """What the rank itself waits for before it issues an action."""
        kind = action.kind
        if kind in COMPUTE or kind is Kind.UPDATE:
            for need in self._program.needs(rank, action):
                if (key := _key(rank, need)) not in self._done:
                    return key
            return self._gate_of_update(rank) if kind is Kind.UPDATE else None
        if kind is Kind.REDUCE and self._program.placement.optimizer:
            before = self._ranks[rank].reduced
            return before if before is not None and before not in self._done else None
        if kind is Kind.ALL_REDUCE:
            for need in self._program.needs(rank, action):
                if (key := (rank, need)) not in self._done:
                    return key
        return None

    def _gate_of_update(self, rank: int) -> Key | None:
        """The norm is a sum over all ranks: see [Note: those that meet]."""
        gate: Key = (None, Action(Kind.UPDATE))
        if gate in self._done or len(self._ranks) == 1:
            return None
        self._at_update += 1
        self._ranks[rank].at_update = self._now
        if self._at_update < len(self._ranks):
            return gate
        self._finished(gate)
        return None

    def _issue(self, rank: int, action: Action) -> None:
        kind = action.kind
        if kind in RECEIVES or kind is Kind.FREE:
            self._spans.append(Span(rank, action, self._now, self._now))
            self._finished(_key(rank, action))
            return
        task = _Task(rank, action, self._load(rank, action))
        if kind in COMPUTE or kind is Kind.UPDATE:
            self._ranks[rank].computing = task
            self._begin(task)
            if kind is Kind.UPDATE and len(self._ranks) > 1:  # in a run, waiting for the norm is part of it
                task.started = self._ranks[rank].at_update
            return
        key = _key(rank, action)
        self._lane_of[key] = task.phases[0].lane if task.phases else "pp"
        if kind is Kind.REDUCE:
            self._ranks[rank].reduced = key
        if (together := self._met_by(action)) > 1:
            gate = self._gates.setdefault(action, [])
            gate.append(task)
            if len(gate) == together:
                for waiting in gate:
                    self._begin(waiting)
            return
        queue = self._queues.setdefault(self._queue(rank, action), deque())
        queue.append(task)
        if len(queue) == 1:
            self._begin(task)

    def _met_by(self, action: Action) -> int:
        """How many pipeline ranks are in one collective: see [Note: those that meet]."""
        if action.kind is Kind.LOSS:
            return len(self._ranks)
        whole = action.kind is Kind.REDUCE and not self._program.placement.optimizer
        if action.kind is Kind.ALL_REDUCE or whole:
            return len(self._program.holders(action.unit))
        return 1

    def _queue(self, rank: int, action: Action) -> tuple[object, ...]:
        if action.kind in SENDS:
            return rank, self._program.peer(action), action.kind
        return (rank,)

    # How what is under way advances.

    def _begin(self, task: _Task) -> None:
        task.started = self._now
        self._next_phase(task)

    def _next_phase(self, task: _Task) -> None:
        """Go on to the phase that takes time, or to the end."""
        while True:
            task.index += 1
            if task.index == len(task.phases):
                self._end(task)
                return
            phase = task.phases[task.index]
            if phase.seconds > 0:
                break
        task.began = task.since = self._now
        task.left, task.rate = phase.seconds, 0.0
        self._active[task] = None
        self._changed(task, phase, +1)

    def _end_phase(self, task: _Task) -> None:
        phase = task.phases[task.index]
        task.version += 1
        del self._active[task]
        self._changed(task, phase, -1)
        state = self._ranks[task.rank]
        if state.computing is task:
            part = _part(task.action, phase.lane)
            state.parts[part] = state.parts.get(part, 0.0) + self._now - task.began
            if phase.lane != COMPUTING:
                self._inside.append(Inside(task.rank, task.action, phase.lane, task.began, self._now))
        self._next_phase(task)

    def _end(self, task: _Task) -> None:
        self._spans.append(Span(task.rank, task.action, task.started, self._now))
        state = self._ranks[task.rank]
        if state.computing is task:
            state.computing = None
            self._ready.append(task.rank)
        elif self._met_by(task.action) == 1:
            queue = self._queues[self._queue(task.rank, task.action)]
            queue.popleft()
            if queue:
                self._begin(queue[0])
        self._finished(_key(task.rank, task.action))

    def _finished(self, key: Key) -> None:
        self._done.add(key)
        for rank in self._waiting.pop(key, ()):
            state = self._ranks[rank]
            waited = self._now - state.waits_since
            if waited > 0:
                lane = self._lane_of.get(key, "pp")
                part = "bubble" if "pp" in lane.split(",") else f"exposed {lane}"
                state.parts[part] = state.parts.get(part, 0.0) + waited
            state.waits_for = None
            self._ready.append(rank)

    def _changed(self, task: _Task, phase: Phase, by: int) -> None:
        """Set new rates, now that a phase has begun or ended: see [Note: what slows what]."""
        self._needed += by * phase.cores * self._devices.ranks
        state = self._ranks[task.rank]
        was_sending = state.sending > 0
        if phase.lane != COMPUTING:
            state.sending += by
        shared = min(1.0, self._devices.cores / self._needed) if self._needed > 1e-9 else 1.0
        if shared != self._shared:
            self._shared = shared
            for other in self._active:
                self._set_rate(other)
            return
        if by > 0:
            self._set_rate(task)
        if was_sending != (state.sending > 0) and state.computing in self._active:
            assert state.computing is not None
            self._set_rate(state.computing)

    def _set_rate(self, task: _Task) -> None:
        rate = self._shared
        sending = self._ranks[task.rank].sending > 0
        if sending and task.phases[task.index].lane == COMPUTING:
            rate /= 1.0 + self._devices.interference
        if rate == task.rate:
            return
        task.left -= (self._now - task.since) * task.rate
        task.since, task.rate = self._now, rate
        task.version += 1
        self._number += 1
        end = self._now + max(task.left, 0.0) / rate
        heapq.heappush(self._events, (end, self._number, task, task.version))


def _key(rank: int, action: Action) -> Key:
    """Compute and messages are one for all ranks, the rest is each rank's own."""
    return (None if action.kind in COMPUTE or action.kind in TRANSFERS else rank), action


def _part(action: Action, lane: str) -> str:
    """What a phase of an action counts as."""
    if lane != COMPUTING:
        return "bubble" if "pp" in lane.split(",") else f"exposed {lane}"
    if action.kind is Kind.UPDATE:
        return "optimizer"
    return "recompute" if action.kind is Kind.RECOMPUTE else "compute"
