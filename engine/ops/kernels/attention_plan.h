// Divides a step's attention into tiles, which are the same for all layers with the same window.
//
// A tile is some queries of one sequence for some key-value heads, each with the group of query heads that share it. A
// decode is a tile of one query. Long contexts are computed in splits of kSplit tokens from position 0, and the results
// are merged in order. If a sequence's queries fit into one tile, its splits are separate tiles, so that one long
// context does not delay the batch. The result has the same bits either way.
//
// With a window, a tile begins with the block that has the first token its first query attends to. A block before that
// would change no bit of the result: all its weights would be 0.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <tuple>
#include <vector>

#include "linear.h"

namespace cpd {

constexpr int64_t kBlock = 64;  // tokens scored at once
constexpr int64_t kSplit = 512;  // a multiple of kBlock
constexpr int64_t kTileRows = 96;  // most rows (query, query head) that share a loaded key or value
constexpr int64_t kTilesPerThread = 4;
constexpr int64_t kNoWindow = int64_t(1) << 32;  // more tokens than any context has

struct Sequences {
  const int32_t *query_start, *context_lens, *block_tables;
  int64_t count, table_width;
};

// The step's tokens [first, first + queries), the first one at `position`, over context [begin, end), for key-value
// heads [first_head, last_head).
struct Tile {
  int64_t sequence, first, queries, position, begin, end;
  int64_t part;   // Index of its partial result, to be merged with those of other splits; -1 if it is complete.
  int64_t parts;  // Number of splits, for the first one; 0 for the others.
  int64_t first_head = 0, last_head = 0;
};

struct AttentionPlan {
  Sequences sequences;
  int64_t heads, kv_heads, dim;
  int64_t window;           // A query attends to so many last tokens, its own included.
  std::vector<Tile> tiles;  // Largest work first, roughly.
  int64_t parts = 0;        // Number of partial results.
  int64_t part_rows = 0;    // Most rows of a partial result, all heads.
  int64_t rows = 0;         // Rows of the largest tile.
  int64_t work = 0;         // Products of a query and a key.

  AttentionPlan(const Sequences& sequences, int64_t heads, int64_t kv_heads, int64_t dim, int64_t window, int64_t threads)
      : sequences(sequences), heads(heads), kv_heads(kv_heads), dim(dim), window(window) {
    std::vector<Tile> whole;
    for (int64_t s = 0; s < sequences.count; ++s) cut_sequence(s, whole);
    // A tile of all heads reads its pages sequentially, but every thread needs tiles.
    const int64_t most_heads = std::max<int64_t>(1, kv_heads * whole.size() / (kTilesPerThread * threads));
    for (Tile& tile : whole) {
      const int64_t tile_heads = std::clamp<int64_t>(kTileRows / (tile.queries * group()), 1, most_heads);
      const int64_t pieces = divide_up(kv_heads, tile_heads);
      for (int64_t i = 0; i < pieces; ++i) {
        tile.first_head = kv_heads * i / pieces;
        tile.last_head = kv_heads * (i + 1) / pieces;
        rows = std::max(rows, tile.queries * group() * (tile.last_head - tile.first_head));
        tiles.push_back(tile);
      }
    }
    // Tiles of one head are adjacent, so that its keys and values are still cached, but large tiles do not come last.
    auto key = [](const Tile& tile) {
      const int64_t cost = tile.queries * (tile.end - tile.begin) * (tile.last_head - tile.first_head);
      return std::tuple(-int(std::bit_width(uint64_t(cost))), tile.sequence, tile.first_head, -cost);
    };
    std::stable_sort(tiles.begin(), tiles.end(), [&](const Tile& a, const Tile& b) { return key(a) < key(b); });
  }

  int64_t group() const { return heads / kv_heads; }

  // Tiles that compute at least one of the tokens `wanted`, which ascend.
  std::vector<Tile> tiles_of(const int32_t* wanted, int64_t count) const {
    std::vector<Tile> result;
    for (const Tile& tile : tiles) {
      const int32_t* token = std::lower_bound(wanted, wanted + count, tile.first);
      if (token != wanted + count && *token < tile.first + tile.queries) result.push_back(tile);
    }
    return result;
  }

 private:
  // Begin of the first block that a query at `position` attends to.
  int64_t first_block(int64_t position) const { return std::max<int64_t>(0, position + 1 - window) / kBlock * kBlock; }

  void cut_sequence(int64_t s, std::vector<Tile>& whole) {
    const int64_t start = sequences.query_start[s], queries = sequences.query_start[s + 1] - start;
    const int64_t context = sequences.context_lens[s], position = context - queries;
    const int64_t pieces = divide_up(queries, std::max<int64_t>(1, kTileRows / group()));
    const int64_t begin = first_block(position), first_split = begin / kSplit;
    const int64_t splits = divide_up(context, kSplit) - first_split;
    work += queries * (context - begin) * heads;
    if (pieces == 1 && splits > 1) {
      part_rows = std::max(part_rows, queries * heads);
      for (int64_t i = 0; i < splits; ++i, ++parts) {
        const int64_t split = (first_split + i) * kSplit;
        whole.push_back({s, start, queries, position, std::max(begin, split), std::min(context, split + kSplit), parts,
                         i == 0 ? splits : 0});
      }
      return;
    }
    for (int64_t i = 0; i < pieces; ++i) {
      const int64_t from = queries * i / pieces, to = queries * (i + 1) / pieces;
      whole.push_back({s, start + from, to - from, position + from, first_block(position + from), position + to, -1, 0});
    }
  }
};

}  // namespace cpd
