// Decode attention over runs of different lengths on a CPU; built on first use, see build.py.
//
// Work is cut into pieces of runs that are about equally long, and threads take the next piece when they are done with
// one. A piece goes through its slots in tiles: scores of a tile, softmax against the largest score so far, weighted
// sum of the values. Every key and value is loaded once for up to BLOCK query rows, whose sums stay in registers. Pieces
// of one run are merged by their log-sum-exp.
//
// Arithmetic is float32. Storage is read through Load<T>, tiles through row pointers: other storage formats and other
// places (pages of a store) need a loader or a way to find rows, and no further change.
//
// One library per instruction set: vectors are as wide as the compiler's flags allow.

#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <new>
#include <type_traits>
#include <vector>

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#endif

namespace {

#if defined(__AVX512F__)
constexpr int LANES = 16, REGISTERS = 32;
#elif defined(__AVX2__)
constexpr int LANES = 8, REGISTERS = 16;
#else
constexpr int LANES = 4, REGISTERS = 16;
#endif

constexpr int TILE = 64;   // slots whose scores are held at once; their keys and values stay in the second-level cache
constexpr int BLOCK = 8;   // query rows whose sums are in registers at once
constexpr int ROWS = 32;   // query rows of one pass over the cache
constexpr int64_t SHORTEST_PIECE = 256;
constexpr int64_t PIECES_PER_THREAD = 4;
constexpr int64_t SLOTS_PER_THREAD = 512;  // fewer are not worth waking a thread for
constexpr float NOTHING = -std::numeric_limits<float>::infinity();

typedef float Vec __attribute__((vector_size(4 * LANES)));
typedef int32_t Int __attribute__((vector_size(4 * LANES)));
typedef uint32_t Unsigned __attribute__((vector_size(4 * LANES)));
typedef uint16_t Half __attribute__((vector_size(2 * LANES)));

// ---------------------------------------------------------------------------------------------------------- vectors

template <class To, class From>
inline To same_bits(From x) {
  static_assert(sizeof(To) == sizeof(From));
  To y;
  std::memcpy(&y, &x, sizeof y);
  return y;
}

inline Vec zero() { return Vec{}; }
inline Vec splat(float x) {
#if defined(__AVX512F__)
  return _mm512_set1_ps(x);
#elif defined(__AVX2__)
  return _mm256_set1_ps(x);
#else
  return x - Vec{};  // not a sum: that would have to turn -0 into 0
#endif
}

inline Vec load(const float* from) {
  Vec x;
  std::memcpy(&x, from, sizeof x);
  return x;
}

inline void store(float* to, Vec x) { std::memcpy(to, &x, sizeof x); }

inline Vec larger(Vec a, Vec b) { return a > b ? a : b; }  // b where one of them is NaN

inline float sum(Vec x) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps(x);
#else
  float total = 0;
  for (int i = 0; i < LANES; ++i) total += x[i];
  return total;
#endif
}

inline float largest(Vec x) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps(x);
#elif defined(__AVX2__)
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
#else
  float top = x[0];
  for (int i = 1; i < LANES; ++i) top = x[i] > top ? x[i] : top;
  return top;
#endif
}

// The sums of four vectors, side by side.
inline void sum_four(Vec a, Vec b, Vec c, Vec d, float* to) {
#if defined(__AVX512F__) || defined(__AVX2__)
#if defined(__AVX512F__)
  const Vec ab = _mm512_unpacklo_ps(a, b) + _mm512_unpackhi_ps(a, b);
  const Vec cd = _mm512_unpacklo_ps(c, d) + _mm512_unpackhi_ps(c, d);
  const __m512d ab2 = _mm512_castps_pd(ab), cd2 = _mm512_castps_pd(cd);
  const __m512 all = _mm512_add_ps(
      _mm512_castpd_ps(_mm512_unpacklo_pd(ab2, cd2)), _mm512_castpd_ps(_mm512_unpackhi_pd(ab2, cd2)));
  const __m256 half = _mm256_add_ps(
      _mm512_castps512_ps256(all), _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(all), 1)));
