// The kernels as torch operators of the namespace `cpd`, called only by engine/ops/cpu_ops.py; engine/ops/base.py
// describes them. This file checks shapes and types, and divides a step into stages.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#if __has_include(<sys/mman.h>)
#include <sys/mman.h>
#endif

#include "attention.h"
#include "draw.h"
#include "experts.h"
#include "layers.h"
#include "linear.h"
#include "rows.h"
#include "team.h"

namespace cpd {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

// Fewest float32 operations for which waking helpers pays off.
constexpr int64_t kParallelWork = 1 << 23;

template <typename T>
constexpr at::ScalarType kScalarType = std::is_same_v<T, float> ? at::kFloat : at::kBFloat16;

template <typename Body>
void with_type(const Tensor& x, Body&& body) {
  if (x.scalar_type() == at::kFloat) return body(float{});
  TORCH_CHECK(x.scalar_type() == at::kBFloat16, "cpd kernels take float32 and bfloat16, not ", x.scalar_type());
  body(bf16{});
}

template <typename T>
T* data(const Tensor& x) {
  TORCH_CHECK(x.is_contiguous() && x.scalar_type() == kScalarType<T>, "cpd kernels: a tensor has the wrong type or layout");
  return static_cast<T*>(x.data_ptr());
}

template <typename T>
T* data(const OptionalTensor& x) {
  return x ? data<T>(*x) : nullptr;
}

// Bytes of quantised weights tell their format: [.., panels, groups, group_bytes]. Plain ones are of type T: [.., panels,
// words, elements of a word of each column].
template <typename T>
Weight weight_of(const Tensor& packed) {
  if (packed.scalar_type() != at::kByte) return {reinterpret_cast<const uint8_t*>(data<T>(packed)), Format::kPlain};
  for (const Format format : {Format::kInt8, Format::kInt4, Format::kInt4Min})
    if (packed.size(-1) == group_bytes(format) && packed.is_contiguous()) return {packed.data_ptr<uint8_t>(), format};
  TORCH_CHECK(false, "cpd kernels: packed weights have an unknown format");
}

// The inner dimension of a packed weight.
template <typename T>
int64_t inner_size(const Tensor& packed) {
  return packed.size(-2) * (packed.scalar_type() == at::kByte ? kGroup : kPerWord<T>);
}

// Room for `rows` rows of `k` elements, quantised.
Tensor empty_quantized_rows(int64_t rows, int64_t k) { return at::empty({left_words(rows, k)}, at::kInt); }

uint32_t* words(const Tensor& x) { return reinterpret_cast<uint32_t*>(x.data_ptr<int32_t>()); }

const int32_t* ints(const Tensor& x) {
  TORCH_CHECK(x.is_contiguous() && x.scalar_type() == at::kInt, "cpd kernels: indices must be contiguous int32");
  return x.data_ptr<int32_t>();
}

// Experts' weights are packed one after the other.
template <typename T>
void check_experts(const ExpertsShape& shape, int64_t hidden, const Tensor& gate_up, const Tensor& down) {
  auto fits = [&](const Tensor& packed, int64_t n, int64_t k) {
    return packed.dim() == 4 && packed.size(0) == shape.count && packed.size(1) == divide_up(n, kPanel) &&
           inner_size<T>(packed) == k;
  };
  TORCH_CHECK(0 < shape.per_token && shape.per_token <= shape.count && fits(gate_up, 2 * shape.width, hidden) &&
                  fits(down, hidden, shape.width),
              "cpd kernels: the experts have the wrong shape");
}

template <typename T>
Pages<T> pages_of(const Tensor& kv) {
  const bool has_8_bits = kv.scalar_type() == at::kByte;
  const int64_t dim = has_8_bits ? kv.size(3) / kPageTokens - 4 : kv.size(4);
  const Pages<T> pages{static_cast<uint8_t*>(kv.data_ptr()), kv.stride(0) * kv.element_size(), kv.size(2), dim, has_8_bits};
  const int64_t head = pages.head_bytes() / kv.element_size();
  const bool has_heads = has_8_bits ? kv.dim() == 4 && kv.size(3) == head && kv.stride(3) == 1
                                    : kv.dim() == 5 && kv.size(3) == kPageTokens && kv.stride(3) == dim &&
                                          kv.stride(4) == 1 && kv.scalar_type() == kScalarType<T>;
  TORCH_CHECK(has_heads && kv.size(1) == 2 && kv.stride(2) == head && kv.stride(1) == kv.size(2) * head,
              "cpd kernels: a layer's pages must be [pages, 2, heads, ", kPageTokens, ", dim], or bytes [pages, 2, heads, ",
              kPageTokens, " * (dim + 4)], contiguous in a page");
  return pages;
}

// Asks for huge pages before the first write: crossing small pages slows streaming.
void in_huge_pages([[maybe_unused]] const Tensor& memory) {
#ifdef MADV_HUGEPAGE
  constexpr uintptr_t kHugePage = 1 << 21;
  const auto begin = reinterpret_cast<uintptr_t>(memory.data_ptr()), end = begin + memory.nbytes();
  const uintptr_t first = (begin + kHugePage - 1) / kHugePage * kHugePage, last = end / kHugePage * kHugePage;
  if (first < last) madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
#endif
}

// Memory for `count` packed weights of the shape [out, in] of `weight`.
Tensor empty_packed(const Tensor& weight, int64_t count) {
  Tensor packed;
  with_type(weight, [&]<typename T>(T) {
    const int64_t n = weight.size(0), k = weight.size(1);
    TORCH_CHECK(k % kPerWord<T> == 0, "cpd kernels: a row must be whole 32-bit words");
    packed = at::empty({count, divide_up(n, kPanel), k / kPerWord<T>, kPanel * kPerWord<T>}, weight.options());
    in_huge_pages(packed);
  });
  return packed;
}

void pack_into(const Tensor& weight, const Tensor& packed) {
  with_type(weight, [&]<typename T>(T) {
    const int64_t n = weight.size(0), k = weight.size(1);
    TORCH_CHECK(packed.size(0) == divide_up(n, kPanel) && packed.size(1) * kPerWord<T> == k, "cpd::pack_into: wrong shape");
    pack(data<T>(weight), n, k, reinterpret_cast<uint32_t*>(data<T>(packed)));
  });
}

Format format_of(int64_t bits, bool minima) {
  TORCH_CHECK(bits == 4 || (bits == 8 && !minima), "cpd kernels: there is no such format");
  return bits == 8 ? Format::kInt8 : minima ? Format::kInt4Min : Format::kInt4;
}

// Memory for `count` quantised weights [n, k].
Tensor empty_quantized(int64_t n, int64_t k, int64_t bits, bool minima, int64_t count) {
  TORCH_CHECK(k % kGroup == 0, "cpd kernels: a row must be whole groups");
  const Tensor packed = at::empty({count, divide_up(n, kPanel), k / kGroup, group_bytes(format_of(bits, minima))}, at::kByte);
  in_huge_pages(packed);
  return packed;
}

// weight: bytes [n, k]; scales and minima: float16 [n, groups of k].
void pack_quantized_into(const Tensor& weight, const Tensor& scales, const OptionalTensor& minima, int64_t bits,
                         const Tensor& packed) {
  const int64_t n = weight.size(0), k = weight.size(1);
  const Format format = format_of(bits, minima.has_value());
  auto halves = [&](const Tensor& x) {
    TORCH_CHECK(x.is_contiguous() && x.scalar_type() == at::kHalf && x.numel() == n * (k / kGroup),
                "cpd::pack_quantized_into: wrong scales");
    return static_cast<const uint16_t*>(x.data_ptr());
  };
  TORCH_CHECK(weight.is_contiguous() && weight.scalar_type() == at::kByte && packed.is_contiguous() &&
                  packed.scalar_type() == at::kByte && packed.size(0) == divide_up(n, kPanel) &&
                  packed.size(1) * kGroup == k && packed.size(2) == group_bytes(format),
              "cpd::pack_quantized_into: wrong shape");
  pack_quantized(weight.data_ptr<uint8_t>(), halves(scales), minima ? halves(*minima) : nullptr, n, k, format,
                 packed.data_ptr<uint8_t>());
}

Tensor linear_op(const Tensor& x, const Tensor& weight, const OptionalTensor& bias, int64_t n) {
  const int64_t m = x.size(0), k = x.size(1);
  Tensor y = at::empty({m, n}, x.options());
  with_type(x, [&]<typename T>(T) {
    TORCH_CHECK(inner_size<T>(weight) == k && weight.size(0) == divide_up(n, kPanel), "cpd::linear: wrong shape");
    const T *from = data<T>(x), *bias_data = data<T>(bias);
    T* to = data<T>(y);
    const Weight packed = weight_of<T>(weight);
    const Tensor quantized = packed.is_plain() ? Tensor() : empty_quantized_rows(m, k);
    uint32_t* rows = packed.is_plain() ? nullptr : words(quantized);
    // With few rows, reading the weights dominates.
    run_team(n * k * (m + 8) > kParallelWork,
             [=](Team& team) { linear(team, from, m, k, packed, n, bias_data, to, rows); });
  });
  return y;
}

Tensor rms_norm_op(const Tensor& x, const Tensor& weight, double eps) {
  const int64_t m = x.size(0), n = x.size(1);
  Tensor y = at::empty({m, n}, x.options());
  with_type(x, [&]<typename T>(T) {
    const T *from = data<T>(x), *scale = data<T>(weight);
    T* to = data<T>(y);
    run_team(m * n * 32 > kParallelWork,
             [=](Team& team) { rms_norm(team, from, m, n, scale, eps, to); });
  });
  return y;
}

std::tuple<Tensor, Tensor> top_k_op(const Tensor& x, int64_t count) {
  const int64_t m = x.size(0), n = x.size(1);
  TORCH_CHECK(0 < count && count <= n, "cpd::top_k: there are ", n, " columns, not ", count);
  const Tensor values = at::empty({m, count}, x.options().dtype(at::kFloat));
  const Tensor columns = at::empty({m, count}, x.options().dtype(at::kLong));
  with_type(x, [&]<typename T>(T) {
    const T* from = data<T>(x);
    float* to = data<float>(values);
    int64_t* to_columns = columns.data_ptr<int64_t>();
    run_team(m * n * 8 > kParallelWork, [=](Team& team) {
      team.ranges(m, [=](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; ++row) {
          const std::vector<Candidate> best = top_k(from + row * n, n, count);
          for (int64_t i = 0; i < count; ++i) {
            to[row * count + i] = best[i].value;
            to_columns[row * count + i] = best[i].column;
          }
        }
      });
    });
  });
  return {values, columns};
}

