// Kernels of a decoder on CPUs, fp32: products with packed weights, attention over block tables,
// and the two halves of a decoder layer of the Llama kind made of them.
//
// Every sum is made in an order that depends on its own row alone (k ascending; keys in segments
// of 256 that begin at absolute positions), never on how many rows a call has, on the height of a
// tile or on the threads: a row gets the same bits whatever else is in the batch. So the compiler
// fuses nothing by itself (-ffp-contract=off; it does in some copies of a loop and not in others).
//
// Weights [N, K] are packed in panels of 16 outputs, 32 with AVX-512: panel p holds
// w[PANEL p + j][k] at [k][j].

#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>

#ifdef _OPENMP
#include <omp.h>
#endif
#ifdef __FMA__
#include <immintrin.h>
#endif

template <int N>
struct Floats {
  typedef float type __attribute__((vector_size(N * 4)));
  typedef int32_t bits __attribute__((vector_size(N * 4)));
  typedef float anywhere __attribute__((vector_size(N * 4), aligned(4), may_alias));
};

#ifdef __AVX512F__
constexpr int LANES = 16;   // floats of a vector
constexpr int HEIGHT = 12;  // rows of a product's tile: 24 accumulators in 32 registers
constexpr int VALUED = 6;   // query heads whose values are added at once, 4 vectors of each
#else
constexpr int LANES = 8;
constexpr int HEIGHT = 6;  // 12 accumulators in 16 registers
constexpr int VALUED = 3;
#endif

typedef Floats<8>::type v8;
typedef Floats<LANES>::type vw;

template <class V>
static inline V load(const float* p) {
  return *(const typename Floats<sizeof(V) / 4>::anywhere*)p;
}
template <class V>
static inline void store(float* p, V x) {
  *(typename Floats<sizeof(V) / 4>::anywhere*)p = x;
}
template <class V>
static inline V fill(float x) {
  return x - V{};
}

// a x b + c, rounded once where the processor can.
template <class V>
static inline V fused(V a, V b, V c) {
#if defined(__FMA__)
  if constexpr (sizeof(V) == 32) return (V)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#if defined(__AVX512F__)
  if constexpr (sizeof(V) == 64) return (V)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#endif
#elif defined(__ARM_FEATURE_FMA)
  V found;
  for (unsigned i = 0; i < sizeof(V) / 4; i++) found[i] = __builtin_fmaf(a[i], b[i], c[i]);
  return found;
#endif
  return a * b + c;
}

constexpr int PANEL = 2 * LANES;  // outputs of a panel
constexpr int KEYS = 16;          // keys that are scored at once
constexpr int TILE = HEIGHT;      // query heads that are
constexpr int ROWS = 96;          // rows whose inputs stay in the cache while panels pass by
constexpr int SEGMENT = 256;      // keys whose scores are made before their values are read
constexpr float LOWEST = -1e30f;

// exp of floats (Cephes' expf, 2 ulp); 0 below -87.3, exp(88.3) above it.
template <class V>
static inline V exponential(V x) {
  typedef typename Floats<sizeof(V) / 4>::bits I;
  const V zero = fill<V>(0.0f), rounder = fill<V>(12582912.0f);
  I dead = x < fill<V>(-87.3f);
  x = (x > fill<V>(88.3f)) ? fill<V>(88.3f) : x;
  x = dead ? zero : x;
  V shifted = fused(x, fill<V>(1.44269504088896341f), rounder);  // whole in the low bits
  V n = shifted - rounder;
  V r = fused(n, fill<V>(-0.693359375f), x);
  r = fused(n, fill<V>(2.12194440e-4f), r);
  V y = fill<V>(1.9875691500e-4f);
  y = fused(y, r, fill<V>(1.3981999507e-3f));
  y = fused(y, r, fill<V>(8.3334519073e-3f));
  y = fused(y, r, fill<V>(4.1665795894e-2f));
  y = fused(y, r, fill<V>(1.6666665459e-1f));
  y = fused(y, r, fill<V>(5.0000001201e-1f));
  y = fused(y * r, r, r) + fill<V>(1.0f);
  I bits = ((I)shifted - (I)rounder + 127) << 23;
  V found = y * (V)bits;
  return dead ? zero : found;
}

