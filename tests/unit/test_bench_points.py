"""The benchmark's table, floors, results and picture, and the choice of a platform."""

import argparse
import dataclasses
import json
import math
import subprocess
import sys
import time

import cases
import numpy as np
import pytest
from test_bench import BENCHMARKS

# After test_bench, which says where to look for it.
from ep_bench import environment, floor, measure, picture, plan  # isort: skip
from ep_bench import platforms, points, report, timing, workload  # isort: skip
from ep_bench.systems import OPS, SYSTEMS  # isort: skip

H200 = floor.RATES["NVIDIA H200"]
PREFILL = cases.Case(name="prefill", T=4096, H=7168, K=8, E=256, R=2, dtype="bfloat16")


def sizes_of(case: cases.Case, rng: np.random.Generator) -> workload.Sizes:
    """Of the case's routing; the rows themselves are not drawn."""
    return workload.make(dataclasses.replace(case, H=8), rng).sizes


def test_floors_are_those_measured_by_hand(rng):
    """158 us of wire, 123 and 150 us of memory: the figures on which the targets stand."""
    sizes = dataclasses.replace(sizes_of(PREFILL, rng), H=PREFILL.H)
    row_bytes = PREFILL.H * 2
    assert 1e6 * sizes.wire_rows * row_bytes / H200.link == pytest.approx(158, rel=0.01)
    for phase, us in (("dispatch", 123), ("combine", 150)):
        memory_us = 1e6 * floor.memory_rows(phase, sizes) * row_bytes / H200.memory
        assert memory_us == pytest.approx(us, rel=0.02)
    for op, us in (("dispatch", 158), ("combine", 158), ("roundtrip", 316)):
        assert floor.floor_us(op, sizes, 2, H200) == pytest.approx(us, rel=0.01)
    # Its third phase is bound by memory: g and y are read, y's cotangent is written.
    grad_us = 1e6 * (4096 + 2 * 32768) * row_bytes / H200.memory
    assert floor.floor_us("fwd_bwd", sizes, 2, H200) == pytest.approx(3 * 158 + grad_us, rel=0.01)


def test_one_rank_has_no_wire(rng):
    sizes = sizes_of(dataclasses.replace(PREFILL, T=64, R=1), rng)
    assert sizes.wire_rows == 0
    assert sizes.rows == 64 * 8
    expected = 1e6 * (64 + 64 * 8) * 8 * 2 / H200.memory
    assert floor.floor_us("dispatch", sizes, 2, H200) == pytest.approx(expected)


def test_wire_rows_are_counted_from_the_routing():
    """Three ranks of two experts; each token and each remote rank once, the busiest direction."""
    topk_idx = [[[0, 1], [2, 3]], [[0, 2], [0, 1]], [[0, 4], [1, 5]]]  # [rank, token, k]
    case = cases.Case(name="three", T=2, H=8, K=2, E=6, R=3)
    sizes = workload._sizes(case, np.reshape(topk_idx, (6, 2)))
    # Rank 0 sends one message to rank 1; rank 1 two and rank 2 two to rank 0.
    assert sizes.wire_rows == 4
    assert sizes.messages == 8  # 5 of them, its own included, rounded up
    assert sizes.rows == 7
    assert sizes.fanout == 2
    assert SYSTEMS["all_gather"].wire_rows(sizes) == 4
    assert SYSTEMS["padded_all_to_all"].wire_rows(sizes) == 2 * sizes.slots


