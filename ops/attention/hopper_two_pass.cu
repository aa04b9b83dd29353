// Backward of attention on Hopper for any map and width, and any score up to width 128: keys own blocks of
// threads for dK and dV, then queries for dQ, so that every sum has one owner and one order. One warp group
// copies rows by index, told by an agenda, two own 64 tokens each. Scores are computed twice:
// hopper_backward.cu is faster where it can be used.
#include "torus/ops/attention/hopper.h"

namespace torus::gpu::hopper {

using torus::detail::AttentionDropout;
using torus::detail::AttentionGradients;
using torus::detail::AttentionProblem;
using torus::detail::Side;

namespace {

constexpr int consumers = 2, threads = 128 * (consumers + 1);

struct TwoPassArguments {
  Rows q, k, v, d_out, dq, dk, dv;
  mma::RowNumbers rows;  // [B H, Nq]
  int64_t heads, kv_heads, queries, keys;
  int width, value_width;
  mma::ScoreArguments scores;
  int32_t* taken;  // as in the forward
  GroupedTable maps;
  mma::Schedule schedule;
};

// What a kernel makes. Of wide keys, registers hold one gradient.
enum class Makes { dk_and_dv, dk, dv, dq };

template <int width, bool general>
struct Shape {
  static constexpr int halves = width == 64 && !general ? 2 : 1;
  static constexpr int others = 64 * halves;
  static constexpr int own_stages = width == 64 ? 2 : 1;
  static constexpr int stages1 = width == 256 ? 2 : 4, stages2 = width == 256 ? 1 : 4;  // of y1, y2 below
  static constexpr int groups = own_stages, visits = 2 * stages1;
  static constexpr int own_bytes = 64 * width * 2, block_bytes = others * width * 2;
  static constexpr size_t memory = 2 * own_stages * consumers * own_bytes + (stages1 + stages2) * block_bytes;
};

template <class S, bool general>
struct Shared {
  Barrier own_full[S::own_stages], own_empty[S::own_stages], full1[S::stages1], empty1[S::stages1],
      full2[S::stages2], empty2[S::stages2];
  Agenda<consumers, S::halves, S::groups, S::visits> told;
  // Of queries that are others; the word is that of dropout.
  alignas(16) float lse[S::stages1][S::others], delta[S::stages1][S::others];
  alignas(16) uint32_t word[S::stages1][general ? S::others : 1];
};

// Owners x (keys: k, v; queries: q, dO) and others y (queries: q, dO; keys: k, v).
template <class T, int width, Makes makes, bool general>
__global__ void __launch_bounds__(threads, 1) two_pass(const __grid_constant__ TwoPassArguments a) {
  using S = Shape<width, general>;
  constexpr bool keys_own = makes != Makes::dq, of_scores = makes != Makes::dv,
                 of_weights = makes == Makes::dv || makes == Makes::dk_and_dv;
  constexpr int others = S::others;
  extern __shared__ __align__(1024) char memory[];
  char* const x1_tiles = memory;
  char* const x2_tiles = x1_tiles + S::own_stages * consumers * S::own_bytes;
  char* const y1_blocks = x2_tiles + S::own_stages * consumers * S::own_bytes;
  char* const y2_blocks = y1_blocks + S::stages1 * S::block_bytes;
  auto& shared = *reinterpret_cast<Shared<S, general>*>(memory + S::memory);
  auto& told = shared.told;
  const int thread = static_cast<int>(threadIdx.x), role = uniform(thread / 128),
            lane = thread % 32;  // 0 copies

  if (thread == 0) {
    constexpr uint32_t copying = 32 * copying_warps;
    for (int i = 0; i < S::own_stages; ++i)
      shared.own_full[i].init(copying), shared.own_empty[i].init(4 * consumers * voices);
    for (int i = 0; i < S::stages1; ++i)
      shared.full1[i].init(copying), shared.empty1[i].init(4 * consumers * voices);
    for (int i = 0; i < S::stages2; ++i)
      shared.full2[i].init(copying), shared.empty2[i].init(4 * consumers * voices);
    told.init();
    publish_barriers();
  }
  __syncthreads();
  const auto own_heads = static_cast<uint32_t>(keys_own ? a.kv_heads : a.heads);
  const auto group_size = static_cast<int32_t>(a.heads / a.kv_heads);  // query heads that share keys
  const int32_t members = keys_own ? group_size : 1;  // the query heads that owners go through
  static_assert(S::groups == S::own_stages);
  Stage<S::groups> own;  // group and its tiles
  Places places;         // of visits, and of what is visited

  if (role == 0) {
    give_registers<56>();
    if (thread < 32) return told.write(a.maps, a.schedule, a.taken, own_heads, members);
    const bool speaks = speaks_for_warp();
    const Rows &x1 = keys_own ? a.k : a.q, &x2 = keys_own ? a.v : a.d_out;
    const Rows &y1 = keys_own ? a.q : a.k, &y2 = keys_own ? a.d_out : a.v;
    for (;; own.next()) {
      const int own_at = own.index;
      told.group_full[own_at].wait(own.parity);
      if (told.group[own_at] < 0) return;
      const auto matrix = static_cast<uint32_t>(told.matrix[own_at]);
      const int64_t b = matrix / own_heads, own_head = matrix % own_heads;
      shared.own_empty[own_at].wait(own.parity ^ 1);
#pragma unroll 1
      for (int i = 0; i < consumers; ++i) {
        const int32_t* const tokens = told.owners[own_at] + 64 * i;
        const int tile = own_at * consumers + i;
        gather<T, width, 64>(x1_tiles + tile * S::own_bytes, x1.of<const T>(b, own_head), x1.row, a.width,
                             tokens);
        if constexpr (of_scores)
          gather<T, width, 64>(x2_tiles + tile * S::own_bytes, x2.of<const T>(b, own_head), x2.row,
                               a.value_width, tokens);
      }
      shared.own_full[own_at].arrive_after_copies();
      __syncwarp();
      if (speaks) told.group_empty[own_at].arrive();
      for (bool last = false; !last; places.next()) {
        const int visited = places.index<S::visits>(), at = places.index<S::stages1>(),
                  at2 = places.index<S::stages2>();
        told.visit_full[visited].wait(places.parity<S::visits>());
        last = told.notes[visited].is_last();
        const int32_t* const tokens = told.tokens[visited];
        const int64_t query_head = own_head * members + told.notes[visited].member;
        const int64_t other_head = keys_own ? query_head : own_head / group_size;
        shared.empty1[at].wait(places.parity<S::stages1>() ^ 1);
        if constexpr (keys_own) {
          const int64_t first_row = (b * a.heads + query_head) * a.queries;
          for (int i = thread - 32; i < others; i += 32 * copying_warps) {
            const int32_t token = tokens[i];
            const int64_t from = first_row + max(token, 0);
            copy_4_async(shared_address(&shared.lse[at][i]), a.rows.lse + from, token >= 0);
            copy_4_async(shared_address(&shared.delta[at][i]), a.rows.delta + from, token >= 0);
            if constexpr (general)
              if (a.rows.word)
                copy_4_async(shared_address(&shared.word[at][i]), a.rows.word + from, token >= 0);
          }
        }
        gather<T, width, others>(y1_blocks + at * S::block_bytes, y1.of<const T>(b, other_head), y1.row,
                                 a.width, tokens);
        shared.full1[at].arrive_after_copies();
        shared.empty2[at2].wait(places.parity<S::stages2>() ^ 1);
        gather<T, width, others>(y2_blocks + at2 * S::block_bytes, y2.of<const T>(b, other_head), y2.row,
                                 a.value_width, tokens);
        shared.full2[at2].arrive_after_copies();
        __syncwarp();
        if (speaks) told.visit_empty[visited].arrive();
      }
    }
  }

  take_registers<224>();
  const int me = role - 1, in_group = thread % 128;
  const bool speaks = speaks_for_warp();
  const float to_log2 = (general ? 1 : a.scores.scale) * log2_e;
  for (;; own.next()) {
    const int own_at = own.index;
    told.group_full[own_at].wait(own.parity);
    if (told.group[own_at] < 0) return;
    const auto matrix = static_cast<uint32_t>(told.matrix[own_at]);
    const int64_t b = matrix / own_heads, own_head = matrix % own_heads;
    const auto token = [&](int row) -> int64_t { return told.owners[own_at][64 * me + row]; };
    float d_x1[of_scores ? width / 2 : 1], d_x2[of_weights ? width / 2 : 1];
#pragma unroll
    for (int i = 0; i < width / 2; ++i) {
      if constexpr (of_scores) d_x1[i] = 0;
      if constexpr (of_weights) d_x2[i] = 0;
    }
    uint32_t own_rows = 0;  // rows without a token see nothing
    [[maybe_unused]] int64_t owner[2];
    [[maybe_unused]] float own_lse[2] = {}, own_delta[2] = {};
    [[maybe_unused]] uint32_t own_word[2] = {};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      owner[half] = token(in_group / 32 * 16 + lane / 4 + 8 * half);
      if (owner[half] < 0) continue;
      own_rows |= 0x33333333u << 2 * half;
      if constexpr (!keys_own) {
        const int64_t row = (b * a.heads + own_head) * a.queries + owner[half];
        own_lse[half] = a.rows.lse[row];
        own_delta[half] = a.rows.delta[row];
        if (general && a.rows.word) own_word[half] = a.rows.word[row];
      }
    }
    const bool ragged = __any_sync(0xffffffffu, own_rows != ~0u);
    const uint64_t x1_tile = descriptor(x1_tiles + (own_at * consumers + me) * S::own_bytes),
                   x2_tile = descriptor(x2_tiles + (own_at * consumers + me) * S::own_bytes);

    shared.own_full[own_at].wait(own.parity);
    publish_stores();
    for (bool last = false; !last; places.next()) {
      const int visited = places.index<S::visits>(), at = places.index<S::stages1>(),
                at2 = places.index<S::stages2>();
      const auto done = [&](Barrier& empty) {
        __syncwarp();  // all lanes have read what it guards
        if (speaks) empty.arrive();
      };
      told.visit_full[visited].wait(places.parity<S::visits>());
      const auto& note = told.notes[visited];
      const int64_t query_head = own_head * members + note.member;
      const Allowed<S::halves> allowed(note, me);
      last = allowed.last;
      shared.full1[at].wait(places.parity<S::stages1>());
      publish_stores();
      if (!allowed.visits) {
        shared.full2[at2].wait(places.parity<S::stages2>());
        done(shared.empty1[at]), done(shared.empty2[at2]), done(told.visit_empty[visited]);
        continue;
      }
      const char* const y1_block = y1_blocks + at * S::block_bytes;
      const char* const y2_block = y2_blocks + at2 * S::block_bytes;
      float s[others / 2], dp[of_scores ? others / 2 : 1];
      const auto across = [&](float(&c)[others / 2], uint64_t left, const char* block) {
        const uint64_t right = descriptor(block);
#pragma unroll
        for (int kk = 0; kk < width / 16; ++kk)
          multiply<T, Major::k, Major::k>(c, further(left, kk / 4 * 8192 + kk % 4 * 32),
                                          further(right, kk / 4 * others * 128 + kk % 4 * 32), kk > 0);
        end_products();
      };
      [[maybe_unused]] uint32_t slope[8][2];
      const auto other_token = [&](int j, int c) -> int64_t {
        return told.tokens[visited][8 * j + lane % 4 * 2 + c];
      };
      begin_products();
      across(s, x1_tile, y1_block);
      if constexpr (general) {
        wait_for_products<0>();
        hold(s);
        mma::finish_scores<T, !keys_own>(reinterpret_cast<float(&)[8][4]>(s), slope, a.scores, b, query_head,
                                         owner, other_token);
        begin_products();
      }
      shared.full2[at2].wait(places.parity<S::stages2>());
      publish_stores();
      if constexpr (of_scores) across(dp, x2_tile, y2_block);
      if constexpr (!general) {
        wait_for_products<of_scores ? 1 : 0>();
        hold(s);
      }
#pragma unroll
      for (int j = 0; j < others / 8; ++j) {
        float2 lse;
        if constexpr (keys_own) lse = *reinterpret_cast<const float2*>(&shared.lse[at][8 * j + lane % 4 * 2]);
#pragma unroll
        for (int e = 0; e < 4; ++e)
          s[4 * j + e] = approximate_exp2(
              fmaf(s[4 * j + e], to_log2, -(keys_own ? (e % 2 ? lse.y : lse.x) : own_lse[e / 2])));
      }
      uint32_t seen[S::halves];
#pragma unroll
      for (int i = 0; i < S::halves; ++i) seen[i] = allowed.word[i] & own_rows;
      const bool masked = allowed.masked || ragged;
      if (masked) keep_allowed(s, seen, 0);  // the branch keeps ptxas from waiting for dP before exponentials
      if constexpr (of_scores) {
        wait_for_products<0>();
        hold(dp);
        if constexpr (!of_weights) done(shared.empty2[at2]);
      }
      uint32_t weights[others / 16][4], ds[others / 16][4];
#pragma unroll
      for (int j = 0; j < others / 8; ++j) {
        float2 delta;
        if constexpr (keys_own && of_scores)
          delta = *reinterpret_cast<const float2*>(&shared.delta[at][8 * j + lane % 4 * 2]);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int i = 4 * j + e;
          [[maybe_unused]] float factor = 1;  // of dropout
          if constexpr (general)
            if (a.rows.word) {
              const int64_t key = keys_own ? owner[e / 2] : other_token(j, e % 2);
              const uint32_t word =
                  keys_own ? shared.word[at][8 * j + lane % 4 * 2 + e % 2] : own_word[e / 2];
              const bool kept = AttentionDropout::mix(word, static_cast<uint32_t>(key)) >= a.scores.threshold;
              factor = kept ? a.scores.keep_scale : 0;
            }
          if constexpr (of_scores)
            dp[i] = s[i] * ((general ? factor * dp[i] : dp[i]) -
                            (keys_own ? (e % 2 ? delta.y : delta.x) : own_delta[e / 2]));
          if constexpr (general) s[i] *= factor;
        }
      }
      if constexpr (of_scores)
        if (masked) keep_allowed(dp, seen, 0);  // what is not seen may be infinite
      if constexpr (general && !keys_own) {
#pragma unroll 1
        for (int n = 0; n < a.scores.terms; ++n) {
          const mma::BiasTerm& term = a.scores.term[n];
          if (!term.gradient) continue;
          T* const to =
              static_cast<T*>(term.gradient) + b * term.gradient_step[0] + query_head * term.gradient_step[1];
#pragma unroll
          for (int i = 0; i < others / 2; ++i)
            if (seen[i / 32] >> i % 32 & 1)
              to[owner[i / 2 % 2] * term.gradient_step[2] +
                 other_token(i / 4, i % 2) * term.gradient_step[3]] = narrow<T>(dp[i]);
        }
      }
      if constexpr (general && of_scores) {
        if (a.scores.softcap > 0) {
#pragma unroll
          for (int i = 0; i < others / 2; i += 2) {
            const float2 by = __half22float2(reinterpret_cast<const __half2&>(slope[i / 4][i / 2 % 2]));
            dp[i] *= by.x, dp[i + 1] *= by.y;
          }
        }
      }
#pragma unroll
      for (int kk = 0; kk < others / 16; ++kk)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int i = 8 * kk + e / 2 * 4 + e % 2 * 2;
          if constexpr (of_weights) weights[kk][e] = pack<T>(s[i], s[i + 1]);
          if constexpr (of_scores) ds[kk][e] = pack<T>(dp[i], dp[i + 1]);
        }
      // A product is at most 128 columns wide.
      const auto down = [&](float(&c)[width / 2], const uint32_t(&left)[others / 16][4], const char* block) {
#pragma unroll
        for (int part = 0; part < (width + 127) / 128; ++part)
#pragma unroll
          for (int kk = 0; kk < others / 16; ++kk)
            multiply<T, Major::mn>(
                reinterpret_cast<float(&)[width == 64 ? 32 : 64]>(c[part * 64]), left[kk],
                further(
                    descriptor(block + part * 2 * others * 128 + allowed.seen[kk / 4] * 8192, others * 128),
                    kk % 4 * 2048),
                1);
        end_products();
      };
      if constexpr (!of_scores) done(shared.empty1[at]);
      begin_products();
      if constexpr (of_weights) down(d_x2, weights, y2_block);
      if constexpr (of_scores) down(d_x1, ds, y1_block);
      wait_for_products<0>();
      if constexpr (of_scores) {
        hold(d_x1);
        done(shared.empty1[at]);
      }
      if constexpr (of_weights) {
        hold(d_x2);
        done(shared.empty2[at2]);
      }
      done(told.visit_empty[visited]);
    }
    if (speaks) shared.own_empty[own_at].arrive();

