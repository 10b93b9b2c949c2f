"""Buffers on GPUs: groups, settings, memory, closing."""

import dataclasses
import time

import cases
import gpu_world
import jax
import numpy as np
import programs
import pytest
from jax.sharding import Mesh, PartitionSpec

import jax_ep
from jax_ep import _native

CASE = cases.Case(name="small", T=21, H=64, K=2, E=8, R=2)


def leaky_program(buffer, case):
    def layer(x, topk_idx, topk_weights):
        return gpu_world.leaky_layer(buffer, case, x, topk_idx, topk_weights)

    return jax.jit(programs.sharded(buffer, layer))


def arguments_of(buffer, inputs):
    return gpu_world.put(buffer, inputs.x, inputs.topk_idx, inputs.topk_weights)


def assert_right(out, inputs):
    expected = gpu_world.dense_leaky_layer(inputs.x, inputs.topk_idx, inputs.topk_weights)
    error = gpu_world.worst_error(np.asarray(out), np.asarray(expected))
    assert error < gpu_world.TOLERANCE["float32"]


def group_meshes():
    """Mesh sizes and the axes of the expert group, as far as this machine's GPUs go."""
    choices = [
        ({"data": 2, "expert": 1}, "expert"),
        ({"data": 1, "expert": 2}, "expert"),
        ({"expert": 2, "data": 1}, ("expert", "data")),
        ({"data": 2, "expert": 2}, "expert"),
        ({"expert": 2, "data": 2}, "expert"),
        ({"a": 2, "b": 2}, ("b", "a")),
    ]
    here = len(gpu_world.gpus())
    return [c for c in choices if int(np.prod(list(c[0].values()))) <= max(2, here)]


@pytest.mark.parametrize(("sizes", "axes"), group_meshes(), ids=str)
def test_groups_on_part_of_a_mesh(rng, sizes, axes):
    mesh = gpu_world.mesh(**sizes)
    config = programs.make_config(CASE)
    with jax_ep.Buffer(mesh, axes, config, backend="native") as buffer:
        case = dataclasses.replace(CASE, R=mesh.devices.size)  # inputs for every device
        inputs = cases.make_inputs(case, rng)
        run = leaky_program(buffer, dataclasses.replace(CASE, R=buffer.num_ranks))
        assert_right(run(*arguments_of(buffer, inputs)), inputs)
        assert buffer.check() is None
        assert buffer.stats()["num_groups"] == mesh.devices.size // buffer.num_ranks


def test_auto_is_native():
    mesh = gpu_world.mesh(expert=1)
    with jax_ep.Buffer(mesh, "expert", programs.make_config(CASE)) as buffer:
        assert buffer.backend == "native"
        assert buffer.window_bytes == 0


def test_ids_of_cpu_and_gpu_buffers_never_meet(num_gpus):
    case = gpu_world.on_ranks(CASE, num_gpus)
    with gpu_world.make_buffer(case) as gpu, gpu_world.make_buffer(case, "cpu") as cpu:
        assert gpu.id > 2**32 > cpu.id
        assert gpu.window_bytes == cpu.window_bytes


def test_default_num_sms():
    module = _native.load("cuda")
    device_sms = gpu_world.gpus()[0].core_count
    with gpu_world.make_buffer(gpu_world.on_ranks(CASE, 1)) as buffer:
        num_sms = buffer.stats()["num_sms"]
    assert num_sms == module.default_num_sms(device_sms)
    assert num_sms % 8 == 0
    assert device_sms // 2 - 8 < num_sms <= device_sms // 2
    assert (module.default_num_sms(132), module.most_num_sms(132)) == (64, 100)


@pytest.mark.parametrize("num_sms", [1, 3, 16])
def test_few_multiprocessors_are_enough(num_gpus, rng, num_sms):
    case = gpu_world.on_ranks(CASE, num_gpus)
    inputs = cases.make_inputs(case, rng)
    with gpu_world.make_buffer(case, num_sms=num_sms) as buffer:
        assert buffer.stats()["num_sms"] == num_sms
        assert_right(leaky_program(buffer, case)(*arguments_of(buffer, inputs)), inputs)


def test_too_many_multiprocessors():
    device_sms = gpu_world.gpus()[0].core_count
    most = _native.load("cuda").most_num_sms(device_sms)
    message = rf"num_sms={most + 1} is too many: GPU 0 has {device_sms}.*Pass at most {most}, or"
    with pytest.raises(jax_ep.EpUsageError, match=message):
        gpu_world.make_buffer(gpu_world.on_ranks(CASE, 1), num_sms=most + 1)


def test_too_little_memory_says_what_decides(rng):
    case = dataclasses.replace(CASE, H=65_536)
    message = (
        r"(?s)num_ranks=2, chunk_tokens=65535 .*rows of 262144 bytes.* needs 13\d{10} bytes on "
        r"GPU \d.*are free.*lower chunk_tokens.*XLA_PYTHON_CLIENT_MEM_FRACTION"
    )
    with pytest.raises(jax_ep.EpError, match=message):
        gpu_world.make_buffer(case, max_tokens_per_rank=65_535, chunk_tokens=65_535)
    inputs = cases.make_inputs(CASE, rng)
    with gpu_world.make_buffer(CASE) as buffer:  # what was taken before the failure is back
        assert_right(leaky_program(buffer, CASE)(*arguments_of(buffer, inputs)), inputs)


