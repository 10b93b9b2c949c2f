"""Wrong arguments raise while tracing, say what to do, and leave the buffer usable."""

import dataclasses

import cases
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import programs
import pytest
from jax.sharding import PartitionSpec

import jax_ep

CASE = cases.Case(name="small", T=6, H=16, K=2, E=8, R=4)
P = PartitionSpec


@pytest.fixture(scope="module", params=["reference", "native"])
def live(request):
    """A buffer, and a compiled layer on it that must go on giving right results."""
    with programs.make_buffer(CASE, request.param) as buffer:
        yield buffer, jax.jit(programs.sharded(buffer, programs.linear_moe(buffer, CASE)))


def still_right(layer, rng):
    """Runs the compiled layer on fresh inputs and compares it with the oracle."""
    inputs, matrices = cases.make_inputs(CASE, rng), programs.random_matrices(rng, CASE)
    out = layer(inputs.x, inputs.topk_idx, inputs.topk_weights, matrices)
    dense = oracle.dense_moe(
        inputs.x, inputs.topk_idx, inputs.topk_weights, matrices, np.zeros_like(inputs.x)
    )
    np.testing.assert_allclose(out, dense.out, rtol=0, atol=1e-5)


def rows(*shape, dtype=jnp.float32):
    """Zeros for all ranks, ``shape`` being one rank's."""
    return jnp.zeros((CASE.R * shape[0], *shape[1:]), dtype)


def arguments(**changes):
    """Dispatch's arguments for all ranks, some of them replaced."""
    good = {
        "x": rows(CASE.T, CASE.H),
        "topk_idx": rows(CASE.T, CASE.K, dtype=jnp.int32) - 1,
        "topk_weights": rows(CASE.T, CASE.K),
    }
    return (good | changes).values()


BAD_ARRAYS = [
    ("x", (7, 16), "float32", "x has 7 tokens", "max_tokens_per_rank=6; raise max_tokens_per_rank"),
    ("x", (6, 24), "float32", r"x has shape \(6, 24\)", r"pass \[T, 16\]"),
    ("x", (6, 4, 4), "float32", r"x has shape \(6, 4, 4\)", r"pass \[T, 16\]"),
    ("x", (6, 16), "bfloat16", "x has dtype bfloat16", r"astype\('float32'\)"),
    ("topk_idx", (6, 3), "int32", r"topk_idx has shape \(6, 3\)", r"pass shape \(6, 2\)"),
    ("topk_idx", (5, 2), "int32", r"topk_idx has shape \(5, 2\)", r"pass shape \(6, 2\)"),
    ("topk_idx", (6,), "int32", r"topk_idx has shape \(6,\)", r"pass shape \(6, 2\)"),
    ("topk_idx", (6, 2), "uint32", "topk_idx has dtype uint32", r"astype\('int32'\)"),
    ("topk_idx", (6, 2), "int16", "topk_idx has dtype int16", r"astype\('int32'\)"),
    ("topk_idx", (6, 2), "float32", "topk_idx has dtype float32", r"astype\('int32'\)"),
    ("topk_weights", (6, 3), "float32", r"topk_weights has shape \(6, 3\)", r"shape \(6, 2\)"),
    ("topk_weights", (6, 2), "bfloat16", "topk_weights has dtype bf", r"astype\('float32'\)"),
]

BAD_OPTIONS = [
    ({"capacity": 0}, "capacity=0", "pass a positive int"),
    ({"capacity": -4}, "capacity=-4", "pass a positive int"),
    ({"capacity": 8.0}, "capacity=8.0 is a float", "pass a positive int"),
    ({"capacity": True}, "capacity=True is a bool", "pass a positive int"),
    ({"capacity": "8"}, "capacity='8' is a str", "pass a positive int"),
    ({"capacity": 2**31}, "capacity=2147483648", "at most 2147483647"),
    ({"capacity": 10, "expert_alignment": 4}, "capacity=10 .* expert_alignment=4", "pass 12"),
    ({"expert_alignment": 0}, "expert_alignment=0", "pass a positive int"),
    ({"expert_alignment": True}, "expert_alignment=True is a bool", "pass a positive int"),
    ({"zero_tail": 1}, "zero_tail=1 is a int", "pass a bool"),
    ({"zero_tail": None}, "zero_tail=None", "pass a bool"),
    ({"expand": 0}, "expand=0 is a int", "pass a bool"),
    ({"expand": "no"}, "expand='no' is a str", "pass a bool"),
]


