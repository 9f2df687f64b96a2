// What a kernel needs to reach the other domains by GIN: a part of kernel arguments. Host-clean.
#pragma once

#include <cstdint>

namespace ep {

// Made by Rails (core/rails.h); GinNet (transport/net_gin.cuh) is the device side.
struct GinHandle {
  const void* device_comm;  // ncclDevComm, in GPU memory
  void* window;             // ncclWindow_t of the arena
  int32_t num_contexts;
  int32_t num_domains;
  int32_t signals_per_domain;  // numbers that each other domain may signal here
  int32_t num_counters;        // channels whose puts are counted
};

}  // namespace ep
