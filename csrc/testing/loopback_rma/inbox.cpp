#include "inbox.h"

#include <algorithm>
#include <string>

#include "log.h"

namespace loopback_rma {
namespace {

std::string place(const Message& message) {
  return std::to_string(message.bytes) + " bytes at offset " + std::to_string(message.offset) +
         " of region " + std::to_string(message.region);
}

}  // namespace

Inbox::Inbox(Wire* wire, OnGet on_get, OnReply on_reply)
    : wire_(wire), on_get_(std::move(on_get)), on_reply_(std::move(on_reply)) {}

bool Inbox::step(uint64_t now) {
  bool moved = take_slots(now);
  wire_->maybe_shuffle(&arrivals_);
  for (Arrival& arrival : arrivals_) {
    moved |= advance(&arrival, now);
  }
  const auto finished = [](const Arrival& arrival) { return arrival.finished; };
  arrivals_.erase(std::remove_if(arrivals_.begin(), arrivals_.end(), finished), arrivals_.end());
  return step_signals(now) || moved;
}

bool Inbox::take_slots(uint64_t now) {
  Segment& segment = wire_->own();
  bool moved = false;
  for (int source = 0; source < wire_->num_ranks; ++source) {
    for (int index = 0; index < segment.num_slots(); ++index) {
      Slot& slot = segment.slot(source, index);
      if (slot.state.load(std::memory_order_acquire) == kFull) {
        slot.state.store(kTaken, std::memory_order_relaxed);
        arrivals_.push_back({source,
                             &slot,
                             segment.payload(source, index),
                             wire_->some_time_from(now),
                             false,
                             false,
                             {}});
        moved = true;
      }
    }
  }
  return moved;
}

bool Inbox::advance(Arrival* arrival, uint64_t now) {
  const Message& message = arrival->slot->message;
  const bool copies = message.kind != MessageKind::kGetRequest && message.bytes != 0;
  Region* region = copies ? target_of(message, arrival->source) : nullptr;
  if (!arrival->started) {
    if (now < arrival->not_before) {
      return false;
    }
    if (region != nullptr) {
      wire_->start(region->base + message.offset, arrival->payload, message.bytes, *region,
                   Lane::kIn, &arrival->ticket);
      ++region->copies;
    }
    arrival->started = true;
  }
  const Progress progress = wire_->poll(&arrival->ticket);
  if (progress == Progress::kPending) {
    return false;
  }
  if (progress == Progress::kFailed) {
    wire_->failed = true;
  }
  if (region != nullptr) {
    --region->copies;
  }
  finish(arrival, now);
  return true;
}

// nullptr: what arrived has no place any more, and is passed over.
Region* Inbox::target_of(const Message& message, int source) {
  Region* region = wire_->find(message.region);
  if (region == nullptr) {
    info("rank " + std::to_string(wire_->rank) + " closed the target of " + place(message) +
         " from rank " + std::to_string(source));
    return nullptr;
  }
  if (message.offset > region->bytes || message.bytes > region->bytes - message.offset) {
    warn("rank " + std::to_string(source) + " put " + place(message) + " of rank " +
         std::to_string(wire_->rank) + ", which has " + std::to_string(region->bytes) + " bytes");
    wire_->failed = true;
    return nullptr;
  }
  return region;
}

void Inbox::finish(Arrival* arrival, uint64_t now) {
  const Message message = arrival->slot->message;
  arrival->finished = true;
  arrival->slot->state.store(kFree, std::memory_order_release);
  Track& track = tracks_[{arrival->source, message.context}];
  if (++track.fragments[message.sequence] == message.num_fragments) {
    track.fragments.erase(message.sequence);
    complete(message, arrival->source, now);
  }
}

void Inbox::complete(const Message& message, int source, uint64_t now) {
  const TrackKey key{source, message.context};
  Track& track = tracks_[key];
  track.complete.insert(message.sequence);
  while (!track.complete.empty() && *track.complete.begin() == track.next) {
    track.complete.erase(track.complete.begin());
    ++track.next;
  }
  if (message.kind == MessageKind::kGetRequest) {
    on_get_(message, source);
  } else if (message.kind == MessageKind::kGetReply) {
    on_reply_(message.cookie);
  } else if (message.signal_region != kNoRegion) {
    signals_.push_back({key, message, wire_->some_time_from(now)});
  }
}

bool Inbox::step_signals(uint64_t now) {
  if (phase_ != Phase::kNone) {
    return continue_signal();
  }
  wire_->maybe_shuffle(&signals_);
  const auto ready = std::find_if(signals_.begin(), signals_.end(),
                                  [this, now](const Signal& s) { return may_signal(s, now); });
  if (ready == signals_.end()) {
    return false;
  }
  const Signal signal = *ready;
  signals_.erase(ready);
  begin_signal(signal);
  return true;
}

bool Inbox::may_signal(const Signal& signal, uint64_t now) {
  const bool all_before = tracks_[signal.track].next > signal.message.sequence;
  return now >= signal.not_before && (signal.message.strong == 0 || all_before);
}

void Inbox::begin_signal(const Signal& signal) {
  current_ = signal.message;
  Region* region = wire_->find(current_.signal_region);
  const uint64_t offset = current_.signal_offset;
  if (region == nullptr) {
    return;  // closed
  }
  if (region->bytes < sizeof(uint64_t) || offset > region->bytes - sizeof(uint64_t)) {
    warn("a signal at offset " + std::to_string(offset) + " lies outside its region");
    wire_->failed = true;
    return;
  }
  if (!region->on_gpu) {
    __atomic_fetch_add(reinterpret_cast<uint64_t*>(region->base + offset), current_.signal_value,
                       __ATOMIC_ACQ_REL);
    return;
  }
  ++region->copies;
  const auto known = words_.find({region->number, offset});
  if (known != words_.end()) {
    wire_->own().header().signal_word = known->second;
    write_word();
    return;
  }
  phase_ = Phase::kReading;
  wire_->start(&wire_->own().header().signal_word, region->base + offset, sizeof(uint64_t), *region,
               Lane::kIn, &ticket_);
}

bool Inbox::continue_signal() {
  const Progress progress = wire_->poll(&ticket_);
  if (progress == Progress::kPending) {
    return false;
  }
  Region* region = wire_->find(current_.signal_region);
  if (progress == Progress::kFailed || region == nullptr) {
    wire_->failed = wire_->failed || progress == Progress::kFailed;
    phase_ = Phase::kNone;
    return true;
  }
  if (phase_ == Phase::kReading) {
    write_word();
  } else {
    --region->copies;
    phase_ = Phase::kNone;
  }
  return true;
}

// Adds the current signal to the word that was read, and writes it.
void Inbox::write_word() {
  Region* region = wire_->find(current_.signal_region);
  uint64_t* word = &wire_->own().header().signal_word;
  *word += current_.signal_value;
  if (region->never_reset) {
    words_[{region->number, current_.signal_offset}] = *word;
  }
  phase_ = Phase::kWriting;
  wire_->start(region->base + current_.signal_offset, word, sizeof(uint64_t), *region, Lane::kIn,
               &ticket_);
}

}  // namespace loopback_rma
