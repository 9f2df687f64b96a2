#include "core/arena.h"

#include <cuda_runtime_api.h>

#include <map>
#include <mutex>

#include "core/checks.h"

namespace ep {
namespace {

std::string why_no_window(const CommunicatorProperties& properties) {
  if (properties.num_domains > 1 && properties.rail_gin == NCCL_GIN_TYPE_NONE) {
    return "the ranks span " + std::to_string(properties.num_domains) +
           " NVLink domains, and NCCL gives no window across domains that it cannot join (GIN): " +
           kHowToGetGin;
  }
  return "NCCL gave no window for the arena: its ranks are not joined by peer-to-peer access, or "
         "NCCL_CUMEM_ENABLE or NCCL_WIN_ENABLE is 0";
}

// Copies that wait for no other stream: a kernel of this rank may be waiting for somebody.
class BesideStream {
 public:
  BesideStream() { EP_CHECK_CUDA(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking)); }
  ~BesideStream() { cudaStreamDestroy(stream_); }
  BesideStream(const BesideStream&) = delete;
  BesideStream& operator=(const BesideStream&) = delete;

  void copy(void* to, const void* from, size_t bytes) {
    EP_CHECK_CUDA(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream_));
  }
  void finish() { EP_CHECK_CUDA(cudaStreamSynchronize(stream_)); }

 private:
  cudaStream_t stream_ = nullptr;
};

}  // namespace

ArenaMemory::ArenaMemory(std::shared_ptr<NcclLibrary> library, int64_t bytes)
    : library_(std::move(library)) {
  const ncclResult_t result = library_->ncclMemAlloc(&data_, static_cast<size_t>(bytes));
  if (result != ncclSuccess || data_ == nullptr) {
    cudaGetLastError();  // not sticky: a later call must not report it again
    throw CapacityError("the GPU could not give " + std::to_string(bytes) +
                        " bytes for the window and the output rows (" +
                        library_->ncclGetErrorString(result) +
                        "); free memory or set output_bytes lower");
  }
}

ArenaMemory::~ArenaMemory() {
  if (data_ != nullptr) {
    library_->ncclMemFree(data_);
  }
}

Arena::Arena(std::shared_ptr<Communicator> communicator, int64_t control_bytes, int64_t heap_bytes)
    : communicator_(std::move(communicator)),
      memory_(std::make_shared<ArenaMemory>(communicator_->shared_library(),
                                            control_bytes + heap_bytes)),
      control_bytes_(control_bytes),
      heap_bytes_(heap_bytes) {
  EP_CHECK_CUDA(cudaMemset(memory_->data(), 0, static_cast<size_t>(control_bytes)));
  EP_CHECK_CUDA(cudaDeviceSynchronize());
}

Arena::~Arena() {
  forget();
}

void Arena::share() {
  const NcclLibrary& nccl = communicator_->library();
  const auto bytes = static_cast<size_t>(control_bytes_ + heap_bytes_);
  EP_CHECK_NCCL(nccl, ncclCommWindowRegister(communicator_->handle(), memory_->data(), bytes,
                                             &window_, NCCL_WIN_DEFAULT));
  if (window_ == nullptr) {  // NCCL reports success here (NVIDIA/nccl issue 1963)
    throw UnavailableError(why_no_window(communicator_->properties()));
  }
  window_bases_.clear();
  for (int rank = 0; rank < communicator_->size(); ++rank) {
    void* mapped = memory_->data();
    if (rank != communicator_->rank()) {
      EP_CHECK_NCCL(nccl, ncclGetPeerDevicePointer(window_, 0, rank, &mapped));
    }
    window_bases_.push_back(reinterpret_cast<uintptr_t>(mapped));
  }
}

uint64_t Arena::read_word(int64_t offset) const {
  uint64_t word = 0;
  BesideStream beside;
  beside.copy(&word, memory_->data() + offset, sizeof(word));
  beside.finish();
  return word;
}

void Arena::write_word(int64_t offset, uint64_t word) const {
  BesideStream beside;
  for (const uintptr_t base : window_bases_) {
    if (base != 0) {
      beside.copy(reinterpret_cast<char*>(base) + offset, &word, sizeof(word));
    }
  }
  beside.finish();
}

void Arena::close() {
  ncclWindow_t window = window_;
  window_ = nullptr;
  window_bases_.clear();
  if (window != nullptr) {
    EP_CHECK_NCCL(communicator_->library(),
                  ncclCommWindowDeregister(communicator_->handle(), window));
  }
}

void Arena::forget() noexcept {
  window_ = nullptr;
  window_bases_.clear();
}

namespace {

// The offer of this thread, if any: torch's allocator functions take no user data.
thread_local SegmentOffer* offer_of_thread = nullptr;

// Heaps that torch holds, by address. Their memory must outlive the last tensor, whatever else
// was closed before.
struct HeldSegments {
  std::mutex mutex;
  std::map<void*, std::shared_ptr<ArenaMemory>> memory;
};

HeldSegments& held_segments() {
  static auto* held = new HeldSegments;  // never destroyed: torch may free after our statics
  return *held;
}

}  // namespace

SegmentOffer::SegmentOffer(const Arena& arena)
    : memory_(arena.memory()),
      heap_(reinterpret_cast<void*>(arena.heap())),
      heap_bytes_(arena.heap_bytes()) {
  offer_of_thread = this;
}

SegmentOffer::~SegmentOffer() {
  offer_of_thread = nullptr;
}

void* SegmentOffer::take(int64_t bytes) {
  if (taken_ || bytes != heap_bytes_) {
    return nullptr;
  }
  taken_ = true;
  HeldSegments& held = held_segments();
  const std::lock_guard<std::mutex> lock(held.mutex);
  held.memory[heap_] = memory_;
  return heap_;
}

}  // namespace ep

// The two functions of torch.cuda.memory.CUDAPluggableAllocator. A refused request makes torch
// raise its out-of-memory error.
extern "C" __attribute__((visibility("default"))) void* ep_segment_alloc(size_t bytes,
                                                                         int /*device*/,
                                                                         cudaStream_t /*stream*/) {
  ep::SegmentOffer* offer = ep::offer_of_thread;
  return offer == nullptr ? nullptr : offer->take(static_cast<int64_t>(bytes));
}

extern "C" __attribute__((visibility("default"))) void ep_segment_free(void* segment,
                                                                       size_t /*bytes*/,
                                                                       int /*device*/,
                                                                       cudaStream_t /*stream*/) {
  std::shared_ptr<ep::ArenaMemory> memory;  // freed after the lock
  ep::HeldSegments& held = ep::held_segments();
  const std::lock_guard<std::mutex> lock(held.mutex);
  const auto found = held.memory.find(segment);
  if (found != held.memory.end()) {
    memory = std::move(found->second);
    held.memory.erase(found);
  }
}
