// Linear layers with packed weights and float32 sums: y = x W^T + bias.
//
// An output element is the sum over the inner dimension in ascending order for any number of rows and threads: a row
// gives the same bits in every batch.
#pragma once

#include <algorithm>
#include <array>
#include <vector>

#include "panel.h"
#include "quantized.h"
#include "team.h"
#include "vec.h"

namespace cpd {

constexpr int kKernelRows = 6;
constexpr int64_t kColumns = 64;                      // columns of a piece of work
constexpr int64_t kMostRows = 512, kFewestRows = 96;  // rows of a piece of work
constexpr int64_t kPiecesPerThread = 16;

// sums = left · panel [words][kPanel], for kRows rows of `left` with stride `stride` words and the first kVectors
// vectors of the panel's columns. Rows of sums are kPanel floats apart.
template <typename T, int kRows, int kVectors>
void microkernel(const uint32_t* left, int64_t stride, const uint32_t* panel, int64_t words, float* sums) {
  const uint32_t* row[kRows];
  Floats sum[kRows][kVectors] = {};
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) row[r] = left + r * stride;
  for (int64_t k = 0; k < words; ++k) {
    if constexpr (kPanel * 4 <= 64) __builtin_prefetch(panel + (words + k) * kPanel);  // the next panel, line by line
    Words panel_words[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) panel_words[v] = load_words(panel + k * kPanel + v * kLanes);
#pragma GCC unroll 2
    for (int f = 0; f < kFactorsPerWord<T>; ++f)
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        const Words word = splat(row[r][k * kFactorsPerWord<T> + f]);
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) sum[r][v] = dot<Factor<T>>(sum[r][v], word, factors<T>(panel_words + v, f));
      }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) store(sums + r * kPanel + v * kLanes, sum[r][v]);
}

using Microkernel = void (*)(const uint32_t*, int64_t, const uint32_t*, int64_t, float*);

template <typename T, int... kIndex>
constexpr std::array<Microkernel, sizeof...(kIndex)> all_microkernels(std::integer_sequence<int, kIndex...>) {
  return {microkernel<T, kIndex / kKernelVectors + 1, kIndex % kKernelVectors + 1>...};
}

// For 1..kKernelRows rows and 1..kKernelVectors vectors of columns.
template <typename T>
Microkernel microkernel_for(int64_t rows, int64_t vectors) {
  static constexpr auto kAll = all_microkernels<T>(std::make_integer_sequence<int, kKernelRows * kKernelVectors>());
  return kAll[(rows - 1) * kKernelVectors + vectors - 1];
}

// Returns `count` elements as factors: themselves, or a copy that the next call on this thread overwrites.
template <typename T>
const uint32_t* as_factors(const T* x, int64_t count) {
  if constexpr (kHasDot<T>) {
    return reinterpret_cast<const uint32_t*>(x);
  } else {
    thread_local std::vector<float> copy;
    if (int64_t(copy.size()) < count) copy.resize(count);
    copy_factors(copy.data(), x, count);
    return reinterpret_cast<const uint32_t*>(copy.data());
  }
}

// Packs weight [n, k].
template <typename T>
void pack(const T* weight, int64_t n, int64_t k, uint32_t* packed) {
  const int64_t words = k / kPerWord<T>;
  const auto* from = reinterpret_cast<const uint32_t*>(weight);
  run_team(true, [=](Team& team) {
    team.each(divide_up(n, kPanel), [=](int64_t panel) {
      uint32_t* to = packed + panel * words * kPanel;
      const int64_t columns = std::min<int64_t>(kPanel, n - panel * kPanel);
      for (int64_t w = 0; w < words; ++w)
        for (int64_t i = 0; i < kPanel; ++i)
          to[w * kPanel + i] = i < columns ? from[(panel * kPanel + i) * words + w] : 0;
    });
  });
}

// Computes rows [begin, end) of y and the columns of one strip: a piece of work of `linear`.
//
// x: [rows, k], and `quantized` the same by `quantize_rows` if the weight is quantised; then x is not read.
template <typename T>
CPD_INLINE void linear_strip(const T* x, const uint32_t* quantized, int64_t begin, int64_t end, int64_t k,
                             const Weight& weight, int64_t n, const T* bias, int64_t strip, T* y) {
  const int64_t most_rows = weight.is_plain() ? kKernelRows : kQuantizedRows;
  const int64_t tiles = divide_up(end - begin, most_rows), words = k / kPerWord<T>;
  for (int64_t t = 0; t < tiles; ++t) {
    const int64_t row = begin + (end - begin) * t / tiles, rows = begin + (end - begin) * (t + 1) / tiles - row;
    const uint32_t* left = weight.is_plain() ? as_factors(x + row * k, rows * k) : quantized + left_words(row, k);
    for (int64_t first = strip * kColumns; first < std::min(n, (strip + 1) * kColumns); first += kPanel) {
      const int64_t columns = std::min<int64_t>(kPanel, n - first), vectors = divide_up(columns, kLanes);
      const uint8_t* panel = weight.data + first / kPanel * panel_bytes<T>(weight.format, k);
      alignas(64) float sums[kKernelRows * kPanel];
      if (weight.is_plain()) {
        microkernel_for<T>(rows, vectors)(left, words * kFactorsPerWord<T>, reinterpret_cast<const uint32_t*>(panel), words,
                                          sums);
      } else {
        quantized_microkernel_for(weight.format, rows, vectors)(left, left_words(1, k), panel, k / kGroup, sums);
      }
      for (int64_t r = 0; r < rows; ++r)
        for (int64_t i = 0; i < columns; i += kLanes) {
          Floats value = load(sums + r * kPanel + i);
          if (bias) value += load(bias + first + i, columns - i);
          store(y + (row + r) * n + first + i, value, columns - i);
        }
    }
  }
}

// y [m, n] = x [m, k] · weight^T + bias; bias may be null. `quantized` has room for left_words(m, k) if the weight is
// quantised.
//
// A piece's panels stay in the second-level cache while all its rows use them. Each block of rows reads the weights
// from memory once: the third-level cache does not hold them while other cores read memory. It does hold the rows,
// which are reused soon. So blocks should have many rows.
template <typename T>
void linear(Team& team, const T* x, int64_t m, int64_t k, const Weight& weight, int64_t n, const T* bias, T* y,
            uint32_t* quantized) {
  if (!weight.is_plain()) quantize_rows(team, x, m, k, quantized);
  const int64_t strips = divide_up(n, kColumns);
  const int64_t wanted = divide_up(kPiecesPerThread * team.size(), strips);
  const int64_t blocks = std::max(divide_up(m, kMostRows), std::min(divide_up(m, kFewestRows), wanted));
  team.each(blocks * strips, [&](int64_t item) {
    const int64_t block = item / strips, strip = item % strips;
    linear_strip(x, quantized, m * block / blocks, m * (block + 1) / blocks, k, weight, n, bias, strip, y);
  });
}

}  // namespace cpd
