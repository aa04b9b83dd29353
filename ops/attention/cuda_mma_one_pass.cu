// Backward of attention on tensor cores in one pass, for masks of runs and plain scores. A block of threads
// owns 128 keys and goes through the queries that see them, 64 or 128 at a time. Weights and gradients of
// scores, computed transposed, pass through shared memory, so that every warp may take other rows of each
// product: 32 of them, which halves what is read of the other side. dQ is summed in f32 in global memory;
// where order matters, blocks of threads add one after another, the last keys first.
#include "torus/ops/attention/cuda_mma.h"
#include "torus/ops/attention/grouped_map.h"

namespace torus::gpu::mma {

using torus::detail::AttentionGradients;
using torus::detail::GroupedSide;

namespace {

constexpr int threads = 256, warps = threads / 32, stages = 2;
constexpr int keys = 128, pair = 128;  // blocks of threads take turns at pairs of 64 queries
constexpr int entry_words = 3 + keys / 64 * (pair / 64);

template <int width>
struct Shape {
  static constexpr int queries = width == 64 ? pair : pair / 2;  // at once
  static constexpr int key_bytes = keys * width * 2, query_bytes = queries * width * 2;
  static constexpr int scores_bytes = keys * queries * 2;
  static constexpr size_t memory = 2 * key_bytes + 2 * stages * query_bytes + 2 * scores_bytes;
  static constexpr int slab = queries * width / warps;  // what a warp adds to dQ at once: 32 rows and columns
  static_assert(slab == 32 * 32);
};

struct OnePassArguments {
  Operand q, k, v, d_out, dk, dv;  // dk, dv: data null if not wanted
  float* dq_sum;                   // [B H, blocks of `queries`, warps, slab]
  const float *lse, *delta;        // [B H, padded queries]
  int32_t *taken, *turns;          // turns: whose it is to add, [B H, units, warps]; null: in any order
  int64_t heads, kv_heads, queries, keys, padded_queries, query_blocks;
  int32_t unit_shift, query_units;  // 2^shift queries, at which a turn is taken; pairs are not cut
  int width, value_width;
  bool packs, packs_out;
  float scale;
  GroupedTable maps, units;  // units: by units of queries, for their last visitors
  Schedule schedule;
};

// The queries that a thread is at, and how it goes on from there: all threads of a block alike. All of a pair
// are gone through, whatever is seen of each half.
template <int queries>
struct Visited {
  int64_t b, first_head;
  int32_t group, members, query_count, member = -1;
  int32_t at = 0, end = 0;
  int32_t first = 0, blocks = 0;  // of the pair, see GroupedSide
  int32_t ids[2][2] = {};         // what each tile of keys sees of each half
  int32_t offset = 0;             // in the pair

