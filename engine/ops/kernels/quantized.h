// Products of quantised weights, in groups of kGroup columns, and of activations that are quantised in the same groups.
//
//   y = sum over groups of  s · t · (D − z · X),  or with minima  s · t · D − m · t · X
//
//   s, m  scale and minimum of a weight's group, in float16      D  sum of u · x
//   t     scale of an activation's group, in float32             X  sum of x
//   u     element of the weight, unsigned, of 8 or 4 bits        z  the u that stands for zero
//   x     element of the activation, signed, of 8 bits
//
// D and X are integers, so that their sums are exact, and groups are added in ascending order for any number of rows and
// threads: a row gives the same bits in every batch.
//
// A word of a weight's group has four adjacent elements of 8 bits; or four of 4 bits in the lower halves of its bytes,
// and in the upper halves those 16 further on.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>

#include "panel.h"
#include "team.h"
#include "vec.h"

namespace cpd {

constexpr int kQuantizedRows = 3;  // with their sums and those of a group, the kernel's registers are full

// A group of an activation: its elements as factors of `dot4`, t, and X.
constexpr int kFactorWords = kGroup / 4 * kWordsPerDot4;
constexpr int kLeftGroup = kFactorWords + 2;

// Words of `rows` quantised rows.
inline int64_t left_words(int64_t rows, int64_t k) { return rows * (k / kGroup) * kLeftGroup; }

// The sizes of numbers as integers: infinity is over all numbers, and NaN over infinity.
CPD_INLINE Ints size_bits(Floats x) { return (Ints)((Words)x & 0x7fffffffu); }

// How numbers of up to a largest size become 8 bits. NaN or infinity among them make the scale so, and what is computed
// with it.
struct Scale {
  float scale, inverse;

  CPD_INLINE Ints quantize(Floats x) const {
    const float shift = 12582912.0f;  // 1.5 · 2^23: adding it leaves the rounded integer in the low bits
    return (Ints)(x * inverse + shift) - 0x4b400000;
  }
};

CPD_INLINE Scale scale_of(Ints sizes) {
  const float size = reduce((Floats)sizes, [](Floats a, Floats b) { return (Floats)larger((Ints)a, (Ints)b); });
  return {size / 127.0f, size > 0 ? 127.0f / size : 0.0f};
}

template <typename T>
CPD_INLINE void quantize_group(const T* x, uint32_t* to) {
  constexpr int kVectors = kGroup / kLanes;
  Floats values[kVectors];
  Ints sizes{};
  for (int i = 0; i < kVectors; ++i) {
    values[i] = load(x + i * kLanes);
    sizes = larger(sizes, size_bits(values[i]));
  }
  const Scale scale = scale_of(sizes);
  int8_t elements[kGroup];
  Ints sums{};
  for (int i = 0; i < kVectors; ++i) {
    const Ints rounded = scale.quantize(values[i]);
    store_bytes(elements + i * kLanes, rounded);
    sums += rounded;
  }
  int32_t total = 0;
  for (int i = 0; i < kLanes; ++i) total += sums[i];
  for (int i = 0; i < kGroup / 4; ++i) store_factor(to + i * kWordsPerDot4, elements + 4 * i);
  std::memcpy(to + kFactorWords, &scale.scale, 4);
  std::memcpy(to + kFactorWords + 1, &total, 4);
}

// to: [m][groups of k][kLeftGroup]
template <typename T>
void quantize_rows(Team& team, const T* x, int64_t m, int64_t k, uint32_t* to) {
  team.ranges(m * (k / kGroup), [&](int64_t begin, int64_t end) {
    for (int64_t group = begin; group < end; ++group) quantize_group(x + group * kGroup, to + group * kLeftGroup);
  });
}

// sums += left · panel, for kRows rows of `left` with stride `stride` words and the first kVectors vectors of the panel's
// columns. Rows of sums are kPanel floats apart.
//
// With few rows of 8 bits, memory is the limit: a panel is read in ascending order.
template <Format kFormat, int kRows, int kVectors>
void quantized_microkernel(const uint32_t* left, int64_t stride, const uint8_t* panel, int64_t groups, float* sums) {
  constexpr int kWords = kGroup * bits_of(kFormat) / 32;
  constexpr bool kInOrder = bits_of(kFormat) == 8 && kRows < kQuantizedRows;
  Floats sum[kRows][kVectors];
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) sum[r][v] = load(sums + r * kPanel + v * kLanes);
  for (int64_t g = 0; g < groups; ++g) {
    const uint8_t* scales = panel + g * group_bytes(kFormat);
    const uint8_t* minima = scales + 2 * kPanel;
    const uint8_t* words = has_minima(kFormat) ? minima + 2 * kPanel : minima;
    const uint32_t* row[kRows];
    Ints dots[kRows][kVectors];
    Floats weight_scales[kVectors];
    if constexpr (kInOrder) {
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) weight_scales[v] = load_float16(scales + v * kLanes * 2);
    }
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      row[r] = left + r * stride + g * kLeftGroup;
      const Ints zeros = (Ints)splat(row[r][kFactorWords + 1] * uint32_t(-zero_of(kFormat)));
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) dots[r][v] = zeros;
    }
