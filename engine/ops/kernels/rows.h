// Operations on single rows: norms, RoPE with the store into pages, SiLU, the largest values. They compute in float32
// and round where transformers does.
#pragma once

#include <algorithm>
#include <cmath>
#include <functional>
#include <type_traits>
#include <vector>

#include "linear.h"
#include "team.h"
#include "vec.h"

namespace cpd {

constexpr int64_t kPageTokens = 16;

// A layer's keys and values: [pages, 2, heads, range of a head], contiguous within a page.
//
// The range of a head is [kPageTokens, dim] of type T; or, with 8 bits, of int8, and then a scale in float32 for each
// token.
template <typename T>
struct Pages {
  uint8_t* data;
  int64_t page_stride;  // bytes from one page to the next
  int64_t heads, dim;
  bool has_8_bits;

  int64_t row_bytes() const { return dim * (has_8_bits ? 1 : int64_t(sizeof(T))); }
  int64_t head_bytes() const { return kPageTokens * (row_bytes() + (has_8_bits ? 4 : 0)); }
  uint8_t* keys(int64_t page, int64_t head) const { return data + page * page_stride + head * head_bytes(); }
  uint8_t* values(int64_t page, int64_t head) const { return keys(page, heads + head); }
  float* scales(uint8_t* head) const { return reinterpret_cast<float*>(head + kPageTokens * dim); }
};

// x = -infinity where the bit of a mask is 0; 32 bits in a word.
template <typename T>
void mask_row(T* x, const uint32_t* mask, int64_t n) {
  using Bits = std::conditional_t<sizeof(T) == 4, uint32_t, uint16_t>;
  constexpr Bits infinity = 0xff800000u >> (32 - 8 * sizeof(T));
  auto* bits = reinterpret_cast<Bits*>(x);
  for (int64_t begin = 0; begin < n; begin += 32) {
    const uint32_t allowed = mask[begin / 32];
    if (allowed == ~0u) continue;
    const int64_t count = std::min<int64_t>(32, n - begin);
    for (int64_t i = 0; i < count; ++i) bits[begin + i] = allowed >> i & 1 ? bits[begin + i] : infinity;
  }
}

// to = x / sqrt(mean(x^2) + eps) * weight; `x` and `to` may be the same.
template <typename T>
CPD_INLINE void normalize(const T* x, const T* weight, int64_t n, float eps, T* to) {
  Floats squares{};
  for (int64_t i = 0; i < n; i += kLanes) {
    Floats value = load(x + i, n - i);
    squares += value * value;
  }
  const float factor = 1.0f / __builtin_sqrtf(sum(squares) / n + eps);
  for (int64_t i = 0; i < n; i += kLanes)
    store(to + i, rounded<T>(load(x + i, n - i) * factor) * load(weight + i, n - i), n - i);
}

template <typename T>
void rms_norm(Team& team, const T* x, int64_t m, int64_t n, const T* weight, float eps, T* to) {
  team.ranges(m, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) normalize(x + row * n, weight, n, eps, to + row * n);
  });
}

// residual += x; to = norm of residual. `x` and `to` may be the same.
template <typename T>
void add_rms_norm(Team& team, const T* x, int64_t m, int64_t n, T* residual, const T* weight, float eps, T* to) {
  team.ranges(m, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      T* sum = residual + row * n;
      for (int64_t i = 0; i < n; i += kLanes)
        store(sum + i, load(sum + i, n - i) + load(x + row * n + i, n - i), n - i);
      normalize(sum, weight, n, eps, to + row * n);
    }
  });
}

// to [m, n] = silu(gate) * up; gate_up [m, 2n], gate first.
template <typename T>
void silu_mul(Team& team, const T* gate_up, int64_t m, int64_t n, T* to) {
  team.ranges(m, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const T *gate = gate_up + row * 2 * n, *up = gate + n;
      for (int64_t i = 0; i < n; i += kLanes) {
        Floats x = load(gate + i, n - i);
        store(to + row * n + i, rounded<T>(x / (1.0f + exp(-x))) * load(up + i, n - i), n - i);
      }
    }
  });
}

template <typename T>
void gather_rows(Team& team, const T* from, const int32_t* rows, int64_t count, int64_t n, T* to) {
  team.ranges(count, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) std::memcpy(to + i * n, from + rows[i] * n, n * sizeof(T));
  });
}

struct Candidate {
  float value;
  int64_t column;
};

