#include "collective.h"

#include <unistd.h>

#include <cstdio>
#include <fstream>
#include <random>

#include "log.h"

namespace loopback_rma {
namespace {

constexpr uint64_t kMagic = 0x4c6f6f70524d4131ull;
constexpr uint32_t kReplies = 0x80000000u;  // contexts of answers to a get
constexpr uint64_t kForEver = UINT64_MAX;
constexpr auto kPatience = std::chrono::seconds(2);  // with peers, when something is closed
constexpr auto kNap = std::chrono::microseconds(50);
constexpr int kIdleLooks = 2000;  // before the first nap

uint64_t host_number() {
  std::string text;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> text;
  return std::hash<std::string>()(text);
}

std::string path_of(const Settings& settings, const Handle& handle) {
  char name[64];
  std::snprintf(name, sizeof(name), "/loopback-rma-%016llx",
                static_cast<unsigned long long>(handle.token));
  return settings.folder + name;
}

std::string range_text(uint64_t offset, uint64_t bytes) {
  return "[" + std::to_string(offset) + ", " + std::to_string(offset + bytes) + ")";
}

}  // namespace

Handle make_handle() {
  std::random_device device;
  const uint64_t token = (uint64_t{device()} << 32) ^ device() ^ static_cast<uint64_t>(getpid());
  return {kMagic, host_number(), token};
}

Collective::Collective(const Settings& settings, const std::vector<Handle>& handles, int rank) {
  wire_.settings = settings;
  wire_.rank = rank;
  wire_.num_ranks = static_cast<int>(handles.size());
  wire_.random.seed(settings.seed * 1000003 + static_cast<uint64_t>(rank));
  const std::string never = why_never(settings.fault, wire_.num_ranks);
  if (!never.empty()) {  // before any wait for peers
    throw Refusal("LOOPBACK_RMA_FAULT: " + never);
  }
  connect(handles);
  arm(settings.fault);
  outbox_ = std::make_unique<Outbox>(&wire_);
  inbox_ = std::make_unique<Inbox>(
      &wire_, [this](const Message& message, int source) { on_get(message, source); },
      [this](uint64_t cookie) { on_reply(cookie); });
  thread_ = std::thread([this] { run(); });
}

void Collective::connect(const std::vector<Handle>& handles) {
  for (const Handle& handle : handles) {
    if (handle.magic != kMagic || handle.host != host_number()) {
      throw Refusal("a peer runs on another host; this plugin joins ranks of one host only");
    }
  }
  const auto me = static_cast<size_t>(wire_.rank);
  Segment own =
      Segment::create(path_of(wire_.settings, handles[me]), wire_.num_ranks, wire_.settings);
  wire_.segments.resize(handles.size());
  for (size_t peer = 0; peer < handles.size(); ++peer) {
    if (peer != me) {
      wire_.segments[peer] =
          Segment::open(path_of(wire_.settings, handles[peer]), wire_.num_ranks, wire_.settings);
    }
  }
  wire_.segments[me] = std::move(own);
  // Once all have opened it nothing is left behind, however this process ends.
  const uint64_t deadline = time_us() + static_cast<uint64_t>(wire_.settings.timeout_s) * 1000000;
  while (wire_.own().header().attached.load() < handles.size()) {
    if (time_us() > deadline) {
      throw Refusal("only " + std::to_string(wire_.own().header().attached.load()) + " of " +
                    std::to_string(handles.size()) + " ranks connected in time");
    }
    std::this_thread::sleep_for(kNap);
  }
  wire_.own().unlink();
}

Collective::~Collective() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
    wire_.own().header().closed = 1;
  }
  posted_.notify_all();
  thread_.join();
  if (!wire_.settings.stats.empty()) {
    write_stats();
  }
}

Region* Collective::add_region(void* data, uint64_t bytes, bool on_gpu, bool never_reset) {
  Region* region = publish(data, bytes, on_gpu, never_reset);
  const uint64_t deadline = time_us() + static_cast<uint64_t>(wire_.settings.timeout_s) * 1000000;
  for (int peer = 0; peer < wire_.num_ranks; ++peer) {
    const SegmentHeader& header = wire_.segments[static_cast<size_t>(peer)].header();
    while (header.regions[region->number].state.load(std::memory_order_acquire) == kUnknown) {
      if (time_us() > deadline) {
        throw Refusal("rank " + std::to_string(peer) + " did not register region " +
                      std::to_string(region->number) + " in time");
      }
      std::this_thread::sleep_for(kNap);
    }
  }
  return region;
}

