"""Chains for GPUs, tried on CPU devices, and the systems that only some runs measure."""

import dataclasses
import json
import math
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec
from test_bench import BENCHMARKS, EVERY_RANK, check_against_oracle, check_chains, make, settings_of

# After test_bench, which says where to look for it.
from ep_bench import chains, hlo, linked, measure, peer, points, ragged  # isort: skip
from ep_bench.systems import OPS, SYSTEMS  # isort: skip


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("shape", ["few_experts", "one_rank"])
def test_linked_chains_of_calls_hold_nothing_else(op, shape, rng):
    """Native's calls are counted and results checked on the way; here what is between them."""
    sizes, programs = check_chains("native", op, "data", shape, rng)
    # Of two operations more: combine's touch, for which XLA:CPU may take a loop or two.
    assert_only_calls_added(programs, most_fusions=4 if op == "combine" else 0)
    grown = {
        length: sum(
            hlo.count_arrays(program.as_text(), rows * sizes.H)
            for rows in (sizes.T, sizes.capacity)
        )
        for length, program in programs.items()
    }
    # Dispatch and combine write one array of rows each, and so does either one's gradient.
    assert (
        grown[3] - grown[1] == 2 * {"dispatch": 1, "combine": 1, "roundtrip": 2, "fwd_bwd": 4}[op]
    )


LOW_LATENCY_CHAINS = [("low_latency_compact", op) for op in OPS]
LOW_LATENCY_CHAINS += [(f"low_latency_{name}", "dispatch") for name in ("padded", "float8")]
HALVES_CHAINS = [(name, op) for name in points.HALVES for op in SYSTEMS[name].ops]


@pytest.mark.parametrize(("name", "op"), LOW_LATENCY_CHAINS)
def test_linked_chains_of_low_latency_hold_nothing_but_its_calls(name, op, rng):
    """No touch either: combines are linked by their order token."""
    _, programs = check_chains(name, op, "data", "few_experts", rng)
    assert_only_calls_added(programs, most_fusions=0)


@pytest.mark.parametrize(("name", "op"), HALVES_CHAINS)
def test_halves_alternate_in_linked_chains(name, op, rng):
    """A start comes after the done before it, or there would be three starts in flight."""
    _, programs = check_chains(name, op, "data", "few_experts", rng)
    assert_only_calls_added(programs, most_fusions=0)
    text = programs[3].as_text()
    entry = text[text.index("\nENTRY ") :]
    halves = re.findall(rf'custom_call_target="jax_ep_ll_{op}(?:_float8)?_(start|done)"', entry)
    assert halves == ["start", "done"] * 3


@pytest.mark.parametrize(("name", "op"), HALVES_CHAINS)
def test_halves_alternate_in_loop_chains(name, op, rng):
    check_chains(name, op, "loop", "few_experts", rng)


@pytest.mark.parametrize(
    "name",
    [
        *("native", "low_latency_compact", "low_latency_float8"),
        *("low_latency_padded_halves", "argsort"),
    ],
)
def test_a_system_says_what_its_operations_are(name, rng):
    system = SYSTEMS[name]
    truth = make("one_rank" if name == "argsort" else "few_experts", rng)
    with system.open(truth.load, truth.mesh, None) as ops:
        assert system.opaque == ops.opaque
        assert system.in_turn == (ops.combine_in_turn is not None)
        assert system.differentiable == (ops.dispatch_in_turn is None)


def assert_only_calls_added(programs, most_fusions: int) -> None:
    """By the second and third of three operations."""
    grown = {length: instructions(program.as_text()) for length, program in programs.items()}
    added = [opcode for opcode in grown[3] if opcode not in ("custom-call", "get-tuple-element")]
    for opcode in grown[1]:
        if opcode in added:
            added.remove(opcode)
    assert sum(opcode in ("fusion", "call") for opcode in added) <= most_fusions, added
    assert not {"while", "copy", "conditional"} & set(added), added


def instructions(text: str) -> list[str]:
    """Opcodes of the entry computation."""
    entry = text[text.index("\nENTRY ") :]
    return re.findall(r"^\s+(?:ROOT )?%?[\w.\-]+ = .*?\s([\w\-]+)\(", entry, re.MULTILINE)


@pytest.mark.parametrize("op", [*OPS, "glue"])
@pytest.mark.parametrize("name", ["padded_all_to_all", "all_gather"])
def test_linked_chains_of_other_systems_return_what_they_should(name, op, rng):
    check_chains(name, op, "data", "more_experts_than_ranks", rng)