const int64_t* longs(const Tensor& x) {
  TORCH_CHECK(x.is_contiguous() && x.scalar_type() == at::kLong, "cpd kernels: a tensor must be contiguous int64");
  return x.data_ptr<int64_t>();
}

// Changes of each row, from nothing or (starts, tokens, numbers): see engine/ops/draw.py.
std::vector<Changes> changes_of(at::TensorList all, int64_t rows) {
  std::vector<Changes> changes(rows);
  if (all.empty()) return changes;
  TORCH_CHECK(all.size() == 3 && all[0].numel() == rows + 1 && all[1].numel() == all[2].numel(), "cpd::draw: wrong changes");
  const int64_t* starts = longs(all[0]);
  TORCH_CHECK(starts[0] == 0 && starts[rows] == all[1].numel(), "cpd::draw: wrong changes");
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t start = starts[row];
    changes[row] = {longs(all[1]) + start, data<float>(all[2]) + start, starts[row + 1] - start};
  }
  return changes;
}

Tensor draw_op(const Tensor& logits, const Tensor& temperatures, const Tensor& top_k, const Tensor& top_p,
               const Tensor& min_p, const Tensor& keys, at::TensorList factors, at::TensorList additions) {
  const int64_t m = logits.size(0), n = logits.size(1);
  for (const Tensor& one : {temperatures, top_k, top_p, min_p})
    TORCH_CHECK(one.dim() == 1 && one.size(0) == m, "cpd::draw: wrong number of rows");
  TORCH_CHECK(n > 0 && keys.dim() == 2 && keys.size(0) == m && keys.size(1) == 2, "cpd::draw: no tokens, or wrong keys");
  std::vector<Draw> draws(m);
  for (int64_t row = 0; row < m; ++row) {
    const auto* key = reinterpret_cast<const uint32_t*>(ints(keys) + 2 * row);
    draws[row] = {data<float>(temperatures)[row],
                  longs(top_k)[row],
                  data<float>(top_p)[row],
                  data<float>(min_p)[row],
                  {key[0], key[1]}};
  }
  struct Rows {
    std::vector<Draw> draws;
    std::vector<Changes> factors, additions;
  };
  const auto rows = std::make_shared<const Rows>(Rows{std::move(draws), changes_of(factors, m), changes_of(additions, m)});
  const Tensor tokens = at::empty({m}, logits.options().dtype(at::kLong));
  with_type(logits, [&]<typename T>(T) {
    const T* from = data<T>(logits);
    int64_t* to = tokens.data_ptr<int64_t>();
    run_team(m > 1 && m * n * 64 > kParallelWork, [=](Team& team) {
      team.each(m, [&](int64_t row) {
        thread_local Likely likely;
        to[row] = draw_changed(from + row * n, n, rows->factors[row], rows->additions[row], rows->draws[row], likely);
      });
    });
  });
  return tokens;
}

