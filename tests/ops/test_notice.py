"""Notices: in flight together, unread, read late or while devices are busy, and wrong arguments."""

import dataclasses
import functools
import threading

import cases
import jax
import jax.numpy as jnp
import numpy as np
import programs
import pytest
from notify_programs import on_mesh, right_sized_step, true_sizes

import jax_ep

CASE = cases.Case(name="notice", T=6, H=16, K=2, E=8, R=4)
SLOTS = 16  # notices that can be read for the first time
WAIT_S = 20.0


@pytest.fixture
def buffer(backend):
    with programs.make_buffer(CASE, backend) as made:
        yield made


@pytest.fixture
def native_buffer():
    with programs.make_buffer(CASE, "native") as made:
        yield made


def routings(rng, count):
    return [cases.make_inputs(CASE, rng).topk_idx for _ in range(count)]


def test_notices_in_flight_do_not_mix(buffer, rng):
    """Read in any order, and again: each has its own numbers."""
    all_idx = routings(rng, SLOTS)
    notices = [jax_ep.notify_dispatch(buffer, topk_idx) for topk_idx in all_idx]
    for at in [*rng.permutation(SLOTS), *rng.permutation(SLOTS)]:
        sizes = true_sizes(all_idx[at], CASE)
        np.testing.assert_array_equal(notices[at].recv_tokens_per_expert(), sizes)
        np.testing.assert_array_equal(notices[at].num_recv_tokens(), sizes.sum(axis=1))


def test_unread_notices_cost_nothing(native_buffer, rng):
    all_idx = routings(rng, 4)
    for topk_idx in all_idx * SLOTS:
        jax.block_until_ready(jax_ep.notify_dispatch(native_buffer, topk_idx).routing)
    sizes = jax_ep.notify_dispatch(native_buffer, all_idx[2]).recv_tokens_per_expert()
    np.testing.assert_array_equal(sizes, true_sizes(all_idx[2], CASE))


def test_a_late_reader_is_told(native_buffer, rng):
    all_idx = routings(rng, SLOTS + 2)
    notices = [jax_ep.notify_dispatch(native_buffer, topk_idx) for topk_idx in all_idx[:2]]
    notices[0].capacity()
    notices += [jax_ep.notify_dispatch(native_buffer, topk_idx) for topk_idx in all_idx[2:]]
    jax.block_until_ready([notice.routing for notice in notices])
    said = rf"ticket 2: .*ticket {SLOTS + 2} has taken its place.*notice\.routing\.counts"
    with pytest.raises(jax_ep.EpUsageError, match=said):
        notices[1].num_recv_tokens()
    for at in [0, *range(2, SLOTS + 2)]:  # what was read is kept; the last sixteen are there
        sizes = true_sizes(all_idx[at], CASE)
        np.testing.assert_array_equal(notices[at].recv_tokens_per_expert(), sizes)
    counts = np.asarray(notices[1].routing.counts).reshape(CASE.R, CASE.R, CASE.E)
    sizes = counts[0].sum(axis=0).reshape(CASE.R, -1)
    np.testing.assert_array_equal(sizes, true_sizes(all_idx[1], CASE))


def test_replays_of_one_program_have_their_own_tickets(native_buffer, rng):
    """The same compiled program, queued several times before anything is read."""
    all_idx = [on_mesh(native_buffer, topk_idx)[0] for topk_idx in routings(rng, 5)]
    jax_ep.notify_dispatch(native_buffer, all_idx[0]).capacity()
    notices = [jax_ep.notify_dispatch(native_buffer, topk_idx) for topk_idx in all_idx]
    for notice, topk_idx in zip(reversed(notices), reversed(all_idx), strict=True):
        sizes = true_sizes(np.asarray(topk_idx), CASE)
        np.testing.assert_array_equal(notice.recv_tokens_per_expert(), sizes)


def test_counts_are_read_while_later_work_runs(native_buffer, rng):
    """A program queued behind the notice hangs in host callbacks: the counts are there already."""
    topk_idx = cases.make_inputs(CASE, rng).topk_idx
    entered, released = threading.Event(), threading.Event()

    def hold(value):
        entered.set()
        assert released.wait(WAIT_S)
        return np.asarray(value)

    def behind(routing):
        counts = routing.counts
        shape = jax.ShapeDtypeStruct(counts.shape, counts.dtype)
        return jax.pure_callback(hold, shape, counts)

    program = jax.jit(programs.sharded(native_buffer, behind))
    warm = jax_ep.notify_dispatch(native_buffer, topk_idx)
    released.set()
    jax.block_until_ready(program(warm.routing))
    released.clear()
    entered.clear()
    try:
        notice = jax_ep.notify_dispatch(native_buffer, topk_idx)
        result = program(notice.routing)
        sizes = notice.recv_tokens_per_expert()
        assert entered.wait(WAIT_S)
        assert not result.is_ready()
        later = jax_ep.notify_dispatch(native_buffer, topk_idx)
    finally:
        released.set()
    np.testing.assert_array_equal(sizes, true_sizes(topk_idx, CASE))
    np.testing.assert_array_equal(later.recv_tokens_per_expert(), sizes)
    counts = np.asarray(result).reshape(CASE.R, CASE.R, CASE.E)
    np.testing.assert_array_equal(counts[0].sum(axis=0), sizes.reshape(-1))


