// Backward of attention on Hopper, after FlashAttention-3 (Shah et al., 2024). A block of threads owns 128
// keys and goes through the queries that see them: one warp group copies, two own 64 keys each. Scores are
// computed transposed, so that weights and their gradients feed the products for dV and dK from registers;
// only the gradients of scores pass through shared memory, for dQ, which is summed in f32 in global memory.
// That product needs those of both warp groups, and so comes a block of queries late: neither waits for what
// the other has just made. They queue products in turns, so that one's run under the other's exponentials.
// Where order matters, blocks of threads add to dQ one after another, the last keys first.
#include "torus/ops/attention/hopper.h"

namespace torus::gpu::hopper {

using torus::detail::AttentionGradients;
using torus::detail::AttentionProblem;
using torus::detail::GroupedSide;
using torus::detail::Side;

namespace {

constexpr int consumers = 2, keys = 64 * consumers, threads = 128 * (consumers + 1), stages = 2;
constexpr int slab = 64 * 64;  // what a warp group adds to dQ at once, in its accumulators' order, at most

template <int width>
struct Shape {
  static constexpr int halves = width == 64 ? 2 : 1;
  static constexpr int queries = 64 * halves;
  static constexpr int panels = width / 64;
  static constexpr int key_bytes = keys * width * 2, query_bytes = queries * width * 2;
  static constexpr int ds_bytes = keys * queries * 2;
  static constexpr size_t memory =
      2 * key_bytes + 2 * stages * query_bytes + 2 * ds_bytes + 2 * consumers * slab * 4;
};

// Columns of a width of `columns` that the slabs of a warp group hold, and where in the sum of dQ that of a
// block of queries is: a block's slabs follow one another, without columns that there are not.
template <int width>
__host__ __device__ constexpr int slab_columns(int columns, int of) {
  return width == 64 ? columns : of == 0 ? min(columns, 64) : max(columns - 64, 0);
}
template <int width>
__host__ __device__ constexpr int64_t slab_start(int columns, int64_t block, int of) {
  return 64 * (block * Shape<width>::halves * columns + of * slab_columns<width>(columns, 0));
}

struct BackwardArguments {
  CUtensorMap q, k, v, d_out;
  Rows dk, dv;
  float* dq_sum;             // [B H, blocks of queries, 2, up to `slab`]; in any order: of zeros
  const float *lse, *delta;  // [B H, padded queries]
  int32_t* taken;            // how many tiles were taken beyond the first of each block of threads
  int32_t* turns;            // whose turn it is to add, [B H, blocks of queries, 2]; null: in any order
  int64_t heads, kv_heads, keys, padded_queries, query_blocks;
  int width, value_width;
  float scale;
  GroupedTable maps;
  mma::Schedule schedule;
};

// The part of shared memory that is not tiles.
template <int width>
struct Shared {
  Barrier tile_full[2], tile_empty[2];
  int32_t group[2], matrix[2];  // the keys that blocks of threads go through next; group -1: no more
  Barrier kv_full, kv_empty, q_full[stages], q_empty[stages], d_out_full[stages], d_out_empty[stages];
  Barrier ds_full[2], ds_empty[2], dq_full[consumers][2], dq_empty[consumers][2];
  BlockNote<consumers, Shape<width>::halves> notes[stages];
  int64_t dq_block[consumers][2];  // where the slab goes; -1: no more
  int32_t dq_turn[consumers][2];
  alignas(16) float lse[stages][Shape<width>::queries], delta[stages][Shape<width>::queries];
};

// By one thread: takes tiles of keys, and copies the queries that see them.
template <int width>
__device__ inline void copy_queries(const BackwardArguments& a, Shared<width>& shared, char* q_blocks,
                                    char* d_out_blocks) {
  using S = Shape<width>;
  constexpr int queries = S::queries, stride = 3 + consumers * S::halves;
  const int64_t total = a.schedule.tiles * a.schedule.matrices;
  const auto kv_heads = static_cast<uint32_t>(a.kv_heads);
  const int32_t members = static_cast<int32_t>(a.heads / a.kv_heads);
  Stage<stages> stage;
  Stage<2> tile;
  for (int64_t index = blockIdx.x, next;; index = next, tile.next()) {
    int64_t group = -1, matrix = 0;
    if (index < total) a.schedule.find(index, group, matrix);
    shared.tile_empty[tile.index].wait(tile.parity ^ 1);
    shared.group[tile.index] = static_cast<int32_t>(group);
    shared.matrix[tile.index] = static_cast<int32_t>(matrix);
    shared.tile_full[tile.index].arrive();
    if (group < 0) return;
    const auto b = static_cast<int32_t>(static_cast<uint32_t>(matrix) / kv_heads);
    const int32_t first_head = static_cast<int32_t>(matrix - int64_t{b} * kv_heads) * members;
    for (int32_t member = 0; member < members; ++member) {
      const int32_t h = first_head + member;
      const GroupedView& map = a.maps.of(b, h);
      const int64_t first_row = (b * a.heads + h) * a.padded_queries;
      const int32_t* entry = map.entries + int64_t{map.first[group]} * stride;
      const int32_t* const end = map.entries + int64_t{map.first[group + 1]} * stride;
      for (; entry != end; entry += stride) {
        // Without turns, groups begin at different blocks, not to add to the same one at the same time.
        int32_t n = a.turns ? 0 : static_cast<int32_t>(group) % entry[1];
#pragma unroll 1
        for (int32_t left = entry[1]; left > 0; --left, n = n + 1 < entry[1] ? n + 1 : 0) {
          const int32_t first = entry[0] + n * queries;
          const int at = stage.index;
          shared.q_empty[at].wait(stage.parity ^ 1);
          auto& note = shared.notes[at];
          write_note(note, entry, n == entry[1] - 1,
                     member == members - 1 && left == 1 && entry + stride == end);
          note.first = first, note.member = member;
          shared.q_full[at].arrive_and_expect(S::query_bytes + queries * 4);
#pragma unroll
          for (int panel = 0; panel < S::panels; ++panel)
            copy_box(q_blocks + at * S::query_bytes + panel * queries * 128, a.q, panel * 64, first, h, b,
                     shared.q_full[at]);
          copy_bulk(shared.lse[at], a.lse + first_row + first, queries * 4, shared.q_full[at]);
          shared.d_out_empty[at].wait(stage.parity ^ 1);
          shared.d_out_full[at].arrive_and_expect(S::query_bytes + queries * 4);
#pragma unroll
          for (int panel = 0; panel < S::panels; ++panel)
            copy_box(d_out_blocks + at * S::query_bytes + panel * queries * 128, a.d_out, panel * 64, first,
                     h, b, shared.d_out_full[at]);
          copy_bulk(shared.delta[at], a.delta + first_row + first, queries * 4, shared.d_out_full[at]);
          stage.next();
        }
      }
    }
    // Not earlier: others may have to wait for the tile.
    next = int64_t{gridDim.x} + atomicAdd(a.taken, 1);
  }
}

// By one thread.
template <int width>
__device__ inline void copy_keys(const BackwardArguments& a, Shared<width>& shared, char* k_tile,
                                 char* v_tile) {
  using S = Shape<width>;
  const auto kv_heads = static_cast<uint32_t>(a.kv_heads);
  uint32_t parity = 1;  // nothing was read yet
  for (Stage<2> tile;; tile.next(), parity ^= 1) {
    shared.tile_full[tile.index].wait(tile.parity);
    const int32_t group = shared.group[tile.index];
    const auto matrix = static_cast<uint32_t>(shared.matrix[tile.index]);
    shared.tile_empty[tile.index].arrive();
    if (group < 0) return;
    const auto b = static_cast<int32_t>(matrix / kv_heads), head = static_cast<int32_t>(matrix % kv_heads);
    shared.kv_empty.wait(parity);
    shared.kv_full.arrive_and_expect(2 * S::key_bytes);
#pragma unroll
    for (int panel = 0; panel < S::panels; ++panel) {
      copy_box(k_tile + panel * keys * 128, a.k, panel * 64, group * keys, head, b, shared.kv_full);
      copy_box(v_tile + panel * keys * 128, a.v, panel * 64, group * keys, head, b, shared.kv_full);
    }
  }
}

// By one thread for each warp group: adds what that makes of dQ. Turns end: a slab waits for tiles of keys
// that were taken before its own; a warp group for its own slabs, and for products that the other queues
// before going on to its next tile. So whatever waits in the first tile that is not finished goes on.
template <int width>
__device__ inline void add_slabs(const BackwardArguments& a, Shared<width>& shared, const char* dq_slabs,
                                 int of) {
  const uint32_t bytes = 256 * slab_columns<width>(a.width, of);
  int64_t before = -1;  // the place that is still being added to, from the other slab
  const auto pass_turn = [&](int at) {
    asm volatile("fence.proxy.async;" ::: "memory");
    add_release(a.turns + before);
    shared.dq_empty[of][at].arrive();
  };
  for (Stage<2> stage;; stage.next()) {
    const int at = stage.index;
    const auto has_turn = [&] {
      return load_acquire(a.turns + shared.dq_block[of][at] * consumers + of) == shared.dq_turn[of][at];
    };
    // Two slabs may be on their way at once, but none waits for another's turn.
    if (before >= 0 &&
        !(shared.dq_full[of][at].complete(stage.parity) && shared.dq_block[of][at] >= 0 && has_turn())) {
      wait_for_bulk<0>();
      pass_turn(at ^ 1);
      before = -1;
    }
    shared.dq_full[of][at].wait(stage.parity);
    const int64_t block = shared.dq_block[of][at], place = block * consumers + of;
    if (block < 0) return;
    float* const to = a.dq_sum + slab_start<width>(a.width, block, of);
    const char* const from = dq_slabs + (of * 2 + at) * slab * 4;
    if (!a.turns) {
      if (bytes > 0) add_bulk(to, from, bytes);
      wait_for_bulk_reads();
      shared.dq_empty[of][at].arrive();
      continue;
    }
    if (before < 0)
      while (!has_turn()) continue;
    if (bytes > 0) shared.dq_turn[of][at] == 0 ? store_bulk(to, from, bytes) : add_bulk(to, from, bytes);
    if (before >= 0) {
      wait_for_bulk<1>();
      pass_turn(at ^ 1);
    }
    before = place;
  }
}

template <class T, int width>
__global__ void __launch_bounds__(threads, 1) backward(const __grid_constant__ BackwardArguments a) {
  using S = Shape<width>;
  constexpr int halves = S::halves, queries = S::queries;
  extern __shared__ __align__(1024) char memory[];
  char* const k_tile = memory;  // panels of 128 keys
  char* const v_tile = k_tile + S::key_bytes;
  char* const q_blocks = v_tile + S::key_bytes;  // panels of `queries`
  char* const d_out_blocks = q_blocks + stages * S::query_bytes;
  char* const ds_blocks = d_out_blocks + stages * S::query_bytes;  // panels of 64 queries: a row a key
  char* const dq_slabs = ds_blocks + 2 * S::ds_bytes;
  Shared<width>& shared = *reinterpret_cast<Shared<width>*>(memory + S::memory);
  const int thread = static_cast<int>(threadIdx.x), role = uniform(thread / 128);  // 0 copies

  if (thread == 0) {
    for (int i = 0; i < 2; ++i)
      shared.tile_full[i].init(1), shared.tile_empty[i].init(4 * consumers * voices + 1);
    shared.kv_full.init(1), shared.kv_empty.init(4 * consumers * voices);
    for (int i = 0; i < stages; ++i) {
      shared.q_full[i].init(1), shared.q_empty[i].init(4 * consumers * voices);
      shared.d_out_full[i].init(1), shared.d_out_empty[i].init(4 * consumers * voices);
    }
    for (int i = 0; i < 2; ++i)
      shared.ds_full[i].init(4 * consumers * voices), shared.ds_empty[i].init(4 * consumers * voices);
    for (int i = 0; i < 2 * consumers; ++i)
      shared.dq_full[i / 2][i % 2].init(128), shared.dq_empty[i / 2][i % 2].init(1);
    publish_barriers();
  }
  __syncthreads();

  if (role == 0) {
    give_registers<24>();
    if (thread == 0)
      copy_queries(a, shared, q_blocks, d_out_blocks);
    else if (thread == 96)
      copy_keys(a, shared, k_tile, v_tile);
    else if (thread == 32 || thread == 64)
      add_slabs(a, shared, dq_slabs, thread / 32 - 1);
    return;
  }

  take_registers<240>();
  const int me = role - 1, in_group = thread % 128, lane = thread % 32, warp = in_group / 32;
  const bool speaks = speaks_for_warp();
  const float to_log2 = a.scale * log2_e;
  float s[queries / 2];
  const auto transposed = [&](float(&c)[queries / 2], const char* own, const char* others) {
    const uint64_t left = descriptor(own + me * 64 * 128), right = descriptor(others);
    begin_products();
#pragma unroll
    for (int kk = 0; kk < width / 16; ++kk)
      multiply<T, Major::k, Major::k>(c, further(left, kk / 4 * keys * 128 + kk % 4 * 32),
                                      further(right, kk / 4 * queries * 128 + kk % 4 * 32), kk > 0);
    end_products();
  };
  // Of a block of queries, what the product for dQ needs.
  struct Block {
    int32_t first, head;
    int seen;  // bit i: some of its queries whose dQ is made here see the i-th 64 keys; bit 2: any query, any
  };
  Stage<stages> stage;
  Stage<2> ds_stage, dq_stage, tile;
  if (me == 1) arrive_at(1, 128 * consumers);  // warp group 0 has the first turn
  const int32_t members = static_cast<int32_t>(a.heads / a.kv_heads);
  for (uint32_t kv_parity = 0;; kv_parity ^= 1, tile.next()) {
    shared.tile_full[tile.index].wait(tile.parity);
    const int32_t group = uniform(shared.group[tile.index]), matrix = uniform(shared.matrix[tile.index]);
    __syncwarp();  // all lanes have read them
    if (speaks) shared.tile_empty[tile.index].arrive();
    if (group < 0) break;
    const auto kv_heads = static_cast<uint32_t>(a.kv_heads);
    const int32_t b = static_cast<uint32_t>(matrix) / kv_heads, kv_head = matrix - b * kv_heads;
    float dk[width / 2], dv[width / 2];
#pragma unroll
    for (int i = 0; i < width / 2; ++i) dk[i] = dv[i] = 0;
    // Rows without a key see nothing.
    const int32_t first_row = group * keys + 64 * me + 16 * warp + lane / 4;
    const uint32_t own_rows =
        (first_row < a.keys ? 0x33333333u : 0) | (first_row + 8 < a.keys ? 0xccccccccu : 0);
    const bool ragged = (group + 1) * keys > a.keys;
    shared.kv_full.wait(kv_parity);
    shared.q_full[stage.index].wait(stage.parity);
    transposed(s, k_tile, q_blocks + stage.index * S::query_bytes);
    wait_for_products<0>();
    hold(s);

    Block before{-1, 0, 0};
    // Of the block before: 64 queries by 64 columns a warp group. Keys that no query of these sees are left
    // out: they may be NaN.
    const auto products_of_dq = [&](float(&dq)[32]) {
      const int at = ds_stage.index ^ 1;
      if (before.first >= 0) shared.ds_full[at].wait(ds_stage.parity ^ (at == 1));
      const char* const ds_block = ds_blocks + at * S::ds_bytes;
      const uint64_t left = descriptor(ds_block + (halves == 2 ? me * keys * 128 : 0));
      const uint64_t right = descriptor(k_tile + (halves == 2 ? 0 : me * keys * 128));
      const auto add = [&](int from, auto count) {
#pragma unroll
        for (int kk = 0; kk < decltype(count)::value; ++kk)
          multiply<T, Major::mn, Major::mn>(dq, further(left, (from + kk) * 2048),
                                            further(right, (from + kk) * 2048), kk > 0);
        end_products();
      };
      const int seen = uniform(before.seen) & 3;
      begin_products();
      if (seen == 3)
        add(0, std::integral_constant<int, 8>{});
      else if (seen)
        add(seen == 2 ? 4 : 0, std::integral_constant<int, 4>{});
      else  // for nothing: products whose registers others than products may write are run one by one
        add(0, std::integral_constant<int, 1>{});
    };
    const auto hand_over = [&](float(&dq)[32]) {
      if (!(before.seen & 4)) return;  // there are no queries at all
      if (!(before.seen & 3))
#pragma unroll
        for (int i = 0; i < 32; ++i) dq[i] = 0;
      const int slot = dq_stage.index;
      shared.dq_empty[me][slot].wait(dq_stage.parity ^ 1);
      float4* const to = reinterpret_cast<float4*>(dq_slabs + (me * 2 + slot) * slab * 4) + in_group;
#pragma unroll
      for (int i = 0; i < 8; ++i)
        to[128 * i] = make_float4(dq[4 * i], dq[4 * i + 1], dq[4 * i + 2], dq[4 * i + 3]);
      if (in_group == 0) {
        const int32_t block = before.first / queries;
        shared.dq_block[me][slot] = (b * a.heads + before.head) * a.query_blocks + block;
        shared.dq_turn[me][slot] = a.turns ? a.maps.of(b, before.head).last_visitor[block] - group : 0;
      }
      publish_stores();
      shared.dq_full[me][slot].arrive();
      dq_stage.next();
    };

    for (bool last = false; !last;) {
      const int at = stage.index;
      const auto& note = shared.notes[at];
      last = uniform(note.is_last());
      Block block{note.first, kv_head * members + note.member, 0};
      const GroupedView& map = a.maps.of(b, block.head);
      bool masked = ragged;
      uint32_t allowed[halves];
#pragma unroll
      for (int i = 0; i < halves; ++i) {
#pragma unroll
        for (int w = 0; w < consumers; ++w)
          if (note.ids[w][i] != GroupedSide::none) block.seen |= 4 | (halves == 1 || i == me ? 1 << w : 0);
        const int32_t id = note.ids[me][i];
        masked |= id != GroupedSide::full;
        allowed[i] = own_rows & (id == GroupedSide::full ? ~0u
                                 : id < 0                ? 0u
                                                         : map.fragments[int64_t{128} * id + in_group]);
      }
      masked = uniform(masked);
      const char* const q_block = q_blocks + at * S::query_bytes;
      const char* const d_out_block = d_out_blocks + at * S::query_bytes;
      const auto down = [&](float(&c)[width / 2], const uint32_t(&left)[queries / 16][4],
                            const char* others) {
        const uint64_t right = descriptor(others, queries * 128);
        begin_products();
#pragma unroll
        for (int kk = 0; kk < queries / 16; ++kk)
          multiply<T, Major::mn>(c, left[kk], further(right, kk * 2048), 1);
        end_products();
      };
      uint32_t weights[queries / 16][4], ds[queries / 16][4];
      {
        float dp[queries / 2];
        shared.d_out_full[at].wait(stage.parity);
        transposed(dp, v_tile, d_out_block);
#pragma unroll
        for (int j = 0; j < queries / 8; ++j) {
          const float2 lse = *reinterpret_cast<const float2*>(&shared.lse[at][8 * j + lane % 4 * 2]);
#pragma unroll
          for (int e = 0; e < 4; ++e)
            s[4 * j + e] = approximate_exp2(fmaf(s[4 * j + e], to_log2, -(e % 2 ? lse.y : lse.x)));
        }
        if (masked) keep_allowed(s, allowed, 0);
#pragma unroll
        for (int kk = 0; kk < queries / 16; ++kk)
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            const int i = 8 * kk + e / 2 * 4 + e % 2 * 2;
            weights[kk][e] = pack<T>(s[i], s[i + 1]);
          }
        wait_for_products<0>();
        hold(dp);
#pragma unroll
        for (int j = 0; j < queries / 8; ++j) {
          const float2 delta = *reinterpret_cast<const float2*>(&shared.delta[at][8 * j + lane % 4 * 2]);
#pragma unroll
          for (int e = 0; e < 4; ++e)
            dp[4 * j + e] = s[4 * j + e] * (dp[4 * j + e] - (e % 2 ? delta.y : delta.x));
        }
        if (masked) keep_allowed(dp, allowed, 0);  // what is not seen may be infinite
#pragma unroll
        for (int kk = 0; kk < queries / 16; ++kk)
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            const int i = 8 * kk + e / 2 * 4 + e % 2 * 2;
            ds[kk][e] = pack<T>(dp[i], dp[i + 1]);
          }
      }
      sync_at(1 + me, 128 * consumers);  // its turn to queue products
      down(dv, weights, d_out_block);
      down(dk, ds, q_block);
      shared.ds_empty[ds_stage.index].wait(ds_stage.parity ^ 1);
      {
        const int row = 64 * me + 16 * warp + lane % 16;
        const uint32_t place = shared_address(ds_blocks + ds_stage.index * S::ds_bytes) + row * 128;
#pragma unroll
        for (int kk = 0; kk < queries / 16; ++kk)
          store_matrices(place + kk / 4 * keys * 128 + ((kk % 4 * 2 + lane / 16) ^ row % 8) * 16, ds[kk][0],
                         ds[kk][1], ds[kk][2], ds[kk][3]);
      }
      publish_stores();  // by each thread that stored, before its warp says so
      __syncwarp();
      if (speaks) shared.ds_full[ds_stage.index].arrive();
      float dq[32];
      products_of_dq(dq);
      wait_for_products<1>();
      hold(dv);
      hold(dk);
      __syncwarp();  // all lanes have read notes, lse and delta
      if (speaks) shared.d_out_empty[at].arrive(), shared.q_empty[at].arrive();
      // The next scores, while this block is finished. After the last block as little as the compiler
      // accepts.
      stage.next();
      if (last) {
        begin_products();
        multiply<T, Major::k, Major::k>(s, descriptor(k_tile), descriptor(q_blocks), 0);
        end_products();
      } else {
        shared.q_full[stage.index].wait(stage.parity);
        transposed(s, k_tile, q_blocks + stage.index * S::query_bytes);
      }
      arrive_at(2 - me, 128 * consumers);
      wait_for_products<1>();
      hold(dq);
      if (before.first >= 0) {
        if (speaks) shared.ds_empty[ds_stage.index ^ 1].arrive();
        hand_over(dq);
      }
      before = block;
      ds_stage.next();
      wait_for_products<0>();
      hold(s);
    }
    float dq[32];
    products_of_dq(dq);
    wait_for_products<0>();
    hold(dq);
    if (speaks) shared.ds_empty[ds_stage.index ^ 1].arrive(), shared.kv_empty.arrive();
    hand_over(dq);
    const auto token = [&](int row) -> int64_t {
      const int32_t key = group * keys + 64 * me + row;
      return key < a.keys ? key : -1;
    };
    const float scale[2] = {a.scale, a.scale}, one[2] = {1, 1};
    store_rows<T>(dk, scale, a.dk.of<T>(b, kv_head), a.dk.row, 0, a.width, token);
    store_rows<T>(dv, one, a.dv.of<T>(b, kv_head), a.dv.row, 0, a.value_width, token);
  }

