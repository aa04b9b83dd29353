// Forward of attention on tensor cores (Dao, "FlashAttention-2", 2023), for any map. A warp holds 16 or 32
// rows of scores and outputs in registers; weights go from the first product to the second without leaving
// them.
#include <limits>

#include "torus/ops/attention/cuda_mma.h"

namespace torus::gpu::mma {

namespace {

constexpr int threads = 128;

struct ForwardArguments {
  Operand q, k, v, out;
  float* lse;
  int64_t heads, group, queries;  // group: query heads that share keys
  int width, value_width;
  bool packs, packs_out;  // rows start at multiples of 16 bytes
  ScoreArguments scores;
  MapTable maps;
  Schedule schedule;
};

template <int width, int tiles, int stages>
constexpr size_t forward_memory = size_t{64} * (tiles + 2 * stages) * width * 2;

// On a multiprocessor: as many as registers allow without spilling.
template <int width, int tiles, bool general>
constexpr int blocks_at_once = tiles == 2 || general || width == 256 ? 2
                               : width == 64                         ? 4
                                                                     : 3;

// `tiles` of 64 queries, one or two. With two, nothing may gather, and scores are plain. `width` is that of
// q, k and v, padded. With two stages keys and values are read a block ahead; with one, values are read while
// scores are made, and the next keys while these are used.
template <class T, int width, int tiles, bool general, int stages>
__global__ void __launch_bounds__(threads, blocks_at_once<width, tiles, general>)
    forward(const __grid_constant__ ForwardArguments a) {
  static_assert(tiles == 1 || !general);
  constexpr bool may_gather = tiles == 1;
  constexpr bool keep_q = width * tiles <= 128;  // in registers
  extern __shared__ __align__(128) char memory[];
  __shared__ Walk<tiles> walk;
  __shared__ int32_t tokens[3][tile_size];  // of blocks i to i + 2
  constexpr int tile_bytes = 64 * width * 2;
  char* const q_tile = memory;
  char* const k_tiles = q_tile + tiles * tile_bytes;
  char* const v_tiles = k_tiles + stages * tile_bytes;
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;

  int64_t tile, matrix;
  a.schedule.find(blockIdx.x, tile, matrix);
  const int64_t b = matrix / a.heads, h = matrix % a.heads;
  const MapView& map = a.maps.of(b, h);
  const SideView& side = map.query;
  if (tile * tiles >= side.tiles) return;
  const auto side_of = [&](int) { return MapSide{&side, map.fragments}; };
  if (thread == 0) walk.start(side_of, tile, 1);

  // The warp's own rows: of tile `mine`, from row 16 * first_16 on.
  const int mine = tiles == 2 ? warp / 2 : 0, first_16 = tiles == 2 ? warp % 2 * 2 : warp;
  const T* const k = a.k.of<const T>(b, h / a.group);
  const T* const v = a.v.of<const T>(b, h / a.group);
  load_tile<T, width, 64 * tiles, threads>(
      q_tile, a.q.of<const T>(b, h), a.q.row, a.width, a.packs,
      [&](int row) { return owner(side, tile * tiles + row / 64, row % 64); });

  // With fewer scores at once there are registers for what products read ahead.
  constexpr int parts = width == 128 && tiles == 2 && stages == 2 ? 2 : 1, columns = 8 / parts;
  float s[tiles][columns][4], out[tiles][width / 8][4] = {};
  float top[tiles][2], total[tiles][2] = {};
  uint32_t q_kept[keep_q ? width / 16 : 1][tiles][4];
#pragma unroll
  for (int m = 0; m < tiles; ++m) top[m][0] = top[m][1] = -infinity;
  [[maybe_unused]] auto q_block = down_first<width>(q_tile, 16 * tiles * warp, lane);
  const auto k_block = across_first<width>(k_tiles, 0, lane);
  const auto v_block = down_first<width>(v_tiles, 0, lane);
  // Plain scores stay products; `unit` makes them scores.
  const float unit = general ? 1 : a.scores.scale, to_log2 = unit * log2_e;
  const float slack = 8 / to_log2;  // weights may grow to 2^8 before sums are rescaled

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

  wait_for_copies();
  __syncthreads();
  if constexpr (keep_q)
#pragma unroll
    for (int kk = 0; kk < width / 16; ++kk)
#pragma unroll
      for (int m = 0; m < tiles; ++m) load_matrices(q_kept[kk][m], q_block.at(16 * m, 16 * kk));

  Place next;  // of block i + 1
  const auto load = [&](char* to, const T* head, int64_t stride, int columns, int i, Place place) {
    if constexpr (may_gather) {
      load_tile<T, width, 64, threads>(to, head, stride, columns, a.packs,
                                       [&](int row) { return tokens[i % 3][row]; });
    } else {
      const int32_t first = walk.entry(place).first + place.offset, count = walk.count(place);
      load_tile<T, width, 64, threads>(to, head, stride, columns, a.packs,
                                       [&](int row) { return row < count ? first + row : -1; });
    }
  };
  const auto load_keys = [&](int i, Place place) {
    load(k_tiles + i % stages * tile_bytes, k, a.k.row, a.width, i, place);
  };
  const auto load_values = [&](int i, Place place) {
    load(v_tiles + i % stages * tile_bytes, v, a.v.row, a.value_width, i, place);
  };
  bool more = walk.has(0, next);
  if (more) {
    if constexpr (may_gather) {
      walk.first_tokens(tokens, thread);
      __syncthreads();
    }
    load_keys(0, next);
    if constexpr (stages == 2) load_values(0, next);
  }

  for (int i = 0; more; ++i) {
    wait_for_copies();
    __syncthreads();  // block i is there (with one stage its keys), all before is done with
    if constexpr (stages == 1) load_values(i, next);
    const bool visits = walk.entry(next).visits[mine];
    uint32_t allowed[tiles] = {};
    if (visits)
#pragma unroll
      for (int m = 0; m < tiles; ++m) allowed[m] = walk.allowed(next, mine, first_16 + m, lane);
    next = walk.after(next);
    more = walk.has(i, next);
    if (thread == 0) walk.keep_ahead(i, next, side_of, tile);
    if constexpr (stages == 2)
      if (more) {
        load_keys(i + 1, next);
        load_values(i + 1, next);
      }
    [[maybe_unused]] int32_t later_token = -1;
    if constexpr (may_gather)
      if (more) later_token = walk.later_token(i, next, thread);
    auto k_now = k_block, v_now = v_block;
    k_now.row_start += i % stages * tile_bytes, v_now.row_start += i % stages * tile_bytes;
    q_block.computed_here(), k_now.computed_here(), v_now.computed_here();

#pragma unroll
    for (int part = 0; part < parts; ++part) {
      if (visits) {
#pragma unroll
        for (int m = 0; m < tiles; ++m)
#pragma unroll
          for (int j = 0; j < columns; ++j)
#pragma unroll
            for (int e = 0; e < 4; ++e) s[m][j][e] = 0;
        multiply<T, width / 16, tiles, columns / 2>(
            s,
            [&](int kk, uint32_t(&x)[tiles][4]) {
#pragma unroll
              for (int m = 0; m < tiles; ++m)
                if constexpr (keep_q)
#pragma unroll
                  for (int e = 0; e < 4; ++e) x[m][e] = q_kept[kk][m][e];
                else
                  load_matrices(x[m], q_block.at(16 * m, 16 * kk));
            },
            [&](int kk, int j, uint32_t(&y)[4]) {
              load_matrices(y, k_now.at(8 * columns * part + 16 * j, 16 * kk));
            });
        if constexpr (general) {
          uint32_t slope[8][2];
          finish_scores<T, true>(s[0], slope, a.scores, b, h, queries, [&](int j, int c) -> int64_t {
            return tokens[i % 3][8 * j + lane % 4 * 2 + c];
          });
        }

        bool grows = false;
        float most[tiles][2];
#pragma unroll
        for (int m = 0; m < tiles; ++m) {
          if (__any_sync(0xffffffffu, allowed[m] != ~0u)) {
#pragma unroll
            for (int j = 0; j < columns; ++j)
#pragma unroll
              for (int e = 0; e < 4; ++e)
                if (!(allowed[m] >> (4 * (columns * part + j) + e) & 1)) s[m][j][e] = -infinity;
          }
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            float larger = s[m][0][2 * half];
#pragma unroll
            for (int j = 0; j < columns; ++j)
              larger = fmaxf(larger, fmaxf(s[m][j][2 * half], s[m][j][2 * half + 1]));
            most[m][half] = quad_max(larger);
            grows |= most[m][half] > top[m][half] + slack;
          }
        }
        if (__any_sync(0xffffffffu, grows)) {
#pragma unroll
          for (int m = 0; m < tiles; ++m)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
              const float now = fmaxf(top[m][half], most[m][half]);
              const float factor = now == top[m][half] ? 1 : approximate_exp2((top[m][half] - now) * to_log2);
              top[m][half] = now;
              total[m][half] *= factor;
#pragma unroll
              for (int j = 0; j < width / 8; ++j)
                out[m][j][2 * half] *= factor, out[m][j][2 * half + 1] *= factor;
            }
        }
#pragma unroll
        for (int m = 0; m < tiles; ++m)
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const float base = top[m][half] == -infinity ? 0 : top[m][half] * to_log2;
#pragma unroll
            for (int j = 0; j < columns; ++j)
#pragma unroll
              for (int c = 0; c < 2; ++c) {
                float& weight = s[m][j][2 * half + c];
                weight = approximate_exp2(fmaf(weight, to_log2, -base));
                total[m][half] += weight;
              }
          }
        if constexpr (general)
          if (a.scores.dropout.active())
#pragma unroll
            for (int j = 0; j < columns; ++j)
#pragma unroll
              for (int e = 0; e < 4; ++e) {
                const auto key = static_cast<uint32_t>(tokens[i % 3][8 * j + lane % 4 * 2 + e % 2]);
                if (AttentionDropout::mix(row_words[e / 2], key) < a.scores.threshold) s[0][j][e] = 0;
              }
      }