  __device__ bool there() const { return member < members; }
  __device__ int32_t query() const { return first + offset; }
  // The unit of queries that it is in, among those of all members; -1: none.
  __device__ int32_t unit(int shift, int32_t units) const {
    return there() ? member * units + (first >> shift) : -1;
  }
  __device__ bool ends_pair() const { return offset + queries == pair || query() + queries >= query_count; }
  // What a tile of keys sees of the 64 queries from `from` on.
  __device__ int32_t id(int tile, int from = 0) const {
    const bool second = offset + from >= pair / 2;
    return tile == 0 ? (second ? ids[0][1] : ids[0][0]) : (second ? ids[1][1] : ids[1][0]);
  }
  // Whether nothing of the pair is seen: it stands for no queries, at which there are no turns.
  __device__ bool nothing() const {
    return max(max(ids[0][0], ids[0][1]), max(ids[1][0], ids[1][1])) == GroupedSide::none;
  }
  __device__ void step(const GroupedTable& maps) {
    if (member >= 0 && !ends_pair()) {
      offset += queries;
      return;
    }
    offset = 0;
    if (--blocks > 0) {
      first += pair;
      return;
    }
    if (++at >= end) {
      if (++member >= members) return;
      const GroupedView& map = maps.of(b, first_head + member);
      at = map.first[group], end = map.first[group + 1];
    }
    const int32_t* const entry = maps.of(b, first_head + member).entries + int64_t{entry_words} * at;
    first = entry[0], blocks = entry[1];
#pragma unroll
    for (int i = 0; i < 4; ++i) ids[i / 2][i % 2] = entry[3 + i];
  }
};

// Where element e of accumulator n of a lane lies in a slab: a lane's four together where they are added at
// once.
__device__ inline int place_in_slab(int n, int lane, int e) {
#if __CUDA_ARCH__ >= 900
  return (n * 32 + lane) * 4 + e;
#else
  return (n * 4 + e) * 32 + lane;
#endif
}
__device__ inline void add_four(float* slab, int n, int lane, const float (&x)[4]) {
#if __CUDA_ARCH__ >= 900
  float* const to = slab + place_in_slab(n, lane, 0);
  asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(x[0]), "f"(x[1]), "f"(x[2]),
               "f"(x[3])
               : "memory");
#else
#pragma unroll
  for (int e = 0; e < 4; ++e) atomicAdd(slab + place_in_slab(n, lane, e), x[e]);
#endif
}
__device__ inline void store_four(float* slab, int n, int lane, const float (&x)[4]) {
#pragma unroll
  for (int e = 0; e < 4; ++e) slab[place_in_slab(n, lane, e)] = x[e];
}

template <class T, int width>
__global__ void __launch_bounds__(threads, 1) one_pass(const __grid_constant__ OnePassArguments a) {
  using S = Shape<width>;
  constexpr int queries = S::queries;
  extern __shared__ __align__(128) char memory[];
  __shared__ __align__(16) float rows[stages][2][queries];  // lse and delta
  __shared__ int32_t ticket;
  char* const k_tile = memory;
  char* const v_tile = k_tile + S::key_bytes;
  char* const q_tiles = v_tile + S::key_bytes;
  char* const d_out_tiles = q_tiles + stages * S::query_bytes;
  char* const p_tile = d_out_tiles + stages * S::query_bytes;  // [keys, queries]
  char* const ds_tile = p_tile + S::scores_bytes;
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;

  // In order, a block of threads waits for those of later keys: these must have begun before it.
  int64_t index = blockIdx.x;
  if (a.turns) {
    if (thread == 0) ticket = atomicAdd(a.taken, 1);
    __syncthreads();
    index = ticket;
  }
  int64_t group, matrix;
  a.schedule.find(index, group, matrix);
  const int64_t members = a.heads / a.kv_heads, b = matrix / a.kv_heads, kv_head = matrix % a.kv_heads;
  Visited<queries> next{b, kv_head * members, static_cast<int32_t>(group), static_cast<int32_t>(members),
                        static_cast<int32_t>(a.queries)};
  next.step(a.maps);

  const auto key_token = [&](int row) -> int64_t {
    const int64_t key = group * keys + row;
    return key < a.keys ? key : -1;
  };
  load_tile<T, width, keys, threads>(k_tile, a.k.of<const T>(b, kv_head), a.k.row, a.width, a.packs,
                                     key_token);
  load_tile<T, width, keys, threads>(v_tile, a.v.of<const T>(b, kv_head), a.v.row, a.value_width, a.packs,
                                     key_token);
  using Copies = RunCopies<T, width, queries, threads>;
  Copies q_copies(a.q.of<const T>(b, next.first_head), a.q.row, a.width);
  Copies d_out_copies(a.d_out.of<const T>(b, next.first_head), a.d_out.row, a.value_width);
  int32_t copied = 0;  // the member that they are of
  const auto load = [&](const Visited<queries>& block, int stage) {
    const int64_t h = block.first_head + block.member;
    char* const q_tile = q_tiles + stage * S::query_bytes;
    char* const d_out_tile = d_out_tiles + stage * S::query_bytes;
    if (a.packs) {
      if (copied != block.member) {
        q_copies = Copies(a.q.of<const T>(b, h), a.q.row, a.width);
        d_out_copies = Copies(a.d_out.of<const T>(b, h), a.d_out.row, a.value_width);
        copied = block.member;
      }
      const auto count = static_cast<int32_t>(a.queries) - block.query();
      q_copies.start(q_tile, block.query(), count);
      d_out_copies.start(d_out_tile, block.query(), count);
    } else {
      const auto token = [&](int row) -> int64_t {
        return block.query() + row < a.queries ? block.query() + row : -1;
      };
      load_tile<T, width, queries, threads>(q_tile, a.q.of<const T>(b, h), a.q.row, a.width, false, token);
      load_tile<T, width, queries, threads>(d_out_tile, a.d_out.of<const T>(b, h), a.d_out.row, a.value_width,
                                            false, token);
    }
    if (thread < 2 * queries / 4) {
      const int which = thread / (queries / 4), row = thread % (queries / 4) * 4;
      const float* const from =
          (which ? a.delta : a.lse) + (b * a.heads + h) * a.padded_queries + block.query() + row;
      copy_16_async(shared_address(&rows[stage][which][row]), from, true);
    }
  };
  load(next, 0);

  // Scores: 32 keys by half the queries a warp. dK and dV: 32 keys by half the width. dQ: 32 queries by 32
  // columns.
  constexpr int columns = queries / 16;  // accumulators of 8 queries
  const int key_32 = warp / 2, half = warp % 2, tile = key_32 / 2;
  const int query_32 = warp / (width / 32), column_32 = warp % (width / 32);
  const int first_query = queries / 2 * half;
  const auto k_block = down_first<width>(k_tile, 32 * key_32, lane);
  const auto v_block = down_first<width>(v_tile, 32 * key_32, lane);
  const auto q_across = across_first<width>(q_tiles, first_query, lane);
  const auto d_out_across = across_first<width>(d_out_tiles, first_query, lane);
  const auto p_block = down_first<queries>(p_tile, 32 * key_32, lane);
  const auto ds_block = down_first<queries>(ds_tile, 32 * key_32, lane);
  const auto q_down = down_first<width>(q_tiles, 0, lane, width / 2 * half);
  const auto d_out_down = down_first<width>(d_out_tiles, 0, lane, width / 2 * half);
  const auto ds_across = across_first<queries>(ds_tile, 0, lane, 32 * query_32);
  const auto k_down = down_first<width>(k_tile, 0, lane, 32 * column_32);

  const float to_log2 = a.scale * log2_e;
  float dk[2][width / 16][4] = {}, dv[2][width / 16][4] = {};
  // Rows of keys that there are: others have weights as well, of zeros.
  const bool some_missing = group * keys + keys > a.keys;
  uint32_t own[2];
#pragma unroll
  for (int m = 0; m < 2; ++m) {
    own[m] = 0;
#pragma unroll
    for (int e = 0; e < 2; ++e)
      if (key_token(32 * key_32 + 16 * m + lane / 4 + 8 * e) >= 0) own[m] |= 0x33333333u << 2 * e;
  }
  // In order: the unit of queries that the last block was of, whose turn it is to be waited for there, and
  // the unit whose turn is to be passed on when what was added is there (-1: none).
  int32_t unit = -1, my_turn = -1, passed = -1;
  const auto turn_at = [&](int32_t of) {
    return a.turns + (((b * a.heads + next.first_head) * a.query_units + of) * warps + warp);
  };
  const auto pass_on = [&] {
    if (passed < 0) return;
    __syncwarp();
    if (lane == 0) add_release(turn_at(passed));
    passed = -1;
  };

  for (int stage = 0; next.there(); stage ^= 1) {
    wait_for_copies();
    __syncthreads();  // the block is there, all before is done with
    const int32_t id = next.id(tile, first_query);
    // Of each 64 queries, what each tile of keys sees of them.
    bool visits[2][queries / 64];
#pragma unroll
    for (int i = 0; i < 2 * (queries / 64); ++i)
      visits[i % 2][i / 2] = next.id(i % 2, 64 * (i / 2)) != GroupedSide::none;
    const int64_t head = next.first_head + next.member;
    const bool masked = id >= 0 || some_missing;
    uint32_t allowed[2] = {own[0], own[1]};
    if (id >= 0) {
      const uint32_t* const words =
          a.maps.of(b, head).fragments + int64_t{128} * id + 64 * (key_32 % 2) + lane;
      const int shift = queries == 64 ? 16 * half : 0;
      allowed[0] &= words[0] >> shift, allowed[1] &= words[32] >> shift;
    }
    const int64_t block = (b * a.heads + head) * a.query_blocks + next.query() / queries;
    bool begins = false, stores = false;
    if (a.turns) {
      const int32_t here = next.unit(a.unit_shift, a.query_units);
      begins = here != unit;
      unit = here;
      const auto before_last = [&](const GroupedTable& maps, int32_t place) {
        return next.nothing() ? -1 : maps.of(b, head).last_visitor[place] - static_cast<int32_t>(group);
      };
      if (begins) my_turn = before_last(a.units, next.first >> a.unit_shift);
      stores = before_last(a.maps, next.first / pair) == 0;
    }
    next.step(a.maps);
    const bool ends = a.turns && next.unit(a.unit_shift, a.query_units) != unit;
    if (next.there()) load(next, stage ^ 1);
    const uint32_t in_stage = stage * S::query_bytes;

    float s[2][columns][4] = {}, dp[2][columns][4] = {};
    if (id != GroupedSide::none) {
      const auto multiply_across = [&](float(&c)[2][columns][4], BlockAddress<width> x_block,
                                       BlockAddress<width> y_block) {
        y_block.row_start += in_stage;
        x_block.computed_here(), y_block.computed_here();
        multiply<T, width / 16, 2, columns / 2>(
            c,
            [&](int kk, uint32_t(&x)[2][4]) {
              load_matrices(x[0], x_block.at(0, 16 * kk));
              load_matrices(x[1], x_block.at(16, 16 * kk));
            },
            [&](int kk, int j, uint32_t(&y)[4]) { load_matrices(y, y_block.at(16 * j, 16 * kk)); });
      };
      multiply_across(s, k_block, q_across);
      multiply_across(dp, v_block, d_out_across);
      // s becomes the weights, dp the gradients of scores.
#pragma unroll
      for (int j = 0; j < columns; ++j) {
        const int column = first_query + 8 * j + lane % 4 * 2;
        const float2 lse = *reinterpret_cast<const float2*>(&rows[stage][0][column]);
        const float2 delta = *reinterpret_cast<const float2*>(&rows[stage][1][column]);
#pragma unroll
        for (int m = 0; m < 2; ++m)
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            s[m][j][e] = approximate_exp2(fmaf(s[m][j][e], to_log2, -(e % 2 ? lse.y : lse.x)));
            dp[m][j][e] = s[m][j][e] * (dp[m][j][e] - (e % 2 ? delta.y : delta.x));
          }
      }
      if (masked)
#pragma unroll
        for (int m = 0; m < 2; ++m) {
          keep_allowed(s[m], allowed[m], 0);
          keep_allowed(dp[m], allowed[m], 0);
        }
#pragma unroll
      for (int m = 0; m < 2; ++m)
#pragma unroll
        for (int j = 0; j < columns; j += 2) {
          const int row = 32 * key_32 + 16 * m, column = first_query + 8 * j;
          put<T, queries>(p_tile, row, column, s[m][j], s[m][j + 1], 1, 1);
          put<T, queries>(ds_tile, row, column, dp[m][j], dp[m][j + 1], 1, 1);
        }
    }
    pass_on();
    __syncthreads();  // weights and their gradients are there

    // What was made of keys by queries, times rows of queries. Rows that nothing is seen of may be NaN, here
    // and below.
    const auto multiply_down = [&](float(&c)[2][width / 16][4], BlockAddress<queries> x_block,
                                   BlockAddress<width> y_block) {
      y_block.row_start += in_stage;
      x_block.computed_here(), y_block.computed_here();
#pragma unroll
      for (int part = 0; part < queries / 64; ++part)
        if (tile == 0 ? visits[0][part] : visits[1][part])
          multiply<T, 4, 2, width / 32>(
              c,
              [&](int kk, uint32_t(&x)[2][4]) {
                load_matrices(x[0], x_block.at(0, 64 * part + 16 * kk));
                load_matrices(x[1], x_block.at(16, 64 * part + 16 * kk));
              },
              [&](int kk, int j, uint32_t(&y)[4]) {
                load_transposed(y, y_block.at(64 * part + 16 * kk, 16 * j));
              });
    };
    multiply_down(dv, p_block, d_out_down);
    multiply_down(dk, ds_block, q_down);
    float dq[2][4][4] = {};
    auto x_block = ds_across;
    auto y_block = k_down;
    x_block.computed_here(), y_block.computed_here();
#pragma unroll
    for (int t = 0; t < 2; ++t)
      if (queries == 64 || query_32 < 2 ? visits[t][0] : visits[t][queries / 64 - 1])
        multiply<T, 4, 2, 2>(
            dq,
            [&](int kk, uint32_t(&x)[2][4]) {
              load_transposed(x[0], x_block.at(64 * t + 16 * kk, 0));
              load_transposed(x[1], x_block.at(64 * t + 16 * kk, 16));
            },
            [&](int kk, int j, uint32_t(&y)[4]) {
              load_transposed(y, y_block.at(64 * t + 16 * kk, 16 * j));
            });
    if (a.turns && my_turn >= 0) {
      if (begins) {
        if (lane == 0)
          while (load_acquire(turn_at(unit)) != my_turn) continue;
        __syncwarp();
      }
      if (ends) passed = unit;
    }
    bool visited = stores;
#pragma unroll
    for (int i = 0; i < 2 * (queries / 64); ++i) visited = visited || visits[i % 2][i / 2];
    if (!visited) continue;
    float* const slab = a.dq_sum + (block * warps + warp) * S::slab;
#pragma unroll
    for (int m = 0; m < 2; ++m)
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (stores)
          store_four(slab, 4 * m + j, lane, dq[m][j]);
        else
          add_four(slab, 4 * m + j, lane, dq[m][j]);
      }
  }
  pass_on();

  __syncthreads();  // keys and values are done with: results pass through their tiles