// Returns the `count` largest of x [n], descending, and equal ones in ascending order of columns. NaN is less than any number.
template <typename T>
std::vector<Candidate> top_k(const T* x, int64_t n, size_t count) {
  constexpr int64_t kBlock = 8 * kLanes;
  std::vector<float> maxima(n / kBlock);  // of whole blocks
  for (size_t block = 0; block < maxima.size(); ++block) {
    Floats most = splat(-INFINITY);
    for (int64_t i = 0; i < kBlock; i += kLanes) most = larger(load(x + block * kBlock + i), most);
    maxima[block] = largest(most);
  }
  float least = -INFINITY;  // `count` values are at least this large, and hardly any more
  if (maxima.size() >= count) {
    std::vector<float> sorted = maxima;
    std::nth_element(sorted.begin(), sorted.begin() + count - 1, sorted.end(), std::greater());
    least = sorted[count - 1];
  }
  std::vector<Candidate> best;
  for (int64_t begin = 0; begin < n; begin += kBlock) {
    const size_t block = begin / kBlock;
    if (block < maxima.size() && maxima[block] < least) continue;
    for (int64_t i = begin; i < std::min(n, begin + kBlock); i += kLanes) {
      const Floats values = load(x + i, n - i);
      for (int64_t lane = 0; lane < std::min<int64_t>(kLanes, n - i); ++lane)
        if (values[lane] >= least) best.push_back({values[lane], i + lane});
    }
  }
  best.resize(std::max(count, best.size()), {-INFINITY, 0});
  const auto comes_first = [](const Candidate& a, const Candidate& b) {
    return a.value > b.value || (a.value == b.value && a.column < b.column);
  };
  std::partial_sort(best.begin(), best.begin() + count, best.end(), comes_first);
  return best;
}

// Rotates dimension i with i + dim / 2; cos_sin [dim]: cosines, then sines.
template <typename T>
CPD_INLINE void rotate_head(const T* x, int64_t dim, const float* cos_sin, T* to) {
  const int64_t half = dim / 2;
  for (int64_t i = 0; i < half; i += kLanes) {
    const int64_t n = half - i;
    Floats a = load(x + i, n), b = load(x + half + i, n);
    Floats cos = load(cos_sin + i, n), sin = load(cos_sin + half + i, n);
    store(to + i, a * cos - b * sin, n);
    store(to + half + i, b * cos + a * sin, n);
  }
}

// Stores the head of one token into its slot.
template <typename T>
CPD_INLINE void store_head(const T* x, const Pages<T>& pages, uint8_t* head, int64_t slot) {
  const int64_t dim = pages.dim;
  uint8_t* to = head + slot * pages.row_bytes();
  if (!pages.has_8_bits) {
    std::memcpy(to, x, dim * sizeof(T));
    return;
  }
  Ints sizes{};
  for (int64_t i = 0; i < dim; i += kLanes) sizes = larger(sizes, size_bits(load(x + i, dim - i)));
  const Scale scale = scale_of(sizes);
  for (int64_t i = 0; i < dim; i += kLanes) {
    int8_t elements[kLanes];
    store_bytes(elements, scale.quantize(load(x + i, dim - i)));
    std::memcpy(to + i, elements, std::min<int64_t>(kLanes, dim - i));
  }
  pages.scales(head)[slot] = scale.scale;
}

// For qkv [m, (heads + 2 · kv heads) · dim]: normalises (if q_norm is set) and rotates queries in place, does the same
// to keys, and stores keys and values into pages. Token t has position positions[t] and slot slots[t].
template <typename T>
void rope_store(Team& team, T* qkv, int64_t m, int64_t heads, const int32_t* positions, const int32_t* slots,
                const float* cos_sin, const T* q_norm, const T* k_norm, float eps, const Pages<T>& pages) {
  const int64_t dim = pages.dim, width = (heads + 2 * pages.heads) * dim;
  team.ranges(m, [&](int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; ++token) {
      const float* angles = cos_sin + positions[token] * dim;
      const int64_t page = slots[token] / kPageTokens, slot = slots[token] % kPageTokens;
      T* head = qkv + token * width;
      for (int64_t h = 0; h < heads; ++h, head += dim) {
        if (q_norm) normalize(head, q_norm, dim, eps, head);
        rotate_head(head, dim, angles, head);
      }
      for (int64_t h = 0; h < pages.heads; ++h, head += dim) {
        if (k_norm) normalize(head, k_norm, dim, eps, head);
        rotate_head(head, dim, angles, head);
        store_head(head, pages, pages.keys(page, h), slot);
      }
      for (int64_t h = 0; h < pages.heads; ++h, head += dim) store_head(head, pages, pages.values(page, h), slot);
    }
  });
}

}  // namespace cpd
