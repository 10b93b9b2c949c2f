"""The protocol of one channel as a finite state machine, and a search through all interleavings.

The model has what ``ffi/cpu`` has and no more: every rank runs the steps of ``run()`` in
``dispatch.cc``, ``combine.cc`` or ``combine_grad.cc``, one after another, each step one access to
memory that another rank may see. Payloads are not atomic: writing one takes two steps, and so does
reading one, and anything may happen between them. Ranks start the next operation at will, so
nothing but credits and signals keeps them together.

``explore`` visits every reachable state. It checks the invariants of the design:

1. no slot is written before its last reading of epoch e-2 ended;
2. no rank waits for ever: every state but the last has a successor, and every step is progress;
3. nothing is read before the release that covers it.

``Rules`` holds the decisions that make the protocol right. Changing one gives a protocol that must
be caught.
"""

import dataclasses
from collections.abc import Callable, Iterator

SKIPPED, SENT, DROPPED = range(3)  # what an operation does with one (source, peer, token)


@dataclasses.dataclass(frozen=True)
class Rules:
    """The protocol's decisions; the defaults are those of the code.

    Attributes:
        num_buffers: buffers that epochs take turns in.
        credit_lag: a sender may write epoch e when the credit is at least e - credit_lag; None:
            without asking.
        flag_after_payload: the arrival flag is released after the payload is complete.
        flag_has_epoch: the flag is 2e + arrived, else only arrived.
        flags_for_all: a token that a rank does not need gets a flag as well.
        credit_after_reading: the credit is released when the epoch's readings have ended.
        credit_every_epoch: also for the last epoch of an operation.
        counts_awaited: rows are placed when the counts of this epoch have come.
    """

    num_buffers: int = 2
    credit_lag: int | None = 2
    flag_after_payload: bool = True
    flag_has_epoch: bool = True
    flags_for_all: bool = True
    credit_after_reading: bool = True
    credit_every_epoch: bool = True
    counts_awaited: bool = True


@dataclasses.dataclass(frozen=True)
class Scenario:
    """What is run: operations in order, as (kind, tokens per rank), on one channel.

    Attributes:
        num_ranks: R.
        slots: C, tokens that one epoch carries.
        operations: kinds are "dispatch", "combine" and "combine_grad".
        fate: fate(operation, source, peer, token) is SKIPPED, SENT or DROPPED (named, but without
            payload).
    """

    num_ranks: int
    slots: int
    operations: tuple[tuple[str, int], ...]
    fate: Callable[[int, int, int, int], int]


class ViolationError(Exception):
    """An invariant does not hold."""

    def __init__(self, invariant: int, what: str):
        super().__init__(f"invariant {invariant}: {what}")
        self.invariant = invariant


@dataclasses.dataclass(frozen=True)
class Explored:
    """Size of the state space, and the shortest way to a violation if there is one."""

    num_states: int
    num_finals: int
    violation: ViolationError | None = None
    trace: tuple[str, ...] = ()


class Memory:
    """Names of the cells. A state's memory is a tuple with one integer for each."""

    def __init__(self):
        self._index: dict[tuple, int] = {}

    def cell(self, *name) -> int:
        return self._index.setdefault(name, len(self._index))

    def zeros(self) -> tuple[int, ...]:
        return (0,) * len(self._index)


def _put(memory: tuple[int, ...], cell: int, value: int) -> tuple[int, ...]:
    return (*memory[:cell], value, *memory[cell + 1 :])


# Steps. fire(place, memory) yields every (place after, step finished, memory after); nothing: the
# rank must wait. `place` is where a rank is inside a step that has several parts.


@dataclasses.dataclass(frozen=True)
class Store:
    cell: int
    value: int

    def fire(self, place, memory) -> Iterator:
        yield place, True, _put(memory, self.cell, self.value)


@dataclasses.dataclass(frozen=True)
class WaitAtLeast:
    cell: int
    value: int

    def fire(self, place, memory) -> Iterator:
        if memory[self.cell] >= self.value:
            yield place, True, memory


@dataclasses.dataclass(frozen=True)
class WaitEqual:
    cell: int
    value: int

    def fire(self, place, memory) -> Iterator:
        if memory[self.cell] == self.value:
            yield place, True, memory


@dataclasses.dataclass(frozen=True)
class UseWord:
    """Reads a word without waiting for it."""

    cell: int
    value: int

    def fire(self, place, memory) -> Iterator:
        if memory[self.cell] != self.value:
            raise ViolationError(3, f"epoch {self.value} used a word of epoch {memory[self.cell]}")
        yield place, True, memory


@dataclasses.dataclass(frozen=True)
class BeginWrite:
    """From here to EndWrite the payload is torn. `owed` is a ghost: the epoch still to be read."""

    data: int
    owed: int
    epoch: int

    def fire(self, place, memory) -> Iterator:
        if memory[self.owed]:
            raise ViolationError(
                1, f"epoch {self.epoch} overwrites unread epoch {memory[self.owed]}"
            )
        yield place, True, _put(_put(memory, self.data, -self.epoch), self.owed, self.epoch)


