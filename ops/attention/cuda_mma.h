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

/// Fills tiles with rows that pack, as `load_tile` does. What of the addresses is the thread's own is worked
/// out once.
template <class T, int width, int rows, int threads>
class RowCopies {
 protected:
  static constexpr int chunks = width / 8, at_once = threads / chunks;
  static_assert(rows % at_once == 0 && at_once >= 4);

  // `runs`: places are of the thread's first row, not of row 0.
  __device__ RowCopies(const T* head, int64_t stride, int columns, bool runs)
      : row_(static_cast<int>(threadIdx.x) / chunks), row_bytes_(static_cast<int32_t>(stride) * 2) {
    const int column = static_cast<int>(threadIdx.x) % chunks * 8;
    from_ = reinterpret_cast<const char*>(head + column) + (runs ? int64_t{row_} * row_bytes_ : 0);
    to_ = offset_in_tile<width>(row_, column);
    if (column >= columns) row_ = rows;
  }
  // A thread's rows lie multiples of 8 apart, so that its chunks have one place in them, or of 4: then two.
  __device__ uint32_t place(const char* tile, int n) const {
    return shared_address(tile) + (at_once == 4 ? to_ ^ n % 2 * 64 : to_) + n * at_once * width * 2;
  }

  const char* from_;
  uint32_t to_;
  int row_;  // the thread's first; beyond all where its columns are
  int32_t row_bytes_;
};

/// Rows that follow each other.
template <class T, int width, int rows, int threads>
class RunCopies : RowCopies<T, width, rows, threads> {
  using Base = RowCopies<T, width, rows, threads>;

 public:
  __device__ RunCopies(const T* head, int64_t stride, int columns) : Base(head, stride, columns, true) {}
  /// Starts to copy `count` rows from that of token `first` on; those beyond are zeros.
  __device__ void start(const char* tile, int32_t first, int32_t count) const {
    const char* from = this->from_ + int64_t{first} * this->row_bytes_;
#pragma unroll
    for (int n = 0; n < rows / Base::at_once; ++n, from += int64_t{this->row_bytes_} * Base::at_once)
      copy_16_async(this->place(tile, n), from, this->row_ + n * Base::at_once < count);
  }
};

/// Rows of tokens.
template <class T, int width, int rows, int threads>
class GatherCopies : RowCopies<T, width, rows, threads> {
  using Base = RowCopies<T, width, rows, threads>;

 public:
  using Tokens = int32_t[rows / Base::at_once];  // of the thread's rows

  __device__ GatherCopies(const T* head, int64_t stride, int columns) : Base(head, stride, columns, false) {}
  /// Row i is that of `token(i)`; zeros where that is negative.
  template <class Token>
  __device__ static void read(Tokens& tokens, const Token& token) {
#pragma unroll
    for (int n = 0; n < rows / Base::at_once; ++n)
      tokens[n] = token(static_cast<int>(threadIdx.x) / Base::chunks + n * Base::at_once);
  }
  __device__ void start(const char* tile, const Tokens& tokens) const {
#pragma unroll
    for (int n = 0; n < rows / Base::at_once; ++n)
      copy_16_async(this->place(tile, n), this->from_ + int64_t{tokens[n]} * this->row_bytes_,
                    tokens[n] >= 0 && this->row_ < rows);
  }
};

/// Writes accumulators a and b, which lie side by side, times a factor a row, to 16 rows and columns of a
/// tile from multiples of 16 on. With `matrices` by stmatrix, where there is one: fewer instructions, though
/// in forward of width 128 ptxas makes a slower loop beside it.
template <class T, int width, bool matrices = true>
__device__ inline void put(char* tile, int row, int column, const float (&a)[4], const float (&b)[4],
                           float factor, float factor_8) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  // Rows lane / 4 and 8 further of a, then of b.
  const uint32_t words[4] = {pack<T>(a[0] * factor, a[1] * factor), pack<T>(a[2] * factor_8, a[3] * factor_8),
                             pack<T>(b[0] * factor, b[1] * factor),
                             pack<T>(b[2] * factor_8, b[3] * factor_8)};