#else
  const Vec ab = _mm256_unpacklo_ps(a, b) + _mm256_unpackhi_ps(a, b);
  const Vec cd = _mm256_unpacklo_ps(c, d) + _mm256_unpackhi_ps(c, d);
  const __m256d ab2 = _mm256_castps_pd(ab), cd2 = _mm256_castps_pd(cd);
  const __m256 half = _mm256_add_ps(
      _mm256_castpd_ps(_mm256_unpacklo_pd(ab2, cd2)), _mm256_castpd_ps(_mm256_unpackhi_pd(ab2, cd2)));
#endif
  _mm_storeu_ps(to, _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1)));
#else
  to[0] = sum(a), to[1] = sum(b), to[2] = sum(c), to[3] = sum(d);
#endif
}

// e^x for x <= 0 (a little above does no harm), to about 1e-7; 0 below the normal numbers; NaN stays NaN.
inline Vec exponential(Vec x) {
  const Vec bounded = x < -87.3f ? splat(-87.3f) : x;
  const Vec shifted = bounded * 1.44269504f + 12582912.f;  // 1.5 * 2^23: the nearest integer is in the low bits
  const Vec n = shifted - 12582912.f;
  const Vec r = (bounded - n * 0.693145752f) - n * 1.42860677e-6f;  // ln 2 in two parts; |r| <= ln(2) / 2
  Vec p = splat(1 / 5040.f);
  p = p * r + 1 / 720.f;
  p = p * r + 1 / 120.f;
  p = p * r + 1 / 24.f;
  p = p * r + 1 / 6.f;
  p = p * r + 0.5f;
  p = p * r + 1.f;
  p = p * r + 1.f;
  const Int power = (same_bits<Int>(shifted) - (0x4B400000 - 127)) << 23;  // bits of 2^n
  const Vec result = p * same_bits<Vec>(power);
  return x < -87.3f ? zero() : result;
}

// ---------------------------------------------------------------------------------------------------------- storage

struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

template <class T>
struct Load;  // a stored number's vector of LANES

template <>
struct Load<float> {
  static Vec full(const float* from) { return load(from); }
};

template <>
struct Load<BFloat16> {
  static Vec full(const BFloat16* from) {
#if defined(__AVX512F__)
    const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
#elif defined(__AVX2__)
    const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
#else
    Half half;
    std::memcpy(&half, from, sizeof half);
    return same_bits<Vec>(__builtin_convertvector(half, Unsigned) << 16);
#endif
  }
};

template <>
struct Load<Float16> {
  static Vec full(const Float16* from) {
#if defined(__AVX512F__)
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
#elif defined(__AVX2__) && defined(__F16C__)
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
#else
    Half half;
    std::memcpy(&half, from, sizeof half);
    const Unsigned wide = __builtin_convertvector(half, Unsigned);
    const Unsigned shifted = (wide & 0x7fffu) << 13;
    Vec value = same_bits<Vec>(shifted) * 0x1p112f;  // exact, subnormal numbers too
    Unsigned bits = same_bits<Unsigned>(value);
    bits = (wide & 0x7c00u) == 0x7c00u ? (shifted | 0x7f800000u) : bits;  // infinities and NaN
    bits |= (wide & 0x8000u) << 16;
    return same_bits<Vec>(bits);
#endif
  }
};

// The last `count` < LANES numbers of a row: what lies behind them belongs to somebody else.
template <class T>
inline Vec load_part(const T* from, int count) {
  T part[LANES] = {};
  if (LANES == 16 && count == 8) {
    std::memcpy(part, from, 8 * sizeof(T));
  } else {
    for (int i = 0; i < count; ++i) part[i] = from[i];
  }
  return Load<T>::full(part);
}

// Starts fetching `count` numbers to the second-level cache; harmless where nothing lies.
template <class T>
inline void prefetch(const T* from, int count) {
  for (int i = 0; i < count; i += 64 / sizeof(T)) __builtin_prefetch(from + i, 0, 2);
}

// ---------------------------------------------------------------------------------------------------- a tile's inner loops

// Arithmetic and memory take about as long as each other, so they must overlap: while scores of a tile are made its
// values are fetched, and while its values are summed the next tile's keys are (`next`: rows of either).

// Not inlined: the compiler keeps the sums in registers only while nothing else wants them.

