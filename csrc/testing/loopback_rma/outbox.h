// The sending half: posted operations wait for a slot at their peer, their sources are read into
// it, and the slot is handed over. An operation is locally complete once its source was read:
// that is all that GIN promises of a flush, so that whoever relies on more is found out.
#pragma once

#include <deque>
#include <memory>
#include <vector>

#include "wire.h"

namespace loopback_rma {

struct Operation {
  Message message;  // of the first fragment; `bytes` and `offset` of the whole
  uint32_t peer;
  uint32_t source_region;  // kNoRegion: nothing to read
  uint64_t source_offset;
  uint64_t source_bytes;  // 0 for signals and requests to get
  Request* request;       // nullptr: nobody waits
  uint32_t claimed = 0;   // fragments that have a slot
  uint32_t unread = 0;    // fragments whose source was not read yet
};

class Outbox {
 public:
  explicit Outbox(Wire* wire);

  void post(Operation operation);

  // One look at everything; true if something moved.
  bool step(uint64_t now);

  // Whether nothing of the contexts [first, last] is still to be read.
  bool idle(uint32_t first, uint32_t last) const;

  // Drops what is still to be read of those contexts; copies under way go on.
  void cancel(uint32_t first, uint32_t last);

 private:
  struct Fill {
    std::shared_ptr<Operation> operation;
    Slot* slot;
    char* payload;
    uint64_t not_before;
    bool started;
    bool finished;
    Ticket ticket;
  };

  bool claim_slots(uint64_t now);
  bool claim(Operation* operation, Segment& segment, Slot** slot, char** payload);
  bool advance(Fill* fill, uint64_t now);
  bool start(Fill* fill);
  void finish(Fill* fill, Progress progress);

  Wire* wire_;
  std::vector<std::deque<std::shared_ptr<Operation>>> queues_;  // by peer
  std::vector<Fill> fills_;
};

}  // namespace loopback_rma