Region* Collective::publish(void* data, uint64_t bytes, bool on_gpu, bool never_reset) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (num_regions_ == kMaxRegions) {
    throw Refusal("more than " + std::to_string(kMaxRegions) +
                  " registrations; this plugin "
                  "counts them over the life of a communicator");
  }
  if (on_gpu && wire_.gpu == nullptr) {
    open_gpu();
  }
  auto region = std::make_unique<Region>(
      Region{num_regions_++, static_cast<char*>(data), bytes, on_gpu, never_reset});
  RegionEntry& entry = wire_.own().header().regions[region->number];
  entry.bytes = bytes;
  entry.state.store(kRegistered, std::memory_order_release);
  Region* kept = region.get();
  wire_.regions[kept->number] = std::move(region);
  return kept;
}

// One event for each copy that slots allow, in and out, and one for the signal.
void Collective::open_gpu() {
  const int slots = wire_.num_ranks * static_cast<int>(wire_.settings.slots);
  wire_.gpu = std::make_unique<Gpu>(2 * slots + 1);
  bool pinned = wire_.gpu->pin(wire_.own().data(), wire_.own().bytes());
  for (int peer = 0; pinned && peer < wire_.num_ranks; ++peer) {
    Segment& segment = wire_.segments[static_cast<size_t>(peer)];
    if (peer != wire_.rank) {
      pinned = wire_.gpu->pin(segment.lane(wire_.rank), segment.lane_bytes());
    }
  }
}

void Collective::remove_region(Region* region) {
  std::unique_lock<std::mutex> lock(mutex_);
  wire_.own().header().regions[region->number].state = kGone;
  wait_for(&lock, [region] { return region->copies == 0; });
  if (region->copies != 0) {
    warn("memory is deregistered while a copy uses it");
  }
  // NCCL's thread may still post what a kernel had queued: check_range then finds it gone.
  removed_.push_back(std::move(wire_.regions.at(region->number)));
  wire_.regions.erase(region->number);
}

uint32_t Collective::add_contexts(int count) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const uint32_t first = num_contexts_;
  num_contexts_ += static_cast<uint32_t>(count);
  return first;
}

void Collective::remove_contexts(uint32_t first, int count) {
  if (count == 0) {
    return;
  }
  std::unique_lock<std::mutex> lock(mutex_);
  const uint32_t last = first + static_cast<uint32_t>(count) - 1;
  const auto idle = [this, first, last] { return outbox_->idle(first, last); };
  if (!stalled()) {
    wait_for(&lock, idle);
  }
  if (!idle()) {
    warn("contexts of rank " + std::to_string(wire_.rank) +
         " are closed with puts whose sources were not read yet; they are dropped");
    outbox_->cancel(first, last);
  }
}

void Collective::wait_for(std::unique_lock<std::mutex>* lock,
                          const std::function<bool()>& condition) {
  const auto deadline = std::chrono::steady_clock::now() + kPatience;
  while (!condition() && std::chrono::steady_clock::now() < deadline) {
    lock->unlock();
    std::this_thread::sleep_for(kNap);
    lock->lock();
  }
}

void Collective::check_peer(uint32_t peer) const {
  if (peer >= static_cast<uint32_t>(wire_.num_ranks)) {
    throw Refusal("peer " + std::to_string(peer) + " of an operation by rank " +
                  std::to_string(wire_.rank) + "; ranks are 0 to " +
                  std::to_string(wire_.num_ranks - 1));
  }
}

