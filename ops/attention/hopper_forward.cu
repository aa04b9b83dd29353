// Forward of attention on Hopper, after FlashAttention-3 (Shah et al., 2024): one warp group copies keys and
// values to shared memory, the others own 64 queries each. Their scores and weights stay in registers; the
// softmax of one block overlaps with the products of the block before.
#include "torus/ops/attention/hopper.h"

namespace torus::gpu::hopper {

using torus::detail::AttentionDropout;
using torus::detail::AttentionProblem;
using torus::detail::Side;

namespace {

struct ForwardArguments {
  CUtensorMap q, k, v;
  Rows q_rows, k_rows, v_rows, out;
  float* lse;
  int64_t heads, group, queries;  // group: query heads that share keys
  int width, value_width;
  mma::ScoreArguments scores;
  int32_t* taken;  // how many tiles were taken beyond the first of each block of threads; null: every n-th is
                   // its own
  GroupedTable maps;
  mma::Schedule schedule;
};

// Queries a warp group: 64. `consumers` warp groups; keys at a time. `general`: scores are more than products
// times a positive scale; what makes them wants registers.
template <int width, bool gathers, bool general, int warp_groups>
struct Shape {
  static constexpr int consumers = warp_groups;
  static constexpr int halves = width == 256 || general ? 1 : 2;
  static constexpr int keys = 64 * halves;
  static constexpr int stages = general || width == 64 ? 4 : 2;
  static constexpr int q_stages = width == 256 ? 1 : 2;
  static constexpr int threads = 128 * (consumers + 1);
  static constexpr int panels = width / 64;
  static constexpr int q_bytes = 64 * width * 2, block_bytes = keys * width * 2;
  static constexpr size_t memory = q_stages * consumers * q_bytes + 2 * stages * block_bytes;
};

// What the thread that copies boxes tells of each stage; as Agenda.
template <class S>
struct BoxNotes {
  BlockNote<S::consumers, S::halves> notes[S::stages];
  int32_t group[S::q_stages], matrix[S::q_stages];  // whose queries are there; group -1: no more
};

constexpr int groups = 2, visits = 8;  // those ahead, where rows are gathered

// The part of shared memory that is not tiles.
template <class S, bool gathers>
struct Shared {
  Barrier q_full[S::q_stages], q_empty[S::q_stages], k_full[S::stages], k_empty[S::stages], v_full[S::stages],
      v_empty[S::stages];
  std::conditional_t<gathers, Agenda<S::consumers, S::halves, groups, visits>, BoxNotes<S>> told;
};

// Copies boxes, by one thread.
template <class S>
__device__ inline void copy_tiles(const ForwardArguments& a, Shared<S, false>& shared, char* q_tiles,
                                  char* k_blocks, char* v_blocks) {
  constexpr int stride = 3 + S::consumers * S::halves;
  Stage<S::stages> stage;
  Stage<S::q_stages> q_stage;
  const int64_t total = a.schedule.tiles * a.schedule.matrices;
  for (int64_t index = blockIdx.x, next;; index = next, q_stage.next()) {
    int64_t group = -1, matrix = 0;
    if (index < total) a.schedule.find(index, group, matrix);
    const int q_at = q_stage.index;
    shared.q_empty[q_at].wait(q_stage.parity ^ 1);  // of a fresh barrier, the phase before is complete
    shared.told.group[q_at] = static_cast<int32_t>(group);
    shared.told.matrix[q_at] = static_cast<int32_t>(matrix);
    if (group < 0) {
      shared.q_full[q_at].arrive();
      return;
    }
    next = a.taken ? int64_t{gridDim.x} + atomicAdd(a.taken, 1) : index + gridDim.x;
    const auto heads = static_cast<uint32_t>(a.heads);
    const auto b = static_cast<int32_t>(static_cast<uint32_t>(matrix) / heads),
               h = static_cast<int32_t>(static_cast<uint32_t>(matrix) - b * heads);
    const auto kv_head = static_cast<int32_t>(static_cast<uint32_t>(h) / static_cast<uint32_t>(a.group));
    shared.q_full[q_at].arrive_and_expect(S::consumers * S::q_bytes);
    for (int i = 0; i < S::consumers; ++i)
      for (int panel = 0; panel < S::panels; ++panel)
        copy_box(q_tiles + (q_at * S::consumers + i) * S::q_bytes + panel * 8192, a.q, panel * 64,
                 static_cast<int32_t>(group * S::consumers + i) * 64, h, b, shared.q_full[q_at]);
    const GroupedView& map = a.maps.of(b, h);
    const int32_t *entry = map.entries + int64_t{map.first[group]} * stride, *const end =
                                                                                 map.entries +
                                                                                 int64_t{
                                                                                     map.first[group + 1]} *
                                                                                     stride;
    for (; entry != end; entry += stride) {
      const int32_t blocks = entry[1];
      for (int32_t n = 0; n < blocks; ++n) {
        const int32_t first = entry[0] + n * S::keys;
        const int at = stage.index;
        shared.k_empty[at].wait(stage.parity ^ 1);
        write_note(shared.told.notes[at], entry, n == blocks - 1, n == blocks - 1 && entry + stride == end);
        shared.told.notes[at].first = first, shared.told.notes[at].fragments = map.fragments;
        shared.k_full[at].arrive_and_expect(S::block_bytes);
#pragma unroll
        for (int panel = 0; panel < S::panels; ++panel)
          copy_box(k_blocks + at * S::block_bytes + panel * S::keys * 128, a.k, panel * 64, first, kv_head, b,
                   shared.k_full[at]);
        shared.v_empty[at].wait(stage.parity ^ 1);
        shared.v_full[at].arrive_and_expect(S::block_bytes);
#pragma unroll
        for (int panel = 0; panel < S::panels; ++panel)
          copy_box(v_blocks + at * S::block_bytes + panel * S::keys * 128, a.v, panel * 64, first, kv_head, b,
                   shared.v_full[at]);
        stage.next();
      }
    }
  }
}

// Copies rows by index, by the copying warps.
template <class T, int width, class S>
__device__ inline void gather_tiles(const ForwardArguments& a, Shared<S, true>& shared, char* q_tiles,
                                    char* k_blocks, char* v_blocks) {
  auto& told = shared.told;
  const bool speaks = speaks_for_warp();
  Stage<S::stages> stage;
  Stage<S::q_stages> q_stage;
  Stage<groups> own;
  Stage<visits> visit;
  for (;; q_stage.next(), own.next()) {
    told.group_full[own.index].wait(own.parity);
    if (told.group[own.index] < 0) return;
    const auto matrix = static_cast<uint32_t>(told.matrix[own.index]), heads = static_cast<uint32_t>(a.heads);
    const int64_t b = matrix / heads, h = matrix % heads, kv_head = h / a.group;
    const int q_at = q_stage.index;
    shared.q_empty[q_at].wait(q_stage.parity ^ 1);
#pragma unroll 1
    for (int i = 0; i < S::consumers; ++i)
      gather<T, width, 64>(q_tiles + (q_at * S::consumers + i) * S::q_bytes, a.q_rows.of<const T>(b, h),
                           a.q_rows.row, a.width, told.owners[own.index] + 64 * i);
    shared.q_full[q_at].arrive_after_copies();
    __syncwarp();
    if (speaks) told.group_empty[own.index].arrive();
    const T* const k = a.k_rows.of<const T>(b, kv_head);
    const T* const v = a.v_rows.of<const T>(b, kv_head);
    for (bool last = false; !last; stage.next(), visit.next()) {
      const int at = stage.index, visited = visit.index;
      told.visit_full[visited].wait(visit.parity);
      last = told.notes[visited].is_last();
      shared.k_empty[at].wait(stage.parity ^ 1);
      gather<T, width, S::keys>(k_blocks + at * S::block_bytes, k, a.k_rows.row, a.width,
                                told.tokens[visited]);
      shared.k_full[at].arrive_after_copies();
      shared.v_empty[at].wait(stage.parity ^ 1);
      gather<T, width, S::keys>(v_blocks + at * S::block_bytes, v, a.v_rows.row, a.value_width,
                                told.tokens[visited]);
      shared.v_full[at].arrive_after_copies();
      __syncwarp();
      if (speaks) told.visit_empty[visited].arrive();
    }
  }
}

template <class T, int width, bool gathers, bool general, int warp_groups>
__global__ void __launch_bounds__(Shape<width, gathers, general, warp_groups>::threads, 1)
    forward(const __grid_constant__ ForwardArguments a) {
  using S = Shape<width, gathers, general, warp_groups>;
  constexpr int consumers = S::consumers, halves = S::halves, keys = S::keys, stages = S::stages;
  static_assert(S::panels * 64 == width);
  extern __shared__ __align__(1024) char memory[];
  char* const q_tiles = memory;  // of a consumer, panels of 64 queries
  char* const k_blocks = q_tiles + S::q_stages * consumers * S::q_bytes;
  char* const v_blocks = k_blocks + stages * S::block_bytes;
  auto& shared = *reinterpret_cast<Shared<S, gathers>*>(memory + S::memory);
  const int thread = static_cast<int>(threadIdx.x), role = uniform(thread / 128);  // 0 copies

  if (thread == 0) {
    constexpr uint32_t copying = gathers ? 32 * copying_warps : 1;
    for (int i = 0; i < S::q_stages; ++i)
      shared.q_full[i].init(copying), shared.q_empty[i].init(4 * consumers * voices);
    for (int i = 0; i < stages; ++i) {
      shared.k_full[i].init(copying), shared.v_full[i].init(copying);
      shared.k_empty[i].init(4 * consumers * voices), shared.v_empty[i].init(4 * consumers * voices);
    }
    if constexpr (gathers) shared.told.init();
    publish_barriers();
  }
  __syncthreads();

  if (role == 0) {
    give_registers<consumers == 3 ? 32 : gathers ? 56 : general ? 24 : 40>();
    if constexpr (!gathers) {
      if (thread == 0) copy_tiles(a, shared, q_tiles, k_blocks, v_blocks);
    } else if (thread < 32) {
      shared.told.write(a.maps, a.schedule, a.taken, static_cast<uint32_t>(a.heads), 1);
    } else {
      gather_tiles<T, width>(a, shared, q_tiles, k_blocks, v_blocks);
    }
    return;
  }

  take_registers<consumers == 3 ? 160 : gathers ? 224 : general ? 240 : 232>();
  const int me = role - 1, in_group = thread % 128, lane = thread % 32;
  const bool speaks = speaks_for_warp();
  constexpr int out_parts = width == 256 ? 2 : 1, out_size = width == 64 ? 32 : 64;
  const float scale = general ? 1 : a.scores.scale, to_log2 = scale * log2_e;
  const float slack = 8 / to_log2;  // weights may grow to 2^8 before sums are rescaled
  Stage<stages> stage;
  Stage<S::q_stages> q_stage;
  constexpr bool in_turn = consumers == 3;
  if (in_turn && me == consumers - 1) arrive_at(1, 256);

  auto& told = shared.told;
  [[maybe_unused]] Stage<groups> own_stage;
  [[maybe_unused]] Stage<visits> visit;
  for (;; q_stage.next(), own_stage.next()) {
    const int q_at = q_stage.index, own_at = gathers ? own_stage.index : q_at;
    if constexpr (gathers)
      told.group_full[own_at].wait(own_stage.parity);
    else
      shared.q_full[q_at].wait(q_stage.parity);
    const int64_t group = told.group[own_at], matrix = told.matrix[own_at];
    if (group < 0) return;
    if constexpr (gathers) {
      shared.q_full[q_at].wait(q_stage.parity);
      publish_stores();
    }
    const uint64_t q_tile = descriptor(q_tiles + (q_at * consumers + me) * S::q_bytes);
    const auto heads = static_cast<uint32_t>(a.heads);
    const int64_t b = static_cast<uint32_t>(matrix) / heads, h = matrix - b * heads;
    const auto token = [&](int row) -> int64_t {
      if constexpr (gathers) return told.owners[own_at][64 * me + row];
      const int64_t query = (group * consumers + me) * 64 + row;
      return query < a.queries ? query : -1;
    };
    [[maybe_unused]] int64_t own[2];  // tokens of the lane's rows
    [[maybe_unused]] uint32_t own_word[2];
    if constexpr (general)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        own[half] = token(in_group / 32 * 16 + lane / 4 + 8 * half);
        if (a.scores.dropout.active()) own_word[half] = a.scores.drawn().row_word(matrix, own[half]);
      }

    float s[keys / 2], out[out_parts][out_size];
    uint32_t weights[keys / 16][4];
    float top[2] = {-infinity, -infinity}, total[2] = {0, 0};
    bool pending = false;   // whether there are weights that wait for their values
    Stage<stages> v_stage;  // where these are
    int seen[halves];       // and which of these the weights are for

    const auto products_of_scores = [&](int at) {
      const uint64_t k_block = descriptor(k_blocks + at * S::block_bytes);
#pragma unroll
      for (int kk = 0; kk < width / 16; ++kk)
        multiply<T, Major::k, Major::k>(s, further(q_tile, kk / 4 * 8192 + kk % 4 * 32),
                                        further(k_block, kk / 4 * keys * 128 + kk % 4 * 32), kk > 0);
    };
    const auto products_of_values = [&](int at, bool accumulate) {
#pragma unroll
      for (int part = 0; part < out_parts; ++part) {
#pragma unroll
        for (int kk = 0; kk < keys / 16; ++kk) {
          const uint64_t v_block = descriptor(
              v_blocks + at * S::block_bytes + part * 2 * keys * 128 + seen[kk / 4] * 8192, keys * 128);
          multiply<T, Major::mn>(out[part], weights[kk], further(v_block, kk % 4 * 2048),
                                 accumulate || kk > 0);
        }
      }
    };
    bool filled = false;  // whether `out` holds anything
    const auto rescale = [&](const float(&factor)[2]) {
#pragma unroll
      for (int part = 0; part < out_parts; ++part)
#pragma unroll
        for (int i = 0; i < out_size; ++i) out[part][i] *= factor[i / 2 % 2];
    };
    // The weights that wait are used up.
    const auto finish = [&] {
      shared.v_full[v_stage.index].wait(v_stage.parity);
      if constexpr (gathers) publish_stores();
      begin_products();
      products_of_values(v_stage.index, filled);
      end_products();
      wait_for_products<0>();
#pragma unroll
      for (int part = 0; part < out_parts; ++part) hold(out[part]);
      if (speaks) shared.v_empty[v_stage.index].arrive();
      filled = true, pending = false;
    };
    // Scores become weights; what there was must be multiplied by `factor`, if the result is true.
    float factor[2];
    const auto soften = [&](const Allowed<halves>& allowed, [[maybe_unused]] int at) {
      [[maybe_unused]] const auto key = [&](int j, int c) -> int64_t {
        const int column = 8 * j + lane % 4 * 2 + c;
        if constexpr (gathers)
          return told.tokens[at][column];
        else
          return column < told.notes[at].count ? told.notes[at].first + column : -1;
      };
      if constexpr (general) {
        uint32_t slope[8][2];
        mma::finish_scores<T, true>(reinterpret_cast<float(&)[8][4]>(s), slope, a.scores, b, h, own, key);
      }
      if (allowed.masked) keep_allowed(s, allowed.word, -infinity);
      // Whether a score is much larger than those before. Floats that are not negative compare as integers,
      // three at a time.
      bool grows = !pending && !filled;
      if (!grows)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          int32_t larger = 0;
#pragma unroll
          for (int j = 0; j < keys / 8; ++j)
            larger = __vimax3_s32(larger, __float_as_int(s[4 * j + 2 * half]),
                                  __float_as_int(s[4 * j + 2 * half + 1]));
          const float bound = top[half] + slack;
          grows |= !(bound >= 0) || larger > __float_as_int(bound);
        }
      grows = __any_sync(0xffffffffu, grows);
      factor[0] = factor[1] = 1;
      if (grows)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float larger = s[2 * half];
#pragma unroll
          for (int j = 0; j < keys / 8; ++j)
            larger = fmaxf(larger, fmaxf(s[4 * j + 2 * half], s[4 * j + 2 * half + 1]));
          const float now = fmaxf(top[half], quad_max(larger));
          factor[half] = now == top[half] ? 1 : approximate_exp2((top[half] - now) * to_log2);
          top[half] = now;
          total[half] *= factor[half];
        }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float base = top[half] == -infinity ? 0 : top[half] * to_log2;
#pragma unroll
        for (int j = 0; j < keys / 8; ++j)
#pragma unroll
          for (int c = 0; c < 2; ++c) {
            float& weight = s[4 * j + 2 * half + c];
            weight = approximate_exp2(fmaf(weight, to_log2, -base));
            total[half] += weight;
            if constexpr (general)
              if (a.scores.dropout.active()) {
                const bool kept = AttentionDropout::mix(own_word[half], static_cast<uint32_t>(key(j, c))) >=
                                  a.scores.threshold;
                weight = kept ? weight * a.scores.keep_scale : 0;
              }
          }
      }
      return grows;
    };
    const auto pack_weights = [&] {
#pragma unroll
      for (int kk = 0; kk < keys / 16; ++kk)
#pragma unroll
        for (int e = 0; e < 4; ++e)
          weights[kk][e] = pack<T>(s[8 * kk + e / 2 * 4 + e % 2 * 2], s[8 * kk + e / 2 * 4 + e % 2 * 2 + 1]);
    };

    for (bool last = false; !last; stage.next(), visit.next()) {
      const int visited = gathers ? visit.index : stage.index;
      if constexpr (gathers) told.visit_full[visited].wait(visit.parity);
      shared.k_full[stage.index].wait(stage.parity);
      if constexpr (gathers) publish_stores();
      const auto& note = told.notes[visited];
      const Allowed<halves> allowed(note, me);
      last = allowed.last;
      const auto done_with_keys = [&] {
        __syncwarp();  // all lanes have read what was told
        if (!speaks) return;
        shared.k_empty[stage.index].arrive();
        if constexpr (gathers) told.visit_empty[visited].arrive();
        if (last) shared.q_empty[q_at].arrive();
      };
      if (in_turn) sync_at(1 + me, 256);
      if (!allowed.visits) {
        if (in_turn) arrive_at(1 + (me + 1) % consumers, 256);
        if (pending) finish();
        shared.v_full[stage.index].wait(stage.parity);
        done_with_keys();
        if (speaks) shared.v_empty[stage.index].arrive();
        continue;
      }
      begin_products();
      products_of_scores(stage.index);
      end_products();
      if (pending) {
        shared.v_full[v_stage.index].wait(v_stage.parity);
        if constexpr (gathers) publish_stores();
        begin_products();
        products_of_values(v_stage.index, filled);
        end_products();
        if (in_turn) arrive_at(1 + (me + 1) % consumers, 256);
        wait_for_products<1>();
        hold(s);
        if (!general) done_with_keys();
        const bool grows = soften(allowed, visited);
        if (general) done_with_keys();
        wait_for_products<0>();
#pragma unroll
        for (int part = 0; part < out_parts; ++part) hold(out[part]);
        filled = true;
        if (speaks) shared.v_empty[v_stage.index].arrive();
        if (grows) rescale(factor);
      } else {
        if (in_turn) arrive_at(1 + (me + 1) % consumers, 256);
        wait_for_products<0>();
        hold(s);
        if (!general) done_with_keys();
        const bool grows = soften(allowed, visited);
        if (general) done_with_keys();
        if (grows && filled) rescale(factor);
      }
      pack_weights();
      pending = true;
      v_stage = stage;
#pragma unroll
      for (int i = 0; i < halves; ++i) seen[i] = allowed.seen[i];
    }
    if (pending) finish();
    if (!filled)
