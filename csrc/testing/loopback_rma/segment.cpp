#include "segment.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <new>
#include <thread>
#include <utility>

namespace loopback_rma {
namespace {

constexpr uint64_t kReady = 0x6c6f6f706261636bull;
constexpr size_t kPage = 4096;

size_t align_up(size_t bytes, size_t step) {
  return (bytes + step - 1) / step * step;
}

size_t slot_stride(uint64_t slot_bytes) {
  return align_up(sizeof(Slot) + slot_bytes, alignof(Slot));
}

size_t lane_size(uint64_t slots, uint64_t slot_bytes) {
  return align_up(slots * slot_stride(slot_bytes), kPage);
}

size_t segment_size(int num_ranks, const Settings& settings) {
  return align_up(sizeof(SegmentHeader), kPage) +
         static_cast<size_t>(num_ranks) * lane_size(static_cast<uint64_t>(settings.slots),
                                                    static_cast<uint64_t>(settings.slot_bytes));
}

void check_room(const Settings& settings, size_t bytes) {
  struct statvfs facts{};
  if (statvfs(settings.folder.c_str(), &facts) != 0) {
    throw Refusal("LOOPBACK_RMA_FOLDER is '" + settings.folder + "': " + std::strerror(errno) +
                  "; it must be a folder in memory that all ranks see");
  }
  const uint64_t room = uint64_t{facts.f_bavail} * facts.f_bsize;
  if (room < bytes) {
    throw Refusal(settings.folder + " has room for " + std::to_string(room) +
                  " bytes; a rank "
                  "needs " +
                  std::to_string(bytes) +
                  ". Make it larger (in a container: "
                  "--shm-size), or set LOOPBACK_RMA_FOLDER or a smaller LOOPBACK_RMA_SLOTS");
  }
}

// Maps the file and closes it. Throws Refusal.
void* map_file(int file, const std::string& path, size_t bytes) {
  void* data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  const int error = errno;
  close(file);
  if (data == MAP_FAILED) {
    throw Refusal("mmap of " + path + " failed: " + std::strerror(error));
  }
  return data;
}

// The file descriptor once the owner has given the file its size; -1 before.
int try_open(const std::string& path, size_t bytes) {
  const int file = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
  struct stat facts{};
  if (file >= 0 && (fstat(file, &facts) != 0 || static_cast<size_t>(facts.st_size) != bytes)) {
    close(file);
    return -1;
  }
  return file;
}

}  // namespace

Segment Segment::create(const std::string& path, int num_ranks, const Settings& settings) {
  const size_t bytes = segment_size(num_ranks, settings);
  check_room(settings, bytes);
  const int file = ::open(path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
  if (file < 0) {
    throw Refusal("could not make " + path + ": " + std::strerror(errno));
  }
  Segment segment(path, nullptr, bytes);
  segment.named_ = true;
  if (ftruncate(file, static_cast<off_t>(bytes)) != 0) {
    const int error = errno;
    close(file);
    throw Refusal("could not make " + path + ": " + std::strerror(error));
  }
  segment.data_ = map_file(file, path, bytes);
  auto* header = new (segment.data_) SegmentHeader{};  // a new file is all zero: slots are free
  header->num_ranks = static_cast<uint32_t>(num_ranks);
  header->num_slots = static_cast<uint32_t>(settings.slots);
  header->slot_bytes = static_cast<uint64_t>(settings.slot_bytes);
  header->attached = 1;
  header->ready.store(kReady, std::memory_order_release);
  return segment;
}

Segment Segment::open(const std::string& path, int num_ranks, const Settings& settings) {
  using Clock = std::chrono::steady_clock;
  const auto deadline = Clock::now() + std::chrono::seconds(settings.timeout_s);
  const size_t bytes = segment_size(num_ranks, settings);
  int file = -1;
  while ((file = try_open(path, bytes)) < 0) {
    if (Clock::now() > deadline) {
      throw Refusal("a peer did not make " + path + " in " + std::to_string(settings.timeout_s) +
                    " s; all ranks must run on one host, see the same LOOPBACK_RMA_FOLDER and "
                    "have the same LOOPBACK_RMA_SLOTS and _SLOT_BYTES");
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  Segment segment(path, map_file(file, path, bytes), bytes);
  while (segment.header().ready.load(std::memory_order_acquire) != kReady) {
    if (Clock::now() > deadline) {
      throw Refusal("a peer did not fill " + path + " in time");
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  if (segment.header().num_slots != settings.slots) {
    throw Refusal("LOOPBACK_RMA_SLOTS differs between ranks");
  }
  segment.header().attached.fetch_add(1);
  return segment;
}

Segment::Segment(std::string path, void* data, size_t bytes)
    : path_(std::move(path)), data_(data), bytes_(bytes) {}

Segment::Segment(Segment&& other) noexcept {
  *this = std::move(other);
}

Segment& Segment::operator=(Segment&& other) noexcept {
  std::swap(path_, other.path_);
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  std::swap(named_, other.named_);
  return *this;
}

Segment::~Segment() {
  unlink();
  if (data_ != nullptr) {
    munmap(data_, bytes_);
  }
}

void* Segment::lane(int source) const {
  return static_cast<char*>(data_) + align_up(sizeof(SegmentHeader), kPage) +
         static_cast<size_t>(source) * lane_bytes();
}

size_t Segment::lane_bytes() const {
  return lane_size(header().num_slots, header().slot_bytes);
}

Slot& Segment::slot(int source, int index) const {
  return *reinterpret_cast<Slot*>(static_cast<char*>(lane(source)) +
                                  static_cast<size_t>(index) * slot_stride(header().slot_bytes));
}

char* Segment::payload(int source, int index) const {
  return reinterpret_cast<char*>(&slot(source, index)) + sizeof(Slot);
}

void Segment::unlink() {
  if (named_) {
    named_ = false;
    ::unlink(path_.c_str());
  }
}

}  // namespace loopback_rma
