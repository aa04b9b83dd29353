// Attention on tensor cores by mma.sync: the instructions, tiles of 16-bit rows in shared memory, the walk of
// a block of threads over the map of a mask, and what is made of scores. For kernels; not installed.
#pragma once

#include <algorithm>
#include <limits>
#include <vector>

#include "torus/core/cuda.h"
#include "torus/ops/attention/backend.h"
#include "torus/ops/attention/cuda_map.h"
#include "torus/ops/attention/grouped_map.h"

namespace torus::gpu::mma {

using torus::detail::AttentionDropout;
using torus::detail::AttentionProblem;
using torus::detail::Side;
using torus::detail::tile_size;
using torus::detail::Visit;

inline constexpr float infinity = std::numeric_limits<float>::infinity();
inline constexpr float log2_e = 1.44269504088896341f;

// ------------------------------------------------------------------------------------------- instructions

__device__ inline uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

/// Four 8 x 8 matrices of 16 bits; lanes 8 i ... 8 i + 7 give the addresses of the rows of matrix i. Of each,
/// a lane gets columns 2 (lane % 4) and the next of row lane / 4.
__device__ inline void load_matrices(uint32_t (&to)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(address));
}
/// The same of their transposes.
__device__ inline void load_transposed(uint32_t (&to)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(address));
}

/// c += a b: 16 x 8 += 16 x 16 by 16 x 8. With g = lane / 4 and t = lane % 4 a lane holds of a: rows g and g
/// + 8 of columns 2 t and the next, then the same rows of columns 2 t + 8 and the next; of b: rows 2 t and
/// the next, 2 t + 8 and the next, of column g; of c: columns 2 t and the next of row g, then of row g + 8.
template <class T>
__device__ inline void multiply_add(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  if constexpr (std::is_same_v<T, __half>)
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/// Copies 16 or 4 bytes to shared memory, or zeros where there is nothing to read, without waiting.
__device__ inline void copy_16_async(uint32_t to, const void* from, bool there) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(there ? 16 : 0)
               : "memory");
}
__device__ inline void copy_4_async(uint32_t to, const void* from, bool there) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(there ? 4 : 0)
               : "memory");
}
/// Waits for the thread's own copies.
__device__ inline void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

/// Reads a counter in global memory, and what was written there before others added to it so; adds 1, after
/// what the thread wrote.
__device__ inline int32_t load_acquire(const int32_t* counter) {
  int32_t now;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(now) : "l"(counter) : "memory");
  return now;
}
__device__ inline void add_release(int32_t* counter) {
  asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(counter) : "memory");
}

/// Two numbers as one word, `low` in the lower half.
template <class T>
__device__ inline uint32_t pack(float low, float high) {
  if constexpr (std::is_same_v<T, __half>) {
    const __half2 both = __floats2half2_rn(low, high);
    return reinterpret_cast<const uint32_t&>(both);
  } else {
    const __nv_bfloat162 both = __floats2bfloat162_rn(low, high);
    return reinterpret_cast<const uint32_t&>(both);
  }
}

/// Keeps the compiler from computing what follows from x ahead of a loop: registers are scarcer than
/// additions.
__device__ inline void here(uint32_t& x) { asm volatile("" : "+r"(x)); }