  if (me == 0) sync_at(1, 128 * consumers);  // the turn after the last
  // What is left for the threads that add.
  shared.dq_empty[me][dq_stage.index].wait(dq_stage.parity ^ 1);
  if (in_group == 0) shared.dq_block[me][dq_stage.index] = -1;
  shared.dq_full[me][dq_stage.index].arrive();
}

// dQ = scale * its sum: a block of 128 threads a slab. If there were turns, what nobody visits is not set.
template <class T, int width>
__global__ void __launch_bounds__(128)
    finish_dq(const float* sum, bool turns, GroupedTable maps, Rows dq, int64_t heads, int64_t queries,
              int64_t query_blocks, int64_t count, int columns, float scale) {
  for (int64_t place = blockIdx.x; place < count; place += gridDim.x) {
    const int64_t block = place / consumers % query_blocks, matrix = place / consumers / query_blocks;
    const int64_t b = matrix / heads, h = matrix - b * heads;
    const int part = static_cast<int>(place % consumers);
    const bool set = !turns || maps.of(b, h).last_visitor[block] >= 0;
    const float4* const from = reinterpret_cast<const float4*>(
                                   sum + slab_start<width>(columns, block + matrix * query_blocks, part)) +
                               threadIdx.x;
    float d[32];
#pragma unroll
    for (int i = 0; i < 8; ++i) {  // columns 8 i and on
      const float4 four = set && 8 * i < slab_columns<width>(columns, part) ? from[128 * i] : float4{};
      d[4 * i] = four.x, d[4 * i + 1] = four.y, d[4 * i + 2] = four.z, d[4 * i + 3] = four.w;
    }
    const int64_t first = block * Shape<width>::queries + (width == 64 ? 64 * part : 0);
    const auto token = [&](int row) -> int64_t { return first + row < queries ? first + row : -1; };
    const float factor[2] = {scale, scale};
    store_rows<T>(d, factor, dq.of<T>(b, h), dq.row, width == 64 ? 0 : 64 * part, columns, token);
  }
}