def dispatch_with(buffer, arrays, options=None):
    """Traces and runs one dispatch; returns its tokens."""

    def program(x, topk_idx, topk_weights):
        return jax_ep.dispatch(buffer, x, topk_idx, topk_weights, **(options or {})).tokens

    return jax.jit(programs.sharded(buffer, program))(*arrays)


@pytest.mark.parametrize(("name", "shape", "dtype", "named", "remedy"), BAD_ARRAYS)
def test_bad_arrays(live, rng, name, shape, dtype, named, remedy):
    buffer, layer = live
    with pytest.raises(jax_ep.EpUsageError, match=f"(?s){named}.*{remedy}"):
        dispatch_with(buffer, arguments(**{name: rows(*shape, dtype=dtype)}))
    still_right(layer, rng)


@pytest.mark.parametrize(
    ("options", "named", "remedy"), BAD_OPTIONS, ids=lambda value: str(value)[:30]
)
def test_bad_options(live, rng, options, named, remedy):
    buffer, layer = live
    with pytest.raises(jax_ep.EpUsageError, match=f"(?s){named}.*{remedy}"):
        dispatch_with(buffer, arguments(), options)
    still_right(layer, rng)


def test_integers_of_numpy_are_capacities(live):
    buffer, _ = live
    tokens = dispatch_with(buffer, arguments(), {"capacity": np.int32(8)})
    assert tokens.shape == (CASE.R * 8, CASE.H)


def test_wide_integers_of_numpy_are_refused(live):
    """NumPy's default int64 would be narrowed by JAX without a word."""
    buffer, _ = live

    def program(x, topk_weights):
        wide = np.zeros((CASE.T, CASE.K), np.int64)
        return jax_ep.dispatch(buffer, x, wide, topk_weights).tokens

    with pytest.raises(jax_ep.EpUsageError, match=r"topk_idx has dtype int64; .*astype\('int32'\)"):
        programs.sharded(buffer, program)(rows(6, 16), rows(6, 2))


def test_what_is_no_array(live):
    buffer, _ = live

    def program(x, topk_weights):
        return jax_ep.dispatch(buffer, x, [[0, 1]] * CASE.T, topk_weights).tokens

    with pytest.raises(jax_ep.EpUsageError, match=r"(?s)topk_idx=\[\[0, 1\].* is a list; pass an"):
        programs.sharded(buffer, program)(rows(6, 16), rows(6, 2))


@pytest.mark.parametrize("op", ["dispatch", "combine"])
def test_what_is_no_buffer(live, op):
    buffer, _ = live

    def program(x, topk_idx, topk_weights):
        if op == "dispatch":
            return jax_ep.dispatch("buffer", x, topk_idx, topk_weights).tokens
        return jax_ep.combine(None, x, jax_ep.dispatch(buffer, x, topk_idx, topk_weights))

    with pytest.raises(jax_ep.EpUsageError, match=f"{op}: buffer=.* is a .*pass the jax_ep.Buffer"):
        jax.jit(programs.sharded(buffer, program))(*arguments())


def combine_with(buffer, change):
    """Traces a combine whose arguments ``change(y, routed)`` has replaced."""

    def program(x, topk_idx, topk_weights):
        routed = jax_ep.dispatch(buffer, x, topk_idx, topk_weights, capacity=8)
        return jax_ep.combine(buffer, *change(routed.tokens, routed))

    return jax.jit(programs.sharded(buffer, program))(*arguments())