/// Over the four lanes that share rows of an accumulator.
__device__ inline float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}
__device__ inline float quad_sum(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

// ------------------------------------------------------------------------------------------ tiles of rows

/// One tensor [B, H, N, D] by strides in elements.
struct Operand {
  void* data;
  int64_t batch, head, row;
  template <class T>
  __device__ T* of(int64_t b, int64_t h) const {
    return static_cast<T*>(data) + b * batch + h * head;
  }
};

/// Where the chunk of 16 bytes that holds `column` lies in a tile of rows of `width` elements: chunks change
/// places within a row, so that one column of 8 rows lies in different banks.
template <int width>
__device__ inline uint32_t offset_in_tile(int row, int column) {
  return static_cast<uint32_t>(row * width * 2 + ((column / 8) ^ (row % 8)) * 16);
}

/// Addresses of a lane for the 16 x 16 blocks of a tile.
template <int width>
struct BlockAddress {
  uint32_t row_start, place;
  __device__ BlockAddress(const void* tile, int row, int column)
      : row_start(shared_address(tile) + row * width * 2), place(((column / 8) ^ (row % 8)) * 16) {}
  __device__ void computed_here() { here(place); }
  /// `rows` further down (a multiple of 8) and `columns` further right (of 16).
  __device__ uint32_t at(int rows, int columns) const {
    return row_start + rows * width * 2 + (place ^ columns * 2);
  }
};
/// For a left operand stored by rows, and (transposed) for a right one stored by its rows. The bits of
/// `column` are none of those of columns that are asked for.
template <int width>
__device__ inline BlockAddress<width> down_first(const void* tile, int row, int lane, int column = 0) {
  return {tile, row + lane % 16, column + lane / 16 * 8};
}
/// For a right operand stored by its columns.
template <int width>
__device__ inline BlockAddress<width> across_first(const void* tile, int row, int lane, int column = 0) {
  return {tile, row + lane % 8 + lane / 16 * 8, column + lane / 8 % 2 * 8};
}

/// c += x y, of m times 16 rows by n pairs of 8 columns: `load_x(k, x)` reads the left blocks of step k (of
/// 16), `load_y(k, j, y)` the right ones of pair j, one pair ahead of the products that need them.
template <class T, int steps, int m, int n, class X, class Y>
__device__ inline void multiply(float (&c)[m][2 * n][4], const X& load_x, const Y& load_y) {
  uint32_t x[2][m][4], y[2][4];
  load_x(0, x[0]);
  load_y(0, 0, y[0]);
#pragma unroll
  for (int k = 0; k < steps; ++k) {
#pragma unroll
    for (int j = 0; j < n; ++j) {
      const int at = (k * n + j) % 2;
      if (j + 1 < n) load_y(k, j + 1, y[at ^ 1]);
      if (j + 1 == n && k + 1 < steps) load_x(k + 1, x[(k + 1) % 2]), load_y(k + 1, 0, y[at ^ 1]);
#pragma unroll
      for (int r = 0; r < m; ++r) {
        multiply_add<T>(c[r][2 * j], x[k % 2][r], y[at][0], y[at][1]);
        multiply_add<T>(c[r][2 * j + 1], x[k % 2][r], y[at][2], y[at][3]);
      }
    }
  }
}

/// Starts to fill a tile: row i is that of `token(i)`, or zeros where that is negative. Columns beyond
/// `columns` are zeros. Without `packs`, rows may start anywhere and are read element by element, at once.
template <class T, int width, int rows, int threads, class Token>
__device__ inline void load_tile(char* tile, const T* head, int64_t stride, int columns, bool packs,
                                 const Token& token) {
  constexpr int chunks = width / 8, at_once = threads / chunks;
  static_assert(rows % at_once == 0 && threads % chunks == 0);
  if (packs) {
    uint32_t thread = threadIdx.x;
    here(thread);
    const int first = static_cast<int>(thread) / chunks, column = static_cast<int>(thread) % chunks * 8;
    const uint32_t to = shared_address(tile) + offset_in_tile<width>(first, column);
    const char* const from = reinterpret_cast<const char*>(head + column);
    const auto row_bytes = static_cast<int32_t>(stride) * 2;
    // All tokens first: copies are not moved past reads.
    int32_t tokens[rows / at_once];
#pragma unroll
    for (int n = 0; n < rows / at_once; ++n)
      tokens[n] = column < columns ? static_cast<int32_t>(token(n * at_once + first)) : -1;
#pragma unroll
    for (int n = 0; n < rows / at_once; ++n) {
      // Rows that a thread copies lie multiples of 8 apart, so that their chunks have one place, or 4.
      const uint32_t at = at_once % 8 == 0
                              ? to + n * at_once * width * 2
                              : shared_address(tile) + offset_in_tile<width>(n * at_once + first, column);
      const bool there = tokens[n] >= 0;
      copy_16_async(at, from + int64_t{there ? tokens[n] : 0} * row_bytes, there);
    }
    return;
  }
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); i < rows * chunks; i += threads) {
    const int row = i / chunks, column = i % chunks * 8;
    const int64_t t = token(row);
    Pack<T> pack;
    for (int e = 0; e < 8; ++e)
      pack.at[e] = t >= 0 && column + e < columns ? head[t * stride + column + e] : T(0.0f);
    *reinterpret_cast<Pack<T>*>(tile + offset_in_tile<width>(row, column)) = pack;
  }
}

