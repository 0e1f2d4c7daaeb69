// Decode attention over runs of different lengths on a CPU; built on first use, see build.py.
//
// Work is cut into pieces of runs that are about equally long, and threads take the next piece when they are done with
// one. A piece goes through its slots in tiles: scores of a tile, softmax against the largest score so far, weighted
// sum of the values. Every key and value is loaded once for up to BLOCK query rows, whose sums stay in registers.
// Pieces of one run are merged by their log-sum-exp.
//
// Arithmetic is float32. Storage is read through a format (Float32 and its like), tiles through row pointers: other
// formats and other places (pages of a store) need a loader or a way to find rows, and no further change.
//
// Quantized rows (see memory/quantizer.py) are multiplied as they are. The query takes the scales of the key channels,
// its product with their zeros is added to every score; a weight takes the scale of its token's values, and the
// weighted zeros are summed on their own. Slots that have a full-precision copy are read from it, tile by tile.
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

#include "vectors.h"

namespace {

constexpr int TILE = 64;   // slots whose scores are held at once; their keys and values stay in the second-level cache
constexpr int ROWS = 32;   // query rows of one pass over the cache
constexpr int64_t SHORTEST_PIECE = 256;
constexpr int64_t PIECES_PER_THREAD = 4;
constexpr int64_t SLOTS_PER_THREAD = 512;  // fewer are not worth waking a thread for

// ---------------------------------------------------------------------------------------------------------- storage

// A format reads units of BYTES bytes, LANES at a time. A unit holds PER neighbouring numbers, and the part-th of every
// unit make a vector: queries and sums are laid out accordingly (`place`).

template <int BYTES>
struct Raw {
  typedef uint8_t Type __attribute__((vector_size(BYTES * LANES)));
};

struct Float32 {
  static constexpr int BITS = 32, PER = 1, BYTES = 4;
  static constexpr bool QUANTIZED = false;
  static Vec open(Raw<4>::Type raw, int) { return same_bits<Vec>(raw); }
};

struct BFloat16 {
  static constexpr int BITS = 16, PER = 2, BYTES = 4;
  static constexpr bool QUANTIZED = false;
  static Vec open(Raw<4>::Type raw, int part) {
    const Unsigned pair = same_bits<Unsigned>(raw);
    return same_bits<Vec>(part ? pair & 0xffff0000u : pair << 16);
  }
};

struct Float16 {
  static constexpr int BITS = 16, PER = 1, BYTES = 2;
  static constexpr bool QUANTIZED = false;
  static Vec open(Raw<2>::Type raw, int) {
#if defined(__AVX512F__)
    return _mm512_cvtph_ps(same_bits<__m256i>(raw));
#elif defined(__AVX2__) && defined(__F16C__)
    return _mm256_cvtph_ps(same_bits<__m128i>(raw));
#else
    const Unsigned wide = __builtin_convertvector(same_bits<Half>(raw), Unsigned);
    const Unsigned shifted = (wide & 0x7fffu) << 13;
    Vec value = same_bits<Vec>(shifted) * 0x1p112f;  // exact, subnormal numbers too
    Unsigned bits = same_bits<Unsigned>(value);
    bits = (wide & 0x7c00u) == 0x7c00u ? (shifted | 0x7f800000u) : bits;  // infinities and NaN
    bits |= (wide & 0x8000u) << 16;
    return same_bits<Vec>(bits);
#endif
  }
};

struct Quantized8 {
  static constexpr int BITS = 8, PER = 1, BYTES = 1;
  static constexpr bool QUANTIZED = true;
  static Vec open(Raw<1>::Type raw, int) { return converted(widened(raw)); }
};

struct Quantized4 {
  static constexpr int BITS = 4, PER = 2, BYTES = 1;
  static constexpr bool QUANTIZED = true;
  static Vec open(Raw<1>::Type raw, int part) {
    const Int pair = widened(raw);
    return converted(part ? pair >> 4 : pair & 15);
  }
};

template <class T>
inline typename Raw<T::BYTES>::Type raw(const uint8_t* from) {
  typename Raw<T::BYTES>::Type x;
  std::memcpy(&x, from, sizeof x);
  return x;
}

// The last `count` bytes of a row, fewer than a vector's: what follows them is not part of the row.
template <class T>
inline typename Raw<T::BYTES>::Type raw_part(const uint8_t* from, int count) {
  using Type = typename Raw<T::BYTES>::Type;
#if defined(__AVX512BW__) && defined(__AVX512VL__)
  if constexpr (sizeof(Type) == 64) {
    return same_bits<Type>(_mm512_maskz_loadu_epi8((1ull << count) - 1, from));
  } else if constexpr (sizeof(Type) == 32) {
    return same_bits<Type>(_mm256_maskz_loadu_epi8((1u << count) - 1, from));
  } else {
    return same_bits<Type>(_mm_maskz_loadu_epi8((1u << count) - 1, from));
  }
#else
  Type x = {};
  std::memcpy(&x, from, count);
  return x;
#endif
}

template <class T>
constexpr int64_t row_bytes(int64_t dim) { return (dim * T::BITS + 7) / 8; }

// Bytes of a row that whole vectors cover.
template <class T>
constexpr int whole_bytes(int dim) { return dim / (T::PER * LANES) * (T::BYTES * LANES); }

// Numbers of a row, padded to whole vectors.
template <class T>
constexpr int64_t padded(int64_t dim) { return (dim + T::PER * LANES - 1) / (T::PER * LANES) * (T::PER * LANES); }

// The index of the d-th number of a row in a query or a sum.
template <class T>
constexpr int64_t place(int64_t d) {
  if constexpr (T::PER == 1) return d;
  const int64_t unit = d / T::PER;
  return unit / LANES * LANES * T::PER + d % T::PER * LANES + unit % LANES;
}

// Starts fetching `count` bytes to the second-level cache; harmless beyond the end of a buffer.
inline void prefetch(const uint8_t* from, int count) {
  for (int i = 0; i < count; i += 64) __builtin_prefetch(from + i, 0, 2);
}

// --------------------------------------------------------------------------------------------- a tile's inner loops

// Arithmetic and memory take about as long as each other, so they must overlap: while scores of a tile are made its
// values are fetched, and while its values are summed the next tile's keys are (`next`: rows of either).

// Not inlined: the compiler keeps the sums in registers only while no other code needs registers.

// scores[g][k .. k + K - 1] = query row g . key k; query rows are padded with zeros to whole vectors.
template <class T, int G, int K>
inline void score_some(const float* query, int64_t stride, const uint8_t* const* keys, const uint8_t* const* next,
                       int k, int dim, float* scores) {
  const uint8_t* row[K];
  Vec total[K][G];
#pragma GCC unroll 8
  for (int i = 0; i < K; ++i) {
    row[i] = keys[k + i];
#pragma GCC unroll 8
    for (int g = 0; g < G; ++g) total[i][g] = zero();
  }
  const int whole = whole_bytes<T>(dim);
  int d = 0;
  for (int at = 0; at < whole; at += T::BYTES * LANES) {
    if (next && at % 64 == 0) {
#pragma GCC unroll 8
      for (int i = 0; i < K; ++i) __builtin_prefetch(next[k + i] + at, 0, 2);
    }
#pragma GCC unroll 2
    for (int part = 0; part < T::PER; ++part, d += LANES) {
      Vec x[K];
#pragma GCC unroll 8
      for (int i = 0; i < K; ++i) x[i] = T::open(raw<T>(row[i] + at), part);
#pragma GCC unroll 8
      for (int g = 0; g < G; ++g) {
        const Vec q = load(query + g * stride + d);
#pragma GCC unroll 8
        for (int i = 0; i < K; ++i) total[i][g] += x[i] * q;
      }
    }
  }
  if (const int rest = int(row_bytes<T>(dim)) - whole; rest > 0) {
    for (int i = 0; i < K; ++i) {
      const auto last = raw_part<T>(row[i] + whole, rest);
      for (int part = 0; part < T::PER; ++part) {
        const Vec x = T::open(last, part);
        for (int g = 0; g < G; ++g) total[i][g] += x * load(query + g * stride + d + part * LANES);
      }
    }
  }
#pragma GCC unroll 8
  for (int g = 0; g < G; ++g) {
    if constexpr (K % 4 == 0) {
#pragma GCC unroll 2
      for (int i = 0; i < K; i += 4)
        sum_four(total[i][g], total[i + 1][g], total[i + 2][g], total[i + 3][g], scores + g * TILE + k + i);
    } else {
      for (int i = 0; i < K; ++i) scores[g * TILE + k + i] = sum(total[i][g]);
    }
  }
}

template <class T, int G>
__attribute__((noinline)) void score(const float* query, int64_t stride, const uint8_t* const* keys,
                                     const uint8_t* const* next, int count, int dim, float* scores) {
  // Sums of four keys at once where the registers hold them: one horizontal sum then serves four scores. Of eight for
  // few query rows of quantized keys, which come fast enough that four sums alone would wait for each other.
  constexpr int FIT = 4 * G + 4 <= REGISTERS ? 4 : 2 * G + 2 <= REGISTERS ? 2 : 1;
  constexpr int K = T::QUANTIZED && 8 * (G + 1) < REGISTERS ? 8 : FIT;
  int k = 0;
  for (; k + K <= count; k += K) score_some<T, G, K>(query, stride, keys, next, k, dim, scores);
  for (; k < count; ++k) score_some<T, G, 1>(query, stride, keys, next, k, dim, scores);
}

// out[g] += sum over k of weights[g][k] * value k, for N vectors from the unit at byte `at` on, the first of them its
// FIRST-th part.
template <class T, int G, int N, int FIRST>
inline void weigh_some(const float* weights, const uint8_t* const* values, const uint8_t* const* next, int count,
                       int at, float* out, int64_t stride) {
  constexpr int STEP = T::BYTES * LANES, FETCHED = (N + T::PER - 1) / T::PER * STEP;
  out += at / T::BYTES * T::PER + FIRST * LANES;
  Vec total[G][N];
  for (int g = 0; g < G; ++g)
    for (int j = 0; j < N; ++j) total[g][j] = load(out + g * stride + j * LANES);
  const bool fetch = next && (FETCHED >= 64 || at % 64 == 0) && FIRST == 0;
  for (int k = 0; k < count; ++k) {
    if (fetch) prefetch(next[k] + at, FETCHED);
    const uint8_t* row = values[k] + at;
    Vec x[N];
#pragma GCC unroll 8
    for (int j = 0; j < N; ++j)
      x[j] = T::open(raw<T>(row + (FIRST + j) / T::PER * STEP), (FIRST + j) % T::PER);
#pragma GCC unroll 8
    for (int g = 0; g < G; ++g) {
      const Vec w = splat(weights[g * TILE + k]);
#pragma GCC unroll 8
      for (int j = 0; j < N; ++j) total[g][j] += x[j] * w;
    }
  }
  for (int g = 0; g < G; ++g)
    for (int j = 0; j < N; ++j) store(out + g * stride + j * LANES, total[g][j]);
}

template <class T, int G>
__attribute__((noinline)) void weigh(const float* weights, const uint8_t* const* values, const uint8_t* const* next,
                                     int count, int dim, float* out, int64_t stride) {
  constexpr int MOST = T::QUANTIZED && 8 * (G + 1) < REGISTERS ? 8 : 1;
  constexpr int N = 4 * (G + 1) < REGISTERS ? 4 : 2 * (G + 1) < REGISTERS ? 2 : 1;
  constexpr int STEP = T::BYTES * LANES;
  const int whole = whole_bytes<T>(dim);
  int at = 0;
  if constexpr (MOST > N) {
    for (; at + MOST / T::PER * STEP <= whole; at += MOST / T::PER * STEP)
      weigh_some<T, G, MOST, 0>(weights, values, next, count, at, out, stride);
  }
  if constexpr (N > T::PER) {
    for (; at + N / T::PER * STEP <= whole; at += N / T::PER * STEP)
      weigh_some<T, G, N, 0>(weights, values, next, count, at, out, stride);
  }
  for (; at < whole; at += STEP) {
    if constexpr (N >= T::PER) {
      weigh_some<T, G, T::PER, 0>(weights, values, next, count, at, out, stride);
    } else {
      weigh_some<T, G, 1, 0>(weights, values, next, count, at, out, stride);
      weigh_some<T, G, 1, 1>(weights, values, next, count, at, out, stride);
    }
  }
  if (const int rest = int(row_bytes<T>(dim)) - whole; rest > 0) {
    out += whole / T::BYTES * T::PER;
#pragma GCC unroll 2
    for (int part = 0; part < T::PER; ++part, out += LANES) {
      Vec total[G];
#pragma GCC unroll 8
      for (int g = 0; g < G; ++g) total[g] = load(out + g * stride);
      for (int k = 0; k < count; ++k) {
        const Vec x = T::open(raw_part<T>(values[k] + whole, rest), part);
#pragma GCC unroll 8
        for (int g = 0; g < G; ++g) total[g] += x * splat(weights[g * TILE + k]);
      }
#pragma GCC unroll 8
      for (int g = 0; g < G; ++g) store(out + g * stride, total[g]);
    }
  }
}

}  // namespace

