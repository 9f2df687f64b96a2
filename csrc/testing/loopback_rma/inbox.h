// The receiving half: full slots are copied to their targets and freed; a signal is added when what
// it stands for has arrived. Weak: the message that carries it. Strong: also every message that its
// sender posted before it, to this rank, in the same context.
#pragma once

#include <functional>
#include <map>
#include <set>
#include <utility>
#include <vector>

#include "wire.h"

namespace loopback_rma {

class Inbox {
 public:
  // Called with a request to get, and the rank that asks.
  using OnGet = std::function<void(const Message& message, int source)>;
  // Called with the cookie of a get whose bytes have all arrived.
  using OnReply = std::function<void(uint64_t cookie)>;

  Inbox(Wire* wire, OnGet on_get, OnReply on_reply);

  // One look at everything; true if something moved.
  bool step(uint64_t now);

 private:
  struct Arrival {
    int source;
    Slot* slot;
    char* payload;
    uint64_t not_before;
    bool started;
    bool finished;
    Ticket ticket;
  };

  // Messages of one source in one context.
  struct Track {
    uint64_t next = 0;                       // the first message that is not complete
    std::set<uint64_t> complete;             // beyond it
    std::map<uint64_t, uint32_t> fragments;  // that have arrived, of incomplete messages
  };
  using TrackKey = std::pair<int, uint32_t>;

  struct Signal {
    TrackKey track;
    Message message;
    uint64_t not_before;
  };

  enum class Phase { kNone, kReading, kWriting };

  bool take_slots(uint64_t now);
  bool advance(Arrival* arrival, uint64_t now);
  Region* target_of(const Message& message, int source);
  void finish(Arrival* arrival, uint64_t now);
  void complete(const Message& message, int source, uint64_t now);
  bool step_signals(uint64_t now);
  bool may_signal(const Signal& signal, uint64_t now);
  void begin_signal(const Signal& signal);
  bool continue_signal();
  void write_word();

  Wire* wire_;
  OnGet on_get_;
  OnReply on_reply_;
  std::vector<Arrival> arrivals_;
  std::map<TrackKey, Track> tracks_;
  std::vector<Signal> signals_;

  // The one signal that is being added.
  Phase phase_ = Phase::kNone;
  Message current_{};
  Ticket ticket_;
  std::map<std::pair<uint32_t, uint64_t>, uint64_t> words_;  // of regions that only signals write
};

}  // namespace loopback_rma