    const float scale[2] = {a.scores.scale, a.scores.scale}, one[2] = {1, 1};
    const Rows& to = keys_own ? a.dk : a.dq;
    if constexpr (of_scores)
      if (to.data) store_rows<T>(d_x1, scale, to.of<T>(b, own_head), to.row, 0, a.width, token);
    if constexpr (of_weights)
      if (a.dv.data) store_rows<T>(d_x2, one, a.dv.of<T>(b, own_head), a.dv.row, 0, a.value_width, token);
    __syncwarp();
    if (speaks) told.group_empty[own_at].arrive();
  }
}

template <class T, int width, Makes makes, bool general>
void launch(TwoPassArguments arguments, const AttentionProblem& p) {
  using S = Shape<width, general>;
  constexpr bool keys_own = makes != Makes::dq;
  arguments.maps = grouped_table(p, keys_own ? Side::key : Side::query, consumers, S::halves);
  arguments.schedule =
      mma::Schedule(arguments.maps.groups, p.batch() * (keys_own ? p.kv_heads() : p.heads()),
                    (keys_own ? p.queries() : p.keys()) * (p.width() + p.value_width()) * 2, false);
  Tensor taken;
  if (!arguments.maps.uniform) {
    taken = Tensor::zeros({1}, i32, p.q.device());
    arguments.taken = taken.mutable_data<int32_t>();
  }
  const auto kernel = two_pass<T, width, makes, general>;
  constexpr size_t bytes = S::memory + sizeof(Shared<S, general>);
  static_assert(bytes <= 227 << 10);
  allow_shared_memory(reinterpret_cast<const void*>(kernel), bytes);
  kernel<<<blocks_at_once(arguments.schedule, p.q.device()), threads, bytes, stream_of(p.q)>>>(arguments);
  check_launch("attention.backward");
}

}  // namespace