#pragma unroll
  for (int m = 0; m < 2; ++m)
#pragma unroll
    for (int j = 0; j < width / 16; j += 2) {
      const int row = 32 * key_32 + 16 * m, column = width / 2 * half + 8 * j;
      put<T, width>(k_tile, row, column, dk[m][j], dk[m][j + 1], a.scale, a.scale);
      put<T, width>(v_tile, row, column, dv[m][j], dv[m][j + 1], 1, 1);
    }
  __syncthreads();
  if (a.dk.data)
    store_tile<T, width>(k_tile, 0, keys, thread, threads, a.dk.of<T>(b, kv_head), a.dk.row, a.width,
                         a.packs_out, key_token);
  if (a.dv.data)
    store_tile<T, width>(v_tile, 0, keys, thread, threads, a.dv.of<T>(b, kv_head), a.dv.row, a.value_width,
                         a.packs_out, key_token);
}

// dQ = scale * its sum, a block of threads some queries. In order, what nobody visits was not set.
template <class T, int width>
__global__ void __launch_bounds__(threads)
    finish_dq(const __grid_constant__ OnePassArguments a, Operand dq, bool packs, int64_t count) {
  using S = Shape<width>;
  __shared__ __align__(128) char tile[S::query_bytes];
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
  for (int64_t place = blockIdx.x; place < count; place += gridDim.x) {
    const int64_t block = place % a.query_blocks, matrix = place / a.query_blocks;
    const int64_t b = matrix / a.heads, h = matrix % a.heads, first = block * S::queries;
    const bool set = !a.turns || a.maps.of(b, h).last_visitor[first / pair] >= 0;
    const float* const slab = a.dq_sum + (place * warps + warp) * S::slab;
    const int query_32 = warp / (width / 32), column_32 = warp % (width / 32);
#pragma unroll
    for (int m = 0; m < 2; ++m)
#pragma unroll
      for (int j = 0; j < 4; j += 2) {
        float x[2][4] = {};
#pragma unroll
        for (int i = 0; i < 8; ++i)
          if (set) x[i / 4][i % 4] = slab[place_in_slab(4 * m + j + i / 4, lane, i % 4)];
        put<T, width>(tile, 32 * query_32 + 16 * m, 32 * column_32 + 8 * j, x[0], x[1], a.scale, a.scale);
      }
    __syncthreads();
    store_tile<T, width>(tile, 0, S::queries, thread, threads, dq.of<T>(b, h), dq.row, a.width, packs,
                         [&](int row) -> int64_t { return first + row < a.queries ? first + row : -1; });
    __syncthreads();
  }
}