// ------------------------------------------------------------------------------------------------------- arguments

// Mirrored field by field in cpu.py.
extern "C" struct Arguments {
  int64_t format;  // of keys, values and chunks: 0 float32, 1 bfloat16, 2 float16, 3 int8, 4 int4 (quantized)
  int64_t runs, rows, dim, value_dim;  // rows: G * q query rows of a run
  const void* query;  // [batch, heads * G, q, dim]
  int64_t query_bfloat16;  // whether query and out are bfloat16, else float32
  int64_t query_batch, query_head, query_query;  // strides in elements
  const uint8_t *keys, *values;
  int64_t key_stride, value_stride, stored;  // bytes between rows of the flat buffers, and how many there are
  const int64_t *start, *length;  // [runs]; start: first row, or of entries alone where there is a page table
  const int32_t* page_table;  // [runs, page_width] or null: the pages of page_size rows that hold a run's slots
  int64_t page_width, page_size;
  const uint8_t* mask;  // [batch, heads, q, slots] or null
  int64_t mask_batch, mask_head, mask_query;  // strides
  int64_t heads, q;  // run r = b * heads + h; row = g * q + i
  const uint8_t *chunk_keys, *chunk_values;  // [chunks, chunk * dim], [chunks, chunk * value_dim] or null
  int64_t chunks, chunk, table_width;
  const int64_t* table;  // [runs, table_width], -1 = none
  const float *key_scale, *key_zero;  // [runs, dim], if quantized
  const int16_t* entry;  // [stored] or null: which full-precision copy replaces a slot, -1 = none
  const uint8_t *residual_keys, *residual_values;  // [runs, window, dim], [runs, window, value_dim]
  int64_t residual_format, window;
  double scaling;
  const float* other_lse;  // [runs, rows] or null
  void* out;  // [runs, rows, value_dim]
  float* lse;  // [runs, rows]; may be null without attention_sum
  float* attention_sum;  // [runs, attention_sum_width] or null, zeros
  int64_t attention_sum_width;
};

