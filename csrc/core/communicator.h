// One NCCL communicator of our own per group: it finds out how the ranks are joined and registers
// windows. No collective ever runs on it.
#pragma once

#include <memory>
#include <string>

#include "core/nccl_library.h"

namespace ep {

struct CommunicatorProperties {
  bool device_api;  // kernels may use windows
  int num_domains;  // NVLink domains (LSA teams) that the ranks span
  int rail_gin;     // ncclGinType_t between same-index ranks of the domains
};

// What a user does where domains cannot be joined.
extern const char* const kHowToGetGin;

class Communicator {
 public:
  // The name under which the ranks of a new communicator meet; one rank makes it, all pass it on.
  static std::string make_id(const NcclLibrary& library);

  // Collective; blocks until all ranks are there. Uses the current CUDA device.
  Communicator(std::shared_ptr<NcclLibrary> library, const std::string& id, int rank, int size);
  ~Communicator();

  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  CommunicatorProperties properties() const;
  const NcclLibrary& library() const { return *library_; }
  std::shared_ptr<NcclLibrary> shared_library() const { return library_; }
  ncclComm_t handle() const;
  int rank() const { return rank_; }
  int size() const { return size_; }

  // Collective; a second call does nothing.
  void close();

  // Local: for use after a fault, when a peer may not come any more. Never throws.
  void abort() noexcept;

 private:
  std::shared_ptr<NcclLibrary> library_;
  ncclComm_t comm_ = nullptr;
  int rank_;
  int size_;
};

}  // namespace ep
