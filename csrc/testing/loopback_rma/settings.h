// The plugin's settings: environment variables, as NCCL gives a plugin no other way to be told.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

namespace loopback_rma {

// A setting or a call that cannot work; the message says what would.
class Refusal : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

enum class FaultKind { kNone, kDrop, kFail, kStall };

// What goes wrong on purpose. Operations are those that `rank` posts to `peer`.
struct Fault {
  FaultKind kind = FaultKind::kNone;
  int rank = -1;      // of the collective; -1 for every rank
  int peer = -1;      // -1 for every peer
  int64_t after = 0;  // operations that still go well
  int64_t count = 1;  // operations that go wrong then
  int64_t ms = 0;     // length of a stall; 0: for ever
};

struct Settings {
  uint64_t seed = 1;
  int64_t delay_us = 0;  // most, of each half of a transfer
  bool reorder = false;
  int64_t slots = 16;  // fragments in flight between two ranks
  int64_t slot_bytes = 32768;
  int64_t timeout_s = 60;  // for peers to connect
  std::string folder = "/dev/shm";
  std::string stats;  // folder for counters at teardown; empty for none
  Fault fault;
};

// Throws Refusal naming the variable, its value and what is allowed.
Settings read_settings();

// Throws Refusal. Example: "drop:rank=1:after=10:count=2".
Fault parse_fault(const std::string& text);

// Why a fault can never happen among so many ranks; empty where it can, or where there is none.
std::string why_never(const Fault& fault, int num_ranks);

}  // namespace loopback_rma