Tensor log_sum_exp_op(const Tensor& x) {
  const int64_t m = x.size(0), n = x.size(1);
  const Tensor y = at::empty({m}, x.options().dtype(at::kFloat));
  with_type(x, [&]<typename T>(T) {
    const T* from = data<T>(x);
    float* to = data<float>(y);
    run_team(m > 1 && m * n * 64 > kParallelWork,
             [=](Team& team) { team.each(m, [=](int64_t row) { to[row] = log_sum_exp(from + row * n, n); }); });
  });
  return y;
}

void mask_logits_op(const Tensor& logits, const Tensor& rows, const Tensor& masks) {
  const int64_t n = logits.size(1), count = rows.size(0);
  TORCH_CHECK(masks.is_contiguous() && masks.scalar_type() == at::kInt && masks.size(0) == count &&
                  masks.size(1) == divide_up(n, 32) && rows.is_contiguous() && rows.scalar_type() == at::kLong,
              "cpd::mask_logits: wrong masks or rows");
  const int64_t* row = rows.data_ptr<int64_t>();
  for (int64_t i = 0; i < count; ++i) TORCH_CHECK(0 <= row[i] && row[i] < logits.size(0), "cpd::mask_logits: wrong row");
  with_type(logits, [&]<typename T>(T) {
    T* to = data<T>(logits);
    const auto* words = reinterpret_cast<const uint32_t*>(masks.data_ptr<int32_t>());
    run_team(count * n * 8 > kParallelWork, [=](Team& team) {
      team.ranges(count, [=](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) mask_row(to + row[i] * n, words + i * divide_up(n, 32), n);
      });
    });
  });
}

