// combine at the expert rank: a token's local rows are summed and pushed to the token's home.
// Loader and pusher of a group walk through the same records in the same order.
#pragma once

#include "kernels/combine_group.cuh"

namespace ep {

// Loads all segments of a record: segment by segment, so that a sum stays in registers.
__device__ inline bool load_record(const Group& group, StageLoader* loader, const RowList& list,
                                   int64_t row_bytes, uint64_t policy) {
  const char* rows = static_cast<const char*>(group.block.args.expert_out);
  for (int segment = 0; segment < group.shape.segments; ++segment) {
    for (int at = 0; at < list.num_rows; ++at) {
      const int mark = (at == 0 ? kFirstTerm : 0) | (at + 1 == list.num_rows ? kLastTerm : 0);
      if (!loader->load(rows + list.row(at) * row_bytes, segment, mark, policy)) {
        return false;
      }
    }
  }
  return true;
}

__device__ inline void load_rows(const Group& group, int64_t row_bytes) {
  const CombineBlock& block = group.block;
  StageLoader loader(group, row_bytes);
  RecordCursor cursor(block.context, block.args.plan, block.channel, group.index, kExpertGroups);
  const uint64_t policy = evict_first_policy();
  Record record;
  bool more = cursor.next(&record);
  RowList ahead = more ? read_rows(block.args.plan, block.record_stride, record) : RowList{};
  while (more) {
    const RowList now = ahead;
    more = cursor.next(&record);
    if (more) {
      ahead = read_rows(block.args.plan, block.record_stride, record);
    }
    if (!load_record(group, &loader, now, row_bytes, policy)) {
      loader.drain();
      return;
    }
  }
  loader.finish();
}

// Records that the pusher handles together, one a lane: their credits are read at once, and one
// fence serves all their releases.
constexpr int kPushBatch = 4;

class Pusher {
 public:
  __device__ Pusher(const Group& group, int64_t partial_bytes)
      : group_(group),
        block_(group.block),
        cursor_(group.block.context, group.block.args.plan, group.block.channel, group.index,
                kExpertGroups),
        partial_bytes_(partial_bytes),
        position_(kOutboxes) {
    lane_ = static_cast<int>(threadIdx.x) % 32;
    has_rows_ = block_.args.plan.totals[0] > 0;
  }

  // Pushes the partial rows of all records of this group.
  __device__ void run() {
    bool going = true;
    for (int count = take_batch(); count > 0 && going; count = going ? take_batch() : 0) {
      for (int at = 0; at < count && going; ++at) {
        going = push(at);
      }
      release();
    }
  }

 private:
  // Gives each lane its record; returns how many there are.
  __device__ int take_batch() {
    int count = 0;
    Record record;
    while (count < kPushBatch && cursor_.next(&record)) {
      if (lane_ == count) {
        mine_ = record;
      }
      ++count;
    }
    granted_ = false;
    num_rows_ = 0;
    if (lane_ < count) {
      num_rows_ = num_rows_of(block_.args.plan, mine_);
      const uint64_t word = load_acquire_sys(credit_word());
      granted_ = word >= credit_value() && agrees(word);  // O3, O4
    }
    __syncwarp();
    fence_proxy_async();
    return count;
  }

  // The word that says that the slot of this lane's record is free, and its value then.
  __device__ const uint64_t* credit_word() const {
    return mine_.opens_ring ? block_.peers.at<uint64_t>(block_.context.ep_rank,
                                                        block_.context.window.combine_ready) +
                                  mine_.source
                            : block_.free_here(mine_.source, mine_.index);
  }
  __device__ uint64_t credit_value() const {
    return mine_.opens_ring ? entry_word(group_.watch->epoch, false)
                            : block_.passed(mine_.index - block_.depth);
  }
  // Whether this rank gives gradients if the home of this lane's record wants them, as its entry
  // says; without rows it has none to give. A home in this epoch cannot be past it: it lacks this
  // record.
  __device__ bool agrees(uint64_t entry) const {
    const bool gives = block_.args.row_weights_grad != nullptr;
    return !mine_.opens_ring || !has_rows_ || ((entry & kEntryWantsGradients) != 0) == gives;
  }

