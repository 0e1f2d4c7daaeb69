// Relevance of chunks to the queries of a step, from their digests, and the choice of the most relevant ones.
//
// A digest channel's numbers for all chunks of a head are neighbours in memory, so vectors run over chunks: a strip of
// them is scored against up to BLOCK query rows at once, whose sums stay in registers while the channels pass.
// With int4 a byte holds two channels of a chunk: row i channel i in the lower bits and channel i + rows in the upper ones.

#include <ATen/Parallel.h>

#include <functional>
#include <vector>

#include "vectors.h"

// Mirrored field by field in cpu_chunks.py.
extern "C" struct Chunks {
  int64_t rows, queries, dim, bounds, longest;  // rows: heads that choose; queries: of each; dim: of a query
  const float* query;      // [rows, queries, dim], scaled
  int64_t format;          // of the digests: 0 float32, 1 bfloat16, 2 int8, 3 int4
  const uint8_t* digests;  // [heads, dim or (bounds) 2 dim, longest]; int4: half as many rows, rounded up
  const float* scale;      // [heads, dim or 2 dim], with int8 and int4
  const int64_t* head;     // [rows]: a row's digests
  const int64_t* count;    // [rows]: its chunks
  float* relevance;        // [rows, longest]: log of the largest softmax over its queries; -inf beyond its chunks
};

// Mirrored field by field in cpu_chunks.py.
extern "C" struct Choice {
  int64_t rows, longest, width;
  const float* relevance;  // [rows, longest]
  const int64_t *count, *share;  // [rows]: its chunks, and how many of them it chooses, at most width
  uint8_t* resident;       // [rows, longest]: chosen before; then what is chosen now
  int64_t* table;          // [rows, width]: the chosen ones in ascending order, then -1
};

