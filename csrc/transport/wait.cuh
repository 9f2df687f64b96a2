// Every wait for another thread block or another rank goes through here, and none is unbounded.
//
// A wait that expires files one EpFault for its rank in pinned host memory, then sets the error
// word of every peer, so that they leave as well and file the same. Nothing traps: each block
// returns, the CUDA context survives, and the host raises EpTimeoutError. A group that saw a fault
// is finished: its epochs no longer agree.
#pragma once

#include "transport/memory.cuh"
#include "transport/peers.cuh"

namespace ep {

// One per block, in shared memory: when its waits expire, and whether one has.
struct Watch {
  const EpContext* context;
  uint64_t deadline_ns;
  uint64_t epoch;
  uint32_t aborted;  // by is_aborted and set_aborted: warps set and poll it without a barrier
};

__device__ __forceinline__ bool is_aborted(const Watch& watch) {
  return read_flag_block(&watch.aborted) != 0;
}

// One answer for a whole warp, which calls.
__device__ __forceinline__ bool warp_is_aborted(const Watch& watch) {
  return __any_sync(~0u, threadIdx.x % 32 == 0 && is_aborted(watch)) != 0;
}

__device__ __forceinline__ void set_aborted(Watch* watch) {
  set_flag_block(&watch->aborted);
}

// What a wait is for; goes into the fault.
struct WaitingFor {
  int peer;
  EpPhase phase;
  int channel;
};

// Files this rank's fault, unless it has filed one.
__device__ inline void write_fault(const EpContext& context, const EpFault& what) {
  const Peers peers(context);
  LocalControl* local = peers.at<LocalControl>(context.ep_rank, context.window.local);
  if (atomicExch(&local->fault_claimed, 1u) == 0) {
    EpFault* fault = context.fault;
    fault->rank = what.rank;
    fault->peer = what.peer;
    fault->phase = what.phase;
    fault->channel = what.channel;
    fault->expected = what.expected;
    fault->seen = what.seen;
    store_release_sys(&fault->filed, 1);
  }
}

// Out of line: it is rare, and its registers would be taken from every wait.
static __device__ __noinline__ void file_fault(const EpContext& context, WaitingFor who,
                                               uint64_t expected, uint64_t seen) {
  const int me = context.ep_rank;
  const int first = context.first_rank;
  write_fault(context, {1, me + first, who.peer + first, who.phase, who.channel, expected, seen});
  const Peers peers(context);
  for (int rank = 0; rank < context.shape.ep_size; ++rank) {
    store_relaxed_sys(peers.at<uint64_t>(rank, context.window.error),
                      error_word(me + first, who.peer + first, who.phase));
  }
}

// Files what a peer has told, so that this rank's host learns whom its group lacks.
static __device__ __noinline__ void pass_on_fault(const EpContext& context, uint64_t told) {
  write_fault(context, {1, error_rank(told), error_peer(told), error_phase(told), -1, 0, 0});
}

// Whether this block should leave: its own deadline has passed, or a peer has filed a fault.
__device__ inline bool must_leave(const EpContext& context, Watch* watch) {
  if (is_aborted(*watch)) {
    return true;
  }
  const Peers peers(context);
  const uint64_t told = load_relaxed_sys(peers.at<uint64_t>(context.ep_rank, context.window.error));
  if (told != 0) {
    pass_on_fault(context, told);
    set_aborted(watch);
    return true;
  }
  return false;
}

// Waits until `word` is at least `expected`; acquires what its writer released (system scope).
// False: the wait expired or a peer failed; the caller returns without touching anything else.
__device__ inline bool wait_until(const EpContext& context, Watch* watch, const uint64_t* word,
                                  uint64_t expected, WaitingFor who) {
  constexpr uint32_t kPollsPerCheck = 64;
  if (load_acquire_sys(word) >= expected) {
    return true;
  }
  for (uint32_t polls = 1;; ++polls) {
    if (load_relaxed_sys(word) >= expected) {
      load_acquire_sys(word);
      return true;
    }
    if (polls % kPollsPerCheck != 0) {
      continue;
    }
    if (must_leave(context, watch)) {
      return false;
    }
    if (time_ns() > watch->deadline_ns) {
      file_fault(context, who, expected, load_relaxed_sys(word));
      set_aborted(watch);
      return false;
    }
  }
}

// Waits for a phase of a barrier in shared memory, which another warp of this block completes;
// false if the block has to leave. That warp may wait for a peer, whose fault says more: this wait
// gives it time to expire first.
__device__ inline bool mbarrier_wait(Watch* watch, uint64_t* barrier, uint32_t parity) {
  constexpr uint64_t kGraceNs = 500'000'000;
  constexpr uint32_t kTriesPerCheck = 64;
  for (uint32_t tries = 1; !mbarrier_try(barrier, parity); ++tries) {
    if (is_aborted(*watch)) {
      return false;
    }
    if (tries % kTriesPerCheck == 0 && time_ns() > watch->deadline_ns + kGraceNs) {
      file_fault(*watch->context, {watch->context->ep_rank, EP_PHASE_BLOCK, -1}, parity, 0);
      set_aborted(watch);
      return false;
    }
  }
  return true;
}

}  // namespace ep
