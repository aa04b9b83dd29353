// Forward of attention on tensor cores (Dao, "FlashAttention-2", 2023), for any map. A warp holds 16 or 32
// rows of scores and outputs in registers; weights go from the first product to the second without leaving
// them. mma.sync leaves other instructions little room, one costs a quarter of a product: so there are few.
#include <limits>

#include "torus/ops/attention/cuda_mma.h"

namespace torus::gpu::mma {

namespace {

constexpr int threads = 128;

struct ForwardArguments {
  Operand q, k, v, out;
  float* lse;
  int32_t heads, group;  // group: query heads that share keys
  int64_t queries;
  int width, value_width;
  bool packs, packs_out;  // rows start at multiples of 16 bytes
  ScoreArguments scores;
  MapTable maps;
  GroupedTable pairs;  // those of pairs of tiles; views null: go by `maps`
  Schedule schedule;
};

template <int width, int tiles, int stages>
constexpr size_t forward_memory = size_t{64} * (tiles + 2 * stages) * width * 2;

// What a warp makes of `tiles` times 16 rows: outputs, and what belongs to them.
template <class T, int width, int tiles, int columns>
struct Rows {
  float out[tiles][width / 8][4] = {};
  float base[tiles][2], total[tiles][2] = {};  // weights are 2^(score - base), scores in units of log 2
  uint32_t weights[tiles][columns / 2][4];

  __device__ Rows() {
#pragma unroll
    for (int m = 0; m < tiles; ++m) base[m][0] = base[m][1] = -infinity;
  }

  // Weights of 8 * columns scores a row. They are made as if no score were much larger than those before; if
  // one is, which their sums tell without looking for it, or a row has seen none yet, they are made again.
  __device__ void weigh(const float (&s)[tiles][columns][4], float to_log2) {
    float sum[tiles][2];
    const auto make = [&](const float(&from)[tiles][2]) {
#pragma unroll
      for (int m = 0; m < tiles; ++m) {
        sum[m][0] = sum[m][1] = 0;
#pragma unroll
        for (int j = 0; j < columns; ++j)
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const float first = approximate_exp2(fmaf(s[m][j][2 * half], to_log2, -from[m][half]));
            const float second = approximate_exp2(fmaf(s[m][j][2 * half + 1], to_log2, -from[m][half]));
            sum[m][half] += first, sum[m][half] += second;
            weights[m][j / 2][j % 2 * 2 + half] = pack<T>(first, second);
          }
      }
    };
    constexpr float most = 32768;  // what fits f16
    make(base);
    bool fits = true;  // not if a sum is infinite or not a number, as those of rows without a base are
#pragma unroll
    for (int m = 0; m < tiles; ++m) fits = fits && sum[m][0] < most && sum[m][1] < most;
    if (!__all_sync(0xffffffffu, fits)) {
      float from[tiles][2];
#pragma unroll
      for (int m = 0; m < tiles; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float largest = -infinity;
#pragma unroll
          for (int j = 0; j < columns; ++j)
            largest = fmaxf(largest, fmaxf(s[m][j][2 * half], s[m][j][2 * half + 1]));
          const float before = base[m][half], now = fmaxf(before, quad_max(largest) * to_log2);
          const float factor = now == before ? 1 : approximate_exp2(before - now);
          base[m][half] = now;
          from[m][half] = now == -infinity ? 0 : now;
          total[m][half] *= factor;
#pragma unroll
          for (int j = 0; j < width / 8; ++j)
            out[m][j][2 * half] *= factor, out[m][j][2 * half + 1] *= factor;
        }
      make(from);
    }
#pragma unroll
    for (int m = 0; m < tiles; ++m) total[m][0] += sum[m][0], total[m][1] += sum[m][1];
  }

  // Adds the weights' product with rows of values from `row` on.
  __device__ void add_values(const BlockAddress<width>& values, int row) {
    multiply<T, columns / 2, tiles, width / 16>(
        out,
        [&](int kk, uint32_t(&x)[tiles][4]) {
#pragma unroll
          for (int m = 0; m < tiles; ++m)
#pragma unroll
            for (int e = 0; e < 4; ++e) x[m][e] = weights[m][kk][e];
        },
        [&](int kk, int j, uint32_t(&y)[4]) { load_transposed(y, values.at(row + 16 * kk, 16 * j)); });
  }

