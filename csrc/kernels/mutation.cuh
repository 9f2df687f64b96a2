// Negative controls: each takes one ordering claim of a kernel header away, so that a test can see
// the failure that the claim prevents. Compiled with EP_TEST_MUTATIONS only; nothing otherwise.
#pragma once

#include "transport/wait.cuh"

namespace ep {

enum class Mutation : int32_t {
  kNone = 0,
  kRouteFlagFirst = 1,       // route O1
  kRouteSkipWait = 2,        // route O2
  kRouteOneBuffer = 3,       // route O3
  kRouteSkipGrid = 4,        // route O4
  kDispatchFlagFirst = 11,   // dispatch O1
  kDispatchSkipTail = 12,    // dispatch O2
  kDispatchSkipEntry = 13,   // dispatch O3
  kDuplicateSkipWait = 14,   // dispatch O5
  kDispatchReuseStage = 15,  // dispatch O4
  kDispatchScribble = 16,    // keeps O4, and shows that the stage may be written then
  kCombineFlagFirst = 21,    // combine O1
  kCombineSkipPartial = 22,  // combine O2
  kCombineSkipCredit = 23,   // combine O3
  kCombineSkipEntry = 24,    // combine O4
  kCombineOutboxFirst = 25,  // combine O5
  kGatherSkipEntry = 31,     // combine by gathering G1
  kGatherSkipDone = 32,      // combine by gathering G3
  kGatherDoneFirst = 33,     // combine by gathering G2
  kGatherLoadFirst = 34,     // combine by gathering G4
  kGatherReadLate = 35,      // keeps G4, and is as late
  kRailSignalFirst = 41,     // rails R1, of records
  kRailSkipWait = 42,        // rails R2
  kRailSkipEntry = 43,       // rails R3
  kRailReuseStage = 44,      // rails R5
  kRailWeakSignal = 45,      // net N1: a signal that waits for no put
  kReturnSignalFirst = 46,   // rails R1, of sums
  kReturnSkipWait = 47,      // rails R2, of sums
  kReturnSkipEntry = 48,     // rails R4
  kRailTopkSkipWait = 49,    // rails R2, of routing
  kRailCountsSkipWait = 50,  // rails, counts inside the domain
  kRailPutFirst = 51,        // rails R1, net N2: as if a put were posted without its release
  kRailOtherChannel = 52,    // net N1: a signal over another channel than its puts
};

__device__ __forceinline__ bool mutated([[maybe_unused]] const EpContext& context,
                                        [[maybe_unused]] Mutation which) {
#ifdef EP_TEST_MUTATIONS
  return context.test_mutation == static_cast<int32_t>(which);
#else
  return false;
#endif
}

// Stores a word that only grows, for another rank. Where a test has taken a wait of combine away,
// stores of one word come in any order; one that steps back would leave its reader waiting until
// the deadline, and what is to be seen is wrong data, not a wait.
__device__ __forceinline__ void store_grown([[maybe_unused]] const EpContext& context,
                                            uint64_t* word, uint64_t value) {
#ifdef EP_TEST_MUTATIONS
  if (mutated(context, Mutation::kCombineFlagFirst) ||
      mutated(context, Mutation::kCombineSkipPartial) ||
      mutated(context, Mutation::kCombineSkipCredit)) {
    atomicMax_system(reinterpret_cast<unsigned long long*>(word), value);
    return;
  }
#endif
  store_relaxed_sys(word, value);
}

// Stalls the calling threads where a test wants this rank to be late.
__device__ __forceinline__ void test_stall([[maybe_unused]] const EpContext& context) {
#ifdef EP_TEST_MUTATIONS
  const uint64_t end = time_ns() + 1000ull * static_cast<uint64_t>(context.test_delay_us);
  while (time_ns() < end) {
    __nanosleep(500);
  }
#endif
}

}  // namespace ep
