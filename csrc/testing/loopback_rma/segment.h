// The wire: memory that the processes of one host share. Each rank owns one segment, in which every
// rank that sends to it (itself among them) has its own slots. A slot holds one fragment of a
// message between the moment its source was read and the moment its target is written.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>

#include "settings.h"

namespace loopback_rma {

enum class MessageKind : uint32_t { kPut, kGetRequest, kGetReply };

constexpr uint32_t kNoRegion = UINT32_MAX;
constexpr uint32_t kMaxRegions = 4096;  // over the life of a collective

// What travels in front of the bytes. Regions are named by number: all ranks register theirs in
// the same order.
struct Message {
  MessageKind kind;
  uint32_t context;
  uint64_t sequence;  // of all messages between two ranks in one context, from 0
  uint32_t fragment;
  uint32_t num_fragments;
  uint64_t bytes;  // of this fragment; of the whole in a request to get
  uint32_t region;
  uint32_t signal_region;
  uint64_t offset;  // of this fragment
  uint64_t signal_offset;
  uint64_t signal_value;
  uint32_t strong;
  uint32_t reply_region;
  uint64_t reply_offset;
  uint64_t cookie;  // of the rank that asked to get
};

enum SlotState : uint32_t { kFree, kClaimed, kFull, kTaken };

struct alignas(128) Slot {
  std::atomic<uint32_t> state;
  Message message;
};

enum RegionState : uint32_t { kUnknown, kRegistered, kGone };

struct RegionEntry {
  std::atomic<uint32_t> state;
  uint32_t reserved;
  uint64_t bytes;
};

struct SegmentHeader {
  std::atomic<uint64_t> ready;
  std::atomic<uint32_t> attached;
  std::atomic<uint32_t> closed;  // its owner reads no more
  uint32_t num_ranks;
  uint32_t num_slots;
  uint64_t slot_bytes;
  uint64_t signal_word;  // of the owner: what a signal's word is to become, or has been
  RegionEntry regions[kMaxRegions];
};

class Segment {
 public:
  // The owner's. Throws Refusal if the folder has too little room.
  static Segment create(const std::string& path, int num_ranks, const Settings& settings);

  // A peer's; waits until its owner has made it. Throws Refusal on expiry, or if sizes differ.
  static Segment open(const std::string& path, int num_ranks, const Settings& settings);

  Segment() = default;
  Segment(Segment&& other) noexcept;
  Segment& operator=(Segment&& other) noexcept;
  ~Segment();

  SegmentHeader& header() const { return *static_cast<SegmentHeader*>(data_); }
  int num_slots() const { return static_cast<int>(header().num_slots); }
  Slot& slot(int source, int index) const;
  char* payload(int source, int index) const;

  void* data() const { return data_; }
  size_t bytes() const { return bytes_; }

  // All slots of one source.
  void* lane(int source) const;
  size_t lane_bytes() const;

  // Takes the file's name away; the memory stays. An owner that ends before does it too.
  void unlink();

 private:
  Segment(std::string path, void* data, size_t bytes);

  std::string path_;
  void* data_ = nullptr;
  size_t bytes_ = 0;
  bool named_ = false;  // by this owner, and still
};

}  // namespace loopback_rma