static inline vw silu(vw x) { return x / (fill<vw>(1.0f) + exponential(-x)); }

// ---- products -----------------------------------------------------------------------------------

struct Product {
  const float* packed;    // [panels][K][PANEL]
  const float* bias;      // [PANEL x panels] or null
  const float* residual;  // added, with the row stride of the output, or null
  float* out;
  int64_t stride;  // of output rows
  int32_t n, k;    // n: outputs before gating
  int32_t gated;   // panels are half gates, half values: silu(gate) x value, n / 2 outputs
};

static inline void put(const Product& p, int64_t row, int panel, vw lo, vw hi) {
  if (p.bias) {
    lo += load<vw>(p.bias + panel * PANEL);
    hi += load<vw>(p.bias + panel * PANEL + LANES);
  }
  int width = PANEL, first = panel * PANEL, most = p.n - first;
  if (p.gated) {
    lo = silu(lo) * hi;
    width = LANES, first = panel * LANES, most = p.n / 2 - first;
  }
  float* to = p.out + row * p.stride + first;
  const float* add = p.residual ? p.residual + row * p.stride + first : nullptr;
  if (most >= width) {
    store(to, add ? lo + load<vw>(add) : lo);
    if (!p.gated) store(to + LANES, add ? hi + load<vw>(add + LANES) : hi);
    return;
  }
  float both[PANEL];
  store(both, lo), store(both + LANES, hi);
  for (int j = 0; j < most; j++) to[j] = add ? both[j] + add[j] : both[j];
}

template <int R>
static inline void tile(const float* a, int64_t lda, const float* w, int K, const char* next,
                        int step, vw acc[R][2]) {
  for (int r = 0; r < R; r++) acc[r][0] = acc[r][1] = vw{};
  for (int k = 0; k < K; k++) {
    for (int line = 0; line < PANEL * 4; line += 64)
      __builtin_prefetch(next + (int64_t)k * step + line);
    vw b0 = load<vw>(w + k * PANEL), b1 = load<vw>(w + k * PANEL + LANES);
#pragma GCC unroll 12
    for (int r = 0; r < R; r++) {
      vw x = fill<vw>(a[r * lda + k]);
      acc[r][0] = fused(x, b0, acc[r][0]);
      acc[r][1] = fused(x, b1, acc[r][1]);
    }
  }
}

template <int R>
static inline void rows(const Product& p, const float* a, int64_t lda, int64_t row, int panel,
                        const float* w, const char* next, int step) {
  vw acc[R][2];
  tile<R>(a + row * lda, lda, w, p.k, next, step, acc);
  for (int r = 0; r < R; r++) put(p, row + r, panel, acc[r][0], acc[r][1]);
}

typedef void (*Rows)(const Product&, const float*, int64_t, int64_t, int, const float*,
                     const char*, int);

template <int... R>
static constexpr std::array<Rows, sizeof...(R)> rows_by_height(std::integer_sequence<int, R...>) {
  return {rows<R + 1>...};
}
constexpr auto BY_HEIGHT = rows_by_height(std::make_integer_sequence<int, HEIGHT>{});

static void panel_rows(const Product& p, const float* a, int64_t lda, int64_t begin, int64_t end,
                       int panel) {
  const float* w = p.packed + (int64_t)panel * p.k * PANEL;
  int64_t row = begin, tiles = (end - begin + HEIGHT - 1) / HEIGHT;
  // The next panel is asked for in time, a part of it by each tile; where there is one tile, its
  // own panel is, some lines ahead. (What is asked for behind the last panel costs a page walk.)
  bool is_last = panel + 1 == (p.n + PANEL - 1) / PANEL;
  int64_t ahead = tiles == 1 ? 32 : (is_last ? 0 : p.k);
  const char* next = (const char*)(w + ahead * PANEL);
  int step = (int)(sizeof(float) * PANEL / tiles);
  for (; tiles > 0; tiles--) {
    int64_t height = (end - row + tiles - 1) / tiles;  // even tiles: 16 rows are 6, 5, 5 or 8, 8
    BY_HEIGHT[height - 1](p, a, lda, row, panel, w, next, step);
    row += height;
    next += (int64_t)p.k * step;
  }
}

