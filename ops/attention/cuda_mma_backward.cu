// Backward of attention on tensor cores. Keys own blocks of threads for dK and dV, then queries for dQ: each
// recomputes scores, so every sum has one owner and one order, whatever the map. A warp holds 16 owners by 64
// others in registers, from which weights and their gradients go into the second products. It runs what
// `cuda_mma_one_pass.cu` is not made for.
#include "torus/ops/attention/cuda_mma.h"

namespace torus::gpu::mma {

namespace {

constexpr int threads = 128;

// ------------------------------------------------------------------------------------------ numbers a row

constexpr int row_threads = 256, rows_at_once = 4, rows_a_block = row_threads / 8 * rows_at_once;

struct RowArguments {
  Operand out, d_out;
  const float *lse, *d_lse;  // d_lse: null if there is none
  int64_t d_lse_step[3];
  int64_t batch, heads, queries, padded;  // rows of a matrix: `padded`
  int value_width;
  bool packs;
  AttentionDropout dropout;
  Replayed<uint64_t> position;
};

// Eight lanes go through `rows_at_once` rows side by side, whose loads are all under way before the first is
// used, and have a row each in the end. Blocks of threads are of some rows, a head, a batch: no divisions.
template <class T>
__global__ void __launch_bounds__(row_threads, 4)
    compute_rows(const __grid_constant__ RowArguments a, RowNumbers to) {
  static_assert(rows_at_once <= 8);
  wait_for_kernel_before();
  const int part = static_cast<int>(threadIdx.x) % 8;
  const int64_t top = int64_t{blockIdx.x} * rows_a_block + threadIdx.x / 8 * rows_at_once;
  const int64_t query = top + part;
  const bool stores = part < rows_at_once && query < a.padded, there = stores && query < a.queries;
  for (int64_t b = blockIdx.z; b < a.batch; b += gridDim.z)
    for (int64_t h = blockIdx.y; h < a.heads; h += gridDim.y) {
      const int64_t matrix = b * a.heads + h;
      const float lse = there ? a.lse[matrix * a.queries + query] : -infinity;
      const T* const out = a.out.of<const T>(b, h);
      const T* const d_out = a.d_out.of<const T>(b, h);
      float sum[rows_at_once] = {}, own = 0;
      for (int d = 8 * part; d < a.value_width; d += 64) {
        const auto row = [&](int k) { return min(top + k, a.queries - 1); };
        if (a.packs) {
          uint4 x[rows_at_once], y[rows_at_once];
#pragma unroll
          for (int k = 0; k < rows_at_once; ++k) {
            x[k] = *reinterpret_cast<const uint4*>(out + row(k) * a.out.row + d);
            y[k] = *reinterpret_cast<const uint4*>(d_out + row(k) * a.d_out.row + d);
          }
#pragma unroll
          for (int k = 0; k < rows_at_once; ++k) {
            float left[8], right[8];
            widen_pack<T>(left, x[k]);
            widen_pack<T>(right, y[k]);
#pragma unroll
            for (int e = 0; e < 8; ++e) sum[k] += left[e] * right[e];
          }
        } else {
#pragma unroll
          for (int k = 0; k < rows_at_once; ++k)
#pragma unroll 1
            for (int e = d; e < d + 8 && e < a.value_width; ++e)
              sum[k] += widen(out[row(k) * a.out.row + e]) * widen(d_out[row(k) * a.d_out.row + e]);
        }
      }
#pragma unroll
      for (int k = 0; k < rows_at_once; ++k) {
#pragma unroll
        for (int lanes = 4; lanes > 0; lanes /= 2) sum[k] += __shfl_xor_sync(0xffffffffu, sum[k], lanes);
        if (part == k) own = sum[k];
      }
      if (!stores) continue;
      if (there && a.d_lse)
        own -= a.d_lse[b * a.d_lse_step[0] + h * a.d_lse_step[1] + query * a.d_lse_step[2]];
      const bool no_key = lse == -infinity;
      const int64_t row = matrix * a.padded + query;
      to.lse[row] = no_key ? infinity : lse * log2_e;
      to.delta[row] = no_key ? 0 : own;
      if (to.word)
        to.word[row] =
            AttentionDropout{a.dropout.probability, a.dropout.seed, a.position.get()}.row_word(matrix, query);
    }
}

// --------------------------------------------------------------------------------------------- gradients

struct BackwardArguments {
  Operand q, k, v, d_out;
  Operand dq, dk, dv;  // data null: not wanted
  RowNumbers rows;
  int64_t heads, kv_heads, queries;
  int width, value_width;
  bool packs, packs_out;
  ScoreArguments scores;
  MapTable maps;
  Schedule schedule;
};

template <int width, int stages>
constexpr size_t backward_memory = size_t{64} * width * 2 * (2 + 2 * stages);

// Owners x (keys: k, v; queries: q, dO) and others y, which are read a block ahead if there are two stages.
// Keys: dK if `of_scores`, dV if `of_weights`. Queries: dQ.
template <class T, int width, Side owners, bool of_scores, bool of_weights, bool general, int stages>
__global__ void __launch_bounds__(threads, width == 64 && !general ? 3 : 2)
    backward(const __grid_constant__ BackwardArguments a) {
  static_assert(owners == Side::key || (of_scores && !of_weights));
  constexpr bool keys_own = owners == Side::key;
  constexpr bool keep_x = width == 64 && !of_weights;  // in registers, if three blocks of threads find room
  extern __shared__ __align__(128) char memory[];
  __shared__ TileBlocks blocks;
  __shared__ __align__(8) float other_rows[2][3][tile_size];  // lse, delta, word of queries that are others
  constexpr int tile_bytes = 64 * width * 2;
  char* const x1_tile = memory;
  char* const x2_tile = x1_tile + tile_bytes;
  char* const y_tiles = x2_tile + tile_bytes;
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;

  int64_t tile, matrix;
  a.schedule.find(blockIdx.x, tile, matrix);
  const int64_t group = a.heads / a.kv_heads, own_heads = keys_own ? a.kv_heads : a.heads;
  const int64_t b = matrix / own_heads, own_head = matrix % own_heads;
  const int64_t first_head = keys_own ? own_head * group : own_head;  // of the query heads gone through
  const auto side_of = [&](int member) {
    const MapView& map = a.maps.of(b, first_head + member);
    return MapSide{keys_own ? &map.key : &map.query, map.fragments};
  };
  const SideView& side = *side_of(0).side;
  if (tile >= side.tiles) return;
  const int members = keys_own ? static_cast<int>(group) : 1;
  if (thread < tile_size) blocks.start(side_of, tile, members);

  const Operand &x1 = keys_own ? a.k : a.q, &x2 = keys_own ? a.v : a.d_out;
  const Operand &y1 = keys_own ? a.q : a.k, &y2 = keys_own ? a.d_out : a.v;
  const auto own_token = [&](int row) { return owner(side, tile, row); };
  load_tile<T, width, 64, threads>(x1_tile, x1.of<const T>(b, own_head), x1.row, a.width, a.packs, own_token);
  load_tile<T, width, 64, threads>(x2_tile, x2.of<const T>(b, own_head), x2.row, a.value_width, a.packs,
                                   own_token);

  float s[1][8][4], dp[1][8][4];
  float d_x1[1][of_scores ? width / 8 : 1][4] = {}, d_x2[1][of_weights ? width / 8 : 1][4] = {};
  uint32_t x1_kept[keep_x ? width / 16 : 1][4], x2_kept[keep_x ? width / 16 : 1][4];
  [[maybe_unused]] auto x1_block = down_first<width>(x1_tile, 16 * warp, lane);
  [[maybe_unused]] auto x2_block = down_first<width>(x2_tile, 16 * warp, lane);
  const float to_log2 = (general ? 1 : a.scores.scale) * log2_e;

  // Of the lane's rows: their tokens, and, where these are queries, their numbers.
  int64_t own_tokens[2];
  [[maybe_unused]] float own_lse[2] = {}, own_delta[2] = {};
  [[maybe_unused]] uint32_t own_word[2] = {};
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    own_tokens[half] = own_token(16 * warp + lane / 4 + 8 * half);
    if (!keys_own && own_tokens[half] >= 0) {
      const int64_t row = matrix * a.queries + own_tokens[half];
      own_lse[half] = a.rows.lse[row];
      own_delta[half] = a.rows.delta[row];
      if (general && a.rows.word) own_word[half] = a.rows.word[row];
    }
  }

