// Attention on CUDA devices in ordinary arithmetic: any dtype, width, mask and bias. A block of threads holds
// 64 owners (queries in forward and for dQ, keys for dK, dV and biases) against 64 others at a time, each
// thread a square of 4 x 4 pairs. Every sum has one owner and one order, so results have the same bits each
// time.
#include <algorithm>
#include <limits>
#include <vector>

#include "torus/ops/attention/cuda_map.h"

namespace torus::gpu {

namespace {

using torus::detail::AttentionDropout;
using torus::detail::AttentionGradients;
using torus::detail::AttentionProblem;
using torus::detail::Visit;
using Kind = AttentionBias::Kind;

constexpr int tile_size = torus::detail::tile_size;
constexpr int threads = 256, warps = threads / 32;
constexpr int depth = 32;             // of what is multiplied at once
constexpr int pitch = tile_size + 4;  // of rows of weights: other banks, and packs stay aligned
constexpr int slots = 2;              // pieces of 64 columns of results that a block of threads sums
constexpr int max_terms = 8;          // of bias

template <class C>
constexpr C infinity = std::numeric_limits<C>::infinity();

// Rows of one head, each contiguous.
template <class T>
struct Rows {
  T* first;
  int64_t step;
  bool quads;
  __device__ T* of(int64_t token) const { return first + token * step; }
};

// A tensor [B, H, N, width].
template <class T>
struct Heads {
  T* data = nullptr;
  int64_t step[3] = {};  // by batch, head and token
  bool quads = false;    // four neighbours may be read at once
  __device__ Rows<T> of(int64_t b, int64_t h) const {
    return {data + b * step[0] + h * step[1], step[2], quads};
  }
};

// One term added to the scores.
struct Term {
  Kind kind;
  const void* data;  // elements of q's type; alibi: one double a head
  int64_t step[4];   // dense: by b, h, q and k, 0 where broadcast; relative: step[1] by head
  int axes;
  int32_t length[max_grid_axes], size[max_grid_axes];  // of the grid and the table
  bool wrapped[max_grid_axes];
};

template <class T>
struct Arguments {
  using C = compute<T>;
  MapTable maps;
  Heads<const T> q, k, v, d_out;
  int64_t batch, heads, group;  // `group`: query heads that share a key head
  int64_t queries, keys, width, value_width;
  C scale, softcap;
  int terms;
  Term term[max_terms];
  bool drops;
  AttentionDropout dropout;
  Replayed<uint64_t> position;  // instead of that of `dropout`
  uint32_t threshold;
  C keep_scale;
  const C *lse, *delta;  // backward: [B, H, Nq]
};

template <class C>
struct Shared {
  // Pieces of operands that are multiplied, and a tile of weights: p[owner][other].
  alignas(16) C a[depth * tile_size], b[depth * tile_size], p[tile_size * pitch];
  C lse[tile_size], delta[tile_size];  // of the queries of the tile
  uint32_t row_word[tile_size];
  int32_t owner[tile_size], other[tile_size];  // tokens, -1 beyond them
  uint64_t words[tile_size];                   // bit i of word j: owner i and other j are an allowed pair
};
template <class C>
__device__ Shared<C>& shared_memory() {
  extern __shared__ __align__(16) unsigned char memory[];
  return *reinterpret_cast<Shared<C>*>(memory);
}

// The square of pairs of a thread: owners row() ... + 3 and others column() ... + 3.
__device__ int row() { return static_cast<int>(threadIdx.x) / 16 * 4; }
__device__ int column() { return static_cast<int>(threadIdx.x) % 16 * 4; }
template <class C>
using Square = C[4][4];

// ---------------------------------------------------------------------------------------------- arithmetic

// Never fused with what is added: backward must find the very score that forward took.
__device__ float product(float a, float b) { return __fmul_rn(a, b); }
__device__ double product(double a, double b) { return __dmul_rn(a, b); }
__device__ float sum(float a, float b) { return __fadd_rn(a, b); }
__device__ double sum(double a, double b) { return __dadd_rn(a, b); }
__device__ float exponential(float x) { return expf(x); }
__device__ double exponential(double x) { return ::exp(x); }
__device__ float logarithm(float x) { return logf(x); }
__device__ double logarithm(double x) { return ::log(x); }
__device__ float hyperbolic_tangent(float x) { return tanhf(x); }
__device__ double hyperbolic_tangent(double x) { return ::tanh(x); }

// Over the 16 lanes that hold the others of the same owners.
template <class C, class Op>
__device__ C reduce_row(C value, Op op) {
#pragma unroll
  for (int lane = 8; lane > 0; lane /= 2) value = op(value, __shfl_xor_sync(0xffffffffu, value, lane));
  return value;
}

template <class C>
__device__ void load_four(C (&to)[4], const C* from) {
  constexpr int width = Pack<C>::count;
#pragma unroll
  for (int i = 0; i < 4; i += width) {
    const Pack<C> pack = *reinterpret_cast<const Pack<C>*>(from + i);
#pragma unroll
    for (int j = 0; j < width; ++j) to[i + j] = pack.at[j];
  }
}

template <class C>
__device__ void store_four(C* to, const C (&from)[4]) {
  constexpr int width = Pack<C>::count;
#pragma unroll
  for (int i = 0; i < 4; i += width) {
    Pack<C> pack;
#pragma unroll
    for (int j = 0; j < width; ++j) pack.at[j] = from[i + j];
    *reinterpret_cast<Pack<C>*>(to + i) = pack;
  }
}

template <class T>
struct alignas(4 * sizeof(T) < 16 ? 4 * sizeof(T) : 16) Quad {
  T at[4];
};
// Four neighbours, of which there are `there`; 0 beyond them.
template <class T>
__device__ void load_quad(compute<T> (&to)[4], const T* from, int64_t there, bool quads) {
  if (quads && there >= 4) {
    const Quad<T> quad = *reinterpret_cast<const Quad<T>*>(from);
#pragma unroll
    for (int e = 0; e < 4; ++e) to[e] = widen(quad.at[e]);
  } else {
#pragma unroll
    for (int e = 0; e < 4; ++e) to[e] = e < there ? widen(from[e]) : compute<T>(0);
  }
}

// Where column i of row d is: fours of columns change places, so that those of other rows lie in other banks.
__device__ int swizzled(int d, int i) { return d * tile_size + (i ^ (d & ~3)); }

// Row d, column i: element `first + d` of the row of token i; 0 where there is none.
template <class T>
__device__ void load_transposed(compute<T>* to, const Rows<const T>& rows, const int32_t* tokens,
                                int64_t first, int64_t width) {
  const int d = static_cast<int>(threadIdx.x) % (depth / 4) * 4;
#pragma unroll
  for (int step = 0; step < depth / 4 * tile_size / threads; ++step) {
    const int i = static_cast<int>(threadIdx.x) / (depth / 4) + step * (threads / (depth / 4));
    const int32_t token = tokens[i];
    compute<T> x[4];
    load_quad(x, rows.of(token) + first + d, token < 0 ? 0 : width - first - d, rows.quads);
#pragma unroll
    for (int e = 0; e < 4; ++e) to[swizzled(d + e, i)] = x[e];
  }
}

// to[i][c] = element `first + c` of the row of token i of 32; 0 where there is none. Whether all that this
// thread read is finite.
template <class T>
__device__ bool load_rows(compute<T>* to, const Rows<const T>& rows, const int32_t* tokens, int64_t first,
                          int64_t width) {
  using C = compute<T>;
  bool finite = true;
#pragma unroll
  for (int step = 0; step < depth * (tile_size / 4) / threads; ++step) {
    const int i = row() / 4 + step * (threads / (tile_size / 4)), c = column();
    const int32_t token = tokens[i];
    C x[4];
    load_quad(x, rows.of(token) + first + c, token < 0 ? 0 : width - first - c, rows.quads);
#pragma unroll
    for (int e = 0; e < 4; ++e) finite = finite && x[e] - x[e] == C(0);
    store_four(to + i * tile_size + c, x);
  }
  return finite;
}

// s[i][j] += row of owner i . row of other j. Begins and ends where `a` and `b` of shared memory are free.
template <class T>
__device__ void multiply_rows(Square<compute<T>>& s, Shared<compute<T>>& sh, const Rows<const T>& owners,
                              const Rows<const T>& others, int64_t width) {
  using C = compute<T>;
  for (int64_t first = 0; first < width; first += depth) {
    load_transposed(sh.a, owners, sh.owner, first, width);
    load_transposed(sh.b, others, sh.other, first, width);
    __syncthreads();
    const int count = static_cast<int>(min(int64_t{depth}, width - first));
#pragma unroll 2
    for (int d = 0; d < count; d += 4) {
      const C *const own = sh.a + swizzled(d, row()), *const other = sh.b + swizzled(d, column());
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        C x[4], y[4];
        load_four(x, own + e * tile_size);
        load_four(y, other + e * tile_size);
#pragma unroll
        for (int i = 0; i < 4; ++i)
#pragma unroll
          for (int j = 0; j < 4; ++j) s[i][j] += x[i] * y[j];
      }
    }
    __syncthreads();
  }
}

// sum[i][j] += over others r: p[owner i][r] * element `first + column() + j` of the row of r. 0 times NaN is
// NaN, so where a row is not finite only allowed pairs are added. Makes what was written to `p` seen; ends
// where `p` and `b` are free.
template <class T>
__device__ void add_rows(Square<compute<T>>& sum, Shared<compute<T>>& sh, const Rows<const T>& others,
                         int64_t first, int64_t width) {
  using C = compute<T>;
  for (int r = 0; r < tile_size; r += depth) {
    const bool finite = load_rows(sh.b, others, sh.other + r, first, width);
    const C *const p = sh.p + row() * pitch + r, *const b = sh.b + column();
    if (__syncthreads_and(finite)) {
#pragma unroll 2
      for (int k = 0; k < depth; k += 4) {
        C x[4][4];
#pragma unroll
        for (int i = 0; i < 4; ++i) load_four(x[i], p + i * pitch + k);
#pragma unroll
        for (int n = 0; n < 4; ++n) {
          C y[4];
          load_four(y, b + (k + n) * tile_size);
#pragma unroll
          for (int i = 0; i < 4; ++i)
#pragma unroll
            for (int j = 0; j < 4; ++j) sum[i][j] += x[i][n] * y[j];
        }
      }
    } else {
#pragma unroll 1
      for (int k = 0; k < depth; ++k) {
        const auto allowed = static_cast<uint32_t>(sh.words[r + k] >> row());
#pragma unroll
        for (int i = 0; i < 4; ++i)
          if (allowed >> i & 1)
#pragma unroll
            for (int j = 0; j < 4; ++j) sum[i][j] += p[i * pitch + k] * b[k * tile_size + j];
      }
    }
    __syncthreads();
  }
}

// To p[owner][other]; nothing waits.
template <class C>
__device__ void store_square(Shared<C>& sh, const Square<C>& from) {
#pragma unroll
  for (int i = 0; i < 4; ++i) store_four(sh.p + (row() + i) * pitch + column(), from[i]);
}

// ---------------------------------------------------------------------------------------- walks over a map

// The owners of a tile; bits of those that there are. By all threads; nothing waits.
template <class C>
__device__ uint64_t set_owners(Shared<C>& sh, const SideView& side, int64_t tile) {
  const bool linear = side.order_tokens == nullptr;
  const int64_t first = linear ? tile * tile_size : side.order_first[tile];
  const int64_t last = linear ? min(first + tile_size, side.owners) : side.order_first[tile + 1];
  if (const int i = static_cast<int>(threadIdx.x); i < tile_size) {
    const bool there = first + i < last;
    sh.owner[i] = there ? static_cast<int32_t>(linear ? first + i : side.order_tokens[first + i]) : -1;
  }
  return last - first >= tile_size ? ~uint64_t{0} : (uint64_t{1} << (last - first)) - 1;
}

// Calls f() for every `step`-th block of up to 64 others that a tile visits, from `begin` on, once their
// tokens and bits are in shared memory; before, describe(i, token) by the thread that sets other i.
template <class C, class Describe, class F>
__device__ void for_each_block(Shared<C>& sh, const MapView& map, const SideView& side, int64_t tile,
                               uint64_t owners, int64_t begin, int64_t step, const Describe& describe,
                               const F& f) {
  int64_t number = 0;
  for (int64_t v = side.first_visit[tile]; v < side.first_visit[tile + 1]; ++v) {
    const Visit visit = side.visits[v];
    for (int64_t at = 0; at < visit.count; at += tile_size, ++number) {
      if (number % step != begin) continue;
      if (const int j = static_cast<int>(threadIdx.x); j < tile_size) {
        const bool there = at + j < visit.count;
        const int64_t place = visit.first + at + j;
        int32_t token = -1;
        uint64_t word = there ? owners : 0;
        if (there)
          token = visit.kind == Visit::Kind::gather ? side.lists[place] : static_cast<int32_t>(place);
        if (there && visit.kind != Visit::Kind::interval) {
          const int32_t id = side.atom_ids[visit.atoms + at / tile_size];
          if (id >= 0) word &= map.atoms[int64_t{id} * tile_size + j];
        }
        sh.other[j] = token;
        sh.words[j] = word;
        describe(j, token);
      }
      __syncthreads();
      f();
      __syncthreads();
    }
  }
}

// What pairs need of query i of the tile.
template <class T>
__device__ void describe_query(Shared<compute<T>>& sh, const Arguments<T>& a, int i, int64_t token,
                               int64_t bh) {
  using C = compute<T>;
  const int64_t at = bh * a.queries + token;
  if (a.lse) {
    const C lse = token < 0 ? -infinity<C> : a.lse[at];
    sh.lse[i] = lse == -infinity<C> ? infinity<C> : lse;  // a row without keys has weights of 0
    sh.delta[i] = token < 0 ? C(0) : a.delta[at];
  }
  if (a.drops && token >= 0)
    sh.row_word[i] =
        AttentionDropout{a.dropout.probability, a.dropout.seed, a.position.get()}.row_word(bh, token);
}

// ------------------------------------------------------------------------------------------------- scores

// Along one axis, what offset k - q adds to the place in the table before it is multiplied.
__device__ int32_t place_on_axis(const Term& term, int axis, int32_t offset) {
  const int32_t length = term.length[axis], half = term.size[axis] / 2;
  if (term.wrapped[axis]) {
    if (offset < 0) offset += length;
    if (offset > (length - 1) / 2) offset -= length;
  }
  return min(max(offset, -half), half) + half;
}

// The place of a pair in a table of relative biases, without its head.
__device__ int64_t table_place(const Term& term, uint32_t query, uint32_t key) {
  int64_t place = 0, stride = 1;
  for (int axis = term.axes - 1; axis >= 0; --axis) {
    const auto length = static_cast<uint32_t>(term.length[axis]);
    const auto offset = static_cast<int32_t>(key % length) - static_cast<int32_t>(query % length);
    place += place_on_axis(term, axis, offset) * stride;
    stride *= term.size[axis], query /= length, key /= length;
  }
  return place;
}

template <bool queries_own, class T>
__device__ void add_bias(Square<compute<T>>& s, const Shared<compute<T>>& sh, const Arguments<T>& a,
                         int64_t b, int64_t h) {
  using C = compute<T>;
  // The tokens of the square; one that is not there is like token 0.
  int32_t own[4], other[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) own[i] = max(sh.owner[row() + i], 0), other[i] = max(sh.other[column() + i], 0);
  const auto for_each_pair = [&](const auto& f) {
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j)
        s[i][j] = sum(s[i][j], queries_own ? f(own[i], other[j], i, j) : f(other[j], own[i], i, j));
  };
#pragma unroll 1
  for (int n = 0; n < a.terms; ++n) {
    const Term& term = a.term[n];
    if (term.kind == Kind::alibi) {
      const double slope = static_cast<const double*>(term.data)[h];
      const int64_t shift = a.keys - a.queries;
      for_each_pair([&](int64_t q, int64_t k, int, int) {
        const int64_t distance = k - q - shift;
        return static_cast<C>(-slope * static_cast<double>(distance < 0 ? -distance : distance));
      });
    } else if (term.kind == Kind::dense) {
      const T* const from = static_cast<const T*>(term.data) + b * term.step[0] + h * term.step[1];
      for_each_pair(
          [&](int64_t q, int64_t k, int, int) { return widen(from[q * term.step[2] + k * term.step[3]]); });
    } else {
      const T* const from = static_cast<const T*>(term.data) + h * term.step[1];
      uint32_t rest_own[4], rest_other[4];
      int32_t place[4][4] = {}, stride = 1;
#pragma unroll
      for (int i = 0; i < 4; ++i)
        rest_own[i] = static_cast<uint32_t>(own[i]), rest_other[i] = static_cast<uint32_t>(other[i]);
#pragma unroll 1
      for (int axis = term.axes - 1; axis >= 0; --axis) {
        const auto length = static_cast<uint32_t>(term.length[axis]);
        int32_t at_own[4], at_other[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          at_own[i] = static_cast<int32_t>(rest_own[i] % length), rest_own[i] /= length;
          at_other[i] = static_cast<int32_t>(rest_other[i] % length), rest_other[i] /= length;
        }
#pragma unroll
        for (int i = 0; i < 4; ++i)
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            const int32_t offset = queries_own ? at_other[j] - at_own[i] : at_own[i] - at_other[j];
            place[i][j] += place_on_axis(term, axis, offset) * stride;
          }
        stride *= term.size[axis];
      }
      for_each_pair([&](int64_t, int64_t, int i, int j) { return widen(from[place[i][j]]); });
    }
  }
}

