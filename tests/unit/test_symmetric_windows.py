"""How processes take windows of NVSHMEM's heap together, with a module that only writes down."""

import dataclasses
import itertools
import threading

import jax.numpy as jnp
import pytest

import jax_ep
from jax_ep import _bootstrap, _native, _windows

CONFIG = jax_ep.EpConfig(
    num_experts=8, num_experts_per_tok=2, hidden=16, max_tokens_per_rank=8, dtype=jnp.float32
)


class Heap:
    """In place of the compiled module of one process: what it was asked, in order."""

    def __init__(self, given_back=(), *, started=False, remote=False, fails=""):
        self.given_back, self.started, self.remote, self.fails = given_back, started, remote, fails
        self.asked = []

    def _note(self, name, **arguments):
        self.asked.append((name, arguments))
        if name == self.fails:
            raise RuntimeError(f"{name} went wrong")

    def next_buffer_id(self):
        return 7

    def is_started(self):
        return self.started

    def unique_id(self):
        self._note("unique_id")
        return b"unique"

    def join_world(self, **arguments):
        self._note("join_world", **arguments)

    def reserve_control(self, **arguments):
        self._note("reserve_control", **arguments)
        return self.remote

    def windows_given_back(self):
        return list(self.given_back)

    def require_room(self, **arguments):
        self._note("require_room", **arguments)

    def reserve_window(self, **arguments):
        self._note("reserve_window", **arguments)

    def create_buffer(self, **settings):
        self._note("create_buffer", **settings)
        return settings["id"]

    def close_buffer(self, buffer_id):
        self._note("close_buffer", id=buffer_id)

    def drop_reservation(self, buffer_id):
        self._note("drop_reservation", id=buffer_id)

    def names(self):
        return [name for name, _ in self.asked]

    def arguments(self, name):
        return dict(self.asked)[name]


class Members:
    """Of a process with one GPU; ``groups`` hold processes."""

    def __init__(self, peers, groups):
        self.peers, self._groups = peers, groups

    def processes(self):
        return self._groups

    def device_ordinals(self):
        return [[5 if p == self.peers.here else -1 for p in group] for group in self._groups]


def create_in_all(heaps, groups, config=CONFIG):
    """Every process in a thread. What each returns, or its error."""
    processes = tuple(sorted(itertools.chain.from_iterable(groups)))
    barrier, board = threading.Barrier(len(heaps), timeout=20), {}
    found = [None] * len(heaps)

    def exchange_of(here):
        def exchange(own):
            board[here] = own
            barrier.wait()
            received = [board[process] for process in processes]
            barrier.wait()
            return received

        return exchange

    def run(number, here):
        peers = _bootstrap.Peers(processes, here, exchange_of(here))
        try:
            found[number] = _windows.create(
                heaps[number], "nvshmem", config, Members(peers, groups), 3
            )
        except Exception as error:
            found[number] = error

    threads = [threading.Thread(target=run, args=item) for item in enumerate(processes)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return found


@pytest.mark.parametrize("mode", ["high_throughput", "low_latency"])
def test_all_take_the_same_window_and_open_it(mode):
    heaps = [Heap(remote=False), Heap(remote=True)]  # one of them needs send regions
    config = dataclasses.replace(CONFIG, mode=mode)
    assert create_in_all(heaps, [[2, 5]], config) == [7, 7]
    size = _native.window_layout(
        num_ranks=2,
        tokens_per_epoch=8,
        num_experts=8,
        num_experts_per_tok=2,
        row_bytes=64,
        staging=True,
        records=mode == "low_latency",
    )["total_bytes"]
    for pe, heap in enumerate(heaps):
        joined = heap.arguments("join_world")
        assert joined == {"ordinal": 5, "processes": [2, 5], "pe": pe, "unique_id": b"unique"}
        assert heap.arguments("reserve_control")["pes"] == [0, 1]
        assert heap.arguments("require_room") == {"id": 7, "bytes": size}
        assert heap.arguments("reserve_window") == {"id": 7, "number": -1, "bytes": size}
        settings = heap.arguments("create_buffer")
        assert settings["staging"] is True
        assert settings["low_latency"] is (mode == "low_latency")
        assert settings["device_ordinals"] == [[5, -1] if pe == 0 else [-1, 5]]
        assert "drop_reservation" not in heap.names()
    assert [heap.names().count("unique_id") for heap in heaps] == [1, 0]


def test_groups_are_of_the_same_world():
    heaps = [Heap() for _ in range(4)]
    assert create_in_all(heaps, [[0, 2], [1, 3]]) == [7] * 4
    assert [heap.arguments("reserve_control")["pes"] for heap in heaps] == [
        [0, 2],
        [1, 3],
        [0, 2],
        [1, 3],
    ]
    assert all(heap.arguments("create_buffer")["staging"] is False for heap in heaps)


def test_a_window_that_all_have_given_back_is_taken_again():
    heaps = [Heap(), Heap()]
    create_in_all(heaps, [[0, 1]])
    size = heaps[0].arguments("reserve_window")["bytes"]
    again = [Heap([(3, size), (4, size)], started=True), Heap([(4, size)], started=True)]
    assert create_in_all(again, [[0, 1]]) == [7, 7]
    assert [heap.arguments("reserve_window")["number"] for heap in again] == [4, 4]
    assert not {"unique_id", "require_room"} & set(again[0].names())


@pytest.mark.parametrize(
    "step",
    [
        "unique_id",
        "join_world",
        "reserve_control",
        "require_room",
        "reserve_window",
        "create_buffer",
    ],
)
def test_a_step_that_fails_in_one_process_fails_in_all_before_the_next(step):
    heaps = [Heap(fails=step), Heap()]
    first, second = create_in_all(heaps, [[0, 1]])
    assert isinstance(first, jax_ep.EpError)
    assert f"{step} went wrong" in str(first)
    assert f"process 0 failed: no buffer could be made: {step} went wrong" in str(second)
    order = ["join_world", "reserve_control", "require_room", "reserve_window", "create_buffer"]
    later = order[order.index(step) + 1 :] if step in order else order
    for heap in heaps:
        assert not set(later) & set(heap.names())
        assert heap.names()[-1] == "close_buffer"
        made = (
            heap is heaps[1] and step == "create_buffer"
        )  # and with it, the memory is the buffer's
        assert ("drop_reservation" in heap.names()) is not made


def test_nvshmem_that_runs_in_one_process_alone_is_refused_in_all():
    for found in create_in_all([Heap(started=True), Heap()], [[0, 1]]):
        assert isinstance(found, jax_ep.EpUsageError)
        assert "runs in some of the buffer's processes" in str(found)
