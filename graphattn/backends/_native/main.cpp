// The library's door: which instruction set, which threads, and the plan of a graph.
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>
#include <system_error>
#include <thread>
#include <vector>

#if defined(__unix__) || defined(__APPLE__)
#include <pthread.h>
#define GA_FORKS 1
#endif
#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "abi.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

// ------------------------------------------------------------------ memory

namespace {
struct Arena {  // small enough to keep: what a thread needs again at its next task
  void *p = nullptr;
  size_t size = 0;
  ~Arena() { free(p); }
};
thread_local Arena arena;
}  // namespace

// Memory not touched yet, to come in pages of 2 MiB: with small ones the first touch of a long output, a page fault for
// every 4 KiB, takes as long as a fifth of the attention itself.  Only advice.
EXPORT void ga_large_pages(void *p, i64 bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  const uintptr_t page = (uintptr_t)1 << 21, at = (uintptr_t)p, from = (at + page - 1) & ~(page - 1);
  const uintptr_t to = (at + (uintptr_t)bytes) & ~(page - 1);
  if (to > from) madvise((void *)from, to - from, MADV_HUGEPAGE);
#else
  (void)p, (void)bytes;
#endif
}

extern "C" void *ga_alloc(size_t bytes) {
  void *p = nullptr;
  const bool large = bytes >= ((size_t)1 << 22);
  if (posix_memalign(&p, large ? (size_t)1 << 21 : 64, bytes)) return nullptr;
  if (large) ga_large_pages(p, (i64)bytes);
  return p;
}
extern "C" void ga_free(void *p) { free(p); }
extern "C" void *ga_scratch(size_t bytes) {
  if (bytes > arena.size) {
    free(arena.p);
    arena.p = ga_alloc(bytes);
    arena.size = arena.p ? bytes : 0;
  }
  return arena.p;
}

// Bytes of gathered tables from which kernels gather them one after the other: the last level of cache, or 32 MiB where
// the system does not say.
namespace {
std::atomic<i64> last_level{0};
}
EXPORT void ga_set_last_level(i64 bytes) { last_level = bytes; }
extern "C" i64 ga_last_level(void) {
  i64 bytes = last_level;
  if (!bytes) {
    // sysconf knows the package's, not what the cores of one group share
    if (FILE *file = fopen("/sys/devices/system/cpu/cpu0/cache/index3/size", "r")) {
      long long size = 0;
      char unit = 0;
      if (fscanf(file, "%lld%c", &size, &unit) == 2) bytes = (i64)size << (unit == 'K' ? 10 : unit == 'M' ? 20 : 0);
      fclose(file);
    }
    if (bytes < ((i64)1 << 22)) bytes = (i64)1 << 25;
    last_level = bytes;
  }
  return bytes;
}

// ------------------------------------------------------------------ threads

namespace {
// GNU OpenMP's entry point, of whichever runtime torch has loaded (LLVM's and Intel's offer it too): one pool for both.
typedef void (*Gomp)(void (*)(void *), void *, unsigned, unsigned);
std::atomic<Gomp> gomp{nullptr};
std::atomic<bool> forked{false};  // in a child only the forking thread lives on: its pool would wait for ever

struct Work {
  TaskFn fn;
  void *ctx;
  i64 tasks;
  std::atomic<i64> next{0};
};
void run(void *p) {
  Work &w = *static_cast<Work *>(p);
  for (i64 t; (t = w.next.fetch_add(1, std::memory_order_relaxed)) < w.tasks;) w.fn(w.ctx, t);
}
#if GA_FORKS
void in_child() { forked = true; }
#endif
}  // namespace

extern "C" void ga_parallel(i64 threads, i64 tasks, TaskFn fn, void *ctx) {
  if (threads > tasks) threads = tasks;
  if (threads <= 1 || forked) {
    for (i64 t = 0; t < tasks; t++) fn(ctx, t);
    return;
  }
  Work w;
  w.fn = fn;
  w.ctx = ctx;
  w.tasks = tasks;
  if (Gomp start = gomp) {
    start(run, &w, (unsigned)threads, 0);
    return;
  }
  std::vector<std::thread> crew;
  try {
    for (i64 t = 1; t < threads; t++) crew.emplace_back(run, &w);
  } catch (const std::system_error &) {  // fewer threads, same result
  }
  run(&w);
  for (auto &t : crew) t.join();
}