// Products q.k become scores, -inf where a pair is not allowed. `slope`: the derivative of scores by q.k.
// Returns the allowed pairs of the square: bit 4 i + j.
template <bool queries_own, class T>
__device__ uint32_t finish_scores(Square<compute<T>>& s, Square<compute<T>>& slope,
                                  const Shared<compute<T>>& sh, const Arguments<T>& a, int64_t b, int64_t h) {
  using C = compute<T>;
#pragma unroll
  for (int i = 0; i < 4; ++i)
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      s[i][j] = product(s[i][j], a.scale);
      slope[i][j] = a.scale;
    }
  if (a.softcap > 0) {
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const C t = hyperbolic_tangent(s[i][j] / a.softcap);
        s[i][j] = product(a.softcap, t);
        slope[i][j] = (1 - t * t) * a.scale;
      }
  }
  if (a.terms > 0) add_bias<queries_own>(s, sh, a, b, h);
  uint32_t allowed = 0;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const auto word = static_cast<uint32_t>(sh.words[column() + j] >> row());
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      allowed |= (word >> i & 1) << (4 * i + j);
      if (!(word >> i & 1)) s[i][j] = -infinity<C>;
    }
  }
  return allowed;
}

// What the weight of a pair is multiplied by: 1 / (1 - p), or 0 if it is dropped.
template <bool queries_own, class T>
__device__ compute<T> dropout_factor(const Shared<compute<T>>& sh, const Arguments<T>& a, int i, int j) {
  const int own = row() + i, other = column() + j;
  const uint32_t word = sh.row_word[queries_own ? own : other];
  const auto key = static_cast<uint32_t>(queries_own ? sh.other[other] : sh.owner[own]);
  return AttentionDropout::mix(word, key) >= a.threshold ? a.keep_scale : compute<T>(0);
}

