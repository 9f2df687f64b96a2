// Copies that use no SM: two streams of the copy engines, driven through the CUDA driver, which is
// opened at run time. So the plugin compiles without CUDA and runs on a machine without a GPU.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

namespace loopback_rma {

enum class Lane { kOut, kIn };  // sources are read in one order, targets written in another
enum class Progress { kPending, kDone, kFailed };

// A copy under way; done at once where no GPU takes part.
struct Ticket {
  void* event = nullptr;
};

class Gpu {
 public:
  // For the CUDA context that is current in this thread. Everything that a copy needs is made now:
  // while a kernel waits for a copy, nothing may be allocated. Throws Refusal.
  explicit Gpu(int num_events);
  ~Gpu();

  Gpu(const Gpu&) = delete;
  Gpu& operator=(const Gpu&) = delete;

  // Page-locks host memory, without which copies would wait for each other. False: it cannot be.
  bool pin(void* data, size_t bytes);

  // For the thread that copies.
  void enter() const;

  // Throws Refusal, also if more copies are under way than there are events.
  void start(void* to, const void* from, size_t bytes, Lane lane, Ticket* ticket);
  Progress poll(Ticket* ticket);

 private:
  void* context_ = nullptr;
  void* streams_[2] = {nullptr, nullptr};
  std::vector<void*> free_events_;
  std::vector<void*> events_;
  std::vector<void*> pinned_;
};

}  // namespace loopback_rma