/// Fills tiles of 64 rows with rows that follow each other, if they pack. What of the addresses is the
/// thread's own is worked out once.
template <class T, int width, int threads>
class RunCopies {
 public:
  __device__ RunCopies(const T* head, int64_t stride, int columns)
      : row_(static_cast<int>(threadIdx.x) / chunks), row_bytes_(static_cast<int32_t>(stride) * 2) {
    const int column = static_cast<int>(threadIdx.x) % chunks * 8;
    from_ = reinterpret_cast<const char*>(head + column) + int64_t{row_} * row_bytes_;
    to_ = offset_in_tile<width>(row_, column);
    if (column >= columns) row_ = 64;
  }
  /// Starts to copy `count` rows from that of token `first` on; those beyond are zeros.
  __device__ void start(const char* tile, int32_t first, int32_t count) const {
    const char* from = from_ + int64_t{first} * row_bytes_;
    const uint32_t to = shared_address(tile) + to_;
#pragma unroll
    for (int n = 0; n < 64 / at_once; ++n, from += int64_t{row_bytes_} * at_once)
      copy_16_async((at_once == 4 ? to ^ n % 2 * 64 : to) + n * at_once * width * 2, from,
                    row_ + n * at_once < count);
  }

 private:
  static constexpr int chunks = width / 8, at_once = threads / chunks;
  static_assert(at_once >= 4);  // so that its chunks have one place or two in their rows
  const char* from_;
  uint32_t to_;
  int row_;  // the thread's first; beyond all where its columns are
  int32_t row_bytes_;
};

/// Writes an accumulator, times a factor a row, to 16 rows and 8 columns of a tile.
template <class T, int width>
__device__ inline void put(char* tile, int row, int column, const float (&c)[4], float factor,
                           float factor_8) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float by = h ? factor_8 : factor;
    *reinterpret_cast<uint32_t*>(tile + offset_in_tile<width>(row + lane / 4 + 8 * h, column) +
                                 lane % 4 * 4) = pack<T>(c[2 * h] * by, c[2 * h + 1] * by);
  }
}

/// Copies `rows` rows of a tile from `first_row` on, by threads 0 to `threads` of some: row i goes to that of
/// `token(i)`, or nowhere where that is negative.
template <class T, int width, class Token>
__device__ inline void store_tile(const char* tile, int first_row, int rows, int thread, int threads, T* head,
                                  int64_t stride, int columns, bool packs, const Token& token) {
  constexpr int chunks = width / 8;
#pragma unroll 1
  for (int i = thread; i < rows * chunks; i += threads) {
    const int row = i / chunks, column = i % chunks * 8;
    const int64_t t = token(row);
    if (t < 0 || column >= columns) continue;
    const auto pack =
        *reinterpret_cast<const Pack<T>*>(tile + offset_in_tile<width>(first_row + row, column));
    T* const to = head + t * stride + column;
    if (packs)
      *reinterpret_cast<Pack<T>*>(to) = pack;
    else
      for (int e = 0; e < 8 && column + e < columns; ++e) to[e] = pack.at[e];
  }
}

/// Writes 16 rows that a warp holds in accumulators, times a factor a row, through rows of a tile that no
/// other warp uses. Row i goes to that of `token(i)`, or nowhere where that is negative.
template <class T, int width, class Token>
__device__ inline void store_rows(char* tile, int first_row, const float (&c)[width / 8][4],
                                  const float (&factor)[2], T* head, int64_t stride, int columns, bool packs,
                                  const Token& token) {
  __syncwarp();
#pragma unroll
  for (int j = 0; j < width / 8; ++j) put<T, width>(tile, first_row, 8 * j, c[j], factor[0], factor[1]);
  __syncwarp();
  store_tile<T, width>(tile, first_row, 16, static_cast<int>(threadIdx.x) % 32, 32, head, stride, columns,
                       packs, token);
}

// ------------------------------------------------------------------------------------ the walk over a map

/// The token that is row `row` of a tile, -1 if there is none.
__device__ inline int64_t owner(const SideView& side, int64_t tile, int row) {
  if (tile >= side.tiles) return -1;
  if (!side.order_tokens) {
    const int64_t token = tile * tile_size + row;
    return token < side.owners ? token : -1;
  }
  const int64_t i = side.order_first[tile] + row;
  return i < side.order_first[tile + 1] ? side.order_tokens[i] : -1;
}

inline constexpr int32_t block_size = tile_size;  // others that are visited at once

/// Word of the bits of an accumulator (8 j + 2 t + c, t = lane % 4) whose column is below `count`.
__device__ inline uint32_t columns_below(int count, int lane) {
  uint32_t word = 0;
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const int left = count - 8 * j - lane % 4 * 2;
    word |= (left > 1 ? 0xfu : left == 1 ? 0x5u : 0u) << 4 * j;
  }
  return word;
}