// The rows of one (b, h) that own and visit.
template <class T>
struct Operands {
  Rows<const T> q, k, v, d_out;
  __device__ Operands(const Arguments<T>& a, int64_t b, int64_t h)
      : q(a.q.of(b, h)), k(a.k.of(b, h / a.group)), v(a.v.of(b, h / a.group)), d_out(a.d_out.of(b, h)) {}
};

// Backward of a tile: the weights that multiplied values, `p` = P Z, and the gradients of the scores after
// the softcap, `ds` = P (Z dP - delta). Without `wants_scores` ds is not made.
template <bool queries_own, class T>
__device__ uint32_t score_gradients(Square<compute<T>>& p, Square<compute<T>>& ds, Square<compute<T>>& slope,
                                    Shared<compute<T>>& sh, const Arguments<T>& a, const Operands<T>& rows,
                                    int64_t b, int64_t h, bool wants_scores) {
  using C = compute<T>;
#pragma unroll
  for (int i = 0; i < 4; ++i)
#pragma unroll
    for (int j = 0; j < 4; ++j) p[i][j] = ds[i][j] = 0;
  if (wants_scores)
    multiply_rows(ds, sh, queries_own ? rows.d_out : rows.v, queries_own ? rows.v : rows.d_out,
                  a.value_width);
  multiply_rows(p, sh, queries_own ? rows.q : rows.k, queries_own ? rows.k : rows.q, a.width);
  const uint32_t allowed = finish_scores<queries_own>(p, slope, sh, a, b, h);
#pragma unroll
  for (int i = 0; i < 4; ++i)
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int query = queries_own ? row() + i : column() + j;
      // Selected last: lse is NaN where a key that the query does see is.
      const bool counts = allowed >> (4 * i + j) & 1;
      const C weight = counts ? exponential(p[i][j] - sh.lse[query]) : C(0);
      const C keep = a.drops ? dropout_factor<queries_own>(sh, a, i, j) : C(1);
      ds[i][j] = counts ? weight * (ds[i][j] * keep - sh.delta[query]) : C(0);
      p[i][j] = weight * keep;
    }
  return allowed;
}