  using Copies = GatherCopies<T, width, 64, threads>;
  const int64_t first_other = keys_own ? first_head : own_head / group;
  Copies y1_copies(y1.of<const T>(b, first_other), y1.row, a.width);
  Copies y2_copies(y2.of<const T>(b, first_other), y2.row, a.value_width);
  int copied = 0;  // the member that they are of
  const auto load = [&](int i) {
    const int stage = i % stages, member = blocks.block(i).member;
    const int64_t h = first_other + member;
    const auto token = [&](int row) { return blocks.token(i, row); };
    char* const y1_tile = y_tiles + stage * tile_bytes;
    char* const y2_tile = y1_tile + stages * tile_bytes;
    if (a.packs) {
      if (keys_own && copied != member) {
        y1_copies = Copies(y1.of<const T>(b, h), y1.row, a.width);
        y2_copies = Copies(y2.of<const T>(b, h), y2.row, a.value_width);
        copied = member;
      }
      typename Copies::Tokens read;
      Copies::read(read, token);
      y1_copies.start(y1_tile, read);
      y2_copies.start(y2_tile, read);
    } else {
      load_tile<T, width, 64, threads>(y1_tile, y1.of<const T>(b, h), y1.row, a.width, false, token);
      load_tile<T, width, 64, threads>(y2_tile, y2.of<const T>(b, h), y2.row, a.value_width, false, token);
    }
    if (keys_own && thread < tile_size) {
      const int32_t query = token(thread);
      const bool there = query >= 0;
      const int64_t row = there ? (b * a.heads + h) * a.queries + query : 0;
      copy_4_async(shared_address(&other_rows[stage][0][thread]), a.rows.lse + row, there);
      copy_4_async(shared_address(&other_rows[stage][1][thread]), a.rows.delta + row, there);
      if (general && a.rows.word)
        copy_4_async(shared_address(&other_rows[stage][2][thread]), a.rows.word + row, there);
    }
  };

