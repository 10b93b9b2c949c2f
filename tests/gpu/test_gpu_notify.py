"""Counts ahead of a dispatch on GPUs: right on devices and host, early, and each notice its own."""

import dataclasses
import statistics
import time

import cases
import gpu_world
import jax
import jax.numpy as jnp
import numpy as np
import programs
import pytest
import test_notify_counts as on_cpu
from fault_programs import sleeper
from notify_programs import on_mesh, true_counts, true_sizes

import jax_ep
from jax_ep import _route
from jax_ep.notify import Notice

CASE = dataclasses.replace(on_cpu.CASE, name="gpu_notify", R=2)
# Several tiles of a routing block, all routing blocks, more experts than a block has warps.
LARGE = (
    cases.Case(name="prefill", T=4096, H=16, K=8, E=256, R=2),
    cases.Case(name="tiles", T=9001, H=16, K=6, E=64, R=2, chunk=512),
    cases.Case(name="one_expert", T=1500, H=16, K=1, E=64, R=2, routing="one_expert"),
    cases.Case(name="many_experts", T=300, H=16, K=8, E=20_000, R=2),
    cases.Case(name="faults", T=700, H=16, K=8, E=32, R=2, routing="out_of_range"),
)
SLOTS = 16  # notices that can be read for the first time
TIMEOUT_S = 1.0


@pytest.fixture
def small(num_gpus, monkeypatch):
    """The case of the CPU's tests on this number of GPUs, and a buffer for it."""
    case = dataclasses.replace(CASE, R=num_gpus)
    monkeypatch.setattr(on_cpu, "CASE", case)
    with gpu_world.make_buffer(case) as buffer:
        yield case, buffer


def route_all(buffer, routings):
    """Routes ``[count, R * T, K]`` in one program; returns sanitised, row_index and counts."""

    def shard(routings):
        def step(last, topk_idx):
            routing = jax_ep.route(buffer, topk_idx)
            return last, (routing.topk_idx, routing.row_index, routing.counts[None])

        return jax.lax.scan(step, 0, routings)[1]

    everywhere = jax.P(None, "expert")
    program = programs.sharded(buffer, shard, in_specs=everywhere, out_specs=everywhere)
    return [np.asarray(array) for array in jax.jit(program)(routings)]


def test_a_thousand_routings_in_one_program(small, rng):
    case, buffer = small
    routings = on_cpu.random_routings(rng, 1000)
    clean, row_index, counts = route_all(buffer, routings)
    for at, topk_idx in enumerate(routings):
        by_rank = topk_idx.reshape(case.R, case.T, case.K)
        expected = clean[at].reshape(by_rank.shape)
        on_each_rank = np.broadcast_to(true_counts(topk_idx, case), counts[at].shape)
        np.testing.assert_array_equal(counts[at], on_each_rank)
        np.testing.assert_array_equal(
            row_index[at].reshape(by_rank.shape), on_cpu.indices_by_hand(expected)
        )
    assert buffer.stats()["dispatch_epochs"] == len(routings)


@pytest.mark.parametrize("case", LARGE, ids=lambda case: case.name)
def test_large_routings_are_those_of_the_cpu(case, num_gpus, rng):
    case = gpu_world.on_ranks(case, num_gpus)
    routings = np.stack([cases.make_inputs(case, rng).topk_idx for _ in range(3)])
    found = {}
    for platform in ("cuda", "cpu"):
        with gpu_world.make_buffer(case, platform) as buffer:
            found[platform] = route_all(buffer, routings)
    for seen, expected in zip(found["cuda"], found["cpu"], strict=True):
        np.testing.assert_array_equal(seen, expected)
    for counts, topk_idx in zip(found["cuda"][2], routings, strict=True):
        np.testing.assert_array_equal(counts[-1], true_counts(topk_idx, case))


@pytest.mark.parametrize("case", LARGE, ids=lambda case: case.name)
def test_the_host_reads_large_routings(case, num_gpus, rng):
    case = gpu_world.on_ranks(case, num_gpus)
    with gpu_world.make_buffer(case) as buffer:
        for _ in range(3):
            topk_idx = cases.make_inputs(case, rng).topk_idx
            check_notice(jax_ep.notify_dispatch(buffer, topk_idx), topk_idx, case)


def check_notice(notice, topk_idx, case):
    sizes = true_sizes(np.asarray(topk_idx), case)
    np.testing.assert_array_equal(notice.recv_tokens_per_expert(), sizes)
    np.testing.assert_array_equal(notice.num_recv_tokens(), sizes.sum(axis=1))
    assert notice.capacity() == max(1, sizes.sum(axis=1).max())


def test_the_host_reads_a_thousand_routings(small, rng):
    case, buffer = small
    for topk_idx in on_cpu.random_routings(rng, 1000):
        check_notice(jax_ep.notify_dispatch(buffer, topk_idx), topk_idx, case)