// Writes columns `first + column()` on of the rows of the tile's owners.
template <class T>
__device__ void write_rows(const Rows<T>& rows, const Shared<compute<T>>& sh,
                           const Square<compute<T>>& values, int64_t first, int64_t width) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int32_t token = sh.owner[row() + i];
    if (token < 0) continue;
#pragma unroll
    for (int j = 0; j < 4; ++j)
      if (first + column() + j < width) rows.of(token)[first + column() + j] = narrow<T>(values[i][j]);
  }
}

// ------------------------------------------------------------------------------------------------- kernels

template <class T>
constexpr int blocks_of_threads = std::is_same_v<T, double> ? 1 : 2;  // that share a multiprocessor

// One tile of queries, and up to `slots` pieces of 64 columns of v.
template <class T>
__global__ void __launch_bounds__(threads, blocks_of_threads<T>)
    forward_kernel(const __grid_constant__ Arguments<T> a, Heads<T> out, compute<T>* lse, int64_t chunks) {
  using C = compute<T>;
  Shared<C>& sh = shared_memory<C>();
  // Under a causal mask the last tiles take longest: they go first.
  const int64_t chunk = blockIdx.x % chunks, tiles = a.maps.query_tiles;
  const int64_t tile = tiles - 1 - blockIdx.x / chunks % tiles, bh = blockIdx.x / chunks / tiles;
  const int64_t b = bh / a.heads, h = bh % a.heads;
  const MapView& map = a.maps.of(b, h);
  if (tile >= map.query.tiles) return;
  const Operands<T> rows(a, b, h);
  const uint64_t owners = set_owners(sh, map.query, tile);
  if (threadIdx.x < tile_size) describe_query(sh, a, threadIdx.x, sh.owner[threadIdx.x], bh);

  C sums[slots][4][4] = {}, top[4], total[4] = {};
#pragma unroll
  for (int i = 0; i < 4; ++i) top[i] = -infinity<C>;
  for_each_block(
      sh, map, map.query, tile, owners, 0, 1, [](int, int32_t) {},
      [&] {
        C s[4][4] = {}, slope[4][4];
        multiply_rows(s, sh, rows.q, rows.k, a.width);
        finish_scores<true>(s, slope, sh, a, b, h);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          C best = top[i];
#pragma unroll
          for (int j = 0; j < 4; ++j) best = Larger{}(s[i][j], best);
          best = reduce_row(best, Larger{});
          const C base = best == -infinity<C> ? C(0) : best;  // no key yet
          C weights = 0;
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            s[i][j] = exponential(s[i][j] - base);
            weights += s[i][j];
            if (a.drops) s[i][j] *= dropout_factor<true>(sh, a, i, j);
          }
          const C shrink = exponential(top[i] - base);
          total[i] = total[i] * shrink + reduce_row(weights, Plus{});
          top[i] = best;
#pragma unroll
          for (int n = 0; n < slots; ++n)
#pragma unroll
            for (int j = 0; j < 4; ++j) sums[n][i][j] *= shrink;
        }
        store_square(sh, s);
#pragma unroll
        for (int n = 0; n < slots; ++n) {
          const int64_t first = (chunk * slots + n) * tile_size;
          if (first < a.value_width) add_rows(sums[n], sh, rows.v, first, a.value_width);
        }
      });
  __syncthreads();  // a tile that visits nothing has not waited for its owners

