// Backward of attention on Hopper for masks that gather, such as windows on grids: keys own blocks of threads
// for dK and dV, then queries for dQ, so that every sum has one owner and one order. One warp group copies
// rows by index, two own 64 tokens each.
#include "torus/ops/attention/hopper.h"

namespace torus::gpu::hopper {

using torus::detail::AttentionGradients;
using torus::detail::AttentionProblem;
using torus::detail::Side;

namespace {

constexpr float log2_e = 1.44269504088896341f;
constexpr int consumers = 2, threads = 128 * (consumers + 1);

struct GatheredArguments {
  Rows q, k, v, d_out, dq, dk, dv;
  const float *lse, *delta;  // [B H, Nq]
  int64_t heads, kv_heads, queries, keys;
  int width, value_width;
  float scale;
  GroupedTable maps;
  mma::Schedule schedule;
};

template <int width>
struct Shape {
  static constexpr int halves = width == 64 ? 2 : 1;
  static constexpr int others = 64 * halves, stages = 4;
  static constexpr int own_bytes = 64 * width * 2, block_bytes = others * width * 2;
  static constexpr size_t memory = 2 * consumers * own_bytes + 2 * stages * block_bytes;
};

template <class S>
struct Shared {
  Barrier own_full, full[S::stages], empty[S::stages];
  BlockNote<consumers, S::halves> notes[S::stages];
  alignas(16) float lse[S::stages][S::others], delta[S::stages][S::others];  // of queries that are others
};

// Owners x (keys: k, v; queries: q, dO) and others y. Keys: dK and dV. Queries: dQ.
template <class T, int width, Side owners>
__global__ void __launch_bounds__(threads, 1) gathered_backward(const __grid_constant__ GatheredArguments a) {
  using S = Shape<width>;
  constexpr bool keys_own = owners == Side::key;
  constexpr int others = S::others;
  extern __shared__ __align__(1024) char memory[];
  char* const x1_tiles = memory;
  char* const x2_tiles = x1_tiles + consumers * S::own_bytes;
  char* const y1_blocks = x2_tiles + consumers * S::own_bytes;
  char* const y2_blocks = y1_blocks + S::stages * S::block_bytes;
  auto& shared = *reinterpret_cast<Shared<S>*>(memory + S::memory);
  const int thread = static_cast<int>(threadIdx.x), role = uniform(thread / 128),
            lane = thread % 32;  // 0 copies

  if (thread == 0) {
    shared.own_full.init(128);
    for (int i = 0; i < S::stages; ++i)
      shared.full[i].init(128 + 1), shared.empty[i].init(4 * consumers);  // + 1: the note
    publish_barriers();
  }
  __syncthreads();
  int64_t group, matrix;
  a.schedule.find(blockIdx.x, group, matrix);
  const auto own_heads = static_cast<uint32_t>(keys_own ? a.kv_heads : a.heads);
  const int64_t b = static_cast<uint32_t>(matrix) / own_heads, own_head = matrix - b * own_heads;
  const int64_t members = a.heads / a.kv_heads, owner_count = keys_own ? a.keys : a.queries;
  // The query heads that are gone through.
  const int64_t first_head = keys_own ? own_head * members : own_head,
                last_head = first_head + (keys_own ? members : 1);

  if (role == 0) {
    give_registers<40>();
    const Rows &x1 = keys_own ? a.k : a.q, &x2 = keys_own ? a.v : a.d_out;
    const Rows &y1 = keys_own ? a.q : a.k, &y2 = keys_own ? a.d_out : a.v;
    const GroupedView& own_map = a.maps.of(b, first_head);
#pragma unroll 1
    for (int i = 0; i < consumers; ++i) {
      const int32_t token = lane < 16 ? owner(own_map, own_map.tiles[group * consumers + i],
                                              thread / 32 * 16 + lane, owner_count)
                                      : -1;
      gather<T, width, 64>(x1_tiles + i * S::own_bytes, x1.of<const T>(b, own_head), x1.row, a.width, token);
      gather<T, width, 64>(x2_tiles + i * S::own_bytes, x2.of<const T>(b, own_head), x2.row, a.value_width,
                           token);
    }
    shared.own_full.arrive_after_copies();
    Stage<S::stages> stage;
    for (int64_t h = first_head; h < last_head; ++h) {
      const int64_t other_head = keys_own ? h : h / members;
      const T* const from1 = y1.of<const T>(b, other_head);
      const T* const from2 = y2.of<const T>(b, other_head);
      const int64_t first_row = (b * a.heads + h) * a.queries;
      walk_rows<others, 3 + consumers * S::halves>(
          a.maps.of(b, h), group, [&](int32_t word, bool ends, bool last, int32_t token) {
            const int at = stage.index;
            shared.empty[at].wait(stage.parity ^ 1);
            if (thread < 32) {
              auto& note = shared.notes[at];
              if (lane == 0) note.member = static_cast<int32_t>(h - first_head);
              write_note(note, word, ends, last && h == last_head - 1);
              if (lane == 0) shared.full[at].arrive();
            }
            if (keys_own && lane < others / 4) {
              const int row = thread / 32 * (others / 4) + lane;
              const int64_t from = first_row + max(token, 0);
              copy_4_async(shared_address(&shared.lse[at][row]), a.lse + from, token >= 0);
              copy_4_async(shared_address(&shared.delta[at][row]), a.delta + from, token >= 0);
            }
            gather<T, width, others>(y1_blocks + at * S::block_bytes, from1, y1.row, a.width, token);
            gather<T, width, others>(y2_blocks + at * S::block_bytes, from2, y2.row, a.value_width, token);
            shared.full[at].arrive_after_copies();
            stage.next();
          });
    }
    return;
  }

  take_registers<232>();
  const int me = role - 1, in_group = thread % 128;
  const bool speaks = lane == 0;  // for its warp
  const float to_log2 = a.scale * log2_e;
  const GroupedView& own_map = a.maps.of(b, first_head);
  const int64_t tile = own_map.tiles[group * consumers + me];
  const auto token = [&](int row) -> int64_t { return owner(own_map, tile, row, owner_count); };
  float d_x1[width / 2], d_x2[width / 2];
#pragma unroll
  for (int i = 0; i < width / 2; ++i) {
    d_x1[i] = 0;
    if constexpr (keys_own) d_x2[i] = 0;
  }
  uint32_t own_rows = 0;  // rows without a token see nothing
  [[maybe_unused]] float own_lse[2] = {}, own_delta[2] = {};
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int64_t own = token(in_group / 32 * 16 + lane / 4 + 8 * half);
    if (own < 0) continue;
    own_rows |= 0x33333333u << 2 * half;
    if constexpr (!keys_own) {
      own_lse[half] = a.lse[(b * a.heads + own_head) * a.queries + own];
      own_delta[half] = a.delta[(b * a.heads + own_head) * a.queries + own];
    }
  }
  const uint64_t x1_tile = descriptor(x1_tiles + me * S::own_bytes),
                 x2_tile = descriptor(x2_tiles + me * S::own_bytes);

