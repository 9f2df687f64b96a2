// What the two directions of one rank's wire share: regions, copies, chance.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <random>
#include <vector>

#include "gpu.h"
#include "segment.h"
#include "settings.h"

namespace loopback_rma {

// Memory that peers may read and write.
struct Region {
  uint32_t number;
  char* base;
  uint64_t bytes;
  bool on_gpu;
  bool never_reset;  // only signals write it, and only through here
  int copies = 0;    // under way
};

// What NCCL polls with test().
struct Request {
  std::atomic<int> state{0};  // a RequestState
};

enum RequestState { kPosted, kComplete, kRefused };

inline uint64_t time_us() {
  using std::chrono::steady_clock;
  const auto since = steady_clock::now().time_since_epoch();
  return static_cast<uint64_t>(
      std::chrono::duration_cast<std::chrono::microseconds>(since).count());
}

struct Wire {
  Settings settings;
  int rank = 0;
  int num_ranks = 0;
  std::vector<Segment> segments;  // of all ranks, by rank; the own one among them
  std::map<uint32_t, std::unique_ptr<Region>> regions;
  std::unique_ptr<Gpu> gpu;
  std::mt19937_64 random;
  std::atomic<bool> failed{false};

  Segment& own() { return segments[static_cast<size_t>(rank)]; }

  Region* find(uint32_t number) {
    const auto found = regions.find(number);
    return found == regions.end() ? nullptr : found->second.get();
  }

  // Now, or up to the delay that was asked for later.
  uint64_t some_time_from(uint64_t now) {
    const auto most = static_cast<uint64_t>(settings.delay_us);
    return most == 0 ? now : now + random() % (most + 1);
  }

  // Puts what may go next into another order.
  template <class Item>
  void maybe_shuffle(std::vector<Item>* items) {
    if (settings.reorder) {
      for (size_t left = items->size(); left > 1; --left) {
        std::swap((*items)[left - 1], (*items)[random() % left]);
      }
    }
  }

  // Starts to copy to or from a region.
  void start(void* to, const void* from, size_t bytes, const Region& region, Lane lane,
             Ticket* ticket) {
    if (!region.on_gpu) {
      std::memcpy(to, from, bytes);
      return;
    }
    gpu->start(to, from, bytes, lane, ticket);
  }

  Progress poll(Ticket* ticket) {
    return ticket->event == nullptr ? Progress::kDone : gpu->poll(ticket);
  }
};

}  // namespace loopback_rma