EXPORT void ga_start(void *gomp_parallel) {
  gomp = reinterpret_cast<Gomp>(gomp_parallel);
#if GA_FORKS
  static bool once = !pthread_atfork(nullptr, nullptr, in_child);
  (void)once;
#endif
}

// ------------------------------------------------------------------ instruction sets

#define DECLARE(ns)                                \
  extern "C" int ga_run_##ns(int op, const Args *a); \
  extern "C" void ga_terms_##ns(int back, Terms *a);
DECLARE(base)
#if defined(GA_V3)
DECLARE(v3)
#endif
#if defined(GA_V4)
DECLARE(v4)
#endif

EXPORT int ga_best(void) {
#if defined(__x86_64__)
  __builtin_cpu_init();
#if defined(GA_V4)
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("fma"))
    return 4;
#endif
#if defined(GA_V3)
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi") &&
      __builtin_cpu_supports("bmi2"))
    return 3;
#endif
#endif
  return 1;
}

EXPORT int ga_run(int isa, int op, const Args *a) {
#if defined(GA_V4)
  if (isa == 4) return ga_run_v4(op, a);
#endif
#if defined(GA_V3)
  if (isa == 3) return ga_run_v3(op, a);
#endif
  (void)isa;
  return ga_run_base(op, a);
}

EXPORT void ga_terms(int isa, int back, Terms *a) {
#if defined(GA_V4)
  if (isa == 4) return ga_terms_v4(back, a);
#endif
#if defined(GA_V3)
  if (isa == 3) return ga_terms_v3(back, a);
#endif
  (void)isa;
  ga_terms_base(back, a);
}

EXPORT i64 ga_args_size(void) { return sizeof(Args); }

// ------------------------------------------------------------------ plans