namespace {

constexpr int64_t STRIP = 64;  // numbers of int8 in a cache line
constexpr int64_t PRODUCTS_PER_THREAD = 1 << 17;  // fewer are not worth waking a thread for

template <int FORMAT, int PART>
inline Vec opened(const uint8_t* from) {
  if constexpr (FORMAT == 0) {
    Vec x;
    std::memcpy(&x, from, sizeof x);
    return x;
  } else if constexpr (FORMAT == 1) {
    Half half;
    std::memcpy(&half, from, sizeof half);
    return same_bits<Vec>(__builtin_convertvector(half, Unsigned) << 16);
  } else {
    Byte bytes;
    std::memcpy(&bytes, from, sizeof bytes);
    if constexpr (FORMAT == 2) return converted(widened(bytes ^ uint8_t(128)) - 128);
    const Int both = widened(bytes);
    return converted((PART == 0 ? both & 15 : both >> 4) - 8);
  }
}

template <int FORMAT>
constexpr int64_t ITEM = FORMAT == 0 ? 4 : FORMAT == 1 ? 2 : 1;
template <int FORMAT>
constexpr int PARTS = FORMAT == 3 ? 2 : 1;  // channels in an item

// Calls function(part) for every channel of an item, as a compile-time constant.
template <int FORMAT, class Function>
inline void with_parts(const Function& function) {
  function(std::integral_constant<int, 0>());
  if constexpr (PARTS<FORMAT> == 2) function(std::integral_constant<int, 1>());
}

// query: [G, PARTS * dim]; dim: rows of the digests.
template <int FORMAT, int G, int N>
void strip(const float* query, int64_t dim, const uint8_t* digests, int64_t longest, int64_t at, float* scores) {
  constexpr int64_t SIZE = ITEM<FORMAT>;
  Vec total[G][N];
#pragma GCC unroll 8
  for (int g = 0; g < G; ++g)
#pragma GCC unroll 8
    for (int j = 0; j < N; ++j) total[g][j] = zero();
  const uint8_t* from = digests + at * SIZE;
  for (int64_t d = 0; d < dim; ++d, from += longest * SIZE) {
    __builtin_prefetch(from + N * LANES * SIZE, 0, 3);
    with_parts<FORMAT>([&](auto part) __attribute__((always_inline)) {
      Vec x[N];
#pragma GCC unroll 8
      for (int j = 0; j < N; ++j) x[j] = opened<FORMAT, part()>(from + j * LANES * SIZE);
#pragma GCC unroll 8
      for (int g = 0; g < G; ++g) {
        const Vec q = splat(query[(g * PARTS<FORMAT> + part()) * dim + d]);
#pragma GCC unroll 8
        for (int j = 0; j < N; ++j) total[g][j] += x[j] * q;
      }
    });
  }
  for (int g = 0; g < G; ++g)
    for (int j = 0; j < N; ++j) store(scores + g * longest + at + j * LANES, total[g][j]);
}

template <int FORMAT, int PART>
inline float one(const uint8_t* from) {
  if constexpr (FORMAT == 0) {
    float x;
    std::memcpy(&x, from, 4);
    return x;
  } else if constexpr (FORMAT == 1) {
    uint16_t bits;
    std::memcpy(&bits, from, 2);
    return from_bfloat16(bits);
  } else if constexpr (FORMAT == 2) {
    return float(int8_t(*from));
  } else {
    return float((PART == 0 ? *from & 15 : *from >> 4) - 8);
  }
}

// scores[g][p] = query g . digest p, for chunks begin to end; scores [G, longest].
template <int FORMAT, int G>
void scores_of(const float* query, int64_t dim, const uint8_t* digests, int64_t longest, int64_t begin, int64_t end,
               float* scores) {
  constexpr int N = 4 * (G + 1) < REGISTERS ? 4 : 2 * (G + 1) < REGISTERS ? 2 : 1;
  int64_t at = begin;
  for (; at + N * LANES <= end; at += N * LANES) strip<FORMAT, G, N>(query, dim, digests, longest, at, scores);
  for (; at + LANES <= end; at += LANES) strip<FORMAT, G, 1>(query, dim, digests, longest, at, scores);
  for (; at < end; ++at)
    for (int g = 0; g < G; ++g) {
      float total = 0;
      for (int64_t d = 0; d < dim; ++d)
        with_parts<FORMAT>([&](auto part) {
          total += query[(g * PARTS<FORMAT> + part()) * dim + d] *
                   one<FORMAT, part()>(digests + (d * longest + at) * ITEM<FORMAT>);
        });
      scores[g * longest + at] = total;
    }
}

struct Softmax {
  float top, total;  // of a part: largest score, sum of e^(score - largest)
};

Softmax softmax(const float* scores, int64_t begin, int64_t end) {
  Vec most = splat(NOTHING);
  int64_t p = begin;
  for (; p + LANES <= end; p += LANES) most = larger(load(scores + p), most);
  float top = largest(most);
  for (; p < end; ++p) top = scores[p] > top ? scores[p] : top;
  Vec all = zero();
  for (p = begin; p + LANES <= end; p += LANES) all += exponential(load(scores + p) - top);
  float total = sum(all);
  for (; p < end; ++p) total += std::exp(scores[p] - top);
  return {top, total};
}

template <int FORMAT>
void relevance(const Chunks& a) {
  const int64_t length = a.bounds ? 2 * a.dim : a.dim, items = (length + PARTS<FORMAT> - 1) / PARTS<FORMAT>;
  const int64_t padded = items * PARTS<FORMAT>, products = a.rows * a.queries * length * a.longest;
  int64_t threads = std::max<int64_t>(1, std::min<int64_t>(at::get_num_threads(), products / PRODUCTS_PER_THREAD));
  if (at::in_parallel_region()) threads = 1;
  const int64_t parts = std::max<int64_t>(1, (2 * threads + a.rows - 1) / a.rows);
  const int64_t step = ((a.longest + parts - 1) / parts + STRIP - 1) / STRIP * STRIP;
  // Queries as digests are multiplied: with the scales of their channels, and with bounds the positive part first. The
  // upper bits of the last row of an odd number of int4 channels meet a 0.
  const Floats queries = floats(a.rows * a.queries * padded), scores = floats(a.rows * a.queries * a.longest);
  for (int64_t row = 0; row < a.rows; ++row) {
    const float* scale = a.scale ? a.scale + a.head[row] * length : nullptr;
    for (int64_t g = 0; g < a.queries; ++g) {
      const float* from = a.query + (row * a.queries + g) * a.dim;
      float* to = queries.get() + (row * a.queries + g) * padded;
      for (int64_t d = 0; d < length; ++d) {
        const float x = from[d < a.dim ? d : d - a.dim];
        const float kept = !a.bounds ? x : d < a.dim ? (x < 0 ? 0 : x) : (x > 0 ? 0 : x);  // NaN stays
        to[d] = scale ? kept * scale[d] : kept;
      }
      std::fill(to + length, to + padded, 0.f);
    }
  }
  std::vector<Softmax> found(a.rows * a.queries * parts);
  const auto in_parallel = [&](const auto& work) {
    at::parallel_for(0, threads, 1, [&](int64_t first, int64_t last) {
      const int64_t all = a.rows * parts;
      for (int64_t i = all * first / threads; i < all * last / threads; ++i) {
        const int64_t row = i / parts, part = i % parts, end = std::min(a.count[row], (part + 1) * step);
        work(row, part, std::min(end, part * step), end);
      }
    });
  };
  in_parallel([&](int64_t row, int64_t part, int64_t begin, int64_t end) {
    const uint8_t* digests = a.digests + a.head[row] * items * a.longest * ITEM<FORMAT>;
    for (int64_t low = 0; low < a.queries; low += BLOCK) {
      const int64_t first = row * a.queries + low;
      with_rows(int(std::min<int64_t>(BLOCK, a.queries - low)), [&](auto g) {
        scores_of<FORMAT, g()>(queries.get() + first * padded, items, digests, a.longest, begin, end,
                               scores.get() + first * a.longest);
      });
    }
    for (int64_t g = row * a.queries; g < (row + 1) * a.queries; ++g)
      found[g * parts + part] = softmax(scores.get() + g * a.longest, begin, end);
  });
  std::vector<float> lse(a.rows * a.queries);
  for (int64_t g = 0; g < a.rows * a.queries; ++g) {
    const Softmax* of = found.data() + g * parts;
    float top = NOTHING, total = 0;
    for (int64_t i = 0; i < parts; ++i) top = of[i].top > top ? of[i].top : top;
    for (int64_t i = 0; i < parts; ++i)
      if (of[i].total != 0) total += of[i].total * (of[i].top == top ? 1.f : std::exp(of[i].top - top));
    lse[g] = top + std::log(total);
  }
  in_parallel([&](int64_t row, int64_t part, int64_t begin, int64_t end) {
    float* to = a.relevance + row * a.longest;
    for (int64_t g = row * a.queries; g < (row + 1) * a.queries; ++g) {
      const float* from = scores.get() + g * a.longest;
      const bool first = g == row * a.queries;
      for (int64_t p = begin; p < end; ++p) {
        const float x = from[p] - lse[g];
        to[p] = first || x > to[p] || x != x ? x : to[p];  // NaN of any query stays
      }
    }
    if (part + 1 == parts) std::fill(to + std::max<int64_t>(0, a.count[row]), to + a.longest, NOTHING);
  });
}

}  // namespace

