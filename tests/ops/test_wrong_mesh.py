"""Meshes of the right shape over the wrong devices: only the running handler can tell."""

import cases
import jax
import numpy as np
import oracle
import programs
import pytest
from jax.sharding import Mesh, PartitionSpec

CASE = cases.Case(name="small", T=6, H=16, K=2, E=8, R=4)


def devices_of(kind):
    cpus = jax.devices("cpu")
    return {
        "permuted": [cpus[1], cpus[0], cpus[2], cpus[3]],
        "reversed": cpus[3::-1],
        "shifted": cpus[1:5],
        "others": cpus[4:8],
    }[kind]


@pytest.mark.parametrize("kind", ["permuted", "reversed", "shifted", "others"])
def test_native_refuses_other_devices(rng, kind):
    inputs, matrices = cases.make_inputs(CASE, rng), programs.random_matrices(rng, CASE)
    arguments = (inputs.x, inputs.topk_idx, inputs.topk_weights, matrices)
    dense = oracle.dense_moe(*arguments, np.zeros_like(inputs.x))
    with programs.make_buffer(CASE, "native") as buffer:
        layer = programs.linear_moe(buffer, CASE)
        right = jax.jit(programs.sharded(buffer, layer))
        mesh = Mesh(np.array(devices_of(kind)), ("expert",))
        spec = PartitionSpec("expert")
        wrong = jax.jit(jax.shard_map(layer, mesh=mesh, in_specs=spec, out_specs=spec))
        with pytest.raises(Exception, match=r"(?s)EpUsageError.*device.*mesh"):
            jax.block_until_ready(wrong(*arguments))
        np.testing.assert_allclose(right(*arguments), dense.out, rtol=0, atol=1e-5)
        assert buffer.check() is None


@pytest.mark.parametrize("kind", ["permuted", "others"])
def test_reference_serves_any_devices(rng, kind):
    """It owns no memory on a device, so a rank is whatever JAX says it is."""
    inputs, matrices = cases.make_inputs(CASE, rng), programs.random_matrices(rng, CASE)
    arguments = (inputs.x, inputs.topk_idx, inputs.topk_weights, matrices)
    dense = oracle.dense_moe(*arguments, np.zeros_like(inputs.x))
    with programs.make_buffer(CASE, "reference") as buffer:
        mesh = Mesh(np.array(devices_of(kind)), ("expert",))
        spec = PartitionSpec("expert")
        layer = jax.shard_map(
            programs.linear_moe(buffer, CASE), mesh=mesh, in_specs=spec, out_specs=spec
        )
        np.testing.assert_allclose(jax.jit(layer)(*arguments), dense.out, rtol=0, atol=1e-5)