  __device__ bool push(int at) {
    if (!wait_for_slot(at)) {
      return false;
    }
    const int num_rows = __shfl_sync(~0u, num_rows_, at);
    const int home = __shfl_sync(~0u, mine_.source, at);
    const int index = __shfl_sync(~0u, mine_.index, at);
    char* slot = block_.slot_at_home(home, index);
    if (mutated(block_.context, Mutation::kCombineFlagFirst)) {
      store_grown(block_.context, block_.full_at_home(home, index), block_.passed(index));
      test_stall(block_.context);
    }
    push_gradients(__shfl_sync(~0u, mine_.record, at), num_rows, slot);
    for (int segment = 0; segment < group_.shape.segments && num_rows > 0; ++segment) {
      if (!push_segment(segment, slot)) {
        return false;
      }
    }
    pushed_ |= 1u << at;
    return true;
  }

  __device__ bool push_segment(int segment, char* slot) {
    GroupShared* shared = group_.shared;
    const int at = position_.at();
    if (__any_sync(~0u, !mbarrier_try(&shared->outbox_full[at], position_.parity()))) {
      release();  // there is time for it
      if (!mbarrier_wait(group_.watch, &shared->outbox_full[at], position_.parity())) {
        return false;
      }
    }
    if (lane_ == 0) {
      const int64_t offset = int64_t{segment} * group_.shape.outbox_bytes;
      bulk_store(slot + offset, group_.outbox(at),
                 Group::cut(segment, partial_bytes_, group_.shape.outbox_bytes));
      bulk_commit();
      bulk_wait_read<1>();
      free_outbox();
    }
    unread_ = at;
    position_.step();
    return true;
  }

  __device__ void free_outbox() {
    if (unread_ >= 0) {
      mbarrier_arrive(&group_.shared->outbox_empty[unread_]);
    }
  }

  // Completes what was pushed and tells the home ranks. Called before every wait for a peer: what
  // is complete here may be what the peer waits for.
  __device__ void release() {
    if (lane_ == 0) {
      bulk_wait_done<0>();
      free_outbox();
      fence_proxy_async();
    }
    unread_ = -1;
    __syncwarp();
    if ((pushed_ >> lane_ & 1u) != 0) {
      fence_sys();  // O1
      store_grown(block_.context, block_.full_at_home(mine_.source, mine_.index),
                  block_.passed(mine_.index));
    }
    pushed_ = 0;
    __syncwarp();
  }

  __device__ void push_gradients(int record, int num_rows, char* slot) {
    const float* grads = block_.args.row_weights_grad;
    if (grads != nullptr) {
      auto* to = reinterpret_cast<float*>(slot + align_up(partial_bytes_, 16));
      const int32_t* rows = block_.args.plan.record_row + int64_t{record} * block_.record_stride;
      for (int row = lane_; row < num_rows; row += 32) {
        to[row] = grads[rows[row]];
      }
    }
  }

  // O3, O4: the slot's last partial row has been read.
  __device__ bool wait_for_slot(int at) {
    const bool opens = __shfl_sync(~0u, mine_.opens_ring ? 1 : 0, at) != 0;
    if (__shfl_sync(~0u, granted_ ? 1 : 0, at) != 0 ||
        mutated(block_.context,
                opens ? Mutation::kCombineSkipEntry : Mutation::kCombineSkipCredit)) {
      return true;
    }
    release();
    bool here = true;
    if (lane_ == at) {
      const EpPhase phase = opens ? EP_PHASE_COMBINE_READY : EP_PHASE_COMBINE_CREDIT;
      here = wait_until(block_.context, group_.watch, credit_word(), credit_value(),
                        {mine_.source, phase, block_.channel});
      if (here && !agrees(load_relaxed_sys(credit_word()))) {
        file_fault(block_.context, {mine_.source, EP_PHASE_GRADIENTS, block_.channel}, 0, 0);
        set_aborted(group_.watch);
        here = false;
      }
    }
    here = __all_sync(~0u, here);
    __syncwarp();
    fence_proxy_async();
    return here;
  }

  const Group& group_;
  const CombineBlock& block_;
  RecordCursor cursor_;
  int64_t partial_bytes_;
  RingPosition position_;
  int lane_;
  bool has_rows_;         // below the capacity
  int unread_ = -1;       // outbox whose store may still read it
  unsigned pushed_ = 0;   // lanes whose records are pushed but not released
  Record mine_{};         // this lane's record, and
  int num_rows_ = 0;      // its rows,
  bool granted_ = false;  // whether its slot was free when the batch was taken
};

}  // namespace ep
