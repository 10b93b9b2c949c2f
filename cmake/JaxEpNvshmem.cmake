# The backend for GPUs of several nodes: module _ffi_nvshmem, the CUDA backend's kernels compiled a
# second time, with NVSHMEM between the ranks. Included where the CUDA backend is built.
#
#   JAX_EP_NVSHMEM  AUTO (where NVSHMEM is found), ON or OFF
#   NVSHMEM_HOME    folder with include/ and lib/; by default the Python wheel nvidia-nvshmem-cu13
#                   or -cu12 that matches nvcc

set(JAX_EP_NVSHMEM AUTO CACHE STRING "Build the backend for GPUs of several nodes: AUTO, ON or OFF")
set_property(CACHE JAX_EP_NVSHMEM PROPERTY STRINGS AUTO ON OFF)
set(NVSHMEM_HOME "$ENV{NVSHMEM_HOME}" CACHE PATH "Where NVSHMEM is installed")

if(NOT JAX_EP_NVSHMEM STREQUAL "AUTO" AND NOT JAX_EP_NVSHMEM)
  message(STATUS "jax_ep: JAX_EP_NVSHMEM=${JAX_EP_NVSHMEM}; GPUs of one host only")
  return()
endif()

string(REGEX MATCH "^[0-9]+" jax_ep_cuda_major "${CMAKE_CUDA_COMPILER_VERSION}")
set(jax_ep_nvshmem_wheel "nvidia-nvshmem-cu${jax_ep_cuda_major}")
set(jax_ep_nvshmem_root "${NVSHMEM_HOME}")
if(NOT jax_ep_nvshmem_root)
  # Wheels for different CUDA versions lie in the same folder: that of another one does not count.
  execute_process(
    COMMAND "${Python_EXECUTABLE}" -c "
import importlib.metadata as metadata, pathlib
files = metadata.distribution('${jax_ep_nvshmem_wheel}').files
header = next(f for f in files if f.name == 'nvshmem.h')
print(pathlib.Path(header.locate()).parents[1])"
    OUTPUT_VARIABLE jax_ep_nvshmem_root OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
endif()
foreach(found JAX_EP_NVSHMEM_INCLUDE JAX_EP_NVSHMEM_DEVICE JAX_EP_NVSHMEM_HOST)
  unset(${found} CACHE)  # a build folder may outlive a wheel
endforeach()
find_path(JAX_EP_NVSHMEM_INCLUDE nvshmemx.h PATHS "${jax_ep_nvshmem_root}/include" NO_DEFAULT_PATH)
find_file(JAX_EP_NVSHMEM_DEVICE libnvshmem_device.a PATHS "${jax_ep_nvshmem_root}/lib"
          NO_DEFAULT_PATH)
find_file(JAX_EP_NVSHMEM_HOST NAMES libnvshmem_host.so.3 libnvshmem_host.so
          PATHS "${jax_ep_nvshmem_root}/lib" NO_DEFAULT_PATH)
if(NOT JAX_EP_NVSHMEM_INCLUDE OR NOT JAX_EP_NVSHMEM_DEVICE OR NOT JAX_EP_NVSHMEM_HOST)
  if(JAX_EP_NVSHMEM STREQUAL "AUTO")
    message(STATUS "jax_ep: NVSHMEM was not found; GPUs of one host only")
    return()
  endif()
  message(FATAL_ERROR "JAX_EP_NVSHMEM=${JAX_EP_NVSHMEM}, but NVSHMEM was not found. Install "
                      "${jax_ep_nvshmem_wheel} for ${Python_EXECUTABLE} (pip install with "
                      "--no-build-isolation), name a folder with include/ and lib/ in NVSHMEM_HOME, "
                      "or configure with JAX_EP_NVSHMEM=OFF.")
endif()

# Device code calls functions of NVSHMEM's, so that it is linked a second time. Functions that are
# called do not know of the kernels' launch bounds: 512 threads have 128 registers each.
add_library(jax_ep_nvshmem STATIC
  ffi/cuda/combine.cu
  ffi/cuda/combine_grad.cu
  ffi/cuda/dispatch.cu
  ffi/cuda/ll_combine.cu
  ffi/cuda/ll_combine_grad.cu
  ffi/cuda/ll_dispatch.cu
  ffi/cuda/ll_window.cc
  ffi/cuda/notify.cu
  ffi/transport/cuda_nvshmem.cu
  $<TARGET_OBJECTS:jax_ep_cuda_host>)
set_target_properties(jax_ep_nvshmem PROPERTIES CUDA_SEPARABLE_COMPILATION ON)
target_compile_definitions(jax_ep_nvshmem PRIVATE JAX_EP_NVSHMEM)
target_include_directories(jax_ep_nvshmem PUBLIC ffi)
target_include_directories(jax_ep_nvshmem SYSTEM PRIVATE "${JAX_EP_NVSHMEM_INCLUDE}")
target_link_libraries(jax_ep_nvshmem PUBLIC CUDA::cudart_static Threads::Threads)
target_compile_options(jax_ep_nvshmem PRIVATE
  $<$<COMPILE_LANGUAGE:CUDA>:-fmad=false;-maxrregcount=128>
  $<$<COMPILE_LANGUAGE:CXX>:-Wall;-Wextra>)

nanobind_add_module(_ffi_nvshmem NB_STATIC STABLE_ABI
  ffi/nvshmem_module.cc
  $<TARGET_OBJECTS:jax_ep_cuda_handlers>)
target_include_directories(_ffi_nvshmem SYSTEM PRIVATE "${XLA_FFI_INCLUDE_DIR}")
target_compile_options(_ffi_nvshmem PRIVATE -Wall -Wextra)
target_link_options(_ffi_nvshmem PRIVATE LINKER:--exclude-libs,ALL)
target_link_libraries(_ffi_nvshmem PRIVATE jax_ep_nvshmem "${JAX_EP_NVSHMEM_DEVICE}"
                      "${JAX_EP_NVSHMEM_HOST}")
# The host library is Python's to find (jax_ep/_native.py): no folder of this machine stays in the
# module.
set_target_properties(_ffi_nvshmem PROPERTIES
  CUDA_RESOLVE_DEVICE_SYMBOLS ON LINKER_LANGUAGE CUDA
  BUILD_WITH_INSTALL_RPATH ON INSTALL_RPATH "")
install(TARGETS _ffi_nvshmem LIBRARY DESTINATION jax_ep)
message(STATUS "jax_ep: building the backend for GPUs of several nodes with NVSHMEM in "
               "${jax_ep_nvshmem_root}")