@pytest.mark.parametrize(
    ("change", "named", "remedy"),
    [
        (lambda y, r: (y[:7], r), "y has 7 rows", "capacity=8; pass one output row for each"),
        (lambda y, r: (y[:, :8], r), r"y has shape \(8, 8\)", r"pass \[capacity, 16\]"),
        (lambda y, r: (y[0], r), r"y has shape \(16,\)", r"pass \[capacity, 16\]"),
        (lambda y, r: (y.astype(jnp.float16), r), "y has dtype float16", r"astype\('float32'\)"),
        (lambda y, r: (y, r.handle), "routed=Handle", "pass the Routed that dispatch returned"),
        (
            lambda y, r: (y, dataclasses.replace(r, weights=r.weights[:3])),
            r"routed.weights has shape \(3,\)",
            r"pass shape \(8,\)",
        ),
        (
            lambda y, r: (y, dataclasses.replace(r, weights=r.weights.astype(jnp.bfloat16))),
            "routed.weights has dtype bfloat16",
            r"astype\('float32'\)",
        ),
    ],
    ids=["rows", "hidden", "rank", "dtype", "handle", "weights", "weights_dtype"],
)
def test_bad_combine(live, rng, change, named, remedy):
    buffer, layer = live
    with pytest.raises(jax_ep.EpUsageError, match=f"(?s){named}.*{remedy}"):
        combine_with(buffer, change)
    still_right(layer, rng)


def test_slots_are_no_expert_outputs(live, rng):
    """Combine's y has expert-major rows, also when tokens are slots."""
    buffer, layer = live

    def program(x, topk_idx, topk_weights):
        routed = jax_ep.dispatch(buffer, x, topk_idx, topk_weights, capacity=8, expand=False)
        return jax_ep.combine(buffer, routed.tokens, routed)

    message = "y has 24 rows, but routed.row_map has capacity=8; pass one output row for each row"
    with pytest.raises(jax_ep.EpUsageError, match=message):
        jax.jit(programs.sharded(buffer, program))(*arguments())
    still_right(layer, rng)


def test_routed_of_another_buffer(live, rng):
    buffer, layer = live

    def program(x, topk_idx, topk_weights):
        routed = jax_ep.dispatch(other, x, topk_idx, topk_weights)
        return jax_ep.combine(buffer, routed.tokens, routed)

    with programs.make_buffer(CASE, buffer.backend) as other:
        named = f"routed was made by buffer {other.id}, not by buffer {buffer.id}; pass combine the"
        with pytest.raises(jax_ep.EpUsageError, match=named):
            jax.jit(programs.sharded(buffer, program))(*arguments())
    still_right(layer, rng)


def test_outside_shard_map(live, rng):
    buffer, layer = live
    for call in (jax_ep.dispatch, jax.jit(jax_ep.dispatch, static_argnums=0)):
        with pytest.raises(jax_ep.EpUsageError, match=r"(?s)outside jax.shard_map.*'expert'.*call"):
            call(buffer, rows(6, 16), rows(6, 2, dtype=jnp.int32), rows(6, 2))
    with (
        jax.set_mesh(buffer.mesh),
        pytest.raises(jax_ep.EpUsageError, match="outside jax"),
    ):
        jax_ep.dispatch(buffer, rows(6, 16), rows(6, 2, dtype=jnp.int32), rows(6, 2))
    still_right(layer, rng)


@pytest.mark.parametrize(
    "sizes", [{"expert": 2}, {"expert": 8}, {"data": 4}, {"data": 2, "expert": 4}], ids=str
)
def test_mesh_of_another_shape(live, rng, sizes):
    buffer, layer = live
    mesh = programs.make_mesh(**sizes)

    def program(x, topk_idx, topk_weights):
        return jax_ep.dispatch(buffer, x, topk_idx, topk_weights).tokens

    wrong = jax.shard_map(
        program, mesh=mesh, in_specs=P(mesh.axis_names), out_specs=P(mesh.axis_names)
    )
    message = r"(?s)dispatch runs over a mesh of axes .*\{'expert': 4\}; pass mesh=buffer.mesh"
    with pytest.raises(jax_ep.EpUsageError, match=message):
        wrong(*arguments())
    still_right(layer, rng)