/// A side of the map of one head.
struct MapSide {
  const SideView* side;
  const uint32_t* fragments;
};

/// A place in a walk: which entry, and from which of its others on.
struct Place {
  int entry = 0;
  int32_t offset = 0;
};

/// What a block of threads visits, in shared memory: one thread writes some entries ahead. Threads go through
/// it together, 64 others at a time, a round each, and meet between rounds. With two tiles of owners (then
/// nothing gathers) their visits are merged: what both visit from one token on, they visit together.
template <int tiles>
class Walk {
 public:
  /// Others that are visited together; more than 64 only where every pair is allowed.
  struct Entry {
    const int32_t* list;          // their tokens; null: `first` and those after it
    const uint32_t* bits[tiles];  // for each tile of owners; null: every pair is allowed
    bool visits[tiles];           // whether the tile visits these at all
    int32_t first, count;
    int32_t member;  // which of the heads that a block of threads goes through
  };

  /// By one thread, before round 0. `side_of(member)` is the map's side for each of the heads that are gone
  /// through.
  template <class Sides>
  __device__ void start(const Sides& side_of, int64_t tile, int members) {
    made_ = 0, member_ = 0, members_ = members;
    Cursor cursors[tiles];
    begin(cursors, side_of(0), tile);
    save(cursors);
    fill(side_of, tile);
    filled_[0] = made_;
  }
  /// By one thread, in each round: sees to it that in the next one there are entries for the place after
  /// `next` and the one after that, if there are that many.
  template <class Sides>
  __device__ void keep_ahead(int round, Place next, const Sides& side_of, int64_t tile) {
    if (member_ < members_ && next.entry + 3 >= made_) fill(side_of, tile);
    filled_[(round + 1) % 2] = made_;
  }

  __device__ bool has(int round, Place p) const { return p.entry < filled_[round % 2]; }
  __device__ const Entry& entry(Place p) const { return entries_[static_cast<unsigned>(p.entry) % capacity]; }
  __device__ Place after(Place p) const {
    return p.offset + block_size < entry(p).count ? Place{p.entry, p.offset + block_size}
                                                  : Place{p.entry + 1, 0};
  }
  /// The up to 64 others at `p`: their number, and the token of one of them, -1 beyond.
  __device__ int32_t count(Place p) const { return min(entry(p).count - p.offset, block_size); }
  __device__ int32_t token(Place p, int i) const {
    const Entry& e = entry(p);
    return i >= e.count - p.offset ? -1 : e.list ? e.list[i] : e.first + p.offset + i;
  }
  /// Tokens of the first two places, by thread i of 64 or more.
  __device__ void first_tokens(int32_t (&tokens)[3][block_size], int i) const {
    const Place first, second = after(first);
    if (i >= block_size) return;
    tokens[0][i] = token(first, i);
    if (has(0, second)) tokens[1][i] = token(second, i);
  }
  /// In a round that has `next`, token i of the place after it, -1 if there is none.
  __device__ int32_t later_token(int round, Place next, int i) const {
    const Place later = after(next);
    return i < block_size && has(round, later) ? token(later, i) : -1;
  }
  /// Which of a lane's pairs in 16 rows of a tile are allowed: bit 4 j + e is element e of accumulator j.
  __device__ uint32_t allowed(Place p, int tile, int rows_of_16, int lane) const {
    const uint32_t* const bits = entry(p).bits[tile];
    const uint32_t word = bits ? bits[32 * rows_of_16 + lane] : ~0u;
    const int32_t there = count(p);
    return there < block_size ? word & columns_below(there, lane) : word;
  }

 private:
  // What is left of a tile's visits: the rest of one, and those after it.
  struct Cursor {
    const Visit *next, *end;
    int64_t first, left, atoms;
    Visit::Kind kind;

    __device__ bool at_visit() {
      while (left == 0) {
        if (next == end) return false;
        first = next->first, left = next->count, atoms = next->atoms, kind = next->kind;
        ++next;
      }
      return true;
    }
    // Of others that can be visited together.
    __device__ int32_t count() const {
      return static_cast<int32_t>(whole() || left < tile_size ? left : tile_size);
    }
    __device__ bool whole() const { return kind == Visit::Kind::interval; }
  };

