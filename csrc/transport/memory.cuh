// Loads, stores, fences and bulk copies as named one-liners that state their order and scope.
// PTX ISA 8.8, sections "Memory Consistency Model" and "cp.async.bulk".
#pragma once

#include <cstdint>

namespace ep {

// --- words that other ranks read or write: system scope ---

__device__ __forceinline__ uint64_t load_acquire_sys(const uint64_t* word) {
  uint64_t value;
  asm volatile("ld.acquire.sys.global.b64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
  return value;
}

__device__ __forceinline__ uint64_t load_relaxed_sys(const uint64_t* word) {
  uint64_t value;
  asm volatile("ld.relaxed.sys.global.b64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
  return value;
}

__device__ __forceinline__ void store_release_sys(uint64_t* word, uint64_t value) {
  asm volatile("st.release.sys.global.b64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
}

__device__ __forceinline__ void store_relaxed_sys(uint64_t* word, uint64_t value) {
  asm volatile("st.relaxed.sys.global.b64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
}

// For readers on the same GPU.
__device__ __forceinline__ void store_release_gpu(uint64_t* word, uint64_t value) {
  asm volatile("st.release.gpu.global.b64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
}

// Orders all earlier accesses of this thread, and those it has observed, before its later ones.
__device__ __forceinline__ void fence_sys() {
  asm volatile("fence.acq_rel.sys;" ::: "memory");
}

// Orders accesses of the bulk copy engine and ordinary ones, in global and shared memory.
__device__ __forceinline__ void fence_proxy_async() {
  asm volatile("fence.proxy.async;" ::: "memory");
}

__device__ __forceinline__ void fence_proxy_async_shared() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

__device__ __forceinline__ uint64_t time_ns() {
  uint64_t now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}

// --- values and policies ---

// For data that is touched once: it goes first from the L2.
__device__ __forceinline__ uint64_t evict_first_policy() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

__device__ __forceinline__ uint64_t evict_normal_policy() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// A value that another rank wrote during this kernel: not from the L1.
__device__ __forceinline__ float load_float(const float* from) {
  float value;
  asm volatile("ld.relaxed.sys.global.f32 %0, [%1];" : "=f"(value) : "l"(from) : "memory");
  return value;
}

// A vector that is not read soon: it goes first from the caches.
__device__ __forceinline__ void store_once(uint4* to, const uint4& value) {
  asm volatile("st.global.cs.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(value.x), "r"(value.y),
               "r"(value.z), "r"(value.w)
               : "memory");
}

// --- barriers in shared memory ---

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ void mbarrier_init(uint64_t* barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)),
               "r"(arrivals)
               : "memory");
}

// Makes initialised barriers visible to the bulk copy engine.
__device__ __forceinline__ void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void mbarrier_arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier))
               : "memory");
}

__device__ __forceinline__ void mbarrier_expect(uint64_t* barrier, uint32_t bytes) {
  asm volatile(
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
      "r"(bytes)
      : "memory");
}

// True once the phase of that parity is complete; may return false after a while.
__device__ __forceinline__ bool mbarrier_try(uint64_t* barrier, uint32_t parity) {
  uint32_t done;
  asm volatile(
      "{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;"
      "  selp.u32 %0, 1, 0, p; }"
      : "=r"(done)
      : "r"(shared_address(barrier)), "r"(parity)
      : "memory");
  return done != 0;
}

// --- a flag that warps of one block set and poll: block scope, no order ---
// Atomic operations both: a relaxed load or store of shared memory becomes a plain one, which tools
// that look for races cannot tell from a mistake.

__device__ __forceinline__ uint32_t read_flag_block(const uint32_t* flag) {
  uint32_t value;
  asm volatile("atom.relaxed.cta.shared::cta.or.b32 %0, [%1], 0;"
               : "=r"(value)
               : "r"(shared_address(flag))
               : "memory");
  return value;
}

__device__ __forceinline__ void set_flag_block(uint32_t* flag) {
  asm volatile("red.relaxed.cta.shared::cta.or.b32 [%0], 1;" ::"r"(shared_address(flag))
               : "memory");
}

// --- barriers by address in shared memory, where a loop keeps one ---

__device__ __forceinline__ void mbarrier_expect(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

__device__ __forceinline__ bool mbarrier_try(uint32_t barrier, uint32_t parity) {
  uint32_t done;
  asm volatile(
      "{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;"
      "  selp.u32 %0, 1, 0, p; }"
      : "=r"(done)
      : "r"(barrier), "r"(parity)
      : "memory");
  return done != 0;
}

__device__ __forceinline__ void bulk_load(uint32_t to, const void* from, uint32_t bytes,
                                          uint32_t barrier, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1], %2, [%3], %4;" ::"r"(to),
      "l"(from), "r"(bytes), "r"(barrier), "l"(policy)
      : "memory");
}

__device__ __forceinline__ uint4 load_shared(uint32_t from) {
  uint4 value;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "r"(from)
               : "memory");
  return value;
}

__device__ __forceinline__ uint64_t load_shared_word(uint32_t from) {
  uint64_t value;
  asm volatile("ld.shared.b64 %0, [%1];" : "=l"(value) : "r"(from) : "memory");
  return value;
}

// Hides where a value comes from, so that it stays in a register instead of being made anew.
__device__ __forceinline__ uint32_t keep(uint32_t value) {
  asm volatile("" : "+r"(value));
  return value;
}

// --- the bulk copy engine; addresses and sizes are multiples of 16 bytes ---

// Global to shared; completes on `barrier`, which must expect the bytes.
__device__ __forceinline__ void bulk_load(void* to_shared, const void* from, uint32_t bytes,
                                          uint64_t* barrier, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1], %2, [%3], %4;" ::"r"(shared_address(to_shared)),
      "l"(from), "r"(bytes), "r"(shared_address(barrier)), "l"(policy)
      : "memory");
}

// Shared to global, on this thread's current bulk group.
__device__ __forceinline__ void bulk_store(void* to, const void* from_shared, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to),
               "r"(shared_address(from_shared)), "r"(bytes)
               : "memory");
}

// The same for rows that are not read soon: they go first from the L2.
__device__ __forceinline__ void bulk_store_once(void* to, const void* from_shared, uint32_t bytes,
                                                uint64_t policy) {
  asm volatile(
      "cp.async.bulk.global.shared::cta.bulk_group.L2::cache_hint [%0], [%1], %2, %3;" ::"l"(to),
      "r"(shared_address(from_shared)), "r"(bytes), "l"(policy)
      : "memory");
}

__device__ __forceinline__ void bulk_commit() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// All but the youngest `kYounger` groups of this thread have read their sources.
template <int kYounger>
__device__ __forceinline__ void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kYounger) : "memory");
}

// All but the youngest `kYounger` groups of this thread are complete, their writes visible to it.
template <int kYounger>
__device__ __forceinline__ void bulk_wait_done() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kYounger) : "memory");
}

}  // namespace ep
