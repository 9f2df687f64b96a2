// Measures one round trip on each rail, and checks its bytes: `ep-dispatcher doctor --nccl`.
#pragma once

#include <cuda_runtime_api.h>

#include "core/gin_handle.h"

namespace ep {

constexpr int kProbeBytes = 4096;  // of each put
constexpr int kProbeSignals = 1;   // for each domain

// Of one pair of domains, as their rank of the lower domain sees it.
struct GinProbeResult {
  uint32_t finished;  // round trips
  uint32_t wrong_words;
  uint64_t total_ns;  // of the finished ones but the first
  uint64_t shortest_ns;
};

struct GinProbeArgs {
  GinHandle net;
  char* window;    // as this rank addresses its own
  int64_t offset;  // kProbeBytes to send from, then as many for each domain
  int32_t rounds;
  uint64_t timeout_ns;      // for each wait
  GinProbeResult* results;  // by domain; pinned or GPU memory
};

// Bytes of the window that a probe of that many domains uses.
constexpr int64_t gin_probe_window_bytes(int64_t num_domains) {
  return (1 + num_domains) * kProbeBytes;
}

cudaError_t launch_gin_probe(const GinProbeArgs& args, cudaStream_t stream);

}  // namespace ep
