/* ep_dispatcher, C ABI: several NVLink domains joined by rails.
 *
 * Letters as in ep_dispatcher.h; D domains of L ranks, P = D x L; rank = domain x L + index in it.
 * A rail joins the ranks of equal index. Inside its domain a rank is home of D segments of tokens:
 * segment s are those of the rank of its rail in domain s, its own among them. Everything inside a
 * domain is the single-domain problem over these virtual tokens; rails carry tokens there and sums
 * back.
 *
 * Use    1. One window per rank of ep_make_rail_layout's total_bytes, its first total_bytes zero.
 *           EpContext: shape.ep_size is L, shape.max_tokens D x the rank's, tables of experts of
 *           this domain: expert_rank is L for experts elsewhere, which come last in expert_order.
 *        2. A plan: ep_rail_exchange, ep_rail_counts, then ep_route over the virtual tokens, with
 *           EpRouteArgs' segment fields set.
 *           A plan's records may leave before its counts are known: see EpRailSendArgs.
 *        3. ep_rail_dispatch instead of ep_dispatch; ep_combine with EpCombineArgs.segment fields
 *           set and then ep_rail_return.
 */
#ifndef EP_RAIL_H_
#define EP_RAIL_H_

#include "api/ep_dispatcher.h"

#ifdef __cplusplus
extern "C" {
#endif

enum {
  EP_MAX_DOMAINS = 32,
  EP_RAIL_CHUNK_TOKENS = 32, /* tokens that one signal announces */
  EP_RAIL_WARPS = 8,         /* warps of a block that put */
  EP_RAIL_STAGES = 4         /* records of a warp whose puts may be on their way */
};

/* What carries bytes between domains. */
typedef enum EpNet {
  EP_NET_LOOP = 0,  /* plain pointers: all domains on one GPU */
  EP_NET_CHAOS = 1, /* the same, late and in seeded order: for tests */
  EP_NET_GIN = 2    /* NCCL's GIN */
} EpNet;

/* Offsets from the start of a window, equal on all ranks; S signals that each other domain raises,
 * c channels. */
typedef struct EpRailLayout {
  int64_t signals;      /* u64 [D][S]: raised by the rank of that domain. Loop and chaos only */
  int64_t control;      /* epochs of this rank's own blocks */
  int64_t posted;       /* u64 [c]: puts so far */
  int64_t stats;        /* u64 [D][2]: puts and bytes for each domain (test builds only) */
  int64_t role_times;   /* u64 [2][C + rail blocks][8]: of dispatch and return (test builds only) */
  int64_t counts_flag;  /* u64 [L][D] epoch: counts of that rank's segment are here */
  int64_t counts;       /* i32 [2][P][E + EP_COUNTS_EXTRA] */
  int64_t block_counts; /* i32 [C][D][E] */
  int64_t topk;         /* [2][D][C] parts of topk_part_bytes: header, experts as 16-bit words */
  int64_t shift;        /* i32 [L][D][E]: see EpRouteArgs.segment_shift */
  int64_t verdict;      /* i64 [4]: see EpRouteArgs.verdict */
  int64_t virtual_topk; /* i64 [D x max_tokens][K] */
  int64_t staging;      /* [rail blocks][EP_RAIL_WARPS][EP_RAIL_STAGES] slots */
  int64_t landing;      /* [D - 1][max_tokens] slots: records of other domains, then their sums */
  int64_t partials;     /* [D - 1][max_tokens] slots: sums that other domains have returned */
  int64_t own;          /* [max_tokens] sums of the own domain, where precision is exact */
  int64_t topk_part_bytes;
  int64_t slot_bytes;
  int64_t total_bytes;
  int32_t lanes; /* channels towards each domain */
  int32_t signals_per_domain;
  int32_t channels; /* of the net */
  int32_t reserved;
} EpRailLayout;

typedef struct EpRail {
  int32_t num_domains; /* D */
  int32_t domain;      /* of this rank */
  int32_t num_blocks;  /* that each kernel gives to the rails, on top of its own */
  int32_t net;         /* EpNet */
  int32_t exact;       /* 1 if partial sums stay in fp32 while rows are shorter */
  int32_t reserved;
  int64_t max_tokens; /* the largest T of any rank: the length of a segment */
  EpRailLayout layout;
  const int32_t* expert_rank;      /* device [E]: owner among all P ranks */
  const int32_t* expert_order;     /* device [E]: experts by (owner, id) */
  const int32_t* owner_first;      /* device [P + 1] */
  void* rail_base[EP_MAX_DOMAINS]; /* loop, chaos: windows of the rail's ranks */
  void* chaos;                     /* chaos: ep_chaos_bytes of zeroed memory of this rank */
  uint64_t chaos_seed;
  const void* gin_device_comm; /* gin: GinHandle of csrc/core/gin_handle.h */
  void* gin_window;
  int32_t gin_contexts, gin_signals_per_domain, gin_counters, gin_reserved;
} EpRail;

/* First two kernels of a plan. It is refused, as for another alignment, where a rank of another
 * domain has another K, or has passed weights to an earlier dispatch or taken gradients from an
 * earlier combine that this one has not: kernels of different domains do not compare those. */
typedef struct EpRailPlanArgs {
  EpContext context;
  EpRail rail;
  const int64_t* topk_idx; /* [T, K] */
  int64_t num_tokens;      /* T */
  int32_t num_topk;        /* K */
  int32_t alignment;
  int64_t capacity_rows; /* -1: no bound */
  int32_t* dst_rank;     /* [T, K] receiver among all P ranks; -1 where nothing is sent */
  int32_t* dst_row;      /* [T, K] */
  int64_t* counts;       /* [P, E] */
} EpRailPlanArgs;

typedef struct EpRailDispatchArgs {
  EpDispatchArgs domain; /* its plan: of the virtual tokens; x and topk_weights: own tokens */
  EpRail rail;
  const int32_t* dst_rank; /* [T, K] of EpRailPlanArgs */
  int64_t num_tokens;      /* T */
  int32_t sent;            /* 1: ep_rail_send has posted this call's records */
  int32_t reserved;
} EpRailDispatchArgs;

/* The putting half of the next ep_rail_dispatch, which then has `sent` set; it needs routing and
 * rows, but no plan, and so may run beside the plan's kernels on another stream. All ranks make the
 * same calls in the same order. Earlier calls of the group must have ended where it starts, and the
 * dispatch starts after it has been launched. Records of rows that a capacity drops travel as
 * well. With EP_NET_CHAOS it must not run beside ep_rail_exchange, as a rank has one worker. */
typedef struct EpRailSendArgs {
  EpContext context;
  EpRail rail;
  const int64_t* topk_idx;   /* [T, K] */
  const void* x;             /* [T] rows */
  const float* topk_weights; /* [T, K] or NULL, as in the dispatch */
  int64_t num_tokens;        /* T */
  int64_t row_bytes;
  int32_t num_topk; /* K */
  int32_t reserved;
} EpRailSendArgs;

typedef struct EpRailReturnArgs {
  EpCombineArgs domain; /* as ep_combine had it */
  EpRail rail;
  const int32_t* dst_rank;
  int64_t num_tokens;
} EpRailReturnArgs;

EP_API EpStatus ep_make_rail_layout(const EpContext* context, const EpRail* rail,
                                    EpRailLayout* layout);
EP_API int64_t ep_chaos_bytes(const EpRail* rail);

EP_API EpStatus ep_rail_exchange(const EpRailPlanArgs* args, void* stream);
EP_API EpStatus ep_rail_counts(const EpRailPlanArgs* args, void* stream);
EP_API EpStatus ep_rail_send(const EpRailSendArgs* args, void* stream);
EP_API EpStatus ep_rail_dispatch(const EpRailDispatchArgs* args, void* stream);
EP_API EpStatus ep_rail_return(const EpRailReturnArgs* args, void* stream);

EP_API EpStatus ep_rail_exchange_world(const EpRailPlanArgs* ranks, int32_t num_ranks,
                                       void* stream);
EP_API EpStatus ep_rail_counts_world(const EpRailPlanArgs* ranks, int32_t num_ranks, void* stream);
EP_API EpStatus ep_rail_send_world(const EpRailSendArgs* ranks, int32_t num_ranks, void* stream);
EP_API EpStatus ep_rail_dispatch_world(const EpRailDispatchArgs* ranks, int32_t num_ranks,
                                       void* stream);
EP_API EpStatus ep_rail_return_world(const EpRailReturnArgs* ranks, int32_t num_ranks,
                                     void* stream);

#ifdef __cplusplus
}
#endif

#endif /* EP_RAIL_H_ */
