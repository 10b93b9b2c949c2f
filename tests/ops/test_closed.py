"""After close: tracing refuses, and so do programs compiled before."""

import cases
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import programs
import pytest

import jax_ep

CASE = cases.Case(name="small", T=6, H=16, K=2, E=8, R=4)


def zeros():
    return (
        jnp.zeros((CASE.R * CASE.T, CASE.H)),
        jnp.zeros((CASE.R * CASE.T, CASE.K), jnp.int32),
        jnp.zeros((CASE.R * CASE.T, CASE.K)),
    )


def test_tracing_refuses(backend):
    buffer = programs.make_buffer(CASE, backend)
    buffer.close()

    def program(x, topk_idx, topk_weights):
        return programs.dispatch(buffer, CASE, x, topk_idx, topk_weights).tokens

    message = f"(?s)dispatch was given buffer=.*id={buffer.id}.*is closed; make a new Buffer"
    with pytest.raises(jax_ep.EpUsageError, match=message):
        jax.jit(programs.sharded(buffer, program))(*zeros())


def test_combine_refuses_a_buffer_closed_since_dispatch(backend):
    buffer = programs.make_buffer(CASE, backend)

    def program(x, topk_idx, topk_weights):
        routed = programs.dispatch(buffer, CASE, x, topk_idx, topk_weights)
        buffer.close()
        return jax_ep.combine(buffer, routed.tokens, routed)

    with pytest.raises(jax_ep.EpUsageError, match=r"combine was given buffer=.*is closed"):
        jax.jit(programs.sharded(buffer, program))(*zeros())


def test_compiled_native_program_raises_and_others_go_on(rng):
    inputs, matrices = cases.make_inputs(CASE, rng), programs.random_matrices(rng, CASE)
    arguments = (inputs.x, inputs.topk_idx, inputs.topk_weights, matrices)
    dense = oracle.dense_moe(*arguments, np.zeros_like(inputs.x))
    with programs.make_buffer(CASE, "native") as open_buffer:
        layer = jax.jit(programs.sharded(open_buffer, programs.linear_moe(open_buffer, CASE)))
        doomed = programs.make_buffer(CASE, "native")
        program = jax.jit(programs.sharded(doomed, programs.linear_moe(doomed, CASE)))
        for run in (layer, program):
            np.testing.assert_allclose(run(*arguments), dense.out, rtol=0, atol=1e-5)
        doomed.close()
        for _ in range(2):
            with pytest.raises(Exception, match=f"(?s)EpUsageError.*buffer.*{doomed.id}.*closed"):
                jax.block_until_ready(program(*arguments))
        np.testing.assert_allclose(layer(*arguments), dense.out, rtol=0, atol=1e-5)
        assert open_buffer.check() is None


def test_close_while_running_ends(rng):
    """Closing waits for nobody for ever; the run either finished or raises."""
    case = cases.BY_NAME["chunked"]
    inputs, matrices = cases.make_inputs(case, rng), programs.random_matrices(rng, case)
    arguments = (inputs.x, inputs.topk_idx, inputs.topk_weights, matrices)
    dense = oracle.dense_moe(*arguments, np.zeros_like(inputs.x))
    for _ in range(5):
        buffer = programs.make_buffer(case, "native")
        layer = jax.jit(programs.sharded(buffer, programs.linear_moe(buffer, case)))
        layer = layer.lower(*arguments).compile()
        out = layer(*arguments)
        buffer.close()
        try:
            np.testing.assert_allclose(out, dense.out, rtol=0, atol=1e-5)
        except jax.errors.JaxRuntimeError as error:
            assert "closed" in str(error)  # noqa: PT017  (either end is right, a third is not)