template <class T, int width>
void launch(const AttentionProblem& p, AttentionGradients& g, const Tensor& d_out, const GroupedTable& maps) {
  using S = Shape<width>;
  const Device device = p.q.device();
  const cudaStream_t stream = stream_of(device);
  const int64_t matrices = p.batch() * p.heads();
  const int64_t blocks = (p.queries() + S::queries - 1) / S::queries, padded = blocks * S::queries;
  const mma::PreparedRows rows = mma::prepare_rows(p, g, d_out, padded);
  const int64_t slabs = matrices * blocks * consumers;
  // Any order is faster for wide heads and many queries alone: it must begin with zeros.
  const bool in_order = p.deterministic || (maps.contiguous && (width == 64 || p.queries() <= 1024));
  const int64_t sums = matrices * padded * p.width();
  // initcheck does not see what bulk copies write.
  Tensor sum =
      in_order && !sanitized ? Tensor::empty({sums}, f32, device) : Tensor::zeros({sums}, f32, device);
  Tensor counts = Tensor::zeros({1 + (in_order ? slabs : 0)}, i32, device);
  int32_t* const taken = counts.mutable_data<int32_t>();
  // Queries and gradients of outputs; of wide heads the sum of dQ should fit as well (measured).
  const int64_t row = (p.width() + p.value_width()) * 2 + (width == 128 ? p.width() * 4 : 0);
  const int64_t bytes = p.queries() * row * (p.heads() / p.kv_heads());
  const BackwardArguments arguments{tensor_map(p.q, S::queries),
                                    tensor_map(p.k, keys),
                                    tensor_map(p.v, keys),
                                    tensor_map(d_out, S::queries),
                                    mma::operand(g.dk),
                                    mma::operand(g.dv),
                                    sum.mutable_data<float>(),
                                    rows.numbers.lse,
                                    rows.numbers.delta,
                                    taken,
                                    in_order ? taken + 1 : nullptr,
                                    p.heads(),
                                    p.kv_heads(),
                                    p.keys(),
                                    padded,
                                    blocks,
                                    static_cast<int>(p.width()),
                                    static_cast<int>(p.value_width()),
                                    static_cast<float>(p.scale),
                                    maps,
                                    mma::Schedule(maps.groups, p.batch() * p.kv_heads(), bytes, in_order)};
  const auto kernel = backward<T, width>;
  constexpr size_t bytes_of_shared = S::memory + sizeof(Shared<width>);
  allow_shared_memory(reinterpret_cast<const void*>(kernel), bytes_of_shared);
  kernel<<<blocks_at_once(arguments.schedule, device), threads, bytes_of_shared, stream>>>(arguments);
  check_launch("attention.backward");
  finish_dq<T, width><<<blocks_for(slabs, 1), 128, 0, stream>>>(
      sum.data<float>(), in_order, maps, mma::operand(g.dq), p.heads(), p.queries(), blocks, slabs,
      static_cast<int>(p.width()), arguments.scale);
  check_launch("attention.backward");
}

}  // namespace

