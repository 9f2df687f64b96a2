// Net: what carries bytes between the ranks of a rail. A concept that three classes meet, chosen at
// compile time; none is virtual:
//   put(domain, target_offset, source_offset, bytes, channel)
//       copies from our window to that of the rail's rank in `domain`. A whole warp calls, at most
//       one warp uses a channel at a time; only submits.
//   signal(domain, number, channel)
//       adds 1 to that rank's signal `number` from us. One thread calls. Seen there only after all
//       earlier puts of (channel, domain) are (N1).
//   read_signal(domain, number, channel)
//       acquires; signals from `domain` so far, which it posted over `channel` (N3).
//   sent(channel)
//       puts of the channel so far whose sources have been read (N4): how many, not which, as they
//       may pass each other.
//   tell(domain, offset)
//       stores our word at `offset` to the same place there; ordered with nothing. One thread.
// Signals and counters only grow: a CUDA graph can replay.
#pragma once

#include "core/rail_layout.h"
#include "kernels/mutation.cuh"

namespace ep {

__device__ __forceinline__ void add_release_sys(uint64_t* word, uint64_t value) {
  asm volatile("red.release.sys.global.add.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
}

// Copies as a warp; bytes a multiple of 4, both ends 16-byte aligned. Several loads of a lane go out
// before the first store, which might write what they read, so that the compiler would not move them:
// seven make four rounds of a row of 7168 bfloat16, and fit into dispatch's registers.
__device__ inline void copy_as_warp(char* to, const char* from, int64_t bytes) {
  constexpr int kAtOnce = 7;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int64_t vectors = bytes / 16;
  int64_t at = lane;
  for (; at + 32 * (kAtOnce - 1) < vectors; at += 32 * kAtOnce) {
    uint4 held[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      held[i] = __ldcg(reinterpret_cast<const uint4*>(from) + at + 32 * i);
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      reinterpret_cast<uint4*>(to)[at + 32 * i] = held[i];
    }
  }
#pragma unroll 1
  for (; at < vectors; at += 32) {
    reinterpret_cast<uint4*>(to)[at] = __ldcg(reinterpret_cast<const uint4*>(from) + at);
  }
  const int64_t words = bytes % 16 / 4;
  if (lane < words) {
    reinterpret_cast<uint32_t*>(to + 16 * vectors)[lane] =
        __ldcg(reinterpret_cast<const uint32_t*>(from + 16 * vectors) + lane);
  }
}

// Puts and bytes by destination, for tests that count them.
__device__ inline void count_put([[maybe_unused]] const EpRail& rail, [[maybe_unused]] char* own,
                                 [[maybe_unused]] int domain, [[maybe_unused]] int64_t bytes) {
#ifdef EP_TEST_MUTATIONS
  auto* stats = reinterpret_cast<unsigned long long*>(own + rail.layout.stats) + 2 * domain;
  atomicAdd(stats, 1ull);
  atomicAdd(stats + 1, static_cast<unsigned long long>(bytes));
#endif
}

// All domains on one GPU: a put is a copy that is over when it returns.
class LoopNet {
 public:
  static constexpr bool kNeedsWorker = false;

  __device__ LoopNet(const EpContext& context, const EpRail& rail)
      : context_(context), rail_(rail) {}

  __device__ void put(int domain, int64_t target_offset, int64_t source_offset, int64_t bytes,
                      [[maybe_unused]] int channel) const {
    copy_as_warp(base(domain) + target_offset, base(rail_.domain) + source_offset, bytes);
    if (threadIdx.x % 32 == 0) {
      count_put(rail_, base(rail_.domain), domain, bytes);
    }
    __syncwarp();
  }

  __device__ void signal(int domain, int number, [[maybe_unused]] int channel) const {
    fence_sys();
    add_release_sys(signal_word(domain, rail_.domain, number), 1);
  }

  __device__ uint64_t read_signal(int domain, int number, [[maybe_unused]] int channel) const {
    return load_acquire_sys(signal_word(rail_.domain, domain, number));
  }

  __device__ uint64_t sent([[maybe_unused]] int channel) const { return ~0ull; }

  __device__ void tell(int domain, int64_t offset) const {
    const uint64_t word =
        load_relaxed_sys(reinterpret_cast<const uint64_t*>(base(rail_.domain) + offset));
    store_relaxed_sys(reinterpret_cast<uint64_t*>(base(domain) + offset), word);
  }

  __device__ char* base(int domain) const { return static_cast<char*>(rail_.rail_base[domain]); }

  __device__ uint64_t* signal_word(int at_domain, int from_domain, int number) const {
    return reinterpret_cast<uint64_t*>(base(at_domain) + rail_.layout.signals) +
           from_domain * rail_.layout.signals_per_domain + number;
  }

 protected:
  const EpContext& context_;
  const EpRail& rail_;
};

// Waits until `read()` is at least `expected`, as wait_until does for a word.
template <class Read>
__device__ bool wait_for_net(const EpContext& context, Watch* watch, const Read& read,
                             uint64_t expected, WaitingFor who) {
  constexpr uint32_t kPollsPerCheck = 16;
  for (uint32_t polls = 1; read() < expected; ++polls) {
    if (polls % kPollsPerCheck != 0) {
      continue;
    }
    if (must_leave(context, watch)) {
      return false;
    }
    if (time_ns() > watch->deadline_ns) {
      file_fault(context, who, expected, read());
      set_aborted(watch);
      return false;
    }
  }
  return true;
}

}  // namespace ep