@pytest.mark.parametrize("op", [*OPS, "glue"])
def test_linked_chains_of_argsort_return_what_they_should(op, rng):
    check_chains("argsort", op, "data", "one_rank", rng)


def test_barriers_keep_what_only_a_touch_uses(rng):
    """In what XLA is given, every dispatch's arrays go through a barrier that is used."""
    truth = make("few_experts", rng)
    with SYSTEMS["padded_all_to_all"].open(truth.load, truth.mesh, None) as ops:
        chain = chains.CHAINS["data"]["dispatch"]

        def program(x, topk_idx, topk_weights, never):
            return chain.build(ops, (x, topk_idx, topk_weights), never, 3)

        specs = (EVERY_RANK,) * 3 + (PartitionSpec(),)
        sharded = jax.shard_map(program, mesh=truth.mesh, in_specs=specs, out_specs=EVERY_RANK)
        text = jax.jit(sharded).lower(*truth.args).as_text()
    rows = f"tensor<{truth.load.sizes.capacity}x{truth.load.sizes.H}xf32>"
    barriers = [line for line in text.splitlines() if "optimization_barrier" in line]
    assert sum(rows in line for line in barriers) == 3
    # Behind each, one element of the rows is read.
    reads = re.findall(rf"stablehlo.slice.*\({re.escape(rows)}\) -> tensor<1x1xf32>", text)
    assert len(reads) >= 2


def test_a_touch_changes_nothing_and_depends_on_everything():
    tree = (jnp.arange(6, dtype=jnp.int32), jnp.full((2, 3), jnp.nan), jnp.ones(4, jnp.bfloat16))
    never = jnp.int32(0)
    array = jnp.arange(5, dtype=jnp.int32)

    def touched(tree, never):
        mark = linked.mark_of(tree, never)
        return linked.touch_first(array, mark) + linked.touch(array, mark) - array

    np.testing.assert_array_equal(jax.jit(touched)(tree, never), array)
    for place in range(len(tree)):
        changed = [*tree]
        changed[place] = changed[place].at[(0,) * changed[place].ndim].set(2)
        with_bits = jax.jit(touched)(tuple(changed), jnp.int32(-1))
        assert with_bits[0] != jax.jit(touched)(tree, jnp.int32(-1))[0]


def test_rows_that_are_cut_down_are_noticed():
    """A chain that needs one element of each product only; then one that needs them whole."""

    def cut(x, length):
        return sum((x * (2 + turn))[0, 0] for turn in range(length))

    def whole(x, length):
        for _ in range(length):
            x = jnp.sort(x, axis=0) * 2
        return x

    texts = {}
    for program in (cut, whole):
        texts[program] = {
            length: jax.jit(program, static_argnums=1)
            .lower(jnp.ones((8, 64)), length)
            .compile()
            .as_text()
            for length in (1, 3)
        }
    hlo.check_arrays("whole", texts[whole], 8 * 64)
    with pytest.raises(AssertionError, match="grew by 0 arrays"):
        hlo.check_arrays("cut", texts[cut], 8 * 64)


GPU_TEXT = """
%command_buffer (p: bf16[4,8]) -> bf16[4,8] {
  %p = bf16[4,8]{1,0} parameter(0)
  %start = ((bf16[4,8]{1,0}), bf16[6,8]{1,0}) ragged-all-to-all-start(%p)
  %done = bf16[6,8]{1,0} ragged-all-to-all-done(%start)
  ROOT %copy.1 = bf16[4,8]{1,0} copy(%p)
}

ENTRY %main (a: bf16[4,8]) -> (bf16[4,8], s32[2]) {
  %a = bf16[4,8]{1,0} parameter(0)
  %all-to-all.2 = (bf16[2,8]{1,0}, /*index=1*/bf16[2,8]{1,0}) all-to-all(%a, %a)
  %small = s32[2]{0} all-gather(%a), dimensions={0}
  %fusion = (bf16[4,8]{1,0}, s32[2]{0}) fusion(%a), kind=kLoop
  %copy-start = (bf16[4,8]{1,0}, bf16[4,8]{1,0}, u32[]) copy-start(%a)
  %copy-done = bf16[4,8]{1,0} copy-done(%copy-start)
  ROOT %t = (bf16[4,8]{1,0}, s32[2]{0}) tuple(%a, %small)
}
"""