      if constexpr (stages == 1) {
        wait_for_copies();
        __syncthreads();  // values are there, keys are done with
        if (more) load_keys(i + 1, next);
      }
      if (visits) {
        multiply<T, columns / 2, tiles, width / 16>(
            out,
            [&](int kk, uint32_t(&x)[tiles][4]) {
#pragma unroll
              for (int m = 0; m < tiles; ++m)
#pragma unroll
                for (int e = 0; e < 4; ++e)
                  x[m][e] = pack<T>(s[m][2 * kk + e / 2][e % 2 * 2], s[m][2 * kk + e / 2][e % 2 * 2 + 1]);
            },
            [&](int kk, int j, uint32_t(&y)[4]) {
              load_transposed(y, v_now.at(8 * columns * part + 16 * kk, 16 * j));
            });
      }
    }
    if constexpr (may_gather)
      if (thread < tile_size) tokens[(i + 2) % 3][thread] = later_token;
  }

  const float keep_scale = general ? a.scores.keep_scale : 1;
#pragma unroll
  for (int m = 0; m < tiles; ++m) {
    const int first_row = 16 * (first_16 + m);
    const auto token = [&](int row) { return owner(side, tile * tiles + mine, first_row + row); };
    float inverse[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float sum = quad_sum(total[m][half]);
      inverse[half] = sum == 0 ? 0 : keep_scale / sum;
      const int64_t query = token(lane / 4 + 8 * half);
      if (lane % 4 == 0 && query >= 0)
        a.lse[matrix * a.queries + query] = sum == 0 ? -infinity : top[m][half] * unit + logf(sum);
    }
    store_rows<T, width>(q_tile, 16 * tiles * warp + 16 * m, out[m], inverse, a.out.of<T>(b, h), a.out.row,
                         a.value_width, a.packs_out, token);
  }
}

