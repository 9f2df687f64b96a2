/* ep_dispatcher, C ABI: plan, dispatch and combine of one NVLink domain, over raw pointers and
 * CUDA streams. A C program needs this header and the objects of csrc/kernels and csrc/api, linked
 * with nvcc (scripts/gpu_kernels.sh, step example).
 *
 * Letters: T tokens of this rank, K slots of a token, E experts, P ranks, L experts of this rank,
 * R rows that this rank receives (padding included).
 *
 * Use    1. Lay out one window per rank (ep_make_window_layout); allocate it, zero its first
 *           `total_bytes`, make it reachable from all ranks, fill one EpContext per rank.
 *        2. ep_route turns topk_idx into an EpPlan; ep_dispatch and ep_combine take that plan, any
 *           number of times, in any order that is the same on all ranks.
 * Order  All calls of one rank go to one stream, or to streams that events order; all ranks make
 *        the same calls in the same order. Calls return at once; nothing here waits for the GPU.
 * Errors Functions return an EpStatus; ep_last_error says which value was wrong and what is
 *        allowed. A peer that does not come is reported on the device: see EpFault.
 */
#ifndef EP_DISPATCHER_H_
#define EP_DISPATCHER_H_

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define EP_API __attribute__((visibility("default")))

enum {
  EP_MAX_RANKS = 72,     /* of one NVLink domain */
  EP_MAX_CHANNELS = 128, /* blocks of one rank */
  EP_MAX_TOPK = 64,
  EP_MAX_EXPERTS = 2048,
  EP_CHUNK_TOKENS = 8, /* tokens that combine handles source by source */
  EP_SEND_WARPS = 16,  /* most warps of a block that send rows, each with its own progress word */
  EP_WORLD_RANKS = 8,  /* ranks that one launch can hold (tests and measurements on one GPU) */
  EP_COUNTS_EXTRA = 3  /* words after the counts in a rank's message: T, alignment, refusal */
};

typedef enum EpStatus {
  EP_OK = 0,
  EP_INVALID_ARGUMENT = 1, /* a value out of range; nothing was launched */
  EP_LAUNCH_FAILED = 2     /* CUDA refused the launch */
} EpStatus;

typedef enum EpDtype { EP_BFLOAT16 = 0, EP_FLOAT16 = 1, EP_FLOAT32 = 2 } EpDtype;

/* Where an expired wait was, or what else ended a group: EpFault.phase. */
typedef enum EpPhase {
  EP_PHASE_NONE = 0,
  EP_PHASE_ROUTE_GRID = 1,      /* own blocks of the route kernel */
  EP_PHASE_ROUTE_COUNTS = 2,    /* counts and records of a peer */
  EP_PHASE_DISPATCH_READY = 3,  /* a peer's entry into dispatch */
  EP_PHASE_DISPATCH_ROWS = 4,   /* a peer's rows */
  EP_PHASE_COMBINE_READY = 5,   /* a peer's entry into combine */
  EP_PHASE_COMBINE_CREDIT = 6,  /* a free slot in a home rank's ring */
  EP_PHASE_COMBINE_PARTIAL = 7, /* an expert rank's partial row */
  EP_PHASE_BLOCK = 8,           /* another warp of the same block */
  EP_PHASE_GATHER_READY = 9,    /* combine, gather: a peer's entry */
  EP_PHASE_GATHER_DONE = 10,    /* combine, gather: a peer that still reads our rows */
  EP_PHASE_RAIL_TOPK = 11,      /* rails: routing of another domain */
  EP_PHASE_RAIL_COUNTS = 12,    /* rails: counts of a peer of the own domain */
  EP_PHASE_RAIL_ENTRY = 13,     /* rails: another domain's entry into the call */
  EP_PHASE_RAIL_ROWS = 14,      /* rails: another domain's rows */
  EP_PHASE_RAIL_SUMS = 15,      /* rails: another domain's sums */
  EP_PHASE_RAIL_SENT = 16,      /* rails: own puts on their way */
  /* No expired waits: */
  EP_PHASE_WEIGHTS = 17,  /* dispatch: of `rank` and `peer` only one wants weights */
  EP_PHASE_LEFT = 18,     /* `rank` closed its group because of an error of its own */
  EP_PHASE_NO_ROOM = 19,  /* the same, for want of memory for output rows */
  EP_PHASE_GRADIENTS = 20 /* combine: of `rank` and `peer` only one gives gradients of weights */
} EpPhase;

