// Causal attention over paged keys and values, for prefill and decode alike, with an online softmax over blocks of
// kBlock tokens. A query's result has the same bits in every chunk and batch and for every number of threads.
//
// Keys and values of a head are processed in squares of kLanes tokens by kLanes words. A square stays in registers
// while all rows of the tile use it, so that each page is read once.
#pragma once

#include <algorithm>

#include "attention_plan.h"
#include "rows.h"
#include "team.h"
#include "vec.h"

namespace cpd {

constexpr float kNoScore = -1e30f;  // largest score before any token

// Softmax state of rows: sum of weights (one per lane), sum of weighted values, largest score. `Attention::add_values`
// defines the order of values in a row.
struct State {
  float *weights, *values, *largest;
  int64_t width;

  State(float* memory, int64_t rows, int64_t width)
      : weights(memory), values(weights + rows * kLanes), largest(values + rows * width), width(width) {}
  static int64_t floats(int64_t rows, int64_t width) { return rows * (2 * kLanes + width); }

  State from_row(int64_t row) const {
    State state = *this;
    state.weights += row * kLanes;
    state.values += row * width;
    state.largest += row;
    return state;
  }
};

// Memory of a step's attention, reused by each layer.
template <typename T>
struct AttentionMemory {
  int64_t words, width;  // words of a query as factors, floats of a value; both padded to whole vectors
  int64_t part_floats, thread_floats;
  Buffer threads, parts;

  AttentionMemory(const AttentionPlan& plan, int team_size)
      : words(divide_up(plan.dim / kPerWord<T>, kLanes) * kLanes * kFactorsPerWord<T>),
        width(words * kPerWord<Factor<T>>),
        part_floats(State::floats(plan.part_rows, width)),
        thread_floats(plan.rows * (words + kBlock + kBlock / kPerWord<Factor<T>>) + 2 * State::floats(plan.rows, width)),
        threads(thread_floats * team_size),
        parts(plan.parts * part_floats) {}
};

// Loads kLanes words from each of kLanes rows, which are `stride` bytes apart; zeros from row `rows` and from word `words`
// on.
CPD_INLINE void load_square(const uint8_t* from, int64_t stride, int64_t rows, int64_t words, Words (&square)[kLanes]) {
  if (rows >= kLanes && words >= kLanes) {
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) square[i] = load_words(from + i * stride);
  } else {
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) square[i] = i < rows ? load_words(from + i * stride, words) : Words{};
  }
}

// Words of elements of type T, of as many integers of 8 bits.
template <typename T>
CPD_INLINE Words load_int8(const uint8_t* from, int64_t words) {
  uint8_t bytes[kLanes * kPerWord<T>];
  if (words < kLanes) {
    std::memset(bytes, 0, sizeof bytes);
    std::memcpy(bytes, from, words * kPerWord<T>);
    from = bytes;
  }
  if constexpr (kPerWord<T> == 1) {
    Bytes elements;
    std::memcpy(&elements, from, sizeof elements);
    return (Words)__builtin_convertvector(elements, Floats);
  } else {
    Halves pairs;
    std::memcpy(&pairs, from, sizeof pairs);
    const Words both = __builtin_convertvector(pairs, Words);
    const Floats first = __builtin_convertvector((Ints)(both << 24) >> 24, Floats);
    const Floats second = __builtin_convertvector((Ints)(both << 16) >> 24, Floats);
    return (Words)first >> 16 | (Words)second;  // as bf16 they are exact
  }
}

// Like `load_square`, of rows of integers of 8 bits.
template <typename T>
CPD_INLINE void load_int8_square(const uint8_t* from, int64_t stride, int64_t rows, int64_t words,
                                 Words (&square)[kLanes]) {
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) square[i] = i < rows ? load_int8<T>(from + i * stride, words) : Words{};
}

// Prefetches into the second-level cache, after the products of a square, as loads behind prefetches wait for them.
// Prefetches into the first level stall: too few can be outstanding.
CPD_INLINE void prefetch_square(const uint8_t* from, int64_t stride) {
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) __builtin_prefetch(from + i * stride, 0, 2);
}

