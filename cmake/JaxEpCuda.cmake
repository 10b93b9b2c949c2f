# The CUDA backend: module _ffi_cuda, where there is a CUDA compiler or one is demanded.
#
#   JAX_EP_CUDA                AUTO (where nvcc is found), ON or OFF
#   JAX_EP_CUDA_ARCHITECTURES  as CMAKE_CUDA_ARCHITECTURES; "native" builds for the GPUs at hand

set(JAX_EP_CUDA AUTO CACHE STRING "Build the CUDA backend: AUTO, ON or OFF")
set_property(CACHE JAX_EP_CUDA PROPERTY STRINGS AUTO ON OFF)
set(JAX_EP_CUDA_ARCHITECTURES "80;90a;100" CACHE STRING "GPU architectures to build kernels for")

# CUDA is wanted where it is found, or was demanded and is missing.
function(jax_ep_without_cuda reason)
  if(JAX_EP_CUDA STREQUAL "AUTO")
    message(STATUS "jax_ep: ${reason}; building the CPU backend alone. On GPUs, jax_ep will use its "
                   "reference backend.")
  else()
    message(FATAL_ERROR "JAX_EP_CUDA=${JAX_EP_CUDA}, but ${reason}. Put nvcc of CUDA 12.8 or newer on "
                        "the PATH (or name it in CUDACXX), or configure with JAX_EP_CUDA=OFF.")
  endif()
endfunction()

if(NOT JAX_EP_CUDA STREQUAL "AUTO" AND NOT JAX_EP_CUDA)
  message(STATUS "jax_ep: JAX_EP_CUDA=${JAX_EP_CUDA}; building the CPU backend alone")
  return()
endif()

include(CheckLanguage)
if(NOT CMAKE_CUDA_COMPILER AND NOT DEFINED ENV{CUDACXX})
  find_program(JAX_EP_NVCC nvcc HINTS ENV CUDA_HOME ENV CUDA_PATH PATHS /usr/local/cuda
               PATH_SUFFIXES bin)
  if(JAX_EP_NVCC)
    set(CMAKE_CUDA_COMPILER "${JAX_EP_NVCC}")
  endif()
endif()
check_language(CUDA)
if(NOT CMAKE_CUDA_COMPILER)
  jax_ep_without_cuda("no working nvcc was found")
  return()
endif()
set(CMAKE_CUDA_ARCHITECTURES "${JAX_EP_CUDA_ARCHITECTURES}")
set(CMAKE_CUDA_STANDARD 17)
set(CMAKE_CUDA_STANDARD_REQUIRED ON)
set(CMAKE_CUDA_VISIBILITY_PRESET hidden)
enable_language(CUDA)
if(CMAKE_CUDA_COMPILER_VERSION VERSION_LESS 12.8)
  jax_ep_without_cuda("nvcc ${CMAKE_CUDA_COMPILER_VERSION} is older than 12.8")
  return()
endif()
find_package(CUDAToolkit REQUIRED)

# What all modules of GPUs are made of: no Python and no XLA. Position-independent objects, not a
# library: the modules bring the kernels that these need.
add_library(jax_ep_cuda_host OBJECT
  ffi/cuda/cuda_buffer.cc
  ffi/cuda/cuda_group.cc
  ffi/cuda/cuda_rank.cc
  ffi/cuda/float8_rows.cu
  ffi/cuda/scratch.cu
  ffi/protocol/error_text.cc
  ffi/transport/cuda_counters.cc
  ffi/transport/cuda_ipc.cc
  ffi/transport/cuda_memory.cc
  ffi/transport/cuda_window.cc
  ffi/transport/notice_board.cc)
add_library(jax_ep_cuda STATIC
  ffi/cuda/combine.cu
  ffi/cuda/combine_grad.cu
  ffi/cuda/dispatch.cu
  ffi/cuda/ll_combine.cu
  ffi/cuda/ll_combine_grad.cu
  ffi/cuda/ll_dispatch.cu
  ffi/cuda/ll_window.cc
  ffi/cuda/notify.cu
  $<TARGET_OBJECTS:jax_ep_cuda_host>)
foreach(target jax_ep_cuda_host jax_ep_cuda)
  target_include_directories(${target} PUBLIC ffi)
  # The runtime is linked in: it opens the driver when it is first used, and shares each GPU's
  # context with the runtime that XLA brings.
  target_link_libraries(${target} PUBLIC CUDA::cudart_static Threads::Threads)
  # Sums round as they do on CPU: every fused multiply-add is one that the source asks for.
  target_compile_options(${target} PRIVATE
    $<$<COMPILE_LANGUAGE:CUDA>:-fmad=false>
    $<$<COMPILE_LANGUAGE:CXX>:-Wall;-Wextra;-fno-math-errno;-ffp-contract=off>)
endforeach()

# Handlers of XLA that modules of GPUs share.
add_library(jax_ep_cuda_handlers OBJECT
  ffi/handlers/call.cc
  ffi/handlers/cuda_call.cc
  ffi/handlers/cuda_handlers.cc
  ffi/handlers/cuda_low_latency.cc
  ffi/handlers/low_latency_operands.cc
  ffi/handlers/notify_operands.cc
  ffi/handlers/operands.cc
  ffi/handlers/shapes.cc)
target_include_directories(jax_ep_cuda_handlers PRIVATE ffi)
target_include_directories(jax_ep_cuda_handlers SYSTEM PRIVATE "${XLA_FFI_INCLUDE_DIR}"
                           ${CUDAToolkit_INCLUDE_DIRS})
target_compile_options(jax_ep_cuda_handlers PRIVATE -Wall -Wextra)

nanobind_add_module(_ffi_cuda NB_STATIC STABLE_ABI
  ffi/cuda_module.cc
  $<TARGET_OBJECTS:jax_ep_cuda_handlers>)
target_include_directories(_ffi_cuda SYSTEM PRIVATE "${XLA_FFI_INCLUDE_DIR}")
target_compile_options(_ffi_cuda PRIVATE -Wall -Wextra)
# What is linked in stays our own, whatever libraries of the same names Python has loaded.
target_link_options(_ffi_cuda PRIVATE LINKER:--exclude-libs,ALL)
target_link_libraries(_ffi_cuda PRIVATE jax_ep_cuda)
install(TARGETS _ffi_cuda LIBRARY DESTINATION jax_ep)
message(STATUS "jax_ep: building the CUDA backend for ${JAX_EP_CUDA_ARCHITECTURES} with nvcc "
               "${CMAKE_CUDA_COMPILER_VERSION}")

include(cmake/JaxEpNvshmem.cmake)