@pytest.mark.parametrize("routing", ["nobody", "one_expert", "empty_ranks", "duplicates"])
def test_unusual_routings(routing, num_gpus, rng):
    case = dataclasses.replace(CASE, R=num_gpus, routing=routing)
    topk_idx = cases.make_inputs(case, rng).topk_idx
    with gpu_world.make_buffer(case) as buffer:
        notice = jax_ep.notify_dispatch(buffer, topk_idx)
        check_notice(notice, topk_idx, case)
        counts = np.asarray(notice.routing.counts).reshape(case.R, case.R, case.E)
        np.testing.assert_array_equal(counts[-1], true_counts(topk_idx, case))


@pytest.mark.skipif(not gpu_world.EMPTY_ARRAYS, reason="runs in test_gpu_no_tokens.py")
def test_no_tokens(num_gpus):
    case = dataclasses.replace(CASE, R=num_gpus, T=0)
    with gpu_world.make_buffer(case) as buffer:
        notice = jax_ep.notify_dispatch(buffer, np.zeros((0, case.K), np.int32))
        assert not notice.num_recv_tokens().any()
        assert notice.capacity(multiple_of=8) == 8


def test_notices_in_flight_do_not_mix(small, rng):
    """Read in any order, and again: each has its own numbers."""
    case, buffer = small
    routings = on_cpu.random_routings(rng, SLOTS)
    notices = [jax_ep.notify_dispatch(buffer, topk_idx) for topk_idx in routings]
    for at in [*rng.permutation(SLOTS), *rng.permutation(SLOTS)]:
        check_notice(notices[at], routings[at], case)


def test_unread_notices_cost_nothing_and_late_readers_are_told(small, rng):
    case, buffer = small
    routings = on_cpu.random_routings(rng, 4 * SLOTS)
    notices = [jax_ep.notify_dispatch(buffer, topk_idx) for topk_idx in routings]
    jax.block_until_ready([notice.routing for notice in notices])
    for at in range(3 * SLOTS, 4 * SLOTS):
        check_notice(notices[at], routings[at], case)
    with pytest.raises(jax_ep.EpUsageError, match=r"has taken its place"):
        notices[3 * SLOTS - 1].num_recv_tokens()


def test_every_replay_of_a_graph_has_its_ticket(num_gpus, rng):
    """One program that XLA captures: more operations in a row than it asks for, many times."""
    case = gpu_world.on_ranks(cases.Case(name="replay", T=64, H=16, K=4, E=16, R=2), num_gpus)
    steps, in_a_row = 200, 8
    with gpu_world.make_buffer(case) as buffer:
        group, module = _route.routing_group(buffer), buffer.native_module
        tickets = [module.next_ticket(buffer.id) for _ in range(steps * in_a_row)]
        first = rng.integers(case.E, size=case.R * case.T).astype(np.int32)
        spread = case.E // case.K

        def experts(first, number):
            return (first[:, None] + 3 * number + spread * np.arange(case.K)) % case.E

        def shard(first, tickets):
            def step(total, at_and_tickets):
                at, given = at_and_tickets
                for i in range(in_a_row):
                    idx = experts(first, at * in_a_row + i).astype(jnp.int32)
                    routing = _route.routing_of(buffer.backend, group, idx, given[i])
                    total = total + routing.counts.sum()
                return total, None

            start = jax.lax.pcast(jnp.zeros(1, jnp.int32), "expert", to="varying")
            xs = (jnp.arange(steps), tickets)
            return jax.lax.scan(step, start, xs)[0]

        specs = (jax.P("expert"), jax.P())
        program = jax.jit(programs.sharded(buffer, shard, in_specs=specs))
        by_step = np.array(tickets, np.uint32).reshape(steps, in_a_row)
        total = jax.block_until_ready(program(*on_mesh(buffer, first), by_step))
        np.testing.assert_array_equal(total, len(tickets) * case.R * case.T * case.K)
        routing = jax_ep.notify_dispatch(buffer, experts(first, 0).astype(np.int32)).routing
        for number in range(len(tickets) - SLOTS + 1, len(tickets)):  # the notice has taken one
            notice = Notice(buffer, routing, tickets[number], TIMEOUT_S)
            check_notice(notice, experts(first, number).astype(np.int32), case)
        stats = buffer.stats()
        executed = len(tickets) * case.R
        print(f"{executed} operations, {stats['launches']} handler calls, ", end="")
        print(f"{stats['captured_launches']} of them captured")
        assert stats["dispatch_epochs"] == len(tickets) + 1
        assert stats["captured_launches"] > 0, "XLA captured no graph"
        assert stats["launches"] < executed / 2, "XLA recorded its graphs anew for most steps"