// For kRows rows r: sums[r][s] += sum over i of left[r][i] · square[i][s]; square[i] is kSums vectors of factors.
template <typename T, int kSums, int kRows>
CPD_INLINE void apply_to_rows(const Words (&square)[kLanes], const uint32_t* left, int64_t words, float* sums,
                              int64_t width) {
  const uint32_t* row[kRows];
  Floats sum[kRows][kSums];
#pragma GCC unroll 6
  for (int r = 0; r < kRows; ++r) {
    row[r] = left + r * words;
    asm("" : "+r"(row[r]));  // One register per row: otherwise compilers keep an address for each word, in memory.
#pragma GCC unroll 2
    for (int s = 0; s < kSums; ++s) sum[r][s] = load(sums + r * width + s * kLanes);
  }
#pragma GCC unroll 16
  for (int i = 0; i < kLanes * kFactorsPerWord<T> / kSums; ++i)
#pragma GCC unroll 6
    for (int r = 0; r < kRows; ++r) {
      const Words word = splat(row[r][i]);
#pragma GCC unroll 2
      for (int s = 0; s < kSums; ++s) sum[r][s] = dot<Factor<T>>(sum[r][s], word, factors<T>(square, i * kSums + s));
    }
#pragma GCC unroll 6
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 2
    for (int s = 0; s < kSums; ++s) store(sums + r * width + s * kLanes, sum[r][s]);
}

// The same for any number of rows. It takes a few at once, since the products of one row depend on each other.
template <typename T, int kSums>
CPD_INLINE void apply_square(const Words (&square)[kLanes], const uint32_t* left, int64_t words, int64_t rows, float* sums,
                             int64_t width) {
  constexpr int kAtOnce = 6 / kSums;
  for (; rows >= kAtOnce; rows -= kAtOnce, left += kAtOnce * words, sums += kAtOnce * width)
    apply_to_rows<T, kSums, kAtOnce>(square, left, words, sums, width);
  for (; rows > 0; --rows, left += words, sums += width)
    apply_to_rows<T, kSums, 1>(square, left, words, sums, width);
}

CPD_INLINE void multiply(float* row, int64_t n, float factor) {
  for (int64_t i = 0; i < n; i += kLanes) store(row + i, load(row + i) * factor);
}

// One layer's attention on one thread of the team.
template <typename T>
class Attention {
 public:
  Attention(const AttentionPlan& plan, const AttentionMemory<T>& memory, const Pages<T>& pages, float scale)
      : plan_(plan), memory_(memory), pages_(pages), scale_(scale) {}

  // q: the heads of token t from q + t · q_stride on; out: [tokens, heads · dim].
  void run(Team& team, const std::vector<Tile>& tiles, const T* q, int64_t q_stride, T* out) {
    q_ = q;
    q_stride_ = q_stride;
    out_ = out;
    queries_ = reinterpret_cast<uint32_t*>(memory_.threads.data() + team.id() * memory_.thread_floats);
    scores_ = reinterpret_cast<float*>(queries_ + plan_.rows * memory_.words);
    weights_ = reinterpret_cast<Factor<T>*>(scores_ + plan_.rows * kBlock);
    states_ = scores_ + plan_.rows * (kBlock + kBlockWords);
    team.each(tiles.size(), [&](int64_t i) { compute(tiles[i]); });
    if (plan_.parts == 0) return;
    team.each(tiles.size(), [&](int64_t i) {
      if (tiles[i].parts) merge_parts(tiles[i]);
    });
  }

 private:
  static constexpr int64_t kBlockWords = kBlock / kPerWord<Factor<T>>;

  void compute(const Tile& tile) {
    begin(tile);
    each_row([&](int64_t row, int64_t query, int64_t head) {
      uint32_t* to = queries_ + row * memory_.words;
      std::fill(to + plan_.dim / kPerWord<Factor<T>>, to + memory_.words, 0);
      copy_factors(reinterpret_cast<Factor<T>*>(to), q_ + (tile.first + query) * q_stride_ + head * plan_.dim, plan_.dim);
    });
    if (tile.part >= 0) return attend(tile.begin, tile.end, part(tile.part));
    State total(states_, rows_, memory_.width);
    State next(states_ + State::floats(plan_.rows, memory_.width), rows_, memory_.width);
    int64_t begin = (tile.begin / kSplit + 1) * kSplit;
    attend(tile.begin, std::min(tile.end, begin), total);
    for (; begin < tile.end; begin += kSplit) {
      attend(begin, std::min(tile.end, begin + kSplit), next);
      merge(total, next);
    }
    write(total);
  }

  void merge_parts(const Tile& tile) {
    begin(tile);
    State total = part(tile.part);
    for (int64_t i = 1; i < tile.parts; ++i) merge(total, part(tile.part + i));
    write(total);
  }

  void begin(const Tile& tile) {
    tile_ = &tile;
    head_rows_ = tile.queries * plan_.group();
    rows_ = head_rows_ * (tile.last_head - tile.first_head);
    table_ = plan_.sequences.block_tables + tile.sequence * plan_.sequences.table_width;
  }

  State part(int64_t index) const {
    float* memory = memory_.parts.data() + index * memory_.part_floats;
    return State(memory, head_rows_ * plan_.kv_heads, memory_.width).from_row(tile_->first_head * head_rows_);
  }