void add_rms_norm_op(const Tensor& x, const Tensor& residual, const Tensor& weight, double eps) {
  const int64_t m = x.size(0), n = x.size(1);
  with_type(x, [&]<typename T>(T) {
    T *in_place = data<T>(x), *sum = data<T>(residual);
    const T* scale = data<T>(weight);
    run_team(m * n * 32 > kParallelWork,
             [=](Team& team) { add_rms_norm(team, in_place, m, n, sum, scale, eps, in_place); });
  });
}

Tensor silu_mul_op(const Tensor& gate_up) {
  const int64_t m = gate_up.size(0), n = gate_up.size(1) / 2;
  Tensor y = at::empty({m, n}, gate_up.options());
  with_type(gate_up, [&]<typename T>(T) {
    const T* from = data<T>(gate_up);
    T* to = data<T>(y);
    run_team(m * n * 64 > kParallelWork, [=](Team& team) { silu_mul(team, from, m, n, to); });
  });
  return y;
}

void rope_store_op(const Tensor& qkv, const Tensor& positions, const Tensor& slots, const Tensor& cos_sin,
                   const OptionalTensor& q_norm, const OptionalTensor& k_norm, double eps, const Tensor& kv) {
  with_type(qkv, [&]<typename T>(T) {
    const auto pages = pages_of<T>(kv);
    const int64_t m = qkv.size(0), heads = qkv.size(1) / pages.dim - 2 * pages.heads;
    const int32_t *position = ints(positions), *slot = ints(slots);
    const float* table = data<float>(cos_sin);
    const T *q_scale = data<T>(q_norm), *k_scale = data<T>(k_norm);
    T* in_place = data<T>(qkv);
    run_team(qkv.numel() * 64 > kParallelWork, [=](Team& team) {
      rope_store(team, in_place, m, heads, position, slot, table, q_scale, k_scale, eps, pages);
    });
  });
}

