#include "outbox.h"

#include <algorithm>

namespace loopback_rma {
namespace {

bool within(const Operation& operation, uint32_t first, uint32_t last) {
  return operation.message.context >= first && operation.message.context <= last;
}

void answer(Request* request, RequestState state) {
  if (request != nullptr) {
    request->state.store(state, std::memory_order_release);
  }
}

// Once only, as whoever asked may give the request away then.
void refuse(Operation* operation) {
  answer(operation->request, kRefused);
  operation->request = nullptr;
}

}  // namespace

Outbox::Outbox(Wire* wire) : wire_(wire), queues_(static_cast<size_t>(wire->num_ranks)) {}

void Outbox::post(Operation operation) {
  const auto slot_bytes = static_cast<uint64_t>(wire_->settings.slot_bytes);
  const uint64_t fragments =
      std::max<uint64_t>(1, (operation.source_bytes + slot_bytes - 1) / slot_bytes);
  operation.message.num_fragments = static_cast<uint32_t>(fragments);
  operation.unread = operation.message.num_fragments;
  queues_[operation.peer].push_back(std::make_shared<Operation>(std::move(operation)));
}

bool Outbox::step(uint64_t now) {
  bool moved = claim_slots(now);
  wire_->maybe_shuffle(&fills_);
  for (Fill& fill : fills_) {
    moved |= advance(&fill, now);
  }
  const auto finished = [](const Fill& fill) { return fill.finished; };
  fills_.erase(std::remove_if(fills_.begin(), fills_.end(), finished), fills_.end());
  return moved;
}

bool Outbox::claim_slots(uint64_t now) {
  bool moved = false;
  for (size_t peer = 0; peer < queues_.size(); ++peer) {
    auto& queue = queues_[peer];
    Segment& segment = wire_->segments[peer];
    if (!queue.empty() && segment.header().closed.load() != 0) {
      for (const auto& operation : queue) {
        answer(operation->request, kComplete);  // read by nobody, ever
      }
      queue.clear();
    }
    while (!queue.empty()) {
      const std::shared_ptr<Operation> operation = queue.front();
      Slot* slot = nullptr;
      char* payload = nullptr;
      if (!claim(operation.get(), segment, &slot, &payload)) {
        break;
      }
      moved = true;
      fills_.push_back({operation, slot, payload, wire_->some_time_from(now), false, false, {}});
      if (operation->claimed == operation->message.num_fragments) {
        queue.pop_front();
      }
    }
  }
  return moved;
}

bool Outbox::claim(Operation* operation, Segment& segment, Slot** slot, char** payload) {
  for (int index = 0; index < segment.num_slots(); ++index) {
    Slot& candidate = segment.slot(wire_->rank, index);
    if (candidate.state.load(std::memory_order_acquire) != kFree) {
      continue;
    }
    candidate.state.store(kClaimed, std::memory_order_relaxed);
    const uint64_t skipped = operation->claimed * segment.header().slot_bytes;
    candidate.message = operation->message;
    candidate.message.fragment = operation->claimed;
    if (operation->source_region != kNoRegion) {
      candidate.message.bytes =
          std::min(operation->source_bytes - skipped, segment.header().slot_bytes);
      candidate.message.offset = operation->message.offset + skipped;
    }
    ++operation->claimed;
    *slot = &candidate;
    *payload = segment.payload(wire_->rank, index);
    return true;
  }
  return false;
}

bool Outbox::advance(Fill* fill, uint64_t now) {
  if (!fill->started && (now < fill->not_before || !start(fill))) {
    return fill->finished;
  }
  const Progress progress = wire_->poll(&fill->ticket);
  if (progress == Progress::kPending) {
    return false;
  }
  finish(fill, progress);
  return true;
}

// False: its source was deregistered, so the fill is finished and its operation refused.
bool Outbox::start(Fill* fill) {
  Operation& operation = *fill->operation;
  const Message& message = fill->slot->message;
  if (operation.source_region == kNoRegion || message.bytes == 0) {
    fill->started = true;
    return true;
  }
  Region* region = wire_->find(operation.source_region);
  if (region == nullptr) {
    refuse(&operation);
    fill->slot->state.store(kFree, std::memory_order_release);
    fill->finished = true;
    return false;
  }
  const uint64_t skipped = message.offset - operation.message.offset;
  wire_->start(fill->payload, region->base + operation.source_offset + skipped, message.bytes,
               *region, Lane::kOut, &fill->ticket);
  ++region->copies;
  fill->started = true;
  return true;
}

void Outbox::finish(Fill* fill, Progress progress) {
  Operation& operation = *fill->operation;
  if (operation.source_region != kNoRegion && fill->slot->message.bytes != 0) {
    if (Region* region = wire_->find(operation.source_region)) {
      --region->copies;
    }
  }
  if (progress == Progress::kFailed) {
    wire_->failed = true;
    refuse(&operation);
  }
  fill->slot->state.store(kFull, std::memory_order_release);
  fill->finished = true;
  if (--operation.unread == 0) {
    answer(operation.request, kComplete);
  }
}

bool Outbox::idle(uint32_t first, uint32_t last) const {
  for (const auto& queue : queues_) {
    for (const auto& operation : queue) {
      if (within(*operation, first, last)) {
        return false;
      }
    }
  }
  return std::none_of(fills_.begin(), fills_.end(), [first, last](const Fill& fill) {
    return within(*fill.operation, first, last);
  });
}

void Outbox::cancel(uint32_t first, uint32_t last) {
  const auto ours = [first, last](const std::shared_ptr<Operation>& operation) {
    return within(*operation, first, last);
  };
  for (auto& queue : queues_) {
    for (const auto& operation : queue) {
      if (ours(operation)) {
        refuse(operation.get());
      }
    }
    queue.erase(std::remove_if(queue.begin(), queue.end(), ours), queue.end());
  }
  for (Fill& fill : fills_) {
    if (!fill.started && ours(fill.operation)) {
      refuse(fill.operation.get());
      fill.slot->state.store(kFree, std::memory_order_release);
      fill.finished = true;
    }
  }
  const auto finished = [](const Fill& fill) { return fill.finished; };
  fills_.erase(std::remove_if(fills_.begin(), fills_.end(), finished), fills_.end());
}

}  // namespace loopback_rma
