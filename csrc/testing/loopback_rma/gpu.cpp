#include "gpu.h"

#include <dlfcn.h>

#include <string>

#include "log.h"
#include "settings.h"

namespace loopback_rma {
namespace {

constexpr int kCudaSuccess = 0;
constexpr int kCudaNotReady = 600;
constexpr unsigned kNonBlockingStream = 1;
constexpr unsigned kEventWithoutTiming = 2;
constexpr unsigned kPinForAllContexts = 1;
constexpr int kRelaxedCapture = 2;

// The driver's functions, by the names that cuda.h gives their present versions.
struct Driver {
  int (*cuCtxGetCurrent)(void**);
  int (*cuCtxSetCurrent)(void*);
  int (*cuThreadExchangeStreamCaptureMode)(int*);
  int (*cuCtxGetStreamPriorityRange)(int*, int*);
  int (*cuStreamCreateWithPriority)(void**, unsigned, int);
  int (*cuStreamSynchronize)(void*);
  int (*cuStreamDestroy_v2)(void*);
  int (*cuEventCreate)(void**, unsigned);
  int (*cuEventRecord)(void*, void*);
  int (*cuEventQuery)(void*);
  int (*cuEventDestroy_v2)(void*);
  int (*cuMemcpyAsync)(unsigned long long, unsigned long long, size_t, void*);
  int (*cuMemHostRegister_v2)(void*, size_t, unsigned);
  int (*cuMemHostUnregister)(void*);
  int (*cuGetErrorString)(int, const char**);
};

template <class Function>
void resolve(void* library, const char* name, Function* function) {
  *function = reinterpret_cast<Function>(dlsym(library, name));
  if (*function == nullptr) {
    throw Refusal(std::string("the CUDA driver has no function ") + name);
  }
}

Driver open_driver() {
  void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    throw Refusal(std::string("GPU memory needs the CUDA driver: ") + dlerror());
  }
  Driver driver{};
#define RESOLVE(name) resolve(library, #name, &driver.name)
  RESOLVE(cuCtxGetCurrent);
  RESOLVE(cuCtxSetCurrent);
  RESOLVE(cuThreadExchangeStreamCaptureMode);
  RESOLVE(cuCtxGetStreamPriorityRange);
  RESOLVE(cuStreamCreateWithPriority);
  RESOLVE(cuStreamSynchronize);
  RESOLVE(cuStreamDestroy_v2);
  RESOLVE(cuEventCreate);
  RESOLVE(cuEventRecord);
  RESOLVE(cuEventQuery);
  RESOLVE(cuEventDestroy_v2);
  RESOLVE(cuMemcpyAsync);
  RESOLVE(cuMemHostRegister_v2);
  RESOLVE(cuMemHostUnregister);
  RESOLVE(cuGetErrorString);
#undef RESOLVE
  return driver;
}

const Driver& driver() {
  static const Driver opened = open_driver();
  return opened;
}

std::string words(int error) {
  const char* text = nullptr;
  driver().cuGetErrorString(error, &text);
  return text == nullptr ? "CUDA error " + std::to_string(error) : text;
}

void check(int error, const char* what) {
  if (error != kCudaSuccess) {
    throw Refusal(std::string(what) + " failed: " + words(error));
  }
}

unsigned long long address(const void* pointer) {
  return reinterpret_cast<unsigned long long>(pointer);
}

}  // namespace

Gpu::Gpu(int num_events) {
  const Driver& cuda = driver();
  check(cuda.cuCtxGetCurrent(&context_), "cuCtxGetCurrent");
  if (context_ == nullptr) {
    throw Refusal("GPU memory was registered by a thread that has no CUDA context");
  }
  int lowest = 0, highest = 0;
  check(cuda.cuCtxGetStreamPriorityRange(&lowest, &highest), "cuCtxGetStreamPriorityRange");
  for (void*& stream : streams_) {
    check(cuda.cuStreamCreateWithPriority(&stream, kNonBlockingStream, highest),
          "cuStreamCreateWithPriority");
  }
  for (int index = 0; index < num_events; ++index) {
    void* event = nullptr;
    check(cuda.cuEventCreate(&event, kEventWithoutTiming), "cuEventCreate");
    events_.push_back(event);
  }
  free_events_ = events_;
}

Gpu::~Gpu() {
  const Driver& cuda = driver();
  cuda.cuCtxSetCurrent(context_);
  for (void* stream : streams_) {
    cuda.cuStreamSynchronize(stream);
    cuda.cuStreamDestroy_v2(stream);
  }
  for (void* event : events_) {
    cuda.cuEventDestroy_v2(event);
  }
  for (void* data : pinned_) {
    cuda.cuMemHostUnregister(data);
  }
}

bool Gpu::pin(void* data, size_t bytes) {
  const int error = driver().cuMemHostRegister_v2(data, bytes, kPinForAllContexts);
  if (error != kCudaSuccess) {
    info("host memory could not be page-locked (" + words(error) + "); copies will be slower");
    return false;
  }
  pinned_.push_back(data);
  return true;
}

// A graph that another thread captures is none of this thread's business, and stays whole.
void Gpu::enter() const {
  int mode = kRelaxedCapture;
  driver().cuCtxSetCurrent(context_);
  driver().cuThreadExchangeStreamCaptureMode(&mode);
}

void Gpu::start(void* to, const void* from, size_t bytes, Lane lane, Ticket* ticket) {
  if (free_events_.empty()) {
    throw Refusal("more copies are under way than there are slots");
  }
  const Driver& cuda = driver();
  void* stream = streams_[lane == Lane::kIn];
  check(cuda.cuMemcpyAsync(address(to), address(from), bytes, stream), "cuMemcpyAsync");
  ticket->event = free_events_.back();
  check(cuda.cuEventRecord(ticket->event, stream), "cuEventRecord");
  free_events_.pop_back();
}

Progress Gpu::poll(Ticket* ticket) {
  const int error = driver().cuEventQuery(ticket->event);
  if (error == kCudaNotReady) {
    return Progress::kPending;
  }
  free_events_.push_back(ticket->event);
  ticket->event = nullptr;
  if (error != kCudaSuccess) {
    warn("a copy failed: " + words(error));
    return Progress::kFailed;
  }
  return Progress::kDone;
}

}  // namespace loopback_rma