  __device__ static void begin(Cursor (&cursors)[tiles], const MapSide& map, int64_t tile) {
#pragma unroll
    for (int i = 0; i < tiles; ++i) {
      const int64_t t = tile * tiles + i;
      const Visit* const visits = map.side->visits;
      const bool there = t < map.side->tiles;
      cursors[i] = {there ? visits + map.side->first_visit[t] : visits,
                    there ? visits + map.side->first_visit[t + 1] : visits,
                    0,
                    0,
                    0,
                    Visit::Kind::interval};
    }
  }

  __device__ void save(const Cursor (&cursors)[tiles]) {
#pragma unroll
    for (int i = 0; i < tiles; ++i) saved_[i] = cursors[i];
  }

  __device__ static void take(int i, Cursor& cursor, int32_t count, const MapSide& map, Entry& to) {
    const bool gathers = cursor.kind == Visit::Kind::gather;
    to.list = gathers ? map.side->lists + cursor.first : nullptr;
    to.first = gathers ? 0 : static_cast<int32_t>(cursor.first);
    to.count = count;
    to.visits[i] = true;
    to.bits[i] = nullptr;
    if (!cursor.whole()) {
      const int32_t id = map.side->atom_ids[cursor.atoms++];
      if (id >= 0) to.bits[i] = map.fragments + int64_t{128} * id;
    }
    cursor.first += count, cursor.left -= count;
  }

  __device__ static bool next(Cursor (&cursors)[tiles], const MapSide& map, Entry& to) {
#pragma unroll
    for (bool& visits : to.visits) visits = false;
    if constexpr (tiles == 1) {
      if (!cursors[0].at_visit()) return false;
      take(0, cursors[0], cursors[0].count(), map, to);
      return true;
    } else {
      Cursor &a = cursors[0], &b = cursors[1];
      const bool has_a = a.at_visit(), has_b = b.at_visit();
      if (!has_a && !has_b) return false;
      // Intervals can be cut anywhere, runs cannot: their bits are of 64 tokens.
      if (has_a && has_b && a.first == b.first) {
        const int32_t in_a = a.count(), in_b = b.count();
        const int32_t count = a.whole() && b.whole() ? min(in_a, in_b) : a.whole() ? in_b : in_a;
        if (a.whole() ? in_a >= count : b.whole() ? in_b >= count : in_a == in_b) {
          take(0, a, count, map, to);
          take(1, b, count, map, to);
          return true;
        }
      }
      const bool first = !has_b || (has_a && (a.first < b.first || (a.first == b.first && !a.whole())));
      if (first)
        take(0, a, cut(a, b, has_b), map, to);
      else
        take(1, b, cut(b, a, has_a), map, to);
      return true;
    }
  }

  // How much of `mine` comes before the other begins, if it can be cut.
  __device__ static int32_t cut(const Cursor& mine, const Cursor& other, bool has_other) {
    const int32_t count = mine.count();
    const int64_t before = other.first - mine.first;
    return has_other && mine.whole() && before > 0 && before < count ? static_cast<int32_t>(before) : count;
  }

  // Up to `at_once` further entries.
  template <class Sides>
  __device__ void fill(const Sides& side_of, int64_t tile) {
    Cursor cursors[tiles];
#pragma unroll
    for (int i = 0; i < tiles; ++i) cursors[i] = saved_[i];
    for (const int until = made_ + at_once; made_ < until && member_ < members_;) {
      Entry& to = entries_[made_ % capacity];
      to.member = member_;
      if (next(cursors, side_of(member_), to))
        ++made_;
      else if (++member_ < members_)
        begin(cursors, side_of(member_), tile);
    }
    save(cursors);
  }

  static constexpr int capacity = 16, at_once = 4;
  Entry entries_[capacity];
  volatile int filled_[2];  // entries that there are in even and in odd rounds
  int made_, member_, members_;
  Cursor saved_[tiles];
};

/// Where a warp of a block of threads is that goes through what some tiles of owners visit, none of which
/// gathers, 64 others at a time: of the 64, what `tile` sees of them. Blocks that the tile does not visit
/// come up too, for others that do.
template <int tiles>
class QueuedBlocks {
 public:
  /// `walk` has begun. All threads step together, and meet between.
  __device__ QueuedBlocks(Walk<tiles>& walk, const MapSide& map, int64_t owners, int tile)
      : walk_(walk), map_(map), owners_(owners), tile_(tile) {}
  __device__ bool there() const { return there_; }
  __device__ int32_t first() const { return walk_.entry(at_).first + at_.offset; }
  __device__ int32_t count() const { return walk_.count(at_); }
  __device__ bool visits() const { return walk_.entry(at_).visits[tile_]; }
  /// Whether some pairs of a tile that visits the block are not allowed, or not there.
  __device__ bool masked() const { return walk_.entry(at_).bits[tile_] || count() < block_size; }
  /// Of 16 rows of the tile, as Walk::allowed.
  __device__ uint32_t allowed(int rows_of_16, int lane) const { return walk_.allowed(at_, tile_, rows_of_16, lane); }
  __device__ void step() {
    at_ = walk_.after(at_);
    there_ = walk_.has(round_, at_);
    if (threadIdx.x == 0) walk_.keep_ahead(round_, at_, [&](int) { return map_; }, owners_);
    ++round_;
  }

