// One rank of one collective: its wire, the thread that drives it, its requests and counters.
#pragma once

#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "inbox.h"
#include "loopback_rma.h"
#include "outbox.h"
#include "rma_abi.h"
#include "wire.h"

namespace loopback_rma {

// What each rank tells the others before they connect.
struct Handle {
  uint64_t magic;
  uint64_t host;   // differs between hosts
  uint64_t token;  // names the segment
};

Handle make_handle();

// A put, a signal, or both. Regions as registered by this rank.
struct PutOrder {
  uint32_t context;
  uint32_t peer;
  const Region* source;
  uint64_t source_offset;
  uint64_t bytes;
  const Region* target;
  uint64_t target_offset;
  const Region* signal;  // nullptr: none
  uint64_t signal_offset;
  uint64_t signal_value;
  bool strong;
};

struct GetOrder {
  uint32_t context;
  uint32_t peer;
  const Region* remote;
  uint64_t remote_offset;
  uint64_t bytes;
  const Region* local;
  uint64_t local_offset;
};

class Collective {
 public:
  // Meets the other ranks; throws Refusal if they do not come.
  Collective(const Settings& settings, const std::vector<Handle>& handles, int rank);

  // Ends the thread; writes the counters if asked to.
  ~Collective();

  Collective(const Collective&) = delete;
  Collective& operator=(const Collective&) = delete;

  // Collective, in the same order on all ranks: returns when all have registered theirs, so that
  // any may be put to at once. Throws Refusal.
  Region* add_region(void* data, uint64_t bytes, bool on_gpu, bool never_reset);
  void remove_region(Region* region);

  // Number of the first of `count` contexts.
  uint32_t add_contexts(int count);

  // Waits, a while, until their sources are read.
  void remove_contexts(uint32_t first, int count);

  // Throw Refusal if the order names a rank or memory that is not there.
  Request* put(const PutOrder& order);
  Request* get(const GetOrder& order);
  void flush(uint32_t peer) const { check_peer(peer); }

  // True once the operation is complete here; its request is then gone. Throws Refusal if it
  // failed.
  bool test(Request* request);

  bool failed() const { return wire_.failed; }
  int num_ranks() const { return wire_.num_ranks; }
  void arm(const Fault& fault);
  std::vector<LoopbackRmaRow> rows(int32_t number) const;

 private:
  enum class Fate { kSend, kDrop, kFail };

  void connect(const std::vector<Handle>& handles);
  void open_gpu();
  Region* publish(void* data, uint64_t bytes, bool on_gpu, bool never_reset);
  void check_peer(uint32_t peer) const;
  void check_range(const char* what, const Region* region, int rank, uint64_t offset,
                   uint64_t bytes) const;
  Request* take_request();
  Fate next_fate(uint32_t peer);
  Request* post(Operation operation, LoopbackRmaKind kind, uint64_t bytes);
  void on_get(const Message& message, int source);
  void on_reply(uint64_t cookie);
  void run();
  bool step();
  bool stalled() const;
  void wait_for(std::unique_lock<std::mutex>* lock, const std::function<bool()>& condition);
  void write_stats() const;

  Wire wire_;
  std::unique_ptr<Outbox> outbox_;
  std::unique_ptr<Inbox> inbox_;
  mutable std::mutex mutex_;
  std::condition_variable posted_;
  std::thread thread_;
  bool stopping_ = false;
  std::vector<std::unique_ptr<Region>> removed_;
  uint32_t num_regions_ = 0;
  uint32_t num_contexts_ = 0;

  std::deque<Request> requests_;
  std::vector<Request*> free_requests_;
  std::map<uint64_t, Request*> gets_;  // that wait, by cookie
  uint64_t num_gets_ = 0;
  std::map<std::pair<uint32_t, uint32_t>, uint64_t> sequences_;     // next, by peer and context
  std::map<std::tuple<uint32_t, int, uint64_t>, uint64_t> counts_;  // by peer, kind and bytes

  Fault fault_;
  int64_t operations_ = 0;  // since the fault was armed, to the peers that it names
  uint64_t stalled_until_us_ = 0;
};

}  // namespace loopback_rma
