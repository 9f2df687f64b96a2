// Kernels and launches of the rails' plan, for any net.
#pragma once

#include "kernels/rail_plan.cuh"

namespace ep {

template <class Net, int kRanks>
__global__ void __launch_bounds__(kRailPlanThreads)
    rail_exchange_kernel(const __grid_constant__ World<EpRailPlanArgs, kRanks> world) {
  extern __shared__ __align__(16) uint32_t shared[];
  __shared__ Watch watch;
  const int blocks = world.rank[0].context.shape.num_channels + kWorkerBlocks<Net>;
  rail_exchange<Net>(world.rank[rank_of_block<kRanks>(blocks)],
                     static_cast<int>(blockIdx.x) % blocks, reinterpret_cast<int32_t*>(shared),
                     &watch);
}

template <class Net, int kRanks>
__global__ void __launch_bounds__(kRailPlanThreads)
    rail_counts_kernel(const __grid_constant__ World<EpRailPlanArgs, kRanks> world) {
  extern __shared__ __align__(16) uint32_t shared[];
  __shared__ Watch watch;
  const int blocks = world.rank[0].context.shape.num_channels;
  rail_counts<Net>(world.rank[rank_of_block<kRanks>(blocks)], static_cast<int>(blockIdx.x) % blocks,
                   shared, &watch);
}

template <class Net>
cudaError_t launch_rail_exchange_on(const EpRailPlanArgs* ranks, int num_ranks,
                                    cudaStream_t stream) {
  const int blocks = ranks[0].context.shape.num_channels + kWorkerBlocks<Net>;
  const LaunchShape shape = {kRailPlanThreads, rail_exchange_shared_bytes(ranks[0].context)};
  return launch_rail(rail_exchange_kernel<Net, 1>, rail_exchange_kernel<Net, EP_WORLD_RANKS>, ranks,
                     num_ranks, blocks, shape, stream);
}

template <class Net>
cudaError_t launch_rail_counts_on(const EpRailPlanArgs* ranks, int num_ranks, cudaStream_t stream) {
  const int blocks = ranks[0].context.shape.num_channels;
  const LaunchShape shape = {kRailPlanThreads, rail_counts_shared_bytes(ranks[0].context)};
  return launch_rail(rail_counts_kernel<Net, 1>, rail_counts_kernel<Net, EP_WORLD_RANKS>, ranks,
                     num_ranks, blocks, shape, stream);
}

}  // namespace ep
