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
constexpr int64_t kFewRows = 8, kLongPiecesPerThread = 4;  // of few rows: memory is read fastest in long streams
constexpr int64_t kBlockBytes = 4096;                      // what the tiles of few rows use of a panel in turn
constexpr int64_t kBlockedRows = 24, kBlockElements = 1024;  // of `linear_blocks`

// sums += left · panel [words][kPanel], for kRows rows of `left` with stride `stride` words and the first kVectors vectors
// of the panel's columns. Rows of sums are kPanel floats apart.
template <typename T, int kRows, int kVectors>
void microkernel(const uint32_t* left, int64_t stride, const uint32_t* panel, int64_t words, float* sums) {
  const uint32_t* row[kRows];
  Floats sum[kRows][kVectors];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
    row[r] = left + r * stride;
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) sum[r][v] = load(sums + r * kPanel + v * kLanes);
  }
  for (int64_t k = 0; k < words; ++k) {
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

// Writes a row's sums of a panel whose first column is `column`, with the bias, to row `y`; columns from `last` on are not
// written.
template <typename T>
CPD_INLINE void write_sums(const float* sums, int64_t column, int64_t last, const T* bias, T* y) {
  const int64_t columns = std::min<int64_t>(kPanel, last - column);
  for (int64_t i = 0; i < columns; i += kLanes) {
    Floats value = load(sums + i);
    if (bias) value += load(bias + column + i, columns - i);
    store(y + column + i, value, columns - i);
  }
}

// Like `linear_piece`, of rows [0, m), at most kMostRows, and a plain weight whose factors are floats.
//
// Blocks of kBlockElements of the inner dimension come one after the other. A block of the panels stays in the
// second-level cache while all rows use it; elements that are no floats are converted once for all rows.
template <typename T>
void linear_blocks(const T* x, int64_t m, int64_t k, const uint32_t* weight, int64_t n, const T* bias, int64_t first,
                   int64_t last, T* y) {
  constexpr bool kConverts = !std::is_same_v<T, float>;
  thread_local Buffer left_block(kConverts ? kKernelRows * kBlockElements : 0);
  thread_local Buffer right_block(kConverts ? kColumns * kBlockElements : 0);
  thread_local Buffer sums_of_piece(kMostRows * kColumns);
  const int64_t words = k / kPerWord<T>, blocks = divide_up(k, kBlockElements);
  const int64_t tiles = divide_up(m, kKernelRows), panels = divide_up(last - first, kPanel);
  float* sums = sums_of_piece.data();  // [panels][m][kPanel]
  std::fill_n(sums, panels * m * kPanel, 0.0f);
  for (int64_t block = 0; block < blocks; ++block) {
    const int64_t begin = words * block / blocks, count = words * (block + 1) / blocks - begin;
    const int64_t elements = count * kPerWord<T>;
    auto words_of = [&](int64_t panel) { return weight + ((first / kPanel + panel) * words + begin) * kPanel; };
    if constexpr (kConverts) {
      float* to = right_block.data();
      for (int64_t panel = 0; panel < panels; ++panel)
        for (int64_t w = 0; w < count; ++w) {
          Words from[kKernelVectors];
          for (int v = 0; v < kKernelVectors; ++v) from[v] = load_words(words_of(panel) + w * kPanel + v * kLanes);
          for (int f = 0; f < kFactorsPerWord<T>; ++f)
            for (int v = 0; v < kKernelVectors; ++v, to += kLanes) store_words(to, factors<T>(from + v, f));
        }
    }
    for (int64_t t = 0; t < tiles; ++t) {
      const int64_t row = m * t / tiles, rows = m * (t + 1) / tiles - row;
      const T* from = x + row * k + begin * kPerWord<T>;
      const void* left = from;
      if constexpr (kConverts) {
        for (int64_t r = 0; r < rows; ++r) copy_factors(left_block.data() + r * elements, from + r * k, elements);
        left = left_block.data();
      }
      for (int64_t panel = 0; panel < panels; ++panel) {
        const void* right = words_of(panel);
        if constexpr (kConverts) right = right_block.data() + panel * elements * kPanel;
        const int64_t vectors = divide_up(std::min<int64_t>(kPanel, last - first - panel * kPanel), kLanes);
        microkernel_for<float>(rows, vectors)(static_cast<const uint32_t*>(left), kConverts ? elements : k,
                                              static_cast<const uint32_t*>(right), elements,
                                              sums + (panel * m + row) * kPanel);
      }
    }
  }
  for (int64_t panel = 0; panel < panels; ++panel)
    for (int64_t row = 0; row < m; ++row)
      write_sums(sums + (panel * m + row) * kPanel, first + panel * kPanel, last, bias, y + row * n);
}

// Computes rows [begin, end) of y and its columns [first, last): a piece of work of `linear`. `first` is that of a panel.
//
// x: [rows, k], and `quantized` the same by `quantize_rows` if the weight is quantised; then x is not read.
//
// Rows are computed in tiles, whose sums fill the registers. With few rows, memory is the limit: tiles take turns on a
// block of the panel that stays in the first-level cache. With more, computing is, and each block would cost loads and
// stores of all sums.
template <typename T>
CPD_INLINE void linear_piece(const T* x, const uint32_t* quantized, int64_t begin, int64_t end, int64_t k,
                             const Weight& weight, int64_t n, const T* bias, int64_t first, int64_t last, T* y) {
  const bool is_plain = weight.is_plain();
  const int64_t m = end - begin, tiles = divide_up(m, is_plain ? kKernelRows : kQuantizedRows);
  const int64_t units = is_plain ? k / kPerWord<T> : k / kGroup;  // of k: words, or groups
  const int64_t unit_bytes = is_plain ? kPanel * 4 : group_bytes(weight.format);
  const int64_t stride = is_plain ? k / kPerWord<Factor<T>> : left_words(1, k);  // words of a row's factors
  alignas(64) float sums[kFewRows * kPanel];

  auto factors_of = [&](int64_t row, int64_t rows) {
    return is_plain ? as_factors(x + row * k, rows * k) : quantized + row * stride;
  };
  auto panel_of = [&](int64_t column) { return weight.data + column / kPanel * units * unit_bytes; };
  auto multiply = [&](const uint32_t* left, int64_t rows, const uint8_t* right, int64_t count, int64_t column, float* to) {
    const int64_t vectors = divide_up(std::min<int64_t>(kPanel, last - column), kLanes);
    if (is_plain) {
      microkernel_for<T>(rows, vectors)(left, stride, reinterpret_cast<const uint32_t*>(right), count, to);
    } else {
      quantized_microkernel_for(weight.format, rows, vectors)(left, stride, right, count, to);
    }
  };
  auto write = [&](int64_t row, int64_t rows, int64_t column) {
    for (int64_t r = 0; r < rows; ++r) write_sums(sums + r * kPanel, column, last, bias, y + (row + r) * n);
  };

  if constexpr (std::is_same_v<Factor<T>, float>)
    if (is_plain && m >= kBlockedRows)
      return linear_blocks(x + begin * k, m, k, weight.words(), n, bias, first, last, y + begin * n);
  if (m > kFewRows) {
    for (int64_t t = 0; t < tiles; ++t) {
      const int64_t row = begin + m * t / tiles, rows = begin + m * (t + 1) / tiles - row;
      const uint32_t* left = factors_of(row, rows);
      for (int64_t column = first; column < last; column += kPanel) {
        std::fill_n(sums, rows * kPanel, 0.0f);
        multiply(left, rows, panel_of(column), units, column, sums);
        write(row, rows, column);
      }
    }
    return;
  }
  const int64_t block = tiles == 1 ? units : divide_up(kBlockBytes, unit_bytes);
  const uint32_t* left = factors_of(begin, m);
  for (int64_t column = first; column < last; column += kPanel) {
    std::fill_n(sums, m * kPanel, 0.0f);
    for (int64_t unit = 0; unit < units; unit += block) {
      const uint8_t* right = panel_of(column) + unit * unit_bytes;
      for (int64_t t = 0; t < tiles; ++t) {
        const int64_t row = m * t / tiles, rows = m * (t + 1) / tiles - row;
        multiply(left + row * stride + unit * (stride / units), rows, right, std::min(block, units - unit), column,
                 sums + row * kPanel);
      }
    }
    write(begin, m, column);
  }
}

// y [m, n] = x [m, k] · weight^T + bias; bias may be null. `quantized` has room for left_words(m, k) if the weight is
// quantised.
//
// With many rows, a piece's panels stay in the second-level cache while all its rows use them. Each block of rows reads
// the weights from memory once: the third-level cache does not hold them while other cores read memory. It does hold the
// rows, which are reused soon. So blocks should have many rows. With few rows, the memory is read in long pieces.
template <typename T>
void linear(Team& team, const T* x, int64_t m, int64_t k, const Weight& weight, int64_t n, const T* bias, T* y,
            uint32_t* quantized) {
  if (!weight.is_plain()) quantize_rows(team, x, m, k, quantized);
  const int64_t strips = divide_up(n, kColumns), wanted = kPiecesPerThread * team.size();
  const int64_t blocks =
      std::max(divide_up(m, kMostRows), std::min(divide_up(m, kFewestRows), divide_up(wanted, strips)));
  const int64_t pieces = m <= kFewRows ? std::min(strips, kLongPiecesPerThread * team.size()) : strips;
  team.each(blocks * pieces, [&](int64_t item) {
    const int64_t block = item / pieces, piece = item % pieces;
    const int64_t first = strips * piece / pieces * kColumns, last = strips * (piece + 1) / pieces * kColumns;
    linear_piece(x, quantized, m * block / blocks, m * (block + 1) / blocks, k, weight, n, bias, first, std::min(n, last), y);
  });
}

}  // namespace cpd
