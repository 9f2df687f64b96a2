// What NCCL and an RMA plugin agree on, version 14 (NCCL 2.30.5 and later look for the symbol
// ncclRmaPlugin_v14). Own declarations: only order, size and meaning of the members are NCCL's.
#pragma once

#include <cstddef>
#include <cstdint>

namespace loopback_rma {

// Values of ncclResult_t.
enum Result : int {
  kSuccess = 0,
  kCudaError = 1,
  kSystemError = 2,
  kInternalError = 3,
  kInvalidArgument = 4,
  kInvalidUsage = 5,
  kRemoteError = 6,
};

enum PointerKind : int { kHostPointer = 1, kGpuPointer = 2 };  // bits, also a region's type
enum SignalOperation : uint32_t { kSignalIncrement = 1, kSignalAdd = 2 };
enum RegionFlag : uint64_t { kForceStrongOrder = 1, kNeverReset = 2 };

constexpr int kProxyDevice = 2;        // the device side talks to a CPU thread of NCCL's
constexpr size_t kHandleBytes = 128;   // most that listen may write
constexpr int kUndefinedRail = -1;     // of railId and planeId
constexpr int kLogWarn = 2;            // of Logger
constexpr int kLogInfo = 3;            // of Logger
constexpr unsigned long kLogNet = 16;  // subsystem of Logger

using Logger = void (*)(int level, unsigned long subsystems, const char* file, int line,
                        const char* format, ...);

struct VirtualDevice {
  int num_devices;
  int devices[8];
};

struct NetProperties {
  char* name;
  char* pci_path;  // nullptr: NCCL places it beside the first CPU
  uint64_t guid;
  int pointer_kinds;
  int registration_is_global;
  int force_flush;
  int speed_mbps;
  int port;
  float latency_us;
  int max_comms;
  int max_receives;  // NCCL's queues hold 32 times as many; a power of two
  int device_type;
  int device_version;
  VirtualDevice virtual_device;
  size_t max_p2p_bytes;
  size_t max_collective_bytes;
  int max_multi_request;
  int16_t rail_id;
  int16_t plane_id;
};
static_assert(sizeof(NetProperties) == 128, "NCCL passes 128 bytes");

struct ContextConfig {
  int num_contexts;
  int traffic_class;
  int rank_stride;
};

// One collective is one communicator's ranks (or, where NCCL connects rails only, one rail's).
struct RmaPlugin {
  const char* name;
  Result (*init)(void** instance, uint64_t communicator, Logger log);
  Result (*devices)(int* num_devices);
  Result (*properties)(int device, NetProperties* properties);
  Result (*listen)(void* instance, int device, void* handle, void** listener);
  Result (*connect)(void* instance, void* handles[], int num_ranks, int rank, void* listener,
                    void** collective);
  Result (*create_context)(void* collective, ContextConfig* config, void** context);
  Result (*register_region)(void* collective, void* data, size_t bytes, int kind, uint64_t flags,
                            void** region);
  Result (*register_dma_buf)(void* collective, void* data, size_t bytes, int kind, uint64_t offset,
                             int file, uint64_t flags, void** region);
  Result (*deregister_region)(void* collective, void* region);
  Result (*destroy_context)(void* context);
  Result (*close_collective)(void* collective);
  Result (*close_listener)(void* listener);
  Result (*put)(void* context, int index, uint64_t source_offset, void* source, size_t bytes,
                uint64_t target_offset, void* target, uint32_t rank, void** request);
  Result (*put_signal)(void* context, int index, uint64_t source_offset, void* source, size_t bytes,
                       uint64_t target_offset, void* target, uint32_t rank, uint64_t signal_offset,
                       void* signal_region, uint64_t value, uint32_t operation, bool strong,
                       void** request);
  Result (*get)(void* context, int index, uint64_t remote_offset, void* remote, size_t bytes,
                uint64_t local_offset, void* local, uint32_t rank, void** request);
  Result (*flush)(void* context, int index, void* region, uint32_t rank, void** request);
  Result (*test)(void* collective, void* request, int* done);
  Result (*progress)(void* context);  // optional
  Result (*query_error)(void* context, bool* failed);
  Result (*finalize)(void* instance);
};
static_assert(sizeof(RmaPlugin) == 168, "a name and twenty functions");

}  // namespace loopback_rma