namespace {
typedef std::vector<i64> Longs;
typedef std::vector<int32_t> Ints;

struct Writer {
  Longs out;
  explicit Writer(int header) : out(header, 0) {}
  void put(int field, const void *p, size_t bytes) {
    out[field] = (i64)out.size();
    size_t at = out.size();
    out.resize(at + (bytes + 7) / 8, 0);
    if (bytes) memcpy(out.data() + at, p, bytes);
  }
  void put(int field, const Longs &x) { put(field, x.data(), x.size() * 8); }
  void put(int field, const Ints &x) { put(field, x.data(), x.size() * 4); }
  i64 *release(i64 *n) {
    *n = (i64)out.size();
    i64 *p = static_cast<i64 *>(ga_alloc(out.size() * 8));
    if (p) memcpy(p, out.data(), out.size() * 8);
    return p;
  }
};

// a set of positions that lists itself in order: two levels of bits
struct Positions {
  std::vector<uint64_t> bits, top;
  explicit Positions(i64 n) : bits((n >> 6) + 1, 0), top((n >> 12) + 1, 0) {}
  void add(i64 x) {
    bits[x >> 6] |= 1ull << (x & 63);
    top[x >> 12] |= 1ull << ((x >> 6) & 63);
  }
  template <class F> void drain(i64 lo, i64 hi, F f) {
    for (i64 t = lo >> 12; t <= hi >> 12; t++)
      for (; top[t]; top[t] &= top[t] - 1) {
        i64 w = t * 64 + __builtin_ctzll(top[t]);
        for (; bits[w]; bits[w] &= bits[w] - 1) f(w * 64 + __builtin_ctzll(bits[w]));
      }
  }
};

struct Groups {  // of one stretch of rows
  Ints row, loose;  // 32 targets a group; targets left to the row path
  Longs seg_n, col_n, seg, lo, hi;
  std::vector<uint32_t> mask;
};

void make_groups(const i64 *indptr, const i64 *start, const i64 *stop, i64 row0, const int32_t *rows, i64 n, i64 tk,
                 double ratio, Positions &pos, std::vector<uint32_t> &flip, Groups &g) {
  i64 lo = tk, hi = 0, edges = 0, runs = 0;
  for (i64 z = 0; z < n; z++) {
    const i64 r0 = indptr[row0 + rows[z]], r1 = indptr[row0 + rows[z] + 1];
    runs += r1 - r0;
    for (i64 r = r0; r < r1; r++) {
      flip[start[r]] ^= 1u << z;
      flip[stop[r]] ^= 1u << z;
      pos.add(start[r]);
      pos.add(stop[r]);
      edges += stop[r] - start[r];
    }
    lo = start[r0] < lo ? start[r0] : lo;
    hi = stop[r1 - 1] > hi ? stop[r1 - 1] : hi;
  }
  const uint32_t everyone = n == 32 ? 0xffffffffu : (1u << n) - 1;
  const size_t seg_was = g.seg.size(), mask_was = g.mask.size();
  i64 cols = 0, from = 0;
  uint32_t now = 0;
  pos.drain(lo, hi, [&](i64 x) {
    if (now) {
      const i64 m = x - from;
      const uint32_t show = now == everyone ? 0xffffffffu : now;
      cols += m;
      const size_t s = g.seg.size();
      if (m >= 16) {
        g.seg.insert(g.seg.end(), {from, m, ~(i64)show});
      } else {
        if (s > seg_was && g.seg[s - 1] >= 0 && g.seg[s - 3] + g.seg[s - 2] == from) g.seg[s - 2] += m;
        else g.seg.insert(g.seg.end(), {from, m, (i64)g.mask.size()});
        g.mask.insert(g.mask.end(), (size_t)m, show);
      }
    }
    now ^= flip[x];
    flip[x] = 0;
    from = x;
  });
  if ((double)edges < ratio * (double)cols) {
    g.seg.resize(seg_was);
    g.mask.resize(mask_was);
    g.loose.insert(g.loose.end(), rows, rows + n);
    return;
  }
  for (i64 z = 0; z < 32; z++) g.row.push_back(z < n ? rows[z] : -1);
  g.seg_n.push_back((i64)(g.seg.size() - seg_was) / 3);
  g.col_n.push_back(cols);
  g.lo.push_back(lo);
  g.hi.push_back(hi);
}

struct PlanJob {
  const i64 *indptr, *start, *stop;
  i64 t, tk, leads, stretch;  // rows a task
  double ratio;
  std::vector<Groups> parts;
  std::vector<Ints> empty;
};

void plan_task(void *ctx, i64 task) {
  PlanJob &job = *static_cast<PlanJob *>(ctx);
  const i64 per_lead = (job.t + job.stretch - 1) / job.stretch, lead = task / per_lead, s = task % per_lead;
  const i64 i0 = s * job.stretch, i1 = i0 + job.stretch < job.t ? i0 + job.stretch : job.t, row0 = lead * job.t;
  Groups &g = job.parts[task];
  Positions pos(job.ratio > 0 ? job.tk : 0);
  std::vector<uint32_t> flip(job.ratio > 0 ? job.tk + 1 : 0, 0);
  int32_t rows[32];
  i64 n = 0;
  for (i64 i = i0; i < i1; i++) {
    if (job.indptr[row0 + i] == job.indptr[row0 + i + 1]) {
      job.empty[task].push_back((int32_t)i);
      continue;
    }
    if (job.ratio <= 0) {
      g.loose.push_back((int32_t)i);
      continue;
    }
    rows[n++] = (int32_t)i;
    if (n == 32) {
      make_groups(job.indptr, job.start, job.stop, row0, rows, n, job.tk, job.ratio, pos, flip, g);
      n = 0;
    }
  }
  if (n) make_groups(job.indptr, job.start, job.stop, row0, rows, n, job.tk, job.ratio, pos, flip, g);
}

template <class V> void append(V &x, const V &y) { x.insert(x.end(), y.begin(), y.end()); }

}  // namespace