  // A tile's rows are ordered by key-value head, query, head of the group: body(row, query, head).
  template <typename Body>
  void each_row(Body&& body) {
    int64_t row = 0;
    for (int64_t kv_head = tile_->first_head; kv_head < tile_->last_head; ++kv_head)
      for (int64_t query = 0; query < tile_->queries; ++query)
        for (int64_t i = 0; i < plan_.group(); ++i) body(row++, query, kv_head * plan_.group() + i);
  }

  // Computes one split: the rows' state over context [begin, end).
  void attend(int64_t begin, int64_t end, State state) {
    std::fill_n(state.weights, rows_ * kLanes, 0.0f);
    std::fill_n(state.values, rows_ * memory_.width, 0.0f);
    std::fill_n(state.largest, rows_, kNoScore);
    const int64_t kv_heads = tile_->last_head - tile_->first_head;
    for (int64_t block = begin; block < end; block += kBlock) {
      const int64_t tokens = std::min(kBlock, end - block);
      for (int64_t t = 0; t < tokens; t += kLanes)
        for (int64_t h = 0; h < kv_heads; ++h) score(h, block, t, end);
      if (block < tile_->position + tile_->queries - plan_.window) hide(block, tokens);
      each_row([&](int64_t row, int64_t query, int64_t) {
        weigh(state, row, block, std::min(tokens, tile_->position + query + 1 - block), tokens);
      });
      for (int64_t t = 0; t < tokens; t += kLanes)
        for (int64_t h = 0; h < kv_heads; ++h) add_values(h, block, t, end, state);
    }
  }

  // Keys (or values) of `token` for the tile's h-th head.
  const uint8_t* keys_of(int64_t h, int64_t token) const {
    return pages_.keys(table_[token / kPageTokens], tile_->first_head + h) + token % kPageTokens * pages_.row_bytes();
  }
  const uint8_t* values_of(int64_t h, int64_t token) const { return keys_of(pages_.heads + h, token); }

  // Scales of the keys (or values) of kLanes tokens, with 8 bits.
  Floats key_scales(int64_t h, int64_t token) const {
    return load(pages_.scales(pages_.keys(table_[token / kPageTokens], tile_->first_head + h)) + token % kPageTokens);
  }
  Floats value_scales(int64_t h, int64_t token) const { return key_scales(pages_.heads + h, token); }

  // Loads a square from word `word` of each token on.
  CPD_INLINE void load_tokens(const uint8_t* from, int64_t word, int64_t rows, Words (&square)[kLanes]) const {
    const int64_t words = plan_.dim / kPerWord<T> - word;
    if (pages_.has_8_bits) {
      load_int8_square<T>(from + word * kPerWord<T>, pages_.row_bytes(), rows, words, square);
    } else {
      load_square(from + word * 4, pages_.row_bytes(), rows, words, square);
    }
  }

  // The token whose page to prefetch while `token` is processed.
  static int64_t ahead(int64_t token, int64_t end) { return token + kPageTokens < end ? token + kPageTokens : token; }

  // Scores kLanes tokens, from token t of the block on: products of queries and keys. A lane is a token.
  void score(int64_t h, int64_t block, int64_t t, int64_t end) {
    const int64_t words = plan_.dim / kPerWord<T>, bytes = pages_.has_8_bits ? kPerWord<T> : 4;  // of a word in a page
    const uint8_t *keys = keys_of(h, block + t), *next = keys_of(h, ahead(block + t, end));
    const uint32_t* queries = queries_ + h * head_rows_ * memory_.words;
    float* scores = scores_ + h * head_rows_ * kBlock + t;
    for (int64_t r = 0; r < head_rows_; ++r) store(scores + r * kBlock, Floats{});
    for (int64_t w = 0; w < words; w += kLanes) {
      Words square[kLanes];
      load_tokens(keys, w, kLanes, square);
      transpose(square);
      apply_square<T, 1>(square, queries + w * kFactorsPerWord<T>, memory_.words, head_rows_, scores, kBlock);
      prefetch_square(next + w * bytes, pages_.row_bytes());
    }
    if (!pages_.has_8_bits) return;
    const Floats scales = key_scales(h, block + t);
    for (int64_t r = 0; r < head_rows_; ++r) store(scores + r * kBlock, load(scores + r * kBlock) * scales);
  }