// Inside a parallel region; ends with a barrier.
static void multiply(const Product& p, const float* a, int64_t lda, int64_t m) {
  int panels = (p.n + PANEL - 1) / PANEL;
  for (int64_t begin = 0; begin < m; begin += ROWS) {
    int64_t end = begin + ROWS < m ? begin + ROWS : m;
    if (end < m) {
#pragma omp for schedule(guided) nowait
      for (int panel = 0; panel < panels; panel++) panel_rows(p, a, lda, begin, end, panel);
    } else {
#pragma omp for schedule(guided)
      for (int panel = 0; panel < panels; panel++) panel_rows(p, a, lda, begin, end, panel);
    }
  }
}

// ---- norms and rotary positions -----------------------------------------------------------------

static void norm_row(const float* x, const float* weight, float eps, int n, float* out) {
  vw sums{};
  float rest = 0.0f;
  int j = 0;
  for (; j + LANES <= n; j += LANES) sums = fused(load<vw>(x + j), load<vw>(x + j), sums);
  for (; j < n; j++) rest += x[j] * x[j];
  float sum = rest;
  for (int i = 0; i < LANES; i++) sum += sums[i];
  float factor = 1.0f / std::sqrt(sum / n + eps);
  for (j = 0; j < n; j++) out[j] = weight[j] * (x[j] * factor);
}

static void normalise(const float* x, const float* weight, float eps, int64_t m, int n,
                      float* out) {
#pragma omp for schedule(static)
  for (int64_t r = 0; r < m; r++) norm_row(x + r * n, weight, eps, n, out + r * n);
}

static void rotate(float* head, const float* cosine, const float* sine, int n) {
  int half = n / 2;
  for (int j = 0; j < half; j++) {
    float a = head[j], b = head[j + half];
    head[j] = a * cosine[j] - b * sine[j];
    head[j + half] = b * cosine[j + half] + a * sine[j + half];
  }
}

// ---- attention over block tables ----------------------------------------------------------------

// Caches: keys [block][kv head][key dim][block size], values [block][kv head][block size][padded
// value dim]. The table of slot s begins at tables + s x table_stride. Rows of a sequence are
// consecutive; its last one is at position lengths - 1.
struct Attention {
  const float* q;
  float* out;
  const float *keys, *values, *sinks;  // sinks [query heads] or null
  const int32_t *tables, *starts, *slots, *lengths;
  int64_t q_stride, out_stride, table_stride;
  int32_t num_slots, query_heads, kv_heads, key_dim, value_dim, block_size;
  int32_t window, chunk;  // 0: none
  float scale, softcap;   // 0: none
};

struct Span {  // the keys that a row sees
  int first, last;
};

static inline Span span_of(const Attention& t, int position) {
  int first = 0;
  if (t.window && position - t.window + 1 > first) first = position - t.window + 1;
  if (t.chunk && position / t.chunk * t.chunk > first) first = position / t.chunk * t.chunk;
  return {first, position};
}

template <int R>
static void score_block(const Attention& t, const float* const* q, const float* keys,
                        const float* next, float* scores) {
  constexpr int V = KEYS / LANES;  // vectors
  for (int j = 0; j < t.block_size; j += KEYS) {
    vw acc[R][V]{};
    for (int d = 0; d < t.key_dim; d++) {
      if (R < TILE) __builtin_prefetch(next + d * t.block_size + j);  // else many share a block
      vw k[V];
#pragma GCC unroll 2
      for (int v = 0; v < V; v++) k[v] = load<vw>(keys + d * t.block_size + j + v * LANES);
#pragma GCC unroll 12
      for (int r = 0; r < R; r++) {
        vw x = fill<vw>(q[r][d]);
#pragma GCC unroll 2
        for (int v = 0; v < V; v++) acc[r][v] = fused(x, k[v], acc[r][v]);
      }
    }
    for (int r = 0; r < R; r++)
      for (int v = 0; v < V; v++)
        store(scores + r * SEGMENT + j + v * LANES, acc[r][v] * fill<vw>(t.scale));
  }
}

