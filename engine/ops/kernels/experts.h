// A mixture of experts: each token is computed by a few of a layer's many MLPs, which a router chooses.
//
//   router's output ─▶ route    each token's experts and their weights
//                   ─▶ group    one row for each token and expert; rows of an expert are adjacent
//                   ─▶ gates and ups, SiLU, downs of all groups
//                   ─▶ combine  the weighted sum of a token's rows
//
// Only weights of experts that were chosen are read, each once for up to kMostRows rows. A token's result has the same
// bits in every batch: neither the sums of its rows nor the order in which they are added depends on other tokens.
#pragma once

#include <algorithm>
#include <atomic>
#include <cmath>
#include <vector>

#include "linear.h"
#include "rows.h"
#include "team.h"
#include "vec.h"

namespace cpd {

struct ExpertsShape {
  int64_t count = 0, per_token = 0, width = 0;
  bool normalize = false;  // A token's weights add up to 1.
};

// Rows [begin, end) of one expert.
struct Group {
  int64_t expert, begin, end;
};

// Where tokens go, in a step's largest layer; reused by each layer. A pair is a token and one of its experts.
struct Routed {
  std::vector<int32_t> experts;  // [tokens, per token], largest weight first
  std::vector<float> weights;    // [tokens, per token]
  std::vector<int32_t> rows;     // row of each pair
  std::vector<int32_t> tokens;   // token of each row
  std::vector<Group> groups;
  int64_t num_groups = 0;

  Routed(int64_t tokens, const ExpertsShape& shape)
      : experts(tokens * shape.per_token),
        weights(experts.size()),
        rows(experts.size()),
        tokens(experts.size()),
        groups(most_groups(tokens, shape)) {}