void run_backward(const AttentionProblem& p, AttentionGradients& g) {
  const int width = mma::padded_width(p);
  const bool general = mma::general_scores(p);
  if (p.batch() * p.heads() * p.queries() * p.keys() == 0 || (general && width > 128))  // too few registers
    return mma::run_backward(p, g);
  bool two_passes = general || width > 128;
  GroupedTable maps{};
  if (!two_passes) {
    maps = grouped_table(p, Side::key, consumers, width == 64 ? 2 : 1);
    two_passes = maps.gathers || (p.deterministic && !maps.contiguous);
  }
  // In one pass, what is not wanted is made all the same: the others come from the same numbers.
  const auto made = [&](const Tensor& wanted, const Tensor& like) {
    if (wanted.defined() ? mma::packs(wanted) : two_passes) return wanted;
    return torus::detail::empty_heads(like.size(0), like.size(1), like.size(2), like.size(3), like.dtype(),
                                      like.device());
  };
  AttentionGradients all = g;
  all.dq = made(g.dq, p.q), all.dk = made(g.dk, p.k), all.dv = made(g.dv, p.v);
  Tensor d_out = g.d_out;
  if (!d_out.defined() || !mma::packs(d_out)) {
    d_out = torus::detail::empty_heads(p.batch(), p.heads(), p.queries(), p.value_width(), p.q.dtype(),
                                       p.q.device());
    g.d_out.defined() ? d_out.copy_(g.d_out) : d_out.fill_(0);
  }
  if (two_passes)
    run_two_pass_backward(p, all, d_out);
  else
    mma::dispatch_16_bit(p.q.dtype(), [&](auto zero) {
      using T = decltype(zero);
      width == 64 ? launch<T, 64>(p, all, d_out, maps) : launch<T, 128>(p, all, d_out, maps);
    });
  for (const auto& [wanted, result] : {std::pair{&g.dq, &all.dq}, {&g.dk, &all.dk}, {&g.dv, &all.dv}})
    if (wanted->defined() && !mma::packs(*wanted)) wanted->copy_(*result);
}

}  // namespace torus::gpu::hopper
