// The memory of one rank that all ranks of its domain can address: the control part of the window
// in front, and behind it the heap from which the output rows are cut. Allocated once, registered
// once.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "core/communicator.h"

namespace ep {

// Memory from ncclMemAlloc; freed when its last owner lets go.
class ArenaMemory {
 public:
  ArenaMemory(std::shared_ptr<NcclLibrary> library, int64_t bytes);
  ~ArenaMemory();

  ArenaMemory(const ArenaMemory&) = delete;
  ArenaMemory& operator=(const ArenaMemory&) = delete;

  char* data() const { return static_cast<char*>(data_); }

 private:
  std::shared_ptr<NcclLibrary> library_;
  void* data_ = nullptr;
};

class Arena {
 public:
  // Local. The control part is zeroed. Throws CapacityError if the GPU has too little memory.
  Arena(std::shared_ptr<Communicator> communicator, int64_t control_bytes, int64_t heap_bytes);
  ~Arena();

  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  // Collective: makes the arena one window and learns where the peers' windows are mapped here.
  void share();

  ncclWindow_t window() const { return window_; }

  // Where the window of each rank of the own domain starts, as this rank addresses it; 0 for the
  // ranks of other domains. The own one is the address that NCCL allocated, so that each byte has
  // one address only in this process's kernels.
  const std::vector<uintptr_t>& window_bases() const { return window_bases_; }

  uintptr_t base() const { return reinterpret_cast<uintptr_t>(memory_->data()); }
  uintptr_t heap() const { return base() + static_cast<uintptr_t>(control_bytes_); }
  int64_t heap_bytes() const { return heap_bytes_; }
  std::shared_ptr<ArenaMemory> memory() const { return memory_; }

  // A word of the control part, as it is now; waits for no kernel.
  uint64_t read_word(int64_t offset) const;

  // Writes a word of the control part of every window that this rank reaches, its own among them;
  // waits for no kernel.
  void write_word(int64_t offset, uint64_t word) const;

  // Collective, before the communicator closes. What torch still holds of the heap stays valid.
  void close();

  // Local: after the communicator was aborted.
  void forget() noexcept;

 private:
  std::shared_ptr<Communicator> communicator_;
  std::shared_ptr<ArenaMemory> memory_;
  int64_t control_bytes_;
  int64_t heap_bytes_;
  ncclWindow_t window_ = nullptr;
  std::vector<uintptr_t> window_bases_;
};

// While it lives, torch's next segment on this thread is the heap of this arena: the pluggable
// allocator below answers requests of exactly that size, and refuses all others.
class SegmentOffer {
 public:
  explicit SegmentOffer(const Arena& arena);
  ~SegmentOffer();

  SegmentOffer(const SegmentOffer&) = delete;
  SegmentOffer& operator=(const SegmentOffer&) = delete;

  bool taken() const { return taken_; }

  // nullptr unless `bytes` is the size of the heap and nobody took it before.
  void* take(int64_t bytes);

 private:
  std::shared_ptr<ArenaMemory> memory_;
  void* heap_;
  int64_t heap_bytes_;
  bool taken_ = false;
};

}  // namespace ep
