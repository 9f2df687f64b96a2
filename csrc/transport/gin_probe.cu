// gin_probe: round trips between the ranks of each rail, pair of domains by pair of domains.
// Data flow   rank of the lower domain: send area --put, strong signal--> receive area of the upper,
//             which checks the words, answers in the same way, and is checked in turn.
// Grid        one warp: a probe of latency, not of bandwidth.
// Ordering    N1 to N4 of transport/net_gin.cuh.
// Failure     a wait that expires ends the pair's rounds; `finished` tells how many there were.
#include "transport/gin_probe.h"
#include "transport/memory.cuh"
#include "transport/net_gin.cuh"

namespace ep {
namespace {

constexpr int kWords = kProbeBytes / 8;
constexpr int kWarp = 32;
constexpr int kChannel = 0;

__device__ uint64_t word_of(int from, int to, int round, int index) {
  const uint64_t seed = (uint64_t(from) << 48) ^ (uint64_t(to) << 32) ^ (uint64_t(round) << 16);
  return (seed ^ static_cast<uint64_t>(index)) * 0x9e3779b97f4a7c15ull;
}

struct Probe {
  const GinProbeArgs& args;
  GinNet net;
  int me;
  uint64_t posted;  // puts so far

  __device__ uint64_t* send_area() const {
    return reinterpret_cast<uint64_t*>(args.window + args.offset);
  }

  __device__ int64_t receive_offset(int domain) const {
    return args.offset + int64_t{1 + domain} * kProbeBytes;
  }

  // Whether `word_at()` reached `least` in time; asked by the first lane.
  template <class WordAt>
  __device__ bool reaches(uint64_t least, const WordAt& word_at) const {
    const uint64_t deadline_ns = time_ns() + args.timeout_ns;
    bool came = true;
    if (threadIdx.x == 0) {
      while (came && word_at() < least) {
        came = time_ns() < deadline_ns;
      }
    }
    return __shfl_sync(~0u, static_cast<int>(came), 0) != 0;
  }

  __device__ bool send(int domain, int round) {
    if (!reaches(posted, [this] { return net.sent(kChannel); })) {  // N4
      return false;
    }
    ++posted;
    for (int index = threadIdx.x; index < kWords; index += kWarp) {
      send_area()[index] = word_of(me, domain, round, index);
    }
    net.put(domain, receive_offset(me), args.offset, kProbeBytes, kChannel);
    if (threadIdx.x == 0) {
      net.signal(domain, 0, kChannel);
    }
    __syncwarp();
    return true;
  }

  __device__ bool receive(int domain, int round) const {
    const auto arrived = [this, domain] { return net.read_signal(domain, 0, kChannel); };
    return reaches(static_cast<uint64_t>(round) + 1, arrived);
  }

  // Words of the last put of `domain` that are wrong.
  __device__ uint32_t wrong_words(int domain, int round) const {
    const auto* words = reinterpret_cast<const uint64_t*>(args.window + receive_offset(domain));
    uint32_t wrong = 0;
    for (int index = threadIdx.x; index < kWords; index += kWarp) {
      wrong += load_relaxed_sys(words + index) != word_of(domain, me, round, index);
    }
    return __reduce_add_sync(~0u, wrong);
  }
};

// The first round waits until the other rank has come this far, so it is not timed.
__device__ GinProbeResult ask(Probe& probe, int domain) {
  GinProbeResult result{0, 0, 0, ~0ull};
  for (int round = 0; round < probe.args.rounds; ++round) {
    const uint64_t start_ns = time_ns();
    if (!probe.send(domain, round) || !probe.receive(domain, round)) {
      break;
    }
    const uint64_t took_ns = time_ns() - start_ns;
    result.wrong_words += probe.wrong_words(domain, round);
    ++result.finished;
    if (round > 0) {
      result.total_ns += took_ns;
      result.shortest_ns = took_ns < result.shortest_ns ? took_ns : result.shortest_ns;
    }
  }
  return result;
}

__device__ GinProbeResult answer(Probe& probe, int domain) {
  GinProbeResult result{0, 0, 0, 0};
  for (int round = 0; round < probe.args.rounds; ++round) {
    if (!probe.receive(domain, round)) {
      break;
    }
    result.wrong_words += probe.wrong_words(domain, round);
    if (!probe.send(domain, round)) {
      break;
    }
    ++result.finished;
  }
  return result;
}

__global__ void __launch_bounds__(kWarp) gin_probe(const __grid_constant__ GinProbeArgs args) {
  const GinNet net(args.net);
  Probe probe{args, net, net.domain(), 0};
  for (int domain = 0; domain < args.net.num_domains; ++domain) {
    if (domain == probe.me) {
      continue;
    }
    const GinProbeResult result = probe.me < domain ? ask(probe, domain) : answer(probe, domain);
    if (threadIdx.x == 0) {
      args.results[domain] = result;
    }
  }
}

}  // namespace

cudaError_t launch_gin_probe(const GinProbeArgs& args, cudaStream_t stream) {
  gin_probe<<<1, kWarp, 0, stream>>>(args);
  return cudaGetLastError();
}

}  // namespace ep