template <class V, int R, int C>
static inline void add_values(const float* weights, const float* values, int64_t ahead, int stride,
                              int count, float* out) {
  constexpr int lanes = sizeof(V) / 4;
  V acc[R][C];
  for (int r = 0; r < R; r++)
    for (int c = 0; c < C; c++) acc[r][c] = load<V>(out + r * stride + c * lanes);
  for (int j = 0; j < count; j++) {
    V v[C];
#pragma GCC unroll 4
    for (int c = 0; c < C; c++) {
      const float* at = values + (int64_t)j * stride + c * lanes;
      __builtin_prefetch(at + ahead);
      v[c] = load<V>(at);
    }
#pragma GCC unroll 6
    for (int r = 0; r < R; r++) {
      V w = fill<V>(weights[r * SEGMENT + j]);
#pragma GCC unroll 4
      for (int c = 0; c < C; c++) acc[r][c] = fused(w, v[c], acc[r][c]);
    }
  }
  for (int r = 0; r < R; r++)
    for (int c = 0; c < C; c++) store(out + r * stride + c * lanes, acc[r][c]);
}

template <int R>
static void add_values_of(const float* weights, const float* values, int64_t ahead, int stride,
                          int count, float* out) {
  int c = 0;
  for (; c + 4 * LANES <= stride; c += 4 * LANES)
    add_values<vw, R, 4>(weights, values + c, ahead, stride, count, out + c);
  for (; c + LANES <= stride; c += LANES)
    add_values<vw, R, 1>(weights, values + c, ahead, stride, count, out + c);
  for (; c < stride; c += 8)
    add_values<v8, R, 1>(weights, values + c, ahead, stride, count, out + c);
}

typedef void (*Scorer)(const Attention&, const float* const*, const float*, const float*, float*);
typedef void (*Adder)(const float*, const float*, int64_t, int, int, float*);

template <int... R>
static constexpr std::array<Scorer, sizeof...(R)> scorers(std::integer_sequence<int, R...>) {
  return {score_block<R + 1>...};
}
template <int... R>
static constexpr std::array<Adder, sizeof...(R)> adders(std::integer_sequence<int, R...>) {
  return {add_values_of<R + 1>...};
}
constexpr auto SCORERS = scorers(std::make_integer_sequence<int, TILE>{});
constexpr auto ADDERS = adders(std::make_integer_sequence<int, VALUED>{});

struct Tile {  // query heads of one key/value head, of one or several rows
  const float* q[TILE];
  float* out[TILE];
  Span span[TILE];
  int head[TILE];
  int count;
};

// exp(score - highest) of a segment in place; unseen keys get 0. Updates highest and sum.
static float weigh(const Attention& t, float* scores, int base, int count, Span span,
                   float& highest, float& sum) {
  if (t.softcap > 0.0f)
    for (int j = 0; j < count; j++) scores[j] = std::tanh(scores[j] / t.softcap) * t.softcap;
  int whole = (count + LANES - 1) / LANES * LANES;
  for (int j = 0; j < count && base + j < span.first; j++) scores[j] = -INFINITY;
  int seen = span.last + 1 - base;
  for (int j = seen < 0 ? 0 : (seen < count ? seen : count); j < whole; j++) scores[j] = -INFINITY;
  vw most = fill<vw>(highest);
  for (int j = 0; j < whole; j += LANES) {
    vw s = load<vw>(scores + j);
    most = s > most ? s : most;
  }
  float before = highest;
  for (int i = 0; i < LANES; i++) highest = most[i] > highest ? most[i] : highest;
  vw sums{};
  for (int j = 0; j < whole; j += LANES) {
    vw e = exponential(load<vw>(scores + j) - fill<vw>(highest));
    store(scores + j, e);
    sums += e;
  }
  float factor = highest == before ? 1.0f : exponential(fill<vw>(before - highest))[0];
  float added = 0.0f;
  for (int i = 0; i < LANES; i++) added += sums[i];
  sum = sum * factor + added;
  return factor;
}

