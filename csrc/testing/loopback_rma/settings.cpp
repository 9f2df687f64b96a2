#include "settings.h"

#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <set>

namespace loopback_rma {
namespace {

std::string text_of(const char* name, const std::string& otherwise) {
  const char* value = std::getenv(name);
  return value == nullptr ? otherwise : value;
}

int64_t number_in(const std::string& where, const std::string& text, int64_t low, int64_t high) {
  errno = 0;
  char* end = nullptr;
  const long long value = std::strtoll(text.c_str(), &end, 10);
  if (text.empty() || *end != '\0' || errno != 0 || value < low || value > high) {
    throw Refusal(where + " is '" + text + "'; it must be a whole number in [" +
                  std::to_string(low) + ", " + std::to_string(high) + "]");
  }
  return value;
}

int64_t number_of(const char* name, int64_t otherwise, int64_t low, int64_t high) {
  const char* value = std::getenv(name);
  return value == nullptr ? otherwise : number_in(name, value, low, high);
}

// The folder of the counters, which are written when all else is done: too late to be told.
std::string writable_folder(const char* name) {
  std::string folder = text_of(name, "");
  if (folder.empty()) {
    return folder;
  }
  struct stat facts{};
  errno = 0;
  if (stat(folder.c_str(), &facts) == 0 && !S_ISDIR(facts.st_mode)) {
    errno = ENOTDIR;
  }
  if (errno != 0 || access(folder.c_str(), W_OK | X_OK) != 0) {
    throw Refusal(std::string(name) + " is '" + folder + "': " + std::strerror(errno) +
                  "; it must be a folder that can be written to, made before the start");
  }
  return folder;
}

std::string field_name(const std::string& name) {
  return "field '" + name + "' of a fault";
}

void set_field(Fault* fault, std::set<std::string>* given, const std::string& field) {
  const size_t split = field.find('=');
  const std::string name = field.substr(0, split);
  const std::string value = split == std::string::npos ? "" : field.substr(split + 1);
  const std::string where = field_name(name);
  if (!given->insert(name).second) {
    throw Refusal(where + " is given twice, the second time as '" + value +
                  "'; give each field once");
  }
  if (name == "rank") {
    fault->rank = static_cast<int>(number_in(where, value, -1, 1 << 20));
  } else if (name == "peer") {
    fault->peer = static_cast<int>(number_in(where, value, -1, 1 << 20));
  } else if (name == "after") {
    fault->after = number_in(where, value, 0, INT64_MAX);
  } else if (name == "count") {
    fault->count = number_in(where, value, 1, INT64_MAX);
  } else if (name == "ms") {
    fault->ms = number_in(where, value, 0, INT64_MAX / 1000000);
  } else {
    throw Refusal(where + " is unknown; there are rank, peer, after, count and ms");
  }
}

// A field that its kind does not read would be a fault that is not the one that was asked for.
void check_fields(const Fault& fault, const std::set<std::string>& given) {
  const bool stalls = fault.kind == FaultKind::kStall;
  const std::string name = stalls ? "count" : "ms";
  if (given.count(name) != 0) {
    throw Refusal(field_name(name) + " is " + std::to_string(stalls ? fault.count : fault.ms) +
                  (stalls ? ", but a stall begins once" : ", but only a stall has a length") +
                  "; drop and fail take rank, peer, after and count, stall takes rank, peer, "
                  "after and ms");
  }
}

std::string outside(const std::string& name, int value, int num_ranks) {
  return field_name(name) + " is " + std::to_string(value) + "; ranks are 0 to " +
         std::to_string(num_ranks - 1) + " here, and -1 is all of them";
}

}  // namespace

std::string why_never(const Fault& fault, int num_ranks) {
  if (fault.kind != FaultKind::kNone && fault.rank >= num_ranks) {
    return outside("rank", fault.rank, num_ranks);
  }
  if (fault.kind != FaultKind::kNone && fault.peer >= num_ranks) {
    return outside("peer", fault.peer, num_ranks);
  }
  return "";
}

Fault parse_fault(const std::string& text) {
  Fault fault;
  if (text.empty()) {
    return fault;
  }
  size_t end = text.find(':');
  const std::string kind = text.substr(0, end);
  if (kind == "drop") {
    fault.kind = FaultKind::kDrop;
  } else if (kind == "fail") {
    fault.kind = FaultKind::kFail;
  } else if (kind == "stall") {
    fault.kind = FaultKind::kStall;
  } else {
    throw Refusal("fault '" + kind +
                  "' is unknown; there are drop, fail and stall, for example "
                  "drop:rank=1:after=10");
  }
  std::set<std::string> given;
  while (end != std::string::npos) {
    const size_t start = end + 1;
    end = text.find(':', start);
    set_field(&fault, &given, text.substr(start, end == std::string::npos ? end : end - start));
  }
  check_fields(fault, given);
  return fault;
}

Settings read_settings() {
  Settings settings;
  settings.seed = static_cast<uint64_t>(number_of("LOOPBACK_RMA_SEED", 1, 0, INT64_MAX));
  settings.delay_us = number_of("LOOPBACK_RMA_DELAY_US", 0, 0, 10000000);
  settings.reorder = number_of("LOOPBACK_RMA_REORDER", 0, 0, 1) == 1;
  settings.slots = number_of("LOOPBACK_RMA_SLOTS", settings.slots, 1, 4096);
  settings.slot_bytes = number_of("LOOPBACK_RMA_SLOT_BYTES", settings.slot_bytes, 16, 1 << 26);
  settings.timeout_s = number_of("LOOPBACK_RMA_TIMEOUT_S", settings.timeout_s, 1, 3600);
  settings.folder = text_of("LOOPBACK_RMA_FOLDER", settings.folder);
  settings.stats = writable_folder("LOOPBACK_RMA_STATS");
  settings.fault = parse_fault(text_of("LOOPBACK_RMA_FAULT", ""));
  return settings;
}

}  // namespace loopback_rma
