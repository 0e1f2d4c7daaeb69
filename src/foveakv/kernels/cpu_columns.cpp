// Softmax of rows of scores, summed over the rows by column: the attention that each column of a prompt receives.
//
// The scores of a tile come from a matrix product and are read twice, the second time from the second-level cache: a
// few rows at a time become e^(score - largest), then their weighted sum is added to the columns' sums. Columns after a
// row's last visible one are not touched.

#include <ATen/Parallel.h>

#include <vector>

#include "vectors.h"

// Mirrored field by field in cpu_columns.py. Row r of a head belongs to query head r / tokens and to token r % tokens.
extern "C" struct Columns {
  int64_t sequences, heads, rows, tokens, width;  // rows: of a head, query heads of its group * tokens
  float* scores;         // [sequences, heads, rows, width]; overwritten
  const int64_t* stop;   // [sequences, tokens]: how many of the first columns a token may see; 0: it does not count
  const uint8_t* seen;   // [sequences, tokens, width] or null: which of them
  int64_t seen_sequence, seen_token;  // strides
  float* sums;           // [sequences, heads, ...], of which width columns are added to
  int64_t sums_sequence, sums_head;   // strides
};

namespace {

constexpr int AT_ONCE = 8;
constexpr int64_t SCORES_PER_THREAD = 1 << 15;  // fewer are not worth waking a thread for

// row[j] = e^(row[j] - largest) for j below count; returns 1 / their sum.
float exponentials(float* row, int64_t count, const uint8_t* seen) {
  const int64_t whole = count / LANES * LANES;
  const int rest = int(count - whole);
  if (seen) {
    for (int64_t j = 0; j < whole; j += LANES) {
      Byte bytes;
      std::memcpy(&bytes, seen + j, sizeof bytes);
      store(row + j, widened(bytes) != 0 ? load(row + j) : splat(NOTHING));
    }
    for (int64_t j = whole; j < count; ++j) row[j] = seen[j] ? row[j] : NOTHING;
  }
  float tail[LANES];
  std::fill(tail, tail + LANES, NOTHING);
  std::copy(row + whole, row + count, tail);
  Vec most = load(tail);
  for (int64_t j = 0; j < whole; j += LANES) most = larger(load(row + j), most);
  const Vec top = splat(largest(most));
  Vec total = exponential(load(tail) - top);
  store(tail, total);
  std::copy(tail, tail + rest, row + whole);
  for (int64_t j = 0; j < whole; j += LANES) {
    const Vec x = exponential(load(row + j) - top);
    store(row + j, x);
    total += x;
  }
  return 1 / sum(total);
}

template <int N>
void add(float* const* rows, const float* factor, int64_t begin, int64_t end, float* sums) {
  int64_t j = begin;
  for (; j + LANES <= end; j += LANES) {
    Vec total = load(rows[0] + j) * factor[0];  // small numbers first, then added to the large one
#pragma GCC unroll 8
    for (int i = 1; i < N; ++i) total += load(rows[i] + j) * factor[i];
    store(sums + j, load(sums + j) + total);
  }
  for (; j < end; ++j)
    for (int i = 0; i < N; ++i) sums[j] += rows[i][j] * factor[i];
}

void add_rows(const Columns& a, int64_t group, int64_t begin, int64_t end, float* sums) {
  const int64_t sequence = group / a.heads;
  float* scores = a.scores + group * a.rows * a.width;
  for (int64_t from = begin; from < end; from += AT_ONCE) {
    float* rows[AT_ONCE];
    float factor[AT_ONCE];
    int64_t stops[AT_ONCE], least = a.width;
    int count = 0;
    for (int64_t row = from; row < std::min<int64_t>(from + AT_ONCE, end); ++row) {
      const int64_t token = row % a.tokens, stop = std::min(a.stop[sequence * a.tokens + token], a.width);
      if (stop <= 0) continue;
      const uint8_t* seen = a.seen ? a.seen + sequence * a.seen_sequence + token * a.seen_token : nullptr;
      rows[count] = scores + row * a.width;
      factor[count] = exponentials(rows[count], stop, seen);
      least = std::min(least, stop);
      stops[count++] = stop;
    }
    if (!count) continue;
    with_rows(count, [&](auto n) { add<n()>(rows, factor, 0, least, sums); });
    for (int i = 0; i < count; ++i) add<1>(rows + i, factor + i, least, stops[i], sums);
  }
}

// The sum of the k largest of `count` numbers, none below 0; k >= 1; NaN if any of them is. Bits of such numbers are ordered as the numbers are,
// so the k-th largest is found by halving their range, which reads a row from the first-level cache.
double largest_sum(const float* row, int64_t count, int64_t k) {
  const int64_t whole = count / LANES * LANES;
  const auto bits = [&](int64_t j) { return same_bits<int32_t>(row[j]); };
  int32_t low = 0, high = 0;  // at least k numbers are not below `low`, fewer than k are above `high`
  Int most = {}, strange = {};  // NaN of either sign: its bits do not tell where it belongs
  for (int64_t j = 0; j < whole; j += LANES) {
    const Vec value = load(row + j);
    const Int x = same_bits<Int>(value);
    strange |= value != value;
    most = x > most ? x : most;
  }
  bool nan = false;
  for (int i = 0; i < LANES; ++i) nan |= strange[i] != 0;
  for (int64_t j = whole; j < count; ++j) nan |= row[j] != row[j];
  if (nan) return std::numeric_limits<double>::quiet_NaN();
  for (int i = 0; i < LANES; ++i) high = std::max(high, most[i]);
  for (int64_t j = whole; j < count; ++j) high = std::max(high, bits(j));
  while (low < high && k < count) {
    const int32_t middle = high - (high - low) / 2;
    Int above = {};
    for (int64_t j = 0; j < whole; j += LANES) above -= same_bits<Int>(load(row + j)) >= middle;
    int64_t found = 0;
    for (int i = 0; i < LANES; ++i) found += above[i];
    for (int64_t j = whole; j < count; ++j) found += bits(j) >= middle;
    if (found >= k) low = middle;
    if (found == k) break;
    if (found < k) high = middle - 1;
  }
  Vec total = zero();
  Int taken = {};
  for (int64_t j = 0; j < whole; j += LANES) {
    const Vec x = load(row + j);
    const Int above = same_bits<Int>(x) >= low;
    total += above ? x : zero();
    taken -= above;
  }
  double all = sum(total);
  int64_t found = 0;
  for (int i = 0; i < LANES; ++i) found += taken[i];
  for (int64_t j = whole; j < count; ++j)
    if (bits(j) >= low) all += row[j], ++found;
  return found > k ? all - double(found - k) * same_bits<float>(low) : all;  // more than k only where equals remain
}

}  // namespace

