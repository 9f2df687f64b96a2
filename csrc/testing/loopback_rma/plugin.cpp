// The table that NCCL looks up: translates its calls to those of Collective.
#include <algorithm>
#include <cstring>
#include <mutex>

#include "collective.h"
#include "log.h"

namespace loopback_rma {
namespace {

constexpr int kSpeedMbps = 400000;  // what topology searches are told; nothing here is that fast
constexpr int kMaxReceives = 8;     // so NCCL's queues hold 256 operations a peer
constexpr size_t kMaxBytes = size_t{1} << 30;

// Collectives that are open in this process, for loopback_rma_read and loopback_rma_inject.
struct Registry {
  std::mutex mutex;
  std::vector<std::pair<int32_t, Collective*>> open;
  int32_t next_number = 0;
};

Registry& registry() {
  static auto* only = new Registry;
  return *only;
}

struct Context {
  Collective* collective;
  uint32_t first;
  int count;
};

// Runs a call; what it refuses is logged and becomes NCCL's error.
template <class Call>
Result guarded(Result on_refusal, const Call& call) {
  try {
    call();
    return kSuccess;
  } catch (const Refusal& refusal) {
    warn(refusal.what());
    return on_refusal;
  } catch (const std::exception& error) {
    warn(error.what());
    return kInternalError;
  }
}

// Throws Refusal if the fault can happen in no collective that is open here.
void check_open(const Registry& known, const Fault& fault) {
  std::string never = "no communicator is connected here; LOOPBACK_RMA_FAULT holds from the start";
  for (const auto& [number, collective] : known.open) {
    never = why_never(fault, collective->num_ranks());
    if (never.empty()) {
      return;
    }
  }
  if (fault.kind != FaultKind::kNone) {
    throw Refusal("a fault that can never happen is not armed: " + never);
  }
}

Collective* collective_of(void* pointer) {
  return static_cast<Collective*>(pointer);
}

Result init(void** instance, uint64_t /*communicator*/, Logger log) {
  use_logger(log);
  return guarded(kInvalidUsage, [instance] {
    *instance = new Settings(read_settings());
    info("puts between GPUs go through host memory; for tests only");
  });
}

Result finalize(void* instance) {
  delete static_cast<Settings*>(instance);
  return kSuccess;
}

Result devices(int* num_devices) {
  *num_devices = 1;
  return kSuccess;
}

Result properties(int device, NetProperties* properties) {
  static char name[] = "loopback_rma0";
  *properties = NetProperties{};
  properties->name = name;
  properties->guid = 1;
  properties->pointer_kinds = kHostPointer | kGpuPointer;
  properties->speed_mbps = kSpeedMbps;
  properties->port = 1;
  properties->max_comms = 1 << 16;
  properties->max_receives = kMaxReceives;
  properties->device_type = kProxyDevice;
  properties->virtual_device.num_devices = 1;
  properties->virtual_device.devices[0] = device;
  properties->max_p2p_bytes = kMaxBytes;
  properties->max_collective_bytes = kMaxBytes;
  properties->max_multi_request = 1;
  properties->rail_id = kUndefinedRail;
  properties->plane_id = kUndefinedRail;
  return kSuccess;
}

Result listen(void* /*instance*/, int /*device*/, void* handle, void** listener) {
  static_assert(sizeof(Handle) <= kHandleBytes, "NCCL exchanges this many bytes");
  return guarded(kSystemError, [handle, listener] {
    const Handle made = make_handle();
    std::memcpy(handle, &made, sizeof(made));
    *listener = new Handle(made);
  });
}

Result close_listener(void* listener) {
  delete static_cast<Handle*>(listener);
  return kSuccess;
}

Result connect(void* /*instance*/, void* handles[], int num_ranks, int rank, void* /*listener*/,
               void** collective) {
  return guarded(kSystemError, [=] {
    std::vector<Handle> all(static_cast<size_t>(num_ranks));
    for (size_t peer = 0; peer < all.size(); ++peer) {
      std::memcpy(&all[peer], handles[peer], sizeof(Handle));
    }
    auto made = std::make_unique<Collective>(read_settings(), all, rank);
    Registry& known = registry();
    const std::lock_guard<std::mutex> lock(known.mutex);
    known.open.emplace_back(known.next_number++, made.get());
    *collective = made.release();
  });
}

Result close_collective(void* collective) {
  Registry& known = registry();
  {
    const std::lock_guard<std::mutex> lock(known.mutex);
    const auto is_it = [collective](const auto& entry) { return entry.second == collective; };
    known.open.erase(std::remove_if(known.open.begin(), known.open.end(), is_it), known.open.end());
  }
  return guarded(kInternalError, [collective] { delete collective_of(collective); });
}

Result create_context(void* collective, ContextConfig* config, void** context) {
  return guarded(kInternalError, [=] {
    const uint32_t first = collective_of(collective)->add_contexts(config->num_contexts);
    *context = new Context{collective_of(collective), first, config->num_contexts};
  });
}

Result destroy_context(void* context) {
  return guarded(kInternalError, [context] {
    const std::unique_ptr<Context> owned(static_cast<Context*>(context));
    owned->collective->remove_contexts(owned->first, owned->count);
  });
}

Result register_region(void* collective, void* data, size_t bytes, int kind, uint64_t flags,
                       void** region) {
  return guarded(kSystemError, [=] {
    *region = collective_of(collective)
                  ->add_region(data, bytes, kind == kGpuPointer, (flags & kNeverReset) != 0);
  });
}

// #lizard forgives: NCCL decides how many arguments there are, here and below
Result register_dma_buf(void* collective, void* data, size_t bytes, int kind, uint64_t /*offset*/,
                        int /*file*/, uint64_t flags, void** region) {
  // #lizard forgives
  return register_region(collective, data, bytes, kind, flags, region);
}

Result deregister_region(void* collective, void* region) {
  return guarded(kInternalError,
                 [=] { collective_of(collective)->remove_region(static_cast<Region*>(region)); });
}

uint32_t number_of(const Context& context, int index) {
  if (index < 0 || index >= context.count) {
    throw Refusal("context " + std::to_string(index) + " of " + std::to_string(context.count));
  }
  return context.first + static_cast<uint32_t>(index);
}

Result put_signal(void* context, int index, uint64_t source_offset, void* source, size_t bytes,
                  uint64_t target_offset, void* target, uint32_t rank, uint64_t signal_offset,
                  void* signal_region, uint64_t value, uint32_t operation, bool strong,
                  void** request) {
  // #lizard forgives
  return guarded(kInvalidArgument, [=] {
    const Context& used = *static_cast<Context*>(context);
    PutOrder order{};
    order.context = number_of(used, index);
    order.peer = rank;
    order.source = static_cast<Region*>(source);
    order.source_offset = source_offset;
    order.bytes = target == nullptr ? 0 : bytes;
    order.target = static_cast<Region*>(target);
    order.target_offset = target_offset;
    order.signal = static_cast<Region*>(signal_region);
    order.signal_offset = signal_offset;
    order.signal_value = operation == kSignalIncrement ? 1 : value;
    order.strong = strong;
    *request = used.collective->put(order);
  });
}

Result put(void* context, int index, uint64_t source_offset, void* source, size_t bytes,
           uint64_t target_offset, void* target, uint32_t rank, void** request) {
  // #lizard forgives
  return put_signal(context, index, source_offset, source, bytes, target_offset, target, rank, 0,
                    nullptr, 0, kSignalAdd, false, request);
}

Result get(void* context, int index, uint64_t remote_offset, void* remote, size_t bytes,
           uint64_t local_offset, void* local, uint32_t rank, void** request) {
  // #lizard forgives
  return guarded(kInvalidArgument, [=] {
    const Context& used = *static_cast<Context*>(context);
    const GetOrder order{number_of(used, index),
                         rank,
                         static_cast<Region*>(remote),
                         remote_offset,
                         bytes,
                         static_cast<Region*>(local),
                         local_offset};
    *request = used.collective->get(order);
  });
}

// What was got is visible when its request is complete.
Result flush(void* context, int /*index*/, void* /*region*/, uint32_t rank, void** request) {
  return guarded(kInvalidArgument, [=] {
    static_cast<Context*>(context)->collective->flush(rank);
    *request = nullptr;
  });
}

Result test(void* collective, void* request, int* done) {
  if (request == nullptr) {
    *done = 1;
    return kSuccess;
  }
  return guarded(kRemoteError, [=] {
    *done = collective_of(collective)->test(static_cast<Request*>(request)) ? 1 : 0;
  });
}

Result query_error(void* context, bool* failed) {
  *failed = static_cast<Context*>(context)->collective->failed();
  return kSuccess;
}

}  // namespace
}  // namespace loopback_rma