@pytest.mark.parametrize("manual", ["data", "expert"])
def test_axes_left_to_the_partitioner(backend, manual):
    mesh = programs.make_mesh(data=2, expert=4)
    config = programs.make_config(CASE)
    automatic = "expert" if manual == "data" else "data"

    def program(x, topk_idx, topk_weights):
        return jax_ep.dispatch(buffer, x, topk_idx, topk_weights).tokens

    with jax_ep.Buffer(mesh, "expert", config, backend=backend) as buffer:
        partly = jax.shard_map(
            program, mesh=mesh, in_specs=P(manual), out_specs=P(manual), axis_names={manual}
        )
        message = rf"(?s)to be manual, but \['{automatic}'\] are not.*list every axis"
        with pytest.raises(jax_ep.EpUsageError, match=message):
            jax.jit(partly)(*arguments())


def test_data_faults_are_counted_and_located(rng):
    with programs.make_buffer(CASE, "native") as buffer:
        layer = jax.jit(programs.sharded(buffer, programs.linear_moe(buffer, CASE)))
        inputs, matrices = cases.make_inputs(CASE, rng), programs.random_matrices(rng, CASE)
        topk_idx = inputs.topk_idx.copy()
        rank, token = int(rng.integers(CASE.R)), int(rng.integers(CASE.T))
        topk_idx[rank * CASE.T + token, 1] = 99
        jax.block_until_ready(layer(inputs.x, topk_idx, inputs.topk_weights, matrices))
        message = (
            rf"1 entries.*topk_idx\[{token}, 1\]=99 on rank {rank} of group 0, is outside \[-1, 8\)"
        )
        with pytest.raises(jax_ep.EpDataError, match=message) as caught:
            buffer.check()
        error = caught.value
        seen = (error.count, error.rank, error.token, error.k, error.value, error.kind)
        assert seen == (1, rank, token, 1, 99, "out_of_range")
        assert buffer.check() is None

        topk_idx[rank * CASE.T + token] = 5
        jax.block_until_ready(layer(inputs.x, topk_idx, inputs.topk_weights, matrices))
        with pytest.raises(jax_ep.EpDataError, match="already has") as caught:
            buffer.check()
        error = caught.value
        seen = (error.count, error.rank, error.token, error.k, error.value, error.kind)
        assert seen == (1, rank, token, 1, 5, "duplicate")
        still_right(layer, rng)


@pytest.mark.parametrize("name", ["out_of_range", "duplicates"])
def test_data_faults_of_a_whole_run_are_all_counted(rng, name):
    case = cases.BY_NAME[name]
    inputs = cases.make_inputs(case, rng)
    stacked = inputs.topk_idx.reshape(case.R, case.T, case.K)
    clean, out_of_range, duplicates = oracle.clean(stacked, case.E)
    with programs.make_buffer(case, "native") as buffer:

        def program(x, topk_idx, topk_weights):
            return programs.dispatch(buffer, case, x, topk_idx, topk_weights).tokens

        run = jax.jit(programs.sharded(buffer, program))
        jax.block_until_ready(run(inputs.x, inputs.topk_idx, inputs.topk_weights))
        with pytest.raises(jax_ep.EpDataError) as caught:
            buffer.check()
    error = caught.value
    assert error.count == out_of_range + duplicates
    assert stacked[error.rank, error.token, error.k] == error.value
    assert clean[error.rank, error.token, error.k] == -1
    in_range = 0 <= error.value < case.E
    assert error.kind == ("duplicate" if in_range else "out_of_range")


def test_reference_records_no_faults(rng):
    case = cases.BY_NAME["out_of_range"]
    inputs = cases.make_inputs(case, rng)
    with programs.make_buffer(case, "reference") as buffer:

        def program(x, topk_idx, topk_weights):
            return programs.dispatch(buffer, case, x, topk_idx, topk_weights).tokens

        run = jax.jit(programs.sharded(buffer, program))
        jax.block_until_ready(run(inputs.x, inputs.topk_idx, inputs.topk_weights))
        assert buffer.check() is None