  // `token(m, row)`: that of row 0 to 15 of m, -1 if there is none. Outputs pass through the warp's own rows
  // of `tile`.
  template <class Token>
  __device__ void store(const ForwardArguments& a, int64_t b, int64_t h, char* tile, int first_row,
                        float keep_scale, const Token& token) const {
    constexpr float ln_2 = 0.693147180559945309f;
    const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
    for (int m = 0; m < tiles; ++m) {
      float inverse[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float sum = quad_sum(total[m][half]);
        inverse[half] = sum == 0 ? 0 : keep_scale / sum;
        const int64_t query = token(m, lane / 4 + 8 * half);
        if (lane % 4 == 0 && query >= 0)
          a.lse[(b * a.heads + h) * a.queries + query] =
              sum == 0 ? -infinity : (base[m][half] + log2f(sum)) * ln_2;
      }
      store_rows<T, width>(tile, first_row + 16 * m, out[m], inverse, a.out.of<T>(b, h), a.out.row,
                           a.value_width, a.packs_out, [&](int row) { return token(m, row); });
    }
  }
};

// s = q k^T of `tiles` times 16 rows by 16 * pairs columns; `load_q(kk, x)` reads q.
template <class T, int width, int tiles, int pairs, class Q>
__device__ inline void make_scores(float (&s)[tiles][2 * pairs][4], const Q& load_q,
                                   const BlockAddress<width>& keys, int first_key) {
#pragma unroll
  for (int m = 0; m < tiles; ++m)
#pragma unroll
    for (int j = 0; j < 2 * pairs; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) s[m][j][e] = 0;
  multiply<T, width / 16, tiles, pairs>(s, load_q, [&](int kk, int j, uint32_t(&y)[4]) {
    load_matrices(y, keys.at(first_key + 16 * j, 16 * kk));
  });
}

// On a multiprocessor: as many as registers allow without spilling.
template <int width, bool general>
constexpr int blocks_at_once = general || width == 256 ? 2
                               : width == 64           ? 4
                                                       : 3;

// A tile of 64 queries. `width` is that of q, k and v, padded. With two stages keys and values are read a
// block ahead; with one, values are read while scores are made, and the next keys while these are used.
template <class T, int width, bool general, int stages>
__global__ void __launch_bounds__(threads, blocks_at_once<width, general>)
    forward(const __grid_constant__ ForwardArguments a) {
  constexpr bool keep_q = width <= 128;  // in registers
  extern __shared__ __align__(128) char memory[];
  __shared__ TileBlocks blocks;
  constexpr int tile_bytes = 64 * width * 2;
  char* const q_tile = memory;
  char* const k_tiles = q_tile + tile_bytes;
  char* const v_tiles = k_tiles + stages * tile_bytes;
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;

  int64_t tile, matrix;
  a.schedule.find(blockIdx.x, tile, matrix);
  const int32_t b = static_cast<int32_t>(matrix) / a.heads, h = static_cast<int32_t>(matrix) % a.heads;
  const MapView& map = a.maps.of(b, h);
  const SideView& side = map.query;
  if (tile >= side.tiles) return;
  const auto side_of = [&](int) { return MapSide{&side, map.fragments}; };
  if (thread < tile_size) blocks.start(side_of, tile, 1);

  const T* const k = a.k.of<const T>(b, h / a.group);
  const T* const v = a.v.of<const T>(b, h / a.group);
  load_tile<T, width, 64, threads>(q_tile, a.q.of<const T>(b, h), a.q.row, a.width, a.packs,
                                   [&](int row) { return owner(side, tile, row); });

  Rows<T, width, 1, 8> rows;
  uint32_t q_kept[keep_q ? width / 16 : 1][4];
  [[maybe_unused]] auto q_block = down_first<width>(q_tile, 16 * warp, lane);
  const auto k_block = across_first<width>(k_tiles, 0, lane);
  const auto v_block = down_first<width>(v_tiles, 0, lane);
  // Plain scores stay products.
  const float to_log2 = (general ? 1 : a.scores.scale) * log2_e;

  [[maybe_unused]] int64_t queries[2];
  [[maybe_unused]] uint32_t row_words[2];
  if constexpr (general) {
    const AttentionDropout dropout = a.scores.drawn();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      queries[half] = owner(side, tile, 16 * warp + lane / 4 + 8 * half);
      row_words[half] = dropout.row_word(matrix, queries[half]);
    }
  }