void Collective::check_range(const char* what, const Region* region, int rank, uint64_t offset,
                             uint64_t bytes) const {
  const std::string where = std::string(what) + " of a put or get by rank " +
                            std::to_string(wire_.rank) + ": " + range_text(offset, bytes);
  if (region == nullptr) {
    throw Refusal(where + " of no region");
  }
  const RegionEntry& entry =
      wire_.segments[static_cast<size_t>(rank)].header().regions[region->number];
  if (entry.state.load(std::memory_order_acquire) != kRegistered) {
    throw Refusal(where + ", but rank " + std::to_string(rank) + " has no region " +
                  std::to_string(region->number));
  }
  if (offset > entry.bytes || bytes > entry.bytes - offset) {
    throw Refusal(where + " lies outside region " + std::to_string(region->number) + " of rank " +
                  std::to_string(rank) + ", which has " + std::to_string(entry.bytes) + " bytes");
  }
}

Request* Collective::put(const PutOrder& order) {
  const std::lock_guard<std::mutex> lock(mutex_);
  check_peer(order.peer);
  const int peer = static_cast<int>(order.peer);
  if (order.bytes != 0) {
    check_range("source", order.source, wire_.rank, order.source_offset, order.bytes);
    check_range("target", order.target, peer, order.target_offset, order.bytes);
  }
  Operation operation{};
  operation.message.kind = MessageKind::kPut;
  operation.message.context = order.context;
  operation.message.region = order.bytes != 0 ? order.target->number : kNoRegion;
  operation.message.offset = order.target_offset;
  operation.message.signal_region = kNoRegion;
  if (order.signal != nullptr) {
    check_range("signal", order.signal, peer, order.signal_offset, sizeof(uint64_t));
    operation.message.signal_region = order.signal->number;
    operation.message.signal_offset = order.signal_offset;
    operation.message.signal_value = order.signal_value;
    operation.message.strong = order.strong ? 1 : 0;
    ++counts_[{order.peer, LOOPBACK_RMA_SIGNAL, 0}];
  }
  operation.peer = order.peer;
  operation.source_region = order.bytes != 0 ? order.source->number : kNoRegion;
  operation.source_offset = order.source_offset;
  operation.source_bytes = order.bytes;
  return post(std::move(operation), LOOPBACK_RMA_PUT, order.bytes);
}

Request* Collective::get(const GetOrder& order) {
  const std::lock_guard<std::mutex> lock(mutex_);
  check_peer(order.peer);
  check_range("source", order.remote, static_cast<int>(order.peer), order.remote_offset,
              order.bytes);
  check_range("target", order.local, wire_.rank, order.local_offset, order.bytes);
  Operation operation{};
  Message& message = operation.message;
  message.kind = MessageKind::kGetRequest;
  message.context = order.context;
  message.region = order.remote->number;
  message.offset = order.remote_offset;
  message.bytes = order.bytes;
  message.signal_region = kNoRegion;
  message.reply_region = order.local->number;
  message.reply_offset = order.local_offset;
  message.cookie = num_gets_;
  operation.peer = order.peer;
  operation.source_region = kNoRegion;
  Request* request = post(std::move(operation), LOOPBACK_RMA_GET, order.bytes);
  gets_[num_gets_++] = request;
  return request;
}

// Gives an operation its number and its fate. Requests to get are complete when the reply is.
Request* Collective::post(Operation operation, LoopbackRmaKind kind, uint64_t bytes) {
  Request* request = take_request();
  if (kind == LOOPBACK_RMA_GET || bytes != 0) {
    ++counts_[{operation.peer, kind, bytes}];
  }
  operation.request = kind == LOOPBACK_RMA_GET ? nullptr : request;
  operation.message.sequence = sequences_[{operation.peer, operation.message.context}]++;
  const Fate fate = next_fate(operation.peer);
  if (fate == Fate::kSend) {
    outbox_->post(std::move(operation));
    posted_.notify_one();
  } else if (fate == Fate::kFail) {
    request->state = kRefused;
  } else if (kind != LOOPBACK_RMA_GET) {  // a get that was lost is never complete
    request->state = kComplete;
  }
  return request;
}

Request* Collective::take_request() {
  if (free_requests_.empty()) {
    requests_.emplace_back();
    return &requests_.back();
  }
  Request* request = free_requests_.back();
  free_requests_.pop_back();
  request->state = kPosted;
  return request;
}