def test_memory_of_closed_buffers_is_used_again(rng):
    """Twenty windows of 4 GB do not fit beside each other."""
    case = dataclasses.replace(CASE, H=8192)
    for _ in range(20):
        with gpu_world.make_buffer(case, max_tokens_per_rank=16_384, chunk_tokens=16_384) as buffer:
            assert buffer.window_bytes > 4e9


def test_programs_compiled_before_close(num_gpus, rng):
    case = gpu_world.on_ranks(CASE, num_gpus)
    inputs = cases.make_inputs(case, rng)
    buffer = gpu_world.make_buffer(case)
    arguments = arguments_of(buffer, inputs)
    fresh = leaky_program(buffer, case).lower(*arguments).compile()
    used = leaky_program(buffer, case)
    for _ in range(10):
        assert_right(used(*arguments), inputs)
    buffer.close()
    buffer.close()
    with pytest.raises(Exception, match=f"(?s)EpUsageError.*buffer {buffer.id} is closed"):
        jax.block_until_ready(fresh(*arguments))
    # A replayed graph calls no handler: it finds the buffer closed, and its outputs say so.
    try:
        out = np.asarray(used(*arguments))
    except jax.errors.JaxRuntimeError as error:
        assert "is closed" in str(error)  # noqa: PT017  (either is right, a third is not)
    else:
        assert np.isnan(out).all()
    with gpu_world.make_buffer(case) as other:
        assert_right(leaky_program(other, case)(*arguments), inputs)


def test_close_while_running_ends(num_gpus, rng):
    case = dataclasses.replace(gpu_world.on_ranks(CASE, num_gpus), chunk=4)
    inputs = cases.make_inputs(case, rng)
    for _ in range(5):
        buffer = gpu_world.make_buffer(case, timeout_s=20.0)
        arguments = arguments_of(buffer, inputs)
        run = leaky_program(buffer, case).lower(*arguments).compile()
        out = run(*arguments)
        began = time.monotonic()
        buffer.close()
        assert time.monotonic() - began < 10
        try:
            out = np.asarray(out)
        except jax.errors.JaxRuntimeError as error:
            assert "closed" in str(error)  # noqa: PT017  (either end is right, a third is not)
        else:
            if not np.isnan(out).any():
                assert_right(out, inputs)


def test_reset_of_a_healthy_buffer(num_gpus, rng):
    case = gpu_world.on_ranks(CASE, num_gpus)
    inputs = cases.make_inputs(case, rng)
    with gpu_world.make_buffer(case) as buffer:
        run, arguments = leaky_program(buffer, case), arguments_of(buffer, inputs)
        first = {"out": np.asarray(run(*arguments))}
        for _ in range(3):
            buffer.reset()
            assert buffer.stats()["dispatch_epochs"] == 0
            gpu_world.assert_same_bits({"out": run(*arguments)}, first)


def test_a_mesh_of_the_other_order_is_found_out(rng):
    """Only the kernel can see that the program counts ranks otherwise; reset() mends the buffer."""
    inputs = cases.make_inputs(CASE, rng)
    with gpu_world.make_buffer(CASE) as buffer:
        run, arguments = leaky_program(buffer, CASE), arguments_of(buffer, inputs)
        first = {"out": np.asarray(run(*arguments))}
        turned = Mesh(buffer.mesh.devices[::-1], ("expert",))

        def layer(x, topk_idx, topk_weights):
            return gpu_world.leaky_layer(buffer, CASE, x, topk_idx, topk_weights)

        spec = PartitionSpec("expert")
        wrong = jax.jit(jax.shard_map(layer, mesh=turned, in_specs=spec, out_specs=spec))
        try:
            out = np.asarray(wrong(inputs.x, inputs.topk_idx, inputs.topk_weights))
        except jax.errors.JaxRuntimeError as error:
            assert "EpMismatchError" in str(error)  # noqa: PT017  (combine's handler was late)
        else:
            assert np.isnan(out).all()
        message = r"dispatch.*rank [01] of the buffer is rank [01] in the mesh of the function"
        with pytest.raises(jax_ep.EpMismatchError, match=message):
            buffer.check()
        buffer.reset()
        assert buffer.check() is None
        gpu_world.assert_same_bits({"out": run(*arguments)}, first)


def test_a_device_outside_the_mesh_is_refused(rng):
    gpu_world.require_cuda(2)
    case = gpu_world.on_ranks(CASE, 1)
    inputs = cases.make_inputs(case, rng)
    with gpu_world.make_buffer(case) as buffer:

        def layer(x, topk_idx, topk_weights):
            return gpu_world.leaky_layer(buffer, case, x, topk_idx, topk_weights)

        other = Mesh(np.array(gpu_world.gpus()[1:2]), ("expert",))
        spec = PartitionSpec("expert")
        wrong = jax.jit(jax.shard_map(layer, mesh=other, in_specs=spec, out_specs=spec))
        with pytest.raises(Exception, match=r"(?s)EpUsageError.*device 1.*not in the mesh"):
            jax.block_until_ready(wrong(inputs.x, inputs.topk_idx, inputs.topk_weights))
        run = leaky_program(buffer, case)
        assert_right(run(*arguments_of(buffer, inputs)), inputs)
        assert buffer.check() is None