#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const bool empty = top[i] == -infinity<C>;
#pragma unroll
    for (int n = 0; n < slots; ++n)
#pragma unroll
      for (int j = 0; j < 4; ++j) sums[n][i][j] = empty ? C(0) : sums[n][i][j] / total[i];
    const int32_t token = sh.owner[row() + i];
    if (chunk == 0 && column() == 0 && token >= 0)
      lse[bh * a.queries + token] = empty ? top[i] : top[i] + logarithm(total[i]);
  }
#pragma unroll
  for (int n = 0; n < slots; ++n)
    write_rows(out.of(b, h), sh, sums[n], (chunk * slots + n) * tile_size, a.value_width);
}

// delta = rowsum(dO * O) - dLSE, and 0 for a row without keys: a warp a row.
template <class T>
__global__ void __launch_bounds__(threads)
    delta_kernel(const __grid_constant__ Arguments<T> a, Heads<const T> out, const compute<T>* d_lse,
                 compute<T>* delta) {
  using C = compute<T>;
  const int64_t rows = a.batch * a.heads * a.queries;
  for (int64_t i = int64_t{blockIdx.x} * warps + threadIdx.x / 32; i < rows;
       i += int64_t{gridDim.x} * warps) {
    const int64_t bh = i / a.queries, token = i % a.queries;
    const T* const o = out.of(bh / a.heads, bh % a.heads).of(token);
    const T* const d_o = a.d_out.of(bh / a.heads, bh % a.heads).of(token);
    C total = 0;
    for (int64_t d = threadIdx.x % 32; d < a.value_width; d += 32) total += widen(o[d]) * widen(d_o[d]);
    total = warp_sum(total);
    if (d_lse) total -= d_lse[i];
    if (threadIdx.x % 32 == 0) delta[i] = a.lse[i] == -infinity<C> ? C(0) : total;
  }
}

// One tile of owners, and up to `slots` pieces of 64 columns: of dV, then of dK, where keys own; else of dQ.
template <class T, bool queries_own>
__global__ void __launch_bounds__(threads, blocks_of_threads<T>)
    gradient_kernel(const __grid_constant__ Arguments<T> a, Heads<T> d_values, Heads<T> d_owners,
                    int64_t value_slots, int64_t all_slots) {
  using C = compute<T>;
  Shared<C>& sh = shared_memory<C>();
  const int64_t chunks = (all_slots + slots - 1) / slots, chunk = blockIdx.x % chunks;
  const int64_t tiles = queries_own ? a.maps.query_tiles : a.maps.key_tiles;
  const int64_t tile = blockIdx.x / chunks % tiles, matrix = blockIdx.x / chunks / tiles;
  const int64_t members = queries_own ? 1 : a.group, matrices = a.heads / members;  // in a batch element
  const int64_t b = matrix / matrices, first_head = matrix % matrices * members;
  // Heads that share keys but not maps own tiles in one order: only their visits differ.
  const MapView& any_map = a.maps.of(b, first_head);
  const SideView& any_side = queries_own ? any_map.query : any_map.key;
  if (tile >= any_side.tiles) return;
  const uint64_t owners = set_owners(sh, any_side, tile);
  if (queries_own && threadIdx.x < tile_size)
    describe_query(sh, a, threadIdx.x, sh.owner[threadIdx.x], b * a.heads + first_head);

  const int64_t last_slot = min(chunk * slots + slots, all_slots) - 1;
  C sums[slots][4][4] = {};
  for (int64_t h = first_head; h < first_head + members; ++h) {
    const MapView& map = a.maps.of(b, h);
    const Operands<T> rows(a, b, h);
    for_each_block(
        sh, map, queries_own ? map.query : map.key, tile, owners, 0, 1,
        [&](int i, int32_t token) {
          if (!queries_own) describe_query(sh, a, i, token, b * a.heads + h);
        },
        [&] {
          C p[4][4], ds[4][4], slope[4][4];
          const uint32_t allowed =
              score_gradients<queries_own>(p, ds, slope, sh, a, rows, b, h, last_slot >= value_slots);
#pragma unroll
          for (int i = 0; i < 4; ++i)
#pragma unroll
            for (int j = 0; j < 4; ++j) ds[i][j] = allowed >> (4 * i + j) & 1 ? ds[i][j] * slope[i][j] : C(0);
#pragma unroll
          for (int n = 0; n < slots; ++n) {
            const int64_t slot = chunk * slots + n;
            if (slot < value_slots) {
              store_square(sh, p);
              add_rows(sums[n], sh, rows.d_out, slot * tile_size, a.value_width);
            } else if (slot < all_slots) {
              store_square(sh, ds);
              add_rows(sums[n], sh, queries_own ? rows.k : rows.q, (slot - value_slots) * tile_size, a.width);
            }
          }
        });
  }
  __syncthreads();
#pragma unroll
  for (int n = 0; n < slots; ++n) {
    const int64_t slot = chunk * slots + n;
    if (slot < value_slots)
      write_rows(d_values.of(b, first_head / members), sh, sums[n], slot * tile_size, a.value_width);
    else if (slot < all_slots)
      write_rows(d_owners.of(b, first_head / members), sh, sums[n], (slot - value_slots) * tile_size,
                 a.width);
  }
}