def test_hlo_of_gpus_is_counted():
    assert hlo.count_calls(GPU_TEXT) == {
        "ragged-all-to-all": 1,
        "all-to-all": 1,
        "all-gather": 1,
    }
    assert hlo.count_row_collectives(GPU_TEXT, 32) == 2
    assert hlo.count_copies(GPU_TEXT, 32) == 2
    assert hlo.count_copies(GPU_TEXT, 33) == 0
    assert hlo.count_arrays(GPU_TEXT, 32) == 1
    assert hlo.count_arrays(GPU_TEXT, 48) == 1


def emulated_ragged(operand, output, *places, axis_name):
    """What ``lax.ragged_all_to_all`` does, from everybody's operands and arguments."""
    operands = lax.all_gather(operand, axis_name)
    starts, counts, targets, _ = (lax.all_gather(array, axis_name) for array in places)
    here = lax.axis_index(axis_name)
    row = jnp.arange(output.shape[0])
    for source in range(operands.shape[0]):
        offset = row - targets[source, here]
        arrives = (offset >= 0) & (offset < counts[source, here])
        found = operands[source][jnp.clip(starts[source, here] + offset, 0, len(operand) - 1)]
        output = jnp.where(arrives.reshape(-1, *[1] * (output.ndim - 1)), found, output)
    return output


@pytest.mark.parametrize("shape", ["few_experts", "uneven", "eight_ranks", "one_rank"])
def test_ragged_agrees_with_the_oracle(shape, rng, monkeypatch):
    """XLA:CPU has no such collective, so it is emulated by its definition."""
    monkeypatch.setattr(ragged.lax, "ragged_all_to_all", emulated_ragged)
    check_against_oracle(SYSTEMS["ragged_all_to_all"], make(shape, rng), rng)


def test_ragged_says_how_much_it_receives(rng, monkeypatch):
    """The emulation takes receive sizes from the senders; here they are compared."""
    truth = make("uneven", rng)

    def checked(operand, output, starts, counts, targets, expected, *, axis_name):
        sent_here = lax.all_to_all(counts, axis_name, 0, 0, tiled=True)
        return jnp.where(jnp.all(sent_here == expected), output, jnp.full_like(output, 99))

    monkeypatch.setattr(ragged.lax, "ragged_all_to_all", checked)

    def program(topk_idx, topk_weights):
        route, experts, _ = ragged.route(truth.load.sizes, topk_idx, topk_weights)
        home = ragged.collect_scalars(truth.load.sizes, route, jnp.zeros(experts.shape))
        return experts, home

    sharded = jax.shard_map(program, mesh=truth.mesh, in_specs=EVERY_RANK, out_specs=EVERY_RANK)
    experts, home = jax.jit(sharded)(*truth.args[1:3])
    assert np.all(np.asarray(experts) == -1)
    assert not np.any(np.asarray(home))


@pytest.mark.parametrize("op", OPS)
def test_ragged_chains_lower_to_the_collective(op, rng):
    truth, system = make("few_experts", rng), SYSTEMS["ragged_all_to_all"]
    with system.open(truth.load, truth.mesh, None) as ops:
        chain = chains.CHAINS["data"][op]

        def program(x, topk_idx, topk_weights, never):
            return chain.build(ops, (x, topk_idx, topk_weights), never, 2)

        specs = (EVERY_RANK,) * 3 + (PartitionSpec(),)
        sharded = jax.shard_map(program, mesh=truth.mesh, in_specs=specs, out_specs=EVERY_RANK)
        text = jax.jit(sharded).lower(*truth.args).as_text()
    once = system.calls_of(chains.PARTS[op])["ragged-all-to-all"]
    # Combine's chain dispatches once.
    expected = 2 * once if op != "combine" else 2 * once + 2
    assert text.count("@ragged_all_to_all") == expected


def test_argsort_is_for_one_rank(rng):
    truth = make("few_experts", rng)
    with (
        pytest.raises(ValueError, match="--ranks 1"),
        SYSTEMS["argsort"].open(truth.load, truth.mesh, None),
    ):
        pass