#if __CUDA_ARCH__ >= 900
  if constexpr (matrices) {
    // As offset_in_tile, with what is the lane's own apart.
    const uint32_t own = (row + lane % 16) * width * 2 + ((lane % 8) ^ (lane / 16)) * 16;
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                     shared_address(tile) + (own ^ column * 2)),
                 "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3])
                 : "memory");
    return;
  }
#endif
#pragma unroll
  for (int i = 0; i < 4; ++i)
    *reinterpret_cast<uint32_t*>(
        tile + offset_in_tile<width>(row + lane / 4 + i % 2 * 8, column + i / 2 * 8) + lane % 4 * 4) =
        words[i];
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
  for (int j = 0; j < width / 8; j += 2)
    put<T, width, false>(tile, first_row, 8 * j, c[j], c[j + 1], factor[0], factor[1]);
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
  const int left = min(max(count - lane % 4 * 2, 0), 64), whole = (left + 6) / 8;  // accumulators
  const uint32_t word = whole >= 8 ? ~0u : (1u << 4 * whole) - 1;
  return left % 8 == 1 ? word | 0x5u << left / 8 * 4 : word;
}

/// Which of a lane's pairs of 16 owners and up to 64 others are allowed: bit 4 j + e is element e of
/// accumulator j. `atom`: its words, see MapView::fragments; null: all pairs of the `count` others.
__device__ inline uint32_t allowed_pairs(const uint32_t* atom, int32_t count, int rows_of_16, int lane) {
  const uint32_t word = atom ? atom[32 * rows_of_16 + lane] : ~0u;
  return count < tile_size ? word & columns_below(count, lane) : word;
}

/// Where bit 4 j + e of a word is 0, element e of accumulator j becomes `otherwise`.
template <int columns>
__device__ inline void keep_allowed(float (&s)[columns][4], uint32_t allowed, float otherwise) {
#pragma unroll
  for (int j = 0; j < columns; ++j)
#pragma unroll
    for (int e = 0; e < 4; ++e)
      if (!(allowed >> (4 * j + e) & 1)) s[j][e] = otherwise;
}

/// A side of the map of one head.
struct MapSide {
  const SideView* side;
  const uint32_t* fragments;
};

/// What a tile of owners visits, 64 others at a time, in shared memory: told to a block of threads two blocks
/// ahead by its threads 0 to 63, each of which finds a token. Several heads may be gone through.
class TileBlocks {
 public:
  struct Block {
    int32_t id;      // of its atom, or `full`
    int32_t count;   // others
    int32_t member;  // which of the heads; -1: there are no more blocks
    __device__ bool there() const { return member >= 0; }
  };
  /// What takes time to read, of a block: its atom, and the thread's token.
  struct Found {
    int32_t id = torus::detail::GroupedSide::none, token = -1;
  };

  __device__ const Block& block(int i) const { return blocks_[i % 3]; }
  __device__ int32_t token(int i, int other) const { return tokens_[i % 3][other]; }  // -1 beyond the count

  /// By threads 0 to 63: tells blocks 0 and 1. `side_of(member)` is the map's side for each of the heads.
  template <class Sides>
  __device__ void start(const Sides& side_of, int64_t tile, int members) {
    State state{0, 0, 0, 0, 0, Visit::Kind::interval, -1};
    for (int i = 0; i < 2; ++i) tell(i, find(i, state, side_of, tile, members));
  }
  /// By threads 0 to 63, block after block: finds the next, i. All threads meet between two blocks.
  template <class Sides>
  __device__ Found find(int i, const Sides& side_of, int64_t tile, int members) {
    State state = states_[i % 2];
    return find(i, state, side_of, tile, members);
  }
  __device__ void tell(int i, const Found& found) {
    tokens_[i % 3][threadIdx.x] = found.token;
    if (threadIdx.x == 0) blocks_[i % 3].id = found.id;
  }
  /// Of 16 owners, see `allowed_pairs`; `fragments` are those of the block's map.
  __device__ uint32_t allowed(int i, const uint32_t* fragments, int rows_of_16, int lane) const {
    const Block& b = block(i);
    return allowed_pairs(b.id >= 0 ? fragments + int64_t{128} * b.id : nullptr, b.count, rows_of_16, lane);
  }