  __syncthreads();  // blocks 0 and 1 are told
  if (blocks.block(0).there()) load(0);
  wait_for_copies();
  __syncthreads();
  if constexpr (keep_x)
#pragma unroll
    for (int kk = 0; kk < width / 16; ++kk) {
      load_matrices(x1_kept[kk], x1_block.at(0, 16 * kk));
      load_matrices(x2_kept[kk], x2_block.at(0, 16 * kk));
    }

  for (int i = 0; blocks.block(i).there(); ++i) {
    wait_for_copies();
    __syncthreads();  // block i is there, all before is done with
    const int stage = i % stages;
    const int member = blocks.block(i).member;
    const uint32_t allowed = blocks.allowed(i, side_of(member).fragments, warp, lane);
    const bool more = blocks.block(i + 1).there();
    if (stages == 2 && more) load(i + 1);
    TileBlocks::Found later;
    if (thread < tile_size) later = blocks.find(i + 2, side_of, tile, members);

    const char* const y1_tile = y_tiles + stage * tile_bytes;
    const char* const y2_tile = y1_tile + stages * tile_bytes;
    x1_block.computed_here(), x2_block.computed_here();

    // Products of x1 and y1, and of x2 and y2: scores and gradients of weights.
    const auto multiply_across = [&](float(&c)[1][8][4], auto& x_kept, const auto& x_block,
                                     const char* y_tile) {
      auto y_block = across_first<width>(y_tile, 0, lane);
      y_block.computed_here();
#pragma unroll
      for (int j = 0; j < 8; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) c[0][j][e] = 0;
      multiply<T, width / 16, 1, 4>(
          c,
          [&](int kk, uint32_t(&x)[1][4]) {
            if constexpr (keep_x)
#pragma unroll
              for (int e = 0; e < 4; ++e) x[0][e] = x_kept[kk][e];
            else
              load_matrices(x[0], x_block.at(0, 16 * kk));
          },
          [&](int kk, int j, uint32_t(&y)[4]) { load_matrices(y, y_block.at(16 * j, 16 * kk)); });
    };
    multiply_across(s, x1_kept, x1_block, y1_tile);

    [[maybe_unused]] uint32_t slope[8][2];
    const auto column_token = [&](int j, int c) -> int64_t {
      return blocks.token(i, 8 * j + lane % 4 * 2 + c);
    };
    [[maybe_unused]] const int64_t query_head = keys_own ? first_head + member : own_head;
    if constexpr (general)
      finish_scores<T, !keys_own>(s[0], slope, a.scores, b, query_head, own_tokens, column_token);

    if constexpr (of_scores) multiply_across(dp, x2_kept, x2_block, y2_tile);

      // s becomes the dropped weights, dp the gradient of scores.
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      float2 lse, delta;
      if constexpr (keys_own) {
        lse = *reinterpret_cast<const float2*>(&other_rows[stage][0][8 * j + lane % 4 * 2]);
        delta = *reinterpret_cast<const float2*>(&other_rows[stage][1][8 * j + lane % 4 * 2]);
      }
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float row_lse = keys_own ? (e % 2 ? lse.y : lse.x) : own_lse[e / 2];
        const float row_delta = keys_own ? (e % 2 ? delta.y : delta.x) : own_delta[e / 2];
        const float weight = approximate_exp2(fmaf(s[0][j][e], to_log2, -row_lse));
        float factor = 1;
        if constexpr (general)
          if (a.rows.word) {
            const int64_t key = keys_own ? own_tokens[e / 2] : column_token(j, e % 2);
            const uint32_t word = keys_own
                                      ? __float_as_uint(other_rows[stage][2][8 * j + lane % 4 * 2 + e % 2])
                                      : own_word[e / 2];
            const bool kept = AttentionDropout::mix(word, static_cast<uint32_t>(key)) >= a.scores.threshold;
            factor = kept ? a.scores.keep_scale : 0;
          }
        s[0][j][e] = weight * factor;
        if constexpr (of_scores) dp[0][j][e] = weight * (dp[0][j][e] * factor - row_delta);
      }
    }
    if (__any_sync(0xffffffffu, allowed != ~0u)) {
      keep_allowed(s[0], allowed, 0);
      if constexpr (of_scores) keep_allowed(dp[0], allowed, 0);  // what is not seen may be infinite
    }
    if constexpr (general && of_scores) {
      if constexpr (!keys_own)
        for (int n = 0; n < a.scores.terms; ++n) {
          const BiasTerm& term = a.scores.term[n];
          if (!term.gradient) continue;
          T* const to =
              static_cast<T*>(term.gradient) + b * term.gradient_step[0] + query_head * term.gradient_step[1];
#pragma unroll
          for (int j = 0; j < 8; ++j)
#pragma unroll
            for (int e = 0; e < 4; ++e)
              if (own_tokens[e / 2] >= 0 && allowed >> (4 * j + e) & 1)
                to[own_tokens[e / 2] * term.gradient_step[2] +
                   column_token(j, e % 2) * term.gradient_step[3]] = narrow<T>(dp[0][j][e]);
        }
      if (a.scores.softcap > 0)
#pragma unroll
        for (int j = 0; j < 8; ++j)
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const float2 by = __half22float2(reinterpret_cast<const __half2&>(slope[j][half]));
            dp[0][j][2 * half] *= by.x, dp[0][j][2 * half + 1] *= by.y;
          }
    }

    // The second products: what was computed of 16 owners by 64 others, times rows of others.
    const auto multiply_down = [&](auto& c, const float(&left)[1][8][4], const char* y_tile) {
      auto y_block = down_first<width>(y_tile, 0, lane);
      y_block.computed_here();
      multiply<T, 4, 1, width / 16>(
          c,
          [&](int kk, uint32_t(&x)[1][4]) {
#pragma unroll
            for (int e = 0; e < 4; ++e)
              x[0][e] = pack<T>(left[0][2 * kk + e / 2][e % 2 * 2], left[0][2 * kk + e / 2][e % 2 * 2 + 1]);
          },
          [&](int kk, int j, uint32_t(&y)[4]) { load_transposed(y, y_block.at(16 * kk, 16 * j)); });
    };
    if constexpr (of_weights) multiply_down(d_x2, s, y2_tile);
    if constexpr (of_scores) multiply_down(d_x1, dp, y1_tile);

    if (thread < tile_size) blocks.tell(i + 2, later);
    if constexpr (stages == 1) {
      __syncthreads();
      if (more) load(i + 1);
    }
  }

  const auto warp_token = [&](int row) { return owner(side, tile, 16 * warp + row); };
  if constexpr (of_scores) {
    const Operand& to = keys_own ? a.dk : a.dq;
    const float factor[2] = {a.scores.scale, a.scores.scale};
    if (to.data)
      store_rows<T, width>(x1_tile, 16 * warp, d_x1[0], factor, to.of<T>(b, own_head), to.row, a.width,
                           a.packs_out, warp_token);
  }
  if constexpr (of_weights) {
    const float factor[2] = {1, 1};
    if (a.dv.data)
      store_rows<T, width>(x2_tile, 16 * warp, d_x2[0], factor, a.dv.of<T>(b, own_head), a.dv.row,
                           a.value_width, a.packs_out, warp_token);
  }
}