 private:
  Walk<tiles>& walk_;
  MapSide map_;
  int64_t owners_;
  int tile_, round_ = 0;
  Place at_;
  bool there_ = walk_.has(0, at_);
};

/// The same from a grouped side of one 64 a block; threads step each for itself.
class GroupedBlocks {
 public:
  __device__ GroupedBlocks(const GroupedView& map, int64_t group, int tiles, int tile)
      : words_(3 + tiles), entry_(map.entries + int64_t{words_} * map.first[group]), fragments_(map.fragments), left_(map.first[group + 1] - map.first[group]), tile_(tile) {
    read();
  }
  __device__ bool there() const { return left_ > 0; }
  __device__ int32_t first() const { return first_; }
  __device__ int32_t count() const { return blocks_ > 1 ? block_size : last_; }
  __device__ bool visits() const { return id_ != torus::detail::GroupedSide::none; }
  __device__ bool masked() const { return id_ >= 0 || count() < block_size; }
  __device__ uint32_t allowed(int rows_of_16, int lane) const {
    const uint32_t word = id_ >= 0 ? fragments_[int64_t{128} * id_ + 32 * rows_of_16 + lane] : ~0u;
    return count() < block_size ? word & columns_below(count(), lane) : word;
  }
  __device__ void step() {
    first_ += block_size;
    if (--blocks_ > 0) return;
    --left_, entry_ += words_;
    if (left_ > 0) read();
  }

 private:
  __device__ void read() { first_ = entry_[0], blocks_ = entry_[1], last_ = entry_[2], id_ = entry_[3 + tile_]; }

  int words_;
  const int32_t* entry_;
  const uint32_t* fragments_;
  int32_t left_, tile_, first_ = 0, blocks_ = 0, last_ = 0, id_ = 0;
};

// ---------------------------------------------------------------------------------------- blocks of a grid

/// Which tile and which matrix (of a batch element and a head) a block of threads takes. Some matrices at a
/// time, whose operands fit the cache together; of these, the tiles that take longest first. These sections
/// are about as large: tiles of a small last one would not be enough for all multiprocessors.
struct Schedule {
  int64_t tiles, matrices;
  int64_t smaller, section;  // so many sections are of a matrix less than `section`, and come first
  bool last_first;

  Schedule(int64_t tile_count, int64_t matrix_count, int64_t bytes_of_matrix, bool from_last)
      : tiles(tile_count), matrices(matrix_count), last_first(from_last) {
    constexpr int64_t cache = int64_t{24} << 20;
    const int64_t some = std::max<int64_t>(matrices, 1);
    const int64_t most = std::clamp<int64_t>(cache / std::max<int64_t>(bytes_of_matrix, 1), 1, some);
    const int64_t sections = (some + most - 1) / most;
    section = (some + sections - 1) / sections;
    smaller = sections * section - some;
  }
  /// Sections of this many matrices, but for the last.
  void cut_at(int64_t matrices_at_once) { section = matrices_at_once, smaller = 0; }
  unsigned blocks() const {
    check(tiles * matrices <= 0x7fffffff, Error::Kind::Shape,
          "[attention] expected at most 2^31 - 1 tiles, got ", tiles * matrices);
    return static_cast<unsigned>(tiles * matrices);
  }
  __device__ void find(int64_t index, int64_t& tile, int64_t& matrix) const {
    // In 32 bits, see `blocks`: divisions of 64 take hundreds of cycles.
    auto place = static_cast<uint32_t>(index), size = static_cast<uint32_t>(section);
    uint32_t first = 0;  // matrix of those that are left
    const auto few = static_cast<uint32_t>(smaller) * (size - 1);
    if (place < few * static_cast<uint32_t>(tiles))
      --size;
    else
      first = few, place -= few * static_cast<uint32_t>(tiles);
    const uint32_t each = static_cast<uint32_t>(tiles) * size, number = place / each;
    const uint32_t rest = place - number * each;
    first += number * size;
    size = min(size, static_cast<uint32_t>(matrices) - first);
    const uint32_t step = rest / size;
    tile = last_first ? tiles - 1 - step : step;
    matrix = first + (rest - step * size);
  }
};