template <class T, int width, int tiles, bool general, int stages>
void launch(const ForwardArguments& arguments, cudaStream_t stream) {
  const auto kernel = forward<T, width, tiles, general, stages>;
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
  // Pairs of tiles read keys and values half as often, if they are enough for the whole device.
  const bool in_pairs = !general_scores(p) && !maps.gathers && padded <= 128 &&
                        pairs * matrices >= properties(p.q.device()).multiProcessorCount;
  const ForwardArguments arguments{operand(p.q),
                                   operand(p.k),
                                   operand(p.v),
                                   operand(out),
                                   lse.mutable_data<float>(),
                                   p.heads(),
                                   group,
                                   p.queries(),
                                   static_cast<int>(p.width()),
                                   static_cast<int>(p.value_width()),
                                   packs(p.q) && packs(p.k) && packs(p.v),
                                   packs(out),
                                   scores.arguments,
                                   maps,
                                   Schedule(in_pairs ? pairs : maps.query_tiles, matrices,
                                            p.keys() * (p.width() + p.value_width()) * 2 / group, true)};
  dispatch_16_bit(p.q.dtype(), [&](auto zero) {
    using T = decltype(zero);
    dispatch_width(padded, [&](auto width) {
      constexpr int w = decltype(width)::value;
      constexpr int stages = w == 64 ? 2 : 1;
      if (general_scores(p)) return launch<T, w, 1, true, stages>(arguments, stream);
      if constexpr (w <= 128)
        if (in_pairs) {
          // Two stages are worth it where two blocks of threads still find room.
          constexpr size_t both = 2 * (forward_memory<w, 2, 2> + static_memory);
          if (w == 64 || properties(p.q.device()).sharedMemPerMultiprocessor >= both)
            return launch<T, w, 2, false, 2>(arguments, stream);
          if constexpr (w == 128) return launch<T, w, 2, false, 1>(arguments, stream);
        }
      launch<T, w, 1, false, stages>(arguments, stream);
    });
  });
}

}  // namespace torus::gpu::mma
