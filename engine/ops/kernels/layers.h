// A step through all layers of a decoder, made of the stages in the other files.
#pragma once

#include <atomic>
#include <vector>

#include "attention.h"
#include "linear.h"
#include "rows.h"

namespace cpd {

// Weights of one layer. Those of linear layers are packed; biases and head norms are null if the model has none.
template <typename T>
struct Layer {
  const T* input_norm;
  const uint32_t* qkv;
  const T *qkv_bias, *q_norm, *k_norm;
  const uint32_t* o;
  const T *o_bias, *post_norm;
  const uint32_t* gate_up;
  const T* gate_up_bias;
  const uint32_t* down;
  const T* down_bias;
  Pages<T> pages;
};

template <typename T>
struct Decoder {
  std::vector<Layer<T>> layers;
  const T* norm;         // final norm
  const uint32_t* head;  // packed LM head
  const float* cos_sin;  // [positions, head dim]
  int64_t* progress;     // Counter of computed layers, which other threads read.
  int64_t hidden, heads, intermediate, vocab;
  float eps, scale;
};

template <typename T>
struct Step {
  int64_t tokens;
  const int32_t *positions, *slots;
  const int32_t* rows;  // Tokens whose logits to compute, ascending; null for all.
  int64_t num_rows;
  T* residual;  // [tokens, hidden], initially the embeddings
  T* logits;    // [num_rows, vocab]
};

// Activations between the stages.
template <typename T>
struct Activations {
  T *normed, *qkv, *attention, *residual_rows, *gate_up, *product;
};

// Everything that a step needs.
template <typename T>
struct Run {
  Decoder<T> model;
  Step<T> step;
  Activations<T> buffer;
  AttentionPlan plan;
  std::vector<Tile> wanted;  // tiles of the last layer
  AttentionMemory<T> memory;
};

template <typename T>
void gather_rows(Team& team, const T* from, const int32_t* rows, int64_t count, int64_t n, T* to) {
  team.ranges(count, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) std::memcpy(to + i * n, from + rows[i] * n, n * sizeof(T));
  });
}

// Called on every thread of the team.
template <typename T>
void run_layers(Team& team, const Run<T>& run) {
  const auto& [model, step, buffer, plan, wanted, memory] = run;
  const int64_t hidden = model.hidden, heads_width = model.heads * plan.dim;
  const int64_t qkv_width = heads_width + 2 * plan.kv_heads * plan.dim;
  T *residual = step.residual, *attention = buffer.attention;
  int64_t tokens = step.tokens;
  rms_norm(team, residual, tokens, hidden, model.layers[0].input_norm, model.eps, buffer.normed);
  for (size_t index = 0; index < model.layers.size(); ++index) {
    const Layer<T>& layer = model.layers[index];
    const bool last = index + 1 == model.layers.size();
    linear(team, buffer.normed, tokens, hidden, layer.qkv, qkv_width, layer.qkv_bias, buffer.qkv);
    rope_store(team, buffer.qkv, tokens, model.heads, step.positions, step.slots, model.cos_sin, layer.q_norm,
               layer.k_norm, model.eps, layer.pages);
    if (last && step.num_rows == 0) return;
    Attention<T>(plan, memory, layer.pages, model.scale)
        .run(team, last ? wanted : plan.tiles, buffer.qkv, qkv_width, attention);
    if (last && step.rows) {  // From here on nothing depends on the other tokens.
      tokens = step.num_rows;
      gather_rows(team, attention, step.rows, tokens, heads_width, buffer.qkv);
      gather_rows(team, residual, step.rows, tokens, hidden, buffer.residual_rows);
      attention = buffer.qkv;
      residual = buffer.residual_rows;
    }
    linear(team, attention, tokens, heads_width, layer.o, hidden, layer.o_bias, buffer.normed);
    add_rms_norm(team, buffer.normed, tokens, hidden, residual, layer.post_norm, model.eps, buffer.normed);
    linear(team, buffer.normed, tokens, hidden, layer.gate_up, 2 * model.intermediate, layer.gate_up_bias,
           buffer.gate_up);
    silu_mul(team, buffer.gate_up, tokens, model.intermediate, buffer.product);
    linear(team, buffer.product, tokens, model.intermediate, layer.down, hidden, layer.down_bias, buffer.normed);
    add_rms_norm(team, buffer.normed, tokens, hidden, residual, last ? model.norm : model.layers[index + 1].input_norm,
                 model.eps, buffer.normed);
    if (team.id() == 0) std::atomic_ref(*model.progress).fetch_add(1, std::memory_order_relaxed);
  }
  linear<T>(team, buffer.normed, tokens, hidden, model.head, model.vocab, nullptr, step.logits);
}

}  // namespace cpd
