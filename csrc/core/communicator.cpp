#include "core/communicator.h"

#include <cstring>

#include "core/checks.h"

namespace ep {

const char* const kHowToGetGin =
    "it needs RDMA adapters with GPUDirect (`ep-dispatcher doctor --nccl` tells what NCCL found; "
    "docs/multi_node.md tells what it needs), or, for tests on one host, the loopback plugin "
    "(docs/loopback_rma.md)";

std::string Communicator::make_id(const NcclLibrary& library) {
  ncclUniqueId id;
  EP_CHECK_NCCL(library, ncclGetUniqueId(&id));
  return std::string(id.internal, sizeof(id.internal));
}

Communicator::Communicator(std::shared_ptr<NcclLibrary> library, const std::string& id, int rank,
                           int size)
    : library_(std::move(library)), rank_(rank), size_(size) {
  ncclUniqueId unique_id;
  if (id.size() != sizeof(unique_id.internal)) {
    throw NativeError("the id of a communicator has " + std::to_string(id.size()) + " bytes, not " +
                      std::to_string(sizeof(unique_id.internal)));
  }
  std::memcpy(unique_id.internal, id.data(), id.size());
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.minCTAs = 1;  // no collective runs here, so NCCL need not set memory aside for many
  config.maxCTAs = 1;
  EP_CHECK_NCCL(*library_, ncclCommInitRankConfig(&comm_, size, unique_id, rank, &config));
}

Communicator::~Communicator() {
  abort();
}

CommunicatorProperties Communicator::properties() const {
  ncclCommProperties_t found = NCCL_COMM_PROPERTIES_INITIALIZER;
  EP_CHECK_NCCL(*library_, ncclCommQueryProperties(handle(), &found));
  return {static_cast<bool>(found.deviceApiSupport), found.nLsaTeams,
          static_cast<int>(found.railedGinType)};
}

ncclComm_t Communicator::handle() const {
  if (comm_ == nullptr) {
    throw NativeError("this communicator was closed");
  }
  return comm_;
}

void Communicator::close() {
  ncclComm_t comm = comm_;
  comm_ = nullptr;
  if (comm != nullptr) {
    EP_CHECK_NCCL(*library_, ncclCommFinalize(comm));
    EP_CHECK_NCCL(*library_, ncclCommDestroy(comm));
  }
}

void Communicator::abort() noexcept {
  if (comm_ != nullptr) {
    library_->ncclCommAbort(comm_);
    comm_ = nullptr;
  }
}

}  // namespace ep