@dataclasses.dataclass(frozen=True)
class EndWrite:
    data: int
    epoch: int

    def fire(self, place, memory) -> Iterator:
        yield place, True, _put(memory, self.data, self.epoch)


@dataclasses.dataclass(frozen=True)
class BeginRead:
    """Waits for either flag of the epoch, then starts to read the payload if it says "arrived"."""

    flag: int
    arrived: int
    absent: int
    due: bool  # whether a payload was sent in this epoch
    data: int
    epoch: int

    def fire(self, place, memory) -> Iterator:
        flag = memory[self.flag]
        if flag not in (self.arrived, self.absent):
            return
        if (flag == self.arrived) != self.due:
            raise ViolationError(
                3, f"epoch {self.epoch} took the flag of another epoch for its own"
            )
        if self.due and memory[self.data] != self.epoch:
            raise ViolationError(3, f"epoch {self.epoch} read payload {memory[self.data]}")
        yield place, True, memory


@dataclasses.dataclass(frozen=True)
class EndRead:
    data: int
    owed: int
    epoch: int

    def fire(self, place, memory) -> Iterator:
        if memory[self.data] != self.epoch:
            raise ViolationError(1, f"payload of epoch {self.epoch} changed while it was read")
        yield place, True, _put(memory, self.owed, 0)


@dataclasses.dataclass(frozen=True)
class Poll:
    """Reads from several sources, each in its order, whichever is ready; one at a time."""

    sources: tuple[tuple[BeginRead | EndRead, ...], ...]

    def fire(self, place, memory) -> Iterator:
        place = place or (0,) * len(self.sources)
        todo = [i for i, steps in enumerate(self.sources) if place[i] < len(steps)]
        reading = [i for i in todo if isinstance(self.sources[i][place[i]], EndRead)]
        for i in reading or todo:
            for _, _, after in self.sources[i][place[i]].fire((), memory):
                moved = _put(place, i, place[i] + 1)
                done = all(moved[j] == len(steps) for j, steps in enumerate(self.sources))
                yield moved, done, after