// ratio: a group of targets goes to the tile path if it has that many edges for each column; 0: never
EXPORT i64 *ga_plan(const i64 *indptr, const i64 *start, const i64 *stop, const i64 *edge_ptr, i64 leads, i64 t, i64 tk,
                    double ratio, i64 threads, i64 *length) try {
  PlanJob job{indptr, start, stop, t, tk, leads, 0, ratio, {}, {}};
  // each task clears tables of T_kv entries, so few of them
  const i64 want = threads > 1 ? 4 * threads : 1;
  job.stretch = ((t + want - 1) / want + 31) / 32 * 32;
  if (job.stretch < 1024) job.stretch = 1024;
  const i64 per_lead = (t + job.stretch - 1) / job.stretch, tasks = leads * per_lead;
  job.parts.resize(tasks);
  job.empty.resize(tasks);
  std::atomic<bool> failed{false};
  struct Ctx { PlanJob *job; std::atomic<bool> *failed; } ctx{&job, &failed};
  ga_parallel(threads, tasks, [](void *c, i64 task) {
    Ctx &x = *static_cast<Ctx *>(c);
    try { plan_task(x.job, task); } catch (const std::bad_alloc &) { *x.failed = true; }
  }, &ctx);
  if (failed) return nullptr;

  Ints group_row, rows, empties;
  Longs group_lead{0}, group_seg{0}, group_col{0}, seg, glo, ghi, unit_lead{0}, units, row_lead{0}, row_edge{0}, hubs,
      hub_lead{0}, empty_lead{0}, piece_lead{0};
  std::vector<uint32_t> mask;
  i64 emax = 0, pieces = 0;
  for (i64 lead = 0; lead < leads; lead++) {
    const i64 r0 = (i64)rows.size(), row0 = lead * t;
    for (i64 s = 0; s < per_lead; s++) {
      Groups &g = job.parts[lead * per_lead + s];
      append(empties, job.empty[lead * per_lead + s]);
      append(group_row, g.row);
      for (i64 n : g.seg_n) group_seg.push_back(group_seg.back() + n);
      for (i64 n : g.col_n) group_col.push_back(group_col.back() + n);
      for (size_t z = 2; z < g.seg.size(); z += 3)
        if (g.seg[z] >= 0) g.seg[z] += (i64)mask.size();
      append(seg, g.seg);
      append(mask, g.mask);
      append(glo, g.lo);
      append(ghi, g.hi);
      for (int32_t i : g.loose) {
        rows.push_back(i);
        row_edge.push_back(row_edge.back() + edge_ptr[row0 + i + 1] - edge_ptr[row0 + i]);
      }
      g = Groups();
    }
    const i64 r1 = (i64)rows.size(), edges = row_edge[r1] - row_edge[r0];
    emax = edges > emax ? edges : emax;
    // fixed by the graph alone, so that results do not depend on the number of threads
    const i64 size = edges / 64 > 512 ? edges / 64 : 512, hub = size > 2048 ? size : 2048;
    for (i64 r = r0; r < r1;) {
      const i64 d = row_edge[r + 1] - row_edge[r];
      if (d > 2 * hub) {
        const i64 n = (d + hub - 1) / hub;
        hubs.insert(hubs.end(), {r, pieces, pieces + n});
        for (i64 z = 0; z < n; z++) units.insert(units.end(), {r, r + 1, d * z / n, d * (z + 1) / n, pieces + z});
        pieces += n;
        r++;
        continue;
      }
      i64 e = 0, from = r;
      for (; r < r1 && e < size && row_edge[r + 1] - row_edge[r] <= 2 * hub; r++) e += row_edge[r + 1] - row_edge[r];
      units.insert(units.end(), {from, r, 0, 0, -1});
    }
    group_lead.push_back((i64)group_row.size() / 32);
    unit_lead.push_back((i64)units.size() / 5);
    row_lead.push_back(r1);
    hub_lead.push_back((i64)hubs.size() / 3);
    empty_lead.push_back((i64)empties.size());
    piece_lead.push_back(pieces);
  }
  Writer w(P_SIZE);
  w.out[P_LEADS] = leads;
  w.out[P_GROUPS] = (i64)group_row.size() / 32;
  w.out[P_UNITS] = (i64)units.size() / 5;
  w.out[P_PIECES] = pieces;
  w.out[P_HUBS] = (i64)hubs.size() / 3;
  w.out[P_ROWS] = (i64)rows.size();
  w.out[P_EMPTY] = (i64)empties.size();
  w.out[P_EMAX] = emax;
  w.put(P_GROUP_LEAD, group_lead);
  w.put(P_GROUP_ROW, group_row);
  w.put(P_GROUP_SEG, group_seg);
  w.put(P_GROUP_COL, group_col);
  w.put(P_SEG, seg);
  w.put(P_MASK, mask.data(), mask.size() * 4);
  w.put(P_UNIT_LEAD, unit_lead);
  w.put(P_UNIT, units);
  w.put(P_ROW_LEAD, row_lead);
  w.put(P_ROW, rows);
  w.put(P_ROW_EDGE, row_edge);
  w.put(P_HUB, hubs);
  w.put(P_HUB_LEAD, hub_lead);
  w.put(P_EMPTY_LEAD, empty_lead);
  w.put(P_EMPTY_ROW, empties);
  w.put(P_PIECE_LEAD, piece_lead);
  w.put(P_GLO, glo);
  w.put(P_GHI, ghi);
  // Where most runs are one source the sources themselves are no longer than the runs, and need no walking.
  const i64 edges = row_edge.back();
  i64 runs = 0;
  for (i64 lead = 0; lead < leads; lead++)
    for (i64 r = row_lead[lead]; r < row_lead[lead + 1]; r++)
      runs += indptr[lead * t + rows[r] + 1] - indptr[lead * t + rows[r]];
  if (edges && edges < 2 * runs) {
    Ints col;
    col.reserve(edges + 64);
    for (i64 lead = 0; lead < leads; lead++)
      for (i64 r = row_lead[lead]; r < row_lead[lead + 1]; r++)
        for (i64 u = indptr[lead * t + rows[r]]; u < indptr[lead * t + rows[r] + 1]; u++)
          for (i64 j = start[u]; j < stop[u]; j++) col.push_back((int32_t)j);
    col.insert(col.end(), 64, col.back());  // what is prefetched ahead of the last
    w.put(P_COL, col);
  }
  return w.release(length);
} catch (const std::bad_alloc &) {
  return nullptr;
}