// The gradient of a dense bias [b, h, q, Nk], contiguous, each of the first three broadcast where it is 1.
template <class T>
struct DenseGradient {
  int64_t batch, heads, queries;
  T* to;             // where one pair makes an element, or one tile all of a key
  compute<T>* sums;  // else: set to 0 before; may be `to`
  int64_t parts;     // that share a tile of keys, each with every parts-th block of queries
};

// One tile of keys of one matrix of the bias: over all that is broadcast.
template <class T>
__global__ void __launch_bounds__(threads, blocks_of_threads<T>)
    dense_bias_kernel(const __grid_constant__ Arguments<T> a, const __grid_constant__ DenseGradient<T> g) {
  using C = compute<T>;
  Shared<C>& sh = shared_memory<C>();
  const int64_t part = blockIdx.x % g.parts, tiles = a.maps.key_tiles;
  const int64_t tile = blockIdx.x / g.parts % tiles, matrix = blockIdx.x / g.parts / tiles;
  const int64_t first_b = g.batch == 1 ? 0 : matrix / g.heads, first_h = g.heads == 1 ? 0 : matrix % g.heads;
  const int64_t over_b = g.batch == 1 ? a.batch : 1, over_h = g.heads == 1 ? a.heads : 1;
  const MapView& any_map = a.maps.of(first_b, first_h);
  if (tile >= any_map.key.tiles) return;
  const uint64_t owners = set_owners(sh, any_map.key, tile);
  const int64_t origin = matrix * g.queries * a.keys;
  C of_keys[4] = {};  // summed over queries
  for (int64_t b = first_b; b < first_b + over_b; ++b)
    for (int64_t h = first_h; h < first_h + over_h; ++h) {
      const MapView& map = a.maps.of(b, h);
      const Operands<T> rows(a, b, h);
      for_each_block(
          sh, map, map.key, tile, owners, part, g.parts,
          [&](int i, int32_t token) { describe_query(sh, a, i, token, b * a.heads + h); },
          [&] {
            C p[4][4], ds[4][4], slope[4][4];
            const uint32_t allowed = score_gradients<false>(p, ds, slope, sh, a, rows, b, h, true);
#pragma unroll
            for (int i = 0; i < 4; ++i)
#pragma unroll
              for (int j = 0; j < 4; ++j) {
                of_keys[i] += ds[i][j];
                if (g.queries == 1 || !(allowed >> (4 * i + j) & 1)) continue;
                const int64_t at = origin + sh.other[column() + j] * a.keys + sh.owner[row() + i];
                if (g.sums)
                  g.sums[at] += ds[i][j];
                else
                  g.to[at] = narrow<T>(ds[i][j]);
              }
          });
    }
  if (g.queries > 1) return;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const C total = reduce_row(of_keys[i], Plus{});
    const int32_t token = sh.owner[row() + i];
    if (column() == 0 && token >= 0) g.to[origin + token] = narrow<T>(total);
  }
}

// Sums for the gradient of a table of relative biases: [table heads, partials, warps, entries], set to 0
// before. Of the tiles of keys that use a table, a block takes every partials-th.
template <class T>
__global__ void __launch_bounds__(threads, blocks_of_threads<T>)
    table_bias_kernel(const __grid_constant__ Arguments<T> a, int number, int64_t table_heads,
                      int64_t entries, int64_t partials, compute<T>* sums) {
  using C = compute<T>;
  Shared<C>& sh = shared_memory<C>();
  const Term& term = a.term[number];
  const int64_t partial = blockIdx.x % partials, table = blockIdx.x / partials, tiles = a.maps.key_tiles;
  const int64_t heads = table_heads == 1 ? a.heads : 1;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  C* const mine = sums + (int64_t{blockIdx.x} * warps + warp) * entries;
  for (int64_t item = partial; item < tiles * a.batch * heads; item += partials) {
    const int64_t tile = item % tiles, b = item / tiles % a.batch;
    const int64_t h = table_heads == 1 ? item / tiles / a.batch : table;
    const MapView& map = a.maps.of(b, h);
    if (tile >= map.key.tiles) continue;
    const uint64_t owners = set_owners(sh, map.key, tile);
    const Operands<T> rows(a, b, h);
    for_each_block(
        sh, map, map.key, tile, owners, 0, 1,
        [&](int i, int32_t token) { describe_query(sh, a, i, token, b * a.heads + h); },
        [&] {
          C p[4][4], ds[4][4], slope[4][4];
          score_gradients<false>(p, ds, slope, sh, a, rows, b, h, true);
          store_square(sh, ds);
          __syncthreads();
          // A query at a time: its keys lie at different offsets, so they meet only at the edges of the
          // table.
          for (int j = warp; j < tile_size; j += warps)
            for (int half = 0; half < tile_size; half += 32) {
              const bool counts = sh.words[j] >> (half + lane) & 1;
              const uint32_t active = __ballot_sync(0xffffffffu, counts);
              if (counts) {
                const auto place = static_cast<unsigned long long>(table_place(
                    term, static_cast<uint32_t>(sh.other[j]), static_cast<uint32_t>(sh.owner[half + lane])));
                uint32_t equal = __match_any_sync(active, place);
                if (__ffs(static_cast<int>(equal)) - 1 == lane) {
                  C total = 0;
                  for (; equal; equal &= equal - 1)
                    total += sh.p[(half + __ffs(static_cast<int>(equal)) - 1) * pitch + j];
                  mine[place] += total;
                }
              }
              __syncwarp();
            }
        });
  }
}

template <class T>
__global__ void __launch_bounds__(threads)
    add_partials(T* to, const compute<T>* sums, int64_t tables, int64_t entries, int64_t partials) {
  const int64_t stride = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < tables * entries; i += stride) {
    compute<T> total = 0;
    for (int64_t n = 0; n < partials; ++n)
      total += sums[(i / entries * partials + n) * entries + i % entries];
    to[i] = narrow<T>(total);
  }
}

// ------------------------------------------------------------------------------------------------ launching