#pragma GCC unroll 8
    for (int w = 0; w < kWords; ++w)
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) {
        if constexpr (kInOrder) keep_order();
        const Words word = load_words(words + (w * kPanel + v * kLanes) * 4);
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) {
          const uint32_t* factor = row[r] + w * kWordsPerDot4;
          if constexpr (bits_of(kFormat) == 8) {
            dots[r][v] = dot4(dots[r][v], word, factor);
          } else {
            dots[r][v] = dot4(dots[r][v], word & 0x0f0f0f0fu, factor);
            dots[r][v] = dot4(dots[r][v], (word >> 4) & 0x0f0f0f0fu, factor + kFactorWords / 2);
          }
        }
      }
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      const Floats scale = (Floats)splat(row[r][kFactorWords]);
      const Floats total = splat(-float(int32_t(row[r][kFactorWords + 1]))) * scale;
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) {
        const Floats dot = __builtin_convertvector(dots[r][v], Floats);
        const Floats weight_scale = kInOrder ? weight_scales[v] : load_float16(scales + v * kLanes * 2);
        sum[r][v] = multiply_add(sum[r][v], dot, weight_scale * scale);
        if constexpr (has_minima(kFormat))
          sum[r][v] = multiply_add(sum[r][v], load_float16(minima + v * kLanes * 2), total);
      }
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) store(sums + r * kPanel + v * kLanes, sum[r][v]);
}

using QuantizedMicrokernel = void (*)(const uint32_t*, int64_t, const uint8_t*, int64_t, float*);

template <Format kFormat, int... kIndex>
constexpr std::array<QuantizedMicrokernel, sizeof...(kIndex)> all_quantized(std::integer_sequence<int, kIndex...>) {
  return {quantized_microkernel<kFormat, kIndex / kKernelVectors + 1, kIndex % kKernelVectors + 1>...};
}

// For 1..kQuantizedRows rows and 1..kKernelVectors vectors of columns.
inline QuantizedMicrokernel quantized_microkernel_for(Format format, int64_t rows, int64_t vectors) {
  using Indices = std::make_integer_sequence<int, kQuantizedRows * kKernelVectors>;
  static constexpr auto kInt8 = all_quantized<Format::kInt8>(Indices());
  static constexpr auto kInt4 = all_quantized<Format::kInt4>(Indices());
  static constexpr auto kInt4Min = all_quantized<Format::kInt4Min>(Indices());
  const auto& all = format == Format::kInt8 ? kInt8 : format == Format::kInt4 ? kInt4 : kInt4Min;
  return all[(rows - 1) * kKernelVectors + vectors - 1];
}

// Packs weight [n, k], one element a byte. scales and minima: float16 [n, groups of k]; minima are null if the format has
// none.
inline void pack_quantized(const uint8_t* weight, const uint16_t* scales, const uint16_t* minima, int64_t n, int64_t k,
                           Format format, uint8_t* packed) {
  run_team(true, [=](Team& team) {
    const int64_t groups = k / kGroup;
    team.each(divide_up(n, kPanel), [=](int64_t panel) {
      const int64_t columns = std::min<int64_t>(kPanel, n - panel * kPanel);
      for (int64_t g = 0; g < groups; ++g) {
        uint8_t* to = packed + (panel * groups + g) * group_bytes(format);
        std::memset(to, 0, group_bytes(format));
        auto put_halves = [&](const uint16_t* from) {
          for (int64_t i = 0; i < columns; ++i) std::memcpy(to + 2 * i, from + (panel * kPanel + i) * groups + g, 2);
          to += 2 * kPanel;
        };
        put_halves(scales);
        if (has_minima(format)) put_halves(minima);
        for (int64_t i = 0; i < columns; ++i) {
          const uint8_t* from = weight + (panel * kPanel + i) * k + g * kGroup;
          for (int w = 0; w < kGroup * bits_of(format) / 32; ++w)
            for (int byte = 0; byte < 4; ++byte) {
              const uint8_t low = from[4 * w + byte];
              to[(w * kPanel + i) * 4 + byte] = bits_of(format) == 8 ? low : low | from[4 * w + byte + kGroup / 2] << 4;
            }
        }
      }
    });
  });
}

}  // namespace cpd
