// Linear layers with packed weights and float32 sums: y = x W^T + bias.
//
// A panel holds kPanel columns of the right operand, word by word of the inner dimension: [words][kPanel]. An output
// element is the sum over the inner dimension in ascending order, whatever the number of rows or threads: the same
// row gives the same bits in every batch.
#pragma once

#include <algorithm>
#include <array>

#include "team.h"
#include "vec.h"

namespace cpd {

constexpr int kKernelVectors = kLanes == 16 ? 4 : 2;
constexpr int kKernelRows = kRegisters == 32 ? 6 : 4;
constexpr int kPanel = kKernelVectors * kLanes;

// sums [kRows][kPanel] = rows [kRows][words] · panel [words][kPanel], of which the first kVectors vectors of columns.
template <typename T, int kRows, int kVectors>
void microkernel(const uint32_t* const* rows, const uint32_t* panel, int64_t words, float* sums) {
  const uint32_t* row[kRows];
  Floats sum[kRows][kVectors];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
    row[r] = rows[r];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) sum[r][v] = Floats{};
  }
  for (int64_t k = 0; k < words; ++k) {
    Words right[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) right[v] = load_words(panel + k * kPanel + v * kLanes);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      Words left = splat(row[r][k]);
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) sum[r][v] = dot<T>(sum[r][v], left, right[v]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) store(sums + r * kPanel + v * kLanes, sum[r][v]);
}

using Microkernel = void (*)(const uint32_t* const*, const uint32_t*, int64_t, float*);

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

inline int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// weight [n, k] -> panels [n / kPanel, words of k, kPanel], zero beyond n.
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

// y [m, n] = x [m, k] · weight^T + bias; weight packed, bias may be null.
template <typename T>
void linear(Team& team, const T* x, int64_t m, int64_t k, const uint32_t* weight, int64_t n, const T* bias, T* y) {
  constexpr int64_t kRowBlock = 16 * kKernelRows;
  const int64_t words = k / kPerWord<T>, panels = divide_up(n, kPanel), blocks = divide_up(m, kRowBlock);
  const auto* left = reinterpret_cast<const uint32_t*>(x);
  team.each(blocks * panels, [&](int64_t item) {
    const int64_t block = item / panels, panel = item % panels;
    const int64_t begin = m * block / blocks, end = m * (block + 1) / blocks, first = panel * kPanel;
    const int64_t columns = std::min<int64_t>(kPanel, n - first), tiles = divide_up(end - begin, kKernelRows);
    for (int64_t t = 0; t < tiles; ++t) {
      const int64_t row = begin + (end - begin) * t / tiles, rows = begin + (end - begin) * (t + 1) / tiles - row;
      const uint32_t* pointers[kKernelRows];
      for (int64_t r = 0; r < rows; ++r) pointers[r] = left + (row + r) * words;
      alignas(64) float sums[kKernelRows * kPanel];
      microkernel_for<T>(rows, divide_up(columns, kLanes))(pointers, weight + panel * words * kPanel, words, sums);
      for (int64_t r = 0; r < rows; ++r)
        for (int64_t i = 0; i < columns; i += kLanes) {
          Floats value = load(sums + r * kPanel + i);
          if (bias) value += load(bias + first + i, columns - i);
          store(y + (row + r) * n + first + i, value, columns - i);
        }
    }
  });
}

}  // namespace cpd
