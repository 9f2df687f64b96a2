#include "core/version.h"

#include <cuda_runtime_api.h>
#include <nccl.h>

#include "core/checks.h"

namespace ep {

static_assert(NCCL_VERSION_CODE >= 23007,
              "the window and property calls need NCCL 2.30.7 or later");

BuildVersions build_versions() {
  return {NCCL_VERSION_CODE, CUDART_VERSION};
}

namespace {

int device_attribute(int device, cudaDeviceAttr attribute) {
  int value = 0;
  EP_CHECK_CUDA(cudaDeviceGetAttribute(&value, attribute, device));
  return value;
}

DeviceInfo describe(int device) {
  cudaDeviceProp properties{};
  EP_CHECK_CUDA(cudaGetDeviceProperties(&properties, device));
  const int major = device_attribute(device, cudaDevAttrComputeCapabilityMajor);
  const int minor = device_attribute(device, cudaDevAttrComputeCapabilityMinor);
  return {device, properties.name, 10 * major + minor,
          device_attribute(device, cudaDevAttrMultiProcessorCount),
          static_cast<long long>(properties.totalGlobalMem)};
}

}  // namespace

DeviceQuery query_devices() {
  DeviceQuery query{};
  if (cudaDriverGetVersion(&query.driver_cuda) != cudaSuccess) {
    query.driver_cuda = 0;
  }
  int num_devices = 0;
  const cudaError_t result = cudaGetDeviceCount(&num_devices);
  if (result != cudaSuccess) {
    query.why_no_gpus = cudaGetErrorString(result);
    cudaGetLastError();  // not sticky: a later call must not report it again
    return query;
  }
  for (int device = 0; device < num_devices; ++device) {
    query.devices.push_back(describe(device));
  }
  return query;
}

std::string nccl_version_text(int code) {
  return std::to_string(code / 10000) + "." + std::to_string(code / 100 % 100) + "." +
         std::to_string(code % 100);
}

}  // namespace ep