 private:
  struct State {
    int64_t next, end;           // visits of the member that are left
    int64_t first, left, atoms;  // what is left of one
    Visit::Kind kind;
    int member;
  };

  template <class Sides>
  __device__ Found find(int i, State& at, const Sides& side_of, int64_t tile, int members) {
    bool there = true;
    while (there && at.left == 0) {
      if (at.next < at.end) {
        const Visit& visit = side_of(at.member).side->visits[at.next++];
        at.first = visit.first, at.left = visit.count, at.atoms = visit.atoms, at.kind = visit.kind;
      } else if (at.member + 1 < members) {
        const int64_t* const visits = side_of(++at.member).side->first_visit + tile;
        at.next = visits[0], at.end = visits[1];
      } else {
        there = false;
      }
    }
    Found found;
    const auto count = static_cast<int32_t>(min(at.left, int64_t{tile_size}));
    if (there) {
      const SideView& side = *side_of(at.member).side;
      found.id =
          at.kind == Visit::Kind::interval ? torus::detail::GroupedSide::full : side.atom_ids[at.atoms++];
      if (const auto other = static_cast<int32_t>(threadIdx.x); other < count)
        found.token = at.kind == Visit::Kind::gather ? side.lists[at.first + other]
                                                     : static_cast<int32_t>(at.first) + other;
    }
    at.first += count, at.left -= count;
    if (threadIdx.x == 0) {
      blocks_[i % 3].count = count, blocks_[i % 3].member = there ? at.member : -1;
      states_[(i + 1) % 2] = at;
    }
    return found;
  }

  // Threads may be at block i - 2, and so read slots of i - 2 and i - 1, while block i is found and told.
  int32_t tokens_[3][tile_size];
  Block blocks_[3];
  State states_[2];
};

/// A place in a walk: which entry, and from which of its others on.
struct Place {
  int entry = 0;
  int32_t offset = 0;
};

/// What two tiles of owners visit, none of which gathers, in shared memory: one thread writes some entries
/// ahead. Threads go through them together, 64 others at a time, a round each, and meet between rounds. What
/// both tiles visit from one token on, they visit together.
class PairWalk {
 public:
  static constexpr int tiles = 2;
  /// Others that are visited together; more than 64 only where every pair is allowed.
  struct Entry {
    const uint32_t* bits[tiles];  // for each tile of owners; null: every pair is allowed
    bool visits[tiles];           // whether the tile visits these at all
    int32_t first, count;
  };

  /// By one thread, before round 0.
  __device__ void start(const MapSide& map, int64_t pair) {
    made_ = 0, more_ = true;
    Cursor cursors[tiles];
#pragma unroll
    for (int i = 0; i < tiles; ++i) {
      const int64_t t = pair * tiles + i;
      const Visit* const visits = map.side->visits;
      const bool there = t < map.side->tiles;
      cursors[i] = {there ? visits + map.side->first_visit[t] : visits,
                    there ? visits + map.side->first_visit[t + 1] : visits,
                    0,
                    0,
                    0,
                    Visit::Kind::interval};
    }
    save(cursors);
    fill(map);
    filled_[0] = made_;
  }
  /// By one thread, in each round: sees to it that in the next one there are entries for the place after
  /// `next` and the one after that, if there are that many.
  __device__ void keep_ahead(int round, Place next, const MapSide& map) {
    if (more_ && next.entry + 3 >= made_) fill(map);
    filled_[(round + 1) % 2] = made_;
  }

  __device__ bool has(int round, Place p) const { return p.entry < filled_[round % 2]; }
  __device__ const Entry& entry(Place p) const { return entries_[static_cast<unsigned>(p.entry) % capacity]; }
  __device__ Place after(Place p) const {
    return p.offset + block_size < entry(p).count ? Place{p.entry, p.offset + block_size}
                                                  : Place{p.entry + 1, 0};
  }
  /// How many others there are at `p`, up to 64.
  __device__ int32_t count(Place p) const { return min(entry(p).count - p.offset, block_size); }

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

  __device__ void save(const Cursor (&cursors)[tiles]) {
#pragma unroll
    for (int i = 0; i < tiles; ++i) saved_[i] = cursors[i];
  }