// scores[g][k .. k + K - 1] = query row g . key k; query rows are padded with zeros to whole vectors.
template <class T, int G, int K>
inline void score_some(const float* query, int64_t stride, const T* const* keys, const T* const* next, int k, int dim,
                       float* scores) {
  const T* row[K];
  Vec total[K][G];
  for (int i = 0; i < K; ++i) {
    row[i] = keys[k + i];
    for (int g = 0; g < G; ++g) total[i][g] = zero();
  }
  const int whole = dim / LANES * LANES;
  for (int d = 0; d < whole; d += LANES) {
    if (next && d * sizeof(T) % 64 == 0) {
#pragma GCC unroll 8
      for (int i = 0; i < K; ++i) __builtin_prefetch(next[k + i] + d, 0, 2);
    }
    Vec x[K];
#pragma GCC unroll 8
    for (int i = 0; i < K; ++i) x[i] = Load<T>::full(row[i] + d);
#pragma GCC unroll 8
    for (int g = 0; g < G; ++g) {
      const Vec q = load(query + g * stride + d);
#pragma GCC unroll 8
      for (int i = 0; i < K; ++i) total[i][g] += x[i] * q;
    }
  }
  if (whole < dim) {
    for (int i = 0; i < K; ++i) {
      const Vec x = load_part<T>(row[i] + whole, dim - whole);
      for (int g = 0; g < G; ++g) total[i][g] += x * load(query + g * stride + whole);
    }
  }
#pragma GCC unroll 8
  for (int g = 0; g < G; ++g) {
    if constexpr (K == 4) {
      sum_four(total[0][g], total[1][g], total[2][g], total[3][g], scores + g * TILE + k);
    } else {
      for (int i = 0; i < K; ++i) scores[g * TILE + k + i] = sum(total[i][g]);
    }
  }
}

template <class T, int G>
__attribute__((noinline)) void score(const float* query, int64_t stride, const T* const* keys, const T* const* next, int count, int dim,
           float* scores) {
  // Sums of four keys at once where the registers hold them: one horizontal sum then serves four scores.
  constexpr int K = 4 * G + 4 <= REGISTERS ? 4 : 2 * G + 2 <= REGISTERS ? 2 : 1;
  int k = 0;
  for (; k + K <= count; k += K) score_some<T, G, K>(query, stride, keys, next, k, dim, scores);
  for (; k < count; ++k) score_some<T, G, 1>(query, stride, keys, next, k, dim, scores);
}

// out[g] += sum over k of weights[g][k] * value k, for N vectors from d on.
template <class T, int G, int N>
inline void weigh_some(const float* weights, const T* const* values, const T* const* next, int count, int d, float* out,
                       int64_t stride) {
  Vec total[G][N];
  for (int g = 0; g < G; ++g)
    for (int j = 0; j < N; ++j) total[g][j] = load(out + g * stride + d + j * LANES);
  for (int k = 0; k < count; ++k) {
    if (next) prefetch(next[k] + d, N * LANES);
    const T* row = values[k] + d;
    Vec x[N];
#pragma GCC unroll 8
    for (int j = 0; j < N; ++j) x[j] = Load<T>::full(row + j * LANES);
#pragma GCC unroll 8
    for (int g = 0; g < G; ++g) {
      const Vec w = splat(weights[g * TILE + k]);
#pragma GCC unroll 8
      for (int j = 0; j < N; ++j) total[g][j] += x[j] * w;
    }
  }
  for (int g = 0; g < G; ++g)
    for (int j = 0; j < N; ++j) store(out + g * stride + d + j * LANES, total[g][j]);
}

template <class T, int G>
__attribute__((noinline)) void weigh(const float* weights, const T* const* values, const T* const* next, int count, int dim, float* out,
           int64_t stride) {
  constexpr int N = 4 * (G + 1) < REGISTERS ? 4 : 2 * (G + 1) < REGISTERS ? 2 : 1;
  int d = 0;
  for (; d + N * LANES <= dim; d += N * LANES) weigh_some<T, G, N>(weights, values, next, count, d, out, stride);
  for (; d + LANES <= dim; d += LANES) weigh_some<T, G, 1>(weights, values, next, count, d, out, stride);
  if (d < dim) {
    for (int k = 0; k < count; ++k) {
      const Vec x = load_part<T>(values[k] + d, dim - d);
      for (int g = 0; g < G; ++g) {
        float* to = out + g * stride + d;
        store(to, load(to) + x * weights[g * TILE + k]);
      }
    }
  }
}