Tensor experts_op(const Tensor& x, const Tensor& logits, const Tensor& gate_up, const Tensor& down, int64_t width,
                  int64_t per_token, bool normalize) {
  const int64_t m = x.size(0), hidden = x.size(1);
  const ExpertsShape shape{gate_up.size(0), per_token, width, normalize};
  TORCH_CHECK(logits.size(0) == m && logits.size(1) == shape.count, "cpd::experts: the router's output has the wrong shape");
  Tensor y = at::empty({m, hidden}, x.options());
  auto buffer = [&](int64_t columns) { return at::empty({m * per_token, columns}, x.options()); };
  const Tensor rows = buffer(hidden), both = buffer(2 * width), product = buffer(width);
  with_type(x, [&]<typename T>(T) {
    const T *from = data<T>(x), *router = data<T>(logits);
    check_experts<T>(shape, hidden, gate_up, down);
    const Weight packed_gate_up = weight_of<T>(gate_up), packed_down = weight_of<T>(down);
    const bool are_plain = packed_gate_up.is_plain() && packed_down.is_plain();
    const Tensor quantized = are_plain ? Tensor() : empty_quantized_rows(m * per_token, std::max(hidden, width));
    uint32_t* quantized_rows = are_plain ? nullptr : words(quantized);
    T* to = data<T>(y);
    T *row_data = data<T>(rows), *both_data = data<T>(both), *product_data = data<T>(product);
    const auto routed = std::make_shared<Routed>(m, shape);
    run_team(3 * m * per_token * width * hidden * 9 > kParallelWork, [=](Team& team) {
      const ExpertMemory<T> memory{row_data, both_data, product_data, quantized_rows, routed.get(), nullptr};
      run_experts(team, from, m, hidden, router, shape, packed_gate_up, packed_down, memory, to);
    });
  });
  return y;
}

Sequences sequences_of(const Tensor& query_start, const Tensor& context_lens, const Tensor& block_tables) {
  return {ints(query_start), ints(context_lens), ints(block_tables), context_lens.size(0), block_tables.size(1)};
}

Tensor attention_op(const Tensor& q, const Tensor& kv, const Tensor& query_start, const Tensor& context_lens,
                    const Tensor& block_tables, double scale, int64_t window) {
  const int64_t m = q.size(0), heads = q.size(1), dim = q.size(2);
  TORCH_CHECK(q.stride(2) == 1 && q.stride(1) == dim, "cpd::attention: a token's heads must be contiguous");
  Tensor out = at::empty({m, heads * dim}, q.options());
  with_type(q, [&]<typename T>(T) {
    const auto pages = pages_of<T>(kv);
    const auto plan = std::make_shared<AttentionPlan>(sequences_of(query_start, context_lens, block_tables), heads,
                                                      pages.heads, dim, window ? window : kNoWindow, at::get_num_threads());
    const bool parallel = plan->work * dim * 4 > kParallelWork;
    const auto memory = std::make_shared<AttentionMemory<T>>(*plan, team_size(parallel));
    const auto* from = static_cast<const T*>(q.data_ptr());
    const int64_t stride = q.stride(0);
    T* to = data<T>(out);
    run_team(parallel, [=](Team& team) {
      Attention<T>(*plan, *memory, pages, scale).run(team, plan->tiles, from, stride, to);
    });
  });
  return out;
}

