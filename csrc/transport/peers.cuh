// Peers: the ranks of one NVLink domain as plain pointers into their windows.
// The table comes from NCCL (ncclGetPeerDevicePointer) between processes, or from ordinary
// allocations where several ranks share one GPU: the same code runs on both.
#pragma once

#include "core/args.h"

namespace ep {

class Peers {
 public:
  __device__ explicit Peers(const EpContext& context) : base_(context.window_base) {}

  // The word, row or record at `offset` bytes in the window of `rank`.
  template <class T>
  __device__ T* at(int rank, int64_t offset) const {
    return reinterpret_cast<T*>(static_cast<char*>(base_[rank]) + offset);
  }

 private:
  void* const* base_;
};

}  // namespace ep