// Calls function(G) with the number of query rows as a compile-time constant.
template <int G = BLOCK, class Function>
inline void with_rows(int rows, const Function& function) {
  if (rows == G) {
    function(std::integral_constant<int, G>());
  } else if constexpr (G > 1) {
    with_rows<G - 1>(rows, function);
  }
}

}  // namespace

// ------------------------------------------------------------------------------------------------------- what is asked

// Mirrored field by field in cpu.py. Counts of slots and strides are in elements.
extern "C" struct Arguments {
  int64_t dtype;  // 0 float32, 1 bfloat16, 2 float16
  int64_t runs, rows, dim, value_dim;  // rows: G * q query rows of a run
  const float* query;  // [runs, rows, dim]
  const void *keys, *values;
  int64_t key_stride, value_stride, stored;  // between rows of the flat buffers, and how many there are
  const int64_t *start, *length;  // [runs]
  const uint8_t* mask;  // [batch, heads, q, slots] or null
  int64_t mask_batch, mask_head, mask_query;  // strides
  int64_t heads, q;  // run r = b * heads + h; row = g * q + i
  const void *chunk_keys, *chunk_values;  // [chunks, chunk * dim], [chunks, chunk * value_dim] or null
  int64_t chunks, chunk, table_width;
  const int64_t* table;  // [runs, table_width], -1 = none
  double scaling;
  float* out;  // [runs, rows, value_dim]
  float* lse;  // [runs, rows]
  float* mass;  // [runs, mass_width] or null, zeros
  int64_t mass_width;
};

namespace {

enum Status : int64_t { OK = 0, BAD_RUNS = 1, BAD_CHUNKS = 2, BAD_DTYPE = 3, NO_MEMORY = 4 };

struct FreeDeleter {
  void operator()(void* p) const { std::free(p); }
};
using Floats = std::unique_ptr<float[], FreeDeleter>;

Floats floats(int64_t count) {
  void* memory = std::aligned_alloc(64, (std::max<int64_t>(count, 1) * sizeof(float) + 63) / 64 * 64);
  if (!memory) throw std::bad_alloc();
  return Floats(static_cast<float*>(memory));
}

inline int64_t padded(int64_t dim) { return (dim + LANES - 1) / LANES * LANES; }

struct Piece {
  int64_t run, begin, end;  // slots: the chosen chunks' tokens first, then what the segments hold
  int64_t number, of;       // among the run's pieces
  int64_t partial;          // where partial results go, if it is one of several
};

template <class T>
struct Decode {
  const Arguments& a;
  std::vector<int64_t> chosen;        // chunks of run r: chosen[r * table_width ...]
  std::vector<int64_t> chosen_slots;  // [runs]
  std::vector<Piece> pieces;
  std::vector<int64_t> first_partial, score_offset;  // [runs]
  int64_t partials = 0, threads = 1;
  int64_t row_step, out_step;  // of padded rows
  int64_t first_row = 0, rows = 0;  // of this pass
  Floats partial_out, partial_top, partial_sum, scores;

  explicit Decode(const Arguments& arguments) : a(arguments), row_step(padded(a.dim)), out_step(padded(a.value_dim)) {}

  int64_t slots(int64_t run) const { return chosen_slots[run] + a.length[run]; }

