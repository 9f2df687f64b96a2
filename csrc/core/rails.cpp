#include "core/rails.h"

#include <cuda_runtime_api.h>

#include "core/checks.h"

namespace ep {
namespace {

void refuse_without_gin(const CommunicatorProperties& properties) {
  if (properties.rail_gin == NCCL_GIN_TYPE_NONE) {
    throw UnavailableError("the ranks span " + std::to_string(properties.num_domains) +
                           " NVLink domains, but NCCL can put to no other domain from the GPU "
                           "(GIN): " +
                           kHowToGetGin);
  }
}

// The host asks for as many as its posts need, so that no queue fills (ep_dispatcher/rail_posts.py).
void refuse_fewer_contexts(int given, int wanted) {
  if (given < wanted) {
    throw UnavailableError(
        "NCCL gives " + std::to_string(given) + " GIN contexts, but " + std::to_string(wanted) +
        " are needed, as its queues could fill: use fewer tokens a call or fewer "
        "SMs (num_sms), or take the reference tier");
  }
}

ncclDevCommRequirements requirements(const RailShape& shape, int num_domains) {
  ncclDevCommRequirements wanted = NCCL_DEV_COMM_REQUIREMENTS_INITIALIZER;
  wanted.ginConnectionType = NCCL_GIN_CONNECTION_RAIL;
  wanted.ginContextCount = shape.num_contexts;
  wanted.ginSignalCount = num_domains * shape.signals_per_domain;
  wanted.ginCounterCount = shape.num_counters;
  wanted.ginQueueDepth = shape.queue_depth;
  wanted.ginVaSignalsRequired = false;  // not every adapter has them
  return wanted;
}

}  // namespace

Rails::Rails(std::shared_ptr<Communicator> communicator, const Arena& arena, const RailShape& shape)
    : communicator_(std::move(communicator)) {
  const CommunicatorProperties properties = communicator_->properties();
  refuse_without_gin(properties);
  const NcclLibrary& nccl = communicator_->library();
  const ncclDevCommRequirements wanted = requirements(shape, properties.num_domains);
  EP_CHECK_NCCL(nccl, ncclDevCommCreate(communicator_->handle(), &wanted, &device_comm_));
  open_ = true;
  try {
    refuse_fewer_contexts(static_cast<int>(device_comm_.ginContextCount), shape.num_contexts);
    EP_CHECK_CUDA(cudaMalloc(&on_gpu_, sizeof(device_comm_)));
    EP_CHECK_CUDA(cudaMemcpy(on_gpu_, &device_comm_, sizeof(device_comm_), cudaMemcpyHostToDevice));
  } catch (...) {  // no destructor runs for what was not constructed
    nccl.ncclDevCommDestroy(communicator_->handle(), &device_comm_);
    forget();
    throw;
  }
  handle_ = {on_gpu_,
             arena.window(),
             static_cast<int32_t>(device_comm_.ginContextCount),
             properties.num_domains,
             shape.signals_per_domain,
             shape.num_counters};
}

Rails::~Rails() {
  forget();
}

void Rails::close() {
  if (open_) {
    open_ = false;
    EP_CHECK_NCCL(communicator_->library(),
                  ncclDevCommDestroy(communicator_->handle(), &device_comm_));
  }
  forget();
}

void Rails::forget() noexcept {
  open_ = false;
  if (on_gpu_ != nullptr) {
    cudaFree(on_gpu_);
    on_gpu_ = nullptr;
  }
}

}  // namespace ep