  const auto load_q = [&](int kk, uint32_t(&x)[1][4]) {
    if constexpr (keep_q)
#pragma unroll
      for (int e = 0; e < 4; ++e) x[0][e] = q_kept[kk][e];
    else
      load_matrices(x[0], q_block.at(0, 16 * kk));
  };

  using Copies = GatherCopies<T, width, 64, threads>;
  const Copies key_copies(k, a.k.row, a.width), value_copies(v, a.v.row, a.value_width);
  const auto load = [&](int i, bool keys, bool values) {
    char* const k_tile = k_tiles + i % stages * tile_bytes;
    char* const v_tile = v_tiles + i % stages * tile_bytes;
    const auto token = [&](int row) { return blocks.token(i, row); };
    if (a.packs) {
      typename Copies::Tokens read;
      Copies::read(read, token);
      if (keys) key_copies.start(k_tile, read);
      if (values) value_copies.start(v_tile, read);
    } else {
      if (keys) load_tile<T, width, 64, threads>(k_tile, k, a.k.row, a.width, false, token);
      if (values) load_tile<T, width, 64, threads>(v_tile, v, a.v.row, a.value_width, false, token);
    }
  };
  __syncthreads();  // blocks 0 and 1 are told
  if (blocks.block(0).there()) load(0, true, stages == 2);
  wait_for_copies();
  __syncthreads();
  if constexpr (keep_q)
#pragma unroll
    for (int kk = 0; kk < width / 16; ++kk) load_matrices(q_kept[kk], q_block.at(0, 16 * kk));

  for (int i = 0; blocks.block(i).there(); ++i) {
    wait_for_copies();
    __syncthreads();  // block i is there (with one stage its keys), all before is done with
    if constexpr (stages == 1) load(i, false, true);
    const uint32_t allowed = blocks.allowed(i, map.fragments, warp, lane);
    const bool more = blocks.block(i + 1).there();
    if constexpr (stages == 2)
      if (more) load(i + 1, true, true);
    TileBlocks::Found later;
    if (thread < tile_size) later = blocks.find(i + 2, side_of, tile, 1);
    auto k_now = k_block, v_now = v_block;
    k_now.row_start += i % stages * tile_bytes, v_now.row_start += i % stages * tile_bytes;
    q_block.computed_here(), k_now.computed_here(), v_now.computed_here();

    float s[1][8][4];
    make_scores<T, width, 1, 4>(s, load_q, k_now, 0);
    if constexpr (general) {
      uint32_t slope[8][2];
      finish_scores<T, true>(s[0], slope, a.scores, b, h, queries, [&](int j, int c) -> int64_t {
        return blocks.token(i, 8 * j + lane % 4 * 2 + c);
      });
    }
    if (__any_sync(0xffffffffu, allowed != ~0u)) keep_allowed(s[0], allowed, -infinity);
    rows.weigh(s, to_log2);
    if constexpr (general)
      if (a.scores.dropout.active())
#pragma unroll
        for (int j = 0; j < 8; ++j)
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            const auto key = static_cast<uint32_t>(blocks.token(i, 8 * j + lane % 4 * 2 + e % 2));
            if (AttentionDropout::mix(row_words[e / 2], key) < a.scores.threshold)
              rows.weights[0][j / 2][j % 2 * 2 + e / 2] &= e % 2 ? 0xffffu : 0xffff0000u;
          }

    if constexpr (stages == 1) {
      wait_for_copies();
      __syncthreads();  // values are there, keys are done with
      if (more) load(i + 1, true, false);
    }
    rows.add_values(v_now, 0);
    if (thread < tile_size) blocks.tell(i + 2, later);
  }

  rows.store(a, b, h, q_tile, 16 * warp, general ? a.scores.keep_scale : 1,
             [&](int, int row) { return owner(side, tile, 16 * warp + row); });
}