template <class T, int width>
void launch(const AttentionProblem& p, AttentionGradients& g, const Tensor& d_out, const GroupedTable& maps) {
  using S = Shape<width>;
  const Device device = p.q.device();
  const cudaStream_t stream = stream_of(device);
  const int64_t matrices = p.batch() * p.heads();
  const int64_t blocks = (p.queries() + S::queries - 1) / S::queries, padded = blocks * S::queries;
  const PreparedRows rows = prepare_rows(p, g, d_out, padded);
  const int64_t elements = matrices * blocks * warps * S::slab;
  const bool in_order = p.deterministic;
  // Fewer turns, unless groups of keys are seen by few queries each, or there are few groups: they would wait
  // for one another.
  int unit_shift = 7;
  static_assert(pair == 1 << 7);
  GroupedTable units = maps;
  const int64_t blocks_of_threads = maps.groups * p.batch() * p.kv_heads();
  if (in_order && maps.density >= 0.5 && blocks_of_threads >= 8 * properties(device).multiProcessorCount) {
    const GroupedTable wide = grouped_table(p, Side::key, keys / tile_size, 2 * pair / tile_size);
    if (wide.contiguous) ++unit_shift, units = wide;
  }
  const int64_t query_units = ((p.queries() - 1) >> unit_shift) + 1;
  Tensor sum = in_order ? Tensor::empty({elements}, f32, device) : Tensor::zeros({elements}, f32, device);
  Tensor counts = in_order ? Tensor::zeros({1 + matrices * query_units * warps}, i32, device) : Tensor();
  int32_t* const taken = in_order ? counts.mutable_data<int32_t>() : nullptr;
  const int64_t bytes = p.queries() * (p.width() + p.value_width()) * 2 * (p.heads() / p.kv_heads());
  const auto result = [](Tensor& x) { return x.defined() ? operand(x) : Operand{}; };
  const OnePassArguments arguments{operand(p.q),
                                   operand(p.k),
                                   operand(p.v),
                                   operand(d_out),
                                   result(g.dk),
                                   result(g.dv),
                                   sum.mutable_data<float>(),
                                   rows.numbers.lse,
                                   rows.numbers.delta,
                                   taken,
                                   in_order ? taken + 1 : nullptr,
                                   p.heads(),
                                   p.kv_heads(),
                                   p.queries(),
                                   p.keys(),
                                   padded,
                                   blocks,
                                   unit_shift,
                                   static_cast<int32_t>(query_units),
                                   static_cast<int>(p.width()),
                                   static_cast<int>(p.value_width()),
                                   packs(p.q) && packs(p.k) && packs(p.v) && packs(d_out),
                                   (!g.dk.defined() || packs(g.dk)) && (!g.dv.defined() || packs(g.dv)),
                                   static_cast<float>(p.scale),
                                   maps,
                                   units,
                                   Schedule(maps.groups, p.batch() * p.kv_heads(), bytes, in_order)};
  const auto kernel = one_pass<T, width>;
  allow_shared_memory(reinterpret_cast<const void*>(kernel), S::memory);
  kernel<<<arguments.schedule.blocks(), threads, S::memory, stream>>>(arguments);
  check_launch("attention.backward");
  finish_dq<T, width><<<blocks_for(matrices * blocks, 1), threads, 0, stream>>>(
      arguments, operand(g.dq), packs(g.dq), matrices * blocks);
  check_launch("attention.backward");
}

}  // namespace

bool run_one_pass_backward(const AttentionProblem& p, AttentionGradients& g, const Tensor& d_out) {
  const int width = padded_width(p);
  if (general_scores(p) || width > 128 || !g.dq.defined() || !(g.dk.defined() || g.dv.defined()))
    return false;
  const size_t memory = width == 64 ? Shape<64>::memory : Shape<128>::memory;
  if (p.mask.rule().packed() || memory + static_memory > properties(p.q.device()).sharedMemPerBlockOptin)
    return false;
  if (map_table(p).gathers) return false;
  const GroupedTable maps = grouped_table(p, Side::key, keys / tile_size, pair / tile_size);
  if (p.deterministic && !maps.contiguous) return false;
  dispatch_16_bit(p.q.dtype(), [&](auto zero) {
    using T = decltype(zero);
    width == 64 ? launch<T, 64>(p, g, d_out, maps) : launch<T, 128>(p, g, d_out, maps);
  });
  return true;
}

}  // namespace torus::gpu::mma
