// Launches one rank's kernel, or the kernels of all ranks that share a GPU as one launch.
// Arguments were checked by csrc/api; these functions only decide grid, block and shared memory.
#pragma once

#include <cuda_runtime_api.h>

#include "core/args.h"

namespace ep {

cudaError_t launch_route(const EpRouteArgs* ranks, int num_ranks, cudaStream_t stream);
cudaError_t launch_dispatch(const EpDispatchArgs* ranks, int num_ranks, cudaStream_t stream);
cudaError_t launch_combine(const EpCombineArgs* ranks, int num_ranks, cudaStream_t stream);
cudaError_t launch_gather(const EpCombineArgs* ranks, int num_ranks, cudaStream_t stream);

}  // namespace ep
