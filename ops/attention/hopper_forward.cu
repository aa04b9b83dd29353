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
template <int width, bool gathers, bool general>
struct Shape {
  static constexpr int consumers = width == 64 && !gathers && !general ? 3 : 2;
  static constexpr int halves = width == 256 || general ? 1 : 2;
  static constexpr int keys = 64 * halves;
  static constexpr int stages = general || (width == 64 && gathers) ? 4 : 2;
  static constexpr int q_stages = width == 256 ? 1 : 2;
  static constexpr int threads = 128 * (consumers + 1);
  static constexpr int panels = width / 64;
  static constexpr int q_bytes = 64 * width * 2, block_bytes = keys * width * 2;
  static constexpr size_t memory = size_t{1024} + q_stages * consumers * q_bytes + 2 * stages * block_bytes;
};

// The part of shared memory that is not tiles.
template <class S>
struct Shared {
  Barrier q_full[S::q_stages], q_empty[S::q_stages], k_full[S::stages], k_empty[S::stages], v_full[S::stages],
      v_empty[S::stages];
  BlockNote<S::consumers, S::halves> notes[S::stages];
  int32_t group[S::q_stages], matrix[S::q_stages];  // whose queries are there; group -1: no more
  int32_t tokens[S::stages][S::keys];               // of general scores, if they are gathered
};