namespace {

enum Status : int64_t { OK = 0, BAD_RUNS = 1, BAD_CHUNKS = 2, BAD_FORMAT = 3, NO_MEMORY = 4 };

inline uint16_t to_bfloat16(float x) {
  const uint32_t bits = same_bits<uint32_t>(x);
  if (x != x) return 0x7fc0;
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;  // to the nearest, ties to even
}

// A row of float32, bfloat16 or float16 numbers, laid out as format T wants queries and sums.
template <class T>
inline void expand(int64_t format, const uint8_t* row, int64_t dim, float* to) {
  if (format == 2) {
    constexpr int STEP = 2 * LANES;
    const int64_t bytes = 2 * dim;
    for (int64_t at = 0; at < bytes; at += STEP) {
      float some[LANES];
      const int rest = int(std::min<int64_t>(STEP, bytes - at));
      store(some, Float16::open(rest == STEP ? raw<Float16>(row + at) : raw_part<Float16>(row + at, rest), 0));
      for (int i = 0; i < rest / 2; ++i) to[place<T>(at / 2 + i)] = some[i];
    }
    return;
  }
  for (int64_t d = 0; d < dim; ++d) {
    if (format == 1) {
      uint16_t bits;
      std::memcpy(&bits, row + 2 * d, 2);
      to[place<T>(d)] = from_bfloat16(bits);
    } else {
      std::memcpy(to + place<T>(d), row + 4 * d, 4);
    }
  }
}

struct Piece {
  int64_t run, begin, end;  // slots: the chosen chunks' tokens first, then what the segments hold
  int64_t number, of;       // among the run's pieces
  int64_t partial;          // where partial results go, if it is one of several
  int64_t first_tile;       // where its tiles' largest scores go
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
  Floats partial_out, partial_top, partial_sum;
  Floats kept, kept_top;  // for the attention sum: the weights of own slots, and the largest score that a tile's were taken to