#pragma unroll
      for (int part = 0; part < out_parts; ++part)
#pragma unroll
        for (int i = 0; i < out_size; ++i) out[part][i] = 0;

    float inverse[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float sum = quad_sum(total[half]);
      inverse[half] = sum == 0 ? 0 : 1 / sum;
      const int64_t query = token(in_group / 32 * 16 + lane / 4 + 8 * half);
      if (lane % 4 == 0 && query >= 0)
        a.lse[matrix * a.queries + query] = sum == 0 ? -infinity : top[half] * scale + logf(sum);
    }
#pragma unroll
    for (int part = 0; part < out_parts; ++part)
      store_rows<T>(out[part], inverse, a.out.of<T>(b, h), a.out.row, part * 128, a.value_width, token);
    if constexpr (gathers) {
      __syncwarp();
      if (speaks) told.group_empty[own_at].arrive();
    }
  }
}

int64_t multiprocessors(const AttentionProblem& p) { return properties(p.q.device()).multiProcessorCount; }

// Two warp groups that multiply, or three. With three a row of queries costs less, which is counted as an
// eighth; but rows beyond the last query cost as much as others, as do multiprocessors that wait for the last
// tiles.
int best_warp_groups(const AttentionProblem& p) {
  const auto rows = [&](int64_t warp_groups) {  // those of a multiprocessor, in 64s
    const int64_t tiles = (p.queries() + 64 * warp_groups - 1) / (64 * warp_groups) * p.batch() * p.heads();
    return (tiles + multiprocessors(p) - 1) / multiprocessors(p) * warp_groups;
  };
  return 9 * rows(2) < 8 * rows(3) ? 2 : 3;
}