  // Adds the values of kLanes tokens, from token t of the block on, times their weights. A lane is a dimension. A word
  // holds two of bf16: a square's even dimensions come first, then the odd ones.
  void add_values(int64_t h, int64_t block, int64_t t, int64_t end, State state) {
    const int64_t words = plan_.dim / kPerWord<T>, bytes = pages_.has_8_bits ? kPerWord<T> : 4;  // of a word in a page
    const uint8_t *values = values_of(h, block + t), *next = values_of(h, ahead(block + t, end));
    const auto* weights = reinterpret_cast<const uint32_t*>(weights_ + h * head_rows_ * kBlock + t);
    float* sums = state.values + h * head_rows_ * state.width;
    for (int64_t w = 0; w < words; w += kLanes) {
      Words square[kLanes];
      // Slots beyond the context hold stale values: their weight is 0, but 0 times infinity is not.
      load_tokens(values, w, end - block - t, square);
      if constexpr (kPerWord<Factor<T>> == 2) {
        for (int i = 0; i < kLanes; i += 2) {
          const Words first = square[i], second = square[i + 1];
          square[i] = (first & 0xffff) | (second << 16);
          square[i + 1] = (first >> 16) | (second & 0xffff0000);
        }
      }
      apply_square<T, kPerWord<T>>(square, weights, kBlockWords, head_rows_, sums + w * kPerWord<T>, state.width);
      prefetch_square(next + w * bytes, pages_.row_bytes());
    }
  }

  // Hides the tokens of a block that are before the windows of queries.
  void hide(int64_t block, int64_t tokens) {
    each_row([&](int64_t row, int64_t query, int64_t) {
      const int64_t first = tile_->position + query + 1 - plan_.window;
      std::fill_n(scores_ + row * kBlock, std::clamp<int64_t>(first - block, 0, tokens), -__builtin_inff());
    });
  }

  // Computes a row's softmax weights from its scores of a block. Its query attends to the first `visible` tokens. Values
  // of 8 bits are multiplied by their scales here.
  void weigh(State state, int64_t row, int64_t block, int64_t visible, int64_t tokens) {
    Ints lane;
    for (int i = 0; i < kLanes; ++i) lane[i] = i;
    float* scores = scores_ + row * kBlock;
    Floats most = splat(kNoScore);
    for (int64_t i = 0; i < tokens; i += kLanes) {
      Floats x = lane + (int32_t)i < (int32_t)visible ? load(scores + i) * scale_ : splat(-__builtin_inff());
      store(scores + i, x);
      most = larger(most, x);
    }
    const float before = state.largest[row], now = std::max(before, largest(most));
    Floats sums = load(state.weights + row * kLanes);
    if (now != before) {
      const float correction = exp(before - now);
      sums *= correction;
      multiply(state.values + row * state.width, state.width, correction);
      state.largest[row] = now;
    }
    for (int64_t i = 0; i < tokens; i += kLanes) {
      Floats x = exp(load(scores + i) - now);
      sums += x;
      if (pages_.has_8_bits) {  // Slots beyond the context have stale scales.
        const Floats scaled = x * value_scales(row / head_rows_, block + i);
        x = lane + (int32_t)i < (int32_t)visible ? scaled : Floats{};
      }
      store(weights_ + row * kBlock + i, kHasDot<T> ? x : rounded<T>(x));
    }
    store(state.weights + row * kLanes, sums);
  }

  void merge(State total, State next) {
    for (int64_t r = 0; r < rows_; ++r) {
      const float largest = std::max(total.largest[r], next.largest[r]);
      const float a = exp(total.largest[r] - largest), b = exp(next.largest[r] - largest);
      auto add = [&](float* to, const float* from, int64_t n) {
        for (int64_t i = 0; i < n; i += kLanes) store(to + i, load(to + i) * a + load(from + i) * b);
      };
      total.largest[r] = largest;
      add(total.weights + r * kLanes, next.weights + r * kLanes, kLanes);
      add(total.values + r * total.width, next.values + r * total.width, total.width);
    }
  }

  void write(State state) {
    const int64_t dim = plan_.dim;
    each_row([&](int64_t row, int64_t query, int64_t head) {
      T* to = out_ + ((tile_->first + query) * plan_.heads + head) * dim;
      const float* values = state.values + row * state.width;
      const float factor = 1.0f / sum(load(state.weights + row * kLanes));
      for (int64_t i = 0; i < dim; i += kLanes * kPerWord<T>) {
        Floats x = load(values + i) * factor;
        if constexpr (kPerWord<T> == 1) {
          store(to + i, x, dim - i);
        } else {
          Floats odd = load(values + i + kLanes) * factor;
          store_words(to + i, round_words(x) >> 16 | round_words(odd), (dim - i) / 2);
        }
      }
    });
  }

  const AttentionPlan& plan_;
  const AttentionMemory<T>& memory_;
  const Pages<T> pages_;
  const float scale_;
  const T* q_;
  int64_t q_stride_;
  T* out_;

  // This thread's memory: queries, a block's scores and weights, states.
  uint32_t* queries_;
  float *scores_, *states_;
  Factor<T>* weights_;

  // The current tile: its rows for one key-value head and in total, its pages.
  const Tile* tile_;
  int64_t head_rows_, rows_;
  const int32_t* table_;
};

}  // namespace cpd