  shared.own_full.wait(0);
  publish_stores();
  Stage<S::stages> stage;
  for (bool last = false; !last; stage.next()) {
    const int at = stage.index;
    shared.full[at].wait(stage.parity);
    publish_stores();
    const auto& note = shared.notes[at];
    last = uniform(note.last);
    const Allowed<S::halves> allowed(note, me, a.maps.of(b, first_head + note.member).fragments);
    if (!allowed.visits) {
      if (speaks) shared.empty[at].arrive();
      continue;
    }
    const char* const y1_block = y1_blocks + at * S::block_bytes;
    const char* const y2_block = y2_blocks + at * S::block_bytes;
    float s[others / 2], dp[others / 2];
    const auto across = [&](float(&c)[others / 2], uint64_t left, const char* block) {
      const uint64_t right = descriptor(block);
#pragma unroll
      for (int kk = 0; kk < width / 16; ++kk)
        multiply<T, Major::k, Major::k>(c, further(left, kk / 4 * 8192 + kk % 4 * 32),
                                        further(right, kk / 4 * others * 128 + kk % 4 * 32), kk > 0);
      end_products();
    };
    begin_products();
    across(s, x1_tile, y1_block);
    across(dp, x2_tile, y2_block);
    wait_for_products<1>();
    hold(s);
#pragma unroll
    for (int j = 0; j < others / 8; ++j) {
      float2 lse;
      if constexpr (keys_own) lse = *reinterpret_cast<const float2*>(&shared.lse[at][8 * j + lane % 4 * 2]);
#pragma unroll
      for (int e = 0; e < 4; ++e)
        s[4 * j + e] =
            exp2_approx(fmaf(s[4 * j + e], to_log2, -(keys_own ? (e % 2 ? lse.y : lse.x) : own_lse[e / 2])));
    }
    wait_for_products<0>();
    hold(dp);
    uint32_t weights[others / 16][4], ds[others / 16][4];
#pragma unroll
    for (int j = 0; j < others / 8; ++j) {
      float2 delta;
      if constexpr (keys_own)
        delta = *reinterpret_cast<const float2*>(&shared.delta[at][8 * j + lane % 4 * 2]);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int i = 4 * j + e;
        const bool seen = allowed.word[i / 32] & own_rows & 1u << i % 32;
        dp[i] = seen ? s[i] * (dp[i] - (keys_own ? (e % 2 ? delta.y : delta.x) : own_delta[e / 2])) : 0;
        s[i] = seen ? s[i] : 0;
      }
    }
#pragma unroll
    for (int kk = 0; kk < others / 16; ++kk)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int i = 8 * kk + e / 2 * 4 + e % 2 * 2;
        if constexpr (keys_own) weights[kk][e] = pack<T>(s[i], s[i + 1]);
        ds[kk][e] = pack<T>(dp[i], dp[i + 1]);
      }
    const auto down = [&](float(&c)[width / 2], const uint32_t(&left)[others / 16][4], const char* block) {
#pragma unroll
      for (int kk = 0; kk < others / 16; ++kk)
        multiply<T, Major::mn>(
            c, left[kk],
            further(descriptor(block + allowed.seen[kk / 4] * 8192, others * 128), kk % 4 * 2048), 1);
      end_products();
    };
    begin_products();
    if constexpr (keys_own) down(d_x2, weights, y2_block);
    down(d_x1, ds, y1_block);
    wait_for_products<0>();
    hold(d_x1);
    if constexpr (keys_own) hold(d_x2);
    if (speaks) shared.empty[at].arrive();
  }

  if (tile < 0) return;
  const float scale[2] = {a.scale, a.scale}, one[2] = {1, 1};
  const Rows& to = keys_own ? a.dk : a.dq;
  store_rows<T>(d_x1, scale, to.of<T>(b, own_head), to.row, 0, a.width, token);
  if constexpr (keys_own)
    store_rows<T>(d_x2, one, a.dv.of<T>(b, own_head), a.dv.row, 0, a.value_width, token);
}