/* How dispatch makes a token's second and further copies on one rank. */
typedef enum EpDuplicate {
  EP_DUPLICATE_BY_SENDER = 0,  /* every copy crosses the link */
  EP_DUPLICATE_BY_RECEIVER = 1 /* one copy crosses the link, the receiver makes the others */
} EpDuplicate;

/* How combine brings rows home. Both give the same bits. */
typedef enum EpCombineForm {
  EP_COMBINE_PUSH = 0,  /* one sum for each pair of token and rank crosses the link */
  EP_COMBINE_GATHER = 1 /* each row does, read by its home; rows must lie in the window */
} EpCombineForm;

/* What decides the layout of a window; equal on all ranks. */
typedef struct EpWindowShape {
  int32_t ep_size;       /* P */
  int32_t num_experts;   /* E, over the whole group */
  int32_t num_topk;      /* K, the most slots of any call */
  int32_t num_channels;  /* blocks that every kernel runs on each rank */
  int32_t ring_depth;    /* partial rows in flight for each (channel, pair of ranks) */
  int32_t reserved;      /* 0 */
  int64_t max_tokens;    /* the largest T of any call */
  int64_t partial_bytes; /* bytes of the longest partial row: hidden x (precision exact ? 4 : size
                            of an element) */
} EpWindowShape;

/* Offsets in bytes from the start of a rank's window, equal on all ranks. Each region lies in the
 * memory of the rank that reads it. The user's output rows start anywhere at or after
 * total_bytes. */
typedef struct EpWindowLayout {
  int64_t error;          /* u64: who filed a fault and whom it missed; 0 while all is well */
  int64_t local;          /* epochs and barriers of this rank's own blocks */
  int64_t route_flag;     /* u64 [P][C] epoch: counts and records of source p, block c, are here */
  int64_t dispatch_ready; /* EpReady [P]: peer p has entered dispatch, its rows start there */
  int64_t rows_done;      /* u64 [P][C][EP_SEND_WARPS] progress of source p, channel c */
  int64_t combine_ready;  /* u64 [P] entry of peer p into combine: epoch, wish; see args.h */
  int64_t gather_ready;   /* EpReady [P]: peer p's expert rows are complete and start there */
  int64_t gather_done;    /* u64 [P][C] epoch: channel c of peer p has read our rows */
  int64_t partial_full;   /* u64 [C][P][D] of the home rank, written by the expert rank */
  int64_t partial_free;   /* u64 [C][P][D] of the expert rank, written by the home rank */
  int64_t block_counts;   /* i32 [C][E + P], this rank's own */
  int64_t counts;         /* i32 [2][P][E + P + EP_COUNTS_EXTRA] */
  int64_t record_header;  /* u32 [2][P][max_tokens] */
  int64_t record_entry;   /* u32 [2][P][max_tokens * K] */
  int64_t partials;       /* [C][P][D] slots of slot_bytes */
  int64_t slot_bytes;
  int64_t total_bytes; /* a multiple of 4096 */
} EpWindowLayout;

typedef struct EpReady {
  uint64_t epoch;
  int64_t recv_x_offset;       /* from the start of the window of the rank that entered */
  int64_t recv_weights_offset; /* likewise; -1 where it wants none */
  int64_t reserved;
} EpReady;

/* Filed once for each rank, by its first wait that expires or finds the group ended; lies in pinned
 * host memory. */
typedef struct EpFault {
  uint64_t filed; /* written last; 0 while all is well */
  int32_t rank, peer;
  int32_t phase; /* EpPhase */
  int32_t channel;
  uint64_t expected, seen;
} EpFault;