// Two tiles of 64 queries, which read keys and values half as often. Nothing gathers, and scores are plain.
// The blocks to go through come from a queue (for maps that are made on the device) or from a grouped map.
template <class T, int width, bool queued, int stages>
__global__ void __launch_bounds__(threads, 2) forward_of_pairs(const __grid_constant__ ForwardArguments a) {
  constexpr int tiles = 2;
  constexpr bool keep_q = width == 64;  // in registers
  extern __shared__ __align__(128) char memory[];
  constexpr int tile_bytes = 64 * width * 2;
  char* const q_tile = memory;
  char* const k_tiles = q_tile + tiles * tile_bytes;
  char* const v_tiles = k_tiles + stages * tile_bytes;
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;

  int64_t pair, matrix;
  a.schedule.find(blockIdx.x, pair, matrix);
  const int32_t b = static_cast<int32_t>(matrix) / a.heads, h = static_cast<int32_t>(matrix) % a.heads;
  const auto query = [&](int row) -> int64_t {
    const int64_t token = pair * tiles * tile_size + row;
    return token < a.queries ? token : -1;
  };
  load_tile<T, width, 64 * tiles, threads>(q_tile, a.q.of<const T>(b, h), a.q.row, a.width, a.packs, query);
  const T* const k = a.k.of<const T>(b, h / a.group);
  const T* const v = a.v.of<const T>(b, h / a.group);
  const RunCopies<T, width, 64, threads> key_copies(k, a.k.row, a.width),
      value_copies(v, a.v.row, a.value_width);

  // The warp's own rows: of tile `mine`, from row 16 * first_16 on.
  const int mine = warp / 2, first_16 = warp % 2 * 2;
  auto block = [&] {
    if constexpr (queued) {
      __shared__ PairWalk walk;
      const MapView& map = a.maps.of(b, h);
      const MapSide side{&map.query, map.fragments};
      if (thread == 0) walk.start(side, pair);
      __syncthreads();
      return QueuedBlocks(walk, side, mine);
    } else {
      return GroupedBlocks(a.pairs.of(b, h), pair, tiles, mine);
    }
  }();

  // With fewer scores at once there are registers for what products read ahead.
  constexpr int parts = width == 128 && stages == 2 ? 2 : 1, columns = 8 / parts;
  Rows<T, width, tiles, columns> rows;
  uint32_t q_kept[keep_q ? width / 16 : 1][tiles][4];
  [[maybe_unused]] auto q_block = down_first<width>(q_tile, 16 * tiles * warp, lane);
  const auto k_block = across_first<width>(k_tiles, 0, lane);
  const auto v_block = down_first<width>(v_tiles, 0, lane);
  const float to_log2 = a.scores.scale * log2_e;

  const auto load = [&](char* to, const auto& copies, const T* head, int64_t stride, int columns, int stage) {
    to += stage * tile_bytes;
    if (a.packs)
      copies.start(to, block.first(), block.count());
    else
      load_tile<T, width, 64, threads>(to, head, stride, columns, false, [&](int row) -> int64_t {
        return row < block.count() ? block.first() + row : -1;
      });
  };
  const auto load_keys = [&](int stage) { load(k_tiles, key_copies, k, a.k.row, a.width, stage); };
  const auto load_values = [&](int stage) { load(v_tiles, value_copies, v, a.v.row, a.value_width, stage); };
  const auto load_q = [&](int kk, uint32_t(&x)[tiles][4]) {
#pragma unroll
    for (int m = 0; m < tiles; ++m)
      if constexpr (keep_q)
#pragma unroll
        for (int e = 0; e < 4; ++e) x[m][e] = q_kept[kk][m][e];
      else
        load_matrices(x[m], q_block.at(16 * m, 16 * kk));
  };
  if (block.there()) {
    load_keys(0);
    if constexpr (stages == 2) load_values(0);
  }
  wait_for_copies();
  __syncthreads();
  if constexpr (keep_q)
#pragma unroll
    for (int kk = 0; kk < width / 16; ++kk)
#pragma unroll
      for (int m = 0; m < tiles; ++m) load_matrices(q_kept[kk][m], q_block.at(16 * m, 16 * kk));

  for (int stage = 0; block.there(); stage = (stage + 1) % stages) {
    wait_for_copies();
    __syncthreads();  // the block is there (with one stage its keys), all before is done with
    if constexpr (stages == 1) load_values(0);
    const bool visits = block.visits(), masked = visits && block.masked();
    uint32_t allowed[tiles];
    if (masked)
#pragma unroll
      for (int m = 0; m < tiles; ++m) allowed[m] = block.allowed(first_16 + m, lane);
    block.step();
    if constexpr (stages == 2)
      if (block.there()) load_keys(stage ^ 1), load_values(stage ^ 1);
    auto k_now = k_block, v_now = v_block;
    k_now.row_start += stage * tile_bytes, v_now.row_start += stage * tile_bytes;
    q_block.computed_here(), k_now.computed_here(), v_now.computed_here();

#pragma unroll
    for (int part = 0; part < parts; ++part) {
      if (visits) {
        float s[tiles][columns][4];
        make_scores<T, width, tiles, columns / 2>(s, load_q, k_now, 8 * columns * part);
        if (masked)
#pragma unroll
          for (int m = 0; m < tiles; ++m) keep_allowed(s[m], allowed[m] >> 4 * columns * part, -infinity);
        rows.weigh(s, to_log2);
      }
      if constexpr (stages == 1) {
        wait_for_copies();
        __syncthreads();  // values are there, keys are done with
        if (block.there()) load_keys(0);
      }
      if (visits) rows.add_values(v_now, 8 * columns * part);
    }
  }

  rows.store(a, b, h, q_tile, 16 * tiles * warp, 1,
             [&](int m, int row) { return query(16 * (tiles * warp + m) + row); });
}