class Rank:
    """Writes down the steps of one rank, in the order in which its worker takes them."""

    def __init__(self, rules: Rules, scenario: Scenario, rank: int, memory: Memory):
        self.rules, self.scenario, self.rank, self.memory = rules, scenario, rank, memory
        self.steps: list = []
        first_epoch = 1
        for operation, (kind, num_tokens) in enumerate(scenario.operations):
            self._operation(operation, kind, num_tokens, first_epoch)
            first_epoch += max(1, -(-num_tokens // scenario.slots))

    @property
    def peers(self) -> list[int]:
        count = self.scenario.num_ranks
        return [(self.rank + 1 + step) % count for step in range(count - 1)]

    def _operation(self, operation: int, kind: str, num_tokens: int, first_epoch: int) -> None:
        slots = self.scenario.slots
        num_chunks = max(1, -(-num_tokens // slots))
        for chunk in range(num_chunks + 1):
            epoch = first_epoch + chunk
            if chunk < num_chunks:
                tokens = range(chunk * slots, min(num_tokens, (chunk + 1) * slots))
                self._send_epoch(operation, kind, epoch, tokens, with_counts=chunk == 0)
            if kind == "dispatch" and chunk == 0:
                self._await_tags(epoch)
                self._await_counts(epoch)
            elif chunk > 0:
                last = chunk == num_chunks
                tokens = range((chunk - 1) * slots, min(num_tokens, chunk * slots))
                if kind != "dispatch" or chunk > 1:
                    self._await_tags(epoch - 1)
                self._receive_epoch(operation, kind, epoch - 1, tokens, last)

    def _send_epoch(self, operation, kind, epoch, tokens, *, with_counts) -> None:
        lag = self.rules.credit_lag
        for peer in self.peers if lag is not None else ():
            self.steps.append(WaitAtLeast(self._cell("credit", self.rank, peer), epoch - lag))
        for peer in self.peers:
            self.steps.append(Store(self._word("tag", epoch, peer, self.rank), epoch))
        for peer in self.peers if kind == "dispatch" and with_counts else ():
            self.steps.append(Store(self._word("count", epoch, peer, self.rank), epoch))
        if kind == "combine":
            order = [(peer, token) for peer in self.peers for token in tokens]
        else:
            order = [(peer, token) for token in tokens for peer in self.peers]
        for peer, token in order:
            self._send_token(epoch, peer, self._fate(operation, self.rank, peer, token), token)

    def _send_token(self, epoch: int, peer: int, fate: int, token: int) -> None:
        flag, data, owed = self._slot(epoch, peer, self.rank, token)
        sent = fate == SENT
        release = Store(flag, self._flag_value(epoch, sent))
        write = [BeginWrite(data, owed, epoch), EndWrite(data, epoch)] if sent else []
        if not sent and not self.rules.flags_for_all:
            return
        self.steps += [*write, release] if self.rules.flag_after_payload else [release, *write]

    def _receive_epoch(self, operation, kind, epoch, tokens, last: bool) -> None:
        credits = [Store(self._cell("credit", peer, self.rank), epoch) for peer in self.peers]
        if last and not self.rules.credit_every_epoch:
            credits = []
        readings = self._readings(operation, kind, epoch, tokens)
        ordered = [readings, credits] if self.rules.credit_after_reading else [credits, readings]
        self.steps += [step for part in ordered for step in part]

    def _readings(self, operation, kind, epoch, tokens) -> list:
        def steps_of(source, token) -> tuple[list, list]:
            fate = self._fate(operation, source, self.rank, token)
            if fate == SKIPPED and kind != "dispatch":
                return [], []  # only the ranks that a token names are waited for
            flag, data, owed = self._slot(epoch, self.rank, source, token)
            flags = self._flag_value(epoch, True), self._flag_value(epoch, False)
            begin = BeginRead(flag, *flags, fate == SENT, data, epoch)
            return [begin], [EndRead(data, owed, epoch)] if fate == SENT else []

        if kind == "combine":  # a token's sum reads all its rows once the last has come
            steps = []
            for token in tokens:
                parts = [steps_of(source, token) for source in sorted(self.peers)]
                steps += [step for begin, _ in parts for step in begin]
                steps += [step for _, end in parts for step in end]
            return steps
        by_source = [
            tuple(step for token in tokens for part in steps_of(source, token) for step in part)
            for source in self.peers
        ]
        if kind == "dispatch":
            return [Poll(tuple(by_source))] if any(by_source) else []
        return [step for steps in by_source for step in steps]

    def _await_tags(self, epoch: int) -> None:
        for peer in self.peers:
            self.steps.append(WaitEqual(self._word("tag", epoch, self.rank, peer), epoch))

    def _await_counts(self, epoch: int) -> None:
        use = WaitEqual if self.rules.counts_awaited else UseWord
        for peer in self.peers:
            self.steps.append(use(self._word("count", epoch, self.rank, peer), epoch))

    def _fate(self, operation: int, source: int, peer: int, token: int) -> int:
        return self.scenario.fate(operation, source, peer, token)

    def _flag_value(self, epoch: int, arrived: bool) -> int:
        # Zeroed memory holds no valid flag, with or without the epoch.
        return 2 * (epoch if self.rules.flag_has_epoch else 1) + arrived

    def _cell(self, *name) -> int:
        return self.memory.cell(*name)

    def _word(self, name: str, epoch: int, owner: int, source: int) -> int:
        return self._cell(name, owner, epoch % self.rules.num_buffers, source)

    def _slot(self, epoch: int, owner: int, source: int, token: int) -> tuple[int, int, int]:
        place = (owner, epoch % self.rules.num_buffers, source, token % self.scenario.slots)
        return tuple(self._cell(name, *place) for name in ("flag", "data", "owed"))


def explore(rules: Rules, scenario: Scenario) -> Explored:
    """Visits every state that can be reached, shortest ways first; stops at a violation."""
    memory = Memory()
    programs = [Rank(rules, scenario, rank, memory).steps for rank in range(scenario.num_ranks)]
    start = (((0, ()),) * scenario.num_ranks, memory.zeros())
    came_from = {start: (None, "")}
    layer, num_finals = [start], 0
    while layer:
        following = []
        for state in layer:
            final = all(pc == len(steps) for (pc, _), steps in zip(state[0], programs, strict=True))
            num_finals += final
            try:
                moves = list(_moves(programs, state))
                if not moves and not final:
                    raise ViolationError(
                        2, "every rank waits or has ended: " + _where(programs, state)
                    )
            except ViolationError as violation:
                return Explored(len(came_from), num_finals, violation, _trace(came_from, state))
            for step, after in moves:
                if after not in came_from:
                    came_from[after] = (state, step)
                    following.append(after)
        layer = following
    return Explored(len(came_from), num_finals)


def _moves(programs, state) -> Iterator:
    """Every step forward from a state. Positions only grow, so a run ends where no step is left."""
    places, memory = state
    for rank, (pc, place) in enumerate(places):
        if pc == len(programs[rank]):
            continue
        step = programs[rank][pc]
        for moved, done, after in step.fire(place, memory):
            here = (pc + 1, ()) if done else (pc, moved)
            assert here > (pc, place), "a step made no progress"
            yield (rank, step), ((*places[:rank], here, *places[rank + 1 :]), after)


def _where(programs, state) -> str:
    return "; ".join(
        f"rank {rank} at {programs[rank][pc] if pc < len(programs[rank]) else 'its end'}"
        for rank, (pc, _) in enumerate(state[0])
    )


def _trace(came_from, state) -> tuple[str, ...]:
    steps = []
    while came_from[state][0] is not None:
        state, (rank, step) = came_from[state]
        steps.append(f"rank {rank}: {step}")
    return tuple(reversed(steps))