// Copies boxes, by one thread.
template <class S>
__device__ inline void copy_tiles(const ForwardArguments& a, Shared<S>& shared, char* q_tiles, char* k_blocks,
                                  char* v_blocks) {
  constexpr int stride = 3 + S::consumers * S::halves;
  Stage<S::stages> stage;
  Stage<S::q_stages> q_stage;
  const int64_t total = a.schedule.tiles * a.schedule.matrices;
  for (int64_t index = blockIdx.x, next;; index = next, q_stage.next()) {
    int64_t group = -1, matrix = 0;
    if (index < total) a.schedule.find(index, group, matrix);
    const int q_at = q_stage.index;
    shared.q_empty[q_at].wait(q_stage.parity ^ 1);  // of a fresh barrier, the phase before is complete
    shared.group[q_at] = static_cast<int32_t>(group), shared.matrix[q_at] = static_cast<int32_t>(matrix);
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
        write_note(shared.notes[at], entry, n == blocks - 1, n == blocks - 1 && entry + stride == end);
        shared.notes[at].first = first;
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

// Copies rows by index, by a warp group.
template <class T, int width, bool general, class S>
__device__ inline void gather_tiles(const ForwardArguments& a, Shared<S>& shared, char* q_tiles,
                                    char* k_blocks, char* v_blocks) {
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32;
  Stage<S::stages> stage;
  Stage<S::q_stages> q_stage;
  for (int64_t index = blockIdx.x; index < a.schedule.tiles * a.schedule.matrices;
       index += gridDim.x, q_stage.next()) {
    const int q_at = q_stage.index;
    int64_t group, matrix;
    a.schedule.find(index, group, matrix);
    const int64_t b = matrix / a.heads, h = matrix % a.heads, kv_head = h / a.group;
    const GroupedView& map = a.maps.of(b, h);
    shared.q_empty[q_at].wait(q_stage.parity ^ 1);
    for (int i = 0; i < S::consumers; ++i) {
      const int32_t own =
          lane < 16 ? owner(map, map.tiles[group * S::consumers + i], thread / 32 * 16 + lane, a.queries)
                    : -1;
      gather<T, width, 64>(q_tiles + (q_at * S::consumers + i) * S::q_bytes, a.q_rows.of<const T>(b, h),
                           a.q_rows.row, a.width, own);
    }
    shared.q_full[q_at].arrive_after_copies();
    const T* const k = a.k_rows.of<const T>(b, kv_head);
    const T* const v = a.v_rows.of<const T>(b, kv_head);
    walk_rows<S::keys, 3 + S::consumers * S::halves>(
        map, group, [&](int32_t word, bool ends, bool last, int32_t token) {
          const int at = stage.index;
          shared.k_empty[at].wait(stage.parity ^ 1);
          if (general && lane < S::keys / 4) shared.tokens[at][thread / 32 * (S::keys / 4) + lane] = token;
          if (thread < 32) write_note(shared.notes[at], word, ends, last);
          if (general) __syncwarp();
          if (lane == 0 && (general || thread == 0)) shared.k_full[at].arrive();
          gather<T, width, S::keys>(k_blocks + at * S::block_bytes, k, a.k_rows.row, a.width, token);
          shared.k_full[at].arrive_after_copies();
          shared.v_empty[at].wait(stage.parity ^ 1);
          gather<T, width, S::keys>(v_blocks + at * S::block_bytes, v, a.v_rows.row, a.value_width, token);
          shared.v_full[at].arrive_after_copies();
          stage.next();
        });
  }
}

template <class T, int width, bool gathers, bool general>
__global__ void __launch_bounds__(Shape<width, gathers, general>::threads, 1)
    forward(const __grid_constant__ ForwardArguments a) {
  using S = Shape<width, gathers, general>;
  constexpr int consumers = S::consumers, halves = S::halves, keys = S::keys, stages = S::stages;
  static_assert(S::panels * 64 == width);
  extern __shared__ char raw_memory[];
  char* const memory =
      reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(raw_memory) + 1023) & ~uintptr_t{1023});
  char* const q_tiles = memory;  // of a consumer, panels of 64 queries
  char* const k_blocks = q_tiles + S::q_stages * consumers * S::q_bytes;
  char* const v_blocks = k_blocks + stages * S::block_bytes;
  __shared__ Shared<S> shared;
  const int thread = static_cast<int>(threadIdx.x), role = uniform(thread / 128);  // 0 copies

  if (thread == 0) {
    constexpr uint32_t copying = gathers ? 128 : 1;
    for (int i = 0; i < S::q_stages; ++i)
      shared.q_full[i].init(copying), shared.q_empty[i].init(4 * consumers);
    for (int i = 0; i < stages; ++i) {
      // + 1: the note is written; + 4: by each warp its tokens too.
      shared.k_full[i].init(!gathers ? copying : general ? copying + 4 : copying + 1);
      shared.v_full[i].init(copying);
      shared.k_empty[i].init(4 * consumers), shared.v_empty[i].init(4 * consumers);
    }
    publish_barriers();
  }
  __syncthreads();

  if (role == 0) {
    give_registers<consumers == 3 ? 32 : gathers ? 40 : 24>();
    if constexpr (gathers)
      gather_tiles<T, width, general>(a, shared, q_tiles, k_blocks, v_blocks);
    else if (thread == 0)
      copy_tiles(a, shared, q_tiles, k_blocks, v_blocks);
    return;
  }

  take_registers<consumers == 3 ? 160 : gathers ? 232 : 240>();
  const int me = role - 1, in_group = thread % 128, lane = thread % 32;
  const bool speaks = lane == 0;  // for its warp
  constexpr int out_parts = width == 256 ? 2 : 1, out_size = width == 64 ? 32 : 64;
  const float scale = general ? 1 : a.scores.scale, to_log2 = scale * log2_e;
  const float slack = 8 / to_log2;  // weights may grow to 2^8 before sums are rescaled
  Stage<stages> stage;
  Stage<S::q_stages> q_stage;
  constexpr bool in_turn = width == 64 && !gathers && !general;
  if (in_turn && me == consumers - 1) arrive_at(1, 256);

  for (int64_t index = blockIdx.x;; index += gridDim.x, q_stage.next()) {
    if (gathers && index >= a.schedule.tiles * a.schedule.matrices) return;
    const int q_at = q_stage.index;
    shared.q_full[q_at].wait(q_stage.parity);
    int64_t group, matrix;
    if constexpr (gathers) {
      publish_stores();
      a.schedule.find(index, group, matrix);
    } else {
      group = shared.group[q_at], matrix = shared.matrix[q_at];
      if (group < 0) return;
    }
    const uint64_t q_tile = descriptor(q_tiles + (q_at * consumers + me) * S::q_bytes);
    const auto heads = static_cast<uint32_t>(a.heads);
    const int64_t b = static_cast<uint32_t>(matrix) / heads, h = matrix - b * heads;
    const GroupedView& map = a.maps.of(b, h);
    [[maybe_unused]] int64_t own[2];  // tokens of the lane's rows
    [[maybe_unused]] uint32_t own_word[2];
    if constexpr (general)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        own[half] = owner(map, map.tiles[group * consumers + me], in_group / 32 * 16 + lane / 4 + 8 * half,
                          a.queries);
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
        if constexpr (gathers) return shared.tokens[at][column];
        return column < shared.notes[at].count ? shared.notes[at].first + column : -1;
      };
      if constexpr (general) {
        uint32_t slope[8][2];
        mma::finish_scores<T, true>(reinterpret_cast<float(&)[8][4]>(s), slope, a.scores, b, h, own, key);
      }
      if (allowed.masked)
#pragma unroll
        for (int i = 0; i < keys / 2; ++i)
          if (!(allowed.word[i / 32] >> i % 32 & 1)) s[i] = -infinity;
      bool grows = false;
      float most[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float larger = s[2 * half];
#pragma unroll
        for (int j = 0; j < keys / 8; ++j)
          larger = fmaxf(larger, fmaxf(s[4 * j + 2 * half], s[4 * j + 2 * half + 1]));
        most[half] = quad_max(larger);
        grows |= most[half] > top[half] + slack;
      }
      grows = __any_sync(0xffffffffu, grows);
      factor[0] = factor[1] = 1;
      if (grows)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float now = fmaxf(top[half], most[half]);
          factor[half] = now == top[half] ? 1 : exp2_approx((top[half] - now) * to_log2);
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
            weight = exp2_approx(fmaf(weight, to_log2, -base));
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

    for (bool last = false; !last; stage.next()) {
      shared.k_full[stage.index].wait(stage.parity);
      if constexpr (gathers) publish_stores();
      const auto& note = shared.notes[stage.index];
      last = uniform(note.last);
      const Allowed<halves> allowed(note, me, map.fragments);
      const auto done_with_keys = [&] {
        if (!speaks) return;
        shared.k_empty[stage.index].arrive();
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
        const bool grows = soften(allowed, stage.index);
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
        const bool grows = soften(allowed, stage.index);
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

    const int64_t tile = map.tiles[group * consumers + me];
    if (tile < 0) continue;
    const auto token = [&](int row) -> int64_t { return owner(map, tile, row, a.queries); };
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
  }
}

template <class T, int width, bool gathers, bool general>
void launch(const AttentionProblem& p, const mma::HostScores& scores, Tensor& out, Tensor& lse) {
  using S = Shape<width, gathers, general>;
  const GroupedTable maps = grouped_table(p, Side::query, S::consumers, S::halves);
  const int64_t group = p.heads() / p.kv_heads(), bytes = p.keys() * (p.width() + p.value_width()) * 2;
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
                             mma::Schedule(maps.groups, p.batch() * p.heads(), bytes / group, true)};
  Tensor taken;
  if (!gathers && !maps.uniform) {
    taken = Tensor::zeros({1}, i32, p.q.device());
    arguments.taken = taken.mutable_data<int32_t>();
  }
  const auto kernel = forward<T, width, gathers, general>;
  allow_shared_memory(reinterpret_cast<const void*>(kernel), S::memory);
  const int64_t blocks =
      std::min<int64_t>(arguments.schedule.blocks(), properties(p.q.device()).multiProcessorCount);
  kernel<<<static_cast<unsigned>(blocks), S::threads, S::memory, stream_of(p.q)>>>(arguments);
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
        gathers ? launch<T, w, true, is_general>(p, scores, out, lse)
                : launch<T, w, false, is_general>(p, scores, out, lse);
      };
      if constexpr (w < 256)
        if (general_scores) return run(std::true_type{});
      run(std::false_type{});
    });
  });
}

}  // namespace torus::gpu::hopper