def test_counts_are_read_while_later_work_runs(num_gpus, rng):
    """Matmuls queued behind the notice: the host has the counts long before they end."""
    case = gpu_world.on_ranks(cases.Case(name="early", T=4096, H=16, K=8, E=256, R=2), num_gpus)
    size, products = 12_288, 12

    def busy(counts, matrix):
        out = matrix + counts.sum().astype(matrix.dtype) * 0
        for _ in range(products):
            out = (out @ matrix) * 0.01
        return out

    with gpu_world.make_buffer(case) as buffer:
        program = jax.jit(programs.sharded(buffer, busy))
        (matrix,) = on_mesh(buffer, np.ones((case.R * size, size), jnp.bfloat16))
        waits, lasts = [], []
        for turn in range(6):
            topk_idx = cases.make_inputs(case, rng).topk_idx
            (on_devices,) = on_mesh(buffer, topk_idx)
            jax.block_until_ready((matrix, on_devices))
            began = time.perf_counter()
            notice = jax_ep.notify_dispatch(buffer, on_devices)
            launched = time.perf_counter()
            result = program(notice.routing.counts, matrix)
            queued = time.perf_counter()
            received = notice.num_recv_tokens()
            read = time.perf_counter()
            running = not result.is_ready()
            jax.block_until_ready(result)
            ended = time.perf_counter()
            check_notice(notice, topk_idx, case)
            np.testing.assert_array_equal(received, true_sizes(topk_idx, case).sum(axis=1))
            if turn == 0:
                continue  # it compiled
            assert running, "the matmuls had ended before the counts were read"
            waits.append(1e6 * (read - queued))
            lasts.append(1e6 * (ended - queued))
            print(
                f"notify_dispatch took {1e6 * (launched - began):.0f} us on the host, queueing "
                f"matmuls {1e6 * (queued - launched):.0f} us; the counts then came after "
                f"{waits[-1]:.0f} us, the matmuls ended after {lasts[-1]:.0f} us"
            )
    assert statistics.median(waits) < 0.1 * statistics.median(lasts)


def test_a_notice_whose_operation_never_comes(small, rng):
    case, buffer = small
    topk_idx = on_cpu.random_routings(rng, 1)[0]
    routing = jax_ep.notify_dispatch(buffer, topk_idx).routing
    ticket = buffer.native_module.next_ticket(buffer.id)
    with pytest.raises(jax_ep.EpTimeoutError) as raised:
        Notice(buffer, routing, ticket, 0.3).capacity()
    for part in ("num_recv_tokens of rank 0", "0.3 s", f"ticket {ticket}", "Raise timeout_s"):
        assert part in str(raised.value)
    assert (raised.value.op, raised.value.expected) == ("notify", ticket)
    check_notice(jax_ep.notify_dispatch(buffer, topk_idx), topk_idx, case)


def test_a_rank_that_comes_too_late(rng):
    """The reader is told at the operation's deadline which rank it waited for, and by whom."""
    late, seconds = 1, 2.5 * TIMEOUT_S
    through, armed = sleeper(late, seconds)
    topk_idx = cases.make_inputs(CASE, rng).topk_idx
    with gpu_world.make_buffer(CASE, timeout_s=TIMEOUT_S) as buffer:
        group, module = _route.routing_group(buffer), buffer.native_module

        def shard(topk_idx, ticket):
            return _route.routing_of(buffer.backend, group, through("expert", topk_idx), ticket)

        specs = (jax.P("expert"), jax.P())
        program = jax.jit(programs.sharded(buffer, shard, in_specs=specs, check_vma=False))
        (placed,) = on_mesh(buffer, topk_idx)
        routing = jax.block_until_ready(program(placed, np.uint32(module.next_ticket(buffer.id))))
        armed["on"] = True
        ticket = module.next_ticket(buffer.id)
        refused = "EpTimeoutError"
        try:  # the late rank's call is refused
            jax.block_until_ready(program(placed, np.uint32(ticket)))
        except jax.errors.JaxRuntimeError as error:
            refused = str(error)
        assert "EpTimeoutError" in refused
        armed["on"] = False
        began = time.monotonic()
        with pytest.raises(jax_ep.EpTimeoutError) as raised:
            Notice(buffer, routing, ticket, 4 * TIMEOUT_S).capacity()
        assert time.monotonic() - began < TIMEOUT_S
        error = raised.value
        for part in ("num_recv_tokens of rank 0", f"ticket {ticket}", f"for rank {late}"):
            assert part in str(error)
        assert (error.op, error.rank, error.peer) == ("notify", 1 - late, late)
        buffer.reset()
        check_notice(jax_ep.notify_dispatch(buffer, topk_idx), topk_idx, CASE)
        assert buffer.check() is None