def test_the_table_has_what_counts():
    names = [point.name for point in points.DEFAULT]
    assert len(names) == len(set(names)) <= 46
    by_name = dict(zip(names, points.DEFAULT, strict=True))
    for num_sms in (24, 48, 64):
        assert {"dispatch", "combine"} <= set(by_name[f"T4096-H7168-K8-{num_sms}sm"].ops)
    assert by_name["T4096-H7168-K8-64sm"].ops == OPS
    for num_sms in (24, 64):
        assert "native_unexpanded" in by_name[f"T4096-H7168-K8-{num_sms}sm"].systems
    assert {"dispatch", "combine"} <= set(by_name["T1024-H7168-K8-64sm"].ops)
    for values, field in (
        (points.TOKENS, "T"),
        (points.HIDDEN, "H"),
        (points.EXPERTS_PER_TOKEN, "K"),
        ((*points.NUM_SMS, None), "num_sms"),
    ):
        decode = (points.LOW_LATENCY, points.HALVES)
        table = [point for point in points.DEFAULT if point.systems not in decode]
        assert {getattr(point, field) for point in table} == set(values)
    for systems in decode:
        shapes = {(p.T, p.num_sms) for p in points.DEFAULT if p.systems == systems}
        assert {(128, None), (8, None)} <= shapes
    measured = {system for point in points.DEFAULT for system in point.systems}
    groups = (points.XLA, points.RAGGED, points.BOTH_NATIVE, points.NOTIFIED, *decode)
    assert {system for group in groups for system in group} == measured
    assert by_name["T4096-H7168-K8-notified"].ops == points.NOTIFY
    shapes = {(point.T, point.H, point.K, point.num_sms) for point in points.default(2, full=True)}
    assert len(shapes) == 4 * 3 * 3 * 6
    assert all(point.T >= 1024 for point in points.default(1))


def test_points_are_chosen_by_name_system_and_op():
    chosen = points.choose(points.DEFAULT, ["T4096-*-64sm", "*ragged"], ["native"], ["combine"])
    assert {point.T for point in chosen} == {4096}
    assert {(point.systems, point.ops) for point in chosen} == {(("native",), ("combine",))}
    with pytest.raises(ValueError, match="no point is left"):
        points.choose(points.DEFAULT, ["T4097*"])
    known = points.known(points.DEFAULT, {"native"})
    assert {point.systems for point in known} == {("native",), ()}
    with_peer = points.with_peer(points.DEFAULT, "other")
    for before, after in zip(points.DEFAULT, with_peer, strict=True):
        beside_ours = "native" in before.systems
        assert after.systems == before.systems + (("other",) if beside_ours else ())


def records(T, us, system="native", op="dispatch", num_sms=64, **changes):
    return {
        "op": op,
        "system": system,
        "T": T,
        "H": 7168,
        "K": 8,
        "E": 256,
        "R": 2,
        "dtype": "bfloat16",
        "num_sms": num_sms,
        "us": us,
        "wire_gbps": None,
        "floor_fraction": None,
        **changes,
    }


ENVIRONMENT = {
    "device": "NVIDIA H200 x2",
    "platform": "gpu",
    "driver": "580.1",
    "cuda": "13.0",
    "jax": "0.11.2",
    "commit": "abc",
    "processes": 1,
    "seed": 3,
}


def test_results_of_gpus_are_named_shown_and_drawn(tmp_path, capsys):
    found = [
        records(T, us * (1 + (op == "combine")), system, op, num_sms)
        for op in ("dispatch", "combine", "fwd_bwd")
        for T in (1024, 4096)
        for us, system, num_sms in (
            (T / 20, "native", 64),
            (T / 10, "native", 24),
            (T / 5, "all_gather", None),
            (T / 25, "floor", None),
            (-1.0, "drowned_in_noise", None),
        )
    ]
    found.append(records(1024, 7.5, us_low=7.25, us_high=8, H=2048, glue_us=1.25))
    path = report.write_json(tmp_path, ENVIRONMENT, found)
    assert path == tmp_path / "h200-x2.json"
    assert json.loads(path.read_text())["records"] == found
    report.show(ENVIRONMENT, found)
    shown = capsys.readouterr().out
    for text in ("NVIDIA H200 x2", "7.2 - 8.0", "all_gather", "1.2 us for each loop"):
        assert text in shown
    pytest.importorskip("matplotlib")
    drawn = picture.draw(path, ENVIRONMENT, found)
    assert drawn == tmp_path / "h200-x2.png"
    assert drawn.read_bytes().startswith(b"\x89PNG")


def test_a_curve_for_each_system_and_one_for_few_multiprocessors():
    pyplot = pytest.importorskip("matplotlib.pyplot")
    found = [records(T, T / sms, num_sms=sms) for T in (1024, 4096) for sms in (24, 32, 64)]
    found += [records(T, T / 99, "floor", num_sms=None) for T in (1024, 4096)]
    figure, panel = pyplot.subplots()
    picture._draw_op(panel, "dispatch", found)
    curves = {line.get_label(): line for line in panel.get_lines()}
    assert set(curves) == {"native, 24 SMs", "native, 64 SMs", "floor"}
    assert list(curves["native, 24 SMs"].get_ydata()) == [1024 / 24, 4096 / 24]
    assert curves["floor"].get_color() == "black"
    assert [tick.get_text() for tick in panel.get_xticklabels()] == ["1024", "4096"]
    pyplot.close(figure)


