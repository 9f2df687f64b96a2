// How ranks enter a call whose peers must know where its rows lie: each tells all, and waits for all.
// dispatch tells where rows are to go (its O3), combine by gathering where they are (its G1).
#pragma once

#include "kernels/launch.cuh"

namespace ep {

// What a call says and asks at its entry. `ready`: offset of EpReady [P] in the window.
struct Entry {
  int64_t ready;
  int64_t rows, weights;  // offsets in this rank's window; weights -1 for none
  EpPhase phase;          // of the wait
  EpPhase differs;        // fault where of two ranks only one has weights
};

// Tells every peer where this launch's rows and weights start. Threads of one block call.
__device__ inline void announce(const EpContext& context, const Entry& entry, uint64_t epoch) {
  const Peers peers(context);
  for (int rank = threadIdx.x; rank < context.shape.ep_size; rank += blockDim.x) {
    EpReady* ready = peers.at<EpReady>(rank, entry.ready) + context.ep_rank;
    ready->recv_x_offset = entry.rows;
    ready->recv_weights_offset = entry.weights;
    store_release_sys(&ready->epoch, epoch);
  }
}

// Waits until every peer has entered; notes where its rows and weights start. `skip` takes the wait
// away, for tests. The whole block calls, at one place: there is a barrier of the block in it.
template <class Byte, class Float>
__device__ bool wait_for_entries(const EpContext& context, const Entry& entry, int channel,
                                 bool skip, Watch* watch, Byte** rows_at, Float** weights_at) {
  const Peers peers(context);
  EpReady* ready = peers.at<EpReady>(context.ep_rank, entry.ready);
  bool entered = true;
  for (int rank = threadIdx.x; rank < context.shape.ep_size && entered; rank += blockDim.x) {
    if (!skip) {
      entered = wait_until(context, watch, &ready[rank].epoch, watch->epoch,
                           {rank, entry.phase, channel});
    }
    const volatile EpReady& peer = ready[rank];
    rows_at[rank] = peers.at<char>(rank, peer.recv_x_offset);
    const int64_t weights = peer.recv_weights_offset;
    if (entered && (weights < 0) != (entry.weights < 0)) {
      file_fault(context, {rank, entry.differs, channel}, 0, 0);
      set_aborted(watch);
      entered = false;
    }
    weights_at[rank] = weights < 0 ? nullptr : peers.at<float>(rank, weights);
  }
  return __syncthreads_and(entered ? 1 : 0) != 0;
}

}  // namespace ep