extern "C" int64_t foveakv_relevance(const Chunks* arguments) {
  const Chunks& a = *arguments;
  if (a.queries < 1) return 1;
  if (a.rows < 1) return 0;
  for (int64_t row = 0; row < a.rows; ++row)
    if (a.count[row] < 0 || a.count[row] > a.longest) return 1;
  try {
    if (a.format == 0) relevance<0>(a);
    if (a.format == 1) relevance<1>(a);
    if (a.format == 2) relevance<2>(a);
    if (a.format == 3) relevance<3>(a);
    return 0;
  } catch (const std::bad_alloc&) {
    return 4;
  }
}

// Of equally relevant chunks the lower one is chosen. Returns how many of the chosen were chosen before; below 0: why not.
extern "C" int64_t foveakv_choose(const Choice* arguments) {
  const Choice& a = *arguments;
  int64_t stayed = 0;
  try {
    std::vector<float> values(a.longest);
    for (int64_t row = 0; row < a.rows; ++row) {
      const int64_t count = a.count[row], share = a.share[row];
      if (count < 0 || count > a.longest || share < 0 || share > count || share > a.width) return -1;
      const float* relevance = a.relevance + row * a.longest;
      uint8_t* resident = a.resident + row * a.longest;
      int64_t* table = a.table + row * a.width;
      std::fill(table, table + a.width, -1);
      // The least relevance that is chosen; NaN counts as the lowest.
      for (int64_t p = 0; p < count; ++p) values[p] = relevance[p] == relevance[p] ? relevance[p] : NOTHING;
      int64_t equal = share;
      float least = std::numeric_limits<float>::infinity();
      if (share > 0) {
        std::nth_element(values.begin(), values.begin() + (share - 1), values.begin() + count, std::greater<float>());
        least = values[share - 1];
        for (int64_t p = 0; p < count; ++p) equal -= relevance[p] > least;
      }
      int64_t found = 0;
      for (int64_t p = 0; p < count; ++p) {
        const float x = relevance[p] == relevance[p] ? relevance[p] : NOTHING;
        const bool chosen = share > 0 && (x > least || (x == least && equal-- > 0));
        if (chosen) {
          stayed += resident[p];
          table[found++] = p;
        }
        resident[p] = chosen;
      }
      std::fill(resident + count, resident + a.longest, 0);
    }
    return stayed;
  } catch (const std::bad_alloc&) {
    return -4;
  }
}