def test_files_are_named_by_device_and_ranks():
    assert environment.file_stem("NVIDIA H200 x8") == "h200-x8"
    assert environment.file_stem("NVIDIA GB200 NVL x4") == "gb200-nvl-x4"
    assert environment.file_stem("cpu x2") == "cpu-x2"
    assert environment._cuda("PJRT C API\ncuda 13000") == "13.0"
    assert environment._cuda("cuda 12080") == "12.8"


def test_the_commit_can_be_told(monkeypatch):
    monkeypatch.setattr(environment, "_commit", lambda: "from_git")
    monkeypatch.setenv(environment.COMMIT_VARIABLE, "from_the_variable")
    assert environment.describe(1, 0, "from_the_option")["commit"] == "from_the_option"
    assert environment.describe(1, 0)["commit"] == "from_the_variable"
    monkeypatch.delenv(environment.COMMIT_VARIABLE)
    assert environment.describe(1, 0)["commit"] == "from_git"
    monkeypatch.setattr(environment, "_commit", lambda: None)
    assert environment.describe(1, 0)["commit"] == "unknown"


@pytest.mark.parametrize("built", [False, True])
@pytest.mark.parametrize("num_gpus", [0, 2])
def test_gpus_are_measured_where_they_can_be(built, num_gpus, monkeypatch):
    monkeypatch.setattr(platforms.importlib.util, "find_spec", lambda name: built or None)
    monkeypatch.setattr(platforms, "_count_cuda_devices", lambda: num_gpus)
    can = built and num_gpus > 0
    assert platforms.choose(None) == (("cuda", num_gpus) if can else ("cpu", 0))
    assert platforms.choose("cpu") == ("cpu", 0)
    if can:
        assert platforms.choose("cuda") == ("cuda", num_gpus)
    else:
        reason = "sees no CUDA device" if built else "JAX_EP_CUDA=ON"
        with pytest.raises(ValueError, match=reason):
            platforms.choose("cuda")


def test_default_ranks_divide_the_experts():
    assert platforms.default_ranks("cpu", 0) == (2, 8)
    assert [platforms.default_ranks("cuda", count) for count in (1, 2, 3, 7, 8)] == [
        (1,),
        (2,),
        (2,),
        (4,),
        (8,),
    ]
    for variable in ("NCCL_NVLS_ENABLE", "NVSHMEM_DISABLE_NVLS"):
        assert variable in platforms.variables("cuda", 2)
    assert platforms.variables("cpu", 3)["XLA_FLAGS"].endswith("device_count=3")


def command(*arguments: str) -> subprocess.CompletedProcess:
    whole = [sys.executable, str(BENCHMARKS / "bench_ep.py"), *arguments]
    return subprocess.run(whole, capture_output=True, text=True, timeout=280)


def test_a_spent_budget_leaves_points_out(tmp_path):
    done = command("--ranks", "2", "--platform", "cpu", "--budget", "0", "--shape", "16,32,2,4")
    assert done.returncode == 0, done.stderr
    assert "nothing was measured" in done.stdout
    assert "left out 1 points: T16-H32-K2-" in done.stdout


def test_one_rank_is_compared_with_argsort(tmp_path):
    done = command(
        *("--ranks", "1", "--platform", "cpu", "--quick", "--shape", "64,32,2,4"),
        *("--json", str(tmp_path)),
    )
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "cpu-x1.json").read_text())["records"]
    assert {(record["op"], record["system"]) for record in found} == {
        (op, system) for op in OPS for system in ("native", "argsort")
    }
    for record in found:
        assert record["wire_bytes"] == 0
        assert record["floor_fraction"] is None
        assert math.isfinite(record["us"])


def test_what_cannot_be_measured_is_refused():
    assert (
        "are for GPUs only"
        in command(*("--platform", "cpu", "--systems", "ragged_all_to_all", "--ranks", "2")).stderr
    )
    assert (
        "are not known"
        in command(*("--platform", "cpu", "--systems", "nonsense", "--ranks", "2")).stderr
    )
    listed = command("--list").stdout.splitlines()
    assert len(listed) == len(points.DEFAULT)
    assert listed[0].startswith(points.DEFAULT[0].name)