def test_a_system_that_fails_is_told_and_holds_up_nobody(rng):
    def broken(load, mesh, num_sms):
        raise RuntimeError("no such device")

    settings = settings_of("data")
    systems = SYSTEMS | {
        "broken": dataclasses.replace(SYSTEMS["native"], name="broken", open=broken)
    }
    settings = dataclasses.replace(settings, systems=systems)
    point = points.Point(T=16, H=16, K=2, E=8, systems=("broken", "native"))
    mesh = make("few_experts", rng).mesh
    told = list(measure.measure(mesh, [point], settings))
    assert [next(iter(said)) for said in told] == ["record", "record", "failed"]
    assert told[-1]["failed"].endswith("broken set-up: RuntimeError: no such device")
    assert {said["record"]["system"] for said in told[:-1]} == {"native"}
    out_of_time = dataclasses.replace(settings, budget_s=0.0)
    assert list(measure.measure(mesh, [point], out_of_time)) == [{"left_out": [point.name]}]


PEER = '''
"""A library that has everything on one rank: a gather by expert, and a scatter-add."""

import dataclasses
import functools

import jax
import jax.numpy as jnp

NAME = "toy"
{ops}

@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("tokens", "group_sizes", "order", "gates"),
    meta_fields=(),
)
@dataclasses.dataclass
class Sent:
    tokens: jax.Array
    group_sizes: jax.Array
    order: jax.Array
    gates: jax.Array


def dispatch(sizes, x, topk_idx, topk_weights):
    experts = topk_idx.reshape(-1)
    order = jnp.argsort(experts, stable=True) + 0 * experts
    pad = (0, sizes.capacity - order.size)
    tokens = jnp.pad(x[order // sizes.K], (pad, (0, 0)))
    counts = jnp.zeros(sizes.E, jnp.int32).at[experts].add(1)
    return Sent(tokens, counts, order, topk_weights.reshape(-1)[order])


def combine(sizes, y, sent):
    rows = y[: sent.order.size].astype(jnp.float32) * sent.gates[:, None]
    total = jnp.zeros((sizes.T, sizes.H), jnp.float32) + 0 * rows[:1]
    return total.at[sent.order // sizes.K].add({factor} * rows).astype(y.dtype)
'''


@pytest.mark.parametrize("factor", [1, 2])
def test_a_peer_is_timed_and_checked(factor, tmp_path):
    file = tmp_path / "toy_peer.py"
    ops = 'OPS = ("dispatch", "combine", "roundtrip")'
    file.write_text(PEER.format(ops=ops, factor=factor))
    command = [sys.executable, str(BENCHMARKS / "bench_ep.py"), "--quick", "--ranks", "1"]
    command += ["--platform", "cpu", "--shape", "64,32,2,4", "--chain", "data"]
    command += ["--systems", "native", "toy", "--peer", str(file), "--json", str(tmp_path)]
    command += ["--num-sms", "24", "--commit", "abc"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    records = json.loads((tmp_path / "cpu-x1.json").read_text())["records"]
    timed = {op for op in OPS if any((r["op"], r["system"]) == (op, "toy") for r in records)}
    if factor == 1:
        assert done.returncode == 0, done.stderr
        assert timed == {"dispatch", "combine", "roundtrip"}
    else:
        assert done.returncode == 1
        assert "toy combine: AssertionError" in done.stderr
        assert timed == {"dispatch"}
    for record in records:
        assert math.isfinite(record["us"])
        assert record["wire_gbps"] is None or record["system"] == "native"
    assert {record["op"] for record in records if record["system"] == "native"} == set(OPS)


def test_a_peer_with_its_own_set_up(rng, tmp_path):
    file = tmp_path / "peer_with_open.py"
    file.write_text(
        PEER.format(ops="", factor=1)
        .replace("def dispatch", "def send")
        .replace("def combine", "def receive")
        + "\n\nimport contextlib\n\n\n@contextlib.contextmanager\n"
        + "def open(workload, mesh, num_sms):\n"
        + "    assert num_sms == 8\n"
        + "    part = functools.partial\n"
        + "    yield part(send, workload.sizes), part(receive, workload.sizes)\n"
    )
    system = peer.load(file)
    truth = make("one_rank", rng)
    with system.open(truth.load, truth.mesh, 8) as ops:
        truth.check_dispatch("toy", ops)
    assert system.ops == OPS
    file.write_text("NAME = 'nothing'\n")
    with pytest.raises(ValueError, match="must define NAME"):
        peer.load(file)
    with pytest.raises(ValueError, match="not a Python file"):
        peer.load(tmp_path / "absent.py")
