// The records that a rank has received: which tokens of which source have rows here, in one order.
#pragma once

#include "core/window_layout.h"
#include "kernels/launch.cuh"

namespace ep {

// A received record: a token of `source` with rows here.
struct Record {
  int source;
  int record;       // in the plan's list
  int index;        // among the source's records
  bool opens_ring;  // its slot of the ring has not been used in this launch
};

// A record's rows, one (or two) a lane, read ahead of their use.
struct RowList {
  int num_rows;
  int token;      // of the source
  int low, high;  // rows `lane` and 32 + `lane`

  // Lanes may ask for different rows.
  __device__ int row(int at) const {
    const int from_low = __shfl_sync(~0u, low, at % 32);
    const int from_high = __shfl_sync(~0u, high, at % 32);
    return at < 32 ? from_low : from_high;
  }
};

__device__ inline int num_rows_of(const EpPlan& plan, const Record& record) {
  return static_cast<int>(plan.record_header[record.record] & kRecordRowsMask);
}

// `stride` is the room that a record's rows have: the most slots of any call.
__device__ inline RowList read_rows(const EpPlan& plan, int stride, const Record& record) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int32_t* rows = plan.record_row + int64_t{record.record} * stride;
  const uint32_t header = plan.record_header[record.record];
  return {static_cast<int>(header & kRecordRowsMask), static_cast<int>(header >> kRecordRowsBits),
          lane < stride ? rows[lane] : 0, 32 + lane < stride ? rows[32 + lane] : 0};
}

// Walks through the records of a block's channel, in an order that is the same on all ranks: by
// chunk of the channel, then source, then token. Worker w of W takes every W-th. A whole warp calls.
class RecordCursor {
 public:
  __device__ RecordCursor(const EpContext& context, const EpPlan& plan, int channel, int worker,
                          int num_workers)
      : context_(context), plan_(plan), channel_(channel), num_workers_(num_workers), at_(worker) {
    lane_ = static_cast<int>(threadIdx.x) % 32;
    for (int first = 0; first < context.shape.ep_size; first += 32) {
      const Share share = share_of(first + lane_);
      num_chunks_ = max(num_chunks_, __reduce_max_sync(~0u, share.end - share.first));
    }
    ahead_ = read_ranges(0, 0);
  }

  __device__ bool next(Record* record) {
    while (at_ >= end_) {
      if (ended_ || !next_range()) {
        ended_ = true;
        return false;
      }
    }
    const int list_first = __shfl_sync(~0u, now_.list_first, source_ % 32);
    const int share_first = __shfl_sync(~0u, now_.share_first, source_ % 32);
    *record = {source_, at_, at_ - list_first, at_ - share_first < context_.shape.ring_depth};
    at_ += num_workers_;
    return true;
  }

 private:
  struct Share {
    int first, end;  // chunks
  };
  // One lane's source: records [first, end) of the chunk, and where the list and the share start.
  struct Ranges {
    int first, end, list_first, share_first;
  };

  __device__ Share share_of(int source) const {
    if (source >= context_.shape.ep_size) {
      return {0, 0};
    }
    const int64_t chunks = ceil_div(plan_.source_tokens[source], kChunkTokens);
    const int channels = context_.shape.num_channels;
    return {static_cast<int>(chunks * channel_ / channels),
            static_cast<int>(chunks * (channel_ + 1) / channels)};
  }

  __device__ Ranges read_ranges(int chunk, int group) const {
    const int source = group + lane_;
    const Share share = share_of(source);
    if (share.first + chunk >= share.end) {
      return {0, 0, 0, 0};
    }
    const int32_t* first = plan_.chunk_first + source * chunk_stride(context_.shape);
    return {first[share.first + chunk], first[share.first + chunk + 1], first[0],
            first[share.first]};
  }

  // Steps to the next source, and to the next chunk after the last one; carries over how many
  // records are still to be passed until this worker's next.
  __device__ bool next_range() {
    const int behind = at_ - end_;
    ++source_;
    if (source_ == context_.shape.ep_size || source_ % 32 == 0) {
      if (source_ == context_.shape.ep_size) {
        source_ = 0;
        ++chunk_;
      }
      if (chunk_ >= num_chunks_) {
        return false;
      }
      now_ = ahead_;
      const bool last_group = source_ + 32 >= context_.shape.ep_size;
      ahead_ = read_ranges(chunk_ + (last_group ? 1 : 0), last_group ? 0 : source_ + 32);
    }
    end_ = __shfl_sync(~0u, now_.end, source_ % 32);
    at_ = __shfl_sync(~0u, now_.first, source_ % 32) + behind;
    return true;
  }

  const EpContext& context_;
  const EpPlan& plan_;
  int channel_;
  Ranges now_{}, ahead_{};
  int num_workers_, lane_ = 0, num_chunks_ = 0;
  int chunk_ = 0, source_ = -1;
  int at_, end_ = 0;
  bool ended_ = false;  // stays so: asking again gives nothing
};

}  // namespace ep