  Status prepare() {
    chosen_slots.assign(a.runs, 0);
    int64_t total = 0;
    if (a.table) chosen.resize(a.runs * a.table_width);
    for (int64_t run = 0; run < a.runs; ++run) {
      if (a.length[run] < 0 || (a.length[run] > 0 && (a.start[run] < 0 || a.start[run] + a.length[run] > a.stored)))
        return BAD_RUNS;
      int64_t count = 0;
      for (int64_t i = 0; a.table && i < a.table_width; ++i) {
        const int64_t index = a.table[run * a.table_width + i];
        if (index < -1 || index >= a.chunks) return BAD_CHUNKS;
        if (index >= 0) chosen[run * a.table_width + count++] = index;
      }
      chosen_slots[run] = count * a.chunk;
      total += slots(run);
    }
    threads = std::max<int64_t>(1, std::min<int64_t>(at::get_num_threads(), total / SLOTS_PER_THREAD));
    if (at::in_parallel_region()) threads = 1;
    const int64_t wanted =
        threads == 1 ? std::max<int64_t>(total, 1)
                     : std::max(SHORTEST_PIECE, (total + threads * PIECES_PER_THREAD - 1) / (threads * PIECES_PER_THREAD));
    first_partial.resize(a.runs);
    score_offset.resize(a.runs);
    int64_t offset = 0;
    for (int64_t run = 0; run < a.runs; ++run) {
      const int64_t length = slots(run), count = std::max<int64_t>(1, (length + wanted - 1) / wanted);
      const int64_t step = ((length + count - 1) / count + TILE - 1) / TILE * TILE;
      first_partial[run] = partials;
      score_offset[run] = offset;
      offset += a.length[run];
      const int64_t of = std::max<int64_t>(1, step ? (length + step - 1) / step : 1);
      for (int64_t i = 0; i < of; ++i)
        pieces.push_back({run, i * step, std::min(length, (i + 1) * step), i, of, partials + i});
      if (of > 1) partials += of;
    }
    // Long pieces first, so that no thread begins a long one when the others are done.
    std::stable_sort(pieces.begin(), pieces.end(),
                     [](const Piece& x, const Piece& y) { return x.end - x.begin > y.end - y.begin; });
    const int64_t most = std::min<int64_t>(a.rows, ROWS);
    if (partials) {
      partial_out = floats(partials * most * out_step);
      partial_top = floats(partials * most);
      partial_sum = floats(partials * most);
    }
    if (a.mass) scores = floats(offset * most);
    return OK;
  }

  // Calls work(i) for i below count; threads take what comes next.
  template <class Work>
  void in_parallel(int64_t count, const Work& work) const {
    std::atomic<int64_t> next{0};
    at::parallel_for(0, std::min(threads, count), 1, [&](int64_t, int64_t) {
      for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < count;) work(i);
    });
  }

  void run() {
    for (first_row = 0; first_row < a.rows; first_row += ROWS) {
      rows = std::min<int64_t>(ROWS, a.rows - first_row);
      std::vector<std::atomic<int64_t>> left(a.runs);
      for (const Piece& piece : pieces) left[piece.run].store(piece.of, std::memory_order_relaxed);
      in_parallel(pieces.size(), [&](int64_t i) {
        const Piece& piece = pieces[i];
        attend(piece);
        if (piece.of > 1 && left[piece.run].fetch_sub(1, std::memory_order_acq_rel) == 1) merge(piece.run, piece.of);
      });
      if (a.mass) {
        in_parallel(pieces.size(), [&](int64_t i) { add_mass(pieces[i]); });
      }
    }
  }

