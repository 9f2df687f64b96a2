// What a test may ask the plugin for, in the process that NCCL loaded it into: open the same file
// again (dlopen, ctypes.CDLL) and call these. See docs/loopback_rma.md.
#pragma once

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum LoopbackRmaKind { LOOPBACK_RMA_PUT = 0, LOOPBACK_RMA_SIGNAL = 1, LOOPBACK_RMA_GET = 2 };

// Operations of one rank that are alike: `count` of `bytes` each, to `peer`. A put that carries a
// signal counts as both. Ranks are those of the collective (of the rail where NCCL connects rails).
struct LoopbackRmaRow {
  int32_t collective;  // numbered in this process from 0; stays the same while others close
  int32_t num_ranks;
  int32_t rank;
  int32_t peer;
  int32_t kind;
  int32_t reserved;
  uint64_t bytes;
  uint64_t count;
};

// Copies at most `capacity` rows of the collectives that are open here; returns how many there are.
int loopback_rma_read(struct LoopbackRmaRow* rows, int capacity);

// Arms a fault (syntax of LOOPBACK_RMA_FAULT, "" for none) in all collectives that are open here;
// its `after` counts from now. Returns 0, or -1 if the text is malformed or the fault can happen in
// none of them: no rank or peer of that number, or none open.
int loopback_rma_inject(const char* fault);

#ifdef __cplusplus
}
#endif
