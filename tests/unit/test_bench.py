"""The benchmark's systems do the same work, and its counts and slopes are what they say."""

import dataclasses
import json
import math
import pathlib
import subprocess
import sys

import cases
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from jax.sharding import Mesh, PartitionSpec

BENCHMARKS = pathlib.Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.append(str(BENCHMARKS))

from ep_bench import chains, hlo, measure, timing, workload  # noqa: E402
from ep_bench.systems import SYSTEMS  # noqa: E402

SHAPES = {
    "few_experts": cases.Case(name="few_experts", T=16, H=16, K=2, E=8, R=4),
    "more_experts_than_ranks": cases.Case(name="more_experts", T=24, H=32, K=8, E=16, R=2),
    "eight_ranks": cases.Case(name="eight_ranks", T=9, H=16, K=8, E=32, R=8),
    "uneven": cases.Case(name="uneven", T=33, H=16, K=3, E=12, R=3, routing="skewed"),
}
EVERY_RANK = PartitionSpec(workload.AXIS)


def mesh_of(num_ranks: int) -> Mesh:
    return Mesh(np.array(jax.devices()[:num_ranks]), (workload.AXIS,))


def make(shape: str, rng: np.random.Generator):
    load = workload.make(SHAPES[shape], rng)
    mesh = mesh_of(load.sizes.R)
    return load, mesh, measure.device_args(load, mesh)


@pytest.fixture(params=sorted(SHAPES))
def shape(request) -> str:
    return request.param


@pytest.fixture(params=sorted(SYSTEMS))
def system(request):
    return SYSTEMS[request.param]


def test_systems_agree_with_the_oracle(system, shape, rng):
    """Rows and group sizes exactly, sums and gradients closely; the experts square their rows."""
    load, mesh, args = make(shape, rng)
    g = rng.normal(size=load.inputs.x.shape).astype(np.float32)
    with system.open(load, mesh) as ops:

        def program(x, topk_idx, topk_weights, g):
            def layer(x, topk_weights):
                sent = ops.dispatch(x, topk_idx, topk_weights)
                return ops.combine(sent.tokens * sent.tokens, sent), sent

            out, pull_back, sent = jax.vjp(layer, x, topk_weights, has_aux=True)
            return sent.tokens, sent.group_sizes, out, *pull_back(g)

        run = jax.jit(jax.shard_map(program, mesh=mesh, in_specs=EVERY_RANK, out_specs=EVERY_RANK))
        results = [np.asarray(result) for result in run(*args[:3], g)]

    by_rank = [result.reshape(load.sizes.R, -1, *result.shape[1:]) for result in results[:1]]
    expected = expectation(load, g)
    dispatched = expected.pop("dispatched")
    held = dispatched.holds_token
    np.testing.assert_array_equal(by_rank[0][held], dispatched.tokens[held])
    np.testing.assert_array_equal(results[1].reshape(load.sizes.R, -1), dispatched.group_sizes)
    for (name, truth), result in zip(expected.items(), results[2:], strict=True):
        np.testing.assert_allclose(
            result, truth.reshape(result.shape), rtol=2e-5, atol=2e-5, err_msg=name
        )


def expectation(load: workload.Workload, g: np.ndarray) -> dict:
    """What the oracle says of ``out = sum of weights * x**2`` and the cotangent g."""
    stacked = (load.inputs.x, load.inputs.topk_idx, load.inputs.topk_weights, g)
    x, topk_idx, topk_weights, g = (
        array.reshape(load.sizes.R, load.sizes.T, -1) for array in stacked
    )
    sent = oracle.dispatch(
        x, topk_idx, topk_weights, num_experts=load.sizes.E, capacity=load.sizes.capacity
    )
    assert not sent.num_dropped.any()
    y = sent.tokens**2
    d_y, d_weights = oracle.combine_gradients(sent, y, sent.weights, g)
    d_x, d_topk_weights = oracle.dispatch_gradients(sent, d_y * 2 * sent.tokens, d_weights)
    out = oracle.combine(sent, y, sent.weights)
    return {"dispatched": sent, "out": out, "d_x": d_x, "d_topk_weights": d_topk_weights}


def test_expected_rows_are_the_oracles(shape, rng):
    load, _, _ = make(shape, rng)
    truth = expectation(load, load.inputs.x)["dispatched"]
    for rank in range(load.sizes.R):
        rows, group_sizes = workload.expected_rows(load, rank)
        np.testing.assert_array_equal(rows, truth.tokens[rank][truth.holds_token[rank]])
        np.testing.assert_array_equal(group_sizes, truth.group_sizes[rank])


