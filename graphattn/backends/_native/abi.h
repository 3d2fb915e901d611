// What crosses the border: one flat record of 8-byte fields, filled by native.py in this order, and nothing of torch.
#pragma once
#include <cstddef>
#include <cstdint>

typedef int64_t i64;

struct Args {
  i64 wide;     // 0: float32; 1: float64; 2: q, k, v and the output's gradient stored in bfloat16, the rest float32
  i64 threads;
  i64 B, H, HK, TQ, TK, D, DV, BG, HG, E;
  const i64 *indptr, *start, *stop, *run_edge, *edge_ptr;
  const i64 *plan, *splan;
  const void *q; i64 qb, qh, qt;
  const void *k; i64 kb, kh, kt;
  const void *v; i64 vb, vh, vt;
  void *out; i64 ob, oh, ot;
  void *lse;              // (B, H, TQ) contiguous
  i64 score;              // 0 dot, 1 additive, 2 gatv2
  const void *vec;        // (H, D)
  const void *bias; i64 bias_b, bias_h, bias_e;
  i64 pos;                // 0 none, 1 alibi, 2 relative
  const void *post;       // slopes (H) or table (H, 2 posr + 1)
  i64 posr, poso;
  const void *ek; i64 ek_e, ek_h;
  const void *ev; i64 ev_e, ev_h;
  i64 drop, seed, threshold;
  // backward
  const void *go; i64 gb, gh, gt;
  const void *glse;       // (B, H, TQ) contiguous, or null
  void *dq; i64 dqb, dqh, dqt;
  void *dk; i64 dkb, dkh, dkt;
  void *dv; i64 dvb, dvh, dvt;
  void *dbias; i64 dbias_b, dbias_h;
  void *dek; i64 dek_h;   // (E, nh, D): 0 or 1 heads step
  void *dev; i64 dev_h;
  void *dvec;             // (slots, B * H, D) partial sums
  void *dpos;             // (slots, B * H, 1 or 2 posr + 1) partial sums
  i64 slots;
  i64 shared;             // a per-edge gradient sums over several (b, h)
  i64 stash_limit;        // bytes of p and ds per edge kept between the two passes of the backward
  void *delta;            // (B, H, TQ)
  i64 need_kv;
  void *held;             // (B, H, P_EMAX) scores that the forward leaves for the backward, or null; see operation 2
  double scale, softcap, slope, keep;
};

// GAT's score terms: values (rows, heads, width), vectors (heads, width), numbers (rows, heads), all contiguous.
struct Terms {
  i64 wide, threads, rows, heads, width, slots;
  const void *v, *target, *source;
  void *q, *k;               // written forward; their gradients backward
  void *dv;
  void *d_target, *d_source; // (slots, heads * width), zeroed
};

// Plan: header of i64, then arrays at the offsets (in i64) it names.
enum PlanField {
  P_LEADS, P_GROUPS, P_UNITS, P_PIECES, P_HUBS, P_ROWS, P_EMPTY, P_CUT,
  P_GROUP_LEAD,   // leads + 1: first group of each lead
  P_GROUP_ROW,    // groups x 32 int32: target, -1 for none
  P_GROUP_SEG,    // groups + 1
  P_GROUP_COL,    // groups + 1: columns before
  P_SEG,          // segs x {first source, count, first mask, or ~mask where all its columns have one}
  P_MASK,         // uint32 per column: which of the 32 targets read it (all ones: all of the group's)
  P_UNIT_LEAD,    // leads + 1
  P_UNIT,         // units x {row list begin, end, edge begin, edge end within the row, piece or -1}
  P_ROW_LEAD,     // leads + 1
  P_ROW,          // int32 targets taken row by row
  P_ROW_EDGE,     // rows + 1: edges before, counting only these rows
  P_HUB,          // hubs x {target row list index, first piece, end piece}
  P_HUB_LEAD,     // leads + 1
  P_EMPTY_LEAD,   // leads + 1
  P_EMPTY_ROW,    // int32 targets without edges
  P_EMAX,         // the most row-path edges of one lead
  P_PIECE_LEAD,   // leads + 1
  P_GLO, P_GHI,   // groups: least source, end of sources
  P_COL,          // int32: source of every edge of the row path, in the row list's numbering; 0 where runs are long
  P_SIZE = 40
};
enum SourcePlanField {
  S_SHIFT, S_BLOCKS, S_UNITS, S_PIECES, S_HUBS,
  S_UNIT_LEAD,    // leads + 1
  S_UNIT,         // units x {block begin, block end, entry begin, entry end, piece or -1}
  S_ENTRY_PTR,    // leads x blocks + 1
  S_ENTRY_ROW,    // int32: index in the row list
  S_ENTRY_J,      // int32: first source
  S_ENTRY_N,      // int32: how many
  S_ENTRY_E,      // i64: first edge, in the row list's own numbering
  S_HUB,          // hubs x {block, first piece, end piece}
  S_HUB_LEAD, S_PIECE_LEAD,
  S_SINGLE,       // 1: every entry is one edge, and they lie by source
  S_SIZE = 24
};

extern "C" {
typedef void (*TaskFn)(void *ctx, i64 task);
__attribute__((visibility("hidden"))) void ga_parallel(i64 threads, i64 tasks, TaskFn fn, void *ctx);
__attribute__((visibility("hidden"))) void *ga_scratch(size_t bytes);  // this thread's own, until its next call
__attribute__((visibility("hidden"))) void *ga_alloc(size_t bytes);    // null when there is no memory
__attribute__((visibility("hidden"))) void ga_free(void *p);
__attribute__((visibility("hidden"))) i64 ga_last_level(void);  // bytes of the last level of cache
}
