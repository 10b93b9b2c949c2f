"""The counts that notify_dispatch and route find, on devices and on the host."""

import dataclasses

import cases
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import programs
import pytest
from notify_programs import true_counts, true_sizes

import jax_ep

CASE = cases.Case(name="counts", T=5, H=16, K=3, E=8, R=4)
NUM_ROUTINGS = 1000


def random_routings(rng, count):
    """int32 ``[count, R * T, K]``: holes, faulty entries and crowded experts among them."""
    shape = (count, CASE.R * CASE.T, CASE.K)
    busiest = rng.integers(1, CASE.E + 2, size=(count, 1, 1))
    idx = rng.integers(-2, CASE.E + 2, size=shape)
    return np.where(rng.random(shape) < 0.5, idx % busiest, idx).astype(np.int32)


def test_a_thousand_routings_in_one_program(backend, rng):
    routings = random_routings(rng, NUM_ROUTINGS)
    with programs.make_buffer(CASE, backend) as buffer:

        def route_all(routings):
            def step(last, topk_idx):
                routing = jax_ep.route(buffer, topk_idx)
                return last, (routing.topk_idx, routing.row_index, routing.counts[None])

            return jax.lax.scan(step, 0, routings)[1]

        everywhere = jax.sharding.PartitionSpec(None, "expert")
        program = programs.sharded(buffer, route_all, in_specs=everywhere, out_specs=everywhere)
        clean, row_index, counts = map(np.asarray, jax.jit(program)(routings))
    for at, topk_idx in enumerate(routings):
        by_rank = topk_idx.reshape(CASE.R, CASE.T, CASE.K)
        expected, _, _ = oracle.clean(by_rank, CASE.E)
        np.testing.assert_array_equal(clean[at].reshape(by_rank.shape), expected)
        on_each_rank = np.broadcast_to(true_counts(topk_idx, CASE), counts[at].shape)
        np.testing.assert_array_equal(counts[at], on_each_rank)
        np.testing.assert_array_equal(
            row_index[at].reshape(by_rank.shape), indices_by_hand(expected)
        )


def indices_by_hand(clean):
    """Each entry's place among those of its rank for its expert; -1 for none."""
    places = np.full(clean.shape, -1)
    next_place = {}
    for source, token, k in np.ndindex(clean.shape):
        expert = clean[source, token, k]
        if expert >= 0:
            places[source, token, k] = next_place.get((source, expert), 0)
            next_place[source, expert] = places[source, token, k] + 1
    return places


def test_the_host_reads_a_thousand_routings(rng):
    with programs.make_buffer(CASE, "native") as buffer:
        for topk_idx in random_routings(rng, NUM_ROUTINGS):
            notice = jax_ep.notify_dispatch(buffer, topk_idx)
            sizes = true_sizes(topk_idx, CASE)
            np.testing.assert_array_equal(notice.recv_tokens_per_expert(), sizes)
            np.testing.assert_array_equal(notice.num_recv_tokens(), sizes.sum(axis=1))


@pytest.mark.parametrize("routing", ["nobody", "one_expert", "empty_ranks", "duplicates"])
@pytest.mark.parametrize("num_ranks", [1, 4])
def test_unusual_routings(backend, rng, routing, num_ranks):
    case = dataclasses.replace(CASE, R=num_ranks, routing=routing)
    topk_idx = cases.make_inputs(case, rng).topk_idx
    with programs.make_buffer(case, backend) as buffer:
        notice = jax_ep.notify_dispatch(buffer, topk_idx)
        sizes = true_sizes(topk_idx, case)
        np.testing.assert_array_equal(notice.recv_tokens_per_expert(), sizes)
        np.testing.assert_array_equal(notice.num_recv_tokens(), sizes.sum(axis=1))
        assert notice.capacity() == max(1, sizes.sum(axis=1).max())
        counts = np.asarray(notice.routing.counts).reshape(case.R, case.R, case.E)
        np.testing.assert_array_equal(counts[-1], true_counts(topk_idx, case))


def test_no_tokens(backend):
    case = dataclasses.replace(CASE, T=0)
    with programs.make_buffer(case, backend) as buffer:
        notice = jax_ep.notify_dispatch(buffer, np.zeros((0, case.K), np.int32))
        assert not notice.num_recv_tokens().any()
        assert notice.capacity(multiple_of=8) == 8


MESHES = [
    ({"data": 2, "expert": 4}, "expert"),
    ({"expert": 4, "data": 2}, "expert"),
    ({"a": 2, "data": 2, "b": 2}, ("b", "a")),
]


@pytest.mark.parametrize(("sizes", "axes"), MESHES, ids=lambda value: str(value))
def test_arrays_follow_the_mesh(backend, rng, sizes, axes):
    """Several groups, ranks that are not neighbours: every device's row is its own."""
    mesh = programs.make_mesh(**sizes)
    config = programs.make_config(CASE)
    topk_idx = random_routings(rng, 2).reshape(8 * CASE.T, CASE.K)
    with jax_ep.Buffer(mesh, axes, config, backend=backend) as buffer:
        notice = jax_ep.notify_dispatch(buffer, topk_idx)

        def received(topk_idx):
            weights = jnp.ones(topk_idx.shape, jnp.float32)
            x = jnp.ones((CASE.T, CASE.H), jnp.float32)
            return jax_ep.dispatch(buffer, x, topk_idx, weights).valid_sizes[None]

        sizes_on_devices = jax.jit(programs.sharded(buffer, received))(topk_idx)
        got = notice.recv_tokens_per_expert()
        np.testing.assert_array_equal(got, sizes_on_devices)
        np.testing.assert_array_equal(notice.num_recv_tokens(), got.sum(axis=1))
        assert got.sum() > 0
        assert notice.capacity() == got.sum(axis=1).max()


def test_capacity_is_what_the_largest_rank_needs(backend, rng):
    with programs.make_buffer(CASE, backend) as buffer:
        for topk_idx in random_routings(rng, 5):
            notice = jax_ep.notify_dispatch(buffer, topk_idx)
            sizes = true_sizes(topk_idx, CASE)
            for multiple, alignment in [(1, 1), (8, 1), (1, 8), (16, 8), (6, 4)]:
                aligned = -(-sizes // alignment) * alignment
                bucket = np.lcm(multiple, alignment)
                expected = bucket * max(1, -(-aligned.sum(axis=1).max() // bucket))
                seen = notice.capacity(multiple_of=multiple, expert_alignment=alignment)
                assert seen == expected, (multiple, alignment)


def test_faults_are_recorded_by_the_routing_alone(rng):
    case = dataclasses.replace(CASE, routing="out_of_range")
    topk_idx = cases.make_inputs(case, rng).topk_idx
    _, out_of_range, duplicates = oracle.clean(topk_idx.reshape(case.R, -1, case.K), case.E)
    assert out_of_range + duplicates > 0
    with programs.make_buffer(case, "native") as buffer:
        notice = jax_ep.notify_dispatch(buffer, topk_idx)
        jax.block_until_ready(notice.routing)
        with pytest.raises(jax_ep.EpDataError) as raised:
            buffer.check()
        assert raised.value.count == out_of_range + duplicates

        def send(routing):
            ones = jnp.ones((case.T, case.H), jnp.float32)
            weights = jnp.ones((case.T, case.K), jnp.float32)
            return jax_ep.dispatch(buffer, ones, topk_weights=weights, routing=routing).tokens

        jax.block_until_ready(jax.jit(programs.sharded(buffer, send))(notice.routing))
        buffer.check()