unsigned grid(int64_t blocks) {
  check(blocks <= std::numeric_limits<int32_t>::max(), Error::Kind::Shape,
        "[attention] at most 2^31 - 1 tiles can be launched at once, got ", blocks);
  return static_cast<unsigned>(blocks);
}

template <class C, class... Parameters, class... Values>
void launch(void (*kernel)(Parameters...), int64_t blocks, cudaStream_t stream, const Values&... values) {
  if (blocks == 0) return;
  allow_shared_memory(reinterpret_cast<const void*>(kernel), sizeof(Shared<C>));
  kernel<<<grid(blocks), threads, sizeof(Shared<C>), stream>>>(values...);
  check_launch("attention");
}

int64_t pieces(int64_t width) { return (width + tile_size - 1) / tile_size; }

template <class T>
Heads<T> heads_of(T* data, const Tensor& x) {
  Heads<T> heads{data, {}, true};
  constexpr auto alignment = static_cast<int64_t>(alignof(Quad<std::remove_const_t<T>>));
  for (int axis = 0; axis < 3; ++axis) {
    heads.step[axis] = x.size(axis) > 1 ? x.strides()[axis] : 0;
    heads.quads = heads.quads && heads.step[axis] * static_cast<int64_t>(sizeof(T)) % alignment == 0;
  }
  heads.quads = heads.quads && reinterpret_cast<uintptr_t>(data) % alignment == 0;
  return heads;
}
template <class T>
Heads<const T> read_heads(const Tensor& x) {
  return heads_of(read<T>(x), x);
}
template <class T>
Heads<T> write_heads(Tensor& x) {
  return heads_of(write<T>(x), x);
}

// What kernels are told of a problem. `kept` holds what must stay until they are launched.
template <class T>
Arguments<T> arguments(const AttentionProblem& p, std::vector<Tensor>& kept) {
  using C = compute<T>;
  Arguments<T> a = {};
  a.maps = map_table(p);
  a.q = read_heads<T>(p.q), a.k = read_heads<T>(p.k), a.v = read_heads<T>(p.v);
  a.batch = p.batch(), a.heads = p.heads(), a.group = p.heads() / p.kv_heads();
  a.queries = p.queries(), a.keys = p.keys(), a.width = p.width(), a.value_width = p.value_width();
  a.scale = static_cast<C>(p.scale), a.softcap = static_cast<C>(p.softcap);
  for (const AttentionBias& bias : p.bias) {
    Term& term = a.term[a.terms++];
    Tensor value = bias.value().value();
    term.kind = bias.kind();
    if (term.kind == Kind::alibi) {
      value = value.to(f64).contiguous();
      term.data = value.data<double>();
    } else if (term.kind == Kind::dense) {
      for (int axis = 0; axis < 4; ++axis)
        term.step[axis] = value.size(axis) == 1 ? 0 : value.strides()[axis];
      term.data = read<T>(value);
    } else {
      value = value.contiguous();
      term.step[1] = value.size(0) == 1 ? 0 : value.strides()[0];
      term.axes = static_cast<int>(bias.grid().size());
      for (int axis = 0; axis < term.axes; ++axis) {
        term.length[axis] = static_cast<int32_t>(bias.grid()[static_cast<size_t>(axis)]);
        term.size[axis] = static_cast<int32_t>(value.size(axis + 1));
        term.wrapped[axis] = bias.wrapped()[static_cast<size_t>(axis)];
      }
      term.data = read<T>(value);
    }
    kept.push_back(value);
  }
  a.drops = p.dropout.active();
  if (a.drops) {
    a.dropout = p.dropout;
    a.position = replayed_position(p.dropout.position);
    a.threshold = p.dropout.threshold();
    a.keep_scale = static_cast<C>(p.dropout.keep_scale());
  }
  return a;
}

std::string refusal(const AttentionProblem& p) {
  if (p.q.device().kind != DeviceKind::cuda) return "the tensors are not on a CUDA device";
  if (p.bias.size() > max_terms) return "more than " + std::to_string(max_terms) + " bias terms";
  for (const AttentionBias& bias : p.bias)
    if (bias.kind() == Kind::relative && bias.value().numel() > std::numeric_limits<int32_t>::max())
      return "a table of relative biases of 2^31 or more entries";
  return "";
}

void forward(const AttentionProblem& problem, Tensor& out, Tensor& lse) {
  if (lse.numel() == 0) return;
  const cudaStream_t stream = stream_of(out);
  gpu::dispatch_floating(out.dtype(), "attention", [&](auto zero) {
    using T = decltype(zero);
    using C = compute<T>;
    std::vector<Tensor> kept;
    const Arguments<T> a = arguments<T>(problem, kept);
    const int64_t chunks = std::max<int64_t>(1, (pieces(a.value_width) + slots - 1) / slots);
    launch<C>(forward_kernel<T>, a.maps.query_tiles * a.batch * a.heads * chunks, stream, a,
              write_heads<T>(out), write<C>(lse), chunks);
  });
}

template <class T>
void dense_gradient(const Arguments<T>& a, Tensor& gradient, cudaStream_t stream) {
  using C = compute<T>;
  DenseGradient<T> g{gradient.size(0), gradient.size(1), gradient.size(2), nullptr, nullptr, 1};
  const bool shared = (g.batch == 1 && a.batch > 1) || (g.heads == 1 && a.heads > 1);
  // Sums live in f32: in the gradient itself, or beside it for 16 bits.
  Tensor sums = !shared || g.queries == 1 ? Tensor()
                : is_16_bit<T>            ? Tensor::zeros(gradient.shape(), f32, gradient.device())
                                          : gradient;
  gradient.fill_(0);
  g.to = write<T>(gradient);
  g.sums = sums.defined() ? write<C>(sums) : nullptr;
  const int64_t blocks = a.maps.key_tiles * g.batch * g.heads;
  // With one map a query is in the same block of others for all heads, so parts never meet in an element.
  const bool one_map = a.maps.batch_step == 0 && a.maps.head_step == 0;
  if (g.queries > 1 && (one_map || !shared))
    g.parts = std::clamp<int64_t>(1024 / std::max<int64_t>(blocks, 1), 1, pieces(a.queries));
  launch<C>(dense_bias_kernel<T>, blocks * g.parts, stream, a, g);
  if (is_16_bit<T> && sums.defined()) gradient.copy_(sums);
}