template <class T, int width, Side owners, bool of_scores, bool of_weights, int stages>
void launch(const BackwardArguments& arguments, bool general, cudaStream_t stream) {
  const auto kernel = general ? backward<T, width, owners, of_scores, of_weights, true, stages>
                              : backward<T, width, owners, of_scores, of_weights, false, stages>;
  constexpr size_t bytes = backward_memory<width, stages>;
  allow_shared_memory(reinterpret_cast<const void*>(kernel), bytes);
  kernel<<<arguments.schedule.blocks(), threads, bytes, stream>>>(arguments);
  check_launch("attention.backward");
}

}  // namespace

size_t shared_memory(int padded_width) {
  return padded_width == 64    ? backward_memory<64, 2>
         : padded_width == 128 ? backward_memory<128, 1>
                               : backward_memory<256, 1>;
}

PreparedRows prepare_rows(const AttentionProblem& p, const torus::detail::AttentionGradients& g,
                          const Tensor& d_out, int64_t padded, Replayed<uint64_t> position) {
  const torus::Shape shape{p.batch(), p.heads(), padded};
  const Device device = p.q.device();
  PreparedRows made{Tensor::empty(shape, f32, device), Tensor::empty(shape, f32, device),
                    p.dropout.active() ? Tensor::empty(shape, i32, device) : Tensor(), RowNumbers{}};
  made.numbers = {
      made.lse.mutable_data<float>(), made.delta.mutable_data<float>(),
      made.word.defined() ? reinterpret_cast<uint32_t*>(made.word.mutable_data<int32_t>()) : nullptr};
  RowArguments a{operand(g.out),
                 operand(d_out),
                 g.lse.data<float>(),
                 nullptr,
                 {},
                 p.batch(),
                 p.heads(),
                 p.queries(),
                 padded,
                 static_cast<int>(p.value_width()),
                 packs(g.out) && packs(d_out),
                 p.dropout,
                 position};
  if (g.d_lse.defined()) {
    a.d_lse = g.d_lse.data<float>();
    for (int axis = 0; axis < 3; ++axis) a.d_lse_step[axis] = g.d_lse.strides()[axis];
  }
  const auto at_most = [](int64_t count) { return static_cast<unsigned>(std::min<int64_t>(count, 65535)); };
  const dim3 grid(static_cast<unsigned>((padded + rows_a_block - 1) / rows_a_block), at_most(p.heads()),
                  at_most(p.batch()));
  dispatch_16_bit(p.q.dtype(), [&](auto zero) {
    gpu::launch<compute_rows<decltype(zero)>>("attention.backward", grid, row_threads, stream_of(p.q), a,
                                              made.numbers);
  });
  return made;
}

