// What kernels and host share beyond the C header: names in this namespace, and the encodings of
// the words that travel between ranks. Host-clean: no CUDA in it.
#ifndef EP_CORE_ARGS_H_
#define EP_CORE_ARGS_H_

#include <cstdint>

#include "api/ep_dispatcher.h"

#ifdef __CUDACC__
#define EP_HOST_DEVICE __host__ __device__
#else
#define EP_HOST_DEVICE
#endif

namespace ep {

// A group of tokens that combine handles source by source: smaller than a ring, so that a home
// rank that waits for one source's chunk never needs more slots than there are.
constexpr int kChunkTokens = EP_CHUNK_TOKENS;

// The epochs and barriers of one rank's own blocks: region `local` of its window, zero at first.
struct LocalControl {
  uint64_t epoch[3];  // launches of each kernel so far, by KernelId
  uint32_t exits[3];  // blocks that have left the current launch
  uint32_t fault_claimed;
  uint64_t bad_slot;                    // of the latest route launch that met one; see route.cuh
  uint64_t grid_flag[EP_MAX_CHANNELS];  // block b has reached grid barrier number ...
};

enum KernelId { kRoute = 0, kDispatch = 1, kCombine = 2 };

// Experts of one rank x ranks: route keeps a table of them in shared memory.
constexpr int kMaxBaseEntries = 16384;

// record_header: a token of the source and the rows that it has here.
constexpr int kRecordRowsBits = 12;
constexpr uint32_t kRecordRowsMask = (1u << kRecordRowsBits) - 1;

// contributor: rank in the low half, index of the record in the high half; the void bit says that
// capacity dropped all rows of the pair: its slot in the ring is passed, its value is not added.
constexpr uint64_t kNoContributor = ~0ull;
constexpr uint64_t kContributorRankMask = 0xffff;
constexpr uint64_t kContributorVoid = 1ull << 31;
constexpr int kContributorRecordShift = 32;

// rows_done: epoch and chunks of this channel that are complete; the last value of a launch has
// all low bits set, so that progress never runs backwards.
constexpr int kProgressBits = 24;
constexpr uint64_t kProgressAll = (1ull << kProgressBits) - 1;

// combine_ready: epoch, and below it whether the rank that entered wants gradients of weights.
constexpr uint64_t kEntryWantsGradients = 1;

EP_HOST_DEVICE constexpr uint64_t entry_word(uint64_t epoch, bool wants_gradients) {
  return epoch << 1 | (wants_gradients ? kEntryWantsGradients : 0);
}

// partial_full and partial_free: epoch and record index plus one.
constexpr int kPartialBits = 24;

// error: the rank that filed a fault, plus one; above it the peer and the phase of its wait.
constexpr int kErrorPartBits = 16;

EP_HOST_DEVICE constexpr uint64_t error_word(int32_t rank, int32_t peer, int32_t phase) {
  return static_cast<uint64_t>(rank + 1) | static_cast<uint64_t>(peer) << kErrorPartBits |
         static_cast<uint64_t>(phase) << (2 * kErrorPartBits);
}
EP_HOST_DEVICE constexpr int32_t error_part(uint64_t word, int part) {
  return static_cast<int32_t>(word >> (part * kErrorPartBits) & ((1u << kErrorPartBits) - 1));
}
EP_HOST_DEVICE constexpr int32_t error_rank(uint64_t word) {
  return error_part(word, 0) - 1;
}
EP_HOST_DEVICE constexpr int32_t error_peer(uint64_t word) {
  return error_part(word, 1);
}
EP_HOST_DEVICE constexpr int32_t error_phase(uint64_t word) {
  return error_part(word, 2);
}

// Tokens [first, end) of chunk-aligned share `channel` of `num_channels`.
struct TokenRange {
  int64_t first, end;
};

EP_HOST_DEVICE constexpr int64_t min_of(int64_t a, int64_t b) {
  return a < b ? a : b;
}
EP_HOST_DEVICE constexpr int64_t max_of(int64_t a, int64_t b) {
  return a > b ? a : b;
}
EP_HOST_DEVICE constexpr int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}
EP_HOST_DEVICE constexpr int64_t align_up(int64_t a, int64_t b) {
  return ceil_div(a, b) * b;
}

// Bits that hold every value in [0, limit).
EP_HOST_DEVICE constexpr int bits_for(int64_t limit) {
  int bits = 0;
  while ((int64_t{1} << bits) < limit) {
    ++bits;
  }
  return bits;
}

}  // namespace ep

#endif  // EP_CORE_ARGS_H_