// ----------------------------------------------------------------------------------------------- scores

inline constexpr int max_terms = 4;

/// One term added to scores.
struct BiasTerm {
  torus::AttentionBias::Kind kind;
  const void* data;  // elements of q's type; alibi: f32
  int64_t step[4];   // dense: by b, h, q and k; else step[1] by head
  int axes;          // relative
  int32_t length[torus::max_grid_axes], size[torus::max_grid_axes];
  bool wrapped[torus::max_grid_axes];
  void* gradient;  // dense: of step `gradient_step`; null: not wanted
  int64_t gradient_step[4];
};

/// From q.k to the score.
struct ScoreArguments {
  float scale, softcap;
  int64_t shift;  // alibi: query q is level with key q + shift
  int terms;
  BiasTerm term[max_terms];
  AttentionDropout dropout;
  Replayed<uint64_t> position;
  float keep_scale;
  uint32_t threshold;

  __device__ AttentionDropout drawn() const { return {dropout.probability, dropout.seed, position.get()}; }
};

/// s += a table of relative biases.
template <class T, bool queries_own, class Column>
__device__ inline void add_relative(float (&s)[8][4], const BiasTerm& term, int64_t h,
                                    const int64_t (&own)[2], const Column& column) {
  int32_t place[8][4] = {}, step = 1;
  uint32_t own_rest[2] = {static_cast<uint32_t>(own[0]), static_cast<uint32_t>(own[1])}, rest[8][2];
#pragma unroll
  for (int j = 0; j < 8; ++j)
#pragma unroll
    for (int c = 0; c < 2; ++c) rest[j][c] = static_cast<uint32_t>(column(j, c));
#pragma unroll 1
  for (int axis = term.axes - 1; axis >= 0; --axis) {
    const int32_t length = term.length[axis], size = term.size[axis];
    const auto split = [&](uint32_t& from) {  // the coordinate on this axis; what is left are those before it
      const uint32_t before = from / static_cast<uint32_t>(length);
      const auto coord = static_cast<int32_t>(from - before * static_cast<uint32_t>(length));
      from = before;
      return coord;
    };
    const int32_t mine[2] = {split(own_rest[0]), split(own_rest[1])};
#pragma unroll
    for (int j = 0; j < 8; ++j)
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int32_t other = split(rest[j][c]);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          int32_t offset = queries_own ? other - mine[half] : mine[half] - other;
          if (term.wrapped[axis]) {
            if (offset < 0) offset += length;
            if (offset > (length - 1) / 2) offset -= length;
          }
          place[j][2 * half + c] += (min(max(offset, -(size / 2)), size / 2) + size / 2) * step;
        }
      }
    step *= size;
  }
  const T* const table = static_cast<const T*>(term.data) + h * term.step[1];
#pragma unroll
  for (int j = 0; j < 8; ++j)
#pragma unroll
    for (int e = 0; e < 4; ++e)
      s[j][e] += widen(table[place[j][e]]);  // inside the table even where no token is
}

/// Products q.k of 16 rows by 64 columns become scores: softcap(scale * q.k) + bias. `slope`: the derivative
/// of softcap, two a word of f16. `own`: tokens of rows lane / 4 and 8 further; `column(j, c)`: that of
/// column 8 j + 2 (lane % 4) + c; -1 where there is none.
template <class T, bool queries_own, class Column>
__device__ inline void finish_scores(float (&s)[8][4], uint32_t (&slope)[8][2], const ScoreArguments& a,
                                     int64_t b, int64_t h, const int64_t (&own)[2], const Column& column) {
#pragma unroll
  for (int j = 0; j < 8; ++j)
#pragma unroll
    for (int e = 0; e < 4; ++e) s[j][e] *= a.scale;
  if (a.softcap > 0) {
    const float inverse = 1 / a.softcap;
#pragma unroll
    for (int j = 0; j < 8; ++j)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float t0 = tanhf(s[j][2 * half] * inverse), t1 = tanhf(s[j][2 * half + 1] * inverse);
        s[j][2 * half] = a.softcap * t0, s[j][2 * half + 1] = a.softcap * t1;
        slope[j][half] = pack<__half>(1 - t0 * t0, 1 - t1 * t1);
      }
  }
