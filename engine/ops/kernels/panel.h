// Packed weights of linear layers: formats and sizes.
//
// A weight [n, k] is packed into panels of kPanel rows, which are the columns of the right operand of x W^T, zero beyond
// n. A plain panel is [words of k][kPanel]. A quantised one is [groups of k], each of which has kPanel scales, kPanel
// minima if the format has them, and [words of a group][kPanel].
#pragma once

#include <cstdint>

#include "vec.h"

namespace cpd {

constexpr int kKernelVectors = kLanes == 16 ? 4 : 2;
constexpr int kPanel = kKernelVectors * kLanes;
constexpr int kGroup = 32;  // columns of a weight with the same scale

inline int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

enum class Format { kPlain, kInt8, kInt4, kInt4Min };

constexpr int bits_of(Format format) { return format == Format::kInt8 ? 8 : 4; }
constexpr bool has_minima(Format format) { return format == Format::kInt4Min; }
// The unsigned number that stands for zero.
constexpr int32_t zero_of(Format format) { return has_minima(format) ? 0 : 1 << (bits_of(format) - 1); }
constexpr int64_t group_bytes(Format format) {
  return kPanel * (2 + 2 * has_minima(format) + kGroup * bits_of(format) / 8);
}

struct Weight {
  const uint8_t* data = nullptr;
  Format format = Format::kPlain;

  const uint32_t* words() const { return reinterpret_cast<const uint32_t*>(data); }
  bool is_plain() const { return format == Format::kPlain; }
};

// Bytes of kPanel columns; k elements of type T each, if they are plain.
template <typename T>
int64_t panel_bytes(Format format, int64_t k) {
  return format == Format::kPlain ? kPanel * k * int64_t(sizeof(T)) : k / kGroup * group_bytes(format);
}

}  // namespace cpd