/* What the host must know to allocate exactly; lies in pinned host memory, written by ep_route.
 * int64_t tokens_per_expert[L] follow it directly. */
typedef struct EpMailbox {
  uint64_t ticket;      /* EpRouteArgs.ticket, written last */
  int64_t num_rows;     /* R without a capacity; rows that lie below the capacity with one */
  int64_t demand_rows;  /* R that nothing dropped would need */
  int64_t num_records;  /* (source token, this rank) pairs that this rank receives */
  int64_t bad_token;    /* token of this rank with an expert id outside [-1, E); -1 where none */
  int64_t bad_expert;   /* that id */
  int64_t refused_rank; /* a rank with a bad id or another alignment than ours; -1 where none */
  int64_t reserved;
} EpMailbox;

/* What does not change from call to call. Copied into each launch. */
typedef struct EpContext {
  EpWindowShape shape;
  EpWindowLayout window;
  int32_t ep_rank;
  int32_t num_local_experts;   /* L */
  uint64_t timeout_ns;         /* not 0; deadline of each wait, from the start of its kernel */
  const int32_t* expert_rank;  /* device [E]: owner of each expert */
  const int32_t* expert_local; /* device [E]: its index among the owner's experts, ascending id */
  const int32_t* expert_order; /* device [E]: experts by (owner, id) */
  const int32_t* owner_first;  /* device [P + 1]: first position of each owner in expert_order */
  EpFault* fault;              /* pinned, zeroed by the host */
  void* window_base[EP_MAX_RANKS]; /* start of each rank's window, as this rank addresses it */
  int32_t test_mutation;           /* 0; see csrc/kernels/mutation.cuh (test builds only) */
  int32_t test_delay_us;           /* 0; stall of this rank at the points that a test names */
  int32_t first_rank; /* of this domain among all ranks, at most 65535 - P; added to the ranks that
                         a fault names */
  int32_t reserved;
} EpContext;

/* Routing turned into addresses; device memory of the caller, filled by ep_route, read by
 * ep_dispatch and ep_combine, never changed by them. */
typedef struct EpPlan {
  int64_t num_tokens; /* T of this rank */
  int32_t num_topk;   /* K of this call, equal on all ranks */
  int32_t reserved;
  int32_t* dst_rank;                 /* [T, K] receiver of each copy; -1 where nothing is sent */
  int32_t* dst_row;                  /* [T, K] its row there; -1 where nothing is sent */
  uint64_t* contributor;             /* [T, K] ranks that return a partial row; see args.h */
  int64_t* counts;                   /* [P, E] copies from each rank to each expert */
  int64_t* tokens_per_expert;        /* [L] */
  int64_t* padded_tokens_per_expert; /* [L] */
  int64_t* expert_offsets;           /* [L] first row of each local expert */
  int64_t* totals;                   /* [4] rows, demand rows, records, 0 */
  uint32_t* record_header;           /* [ep_max_records] token << 12 | rows */
  int32_t* record_row;    /* [ep_max_records, shape.num_topk] local rows, ascending, as many as the
                             header says; what follows them is undefined */
  int32_t* chunk_first;   /* [P, ep_chunk_stride] first record of each chunk of a source's tokens */
  int32_t* source_tokens; /* [P] T of each source */
} EpPlan;

typedef struct EpRouteArgs {
  EpContext context;
  EpPlan plan;
  const int64_t* topk_idx; /* [T, K] in [-1, E); -1 marks a dropped slot */
  int64_t capacity_rows; /* static mode: rows of every receiver, equal on all ranks; -1: no bound */
  int32_t alignment;     /* rows of each expert are padded to a multiple of this power of two, at
                              most 4096; 4095 on a rank that refuses its routing: all others hear of
                              it */
  int32_t only_refusals; /* 1: the mailbox is written only if the plan must not be used */
  EpMailbox* mailbox;    /* pinned; NULL if the host does not ask */
  uint64_t ticket;       /* not 0, another one for each call that uses this mailbox */
  /* Several domains (ep_rail.h): token t belongs to segment t / segment_tokens, whose rows of
   * expert e from source p start segment_shift[p][segment][e] later. NULL and 0 otherwise. */
  const int32_t* segment_shift; /* device [P][segments][E] */
  int64_t segment_tokens;
  const int64_t* verdict; /* device [3]: refused rank, bad token, bad expert of all domains */
} EpRouteArgs;