template <int width, int tiles, int stages>
void launch(void (*kernel)(ForwardArguments), const ForwardArguments& arguments, cudaStream_t stream) {
  constexpr size_t bytes = forward_memory<width, tiles, stages>;
  allow_shared_memory(reinterpret_cast<const void*>(kernel), bytes);
  kernel<<<arguments.schedule.blocks(), threads, bytes, stream>>>(arguments);
  check_launch("attention.forward");
}

}  // namespace

void run_forward(const AttentionProblem& p, Tensor& out, Tensor& lse) {
  if (out.numel() == 0 && lse.numel() == 0) return;
  if (p.keys() == 0) {
    out.fill_(0);
    lse.fill_(-std::numeric_limits<double>::infinity());
    return;
  }
  const cudaStream_t stream = stream_of(p.q);
  const HostScores scores(p, {});
  const MapTable maps = map_table(p);
  const int64_t matrices = p.batch() * p.heads(), group = p.heads() / p.kv_heads();
  const int64_t pairs = (maps.query_tiles + 1) / 2;
  const int padded = padded_width(p);
  // Pairs of tiles are worth it if they are enough for the whole device.
  const bool in_pairs = !general_scores(p) && !maps.gathers && padded <= 128 &&
                        pairs * matrices >= properties(p.q.device()).multiProcessorCount;
  const bool queued = p.mask.rule().packed();
  const ForwardArguments arguments{operand(p.q),
                                   operand(p.k),
                                   operand(p.v),
                                   operand(out),
                                   lse.mutable_data<float>(),
                                   static_cast<int32_t>(p.heads()),
                                   static_cast<int32_t>(group),
                                   p.queries(),
                                   static_cast<int>(p.width()),
                                   static_cast<int>(p.value_width()),
                                   packs(p.q) && packs(p.k) && packs(p.v),
                                   packs(out),
                                   scores.arguments,
                                   maps,
                                   in_pairs && !queued ? grouped_table(p, Side::query, 2, 1) : GroupedTable{},
                                   Schedule(in_pairs ? pairs : maps.query_tiles, matrices,
                                            p.keys() * (p.width() + p.value_width()) * 2 / group, true)};
  dispatch_16_bit(p.q.dtype(), [&](auto zero) {
    using T = decltype(zero);
    dispatch_width(padded, [&](auto width) {
      constexpr int w = decltype(width)::value;
      constexpr int stages = w == 64 ? 2 : 1;
      if constexpr (w <= 128)
        if (in_pairs) {
          // Two stages are worth it where two blocks of threads still find room.
          constexpr size_t both = 2 * (forward_memory<w, 2, 2> + static_memory);
          if (queued) return launch<w, 2, 2>(forward_of_pairs<T, w, true, 2>, arguments, stream);
          if (w == 64 || properties(p.q.device()).sharedMemPerMultiprocessor >= both)
            return launch<w, 2, 2>(forward_of_pairs<T, w, false, 2>, arguments, stream);
          if constexpr (w == 128) return launch<w, 2, 1>(forward_of_pairs<T, w, false, 1>, arguments, stream);
        }
      launch<w, 1, stages>(general_scores(p) ? forward<T, w, true, stages> : forward<T, w, false, stages>,
                           arguments, stream);
    });
  });
}

}  // namespace torus::gpu::mma