#pragma unroll 1
  for (int n = 0; n < a.terms; ++n) {
    const BiasTerm& term = a.term[n];
    if (term.kind == torus::AttentionBias::Kind::relative) {
      add_relative<T, queries_own>(s, term, h, own, column);
    } else if (term.kind == torus::AttentionBias::Kind::alibi) {
      const float by = static_cast<const float*>(term.data)[h];
      const int64_t shift = queries_own ? a.shift : -a.shift;
#pragma unroll
      for (int j = 0; j < 8; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int64_t distance = column(j, e % 2) - own[e / 2] - shift;
          s[j][e] -= by * static_cast<float>(distance < 0 ? -distance : distance);
        }
    } else {
      const int64_t own_step = term.step[queries_own ? 2 : 3], step = term.step[queries_own ? 3 : 2];
      const T* const from = static_cast<const T*>(term.data) + b * term.step[0] + h * term.step[1];
#pragma unroll
      for (int j = 0; j < 8; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int64_t other = column(j, e % 2);
          if (own[e / 2] >= 0 && other >= 0) s[j][e] += widen(from[own[e / 2] * own_step + other * step]);
        }
    }
  }
}

// -------------------------------------------------------------------------------------- on the host

void run_forward(const AttentionProblem& problem, Tensor& out, Tensor& lse);
void run_backward(const AttentionProblem& problem, torus::detail::AttentionGradients& gradients);
/// The same in one pass; false, with nothing done, where it is not made for the problem.
bool run_one_pass_backward(const AttentionProblem& problem, torus::detail::AttentionGradients& gradients,
                           const Tensor& d_out);

/// What backward needs of each query row: lse in units of log 2 (infinity where there is no key, so that
/// weights are 0), delta = rowsum(dO * O) - dLSE, and the word of its dropout.
struct RowNumbers {
  float *lse, *delta;
  uint32_t* word;  // null: no dropout
};
/// They and their memory: matrix m (of all batches and heads) has `padded` rows, those beyond the queries as
/// without a key.
struct PreparedRows {
  Tensor lse, delta, word;
  RowNumbers numbers;
};
/// `position`: that of the dropout, if there is one.
PreparedRows prepare_rows(const AttentionProblem& problem, const torus::detail::AttentionGradients& gradients,
                          const Tensor& d_out, int64_t padded, Replayed<uint64_t> position = {});

/// A tensor for kernels. Its last stride is 1.
Operand operand(const Tensor& x);
/// Whether every row starts at a multiple of 16 bytes, and less than 2^31 bytes after the one before.
bool packs(const Tensor& x);
/// The width that kernels are made for: 64, 128 or 256.
int padded_width(const AttentionProblem& problem);
/// Shared memory that kernels of this width need at least, beside `static_memory`.
size_t shared_memory(int padded_width);
inline constexpr size_t static_memory = size_t{4} << 10;

/// Whether scores are more than products times a positive scale.
bool general_scores(const AttentionProblem& problem);

/// Arguments of scores, and what they point to. `d_bias`: gradients of terms, undefined where not wanted.
struct HostScores {
  HostScores(const AttentionProblem& problem, const std::vector<Tensor>& d_bias);
  ScoreArguments arguments;
  std::vector<Tensor> kept{};  // what pointers lead to
};

/// Gradients of biases that are wanted. That of a bias of all scores is written where these are made; those
/// that are sums are left to `bias_gradients`.
struct BiasGradients {
  BiasGradients(const AttentionProblem& problem, const torus::detail::AttentionGradients& gradients);
  std::vector<Tensor> of_scores;  // filled with 0: pairs that nobody visits are not written; undefined: none
  bool any_of_scores = false;
  /// Those that are sums.
  void finish(const AttentionProblem& problem) const;

 private:
  torus::detail::AttentionGradients sums_;
  bool any_sums_ = false;
};

template <class F>
void dispatch_16_bit(DType dtype, F&& f) {
  if (dtype == f16)
    f(__half{});
  else
    f(__nv_bfloat16{});
}
template <class F>
void dispatch_width(int padded_width, F&& f) {
  if (padded_width == 64)
    f(std::integral_constant<int, 64>{});
  else if (padded_width == 128)
    f(std::integral_constant<int, 128>{});
  else
    f(std::integral_constant<int, 256>{});
}

}  // namespace torus::gpu::mma
