"""Buffers: what they tell, what they refuse, how they end."""

import concurrent.futures
import gc
import subprocess
import sys
import threading
import warnings

import cases
import jax
import numpy as np
import programs
import pytest
from jax.sharding import Mesh

import jax_ep
from jax_ep import _native

CASE = cases.Case(name="small", T=6, H=16, K=2, E=8, R=4)


def test_properties(backend):
    config = programs.make_config(CASE)
    mesh = programs.make_mesh(data=2, expert=4)
    with jax_ep.Buffer(mesh, "expert", config, backend=backend) as buffer:
        assert buffer.config is config
        assert buffer.mesh is mesh
        assert buffer.axis_names == ("expert",)
        assert (buffer.num_ranks, buffer.experts_per_rank) == (4, 2)
        assert buffer.backend == backend
        assert not buffer.closed
        for part in (f"id={buffer.id}", "num_ranks=4", backend, "num_experts=8"):
            assert part in repr(buffer)
        assert (buffer.window_bytes > 0) == (backend == "native")
        assert all(isinstance(value, int) for value in buffer.stats().values())
        assert bool(buffer.stats()) == (backend == "native")
    assert buffer.closed
    assert "closed" in repr(buffer)


def test_auto_is_native_on_cpu():
    with programs.make_buffer(CASE, "auto") as buffer:
        assert buffer.backend == "native"


def test_one_rank_needs_no_window(backend):
    case = cases.BY_NAME["one_rank"]
    with programs.make_buffer(case, backend) as buffer:
        assert buffer.window_bytes == 0


def test_ids_are_never_reused(backend):
    ids = []
    for _ in range(3):
        with programs.make_buffer(CASE, backend) as buffer:
            ids.append(buffer.id)
    assert len(set(ids)) == 3


def test_ids_differ_between_threads_that_make_buffers_at_once(monkeypatch):
    """They go to the native module themselves: beside it, Python's own lock keeps them apart."""
    num_threads, num_buffers = 8, 500
    settings, native = {}, _native.load("cpu")
    create = native.create_buffer

    def remember(**given):
        settings.update(given)
        return create(**given)

    monkeypatch.setattr(native, "create_buffer", remember)
    programs.make_buffer(CASE, "native").close()
    all_here = threading.Barrier(num_threads)

    def make_some(_):
        all_here.wait(60)
        return [create(**settings) for _ in range(num_buffers)]

    with concurrent.futures.ThreadPoolExecutor(num_threads) as threads:
        by_thread = list(threads.map(make_some, range(num_threads)))
    ids = {number for numbers in by_thread for number in numbers}
    for number in ids:
        native.close_buffer(number)
    assert len(ids) == num_threads * num_buffers


def test_fingerprint_tells_buffers_apart(backend):
    mesh = programs.make_mesh(a=2, b=4)
    turned = Mesh(mesh.devices[::-1], mesh.axis_names)
    config = programs.make_config(CASE)
    wider = programs.make_config(CASE, hidden=32)
    choices = [(mesh, "b", config), (mesh, "a", config), (turned, "b", config), (mesh, "b", wider)]
    prints = set()
    for arguments in choices:
        with jax_ep.Buffer(*arguments, backend=backend) as buffer:
            prints.add(buffer.fingerprint)
    assert len(prints) == len(choices)
    assert all(-(2**63) <= value < 2**63 for value in prints)


def test_fingerprint_is_the_same_in_another_process():
    program = (
        "import sys; sys.path.insert(0, 'tests'); import conftest, programs, cases\n"
        "case = cases.Case(name='small', T=6, H=16, K=2, E=8, R=4)\n"
        "print(programs.make_buffer(case, 'reference').fingerprint)\n"
    )
    root = __file__.rsplit("/", 3)[0]
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        cwd=root,
        timeout=120,
    )
    with programs.make_buffer(CASE, "reference") as buffer:
        assert int(done.stdout) == buffer.fingerprint


def test_close_twice_and_after_an_error(backend):
    with pytest.raises(KeyError), programs.make_buffer(CASE, backend) as buffer:
        raise KeyError("from the block")
    assert buffer.closed
    buffer.close()


@pytest.mark.parametrize("method", ["check", "stats", "reset", "__enter__"])
def test_closed_buffer_refuses(backend, method):
    buffer = programs.make_buffer(CASE, backend)
    buffer.close()
    with pytest.raises(jax_ep.EpUsageError, match=f"(?s)id={buffer.id}.*closed.*new Buffer"):
        getattr(buffer, method)()


def test_forgotten_buffer_closes_its_windows():
    native = programs.make_buffer(CASE, "native")
    module, forgotten = native._native, native.id
    assert module.window_bytes(forgotten) == native.window_bytes
    del native
    gc.collect()
    with pytest.raises(Exception, match=str(forgotten)):
        module.window_bytes(forgotten)


def test_what_came_out_of_turn_on_gpus_is_a_usage_error(monkeypatch):
    """Their kernels record it; others' timeouts follow from it, and it stays until reset()."""
    place = {"op": "dispatch", "group": 0, "peer": 1, "epoch": 3, "expected": 0, "seen": 2}
    records = [
        place | {"kind": "timeout", "rank": 0, "message": "EpTimeoutError: waited"},
        place | {"kind": "usage", "rank": 2, "message": "EpUsageError: a third start"},
    ]
    with programs.make_buffer(CASE, "native") as buffer:
        monkeypatch.setattr(buffer._native, "error_records", lambda _: records)
        for _ in range(2):
            with pytest.raises(jax_ep.EpUsageError, match=r"^EpUsageError: a third start$"):
                buffer.check()


