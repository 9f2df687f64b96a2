// Rows as fp32: how 16 bytes of each element type are read, added and rounded.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "core/args.h"

namespace ep {

template <EpDtype kDtype>
struct Elements;

// bf16 is the upper half of fp32.
template <>
struct Elements<EP_BFLOAT16> {
  static constexpr int kPerVector = 8;

  static __device__ __forceinline__ void unpack(const uint4& vector, float* values) {
    const uint32_t words[4] = {vector.x, vector.y, vector.z, vector.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      values[2 * i] = __uint_as_float(words[i] << 16);
      values[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
    }
  }

  static __device__ __forceinline__ uint32_t round2(float low, float high) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&pair);
  }
};

template <>
struct Elements<EP_FLOAT16> {
  static constexpr int kPerVector = 8;

  static __device__ __forceinline__ void unpack(const uint4& vector, float* values) {
    const uint32_t words[4] = {vector.x, vector.y, vector.z, vector.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 pair = __half22float2(*reinterpret_cast<const __half2*>(&words[i]));
      values[2 * i] = pair.x;
      values[2 * i + 1] = pair.y;
    }
  }

  static __device__ __forceinline__ uint32_t round2(float low, float high) {
    const __half2 pair = __floats2half2_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&pair);
  }
};

template <>
struct Elements<EP_FLOAT32> {
  static constexpr int kPerVector = 4;

  static __device__ __forceinline__ void unpack(const uint4& vector, float* values) {
    values[0] = __uint_as_float(vector.x);
    values[1] = __uint_as_float(vector.y);
    values[2] = __uint_as_float(vector.z);
    values[3] = __uint_as_float(vector.w);
  }
};

__device__ __forceinline__ uint4 pack_fp32(const float* values) {
  return make_uint4(__float_as_uint(values[0]), __float_as_uint(values[1]),
                    __float_as_uint(values[2]), __float_as_uint(values[3]));
}

// Rounds kPerVector fp32 values to the element type, to nearest even.
template <EpDtype kDtype>
__device__ __forceinline__ uint4 pack(const float* values) {
  if constexpr (kDtype == EP_FLOAT32) {
    return pack_fp32(values);
  } else {
    using E = Elements<kDtype>;
    return make_uint4(E::round2(values[0], values[1]), E::round2(values[2], values[3]),
                      E::round2(values[4], values[5]), E::round2(values[6], values[7]));
  }
}

// Stores the values of one vector of terms as elements of the sum's type: vector `at` of the terms.
template <EpDtype kTerm, EpDtype kSum>
__device__ __forceinline__ void store_rounded(char* row, int at, const float* values) {
  constexpr int kTerms = Elements<kTerm>::kPerVector;
  constexpr int kSums = Elements<kSum>::kPerVector;
  if constexpr (kTerms == kSums) {
    reinterpret_cast<uint4*>(row)[at] = pack<kSum>(values);
  } else if constexpr (kTerms > kSums) {
    reinterpret_cast<uint4*>(row)[2 * at] = pack_fp32(values);
    reinterpret_cast<uint4*>(row)[2 * at + 1] = pack_fp32(values + 4);
  } else {
    reinterpret_cast<uint2*>(row)[at] = make_uint2(Elements<kSum>::round2(values[0], values[1]),
                                                   Elements<kSum>::round2(values[2], values[3]));
  }
}

// A running sum of one vector of elements. It starts from its first term, not from zero, so that
// a sum of one term has that term's bits.
template <EpDtype kDtype>
struct VectorSum {
  static constexpr int kPerVector = Elements<kDtype>::kPerVector;
  float value[kPerVector];

  __device__ __forceinline__ void start(const uint4& vector) {
    Elements<kDtype>::unpack(vector, value);
  }

  __device__ __forceinline__ void add(const uint4& vector) {
    float term[kPerVector];
    Elements<kDtype>::unpack(vector, term);
#pragma unroll
    for (int i = 0; i < kPerVector; ++i) {
      value[i] += term[i];
    }
  }
};

}  // namespace ep
