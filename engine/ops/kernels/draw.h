// Draws a token of a row, as engine/ops/draw.py does in plain torch; the logarithm of its softmax's denominator.
#pragma once

#include <bit>
#include <cmath>
#include <vector>

#include "rows.h"
#include "vec.h"

namespace cpd {

// How a row is drawn. A temperature of 0 takes the most likely token, and a `top_k` of 0 keeps all tokens.
struct Draw {
  float temperature;
  int64_t top_k;
  float top_p, min_p;
  uint32_t keys[2];
};

// A number for each of some tokens of a row.
struct Changes {
  const int64_t* tokens;
  const float* numbers;
  int64_t count;
};

// Probabilities of a row's tokens, divided by the largest one: blocks of `kBlock` tokens, without blocks in which all are
// 0. Kept for the next row, as memory from the system has to be cleared each time.
struct Likely {
  static constexpr int64_t kBlock = 8 * kLanes;

  std::vector<float> p, heavy, changed;
  std::vector<int64_t> first_tokens;  // of the blocks
};

// Sums up to 2^31 numbers in the same order in every batch; `n` is a multiple of kBlock.
template <typename Term>
CPD_INLINE float sum_blocks(int64_t n, Term term) {
  Floats total{};
  for (int64_t begin = 0; begin < n; begin += Likely::kBlock) {
    Floats block{};
    for (int64_t i = begin; i < begin + Likely::kBlock; i += kLanes) block += term(i);
    total += block;
  }
  return sum(total);
}

// The first `count` numbers of a vector, and minus infinity.
template <typename T>
CPD_INLINE Floats load_or_lowest(const T* x, int64_t count) {
  if (count >= kLanes) return load(x);
  Floats values = splat(-INFINITY);
  for (int64_t lane = 0; lane < count; ++lane) values[lane] = load(x + lane, 1)[0];
  return values;
}

template <typename T>
float largest_of_row(const T* x, int64_t n) {
  Floats most = splat(-INFINITY);
  for (int64_t i = 0; i < n; i += kLanes) most = larger(load_or_lowest(x + i, n - i), most);
  return largest(most);
}

// log(sum(e^x)); minus infinity if no logit is a larger number.
template <typename T>
float log_sum_exp(const T* x, int64_t n) {
  const float most = largest_of_row(x, n);
  if (most == -INFINITY) return most;
  const int64_t whole = divide_up(n, Likely::kBlock) * Likely::kBlock;
  return most + std::log(sum_blocks(whole, [&](int64_t i) { return exp(load_or_lowest(x + i, n - i) - most); }));
}

// Computes the probabilities of all logits from `least` up, over that of the largest logit, `most`. Returns their sum.
template <typename T>
float find_likely(const T* x, int64_t n, float temperature, float least, float most, Likely& likely) {
  constexpr int64_t kBlock = Likely::kBlock;
  likely.p.resize(divide_up(n, kBlock) * kBlock);
  likely.first_tokens.clear();
  const float factor = 1 / temperature;
  float* p = likely.p.data();
  for (int64_t begin = 0; begin < n; begin += kBlock) {
    Floats values[8], highest = splat(-INFINITY);
    for (int i = 0; i < 8; ++i) {
      values[i] = load_or_lowest(x + begin + i * kLanes, n - begin - i * kLanes);
      highest = larger(values[i], highest);
    }
    if (least > -INFINITY && largest(highest) < least) continue;
    for (int i = 0; i < 8; ++i) {
      const Floats e = exp((values[i] - most) * factor);
      store(p + i * kLanes, values[i] >= least ? e : Floats{});
    }
    likely.first_tokens.push_back(begin);
    p += kBlock;
  }
  return sum_blocks(p - likely.p.data(), [&](int64_t i) { return load(likely.p.data() + i); });
}

// The smallest probability in the smallest set of tokens with the share `top_p` of the sum of all probabilities.
inline float nucleus_floor(Likely& likely, float top_p, float total) {
  constexpr int64_t kBlock = Likely::kBlock;
  const int64_t n = likely.first_tokens.size() * kBlock;
  // All tokens below this probability together have less than what the nucleus leaves out.
  const float negligible = (1 - top_p) * total / n;
  likely.heavy.resize(n + kBlock);
  int64_t count = 0;
  for (int64_t begin = 0; begin < n; begin += kLanes) {
    if (!any(load(likely.p.data() + begin) >= splat(negligible))) continue;
    for (int64_t i = begin; i < begin + kLanes; ++i) {
      likely.heavy[count] = likely.p[i];
      count += likely.p[i] >= negligible;
    }
  }
  for (; count % kBlock; ++count) likely.heavy[count] = 0;
  // Bits of positive floats are in the order of the floats: a bisection ends after 30 steps.
  uint32_t low = 0, high = std::bit_cast<uint32_t>(1.0f) + 1;
  while (high - low > 1) {
    const uint32_t middle = low + (high - low) / 2;
    const Floats least = splat(std::bit_cast<float>(middle));
    const float mass = sum_blocks(count, [&](int64_t i) {
      const Floats p = load(likely.heavy.data() + i);
      return p >= least ? p : Floats{};
    });
    (mass >= top_p * total ? low : high) = middle;
  }
  return std::bit_cast<float>(low);
}

// 31 random bits for each token.
CPD_INLINE Ints noise_bits(Words tokens, const uint32_t (&keys)[2]) {
  Words x = tokens;
  x ^= x >> 16;
  x *= 0x7feb352du;
  x ^= x >> 15;
  x *= 0x846ca68bu;
  x ^= x >> 16;
  Ints bits = (Ints)((x ^ keys[0]) * keys[1]);
  bits ^= bits >> 16;
  return (Ints)((Words)bits * 0x2c1b3c6du & 0x7fffffffu);
}

// The token with the largest p / E, of those with a p of `least` or more; E is exponentially distributed.
inline int64_t first_of_race(const Likely& likely, float least, const uint32_t (&keys)[2]) {
  constexpr float kUnit = (1 - 0x1p-24) * 0x1p-31;
  Words lanes{};
  for (int lane = 0; lane < kLanes; ++lane) lanes[lane] = lane;
  float best = 0;
  int64_t token = 0;
  const float* at = likely.p.data();
  for (const int64_t first : likely.first_tokens) {
    for (int64_t i = 0; i < Likely::kBlock; i += kLanes, at += kLanes) {
      const Floats p = load(at);
      const Floats u = (__builtin_convertvector(noise_bits(lanes + uint32_t(first + i), keys), Floats) + 0.5f) * kUnit;
      const Ints may_win = (p > best * u) & (p >= least);  // E = -log(1 - u) is at least u
      if (!any(may_win)) continue;
      for (int lane = 0; lane < kLanes; ++lane) {
        const float speed = may_win[lane] ? p[lane] / -std::log1p(-u[lane]) : 0;
        if (speed > best) best = speed, token = first + i + lane;
      }
    }
  }
  return token;
}

// Returns a token of x [n]. If no logit is a number above minus infinity, it is 0.
template <typename T>
int64_t draw(const T* x, int64_t n, const Draw& how, Likely& likely) {
  if (how.temperature == 0) return top_k(x, n, 1)[0].column;
  float most, least = -INFINITY;
  if (0 < how.top_k && how.top_k < n) {
    const std::vector<Candidate> best = top_k(x, n, how.top_k);
    most = best[0].value;
    least = best[how.top_k - 1].value;
  } else {
    most = largest_of_row(x, n);
  }
  if (most == -INFINITY) return 0;
  const float total = find_likely(x, n, how.temperature, least, most, likely);
  const float smallest = how.top_p < 1 ? nucleus_floor(likely, how.top_p, total) : 0;
  return first_of_race(likely, std::max(smallest, how.min_p), how.keys);
}

// Draws from changed logits. Positive ones are divided by their factor, others multiplied; then come the additions.
template <typename T>
int64_t draw_changed(const T* x, int64_t n, const Changes& factors, const Changes& additions, const Draw& how,
                     Likely& likely) {
  if (!factors.count && !additions.count) return draw(x, n, how, likely);
  likely.changed.resize(n);
  float* logits = likely.changed.data();
  for (int64_t i = 0; i < n; i += kLanes) store(logits + i, load(x + i, n - i), n - i);
  for (int64_t i = 0; i < factors.count; ++i) {
    float& logit = logits[factors.tokens[i]];
    logit = logit > 0 ? logit / factors.numbers[i] : logit * factors.numbers[i];
  }
  for (int64_t i = 0; i < additions.count; ++i) logits[additions.tokens[i]] += additions.numbers[i];
  return draw(logits, n, how, likely);
}

}  // namespace cpd
