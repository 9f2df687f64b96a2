// The device side of the communicator for ranks in several NVLink domains: GIN contexts, signals
// and counters towards the same-index ranks of the other domains.
#pragma once

#include <memory>

#include "core/arena.h"
#include "core/gin_handle.h"

namespace ep {

struct RailShape {
  int num_contexts;        // at least; fewer are refused
  int signals_per_domain;  // that each other domain may raise here
  int num_counters;        // channels that put
  int queue_depth;         // entries of a queue of GDAKI's; 0 for NCCL's default
};

class Rails {
 public:
  // Collective; after the arena was shared. Throws UnavailableError where NCCL offers no GIN, or too
  // few contexts.
  Rails(std::shared_ptr<Communicator> communicator, const Arena& arena, const RailShape& shape);
  ~Rails();

  Rails(const Rails&) = delete;
  Rails& operator=(const Rails&) = delete;

  const GinHandle& handle() const { return handle_; }

  // Collective, before the arena closes.
  void close();

  // Local: after the communicator was aborted.
  void forget() noexcept;

 private:
  std::shared_ptr<Communicator> communicator_;
  ncclDevComm device_comm_{};
  bool open_ = false;
  void* on_gpu_ = nullptr;  // a copy of device_comm_
  GinHandle handle_{};
};

}  // namespace ep