// sums[group] = the k largest numbers of each of its rows, summed. values [groups, rows, width].
extern "C" int64_t foveakv_largest(const float* values, int64_t groups, int64_t rows, int64_t width, int64_t k,
                                   double* sums) {
  int64_t threads = std::min<int64_t>(at::get_num_threads(), groups * rows * width / SCORES_PER_THREAD);
  if (at::in_parallel_region() || threads < 1) threads = 1;
  try {
    std::vector<double> found(groups * rows);
    at::parallel_for(0, groups * rows, (groups * rows + threads - 1) / threads, [&](int64_t first, int64_t last) {
      for (int64_t row = first; row < last; ++row) found[row] = largest_sum(values + row * width, width, k);
    });
    for (int64_t group = 0; group < groups; ++group) {
      sums[group] = 0;
      for (int64_t row = group * rows; row < (group + 1) * rows; ++row) sums[group] += found[row];
    }
    return 0;
  } catch (const std::bad_alloc&) {
    return 4;
  }
}

extern "C" int64_t foveakv_add_columns(const Columns* arguments) {
  const Columns& a = *arguments;
  const int64_t groups = a.sequences * a.heads, blocks = (a.rows + AT_ONCE - 1) / AT_ONCE;
  if (a.tokens <= 0 || a.rows % a.tokens) return 1;
  int64_t threads = std::min<int64_t>(at::get_num_threads(), groups * a.rows * a.width / SCORES_PER_THREAD);
  if (at::in_parallel_region() || threads < 1) threads = 1;
  const auto at_sums = [&](int64_t group) {
    return a.sums + group / a.heads * a.sums_sequence + group % a.heads * a.sums_head;
  };
  try {
    if (threads == 1 || groups >= 2 * threads) {
      at::parallel_for(0, threads, 1, [&](int64_t first, int64_t last) {
        for (int64_t group = groups * first / threads; group < groups * last / threads; ++group)
          add_rows(a, group, 0, a.rows, at_sums(group));
      });
      return 0;
    }
    // Few heads: threads share the rows of each, with sums of their own.
    std::vector<float> own(threads * a.width);
    for (int64_t group = 0; group < groups; ++group) {
      std::fill(own.begin(), own.end(), 0.f);
      at::parallel_for(0, threads, 1, [&](int64_t first, int64_t last) {
        for (int64_t part = first; part < last; ++part)
          add_rows(a, group, std::min(a.rows, blocks * part / threads * AT_ONCE),
                   std::min(a.rows, blocks * (part + 1) / threads * AT_ONCE), own.data() + part * a.width);
      });
      float* sums = at_sums(group);
      for (int64_t part = 0; part < threads; ++part)
        for (int64_t j = 0; j < a.width; ++j) sums[j] += own[part * a.width + j];
    }
    return 0;
  } catch (const std::bad_alloc&) {
    return 4;
  }
}