// For the pass over sources: per block of sources the (target, run) that meet it, targets in order.
EXPORT i64 *ga_source_plan(const i64 *indptr, const i64 *start, const i64 *stop, const i64 *run_edge, const i64 *edge_ptr,
                           const i64 *plan, i64 t, i64 tk, i64 *length) try {
  const i64 leads = plan[P_LEADS], *row_lead = plan + plan[P_ROW_LEAD], *row_edge = plan + plan[P_ROW_EDGE];
  const int32_t *rows = reinterpret_cast<const int32_t *>(plan + plan[P_ROW]);
  i64 runs = 0, edges = row_edge[plan[P_ROWS]];
  for (i64 lead = 0; lead < leads; lead++)
    for (i64 r = row_lead[lead]; r < row_lead[lead + 1]; r++)
      runs += indptr[lead * t + rows[r] + 1] - indptr[lead * t + rows[r]];
  // blocks as long as the usual run, so that there are not many more entries than runs
  int shift = 6;
  while (shift < 10 && runs * ((i64)1 << shift) < edges) shift++;
  const i64 size = (i64)1 << shift, blocks = (tk + size - 1) / size;
  // where most runs are one source, entries are edges ordered by source: its gradient then stays in registers
  const bool single = edges < 2 * runs;
  std::vector<i64> ptr(leads * blocks + 1, 0);
  std::vector<i64> weight(leads * blocks, 0);
  auto each = [&](auto f) {
    for (i64 lead = 0; lead < leads; lead++)
      for (i64 r = row_lead[lead]; r < row_lead[lead + 1]; r++) {
        const i64 row = lead * t + rows[r];
        for (i64 u = indptr[row]; u < indptr[row + 1]; u++)
          for (i64 j = start[u]; j < stop[u];) {
            const i64 b = j >> shift;
            i64 end = (b + 1) << shift < stop[u] ? (b + 1) << shift : stop[u];
            if (single) end = j + 1;
            f(lead * blocks + b, r, row, u, j, end - j);
            j = end;
          }
      }
  };
  each([&](i64 b, i64, i64, i64, i64, i64 n) { ptr[b + 1]++; weight[b] += n; });
  for (i64 b = 0; b < leads * blocks; b++) ptr[b + 1] += ptr[b];
  const i64 total = ptr[leads * blocks];
  Ints er(total), ej(total), en(total);
  Longs ee(total), fill(ptr.begin(), ptr.end() - 1);
  if (single) {
    fill.assign(leads * tk + 1, 0);
    each([&](i64 b, i64, i64, i64, i64 j, i64) { fill[b / blocks * tk + j + 1]++; });
    for (i64 x = 0; x < leads * tk; x++) fill[x + 1] += fill[x];
  }
  each([&](i64 b, i64 r, i64 row, i64 u, i64 j, i64 n) {
    const i64 x = single ? fill[b / blocks * tk + j]++ : fill[b]++;
    er[x] = (int32_t)r;
    ej[x] = (int32_t)j;
    en[x] = (int32_t)n;
    ee[x] = row_edge[r] + run_edge[u] + (j - start[u]) - edge_ptr[row];
  });
  Longs unit_lead{0}, units, hubs, hub_lead{0}, piece_lead{0};
  i64 pieces = 0;
  for (i64 lead = 0; lead < leads; lead++) {
    const i64 e = row_edge[row_lead[lead + 1]] - row_edge[row_lead[lead]];
    const i64 aim = e / 128 > 512 ? e / 128 : 512, most = aim > 4096 ? aim : 4096;
    for (i64 b = lead * blocks; b < (lead + 1) * blocks;) {
      if (weight[b] > 2 * most) {
        const i64 first = pieces;
        for (i64 x = ptr[b]; x < ptr[b + 1];) {
          i64 y = x, n = 0;
          for (; y < ptr[b + 1] && n < most; y++) n += en[y];
          units.insert(units.end(), {b - lead * blocks, b + 1 - lead * blocks, x, y, pieces++});
          x = y;
        }
        hubs.insert(hubs.end(), {b - lead * blocks, first, pieces});
        b++;
        continue;
      }
      i64 n = 0, from = b;
      for (; b < (lead + 1) * blocks && n < aim && weight[b] <= 2 * most; b++) n += weight[b];
      // also where no entry is: who writes a unit's gradients writes zeros for sources nobody reads
      units.insert(units.end(), {from - lead * blocks, b - lead * blocks, ptr[from], ptr[b], -1});
    }
    unit_lead.push_back((i64)units.size() / 5);
    hub_lead.push_back((i64)hubs.size() / 3);
    piece_lead.push_back(pieces);
  }
  Writer w(S_SIZE);
  w.out[S_SINGLE] = single;
  w.out[S_SHIFT] = shift;
  w.out[S_BLOCKS] = blocks;
  w.out[S_UNITS] = (i64)units.size() / 5;
  w.out[S_PIECES] = pieces;
  w.out[S_HUBS] = (i64)hubs.size() / 3;
  w.put(S_UNIT_LEAD, unit_lead);
  w.put(S_UNIT, units);
  w.put(S_ENTRY_PTR, ptr.data(), ptr.size() * 8);
  w.put(S_ENTRY_ROW, er);
  w.put(S_ENTRY_J, ej);
  w.put(S_ENTRY_N, en);
  w.put(S_ENTRY_E, ee);
  w.put(S_HUB, hubs);
  w.put(S_HUB_LEAD, hub_lead);
  w.put(S_PIECE_LEAD, piece_lead);
  return w.release(length);
} catch (const std::bad_alloc &) {
  return nullptr;
}

EXPORT void ga_release(void *p) { free(p); }
