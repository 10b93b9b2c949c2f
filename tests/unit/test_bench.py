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

from ep_bench import chains, hlo, linked, measure, timing, workload  # noqa: E402
from ep_bench.checks import Truth  # noqa: E402
from ep_bench.systems import GPU_ONLY, OPS, SYSTEMS  # noqa: E402

SHAPES = {
    "few_experts": cases.Case(name="few_experts", T=16, H=16, K=2, E=8, R=4),
    "more_experts_than_ranks": cases.Case(name="more_experts", T=24, H=32, K=8, E=16, R=2),
    "eight_ranks": cases.Case(name="eight_ranks", T=9, H=16, K=8, E=32, R=8),
    "uneven": cases.Case(name="uneven", T=33, H=16, K=3, E=12, R=3, routing="skewed"),
    "one_rank": cases.Case(name="one_rank", T=37, H=16, K=3, E=12, R=1),
}
EVERY_RANK = PartitionSpec(workload.AXIS)


def mesh_of(num_ranks: int) -> Mesh:
    return Mesh(np.array(jax.devices()[:num_ranks]), (workload.AXIS,))


def make(shape: str, rng: np.random.Generator) -> Truth:
    load = workload.make(SHAPES[shape], rng)
    return Truth(load, mesh_of(load.sizes.R))


def systems_at(shape: str) -> list[str]:
    """argsort is for one rank; the test of ragged_all_to_all puts another collective under it.

    Of those whose rows are off, or that have no gradients, the chains are tested.
    """
    left_out = GPU_ONLY if SHAPES[shape].R == 1 else (*GPU_ONLY, "argsort")
    return [
        name
        for name, system in SYSTEMS.items()
        if name not in left_out and system.differentiable and not system.off
    ]


@pytest.fixture(params=sorted(SHAPES))
def shape(request) -> str:
    return request.param


@pytest.mark.table
@pytest.mark.parametrize(
    ("shape", "name"), [(shape, name) for shape in sorted(SHAPES) for name in systems_at(shape)]
)
def test_systems_agree_with_the_oracle(shape, name, rng):
    check_against_oracle(SYSTEMS[name], make(shape, rng), rng)


