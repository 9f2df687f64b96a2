// Python module of the kernels alone, for tests: needs no NCCL. Built by scripts/gpu_kernels.sh.
#include "bindings/kernels.h"

PYBIND11_MODULE(EP_MODULE_NAME, module) {
  ep::bind_kernels(module);
}