  void attend(const Piece& piece) {
    const Floats memory = floats(rows * (row_step + out_step + TILE + LANES));
    float* query = memory.get();
    float* out = query + rows * row_step;
    float* weights = out + rows * out_step;
    float* totals = weights + rows * TILE;  // sums of weights, still one per lane
    float top[ROWS], total[ROWS];
    const float* source = a.query + (piece.run * a.rows + first_row) * a.dim;
    for (int64_t g = 0; g < rows; ++g) {
      float* to = query + g * row_step;
      for (int64_t d = 0; d < a.dim; ++d) to[d] = source[g * a.dim + d] * static_cast<float>(a.scaling);
      std::fill(to + a.dim, to + row_step, 0.f);
      top[g] = NOTHING;
      store(totals + g * LANES, zero());
    }
    std::fill(out, out + rows * out_step, 0.f);

    const int64_t border = chosen_slots[piece.run];
    const T* keys = static_cast<const T*>(a.keys) + a.start[piece.run] * a.key_stride;
    const T* values = static_cast<const T*>(a.values) + a.start[piece.run] * a.value_stride;
    // The rows of a tile: at most TILE slots from `slot` on, either pages of the store where they lie, or own slots.
    const auto locate = [&](int64_t slot, const T** key_rows, const T** value_rows) {
      const bool paged = slot < border;
      const int64_t count = std::min<int64_t>(TILE, (paged ? std::min(border, piece.end) : piece.end) - slot);
      for (int64_t k = 0; k < count; ++k) {
        if (paged) {
          const int64_t page = chosen[piece.run * a.table_width + (slot + k) / a.chunk];
          const int64_t token = page * a.chunk + (slot + k) % a.chunk;
          key_rows[k] = static_cast<const T*>(a.chunk_keys) + token * a.dim;
          value_rows[k] = static_cast<const T*>(a.chunk_values) + token * a.value_dim;
        } else {
          key_rows[k] = keys + (slot - border + k) * a.key_stride;
          value_rows[k] = values + (slot - border + k) * a.value_stride;
        }
      }
      std::fill(key_rows + count, key_rows + TILE, key_rows[0]);  // may be fetched, is never used
      return count;
    };
    const T* key_rows[2][TILE];
    const T* value_rows[2][TILE];
    int64_t count = piece.begin < piece.end ? locate(piece.begin, key_rows[0], value_rows[0]) : 0;
    for (int64_t slot = piece.begin, turn = 0; count > 0; turn ^= 1) {
      const int64_t next = slot + count;
      const int64_t coming = next < piece.end ? locate(next, key_rows[turn ^ 1], value_rows[turn ^ 1]) : 0;
      tile(key_rows[turn], value_rows[turn], coming ? key_rows[turn ^ 1] : nullptr, count, piece.run,
           slot < border ? -1 : slot - border, query, out, weights, top, totals);
      slot = next, count = coming;
    }
    for (int64_t g = 0; g < rows; ++g) total[g] = sum(load(totals + g * LANES));

    if (piece.of > 1) {
      const int64_t at = piece.partial * rows;
      std::copy(out, out + rows * out_step, partial_out.get() + at * out_step);
      std::copy(top, top + rows, partial_top.get() + at);
      std::copy(total, total + rows, partial_sum.get() + at);
      return;
    }
    for (int64_t g = 0; g < rows; ++g) finish(piece.run, g, out + g * out_step, top[g], total[g]);
  }

  // own: the tile's first slot in the segments, -1 for pages.
  void tile(const T* const* keys, const T* const* values, const T* const* next_keys, int count, int64_t run, int64_t own, const float* query, float* out,
            float* weights, float* top, float* totals) {
    // As many query rows at once as registers allow, in blocks of nearly equal size.
    const int blocks = (rows + BLOCK - 1) / BLOCK;
    for (int block = 0; block < blocks; ++block) {
      const int low = rows * block / blocks, group = rows * (block + 1) / blocks - low;
      with_rows(group, [&](auto g) {
        score<T, g()>(query + low * row_step, row_step, keys, block ? nullptr : values, count, int(a.dim),
                      weights + low * TILE);
      });
    }
    const int filled = (count + LANES - 1) / LANES * LANES;
    for (int g = 0; g < rows; ++g) {
      float* s = weights + g * TILE;
      for (int k = count; k < filled; ++k) s[k] = NOTHING;
      if (own >= 0) {
        if (a.mask) hide(s, run, g, own, count);
        if (a.mass) std::copy(s, s + count, scores.get() + (score_offset[run] * rows) + g * a.length[run] + own);
      }
      Vec most = splat(NOTHING);
      for (int k = 0; k < filled; k += LANES) most = larger(load(s + k), most);
      const float highest = largest(most), before = top[g];
      Vec all = load(totals + g * LANES);
      if (highest > before) {
        if (before != NOTHING) {
          const float factor = std::exp(before - highest);
          float* to = out + g * out_step;
          for (int64_t d = 0; d < out_step; d += LANES) store(to + d, load(to + d) * factor);
          all *= factor;
        }
        top[g] = highest;
      }
      const float base = top[g] == NOTHING ? 0.f : top[g];  // a tile that is hidden or NaN from end to end
      for (int k = 0; k < filled; k += LANES) {
        const Vec w = exponential(load(s + k) - base);
        store(s + k, w);
        all += w;
      }
      store(totals + g * LANES, all);
    }
    for (int block = 0; block < blocks; ++block) {
      const int low = rows * block / blocks, group = rows * (block + 1) / blocks - low;
      with_rows(group, [&](auto g) {
        weigh<T, g()>(weights + low * TILE, values, block ? nullptr : next_keys, count, int(a.value_dim),
                      out + low * out_step, out_step);
      });
    }
  }

