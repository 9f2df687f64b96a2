// ChaosNet: LoopNet whose puts and signals are queued and carried out late, by a further block of
// the same launch, in an order that a seed decides as far as the net's promises allow: puts of a
// channel pass each other and later signals; a signal passes no earlier put of its channel.
// For tests: a source that is reused early, a signal that is posted too soon or promises too much,
// then corrupt data visibly.
#pragma once

#include "transport/net.cuh"

namespace ep {

constexpr int kChaosRing = 32;  // operations of a channel that may wait; one for each lane

struct ChaosOp {
  int64_t target, source, bytes;  // bytes -1: a signal
  int32_t domain, number;
};

struct ChaosRing {
  uint64_t posted;     // operations
  uint64_t taken;      // operations before which all are carried out
  uint64_t sent;       // puts carried out
  uint64_t done_mask;  // of operations after `taken`: bit i mod 32
  ChaosOp op[kChaosRing];
};

struct ChaosControl {
  uint64_t finished;  // producing blocks that have ended, over all launches
  uint64_t expected;  // of all launches before this one
};

__host__ __device__ inline int64_t chaos_bytes(const EpRailLayout& layout) {
  return static_cast<int64_t>(sizeof(ChaosControl)) +
         static_cast<int64_t>(sizeof(ChaosRing)) * layout.channels;
}

class ChaosNet : public LoopNet {
 public:
  static constexpr bool kNeedsWorker = true;

  __device__ ChaosNet(const EpContext& context, const EpRail& rail) : LoopNet(context, rail) {}

  __device__ void put(int domain, int64_t target_offset, int64_t source_offset, int64_t bytes,
                      int channel) const {
    __syncwarp();
    if (threadIdx.x % 32 == 0) {
      count_put(rail_, base(rail_.domain), domain, bytes);
      post(channel, {target_offset, source_offset, bytes, domain, 0});
    }
    __syncwarp();
  }

  __device__ void signal(int domain, int number, int channel) const {
    post(channel, {0, 0, -1, domain, number});
  }

  __device__ uint64_t sent(int channel) const { return load_acquire_sys(&ring(channel)->sent); }

  // A producing block has posted its last. One thread calls.
  __device__ void finish() const {
    fence_sys();
    add_release_sys(&control()->finished, 1);
  }

  // The further block: carries out what `producers` blocks post, then returns.
  __device__ void work(int producers, const Watch& watch) const {
    const uint64_t expected = control()->expected + static_cast<uint64_t>(producers);
    const int warps = static_cast<int>(blockDim.x) / 32;
    const int warp = static_cast<int>(threadIdx.x) / 32;
    uint64_t state = rail_.chaos_seed * 0x9e3779b97f4a7c15ull +
                     watch.epoch * 0x2545f4914f6cdd1dull + static_cast<uint64_t>(warp + 1);
    constexpr uint64_t kGraceNs = 1'000'000'000;
    for (bool ending = false;;) {
      bool busy = false;
      for (int channel = warp; channel < rail_.layout.channels; channel += warps) {
        busy = visit(ring(channel), &state) || busy;
      }
      if ((ending && !busy) || time_ns() > watch.deadline_ns + kGraceNs) {
        break;
      }
      ending = __shfl_sync(~0u, load_acquire_sys(&control()->finished) >= expected ? 1 : 0, 0) != 0;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      control()->expected = expected;
    }
  }

 private:
  __device__ ChaosControl* control() const { return static_cast<ChaosControl*>(rail_.chaos); }
  __device__ ChaosRing* ring(int channel) const {
    return reinterpret_cast<ChaosRing*>(static_cast<char*>(rail_.chaos) + sizeof(ChaosControl)) +
           channel;
  }

  __device__ void post(int channel, const ChaosOp& op) const {
    ChaosRing* to = ring(channel);
    const uint64_t at = load_relaxed_sys(&to->posted);
    const uint64_t end = time_ns() + context_.timeout_ns;
    while (load_acquire_sys(&to->taken) + kChaosRing <= at && time_ns() < end) {
    }
    to->op[at % kChaosRing] = op;
    fence_sys();
    store_relaxed_sys(&to->posted, at + 1);
  }

  static __device__ uint32_t draw(uint64_t* state) {
    *state = *state * 6364136223846793005ull + 1442695040888963407ull;
    return static_cast<uint32_t>(*state >> 33);
  }

  // Carries out one operation of a channel, or lets it wait; whether there was one.
  __device__ bool visit(ChaosRing* from, uint64_t* state) const {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const uint64_t posted = __shfl_sync(~0u, load_acquire_sys(&from->posted), 0);
    const uint64_t taken = __shfl_sync(~0u, from->taken, 0);
    __syncwarp();
    if (posted == taken) {
      return false;
    }
    if (draw(state) % 2 == 0) {
      return true;
    }
    const auto done = static_cast<uint32_t>(__shfl_sync(~0u, from->done_mask, 0));
    const uint64_t own = taken + static_cast<uint64_t>(lane);
    const bool open = own < posted && (done >> (own % kChaosRing) & 1u) == 0;
    const bool is_signal = open && __ldcg(&from->op[own % kChaosRing].bytes) < 0;
    const uint32_t signals = __ballot_sync(~0u, is_signal);
    const uint32_t puts = __ballot_sync(~0u, open && !is_signal);
    uint32_t choices = puts;
    if (signals != 0) {
      const uint32_t first = signals & (~signals + 1);
      const bool weak = mutated(context_, Mutation::kRailWeakSignal);
      choices = weak ? first : ((puts & (first - 1)) == 0 ? puts | first : puts);
    }
    const int pick = static_cast<int>(__fns(
        choices, 0, static_cast<int>(draw(state) % static_cast<uint32_t>(__popc(choices))) + 1));
    carry_out(from, taken + static_cast<uint64_t>(pick));
    advance(from, taken, posted, done, pick);
    return true;
  }

  __device__ void carry_out(ChaosRing* from, uint64_t at) const {
    const ChaosOp* op = &from->op[at % kChaosRing];
    const int64_t bytes = __ldcg(&op->bytes);
    const int domain = __ldcg(&op->domain);
    if (bytes >= 0) {
      copy_as_warp(base(domain) + __ldcg(&op->target), base(rail_.domain) + __ldcg(&op->source),
                   bytes);
    }
    __syncwarp();
    if (threadIdx.x % 32 == 0) {
      fence_sys();
      if (bytes < 0) {
        LoopNet::signal(domain, __ldcg(&op->number), 0);
      } else {
        store_relaxed_sys(&from->sent, load_relaxed_sys(&from->sent) + 1);
      }
    }
    __syncwarp();
  }

  __device__ void advance(ChaosRing* from, uint64_t taken, uint64_t posted, uint32_t done,
                          int pick) const {
    if (threadIdx.x % 32 == 0) {
      done |= 1u << ((taken + static_cast<uint64_t>(pick)) % kChaosRing);
      while (taken < posted && (done >> (taken % kChaosRing) & 1u) != 0) {
        done &= ~(1u << (taken % kChaosRing));
        ++taken;
      }
      from->done_mask = done;
      fence_sys();
      store_relaxed_sys(&from->taken, taken);
    }
    __syncwarp();
  }
};

}  // namespace ep