template <class T, int width, bool gathers, bool general, int warp_groups>
void launch(const AttentionProblem& p, const mma::HostScores& scores, Tensor& out, Tensor& lse) {
  using S = Shape<width, gathers, general, warp_groups>;
  const GroupedTable maps = grouped_table(p, Side::query, S::consumers, S::halves);
  const int64_t group = p.heads() / p.kv_heads(), row = (p.width() + p.value_width()) * 2;
  // What passes through the cache between two tiles of queries of a matrix.
  mma::Schedule schedule(maps.groups, p.batch() * p.heads(), p.keys() * row / group + 64 * S::consumers * row,
                         true);
  // Tiles that differ in length are counted off, but where each multiprocessor gets as many of each length
  // anyway.
  const bool one_map = maps.batch_step == 0 && maps.head_step == 0;
  const bool counts = !maps.uniform && !(one_map && schedule.section >= multiprocessors(p));
  if (!maps.uniform && !counts) schedule.cut_at(schedule.section - schedule.section % multiprocessors(p));
  ForwardArguments arguments{tensor_map(p.q, 64),
                             tensor_map(p.k, S::keys),
                             tensor_map(p.v, S::keys),
                             mma::operand(p.q),
                             mma::operand(p.k),
                             mma::operand(p.v),
                             mma::operand(out),
                             lse.mutable_data<float>(),
                             p.heads(),
                             group,
                             p.queries(),
                             static_cast<int>(p.width()),
                             static_cast<int>(p.value_width()),
                             scores.arguments,
                             nullptr,
                             maps,
                             schedule};
  Tensor taken;
  if (counts) {
    taken = Tensor::zeros({1}, i32, p.q.device());
    arguments.taken = taken.mutable_data<int32_t>();
  }
  const auto kernel = forward<T, width, gathers, general, warp_groups>;
  constexpr size_t bytes_of_shared = S::memory + sizeof(Shared<S, gathers>);
  allow_shared_memory(reinterpret_cast<const void*>(kernel), bytes_of_shared);
  kernel<<<blocks_at_once(arguments.schedule, p.q.device()), S::threads, bytes_of_shared, stream_of(p.q)>>>(
      arguments);
  check_launch("attention.forward");
}

}  // namespace

void run_forward(const AttentionProblem& p, Tensor& out, Tensor& lse) {
  const bool general_scores = mma::general_scores(p);
  if (p.batch() * p.heads() * p.queries() * p.keys() == 0 ||
      (general_scores && mma::padded_width(p) == 256))  // too few registers
    return mma::run_forward(p, out, lse);
  const bool gathers = map_table(p).gathers;
  const mma::HostScores scores(p, {});
  mma::dispatch_16_bit(p.q.dtype(), [&](auto zero) {
    using T = decltype(zero);
    mma::dispatch_width(mma::padded_width(p), [&](auto width) {
      constexpr int w = decltype(width)::value;
      const auto run = [&](auto general) {
        constexpr bool is_general = decltype(general)::value;
        if constexpr (w == 64 && !is_general)
          if (!gathers && best_warp_groups(p) == 3)
            return launch<T, w, false, is_general, 3>(p, scores, out, lse);
        gathers ? launch<T, w, true, is_general, 2>(p, scores, out, lse)
                : launch<T, w, false, is_general, 2>(p, scores, out, lse);
      };
      if constexpr (w < 256)
        if (general_scores) return run(std::true_type{});
      run(std::false_type{});
    });
  });
}

}  // namespace torus::gpu::hopper