  explicit Decode(const Arguments& arguments)
      : a(arguments), row_step(padded<T>(a.dim)), out_step(padded<T>(a.value_dim)) {}

  int64_t slots(int64_t run) const { return chosen_slots[run] + a.length[run]; }

  // Whether all slots of a run are rows of the buffers.
  bool fits(int64_t run) const {
    const int64_t length = a.length[run];
    if (!a.page_table) return length >= 0 && (length == 0 || (a.start[run] >= 0 && a.start[run] + length <= a.stored));
    if (length < 0 || length > a.page_width * a.page_size) return false;
    const int32_t* pages = a.page_table + run * a.page_width;
    const int64_t count = (length + a.page_size - 1) / a.page_size;
    for (int64_t i = 0; i < count; ++i)
      if (pages[i] < 0 || (pages[i] + int64_t{1}) * a.page_size > a.stored) return false;
    return true;
  }

  Status prepare() {
    chosen_slots.assign(a.runs, 0);
    int64_t total = 0;
    if (a.table) chosen.resize(a.runs * a.table_width);
    for (int64_t run = 0; run < a.runs; ++run) {
      if (!fits(run)) return BAD_RUNS;
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
    const int64_t most_pieces = threads * PIECES_PER_THREAD;
    const int64_t wanted = threads == 1 ? std::max<int64_t>(total, 1)
                                        : std::max(SHORTEST_PIECE, (total + most_pieces - 1) / most_pieces);
    first_partial.resize(a.runs);
    score_offset.resize(a.runs);
    int64_t offset = 0, tiles = 0;
    for (int64_t run = 0; run < a.runs; ++run) {
      const int64_t length = slots(run), count = std::max<int64_t>(1, (length + wanted - 1) / wanted);
      const int64_t step = ((length + count - 1) / count + TILE - 1) / TILE * TILE;
      first_partial[run] = partials;
      score_offset[run] = offset;
      offset += a.length[run];
      const int64_t of = std::max<int64_t>(1, step ? (length + step - 1) / step : 1);
      for (int64_t i = 0; i < of; ++i) {
        pieces.push_back({run, i * step, std::min(length, (i + 1) * step), i, of, partials + i, tiles});
        tiles += step / TILE + 1;
      }
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
    if (a.attention_sum) {
      kept = floats(offset * most);
      kept_top = floats(tiles * most);
    }
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
      if (a.attention_sum) {
        in_parallel(pieces.size(), [&](int64_t i) { add_attention_sum(pieces[i]); });
      }
    }
  }

  void attend(const Piece& piece) {
    const bool copies = T::QUANTIZED && a.entry;
    const int64_t row_floats = row_step * (copies ? 2 : 1) + out_step + TILE + 2 * LANES;
    const Floats memory = floats(rows * row_floats + (copies ? std::max(row_step, out_step) : 0));
    Work w;
    w.run = piece.run;
    w.kept_top = a.attention_sum ? kept_top.get() + piece.first_tile * rows : nullptr;
    w.query = memory.get();
    w.out = w.query + rows * row_step;
    w.weights = w.out + rows * out_step;
    w.totals = w.weights + rows * TILE;
    w.zeros = w.totals + rows * LANES;
    w.plain = w.zeros + rows * LANES;
    w.copied = w.plain + rows * row_step;
    std::fill(w.out, w.weights, 0.f);
    for (int64_t g = 0; g < rows; ++g) {
      read_query(piece.run, first_row + g, w.query + g * row_step);
      w.top[g] = NOTHING;
      store(w.totals + g * LANES, zero());
      store(w.zeros + g * LANES, zero());
    }
    if constexpr (T::QUANTIZED) {
      if (copies) std::copy(w.query, w.query + rows * row_step, w.plain);
      const float* scale = a.key_scale + piece.run * a.dim;
      const float* offset = a.key_zero + piece.run * a.dim;
      for (int64_t g = 0; g < rows; ++g) {
        float* q = w.query + g * row_step;
        w.bias[g] = 0;
        for (int64_t d = 0; d < a.dim; ++d) {
          w.bias[g] += q[place<T>(d)] * offset[d];
          q[place<T>(d)] *= scale[d];
        }
      }
    }

    const int64_t border = chosen_slots[piece.run];
    const int64_t key_bytes = row_bytes<T>(a.dim), value_bytes = row_bytes<T>(a.value_dim);
    const int64_t key_stride = a.key_stride, value_stride = a.value_stride;
    const int32_t* pages = a.page_table ? a.page_table + piece.run * a.page_width : nullptr;
    // The rows of a tile: at most TILE slots from `slot` on, either of chunks of the store, in place, or of own slots.
    const auto locate = [&](int64_t slot, const uint8_t** key_rows, const uint8_t** value_rows) {
      const bool paged = slot < border;
      const int64_t count = std::min<int64_t>(TILE, (paged ? std::min(border, piece.end) : piece.end) - slot);
      for (int64_t k = 0; paged && k < count; ++k) {
        const int64_t page = chosen[piece.run * a.table_width + (slot + k) / a.chunk];
        const int64_t token = page * a.chunk + (slot + k) % a.chunk;
        key_rows[k] = a.chunk_keys + token * key_bytes;
        value_rows[k] = a.chunk_values + token * value_bytes;
      }
      for (int64_t k = 0; !paged && k < count;) {  // rows that follow each other: of one page, or all
        int64_t row = slot - border + k, end = count;
        if (pages) {
          const int64_t at = row % a.page_size;
          end = std::min(count, k + a.page_size - at);
          row = pages[row / a.page_size] * a.page_size + at;
        } else {
          row += a.start[piece.run];
        }
        const uint8_t* key = a.keys + row * key_stride;
        const uint8_t* value = a.values + row * value_stride;
        for (; k < end; ++k, key += key_stride, value += value_stride) key_rows[k] = key, value_rows[k] = value;
      }
      std::fill(key_rows + count, key_rows + TILE, key_rows[0]);  // may be fetched, is never used
      return count;
    };
    const uint8_t* key_rows[2][TILE];
    const uint8_t* value_rows[2][TILE];
    int64_t count = piece.begin < piece.end ? locate(piece.begin, key_rows[0], value_rows[0]) : 0;
    for (int64_t slot = piece.begin, turn = 0; count > 0; turn ^= 1) {
      const int64_t next = slot + count;
      const int64_t coming = next < piece.end ? locate(next, key_rows[turn ^ 1], value_rows[turn ^ 1]) : 0;
      tile(w, key_rows[turn], value_rows[turn], coming ? key_rows[turn ^ 1] : nullptr, int(count),
           slot < border ? -1 : slot - border);
      slot = next, count = coming;
    }
    float total[ROWS];
    for (int64_t g = 0; g < rows; ++g) {
      total[g] = sum(load(w.totals + g * LANES));
      if constexpr (T::QUANTIZED) {
        const float zeros = sum(load(w.zeros + g * LANES));
        for (int64_t d = 0; d < out_step; d += LANES) {
          float* to = w.out + g * out_step + d;
          store(to, load(to) + zeros);
        }
      }
    }

    if (piece.of > 1) {
      const int64_t at = piece.partial * rows;
      std::copy(w.out, w.out + rows * out_step, partial_out.get() + at * out_step);
      std::copy(w.top, w.top + rows, partial_top.get() + at);
      std::copy(total, total + rows, partial_sum.get() + at);
      return;
    }
    for (int64_t g = 0; g < rows; ++g) finish(piece.run, g, w.out + g * out_step, w.top[g], total[g]);
  }

  // One query row, scaled and laid out for T, zeros after its end.
  void read_query(int64_t run, int64_t row, float* to) const {
    const int64_t head = run % a.heads * (a.rows / a.q) + row / a.q;
    const int64_t at = run / a.heads * a.query_batch + head * a.query_head + row % a.q * a.query_query;
    const float scaling = static_cast<float>(a.scaling);
    std::fill(to, to + row_step, 0.f);
    if (a.query_bfloat16) {
      const uint16_t* from = static_cast<const uint16_t*>(a.query) + at;
      for (int64_t d = 0; d < a.dim; ++d) to[place<T>(d)] = from_bfloat16(from[d]) * scaling;
    } else {
      const float* from = static_cast<const float*>(a.query) + at;
      for (int64_t d = 0; d < a.dim; ++d) to[place<T>(d)] = from[d] * scaling;
    }
  }

  // What one thread works with on one piece. Rows are those of this pass.
  struct Work {
    int64_t run;
    float *query, *out, *weights;  // [rows, row_step], [rows, out_step], [rows, TILE]
    float *totals, *zeros;  // [rows, LANES]: sums of weights, and of weighted zeros, still one per lane
    float* kept_top;  // [rows] of the next own tile
    float *plain, *copied;  // where there are copies: query rows without scales, and one row of a copy
    float top[ROWS], bias[ROWS];
  };

  // own: the tile's first slot in the segments, -1 for pages.
  void tile(Work& w, const uint8_t* const* keys, const uint8_t* const* values, const uint8_t* const* next_keys,
            int count, int64_t own) {
    // As many query rows at once as registers allow, in blocks of nearly equal size.
    const int blocks = (rows + BLOCK - 1) / BLOCK;
    for (int block = 0; block < blocks; ++block) {
      const int low = rows * block / blocks, group = rows * (block + 1) / blocks - low;
      with_rows(group, [&](auto g) {
        score<T, g()>(w.query + low * row_step, row_step, keys, block ? nullptr : values, count, int(a.dim),
                      w.weights + low * TILE);
      });
    }
    const int filled = (count + LANES - 1) / LANES * LANES;
    [[maybe_unused]] Copies copies;
    if constexpr (T::QUANTIZED) {
      for (int g = 0; g < rows; ++g)
        for (int k = 0; k < filled; k += LANES) {
          float* s = w.weights + g * TILE + k;
          store(s, load(s) + w.bias[g]);
        }
      if (a.entry) score_copies(w, own, count, copies);
    }
    for (int g = 0; g < rows; ++g) {
      float* s = w.weights + g * TILE;
      for (int k = count; k < filled; ++k) s[k] = NOTHING;
      if (own >= 0 && a.mask) hide(s, w.run, g, own, count);
      Vec most = splat(NOTHING);
      for (int k = 0; k < filled; k += LANES) most = larger(load(s + k), most);
      const float highest = largest(most), before = w.top[g];
      Vec all = load(w.totals + g * LANES);
      if (highest > before) {
        if (before != NOTHING) {
          const float factor = std::exp(before - highest);
          float* to = w.out + g * out_step;
          for (int64_t d = 0; d < out_step; d += LANES) store(to + d, load(to + d) * factor);
          all *= factor;
          if constexpr (T::QUANTIZED) store(w.zeros + g * LANES, load(w.zeros + g * LANES) * factor);
        }
        w.top[g] = highest;
      }
      const float base = w.top[g] == NOTHING ? 0.f : w.top[g];  // a tile that is hidden or NaN from end to end
      for (int k = 0; k < filled; k += LANES) {
        const Vec weight = exponential(load(s + k) - base);
        store(s + k, weight);
        all += weight;
      }
      store(w.totals + g * LANES, all);
      if (a.attention_sum && own >= 0) {
        std::copy(s, s + count, kept.get() + score_offset[w.run] * rows + g * a.length[w.run] + own);
        *w.kept_top++ = w.top[g];
      }
    }
    if constexpr (T::QUANTIZED) take_value_scales(w, values, count, filled, copies);
    for (int block = 0; block < blocks; ++block) {
      const int low = rows * block / blocks, group = rows * (block + 1) / blocks - low;
      with_rows(group, [&](auto g) {
        weigh<T, g()>(w.weights + low * TILE, values, block ? nullptr : next_keys, count, int(a.value_dim),
                      w.out + low * out_step, out_step);
      });
    }
  }

  // Slots of a tile that have a full-precision copy.
  struct Copies {
    int count = 0;
    int slot[TILE];
    int64_t copy[TILE];  // row of the copies
  };

  // Finds a tile's copies, and replaces the scores of their quantized keys.
  void score_copies(Work& w, int64_t own, int count, Copies& copies) const {
    const int16_t* entry = a.entry + a.start[w.run] + own;
    for (int k = 0; k < count; ++k) {
      if (entry[k] < 0 || entry[k] >= a.window) continue;
      copies.slot[copies.count] = k;
      copies.copy[copies.count++] = w.run * a.window + entry[k];
    }
    const int64_t bytes = a.dim * (a.residual_format ? 2 : 4);
    if (copies.count) std::fill(w.copied, w.copied + row_step, 0.f);
    for (int i = 0; i < copies.count; ++i) {
      expand<T>(a.residual_format, a.residual_keys + copies.copy[i] * bytes, a.dim, w.copied);
      for (int g = 0; g < rows; ++g) {
        Vec total = zero();
        for (int64_t d = 0; d < row_step; d += LANES) total += load(w.plain + g * row_step + d) * load(w.copied + d);
        w.weights[g * TILE + copies.slot[i]] = sum(total);
      }
    }
  }

  // Adds the copies' values, and multiplies the other weights by the scales of their values.
  void take_value_scales(Work& w, const uint8_t* const* values, int count, int filled, const Copies& copies) const {
    const int64_t bytes = a.value_dim * (a.residual_format ? 2 : 4), tail = row_bytes<T>(a.value_dim);
    uint8_t tails[4 * TILE];  // scale and zero of every slot's values
    for (int k = 0; k < count; ++k) std::memcpy(tails + 4 * k, values[k] + tail, 4);
    std::memset(tails + 4 * count, 0, 4 * (filled - count));
    if (copies.count) std::fill(w.copied, w.copied + out_step, 0.f);
    for (int i = 0; i < copies.count; ++i) {
      const int k = copies.slot[i];
      std::memset(tails + 4 * k, 0, 4);
      expand<T>(a.residual_format, a.residual_values + copies.copy[i] * bytes, a.value_dim, w.copied);
      for (int g = 0; g < rows; ++g) {
        const Vec weight = splat(w.weights[g * TILE + k]);
        for (int64_t d = 0; d < out_step; d += LANES) {
          float* to = w.out + g * out_step + d;
          store(to, load(to) + weight * load(w.copied + d));
        }
      }
    }
    for (int k = 0; k < filled; k += LANES) {
      Unsigned pairs;
      std::memcpy(&pairs, tails + 4 * k, sizeof pairs);
      const Vec scales = Float16::open(same_bits<Raw<2>::Type>(__builtin_convertvector(pairs & 0xffffu, Half)), 0);
      const Vec offsets = Float16::open(same_bits<Raw<2>::Type>(__builtin_convertvector(pairs >> 16, Half)), 0);
      for (int g = 0; g < rows; ++g) {
        float *s = w.weights + g * TILE + k, *zeros = w.zeros + g * LANES;
        const Vec weight = load(s);
        store(zeros, load(zeros) + weight * offsets);
        store(s, weight * scales);
      }
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
    float lse = total == 0 ? NOTHING : top + std::log(total), factor = total == 0 ? 0.f : 1 / total;
    if (a.other_lse) {  // this part's share of the whole
      const float own = lse, other = a.other_lse[at], most = own > other ? own : other;
      lse = std::isinf(most) ? most : most + std::log(std::exp(own - most) + std::exp(other - most));
      if (total != 0) factor *= std::exp(own - lse);
    }
    if (a.lse) a.lse[at] = lse;
    for (int64_t d = 0; d < a.value_dim; ++d) {
      const float x = total == 0 ? 0.f : sums[place<T>(d)] * factor;
      if (a.query_bfloat16) {
        static_cast<uint16_t*>(a.out)[at * a.value_dim + d] = to_bfloat16(x);
      } else {
        static_cast<float*>(a.out)[at * a.value_dim + d] = x;
      }
    }
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

  // attention_sum[slot] += sum over rows of weight * e^(the score that it was taken to - log-sum-exp)
  void add_attention_sum(const Piece& piece) {
    const int64_t run = piece.run, border = chosen_slots[run], length = a.length[run];
    const int64_t begin = std::max(piece.begin, border) - border, end = piece.end - border;
    const float* top = kept_top.get() + piece.first_tile * rows;
    const float* lse = a.lse + run * a.rows + first_row;
    float* to = a.attention_sum + run * a.attention_sum_width;
    for (int64_t from = begin; from < end; from += TILE, top += rows) {
      const float* weights = kept.get() + score_offset[run] * rows + from;
      const int count = int(std::min<int64_t>(TILE, end - from)), whole = count / LANES * LANES;
      float factor[ROWS];
      for (int64_t g = 0; g < rows; ++g) factor[g] = lse[g] == NOTHING ? 0.f : std::exp(top[g] - lse[g]);
      for (int k = 0; k < whole; k += LANES) {
        Vec total = load(to + from + k);
        for (int64_t g = 0; g < rows; ++g) total += load(weights + g * length + k) * factor[g];
        store(to + from + k, total);
      }
      for (int k = whole; k < count; ++k)
        for (int64_t g = 0; g < rows; ++g) to[from + k] += weights[g * length + k] * factor[g];
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
    switch (arguments->format) {
      case 0:
        return decode<Float32>(*arguments);
      case 1:
        return decode<BFloat16>(*arguments);
      case 2:
        return decode<Float16>(*arguments);
      case 3:
        return decode<Quantized8>(*arguments);
      case 4:
        return decode<Quantized4>(*arguments);
      default:
        return BAD_FORMAT;
    }
  } catch (const std::bad_alloc&) {
    return NO_MEMORY;
  }
}

extern "C" int64_t foveakv_arguments_size() { return sizeof(Arguments); }

// ------------------------------------------------------------------------------------------------- scores of slots

// Mirrored field by field in cpu_scores.py. Groups rank together: the heads of a sequence, or each run for itself.
extern "C" struct Ranking {
  int64_t runs, heads, per_head, stored;
  const int64_t *start, *length;  // [runs]; the runs of a group are equally long
  float* score;       // [stored]
  const float* attention_sum;  // [runs, attention_sum_width]
  int64_t attention_sum_width;
  const int32_t* place;  // [stored], of which a group reads its first run's; null: a slot's place is its number
  const int64_t *low, *high;  // [groups]: candidates are at places from low on, below high
  uint8_t* marked;  // [stored] or null: marked slots are no candidates, and the lowest slots become marked
  int64_t* lowest;  // [groups]: a group's slot with the lowest score, of equals the one at the lowest place
};

namespace {

constexpr int64_t RANKED_AT_ONCE = 512;         // slots whose sums over heads are held at once
constexpr int64_t RANKED_PER_THREAD = 1 << 15;  // fewer additions are not worth waking a thread for

struct Lowest {
  float value = std::numeric_limits<float>::infinity();
  int32_t place = std::numeric_limits<int32_t>::max();
  int64_t slot = -1;

  bool operator<(const Lowest& other) const {
    return value < other.value || (value == other.value && place < other.place);
  }
};

// score += attention_sum for slots begin to end of a group's runs, and the lowest of the candidates among them.
Lowest add_and_find(const Ranking& a, int64_t group, int64_t begin, int64_t end) {
  const int64_t heads = a.per_head ? 1 : a.heads, first = group * heads, own = a.start[first];
  constexpr int64_t MOST = std::numeric_limits<int32_t>::max();
  const int32_t low = int32_t(std::clamp<int64_t>(a.low[group], 0, MOST));
  const int32_t high = int32_t(std::clamp<int64_t>(a.high[group], 0, MOST));
  constexpr float NEVER = std::numeric_limits<float>::infinity();
  alignas(64) float sums[RANKED_AT_ONCE];
  Lowest best;
  for (int64_t from = begin; from < end; from += RANKED_AT_ONCE) {
    const int count = int(std::min(RANKED_AT_ONCE, end - from)), whole = count / LANES * LANES;
    for (int64_t head = 0; head < heads; ++head) {
      float* score = a.score + a.start[first + head] + from;
      const float* attention_sum = a.attention_sum + (first + head) * a.attention_sum_width + from;
      for (int k = 0; k < whole; k += LANES) {
        __builtin_prefetch(score + k + RANKED_AT_ONCE, 1, 2);
        __builtin_prefetch(attention_sum + k + RANKED_AT_ONCE, 0, 2);
        const Vec sum = load(score + k) + load(attention_sum + k);
        store(score + k, sum);
        store(sums + k, head ? load(sums + k) + sum : sum);
      }
      for (int k = whole; k < count; ++k) {
        score[k] += attention_sum[k];
        sums[k] = head ? sums[k] + score[k] : score[k];
      }
    }
    if (low >= high) continue;
    const int32_t* place = a.place ? a.place + own + from : nullptr;
    const uint8_t* marked = a.marked ? a.marked + own + from : nullptr;
    Vec least = splat(NEVER);
    Int number;
    for (int i = 0; i < LANES; ++i) number[i] = int32_t(from) + i;
    for (int k = 0; k < whole; k += LANES, number += LANES) {
      Int at = number;
      if (place) std::memcpy(&at, place + k, sizeof at);
      Int open = (at >= low) & (at < high);
      if (marked) {
        Byte bytes;
        std::memcpy(&bytes, marked + k, sizeof bytes);
        open &= widened(bytes) == 0;
      }
      const Vec sum = open ? load(sums + k) : splat(NEVER);
      store(sums + k, sum);
      least = sum < least ? sum : least;
    }
    for (int k = whole; k < count; ++k) {
      const int32_t at = place ? place[k] : int32_t(from) + k;
      if (at < low || at >= high || (marked && marked[k])) sums[k] = NEVER;
      if (sums[k] < least[0]) least[0] = sums[k];
    }
    const float lowest = -largest(-least);
    if (lowest == NEVER || lowest > best.value) continue;
    for (int k = 0; k < count; ++k) {
      if (sums[k] != lowest) continue;
      const Lowest found{lowest, place ? place[k] : int32_t(from) + k, from + k};
      if (found < best) best = found;
      if (!place) break;
    }
  }
  return best;
}

Status rank(const Ranking& a) {
  int64_t total = 0;
  for (int64_t run = 0; run < a.runs; ++run) {
    const int64_t length = a.length[run], whose = a.per_head ? run : run / a.heads * a.heads;
    if (length < 0 || length > a.attention_sum_width || length != a.length[whose] ||
        (length > 0 && (a.start[run] < 0 || a.start[run] + length > a.stored)))
      return BAD_RUNS;
    total += length;
  }
  const int64_t heads = a.per_head ? 1 : a.heads, groups = a.runs / heads;
  int64_t threads = std::max<int64_t>(1, std::min<int64_t>(at::get_num_threads(), total / RANKED_PER_THREAD));
  if (at::in_parallel_region()) threads = 1;
  // Every group in as many parts as there are threads: parts of a group, then of the next.
  std::vector<Lowest> found(groups * threads);
  at::parallel_for(0, threads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t part = begin; part < end; ++part)
      for (int64_t group = 0; group < groups; ++group) {
        const int64_t length = a.length[group * heads], step = (length / threads + LANES) / LANES * LANES;
        found[group * threads + part] =
            add_and_find(a, group, std::min(length, part * step), std::min(length, (part + 1) * step));
      }
  });
  for (int64_t group = 0; group < groups; ++group) {
    const Lowest* parts = found.data() + group * threads;
    const Lowest best = *std::min_element(parts, parts + threads);
    a.lowest[group] = std::max<int64_t>(0, best.slot);
    for (int64_t head = 0; a.marked && best.slot >= 0 && head < heads; ++head)
      a.marked[a.start[group * heads + head] + best.slot] = 1;
  }
  return OK;
}

}  // namespace

extern "C" int64_t foveakv_rank(const Ranking* ranking) {
  try {
    return rank(*ranking);
  } catch (const std::bad_alloc&) {
    return NO_MEMORY;
  }
}

extern "C" int64_t foveakv_ranking_size() { return sizeof(Ranking); }
