// What this build was compiled with, and what the machine offers. Needs no GPU.
#pragma once

#include <string>
#include <vector>

namespace ep {

struct BuildVersions {
  int nccl;  // as NCCL_VERSION_CODE writes it: 23007 is 2.30.7
  int cuda;  // as CUDART_VERSION writes it: 13000 is 13.0
};

struct DeviceInfo {
  int device;  // CUDA ordinal
  std::string name;
  int compute_capability;  // 10 * major + minor
  int num_sms;
  long long memory_bytes;
};

struct DeviceQuery {
  std::vector<DeviceInfo> devices;
  int driver_cuda;          // newest CUDA that the driver supports, 0 without a driver
  std::string why_no_gpus;  // CUDA's own words; empty where devices were found
};

BuildVersions build_versions();

// Never throws for a machine without a GPU or a driver: that is an answer, not an error.
DeviceQuery query_devices();

// 23007 -> "2.30.7"
std::string nccl_version_text(int code);

}  // namespace ep
