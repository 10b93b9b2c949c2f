"""LowLatencyLayout and the size hint: the worked example region by region, bounds, errors."""

import subprocess
import sys

import jax.numpy as jnp
import pytest
from programs import make_mesh

import jax_ep
from jax_ep import _native

# T=128, H=7168, R=8, E=288 in bfloat16: the worked example that the project started from.
EXAMPLE = (128, 7168, 8, 288)
SEED_TOTAL = 117_522_432
SEND_REGIONS = {"dispatch_send_data", "combine_send_data"}


def test_example_region_by_region():
    """Messages of 14,336 + 4 + 64 bytes every 14,464; rows of 14,336; signals of 4 and 8 bytes."""
    layout = jax_ep.LowLatencyLayout.make(*EXAMPLE)
    assert layout.message_bytes == 14_416
    expected = [
        ("dispatch_receive_data", 0, 8 * 128 * 14_464),
        ("dispatch_receive_counts", 14_811_136, 8 * 36 * 8),
        ("dispatch_receive_tags", 14_813_440, 8 * 8),
        ("dispatch_arrival_flags", 14_813_568, 8 * 128 * 4),
        ("dispatch_send_data", 14_817_664, 8 * 128 * 14_464),
        ("combine_receive_data", 29_628_800, 8 * 128 * 14_336),
        ("combine_receive_scalars", 44_308_864, 8 * 128 * 8 * 4),
        ("combine_arrival_flags", 44_341_632, 8 * 128 * 4),
        ("combine_receive_tags", 44_345_728, 8 * 8),
        ("combine_send_data", 44_345_856, 8 * 128 * 14_336),
        ("notify_counts", 59_025_920, 8 * 288 * 8),
        ("route_records", 59_044_352, 2 * 8 * 128 * 8 * 16),  # half of them outgoing
    ]
    assert [(r.name, r.offset, r.size) for r in layout.regions] == expected
    assert layout.buffer_bytes == 59_310_080
    assert layout.total_bytes == 118_620_160


def test_the_seed_regions_are_there_and_no_smaller():
    """What the seed's six regions hold, ours hold too: its numbers bound ours from below."""
    layout = jax_ep.LowLatencyLayout.make(*EXAMPLE)
    seed = _native.load().seed_layout(tokens=128, row_bytes=2 * 7168, num_ranks=8)
    assert seed["total_bytes"] == SEED_TOTAL
    names = (
        "dispatch_receive_data",
        "dispatch_receive_counts",
        "dispatch_send_data",
        "combine_receive_data",
        "combine_arrival_flags",
        "combine_send_data",
    )
    for name, size in zip(names, seed["sizes"], strict=True):
        assert layout.region(name).size >= size, name


@pytest.mark.parametrize("num_experts_per_tok", [1, 8])
def test_hint_is_at_least_the_seed_and_one_percent_above_at_most(num_experts_per_tok):
    hint = jax_ep.get_low_latency_rdma_size_hint(*EXAMPLE, num_experts_per_tok=num_experts_per_tok)
    assert SEED_TOTAL <= hint <= SEED_TOTAL * 1.01
    if num_experts_per_tok == 8:
        assert hint == jax_ep.get_low_latency_rdma_size_hint(*EXAMPLE) == 118_620_160


def test_without_gpus_there_are_no_route_records():
    cpu = jax_ep.LowLatencyLayout.make(*EXAMPLE, records=False)
    assert cpu.region("route_records").size == 0
    assert SEED_TOTAL <= cpu.total_bytes == 118_095_872


def test_without_rdma_the_send_regions_are_absent_and_the_window_is_half():
    staged = jax_ep.LowLatencyLayout.make(*EXAMPLE)
    direct = jax_ep.LowLatencyLayout.make(*EXAMPLE, staging=False)
    assert {r.name for r in direct.regions if r.size == 0} == SEND_REGIONS
    for region in staged.regions:
        expected = 0 if region.name in SEND_REGIONS else region.size
        if region.name == "route_records":
            expected //= 2
        assert direct.region(region.name).size == expected
    assert 0.5 <= direct.total_bytes / staged.total_bytes < 0.51


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_a_buffer_allocates_this_layout(num_ranks, dtype):
    layout = jax_ep.LowLatencyLayout.make(
        24, 1024, num_ranks, 64, num_experts_per_tok=6, dtype=dtype, staging=False, records=False
    )
    config = jax_ep.EpConfig(
        num_experts=64,
        num_experts_per_tok=6,
        hidden=1024,
        max_tokens_per_rank=24,
        dtype=dtype,
        mode="low_latency",
    )
    mesh = make_mesh(expert=num_ranks)
    with jax_ep.Buffer(mesh, "expert", config, backend="native") as buffer:
        assert buffer.window_bytes == layout.total_bytes


def test_describe_names_every_region_with_its_numbers():
    layout = jax_ep.LowLatencyLayout.make(*EXAMPLE)
    lines = layout.describe().splitlines()
    assert len(lines) == 1 + len(layout.regions) + 3
    for line, region in zip(lines[1:], layout.regions, strict=False):
        assert line.split() == [region.name, f"{region.offset:,}", f"{region.size:,}"]
    assert "118,620,160" in lines[-2]
    assert len({len(line) for line in lines}) == 1


def test_unknown_region_is_a_key_error():
    with pytest.raises(KeyError, match="dispatch_data"):
        jax_ep.LowLatencyLayout.make(*EXAMPLE).region("dispatch_data")


def test_hint_starts_no_backend():
    program = (
        "import jax_ep\n"
        f"assert jax_ep.get_low_latency_rdma_size_hint(*{EXAMPLE}) == 118_620_160\n"
        "from jax._src import xla_bridge\n"
        "assert not xla_bridge.backends_are_initialized()\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


@pytest.mark.parametrize(
    ("arguments", "options", "named", "remedy"),
    [
        ((0, 7168, 8, 288), {}, "num_max_dispatch_tokens_per_rank=0", "positive int"),
        ((65_536, 7168, 8, 288), {}, "num_max_dispatch_tokens_per_rank=65536", "at most 65535"),
        ((128, 7168, 0, 288), {}, "num_ranks=0", "positive int"),
        ((128, 7168, 8.0, 288), {}, "num_ranks=8.0 is a float", "positive int"),
        ((128, 7168, 7, 288), {}, "num_experts=288 does not divide among 7", "multiple of 7"),
        ((128, 7168, 8, 4), {}, "num_experts_per_tok=8 .* num_experts=4", "lower"),
        ((128, 3, 8, 288), {}, "hidden=3", "multiple of 8"),
        ((128, 7168, 8, 288), {"dtype": "int8"}, "dtype='int8'", "use float32"),
    ],
)
def test_bad_arguments_name_argument_value_and_remedy(arguments, options, named, remedy):
    with pytest.raises(jax_ep.EpUsageError, match=f"(?s){named}.*{remedy}"):
        jax_ep.get_low_latency_rdma_size_hint(*arguments, **options)
