// Instances of the rails' plan kernels for nets on one GPU.
#include "core/rail_launch.h"
#include "kernels/rail_plan_launch.cuh"

namespace ep {

cudaError_t launch_rail_exchange(const EpRailPlanArgs* ranks, int num_ranks, cudaStream_t stream) {
  return ranks[0].rail.net == EP_NET_CHAOS
             ? launch_rail_exchange_on<ChaosNet>(ranks, num_ranks, stream)
             : launch_rail_exchange_on<LoopNet>(ranks, num_ranks, stream);
}

// Posts nothing but faults, so LoopNet serves both.
cudaError_t launch_rail_counts(const EpRailPlanArgs* ranks, int num_ranks, cudaStream_t stream) {
  return launch_rail_counts_on<LoopNet>(ranks, num_ranks, stream);
}

}  // namespace ep