typedef struct EpDispatchArgs {
  EpContext context;
  EpPlan plan;
  const void* x;             /* [T, row_bytes]; 16-byte aligned */
  const float* topk_weights; /* [T, K]; NULL on all ranks, or where T is 0 */
  int64_t row_bytes;         /* a multiple of 16 */
  int64_t recv_x_offset;     /* of [recv_rows, row_bytes] in this rank's window; 16-byte aligned */
  int64_t recv_weights_offset; /* of float [recv_rows]; -1 on all ranks if no weights travel */
  int64_t recv_rows;           /* rows there; those that receive no copy are zeroed */
  int32_t duplicate;           /* EpDuplicate */
  int32_t reserved;
} EpDispatchArgs;

typedef struct EpCombineArgs {
  EpContext context;
  EpPlan plan;
  const void* expert_out;        /* [R, hidden]; 16-byte aligned; NULL only if R is 0. Form push */
  void* out;                     /* [T, hidden]; 16-byte aligned */
  const float* row_weights_grad; /* [R]; NULL on all ranks, or where R is 0. Form push */
  float* weights_grad;           /* [T, K]; NULL on all ranks, or where T is 0 */
  int64_t hidden;                /* elements */
  int32_t dtype;                 /* EpDtype */
  int32_t exact;                 /* 1: partial sums of ranks travel in fp32; 0: in dtype */
  int32_t form;                  /* EpCombineForm, equal on all ranks */
  int32_t reserved;
  /* Form gather: the same rows and gradients by their place in this rank's window. They may be
   * written again by work that the stream runs after this call. */
  int64_t expert_out_offset;       /* 16-byte aligned; at or after total_bytes, or 0 if R is 0 */
  int64_t row_weights_grad_offset; /* 4-byte aligned, likewise; -1 on all ranks for none */
  /* Several domains (ep_rail.h), form push: sums of segment home_segment go to `out` or `own_out`,
   * those of the others to slots of segment_stride bytes, [segments - 1][segment_tokens], gradients
   * behind them. segment_tokens is 0 otherwise. */
  int64_t segment_tokens, home_segment, segment_stride;
  void* segment_out;
  void* own_out; /* of fp32, where exact; NULL otherwise */
} EpCombineArgs;

/* The message of this thread's last failed call; "" before any. */
EP_API const char* ep_last_error(void);

EP_API EpStatus ep_make_window_layout(const EpWindowShape* shape, EpWindowLayout* layout);

/* Records that a plan needs room for, and entries of one row of chunk_first; 0 for NULL, and for a
 * shape that ep_make_window_layout refuses. */
EP_API int64_t ep_max_records(const EpWindowShape* shape);
EP_API int64_t ep_chunk_stride(const EpWindowShape* shape);

/* One rank's kernel on `stream` (a cudaStream_t). */
EP_API EpStatus ep_route(const EpRouteArgs* args, void* stream);
EP_API EpStatus ep_dispatch(const EpDispatchArgs* args, void* stream);
EP_API EpStatus ep_combine(const EpCombineArgs* args, void* stream);

/* The same for `num_ranks` ranks that share a GPU and an address space, as one launch. */
EP_API EpStatus ep_route_world(const EpRouteArgs* ranks, int32_t num_ranks, void* stream);
EP_API EpStatus ep_dispatch_world(const EpDispatchArgs* ranks, int32_t num_ranks, void* stream);
EP_API EpStatus ep_combine_world(const EpCombineArgs* ranks, int32_t num_ranks, void* stream);

#ifdef __cplusplus
}
#endif

#endif /* EP_DISPATCHER_H_ */
