"""nvcc compiles layout and protocol, the text that the CPU backend uses, in device code too."""

import os
import pathlib
import shutil
import subprocess

import pytest

pytestmark = pytest.mark.no_python

ROOT = pathlib.Path(__file__).resolve().parents[2]
REQUIRE = "JAX_EP_REQUIRE_NVCC"
# What a kernel has no use for: sentences.
HOST_ONLY = {"protocol/error_text.h"}

# Calls that no instruction remains of would prove nothing: every result goes into `out`.
KERNEL = """
namespace jax_ep {

JAX_EP_HD int64_t use_everything(const WindowShape& shape, int32_t* topk, int32_t* counts) {
  const WindowLayout layout = WindowLayout::make(shape);
  const MessageFormat message = shape.message();
  const ControlLayout control{shape.num_ranks};
  const TokenRange range = chunk_tokens(100, shape.tokens_per_epoch, 1);
  RouteFault fault;
  int64_t sum = layout.total_bytes() + region_bytes(shape, kNotifyCounts);
  sum += layout.dispatch_message(1, 2, 3) + layout.dispatch_count(0, 1, 1);
  sum += layout.dispatch_tag(0, 1) + layout.dispatch_flag(1, 1, 1);
  sum += layout.combine_row(0, 1, 1) + layout.combine_scalars(1, 1, 1);
  sum += layout.combine_flag(0, 1, 1) + layout.combine_tag(1, 1) + layout.notify_count(0, 1, 1);
  sum += layout.staged(layout.combine_row(1, 0, 1), 0, 1);
  sum += message.bytes() + message.source_offset() + message.entry_offset(1);
  sum += control.poison() + control.epoch(kDispatchChannel) + control.doorbell(kCombineChannel);
  sum += control.credit(kCombineChannel, 1) + control.total_bytes();
  sum += parity_of(3) + may_write(4, 2) + num_epochs(9, 4) + range.size();
  sum += static_cast<int>(read_arrival(arrival_flag(7, true), 7));
  sum += word_is_of(epoch_word(7, 5), 7) + word_value(epoch_word(7, 5));
  sum += tag_value({OpKind::kDispatch, 1, 2, 3});
  sum += sanitised_expert(topk, 1, shape.num_experts, &fault);
  sum += route_expert(pack_route(3, 4)) + route_index(pack_route(3, 4));
  sum += pack_route(1, 1) != kNoRoute;
  const ExpertSegment segment = place_expert(counts, shape.num_ranks, 9, 5, 4);
  sum += segment.group_size(10) + segment.valid_size(10);
  sum += row_type_bytes(RowType::kBFloat16);
  sum += static_cast<int64_t>(fused_multiply_add(2.0f, 3.0f, 4.0f));
  const ErrorRecord record{ErrorKind::kTimeout, OpKind::kCombine, WaitFor::kRow, 1, 2, 3, 4, 5};
  return sum + record.peer;
}

__global__ void kernel(WindowShape shape, int32_t* topk, int32_t* counts, int64_t* out) {
  *out = use_everything(shape, topk, counts);
}

int64_t on_host(const WindowShape& shape, int32_t* topk, int32_t* counts) {
  return use_everything(shape, topk, counts);
}

}  // namespace jax_ep
"""


def headers() -> list[str]:
    found = [
        str(path.relative_to(ROOT / "ffi"))
        for folder in ("layout", "protocol")
        for path in sorted((ROOT / "ffi" / folder).glob("*.h"))
    ]
    assert len(found) >= 10
    return [name for name in found if name not in HOST_ONLY]


def require_nvcc() -> str:
    nvcc = shutil.which("nvcc")
    if nvcc is None and os.environ.get(REQUIRE) == "1":
        pytest.fail(f"there is no nvcc on PATH, and {REQUIRE}=1")
    if nvcc is None:
        pytest.skip("there is no nvcc on PATH")
    return nvcc


def compile_ptx(folder: pathlib.Path, text: str) -> subprocess.CompletedProcess:
    source = folder / "headers.cu"
    source.write_text(text)
    # PTX is enough: it shows what the device's front end takes, for every architecture, quickly.
    command = [require_nvcc(), "-std=c++17", "-arch=compute_80", "-ptx", "-I", str(ROOT / "ffi")]
    command += ["-Werror", "all-warnings", str(source), "-o", str(folder / "headers.ptx")]
    return subprocess.run(command, capture_output=True, text=True, timeout=240)


def test_nvcc_takes_layout_and_protocol_in_device_code(tmp_path):
    includes = "".join(f'#include "{name}"\n' for name in headers())
    done = compile_ptx(tmp_path, includes + KERNEL)
    assert done.returncode == 0, done.stderr
    ptx = (tmp_path / "headers.ptx").read_text()
    assert ".entry" in ptx
    assert "st.global" in ptx or "st.u64" in ptx


def test_a_function_for_the_host_alone_is_refused(tmp_path):
    """The check above can fail: code that calls what only the host has does not compile."""
    host_only = "int64_t host_only(int64_t value) { return value; }\n"
    text = "#include <cstdint>\n" + host_only
    text += "__global__ void kernel(int64_t* out) { *out = host_only(*out); }\n"
    assert compile_ptx(tmp_path, text).returncode != 0