def test_check_and_reset_of_an_unused_buffer(backend):
    with programs.make_buffer(CASE, backend) as buffer:
        assert buffer.check() is None
        assert buffer.reset() is None


@pytest.mark.parametrize(
    ("axis_name", "named", "remedy"),
    [
        ("model", "'model' is not in the mesh", r"axes \('data', 'expert'\)"),
        (("expert", "model"), r"axis_name=\('expert', 'model'\)", "axes"),
        (("expert", "expert"), "names an axis twice", "once"),
        ((), r"axis_name=\(\) is empty", "name at least one"),
        (3, "axis_name=3 is a int", "pass a str"),
    ],
)
def test_axes_must_be_in_the_mesh(backend, axis_name, named, remedy):
    mesh = programs.make_mesh(data=2, expert=4)
    with pytest.raises(jax_ep.EpUsageError, match=f"(?s){named}.*{remedy}"):
        jax_ep.Buffer(mesh, axis_name, programs.make_config(CASE), backend=backend)


def test_experts_must_divide_among_ranks(backend):
    config = programs.make_config(CASE, num_experts=9)
    with pytest.raises(jax_ep.EpUsageError, match=r"num_experts=9 .* 4 ranks; make it a multiple"):
        jax_ep.Buffer(programs.make_mesh(expert=4), "expert", config, backend=backend)


def test_too_many_experts_on_a_rank(backend):
    config = programs.make_config(CASE, num_experts=131_072)
    with pytest.raises(jax_ep.EpUsageError, match=r"num_experts=131072 .*65536.*at most 65535"):
        jax_ep.Buffer(programs.make_mesh(expert=2), "expert", config, backend=backend)


def test_arguments_of_the_wrong_type():
    mesh, config = programs.make_mesh(expert=4), programs.make_config(CASE)
    with pytest.raises(jax_ep.EpUsageError, match=r"config=.* is not an EpConfig; pass"):
        jax_ep.Buffer(mesh, "expert", {"num_experts": 8})
    with pytest.raises(jax_ep.EpUsageError, match=r"mesh=.* is a AbstractMesh; pass"):
        jax_ep.Buffer(mesh.abstract_mesh, "expert", config)
    with pytest.raises(jax_ep.EpUsageError, match="backend='fast' is not known; use 'auto'"):
        jax_ep.Buffer(mesh, "expert", config, backend="fast")


class _FakeDevice:
    """What Buffer reads of a device, for platforms and processes that this machine lacks."""

    def __init__(self, device, platform="cpu", process_index=0):
        self.id, self.local_hardware_id = device.id, device.local_hardware_id
        self.client, self.platform, self.process_index = device.client, platform, process_index


def _fake_mesh(fakes):
    return Mesh(np.array(fakes, dtype=object), ("expert",))


def test_devices_of_other_processes():
    near, far = (_FakeDevice(d, process_index=p) for p, d in enumerate(jax.devices("cpu")[:2]))
    mesh = _fake_mesh([near, far])
    with pytest.raises(
        jax_ep.EpUsageError, match=r"processes \(0, 1\).*jax.distributed.initialize"
    ):
        jax_ep.Buffer(mesh, "expert", programs.make_config(CASE))


def test_devices_none_of_which_are_of_this_process():
    mesh = _fake_mesh([_FakeDevice(device, process_index=3) for device in jax.devices("cpu")[:2]])
    with pytest.raises(jax_ep.EpUsageError, match=r"processes \[3\] and none of this one, 0; make"):
        jax_ep.Buffer(mesh, "expert", programs.make_config(CASE))


def test_devices_of_several_platforms():
    first, second = jax.devices("cpu")[:2]
    mesh = _fake_mesh([_FakeDevice(first), _FakeDevice(second, platform="gpu")])
    with pytest.raises(jax_ep.EpUsageError, match=r"mesh has devices of \['cpu', 'gpu'\]"):
        jax_ep.Buffer(mesh, "expert", programs.make_config(CASE))


def test_platforms_without_native_code():
    fakes = [_FakeDevice(device, platform="tpu") for device in jax.devices("cpu")[:2]]
    mesh = _fake_mesh(fakes)
    config = programs.make_config(CASE)
    with pytest.raises(jax_ep.EpUsageError, match="backend='native' is not offered for tpu"):
        jax_ep.Buffer(mesh, "expert", config, backend="native")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert jax_ep.Buffer(mesh, "expert", config).backend == "reference"


def test_gpus_say_that_they_fall_back():
    fakes = [_FakeDevice(device, platform="gpu") for device in jax.devices("cpu")[:2]]
    mesh = _fake_mesh(fakes)
    with pytest.warns(UserWarning, match=r"no native backend for gpu.*backend='reference'"):
        buffer = jax_ep.Buffer(mesh, "expert", programs.make_config(CASE))
    assert buffer.backend == "reference"