  void hide(float* s, int64_t run, int64_t row, int64_t own, int count) const {
    const int64_t i = (first_row + row) % a.q;
    const uint8_t* allowed =
        a.mask + run / a.heads * a.mask_batch + run % a.heads * a.mask_head + i * a.mask_query + own;
    for (int k = 0; k < count; ++k) s[k] = allowed[k] ? s[k] : NOTHING;
  }

  // total 0: the row saw nothing. NaN passes.
  void finish(int64_t run, int64_t g, const float* sums, float top, float total) {
    const int64_t at = run * a.rows + first_row + g;
    float* to = a.out + at * a.value_dim;
    a.lse[at] = total == 0 ? NOTHING : top + std::log(total);
    const float factor = total == 0 ? 0.f : 1 / total;
    for (int64_t d = 0; d < a.value_dim; ++d) to[d] = total == 0 ? 0.f : sums[d] * factor;
  }

  void merge(int64_t run, int64_t of) {
    const Floats sums = floats(out_step);
    for (int64_t g = 0; g < rows; ++g) {
      const int64_t first = first_partial[run] * rows + g;
      float top = NOTHING, total = 0;
      for (int64_t i = 0; i < of; ++i) top = std::max(top, partial_top[first + i * rows]);
      std::fill(sums.get(), sums.get() + out_step, 0.f);
      for (int64_t i = 0; i < of; ++i) {
        const int64_t at = first + i * rows;
        if (partial_sum[at] == 0) continue;
        // A piece of NaN alone has no largest score, but its sum is NaN.
        const float factor = partial_top[at] == NOTHING ? 1.f : std::exp(partial_top[at] - top);
        total += partial_sum[at] * factor;
        const float* from = partial_out.get() + at * out_step;
        for (int64_t d = 0; d < out_step; d += LANES)
          store(sums.get() + d, load(sums.get() + d) + load(from + d) * factor);
      }
      finish(run, g, sums.get(), top, total);
    }
  }

  // mass[slot] += sum over rows of e^(score - log-sum-exp)
  void add_mass(const Piece& piece) {
    const int64_t run = piece.run, border = chosen_slots[run], length = a.length[run];
    const int64_t begin = std::max(piece.begin, border) - border, end = piece.end - border;
    for (int64_t g = 0; g < rows; ++g) {
      const float lse = a.lse[run * a.rows + first_row + g];
      if (lse == NOTHING) continue;
      const float* s = scores.get() + score_offset[run] * rows + g * length;
      float* to = a.mass + run * a.mass_width;
      int64_t k = begin;
      for (; k + LANES <= end; k += LANES) store(to + k, load(to + k) + exponential(load(s + k) - lse));
      if (k < end) {
        float rest[LANES] = {};
        std::copy(s + k, s + end, rest);
        store(rest, exponential(load(rest) - lse));
        for (int64_t i = k; i < end; ++i) to[i] += rest[i - k];
      }
    }
  }
};

template <class T>
int64_t decode(const Arguments& arguments) {
  Decode<T> work(arguments);
  if (const Status status = work.prepare(); status != OK) return status;
  work.run();
  return OK;
}

}  // namespace

extern "C" int64_t foveakv_attend(const Arguments* arguments) {
  try {
    switch (arguments->dtype) {
      case 0:
        return decode<float>(*arguments);
      case 1:
        return decode<BFloat16>(*arguments);
      case 2:
        return decode<Float16>(*arguments);
      default:
        return BAD_DTYPE;
    }
  } catch (const std::bad_alloc&) {
    return NO_MEMORY;
  }
}

extern "C" int64_t foveakv_arguments_size() { return sizeof(Arguments); }