template <class T, int width, Side owners>
void launch(GatheredArguments arguments, const AttentionProblem& p) {
  using S = Shape<width>;
  const bool keys_own = owners == Side::key;
  arguments.maps = grouped_table(p, owners, consumers, S::halves);
  arguments.schedule =
      mma::Schedule(arguments.maps.groups, p.batch() * (keys_own ? p.kv_heads() : p.heads()),
                    (keys_own ? p.queries() : p.keys()) * (p.width() + p.value_width()) * 2, false);
  const auto kernel = gathered_backward<T, width, owners>;
  constexpr size_t bytes = S::memory + sizeof(Shared<S>);
  allow_shared_memory(reinterpret_cast<const void*>(kernel), bytes);
  kernel<<<arguments.schedule.blocks(), threads, bytes, stream_of(p.q)>>>(arguments);
  check_launch("attention.backward");
}

}  // namespace

void run_gathered_backward(const AttentionProblem& p, AttentionGradients& g, const Tensor& d_out) {
  const Device device = p.q.device();
  Tensor lse = Tensor::empty({p.batch(), p.heads(), p.queries()}, f32, device),
         delta = Tensor::empty({p.batch(), p.heads(), p.queries()}, f32, device);
  mma::prepare_rows(p, g, d_out, p.queries(),
                    {lse.mutable_data<float>(), delta.mutable_data<float>(), nullptr}, {});
  const GatheredArguments arguments{mma::operand(p.q),
                                    mma::operand(p.k),
                                    mma::operand(p.v),
                                    mma::operand(d_out),
                                    mma::operand(g.dq),
                                    mma::operand(g.dk),
                                    mma::operand(g.dv),
                                    lse.data<float>(),
                                    delta.data<float>(),
                                    p.heads(),
                                    p.kv_heads(),
                                    p.queries(),
                                    p.keys(),
                                    static_cast<int>(p.width()),
                                    static_cast<int>(p.value_width()),
                                    static_cast<float>(p.scale),
                                    {},
                                    mma::Schedule(1, 1, 1, false)};
  mma::dispatch_16_bit(p.q.dtype(), [&](auto zero) {
    using T = decltype(zero);
    if (mma::padded_width(p) == 64) {
      launch<T, 64, Side::key>(arguments, p);
      launch<T, 64, Side::query>(arguments, p);
    } else {
      launch<T, 128, Side::key>(arguments, p);
      launch<T, 128, Side::query>(arguments, p);
    }
  });
}

}  // namespace torus::gpu::hopper