def options_of(**changes) -> argparse.Namespace:
    """As the command line gives them to the process that measures two GPUs."""
    options = {
        "platform": "cuda",
        "worker": 2,
        "seed": 5,
        "budget": 300.0,
        "processes": 1,
        "full": False,
        "quick": False,
        "chain": None,
        "dtype": None,
        "peer": [],
        **dict.fromkeys(("shape", "points", "systems", "ops", "num_sms")),
    }
    return argparse.Namespace(**options | changes)


def test_the_plan_for_gpus():
    chosen, settings = plan.make(options_of(), time.monotonic() - 20)
    assert [point.name for point in chosen] == [point.name for point in points.DEFAULT]
    assert (settings.dtype, settings.style) == ("bfloat16", "data")
    assert settings.budget_s == pytest.approx(280, abs=5)
    short, long = settings.lengths(SYSTEMS["native"], 4096)
    assert 5 < short < long  # XLA records graphs of five calls or more
    assert settings.limits.warm_ups >= 4
    shapes, _ = plan.make(options_of(shape=[(64, 32, 2, 4)], num_sms=[8, 16]), 0)
    ours = [point.num_sms for point in shapes if "native" in point.systems]
    others = [point.num_sms for point in shapes if "native" not in point.systems]
    assert (ours, others) == ([8, 16], [None, None])
    one_rank, _ = plan.make(options_of(worker=1, points=["T4096-H2048-*"]), 0)
    assert [point.systems for point in one_rank] == [("native", "argsort")]


def test_the_plan_for_gpus_runs_on_cpus(monkeypatch):
    """Small points, on CPU devices: what records say, and floors beside them."""
    small = {"T": 24, "H": 32, "K": 2, "E": 8}
    table = (
        points.Point(**small, num_sms=24, systems=points.BOTH_NATIVE),
        points.Point(**small, systems=points.XLA),
        points.Point(**small, num_sms=24, systems=points.NOTIFIED, ops=points.NOTIFY),
    )
    monkeypatch.setattr(points, "DEFAULT", table)
    chosen, settings = plan.make(options_of(), 0)
    settings = dataclasses.replace(
        settings,
        lengths=lambda system, T: (1, 3),
        limits=timing.Limits(2, 2, 0.0, warm_ups=1),
        rates=H200,
        budget_s=None,
    )
    told = list(measure.measure(plan.make_mesh(2), chosen, settings))
    assert [said for said in told if "record" not in said] == []
    found = [said["record"] for said in told]
    ours = [(op, system) for op, system in wanted() if system in SYSTEMS or system == "floor"]
    assert sorted((record["op"], record["system"]) for record in found) == sorted(ours)
    floors = {record["op"]: record["us"] for record in found if record["system"] == "floor"}
    for record in found:
        assert record["dtype"] == "bfloat16"
        is_ours = record["system"].startswith("native")
        assert record["num_sms"] == (24 if is_ours else None)
        if record["system"] == "floor":
            continue
        if record["op"] == "notify":  # sends no row
            assert (record["wire_bytes"], record["floor_fraction"]) == (0, None)
            continue
        assert record["row_copies"] == 0 or not is_ours
        if is_ours and record["op"] == "dispatch":
            assert record["glue_us"] == 0.0
        if record["us"] > 1:
            exact = record["wire_bytes"] / record["us"] / 1e3
            assert record["wire_gbps"] == pytest.approx(exact, abs=0.1, rel=0.1)
            # Rounded to tenths of a microsecond, which is much of a floor so small.
            fraction = floors[record["op"]] / record["us"]
            assert record["floor_fraction"] == pytest.approx(fraction, abs=0.06)


def wanted() -> list[tuple[str, str]]:
    systems = ("native", *points.XLA, "floor")
    one_way = [(op, system) for op in points.ONE_WAY for system in systems]
    notified = [("dispatch", "native"), ("dispatch", "native_notified")]
    return [*one_way, ("dispatch", "native_unexpanded"), *notified, ("notify", "native_notified")]


def test_too_many_ranks_are_refused():
    with pytest.raises(ValueError, match="--ranks 99: JAX sees 8 devices"):
        plan.make_mesh(99)