// weights: twelve for each layer in the order of Layer's fields, then the final norm and the packed head. windows: 0 for
// none; routers: null in layers without experts; both are empty if all layers are so.
Tensor layers_op(const Tensor& residual, const c10::List<OptionalTensor>& weights, const c10::List<Tensor>& kv,
                 const Tensor& cos_sin, const Tensor& positions, const Tensor& slots, const Tensor& query_start,
                 const Tensor& context_lens, const Tensor& block_tables, const OptionalTensor& rows, int64_t num_rows,
                 int64_t intermediate, int64_t vocab, double eps, double scale, const Tensor& progress,
                 at::IntArrayRef windows, const c10::List<OptionalTensor>& routers, int64_t expert_width,
                 int64_t experts_per_token, bool normalize, const Tensor& expert_bytes) {
  const int64_t tokens = residual.size(0), hidden = residual.size(1);
  Tensor logits = at::empty({num_rows, vocab}, residual.options());
  with_type(residual, [&]<typename T>(T) {
    Decoder<T> model;
    int64_t next = 0;
    auto plain = [&] { return data<T>(weights.get(next++)); };
    bool is_quantized = false;
    auto packed = [&] {
      const Weight weight = weight_of<T>(*weights.get(next++));
      is_quantized |= !weight.is_plain();
      return weight;
    };
    std::vector<int64_t> distinct;  // windows
    for (size_t i = 0; i < kv.size(); ++i) {
      const int64_t window = windows.empty() || windows[i] == 0 ? kNoWindow : windows[i];
      const size_t planned = std::find(distinct.begin(), distinct.end(), window) - distinct.begin();
      if (planned == distinct.size()) distinct.push_back(window);
      const OptionalTensor router = routers.empty() ? OptionalTensor() : routers.get(i);
      if (router) {
        const Tensor gate_up = *weights.get(next + 8), down = *weights.get(next + 10);
        model.experts = {gate_up.size(0), experts_per_token, expert_width, normalize};
        check_experts<T>(model.experts, hidden, gate_up, down);
      }
      model.layers.push_back({plain(), packed(), plain(), plain(), plain(), packed(), plain(), plain(), packed(), plain(),
                              packed(), plain(), pages_of<T>(kv.get(i)), router ? weight_of<T>(*router) : Weight(), planned});
    }
    const Pages<T>& pages = model.layers.at(0).pages;
    model.norm = plain();
    model.head = packed();
    model.cos_sin = data<float>(cos_sin);
    model.hidden = hidden;
    model.heads = inner_size<T>(*weights.get(5)) / pages.dim;
    model.intermediate = intermediate;
    model.vocab = vocab;
    model.eps = eps;
    model.scale = scale;
    model.progress = progress.data_ptr<int64_t>();

    const ExpertsShape& experts = model.experts;
    const int64_t pairs = tokens * experts.per_token;
    auto buffer = [&](int64_t rows, int64_t width) { return at::empty({rows, width}, residual.options()); };
    const Tensor normed = buffer(tokens, hidden), residual_rows = buffer(num_rows, hidden);
    const Tensor qkv = buffer(tokens, (model.heads + 2 * pages.heads) * pages.dim);
    const Tensor attention = buffer(tokens, model.heads * pages.dim);
    const int64_t width = std::max(tokens * intermediate, pairs * experts.width);
    const Tensor gate_up = buffer(2, width), product = buffer(1, width);
    Activations<T> activations{data<T>(normed),        data<T>(qkv),     data<T>(attention),
                               data<T>(residual_rows), data<T>(gate_up), data<T>(product), nullptr, nullptr};
    Tensor quantized, router, expert_rows;
    if (is_quantized) {
      const int64_t dense = std::max({hidden, model.heads * pages.dim, intermediate});
      quantized = empty_quantized_rows(1, std::max(tokens * dense, pairs * std::max(hidden, experts.width)));
      activations.quantized = words(quantized);
    }
    std::unique_ptr<Routed> routed;
    ExpertMemory<T> expert_memory{};
    if (experts.count) {
      router = buffer(tokens, experts.count);
      expert_rows = buffer(pairs, hidden);
      activations.router = data<T>(router);
      routed = std::make_unique<Routed>(tokens, experts);
      expert_memory = {data<T>(expert_rows), activations.gate_up, activations.product, activations.quantized, routed.get(),
                       expert_bytes.data_ptr<int64_t>()};
    }

    const int32_t* row_data = rows ? ints(*rows) : nullptr;
    std::vector<PlannedAttention<T>> planned;
    for (const int64_t window : distinct) {
      AttentionPlan plan(sequences_of(query_start, context_lens, block_tables), model.heads, pages.heads, pages.dim, window,
                         at::get_num_threads());
      auto wanted = rows ? plan.tiles_of(row_data, num_rows) : plan.tiles;
      AttentionMemory<T> memory(plan, team_size(true));
      planned.push_back({std::move(plan), std::move(wanted), std::move(memory)});
    }
    const Step<T> step{tokens, ints(positions), ints(slots), row_data, num_rows, data<T>(residual), data<T>(logits)};
    const auto run = std::make_shared<const Run<T>>(
        Run<T>{std::move(model), step, activations, std::move(planned), expert_memory, std::move(routed)});
    run_team(true, [run](Team& team) { run_layers(team, *run); });
  });
  return logits;
}

}  // namespace