@pytest.mark.parametrize("op", ["combine", "fwd_bwd"])
def test_chains_of_the_reference_hold_their_calls_and_return_x(op, rng):
    """The other systems' chains are checked by every run of the command line, below too."""
    system = SYSTEMS["reference"]
    load, mesh, args = make("few_experts", rng)
    with system.open(load, mesh) as ops:
        programs = measure.compile_chains(op, system.name, ops, load, mesh, args, (1, 3))
        for program in programs.values():
            measure.check_result(op, program(*args), load)


@pytest.mark.parametrize("name", ["native", "padded_all_to_all"])
def test_operations_that_xla_merges_are_noticed(name, rng):
    """Without the chain's loops, equal dispatches become one."""
    system = SYSTEMS[name]
    load, mesh, args = make("few_experts", rng)
    texts = {}
    with system.open(load, mesh) as ops:
        for length in (1, 3):

            def program(*inputs, length=length):
                return sum(ops.dispatch(*inputs).tokens for _ in range(length))

            sharded = jax.shard_map(program, mesh=mesh, in_specs=EVERY_RANK, out_specs=EVERY_RANK)
            texts[length] = jax.jit(sharded).lower(*args[:3]).compile().as_text()
    with pytest.raises(AssertionError, match="from 1 to 3 operations"):
        hlo.check_calls("unchained", texts, system.calls_of(("dispatch",)))


def test_a_loop_that_copies_is_noticed():
    """An array that is needed after the loop cannot be changed in place."""

    def program(x, never, length):
        for _ in range(length):
            x = x + chains.opaque(x, never)
        return x

    args = (jnp.zeros((8, 64)), jnp.int32(0))
    texts = {
        length: jax.jit(program, static_argnums=2).lower(*args, length).compile().as_text()
        for length in (1, 3)
    }
    with pytest.raises(AssertionError, match="copies"):
        hlo.check_copies("doubled", texts, 8 * 64)


def test_wrong_results_are_noticed(rng):
    load, mesh, args = make("few_experts", rng)
    wrong = args[0].at[3, 5].add(0.1)
    with pytest.raises(AssertionError, match="wrong by"):
        measure.check_result("changed", wrong, load)
    with SYSTEMS["native"].open(load, mesh) as ops:
        others = dataclasses.replace(
            ops, dispatch=lambda x, idx, weights: ops.dispatch(x, (idx + 1) % 8, weights)
        )
        with pytest.raises(AssertionError, match="expected rows"):
            measure.check_rows("shifted", others, load, mesh, args)


def test_slopes_are_times_of_one_operation(monkeypatch):
    """A clock that only the programs advance: a fixed cost, and a cost for each operation."""
    now = 0.0

    def program(fixed, each, length):
        def run():
            nonlocal now
            now += fixed + each * length

        return run

    monkeypatch.setattr(timing.time, "perf_counter", lambda: now)
    monkeypatch.setattr(timing.time, "process_time", lambda: now / 2)
    programs = {
        name: {length: program(fixed, each, length) for length in (1, 5)}
        for name, fixed, each in (("slow", 2.0, 1e-3), ("fast", 7.0, 2e-6))
    }
    found = timing.slopes(programs, timing.Limits(min_repeats=3, max_repeats=9, seconds=100.0))
    assert found["slow"].us == pytest.approx(1000)
    assert found["slow"].us_low == pytest.approx(1000)
    assert found["fast"].us == pytest.approx(2)
    assert found["fast"].cpu_us == pytest.approx(1)
    # Both systems' chains of a repeat take 18 s, so the 100 s are over after six.
    assert found["slow"].repeats == found["fast"].repeats == 6


def test_command_line_writes_records(tmp_path):
    command = [sys.executable, str(BENCHMARKS / "bench_ep.py"), "--quick", "--ranks", "2"]
    command += ["--shape", "16,32,2,4", "--seed", "7", "--json", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    assert "native / best other" in done.stdout
    results = json.loads((tmp_path / "cpu-x2.json").read_text())
    environment, records = results["environment"], results["records"]
    for fact in ("device", "cpu", "jax", "python", "numpy", "processes", "commit", "date"):
        assert environment[fact]
    assert environment["seed"] == 7
    systems = ("native", "padded_all_to_all", "all_gather")
    pairs = [(record["op"], record["system"]) for record in records]
    assert sorted(pairs) == sorted((op, system) for op in measure.OPS for system in systems)
    for record in records:
        shape = {axis: record[axis] for axis in "THKER"}
        assert shape == {"T": 16, "H": 32, "K": 2, "E": 4, "R": 2}
        assert record["dtype"] == "float32"
        assert all(math.isfinite(record[field]) for field in ("us", "cpu_us", "glue_us"))