def test_other_threads_run_while_one_waits(native_buffer, rng):
    """Polling holds no lock of Python's: a thread can provide what the notice waits for."""
    topk_idx = cases.make_inputs(CASE, rng).topk_idx
    released = threading.Event()

    def hold(value):
        assert released.wait(WAIT_S)
        return np.asarray(value)

    def slow(topk_idx):
        return jax.pure_callback(hold, jax.ShapeDtypeStruct(topk_idx.shape, jnp.int32), topk_idx)

    router = jax.jit(programs.sharded(native_buffer, slow))
    notice = jax_ep.notify_dispatch(native_buffer, router(topk_idx))
    threading.Timer(0.2, released.set).start()
    np.testing.assert_array_equal(notice.recv_tokens_per_expert(), true_sizes(topk_idx, CASE))


def test_buckets_bound_the_number_of_compiled_programs(buffer, rng):
    bucket, worst = 8, CASE.R * CASE.T * CASE.K
    step = right_sized_step(buffer)
    capacities = set()
    for _ in range(20):
        case = dataclasses.replace(
            CASE, routing=str(rng.choice(["uniform", "skewed", "one_expert"]))
        )
        inputs = cases.make_inputs(case, rng)
        notice = jax_ep.notify_dispatch(buffer, inputs.topk_idx)
        capacity = notice.capacity(multiple_of=bucket)
        capacities.add(capacity)
        out, dropped = step(inputs.x, notice.routing, inputs.topk_weights, capacity=capacity)
        valid = inputs.topk_idx >= 0
        expected = (valid * inputs.topk_weights).sum(axis=1, keepdims=True) * inputs.x
        np.testing.assert_allclose(out, expected, rtol=0, atol=1e-5)
        assert not np.asarray(dropped).any()
    assert step._cache_size() == len(capacities)
    assert 2 <= len(capacities) <= worst // bucket


def test_right_sized_rows_of_a_large_layer(rng):
    """Memory for rows is within a quarter and a bucket of the rows received, not eight times."""
    case = cases.Case(name="large", T=1024, H=1024, K=8, E=64, R=8)
    bucket = 256
    inputs = cases.make_inputs(case, rng)
    with programs.make_buffer(case, "native") as buffer:
        x, weights = on_mesh(buffer, inputs.x, inputs.topk_weights)
        notice = jax_ep.notify_dispatch(buffer, inputs.topk_idx)
        capacity = notice.capacity(multiple_of=bucket)
        received = notice.num_recv_tokens()
        np.testing.assert_array_equal(received, true_sizes(inputs.topk_idx, case).sum(axis=1))

        @functools.partial(jax.jit, static_argnames="capacity")
        def send(x, routing, topk_weights, capacity):
            def shard(x, routing, topk_weights):
                routed = jax_ep.dispatch(
                    buffer, x, topk_weights=topk_weights, routing=routing, capacity=capacity
                )
                return routed.tokens, routed.num_dropped[None]

            return programs.sharded(buffer, shard)(x, routing, topk_weights)

        def peak_bytes(capacity):
            """Of one device: what the program's results and temporaries take."""
            compiled = send.lower(x, notice.routing, weights, capacity=capacity).compile()
            memory = compiled.memory_analysis()
            return memory.output_size_in_bytes + memory.temp_size_in_bytes

        row_bytes = 4 * case.H
        right, worst = peak_bytes(capacity), peak_bytes(None)
        overhead = 2 * case.R * case.T * case.K * 4 + 8 * capacity  # recv_rows, weights
        most = (1.25 * received.min() + bucket) * row_bytes + overhead
        assert received.max() * row_bytes <= right <= most
        assert worst >= case.R * case.T * case.K * row_bytes > 6 * right
        tokens, dropped = send(x, notice.routing, weights, capacity=capacity)
        assert tokens.nbytes == case.R * capacity * row_bytes
        assert not np.asarray(dropped).any()
        sums = np.asarray(jnp.sum(tokens, axis=0, dtype=jnp.float32), np.float64)
    expected = (case.K * inputs.x.astype(np.float64)).sum(axis=0)
    np.testing.assert_allclose(sums, expected, rtol=0, atol=0.5)