void run_two_pass_backward(const AttentionProblem& p, AttentionGradients& g, const Tensor& d_out) {
  const mma::BiasGradients d_bias(p, g);
  const mma::HostScores scores(p, d_bias.of_scores);
  const mma::PreparedRows rows = mma::prepare_rows(p, g, d_out, p.queries(), scores.arguments.position);
  const auto result = [](const Tensor& x) { return x.defined() ? mma::operand(x) : Rows{}; };
  const TwoPassArguments arguments{mma::operand(p.q),
                                   mma::operand(p.k),
                                   mma::operand(p.v),
                                   mma::operand(d_out),
                                   result(g.dq),
                                   result(g.dk),
                                   result(g.dv),
                                   rows.numbers,
                                   p.heads(),
                                   p.kv_heads(),
                                   p.queries(),
                                   p.keys(),
                                   static_cast<int>(p.width()),
                                   static_cast<int>(p.value_width()),
                                   scores.arguments,
                                   nullptr,
                                   {},
                                   mma::Schedule(1, 1, 1, false)};
  const bool wants_keys = g.dk.defined() || g.dv.defined(),
             wants_queries = g.dq.defined() || d_bias.any_of_scores;
  mma::dispatch_16_bit(p.q.dtype(), [&](auto zero) {
    using T = decltype(zero);
    mma::dispatch_width(mma::padded_width(p), [&](auto padded) {
      constexpr int width = decltype(padded)::value;
      const auto run = [&](auto is_general) {
        constexpr bool general = decltype(is_general)::value;
        if constexpr (width == 256 || (width == 128 && general)) {
          if (g.dk.defined()) launch<T, width, Makes::dk, general>(arguments, p);
          if (g.dv.defined()) launch<T, width, Makes::dv, general>(arguments, p);
        } else if (wants_keys) {
          launch<T, width, Makes::dk_and_dv, general>(arguments, p);
        }
        if (wants_queries) launch<T, width, Makes::dq, general>(arguments, p);
      };
      if constexpr (width < 256)
        if (mma::general_scores(p)) return run(std::true_type{});
      run(std::false_type{});
    });
  });
  d_bias.finish(p);
}

}  // namespace torus::gpu::hopper