  __device__ static void take(int i, Cursor& cursor, int32_t count, const MapSide& map, Entry& to) {
    to.first = static_cast<int32_t>(cursor.first);
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

  // How much of `mine` comes before the other begins, if it can be cut.
  __device__ static int32_t cut(const Cursor& mine, const Cursor& other, bool has_other) {
    const int32_t count = mine.count();
    const int64_t before = other.first - mine.first;
    return has_other && mine.whole() && before > 0 && before < count ? static_cast<int32_t>(before) : count;
  }

  // Up to `at_once` further entries.
  __device__ void fill(const MapSide& map) {
    Cursor cursors[tiles];
#pragma unroll
    for (int i = 0; i < tiles; ++i) cursors[i] = saved_[i];
    for (const int until = made_ + at_once; made_ < until && more_;) {
      more_ = next(cursors, map, entries_[made_ % capacity]);
      if (more_) ++made_;
    }
    save(cursors);
  }

  static constexpr int capacity = 16, at_once = 4;
  Entry entries_[capacity];
  volatile int filled_[2];  // entries that there are in even and in odd rounds
  int made_;
  bool more_;  // perhaps
  Cursor saved_[tiles];
};

/// Where a warp of a block of threads is that goes through what a pair of tiles of owners visits, 64 others
/// at a time, and what one of the tiles sees of them. Blocks that the tile does not visit come up too, for
/// the other.
class QueuedBlocks {
 public:
  /// `walk` has begun. All threads step together, and meet between.
  __device__ QueuedBlocks(PairWalk& walk, const MapSide& map, int tile)
      : walk_(walk), map_(map), tile_(tile), there_(walk.has(0, at_)) {}
  __device__ bool there() const { return there_; }
  __device__ int32_t first() const { return walk_.entry(at_).first + at_.offset; }
  __device__ int32_t count() const { return walk_.count(at_); }
  __device__ bool visits() const { return walk_.entry(at_).visits[tile_]; }
  /// Whether some pairs of a tile that visits the block are not allowed, or not there.
  __device__ bool masked() const { return walk_.entry(at_).bits[tile_] || count() < block_size; }
  /// Of 16 rows of the tile, see `allowed_pairs`.
  __device__ uint32_t allowed(int rows_of_16, int lane) const {
    return allowed_pairs(walk_.entry(at_).bits[tile_], count(), rows_of_16, lane);
  }
  __device__ void step() {
    at_ = walk_.after(at_);
    there_ = walk_.has(round_, at_);
    if (threadIdx.x == 0) walk_.keep_ahead(round_, at_, map_);
    ++round_;
  }

 private:
  PairWalk& walk_;
  MapSide map_;
  int tile_, round_ = 0;
  Place at_;
  bool there_;
};

/// The same from a grouped side of one 64 a block; threads step each for itself.
class GroupedBlocks {
 public:
  __device__ GroupedBlocks(const GroupedView& map, int64_t group, int tiles, int tile)
      : words_(3 + tiles),
        entry_(map.entries + int64_t{words_} * map.first[group]),
        fragments_(map.fragments),
        left_(map.first[group + 1] - map.first[group]),
        tile_(tile) {
    read();
  }
  __device__ bool there() const { return left_ > 0; }
  __device__ int32_t first() const { return first_; }
  __device__ int32_t count() const { return blocks_ > 1 ? block_size : last_; }
  __device__ bool visits() const { return id_ != torus::detail::GroupedSide::none; }
  __device__ bool masked() const { return id_ >= 0 || count() < block_size; }
  __device__ uint32_t allowed(int rows_of_16, int lane) const {
    return allowed_pairs(id_ >= 0 ? fragments_ + int64_t{128} * id_ : nullptr, count(), rows_of_16, lane);
  }
  __device__ void step() {
    first_ += block_size;
    if (--blocks_ > 0) return;
    --left_, entry_ += words_;
    if (left_ > 0) read();
  }

 private:
  __device__ void read() {
    first_ = entry_[0], blocks_ = entry_[1], last_ = entry_[2], id_ = entry_[3 + tile_];
  }

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