  static int64_t most_groups(int64_t tokens, const ExpertsShape& shape) {
    const int64_t pairs = tokens * shape.per_token;
    return std::min(pairs, shape.count) + pairs / kMostRows;
  }
};

// Memory of a step's experts: rows [pairs, hidden], gate_up [pairs, 2 · width], product [pairs, width], and room for rows
// and product quantised, if weights are.
template <typename T>
struct ExpertMemory {
  T *rows, *gate_up, *product;
  uint32_t* quantized;
  Routed* routed;
  int64_t* bytes_read;  // Counter, which other threads read; null if nobody does.
};

// Softmax of logits [n] in float32. `to` has room for whole vectors.
template <typename T>
CPD_INLINE void softmax(const T* logits, int64_t n, float* to) {
  Ints lane;
  for (int i = 0; i < kLanes; ++i) lane[i] = i;
  Floats most = splat(-INFINITY), sums{};
  for (int64_t i = 0; i < n; i += kLanes) {
    Floats x = lane + (int32_t)i < (int32_t)n ? load(logits + i, n - i) : splat(-INFINITY);
    store(to + i, x);
    most = larger(x, most);
  }
  const float largest_logit = largest(most);
  for (int64_t i = 0; i < n; i += kLanes) {
    Floats x = exp(load(to + i) - largest_logit);
    store(to + i, x);
    sums += x;
  }
  const float total = sum(sums);
  for (int64_t i = 0; i < n; i += kLanes) store(to + i, load(to + i) / total);
}

// Finds the `count` largest of x [n], descending, and their indices; of equal ones, the first. Without so many numbers
// that are no NaN, the rest of the indices is 0.
CPD_INLINE void largest_of(const float* x, int64_t n, int64_t count, float* values, int32_t* indices) {
  std::fill_n(values, count, -INFINITY);
  std::fill_n(indices, count, 0);
  for (int64_t i = 0; i < n; ++i) {
    if (!(x[i] > values[count - 1])) continue;
    int64_t place = count - 1;
    for (; place > 0 && x[i] > values[place - 1]; --place) {
      values[place] = values[place - 1];
      indices[place] = indices[place - 1];
    }
    values[place] = x[i];
    indices[place] = i;
  }
}

template <typename T>
void route(Team& team, const T* logits, int64_t tokens, const ExpertsShape& shape, Routed& routed) {
  team.ranges(tokens, [&](int64_t begin, int64_t end) {
    std::vector<float> probabilities(divide_up(shape.count, kLanes) * kLanes);
    for (int64_t token = begin; token < end; ++token) {
      float* weights = routed.weights.data() + token * shape.per_token;
      softmax(logits + token * shape.count, shape.count, probabilities.data());
      largest_of(probabilities.data(), shape.count, shape.per_token, weights,
                 routed.experts.data() + token * shape.per_token);
      if (!shape.normalize) continue;
      float total = 0;
      for (int64_t i = 0; i < shape.per_token; ++i) total += weights[i];
      for (int64_t i = 0; i < shape.per_token; ++i) weights[i] /= total;
    }
  });
}

// In one piece: it is short beside the products that follow.
inline void group(Team& team, int64_t tokens, const ExpertsShape& shape, Routed& routed) {
  team.each(1, [&](int64_t) {
    const int64_t pairs = tokens * shape.per_token;
    std::vector<int64_t> next(shape.count + 1);  // the next row of each expert
    for (int64_t i = 0; i < pairs; ++i) ++next[routed.experts[i] + 1];
    routed.num_groups = 0;
    for (int64_t expert = 0; expert < shape.count; ++expert) {
      const int64_t begin = next[expert], end = next[expert + 1] += begin;
      for (int64_t row = begin; row < end; row += kMostRows)
        routed.groups[routed.num_groups++] = {expert, row, std::min(end, row + kMostRows)};
    }
    for (int64_t i = 0; i < pairs; ++i) {
      const int64_t row = next[routed.experts[i]]++;
      routed.rows[i] = row;
      routed.tokens[row] = i / shape.per_token;
    }
  });
}

// y [pairs, n] = x [pairs, k] · weight^T of each row's expert; weights of all experts are packed one after the other.
//
// The number of pieces must not depend on the groups: a thread may come here before another has made them.
template <typename T>
void grouped_linear(Team& team, int64_t most_groups, const ExpertMemory<T>& memory, const T* x, int64_t k,
                    int64_t pairs, const Weight& weight, int64_t n, T* y) {
  if (!weight.is_plain()) quantize_rows(team, x, pairs, k, memory.quantized);
  const int64_t strips = divide_up(n, kColumns), bytes = panel_bytes<T>(weight.format, k);
  team.each(most_groups * strips, [&](int64_t item) {
    if (item / strips >= memory.routed->num_groups) return;
    const Group group = memory.routed->groups[item / strips];
    const int64_t strip = item % strips;
    const Weight own{weight.data + group.expert * divide_up(n, kPanel) * bytes, weight.format};
    const int64_t first = strip * kColumns, last = std::min(n, first + kColumns);
    linear_piece<T>(x, memory.quantized, group.begin, group.end, k, own, n, nullptr, first, last, y);
    if (memory.bytes_read)
      std::atomic_ref(*memory.bytes_read).fetch_add((last - first) * bytes / kPanel, std::memory_order_relaxed);
  });
}

template <typename T>
void combine(Team& team, const T* rows, int64_t tokens, int64_t hidden, const ExpertsShape& shape, const Routed& routed,
             T* to) {
  team.ranges(tokens, [&](int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; ++token)
      for (int64_t i = 0; i < hidden; i += kLanes) {
        Floats sums{};
        for (int64_t pair = token * shape.per_token; pair < (token + 1) * shape.per_token; ++pair)
          sums = multiply_add(sums, load(rows + routed.rows[pair] * hidden + i, hidden - i), splat(routed.weights[pair]));
        store(to + token * hidden + i, sums, hidden - i);
      }
  });
}

// to [tokens, hidden] = what the experts make of x [tokens, hidden], which may be the same; router's output [tokens,
// experts].
template <typename T>
void run_experts(Team& team, const T* x, int64_t tokens, int64_t hidden, const T* logits, const ExpertsShape& shape,
                 const Weight& gate_up, const Weight& down, const ExpertMemory<T>& memory, T* to) {
  const int64_t pairs = tokens * shape.per_token, most_groups = Routed::most_groups(tokens, shape);
  route(team, logits, tokens, shape, *memory.routed);
  group(team, tokens, shape, *memory.routed);
  gather_rows(team, x, memory.routed->tokens.data(), pairs, hidden, memory.rows);
  grouped_linear(team, most_groups, memory, memory.rows, hidden, pairs, gate_up, 2 * shape.width, memory.gate_up);
  silu_mul(team, memory.gate_up, pairs, shape.width, memory.product);
  grouped_linear(team, most_groups, memory, memory.product, shape.width, pairs, down, hidden, memory.rows);
  combine(team, memory.rows, tokens, hidden, shape, *memory.routed, to);
}

}  // namespace cpd
