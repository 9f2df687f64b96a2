/* Plan, dispatch and combine in plain C: two ranks that share one GPU, peers as plain pointers.
 *
 *   scripts/gpu_kernels.sh build example
 *
 * Each token goes to its experts and comes back doubled (the "experts" are a device copy of the
 * received rows, so a token that chose two experts is summed twice). Prints OK or what differs.
 */
#include <cuda_runtime_api.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "api/ep_dispatcher.h"

enum { RANKS = 2, EXPERTS = 4, TOPK = 2, TOKENS = 100, HIDDEN = 64, CHANNELS = 4 };
enum { ROWS = RANKS * TOKENS * TOPK, ROW_BYTES = 4 * HIDDEN };

static void must(cudaError_t result, const char* what) {
  if (result != cudaSuccess) {
    fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(result));
    exit(1);
  }
}

static void must_ep(EpStatus status) {
  if (status != EP_OK) {
    fprintf(stderr, "%s\n", ep_last_error());
    exit(1);
  }
}

static void* device(int64_t bytes, const void* from) {
  void* memory = NULL;
  must(cudaMalloc(&memory, (size_t)bytes), "cudaMalloc");
  if (from == NULL) {
    must(cudaMemset(memory, 0, (size_t)bytes), "cudaMemset");
  } else {
    must(cudaMemcpy(memory, from, (size_t)bytes, cudaMemcpyHostToDevice), "cudaMemcpy");
  }
  return memory;
}

/* Two experts a rank, in order. */
static void place_experts(EpContext* context) {
  const int32_t rank[EXPERTS] = {0, 0, 1, 1}, local[EXPERTS] = {0, 1, 0, 1};
  const int32_t order[EXPERTS] = {0, 1, 2, 3}, first[RANKS + 1] = {0, 2, 4};
  context->num_local_experts = EXPERTS / RANKS;
  context->expert_rank = device(sizeof rank, rank);
  context->expert_local = device(sizeof local, local);
  context->expert_order = device(sizeof order, order);
  context->owner_first = device(sizeof first, first);
}

static EpPlan new_plan(const EpWindowShape* shape) {
  EpPlan plan;
  memset(&plan, 0, sizeof plan);
  const int64_t records = ep_max_records(shape), local = EXPERTS / RANKS;
  plan.num_tokens = TOKENS;
  plan.num_topk = TOPK;
  plan.dst_rank = device(4 * TOKENS * TOPK, NULL);
  plan.dst_row = device(4 * TOKENS * TOPK, NULL);
  plan.contributor = device(8 * TOKENS * TOPK, NULL);
  plan.counts = device(8 * RANKS * EXPERTS, NULL);
  plan.tokens_per_expert = device(8 * local, NULL);
  plan.padded_tokens_per_expert = device(8 * local, NULL);
  plan.expert_offsets = device(8 * local, NULL);
  plan.totals = device(8 * 4, NULL);
  plan.record_header = device(4 * records, NULL);
  plan.record_row = device(4 * records * TOPK, NULL);
  plan.chunk_first = device(4 * RANKS * ep_chunk_stride(shape), NULL);
  plan.source_tokens = device(4 * RANKS, NULL);
  return plan;
}

/* Token t of rank r: experts (t + r) mod E and (t + r + 1 + t mod 3) mod E; its row is r, t, t... */
static void make_inputs(int rank, int64_t* topk_idx, float* x) {
  for (int token = 0; token < TOKENS; ++token) {
    topk_idx[token * TOPK] = (token + rank) % EXPERTS;
    topk_idx[token * TOPK + 1] = (token + rank + 1 + token % 3) % EXPERTS;
    for (int column = 0; column < HIDDEN; ++column) {
      x[token * HIDDEN + column] = (float)(1000 * rank + token + column % 7);
    }
  }
}

int main(void) {
  const EpWindowShape shape = {RANKS, EXPERTS, TOPK, CHANNELS, 8, 0, TOKENS, ROW_BYTES};
  EpWindowLayout layout;
  must_ep(ep_make_window_layout(&shape, &layout));

  void* window[RANKS];
  EpRouteArgs route[RANKS];
  EpDispatchArgs dispatch[RANKS];
  EpCombineArgs combine[RANKS];
  static float x[RANKS][TOKENS * HIDDEN], out[TOKENS * HIDDEN];
  static int64_t topk_idx[RANKS][TOKENS * TOPK];
  memset(route, 0, sizeof route);
  memset(dispatch, 0, sizeof dispatch);
  memset(combine, 0, sizeof combine);
  for (int rank = 0; rank < RANKS; ++rank) {
    window[rank] = device(layout.total_bytes + ROWS * ROW_BYTES, NULL);
  }
  for (int rank = 0; rank < RANKS; ++rank) {
    EpContext context;
    memset(&context, 0, sizeof context);
    context.shape = shape;
    context.window = layout;
    context.ep_rank = rank;
    context.timeout_ns = 5000000000u;
    memcpy(context.window_base, window, sizeof window);
    must(cudaHostAlloc((void**)&context.fault, sizeof(EpFault), cudaHostAllocDefault), "fault");
    memset(context.fault, 0, sizeof(EpFault));
    place_experts(&context);
    make_inputs(rank, topk_idx[rank], x[rank]);

    const EpPlan plan = new_plan(&shape);
    route[rank].context = dispatch[rank].context = combine[rank].context = context;
    route[rank].plan = dispatch[rank].plan = combine[rank].plan = plan;
    route[rank].topk_idx = device(sizeof topk_idx[rank], topk_idx[rank]);
    route[rank].capacity_rows = ROWS;
    route[rank].alignment = 1;
    dispatch[rank].x = device(sizeof x[rank], x[rank]);
    dispatch[rank].row_bytes = ROW_BYTES;
    dispatch[rank].recv_x_offset = layout.total_bytes;
    dispatch[rank].recv_weights_offset = -1;
    dispatch[rank].recv_rows = ROWS;
    combine[rank].expert_out = (char*)window[rank] + layout.total_bytes;
    combine[rank].out = device(sizeof out, NULL);
    combine[rank].hidden = HIDDEN;
    combine[rank].dtype = EP_FLOAT32;
  }

  must_ep(ep_route_world(route, RANKS, NULL));
  must_ep(ep_dispatch_world(dispatch, RANKS, NULL));
  must_ep(ep_combine_world(combine, RANKS, NULL));
  must(cudaDeviceSynchronize(), "the kernels");

  for (int rank = 0; rank < RANKS; ++rank) {
    must(cudaMemcpy(out, combine[rank].out, sizeof out, cudaMemcpyDeviceToHost), "cudaMemcpy");
    for (int at = 0; at < TOKENS * HIDDEN; ++at) {
      if (out[at] != 2 * x[rank][at]) {
        printf("rank %d, element %d: %g, expected %g\n", rank, at, out[at], 2 * x[rank][at]);
        return 1;
      }
    }
  }
  printf("OK: %d ranks, %d tokens each, every token came back from %d experts\n", RANKS, TOKENS,
         TOPK);
  return 0;
}