def test_a_notice_dies_with_its_buffer(rng):
    topk_idx = cases.make_inputs(CASE, rng).topk_idx
    with programs.make_buffer(CASE, "native") as buffer:
        read, unread = (jax_ep.notify_dispatch(buffer, topk_idx) for _ in range(2))
        read.capacity()
    np.testing.assert_array_equal(read.recv_tokens_per_expert(), true_sizes(topk_idx, CASE))
    with pytest.raises(jax_ep.EpUsageError, match="closed"):
        unread.capacity()
    with pytest.raises(jax_ep.EpUsageError, match=r"notify_dispatch was given .* closed"):
        jax_ep.notify_dispatch(buffer, topk_idx)


ROWS = CASE.R * CASE.T
BAD_IDX = [
    (np.zeros((ROWS, CASE.K), np.int64), "topk_idx has dtype int64"),
    (np.zeros((ROWS, CASE.K + 1), np.int32), r"pass shape \(24, 2\)"),
    (np.zeros((ROWS + 1, CASE.K), np.int32), r"pass shape \(28, 2\), .*each of 4 devices"),
    (np.zeros((ROWS,), np.int32), r"topk_idx has shape \(24,\)"),
    (np.zeros((ROWS + CASE.R, CASE.K), np.int32), "topk_idx has 7 tokens on each rank"),
    ([[0, 1]], "is a list; pass an array"),
]


@pytest.mark.parametrize(("topk_idx", "said"), BAD_IDX, ids=range(len(BAD_IDX)))
def test_bad_topk_idx(buffer, topk_idx, said):
    with pytest.raises(jax_ep.EpUsageError, match=said):
        jax_ep.notify_dispatch(buffer, topk_idx)


def test_bad_arguments(buffer, rng):
    topk_idx = cases.make_inputs(CASE, rng).topk_idx
    with pytest.raises(jax_ep.EpUsageError, match=r"pass the jax_ep\.Buffer"):
        jax_ep.notify_dispatch("buffer", topk_idx)
    for timeout_s in (0, -1.0, float("inf"), float("nan"), True, "1"):
        with pytest.raises(jax_ep.EpUsageError, match="timeout_s="):
            jax_ep.notify_dispatch(buffer, topk_idx, timeout_s=timeout_s)
    with pytest.raises(jax_ep.EpUsageError, match=r"call jax_ep\.route there"):
        jax.jit(lambda idx: jax_ep.notify_dispatch(buffer, idx).routing)(topk_idx)
    with pytest.raises(jax_ep.EpUsageError, match=r"outside jax\.shard_map"):
        jax_ep.route(buffer, topk_idx)
    notice = jax_ep.notify_dispatch(buffer, topk_idx)
    for options in ({"multiple_of": 0}, {"multiple_of": 2.0}, {"expert_alignment": True}):
        with pytest.raises(jax_ep.EpUsageError, match=next(iter(options))):
            notice.capacity(**options)
    with pytest.raises(jax_ep.EpUsageError, match="does not fit into int32"):
        notice.capacity(multiple_of=2**31 - 1, expert_alignment=2)


def test_low_latency_buffers_have_no_routings(backend, rng):
    topk_idx = cases.make_inputs(CASE, rng).topk_idx
    with (
        programs.make_buffer(CASE, backend, mode="low_latency") as buffer,
        pytest.raises(jax_ep.EpUsageError, match="mode='high_throughput'"),
    ):
        jax_ep.notify_dispatch(buffer, topk_idx)


def test_bad_routings(buffer, backend, rng):
    inputs = cases.make_inputs(CASE, rng)
    good = jax_ep.notify_dispatch(buffer, inputs.topk_idx).routing
    with programs.make_buffer(CASE, backend) as other:
        foreign = jax_ep.notify_dispatch(other, inputs.topk_idx).routing
    shorter = dataclasses.replace(good, topk_idx=good.topk_idx[: CASE.R])
    wide = dataclasses.replace(good, counts=jnp.concatenate([good.counts, good.counts], axis=1))
    halves = dataclasses.replace(good, row_index=good.row_index.astype(jnp.int16))

    def send(given, **extra):
        def shard(x, routing, topk_weights):
            options = {"topk_weights": topk_weights, "routing": routing}
            return jax_ep.dispatch(buffer, x, **(options | extra)).tokens

        program = jax.jit(programs.sharded(buffer, shard))
        return jax.block_until_ready(program(inputs.x, given, inputs.topk_weights))

    for routing, extra, said in [
        (good, {"topk_idx": inputs.topk_idx}, "leave topk_idx out"),
        (good, {"routing": inputs.topk_idx}, "pass what route returned"),
        (good, {"topk_weights": None}, "topk_weights=None is a NoneType"),
        (good, {"routing": None}, "topk_idx=None is a NoneType"),
        (foreign, {}, f"not by buffer {buffer.id}; pass dispatch the buffer that routed"),
        (shorter, {}, r"routing.row_index has shape \(6, 2\)"),
        (wide, {}, r"routing.counts has shape \(4, 16\)"),
        (halves, {}, "routing.row_index has dtype int16"),
    ]:
        with pytest.raises(jax_ep.EpUsageError, match=said):
            send(routing, **extra)
    send(good)