void run_backward(const AttentionProblem& p, torus::detail::AttentionGradients& g) {
  if (p.batch() * p.heads() * p.queries() * p.keys() == 0) {
    for (Tensor* x : {&g.dq, &g.dk, &g.dv})
      if (x->defined()) x->fill_(0);
    for (Tensor& x : g.d_bias)
      if (x.defined()) x.fill_(0);
    return;
  }
  const BiasGradients d_bias(p, g);
  const bool wants_queries = g.dq.defined() || d_bias.any_of_scores, general = general_scores(p);
  const Device device = p.q.device();
  const cudaStream_t stream = stream_of(device);
  Tensor d_out = g.d_out;
  if (!d_out.defined())
    d_out =
        torus::detail::empty_heads(p.batch(), p.heads(), p.queries(), p.value_width(), p.q.dtype(), device)
            .fill_(0);
  if (run_one_pass_backward(p, g, d_out)) return d_bias.finish(p);
  const HostScores scores(p, d_bias.of_scores);
  const MapTable maps = map_table(p);
  const PreparedRows rows = prepare_rows(p, g, d_out, p.queries(), scores.arguments.position);
  const auto result = [](Tensor& x) { return x.defined() ? operand(x) : Operand{}; };
  const auto arguments = [&](Side side) {
    const bool keys_own = side == Side::key;
    const int64_t others = keys_own ? p.queries() : p.keys();
    const int64_t bytes = others * (p.width() + p.value_width()) * 2;
    const int64_t group = p.heads() / p.kv_heads();
    return BackwardArguments{operand(p.q),
                             operand(p.k),
                             operand(p.v),
                             operand(d_out),
                             result(g.dq),
                             result(g.dk),
                             result(g.dv),
                             rows.numbers,
                             p.heads(),
                             p.kv_heads(),
                             p.queries(),
                             static_cast<int>(p.width()),
                             static_cast<int>(p.value_width()),
                             packs(p.q) && packs(p.k) && packs(p.v) && packs(d_out),
                             (!g.dq.defined() || packs(g.dq)) && (!g.dk.defined() || packs(g.dk)) &&
                                 (!g.dv.defined() || packs(g.dv)),
                             scores.arguments,
                             maps,
                             keys_own
                                 ? Schedule(maps.key_tiles, p.batch() * p.kv_heads(), bytes * group, false)
                                 : Schedule(maps.query_tiles, p.batch() * p.heads(), bytes / group, true)};
  };
  dispatch_16_bit(p.q.dtype(), [&](auto zero) {
    using T = decltype(zero);
    dispatch_width(padded_width(p), [&](auto width) {
      constexpr int w = decltype(width)::value;
      const auto with_stages = [&](auto stages) {
        constexpr int n = decltype(stages)::value;
        if constexpr (w <= 128) {
          if (g.dk.defined() || g.dv.defined())
            launch<T, w, Side::key, true, true, n>(arguments(Side::key), general, stream);
        } else {  // registers hold one of the two
          if (g.dk.defined()) launch<T, w, Side::key, true, false, n>(arguments(Side::key), general, stream);
          if (g.dv.defined()) launch<T, w, Side::key, false, true, n>(arguments(Side::key), general, stream);
        }
        if (wants_queries) launch<T, w, Side::query, true, false, n>(arguments(Side::query), general, stream);
      };
      if constexpr (w == 128)
        if (properties(device).sharedMemPerBlockOptin < backward_memory<w, 2> + static_memory)
          return with_stages(std::integral_constant<int, 1>{});
      constexpr int usual = w <= 128 ? 2 : 1;
      with_stages(std::integral_constant<int, usual>{});
    });
  });
  d_bias.finish(p);
}

}  // namespace torus::gpu::mma
