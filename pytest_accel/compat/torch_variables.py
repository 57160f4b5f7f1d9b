"""Environment variables of torch, by the time at which they are read.

Ranks are forked from a process that has imported torch. A variable that torch has read by then has no effect in them.
`tests/compat/test_torch_variables.py` compares both tables with what the installed torch reads while it is imported.
"""

from __future__ import annotations

READ_AT_IMPORT = frozenset(
    {
        "PYTORCH_JIT",  # torch/jit/_state.py
        *("PYTORCH_JIT_DISABLE", "PYTORCH_JIT_STATS", "PYTORCH_JIT_TIME"),  # torch/jit/_trace.py
        *("TORCH_LOGS", "TORCH_LOGS_FORMAT", "TORCH_LOGS_OUT", "TORCH_TRACE"),  # torch/_logging/_internal.py
        *("TORCH_COMPILE_DEBUG", "TORCH_FAKE_TENSOR_DEBUG"),  # torch/_logging, torch/_subclasses/fake_tensor.py
        *("TORCH_CUDA_SANITIZER", "TORCH_DEVICE_BACKEND_AUTOLOAD", "TORCH_USE_RTLD_GLOBAL"),  # torch/__init__.py
        "TORCHINDUCTOR_FORCE_DISABLE_CACHES",  # torch/compiler/config.py, by torch/utils/_config_module.py
        *("TORCHDYNAMO_EXTENDED_DEBUG_CPP", "TORCHDYNAMO_TRANSLATION_VALIDATION"),  # torch/fx/experimental/_config.py
        *("TORCH_CPP_LOG_LEVEL", "TORCH_SHOW_CPP_STACKTRACES"),  # c10/util/Logging.cpp, torch/csrc/Exceptions.cpp
        *("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "TORCH_BLAS_PREFER_CUBLASLT"),  # aten/src/ATen/Context.h
        *("TORCH_BLAS_PREFER_HIPBLASLT", "TORCH_LINALG_PREFER_CUSOLVER"),  # aten/src/ATen/Context.h
        *("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"),  # c10/core, c10/cuda
        "TORCH_DISTRIBUTED_DEBUG",  # torch/distributed/__init__.py
        *("OMP_NUM_THREADS", "OMP_DYNAMIC", "OMP_PROC_BIND", "OMP_PLACES", "OMP_WAIT_POLICY"),  # libgomp, env.c
        *("MKL_NUM_THREADS", "MKL_DYNAMIC"),  # MKL, when it is loaded
        *("MKLDNN_VERBOSE", "KINETO_USE_DAEMON"),  # oneDNN, torch/profiler/__init__.py
    }
)
"""Variables that torch, or a library that it loads, reads during the import, and that tests set; with the source.

The variables of allocators are read by builds for these devices only.
"""

_READ_LATER = frozenset(
    {
        "OMP_NUM_THREADS",  # A rank passes it to torch.set_num_threads (`rank.torch_devices.limit_threads`).
        "TORCH_DISTRIBUTED_DEBUG",  # A rank has torch read it once more (`rank.process_group.prepare`).
        *("CUDA_LAUNCH_BLOCKING", "CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_MODULE_LOADING"),  # By the driver, in cuInit.
        "HIP_LAUNCH_BLOCKING",  # By the HIP runtime, when it is initialised.
        "CUBLAS_WORKSPACE_CONFIG",  # When the first handle is made: aten/src/ATen/cuda/CublasHandlePool.cpp
    }
)
_PREFIXES_READ_LATER = (
    "NCCL_",  # When the first communicator is made: NCCL's src/misc/param.cc
    "TORCH_NCCL_",  # When a process group is made: torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp
    "TORCH_FR_",  # With the first collective: torch/csrc/distributed/c10d/FlightRecorder.hpp
    "GLOO_",  # When a process group is made: torch/csrc/distributed/c10d/GlooDeviceFactory.cpp
    # By packages that the fork server never imports (`option_types.UNFORKABLE`).
    *("CUPY_", "JAX_", "TF_", "XLA_PYTHON_CLIENT_"),
)


def is_read_later(name: str) -> bool:
    """Return whether the variable `name` has its effect if it is set after the import of torch.

    Return False for an unknown variable: any package may read it when it is imported.
    """
    return name in _READ_LATER or name.startswith(_PREFIXES_READ_LATER)