// Blocks lie anywhere: the next one is asked for while one is read.
static const float* block_at(const float* cache, const int32_t* table, int index, int kv_heads,
                             int kv, int64_t size) {
  return cache + ((int64_t)table[index] * kv_heads + kv) * size;
}

static void score_blocks(const Attention& t, const Tile& tile, const int32_t* table, int kv,
                         int base, int count, const float* values, float* scores) {
  int64_t size = (int64_t)t.key_dim * t.block_size;
  const float* keys = block_at(t.keys, table, base / t.block_size, t.kv_heads, kv, size);
  for (int j = 0; j < count; j += t.block_size) {
    int index = (base + j) / t.block_size + 1;
    bool is_last = j + t.block_size >= count;
    const float* next =
        is_last ? values : block_at(t.keys, table, index, t.kv_heads, kv, size);
    SCORERS[tile.count - 1](t, tile.q, keys, next, scores + j);
    keys = next;
  }
}

static void add_blocks(const Attention& t, const Tile& tile, const int32_t* table, int kv, int base,
                       int count, int padded, const float* weights, float* out) {
  int64_t size = (int64_t)padded * t.block_size;
  const float* values = block_at(t.values, table, base / t.block_size, t.kv_heads, kv, size);
  for (int j = 0; j < count; j += t.block_size) {
    int keys = count - j < t.block_size ? count - j : t.block_size;
    int index = (base + j) / t.block_size + 1;
    bool is_last = j + t.block_size >= count;
    const float* next =
        is_last ? values : block_at(t.values, table, index, t.kv_heads, kv, size);
    for (int r = 0; r < tile.count; r += VALUED) {
      int heads = tile.count - r < VALUED ? tile.count - r : VALUED;
      ADDERS[heads - 1](weights + r * SEGMENT + j, values, next - values, padded, keys,
                        out + r * padded);
    }
    values = next;
  }
}

static void attend_tile(const Attention& t, const Tile& tile, const int32_t* table, int kv) {
  int padded = (t.value_dim + 7) / 8 * 8;
  alignas(64) float scores[TILE * SEGMENT];
  alignas(64) float out[TILE * 1024];
  float highest[TILE], sum[TILE];
  int first = tile.span[0].first, last = tile.span[0].last;
  for (int r = 0; r < tile.count; r++) {
    highest[r] = LOWEST, sum[r] = 0.0f;
    first = tile.span[r].first < first ? tile.span[r].first : first;
    last = tile.span[r].last > last ? tile.span[r].last : last;
  }
  std::memset(out, 0, sizeof(float) * tile.count * padded);
  for (int base = first / SEGMENT * SEGMENT; base <= last; base += SEGMENT) {
    int count = last + 1 - base < SEGMENT ? last + 1 - base : SEGMENT;
    const float* values = block_at(t.values, table, base / t.block_size, t.kv_heads, kv,
                                   (int64_t)padded * t.block_size);
    score_blocks(t, tile, table, kv, base, count, values, scores);
    for (int r = 0; r < tile.count; r++) {
      float factor =
          weigh(t, scores + r * SEGMENT, base, count, tile.span[r], highest[r], sum[r]);
      if (factor != 1.0f)
        for (int d = 0; d < padded; d++) out[r * padded + d] *= factor;
    }
    add_blocks(t, tile, table, kv, base, count, padded, scores, out);
  }
  for (int r = 0; r < tile.count; r++) {
    float share = 1.0f / sum[r];
    if (t.sinks) {  // one more key, without value
      float sink = t.sinks[tile.head[r]], top = sink > highest[r] ? sink : highest[r];
      float seen = std::exp(highest[r] - top);
      share = seen / (sum[r] * seen + std::exp(sink - top));
    }
    for (int d = 0; d < t.value_dim; d++) tile.out[r][d] = out[r * padded + d] * share;
  }
}