TORCH_LIBRARY(cpd, m) {
  m.def("empty_packed(Tensor weight, int count) -> Tensor", empty_packed);
  m.def("pack_into(Tensor weight, Tensor(a!) packed) -> ()", pack_into);
  m.def("empty_quantized(int n, int k, int bits, bool minima, int count) -> Tensor", empty_quantized);
  m.def(
      "pack_quantized_into(Tensor weight, Tensor scales, Tensor? minima, int bits, Tensor(a!) packed) -> ()",
      pack_quantized_into);
  m.def("linear(Tensor x, Tensor weight, Tensor? bias, int out_features) -> Tensor", linear_op);
  m.def("rms_norm(Tensor x, Tensor weight, float eps) -> Tensor", rms_norm_op);
  m.def("add_rms_norm(Tensor(a!) x, Tensor(b!) residual, Tensor weight, float eps) -> ()", add_rms_norm_op);
  m.def("top_k(Tensor x, int count) -> (Tensor, Tensor)", top_k_op);
  m.def(
      "draw(Tensor logits, Tensor temperatures, Tensor top_k, Tensor top_p, Tensor min_p, Tensor keys, Tensor[] factors, "
      "Tensor[] additions) -> Tensor",
      draw_op);
  m.def("log_sum_exp(Tensor x) -> Tensor", log_sum_exp_op);
  m.def("mask_logits(Tensor(a!) logits, Tensor rows, Tensor masks) -> ()", mask_logits_op);
  m.def(
      "experts(Tensor x, Tensor router_output, Tensor gate_up, Tensor down, int width, int per_token, bool normalize) -> "
      "Tensor",
      experts_op);
  m.def("silu_mul(Tensor gate_up) -> Tensor", silu_mul_op);
  m.def(
      "rope_store(Tensor(a!) qkv, Tensor positions, Tensor slots, Tensor cos_sin, Tensor? q_norm, Tensor? k_norm, "
      "float eps, Tensor(b!) kv) -> ()",
      rope_store_op);
  m.def(
      "attention(Tensor q, Tensor kv, Tensor query_start, Tensor context_lens, Tensor block_tables, float scale, "
      "int window) -> Tensor",
      attention_op);
  m.def(
      "layers(Tensor(a!) residual, Tensor?[] weights, Tensor(b!)[] kv, Tensor cos_sin, Tensor positions, Tensor slots, "
      "Tensor query_start, Tensor context_lens, Tensor block_tables, Tensor? rows, int num_rows, int intermediate, int vocab, "
      "float eps, float scale, Tensor(c!) progress, int[] windows, Tensor?[] routers, int expert_width, int experts_per_token, "
      "bool normalize, Tensor(d!) expert_bytes) -> Tensor",
      layers_op);
}

}  // namespace cpd