extern "C" {

__attribute__((visibility("default"))) loopback_rma::RmaPlugin ncclRmaPlugin_v14 = {
    "LoopbackRma",
    loopback_rma::init,
    loopback_rma::devices,
    loopback_rma::properties,
    loopback_rma::listen,
    loopback_rma::connect,
    loopback_rma::create_context,
    loopback_rma::register_region,
    loopback_rma::register_dma_buf,
    loopback_rma::deregister_region,
    loopback_rma::destroy_context,
    loopback_rma::close_collective,
    loopback_rma::close_listener,
    loopback_rma::put,
    loopback_rma::put_signal,
    loopback_rma::get,
    loopback_rma::flush,
    loopback_rma::test,
    nullptr,
    loopback_rma::query_error,
    loopback_rma::finalize,
};

__attribute__((visibility("default"))) int loopback_rma_read(LoopbackRmaRow* rows, int capacity) {
  loopback_rma::Registry& known = loopback_rma::registry();
  const std::lock_guard<std::mutex> lock(known.mutex);
  int found = 0;
  for (const auto& [number, collective] : known.open) {
    for (const LoopbackRmaRow& row : collective->rows(number)) {
      if (found < capacity) {
        rows[found] = row;
      }
      ++found;
    }
  }
  return found;
}

__attribute__((visibility("default"))) int loopback_rma_inject(const char* text) {
  return loopback_rma::guarded(loopback_rma::kInvalidArgument,
                               [text] {
                                 const loopback_rma::Fault fault = loopback_rma::parse_fault(text);
                                 loopback_rma::Registry& known = loopback_rma::registry();
                                 const std::lock_guard<std::mutex> lock(known.mutex);
                                 loopback_rma::check_open(known, fault);
                                 for (const auto& [number, collective] : known.open) {
                                   collective->arm(fault);
                                 }
                               }) == loopback_rma::kSuccess
             ? 0
             : -1;
}

}  // extern "C"