template <class T>
void table_gradient(const Arguments<T>& a, int number, Tensor& gradient, cudaStream_t stream) {
  using C = compute<T>;
  const int64_t tables = gradient.size(0), entries = gradient.numel() / std::max<int64_t>(tables, 1);
  if (gradient.numel() == 0) return;
  // As many blocks as keep the device busy without many bytes; it must not depend on the device.
  constexpr int64_t most_bytes = int64_t{32} << 20;
  const int64_t items = a.maps.key_tiles * a.batch * (tables == 1 ? a.heads : 1);
  const int64_t fits = most_bytes / (gradient.numel() * warps * static_cast<int64_t>(sizeof(C)));
  const int64_t partials = std::clamp<int64_t>(std::min(fits, 512 / tables), 1, std::max<int64_t>(items, 1));
  Tensor sums = Tensor::zeros({tables * partials * warps, entries}, dtype_of<C>, gradient.device());
  launch<C>(table_bias_kernel<T>, tables * partials, stream, a, number, tables, entries, partials,
            write<C>(sums));
  add_partials<T><<<blocks_for(gradient.numel(), threads), threads, 0, stream>>>(
      write<T>(gradient), read<C>(sums), tables, entries, partials * warps);
  check_launch("attention");
}

// What backward's kernels are told: also delta, made here.
template <class T>
Arguments<T> backward_arguments(const AttentionProblem& problem, const AttentionGradients& g,
                                std::vector<Tensor>& kept, cudaStream_t stream) {
  using C = compute<T>;
  Arguments<T> a = arguments<T>(problem, kept);
  Tensor delta = Tensor::empty(g.lse.shape(), g.lse.dtype(), g.lse.device());
  const Tensor lse = g.lse.contiguous(), d_lse = g.d_lse.defined() ? g.d_lse.contiguous() : Tensor();
  const Tensor d_out =
      g.d_out.defined() ? g.d_out : Tensor::zeros(g.out.shape(), g.out.dtype(), g.out.device());
  a.d_out = read_heads<T>(d_out);
  a.lse = read<C>(lse);
  delta_kernel<T><<<blocks_for(delta.numel(), warps), threads, 0, stream>>>(
      a, read_heads<T>(g.out), d_lse.defined() ? read<C>(d_lse) : nullptr, write<C>(delta));
  check_launch("attention");
  a.delta = read<C>(delta);
  kept.insert(kept.end(), {lse, d_out, delta});
  return a;
}

template <class T>
void all_bias_gradients(const Arguments<T>& a, const AttentionProblem& problem, AttentionGradients& g,
                        cudaStream_t stream) {
  for (size_t i = 0; i < g.d_bias.size(); ++i) {
    if (!g.d_bias[i].defined()) continue;
    if (problem.bias[i].kind() == Kind::dense)
      dense_gradient<T>(a, g.d_bias[i], stream);
    else
      table_gradient<T>(a, static_cast<int>(i), g.d_bias[i], stream);
  }
}

// Zeros, where there is no pair.
bool fill_without_pairs(const AttentionProblem& problem, AttentionGradients& g) {
  if (g.lse.numel() > 0 && problem.keys() > 0) return false;
  for (Tensor* x : {&g.dq, &g.dk, &g.dv})
    if (x->defined()) x->fill_(0);
  for (Tensor& x : g.d_bias)
    if (x.defined()) x.fill_(0);
  return true;
}

void backward(const AttentionProblem& problem, AttentionGradients& g) {
  if (fill_without_pairs(problem, g)) return;
  const cudaStream_t stream = stream_of(g.lse);
  gpu::dispatch_floating(g.out.dtype(), "attention", [&](auto zero) {
    using T = decltype(zero);
    std::vector<Tensor> kept;
    const Arguments<T> a = backward_arguments<T>(problem, g, kept, stream);
    const auto launch_slots = [&](auto kernel, int64_t tiles, int64_t heads, int64_t value_slots,
                                  int64_t all_slots, Tensor& d_values, Tensor& d_owners) {
      launch<compute<T>>(kernel, tiles * a.batch * heads * ((all_slots + slots - 1) / slots), stream, a,
                         d_values.defined() ? write_heads<T>(d_values) : Heads<T>(),
                         d_owners.defined() ? write_heads<T>(d_owners) : Heads<T>(), value_slots, all_slots);
    };
    const int64_t value_slots = g.dv.defined() ? pieces(a.value_width) : 0;
    const int64_t key_slots = g.dk.defined() ? pieces(a.width) : 0;
    launch_slots(gradient_kernel<T, false>, a.maps.key_tiles, problem.kv_heads(), value_slots,
                 value_slots + key_slots, g.dv, g.dk);
    Tensor none;
    if (g.dq.defined())
      launch_slots(gradient_kernel<T, true>, a.maps.query_tiles, a.heads, 0, pieces(a.width), none, g.dq);
    all_bias_gradients(a, problem, g, stream);
  });
}

[[maybe_unused]] const torus::detail::RegisteredBackend registered{
    {Backend::cuda_simt, refusal, forward, backward}};

}  // namespace

void bias_gradients(const AttentionProblem& problem, AttentionGradients& g) {
  const auto wanted = [](const Tensor& x) { return x.defined(); };
  if (std::none_of(g.d_bias.begin(), g.d_bias.end(), wanted) || fill_without_pairs(problem, g)) return;
  const cudaStream_t stream = stream_of(g.lse);
  gpu::dispatch_floating(g.out.dtype(), "attention", [&](auto zero) {
    using T = decltype(zero);
    std::vector<Tensor> kept;
    const Arguments<T> a = backward_arguments<T>(problem, g, kept, stream);
    all_bias_gradients(a, problem, g, stream);
  });
}

}  // namespace torus::gpu