bool Collective::test(Request* request) {
  const int state = request->state.load(std::memory_order_acquire);
  if (state == kPosted) {
    return false;
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  free_requests_.push_back(request);
  if (state == kRefused) {
    wire_.failed = true;
    throw Refusal("an operation of rank " + std::to_string(wire_.rank) + " failed");
  }
  return true;
}

void Collective::arm(const Fault& fault) {
  const std::lock_guard<std::mutex> lock(mutex_);
  fault_ = fault;
  operations_ = 0;
  stalled_until_us_ = 0;
}

Collective::Fate Collective::next_fate(uint32_t peer) {
  const bool here = fault_.rank < 0 || fault_.rank == wire_.rank;
  const bool there = fault_.peer < 0 || fault_.peer == static_cast<int>(peer);
  if (fault_.kind == FaultKind::kNone || !here || !there) {
    return Fate::kSend;
  }
  const int64_t number = operations_++ - fault_.after;
  if (number < 0 || number >= fault_.count) {
    return Fate::kSend;
  }
  if (fault_.kind == FaultKind::kStall) {
    if (number == 0) {
      stalled_until_us_ =
          fault_.ms == 0 ? kForEver : time_us() + static_cast<uint64_t>(fault_.ms) * 1000;
    }
    return Fate::kSend;
  }
  return fault_.kind == FaultKind::kDrop ? Fate::kDrop : Fate::kFail;
}

void Collective::on_get(const Message& message, int source) {
  Operation reply{};
  reply.message = message;
  reply.message.kind = MessageKind::kGetReply;
  reply.message.context = message.context | kReplies;
  reply.message.region = message.reply_region;
  reply.message.offset = message.reply_offset;
  reply.peer = static_cast<uint32_t>(source);
  reply.message.sequence = sequences_[{reply.peer, reply.message.context}]++;
  reply.source_region = message.region;
  reply.source_offset = message.offset;
  reply.source_bytes = message.bytes;
  outbox_->post(std::move(reply));
}

void Collective::on_reply(uint64_t cookie) {
  const auto found = gets_.find(cookie);
  if (found != gets_.end()) {
    found->second->state.store(kComplete, std::memory_order_release);
    gets_.erase(found);
  }
}

bool Collective::stalled() const {
  return time_us() < stalled_until_us_;
}

void Collective::run() {
  int idle_looks = 0;
  std::unique_lock<std::mutex> lock(mutex_);
  while (!stopping_) {
    idle_looks = step() ? 0 : idle_looks + 1;
    if (idle_looks > kIdleLooks) {
      posted_.wait_for(lock, kNap);
    } else {
      lock.unlock();
      std::this_thread::yield();
      lock.lock();
    }
  }
  wire_.gpu.reset();  // waits for its copies
}

bool Collective::step() {
  if (stalled()) {
    return false;
  }
  try {
    if (wire_.gpu != nullptr) {
      wire_.gpu->enter();
    }
    const uint64_t now = time_us();
    const bool sent = outbox_->step(now);
    return inbox_->step(now) || sent;
  } catch (const Refusal& refusal) {
    warn(refusal.what());
    wire_.failed = true;
    stalled_until_us_ = kForEver;
    return false;
  }
}

std::vector<LoopbackRmaRow> Collective::rows(int32_t number) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::vector<LoopbackRmaRow> rows;
  for (const auto& [key, count] : counts_) {
    const auto& [peer, kind, bytes] = key;
    rows.push_back(
        {number, wire_.num_ranks, wire_.rank, static_cast<int32_t>(peer), kind, 0, bytes, count});
  }
  return rows;
}

void Collective::write_stats() const {
  static const char* const kKinds[] = {"put", "signal", "get"};
  const std::string path = wire_.settings.stats + "/loopback-rma-" + std::to_string(getpid()) +
                           "-rank" + std::to_string(wire_.rank) + ".jsonl";
  std::ofstream file(path, std::ios::app);
  for (const LoopbackRmaRow& row : rows(0)) {
    file << "{\"rank\": " << row.rank << ", \"num_ranks\": " << row.num_ranks
         << ", \"peer\": " << row.peer << ", \"kind\": \"" << kKinds[row.kind]
         << "\", \"bytes\": " << row.bytes << ", \"count\": " << row.count << "}\n";
  }
  if (!file) {
    warn("counters could not be written to " + path);
  }
}

}  // namespace loopback_rma