def check_against_oracle(system, truth: Truth, rng: np.random.Generator) -> None:
    """Rows and group sizes exactly, sums and gradients closely; the experts square their rows."""
    load = truth.load
    g = rng.normal(size=load.inputs.x.shape).astype(np.float32)
    with system.open(load, truth.mesh, None) as ops:

        def program(x, topk_idx, topk_weights, g):
            def layer(x, topk_weights):
                sent = ops.dispatch(x, topk_idx, topk_weights)
                rows = ops.rows(sent)
                return ops.combine(rows * rows, sent), (rows, sent.group_sizes)

            out, pull_back, (rows, group_sizes) = jax.vjp(layer, x, topk_weights, has_aux=True)
            return rows, group_sizes, out, *pull_back(g)

        sharded = jax.shard_map(program, mesh=truth.mesh, in_specs=EVERY_RANK, out_specs=EVERY_RANK)
        results = [np.asarray(result) for result in jax.jit(sharded)(*truth.args[:3], g)]

    by_rank = [result.reshape(load.sizes.R, -1, *result.shape[1:]) for result in results[:1]]
    expected = expectation(load, g)
    dispatched = expected.pop("dispatched")
    held = dispatched.holds_token
    np.testing.assert_array_equal(by_rank[0][held], dispatched.tokens[held])
    np.testing.assert_array_equal(results[1].reshape(load.sizes.R, -1), dispatched.group_sizes)
    for (name, truth_of_name), result in zip(expected.items(), results[2:], strict=True):
        np.testing.assert_allclose(
            result, truth_of_name.reshape(result.shape), rtol=2e-5, atol=2e-5, err_msg=name
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
    load = make(shape, rng).load
    truth = expectation(load, load.inputs.x)["dispatched"]
    for rank in range(load.sizes.R):
        rows, group_sizes = workload.expected_rows(load, rank)
        np.testing.assert_array_equal(rows, truth.tokens[rank][truth.holds_token[rank]])
        np.testing.assert_array_equal(group_sizes, truth.group_sizes[rank])


def settings_of(style: str, lengths=(1, 3)) -> measure.Settings:
    return measure.Settings(
        systems=SYSTEMS,
        dtype="float32",
        seed=0,
        style=style,
        lengths=lambda system, T: lengths,
        limits=timing.Limits(2, 2, 0.0),
    )


@pytest.mark.parametrize("op", ["combine", "fwd_bwd"])
def test_chains_of_the_reference_hold_their_calls_and_return_x(op, rng):
    """The other systems' chains are checked by every run of the command line, below too."""
    check_chains("reference", op, "loop", "few_experts", rng)


def check_chains(name: str, op: str, style: str, shape: str, rng):
    """Compiles and runs a system's chains; returns the workload's sizes, and chains by length."""
    truth, failures = make(shape, rng), []
    with SYSTEMS[name].open(truth.load, truth.mesh, None) as ops:
        todo = {op: {name: ops}}
        programs = measure.compile_all(todo, truth, settings_of(style), failures)
    assert not failures
    return truth.load.sizes, programs[op][name]


@pytest.mark.parametrize(
    ("name", "op"),
    [
        ("native", "roundtrip"),
        ("native", "fwd_bwd"),
        ("native", "combine"),
        ("low_latency_compact", "dispatch"),
        ("low_latency_compact", "combine"),
        ("low_latency_compact_halves", "dispatch"),
        ("low_latency_compact_halves", "combine"),
    ],
)
def test_long_chains_are_loops_of_a_graph(name, op, monkeypatch, rng):
    """compile_all() checks results, and that 12 operations more make 12 calls more."""
    monkeypatch.setattr(linked, "GRAPH", 3)
    truth, failures = make("few_experts", rng), []
    settings = settings_of("data", lengths=(7, 19))
    with SYSTEMS[name].open(truth.load, truth.mesh, None) as ops:
        programs = measure.compile_all({op: {name: ops}}, truth, settings, failures)
    assert not failures
    counts = {
        length: sum(hlo.count_calls(program.as_text()).values())
        for length, program in programs[op][name].items()
    }
    assert counts[7] == counts[19], "the loops' bodies are there once"


LOOP = """HloModule jit_program, is_scheduled=true

%fused (p: f32[8,64]) -> f32[8,64] {
  %p = f32[8,64]{1,0} parameter(0)
  ROOT %copy.1 = f32[8,64]{1,0} copy(%p)
}

%command_buffer (q: f32[8,64]) -> f32[8,64] {
  %q = f32[8,64]{1,0} parameter(0)
  ROOT %call.1 = f32[8,64]{1,0} custom-call(%q), custom_call_target="jax_ep_combine"
}

%region_0 (r: (s32[], f32[8,64])) -> (s32[], f32[8,64]) {
  %copy.2 = f32[8,64]{1,0} copy(%element)
  %fusion = f32[8,64]{1,0} fusion(%copy.2), kind=kLoop, calls=%fused
  %call.2 = f32[8,64]{1,0} call(%fusion), to_apply=%command_buffer
}

ENTRY %main (s: f32[8,64]) -> f32[8,64] {
  %while = (s32[], f32[8,64]{1,0}) while(%t), body=%region_0, backend_config={TURNS}
  ROOT %copy.3 = f32[8,64]{1,0} copy(%u)
}
"""


def test_what_loops_run_is_counted_as_often():
    """A copy in a loop's body and one behind it; the fusion's is no copy of its own."""
    text = hlo.write_out_loops(LOOP.replace("TURNS", '"known_trip_count":{"n":"4"}'))
    assert hlo.count_calls(text) == {"jax_ep_combine": 4}
    assert hlo.count_copies(text, 8 * 64) == 4 + 1
    unknown = LOOP.replace("TURNS", "")
    assert hlo.write_out_loops(unknown) == unknown


@pytest.mark.parametrize("name", ["native", "padded_all_to_all"])
def test_operations_that_xla_merges_are_noticed(name, rng):
    """Without the chain's loops, equal dispatches become one."""
    system = SYSTEMS[name]
    truth = make("few_experts", rng)
    texts = {}
    with system.open(truth.load, truth.mesh, None) as ops:
        for length in (1, 3):

            def program(*inputs, length=length):
                return sum(ops.dispatch(*inputs).tokens for _ in range(length))

            sharded = jax.shard_map(
                program, mesh=truth.mesh, in_specs=EVERY_RANK, out_specs=EVERY_RANK
            )
            texts[length] = jax.jit(sharded).lower(*truth.args[:3]).compile().as_text()
    with pytest.raises(AssertionError, match="from 1 to 3 operations"):
        hlo.check_calls("unchained", texts, system.calls_of(("dispatch",)))
    with pytest.raises(AssertionError, match="less than 1 for each"):
        hlo.check_row_collectives("unchained", texts, 1, truth.load.sizes.T * truth.load.sizes.H)


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
    truth = make("few_experts", rng)
    with pytest.raises(AssertionError, match="1 elements are wrong"):
        truth.check_sums("changed", truth.args[0].at[3, 5].add(0.1))
    with pytest.raises(AssertionError, match="1 elements are wrong"):
        truth.check_sums("spoiled", truth.args[0].at[3, 5].set(jnp.nan))
    with SYSTEMS["native"].open(truth.load, truth.mesh, None) as ops:
        others = dataclasses.replace(
            ops, dispatch=lambda x, idx, weights: ops.dispatch(x, (idx + 1) % 8, weights)
        )
        with pytest.raises(AssertionError, match="expected rows"):
            truth.check_dispatch("shifted", others)
        shuffled = dataclasses.replace(ops, rows=lambda sent: sent.tokens.at[0, 3].add(1))
        with pytest.raises(AssertionError, match=r"by rank: \{0: 1, 1: 1, 2: 1, 3: 1\}"):
            truth.check_dispatch("changed", shuffled)
    sources, group_sizes = workload.expected_sources(truth.load)
    rows = np.where(sources[..., None] >= 0, truth.load.inputs.x[sources], np.nan)
    rows = jnp.asarray(rows.reshape(-1, truth.load.sizes.H))
    truth.check_rows("numpy", rows, group_sizes.ravel())
    with pytest.raises(AssertionError, match="group sizes"):
        truth.check_rows("numpy", rows, group_sizes.ravel()[::-1] + 1)
    truth.check_rows("rounded", rows * 1.06, group_sizes.ravel(), 1 / 16)
    with pytest.raises(AssertionError, match="expected rows"):
        truth.check_rows("far", rows * 1.07, group_sizes.ravel(), 1 / 16)


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


def test_programs_are_warmed_up_before_they_are_timed(monkeypatch):
    """Quick ones as often as asked, slow ones twice; the first three runs take longer."""
    now, runs = 0.0, {}

    def program(name, cost):
        def run():
            nonlocal now
            runs[name] = runs.get(name, 0) + 1
            now += cost * (10 if runs[name] <= 3 else 1)

        return run

    monkeypatch.setattr(timing.time, "perf_counter", lambda: now)
    programs = {"quick": {length: program(length, length * 1e-6) for length in (1, 3)}}
    found = timing.slopes(programs, timing.Limits(2, 2, 0.0, warm_ups=5))
    assert runs == {1: 7, 3: 7}
    assert found["quick"].us == pytest.approx(1)
    runs.clear()
    programs = {"slow": {length: program(length, length * 1.0) for length in (1, 3)}}
    timing.slopes(programs, timing.Limits(2, 2, 0.0, warm_ups=5))
    assert runs == {1: 4, 3: 4}
    runs.clear()
    timing.slopes(programs, timing.fixed(2, warm_ups=5))
    assert runs == {1: 7, 3: 7}, "several processes must run slow ones as often as each other"


def test_processes_measure_together(tmp_path):
    command = [sys.executable, str(BENCHMARKS / "bench_ep.py"), "--platform", "cpu", "--ranks", "2"]
    command += ["--processes", "2", "--shape", "16,32,2,4", "--systems", "native"]
    command += ["--ops", "dispatch", "--quick", "--json", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "cpu-x2-p2.json").read_text())
    assert results["environment"]["processes"] == 2
    (record,) = results["records"]
    assert (record["op"], record["system"], record["R"]) == ("dispatch", "native", 2)
    assert record["repeats"] >= 2


def test_processes_share_the_devices_evenly():
    command = [sys.executable, str(BENCHMARKS / "bench_ep.py"), "--platform", "cpu", "--ranks", "2"]
    done = subprocess.run([*command, "--processes", "3"], capture_output=True, text=True)
    assert done.returncode == 1
    assert "--processes 3 cannot share 2 devices out evenly" in done.stderr


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
    assert sorted(pairs) == sorted((op, system) for op in OPS for system in systems)
    for record in records:
        shape = {axis: record[axis] for axis in "THKER"}
        assert shape == {"T": 16, "H": 32, "K": 2, "E": 4, "R": 2}
        assert record["dtype"] == "float32"
        assert all(math.isfinite(record[field]) for field in ("us", "cpu_us", "glue_us"))