// Inside a parallel region; ends with a barrier.
static void attend(const Attention& t) {
  int group = t.query_heads / t.kv_heads;
  int64_t total = 0;
  for (int s = 0; s < t.num_slots; s++)
    total += ((int64_t)(t.starts[s + 1] - t.starts[s]) * group + TILE - 1) / TILE * t.kv_heads;
#pragma omp for schedule(dynamic, 1)
  for (int64_t task = total - 1; task >= 0; task--) {
    int64_t at = task;
    int s = 0;
    for (;; s++) {
      int64_t tasks =
          ((int64_t)(t.starts[s + 1] - t.starts[s]) * group + TILE - 1) / TILE * t.kv_heads;
      if (at < tasks) break;
      at -= tasks;
    }
    int num_rows = t.starts[s + 1] - t.starts[s];
    int tiles = (num_rows * group + TILE - 1) / TILE, kv = at / tiles;
    int begin = (int64_t)(at % tiles) * num_rows * group / tiles;
    int end = (int64_t)(at % tiles + 1) * num_rows * group / tiles;
    Tile tile;
    tile.count = end - begin;
    for (int r = 0; r < tile.count; r++) {
      int row = (begin + r) / group, head = kv * group + (begin + r) % group;
      int64_t place = t.starts[s] + row;
      tile.q[r] = t.q + place * t.q_stride + (int64_t)head * t.key_dim;
      tile.out[r] = t.out + place * t.out_stride + (int64_t)head * t.value_dim;
      tile.span[r] = span_of(t, t.lengths[s] - num_rows + row);
      tile.head[r] = head;
    }
    attend_tile(t, tile, t.tables + t.slots[s] * t.table_stride, kv);
  }
}

// Writes a row's keys and values to place `at` (block x block size + offset) of the caches.
static void keep_row(const float* key, const float* value, float* keys, float* values, int64_t at,
                     int kv_heads, int key_dim, int value_dim, int block_size) {
  int64_t block = at / block_size, offset = at % block_size;
  int padded = (value_dim + 7) / 8 * 8;
  for (int h = 0; h < kv_heads; h++) {
    float* to = keys + (block * kv_heads + h) * key_dim * block_size + offset;
    for (int d = 0; d < key_dim; d++) to[(int64_t)d * block_size] = key[h * key_dim + d];
    float* v = values + ((block * kv_heads + h) * block_size + offset) * padded;
    std::memcpy(v, value + h * value_dim, sizeof(float) * value_dim);
  }
}

// ---- a decoder layer of the Llama kind ----------------------------------------------------------

struct Layer {
  const float *input_norm, *qkv, *qkv_bias, *q_norm, *k_norm, *o, *o_bias;
  const float *mlp_norm, *gate_up, *gate_up_bias, *down, *down_bias;
  float *keys, *values;
  float eps, scale;
  int32_t hidden, query_heads, kv_heads, head_dim, rotary_dim, width, window, adds_residual;
};

struct Batch {
  float *normed, *qkv, *attended, *gated;  // [rows, ...]
  const float *cosine, *sine;              // [rows, rotary dim]
  const int32_t *cache, *tables, *starts, *slots, *lengths;
  int64_t table_stride;
  int32_t rows, num_slots, block_size, threads;
};

static void place_row(const Layer& l, const Batch& b, int64_t r) {
  int width = (l.query_heads + 2 * l.kv_heads) * l.head_dim;
  float* row = b.qkv + r * width;
  for (int h = 0; h < l.query_heads + l.kv_heads; h++) {
    float* head = row + (int64_t)h * l.head_dim;
    const float* weight = h < l.query_heads ? l.q_norm : l.k_norm;
    if (weight) norm_row(head, weight, l.eps, l.head_dim, head);
    if (l.rotary_dim)
      rotate(head, b.cosine + r * l.rotary_dim, b.sine + r * l.rotary_dim, l.rotary_dim);
  }
  const float* key = row + l.query_heads * l.head_dim;
  keep_row(key, key + l.kv_heads * l.head_dim, l.keys, l.values, b.cache[r], l.kv_heads, l.head_dim,
           l.head_dim, b.block_size);
}

extern "C" {

// x [rows, hidden] -> out: the attention branch, plus x if the layer adds it (out may be x).
void triptych_attention_half(const Layer* layer, const Batch* batch, const float* x, float* out) {
  const Layer& l = *layer;
  const Batch& b = *batch;
  int query = l.query_heads * l.head_dim, width = query + 2 * l.kv_heads * l.head_dim;
  Product in{l.qkv, l.qkv_bias, nullptr, b.qkv, width, width, l.hidden, 0};
  Product back{l.o, l.o_bias, l.adds_residual ? x : nullptr, out, l.hidden, l.hidden, query, 0};
  Attention attention{b.qkv,       b.attended,   l.keys,       l.values,     nullptr,
                      b.tables,    b.starts,     b.slots,      b.lengths,    width,
                      query,       b.table_stride, b.num_slots, l.query_heads, l.kv_heads,
                      l.head_dim,  l.head_dim,   b.block_size, l.window,     0,
                      l.scale,     0.0f};
#pragma omp parallel num_threads(b.threads) if (b.threads > 1)
  {
    normalise(x, l.input_norm, l.eps, b.rows, l.hidden, b.normed);
    multiply(in, b.normed, l.hidden, b.rows);
#pragma omp for schedule(static)
    for (int64_t r = 0; r < b.rows; r++) place_row(l, b, r);
    attend(attention);
    multiply(back, b.attended, query, b.rows);
  }
}

// x [rows, hidden] -> out: the MLP branch, plus x if the layer adds it (out may be x).
void triptych_mlp_half(const Layer* layer, const Batch* batch, const float* x, float* out) {
  const Layer& l = *layer;
  const Batch& b = *batch;
  Product in{l.gate_up, l.gate_up_bias, nullptr, b.gated, l.width, 2 * l.width, l.hidden, 1};
  Product back{l.down, l.down_bias, l.adds_residual ? x : nullptr, out, l.hidden, l.hidden,
               l.width, 0};
#pragma omp parallel num_threads(b.threads) if (b.threads > 1)
  {
    normalise(x, l.mlp_norm, l.eps, b.rows, l.hidden, b.normed);
    multiply(in, b.normed, l.hidden, b.rows);
    multiply(back, b.gated, l.width, b.rows);
  }
}

void triptych_norm(const float* x, const float* weight, float eps, int64_t m, int32_t n, float* out,
                   int32_t threads) {
#pragma omp parallel num_threads(threads) if (threads > 1)
  normalise(x, weight, eps, m, n, out);
}

void triptych_multiply(const Product* product, const float* a, int64_t lda, int64_t m,
                       int32_t threads) {
#pragma omp parallel num_threads(threads) if (threads > 1)
  multiply(*product, a, lda, m);
}

void triptych_attend(const Attention* attention, int32_t threads) {
#pragma omp parallel num_threads(threads) if (threads > 1)
  attend(*attention);
}

void triptych_keep(const float* key, const float* value, float* keys, float* values,
                   const int32_t* cache, int64_t m, int64_t key_stride, int64_t value_stride,
                   int32_t kv_heads, int32_t key_dim, int32_t value_dim, int32_t block_size) {
  for (int64_t r = 0; r < m; r++)
    keep_row(key + r * key_stride, value + r * value_stride, keys, values, cache[r], kv_heads,
             key_dim, value_dim, block_size);
}

int32_t triptych_panel() { return PANEL; }

// Panels of outputs from weights [n, k]; with gates [n/2, k] beside values, half and half.
void triptych_pack(const float* weight, const float* gate, int32_t n, int32_t k, float* packed) {
  int half = n / 2, panels = (n + PANEL - 1) / PANEL;
  for (int p = 0; p < panels; p++)
    for (int j = 0; j < PANEL; j++) {
      int row = gate ? p * LANES + j % LANES : p * PANEL + j;
      const float* from = gate && j < LANES ? gate : weight;
      bool exists = row < (gate ? half : n);
      for (int i = 0; i < k; i++)
        packed[((int64_t)p * k + i) * PANEL + j] = exists ? from[(int64_t)row * k + i] : 0.0f;
    }
}

}  // extern "C"
