#include "torus/core/gemm.h"

#define EIGEN_DONT_PARALLELIZE
#include <Eigen/Core>
#include <algorithm>
#include <array>
#include <utility>

#include "torus/core/kernel.h"
#include "torus/core/parallel.h"
#include "torus/core/simd.h"

namespace torus {

namespace {

// One matrix of a batch: pointer and strides, at least one of them 1.
template <class T>
struct MatrixView {
  T* data;
  int64_t row_stride, column_stride;

  MatrixView from(int64_t row, int64_t column) const {
    return {data + row * row_stride + column * column_stride, row_stride, column_stride};
  }
};

// The strides along axes of size 1 mean nothing; they count as 1.
template <class T>
MatrixView<const T> matrix(const T* data, const Tensor& x) {
  return {data, x.size(-2) == 1 ? 1 : x.strides()[-2], x.size(-1) == 1 ? 1 : x.strides()[-1]};
}

constexpr int64_t parallel_work = 1 << 18;        // multiplications below which a loop stays on one thread
constexpr int64_t parallel_elements = 1 << 13;    // elements to pack, likewise
constexpr int64_t few_rows = 8, few_columns = 4;  // products with fewer are not packed

template <class T>
void start_row(T* to, const T* bias, int64_t count, bool accumulate) {
  for (int64_t j = 0; j < count; ++j) to[j] = accumulate ? to[j] + bias[j] : bias[j];
}

template <class T>
using Dynamic = Eigen::Matrix<T, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
template <class T>
using RowMajorMap = Eigen::Map<Dynamic<T>, 0, Eigen::OuterStride<>>;

// Calls f with an Eigen map of `a`, as it lies or transposed.
template <class T, class F>
void with_map(MatrixView<const T> a, int64_t rows, int64_t columns, F&& f) {
  if (a.column_stride == 1)
    f(Eigen::Map<const Dynamic<T>, 0, Eigen::OuterStride<>>(a.data, rows, columns,
                                                            Eigen::OuterStride<>(a.row_stride)));
  else
    f(Eigen::Map<const Dynamic<T>, 0, Eigen::OuterStride<>>(a.data, columns, rows,
                                                            Eigen::OuterStride<>(a.column_stride))
          .transpose());
}

// c [m, n] (+)= a [m, k] @ b [k, n], on one thread.
template <class T>
void multiply(MatrixView<T> c, MatrixView<const T> a, MatrixView<const T> b, int64_t m, int64_t n, int64_t k,
              bool accumulate) {
  RowMajorMap<T> result(c.data, m, n, Eigen::OuterStride<>(c.row_stride));
  if (!accumulate) result.setZero();
  if (k == 0) return;
  with_map(a, m, k, [&](const auto& left) {
    with_map(b, k, n, [&](const auto& right) { result.noalias() += left * right; });
  });
}

// For products with few rows or columns, where packing would not pay: split into parts that depend on the
// sizes alone, so that the bits do not depend on the thread count. Few rows are taken one by one, as Eigen is
// fastest there.
template <class T>
void multiply_narrow(MatrixView<T> c, MatrixView<const T> a, MatrixView<const T> b, const T* bias, int64_t m,
                     int64_t n, int64_t k, bool accumulate) {
  const bool tall = m >= n;
  constexpr int64_t part = 256;
  const int64_t length = tall ? m : n, step = tall ? part : 1;
  parallel_for(0, (length + part - 1) / part, parallel_work / (part * std::min(m, n) * k + 1) + 1,
               [&](int64_t first, int64_t last) {
                 for (int64_t at = first * part; at < std::min(last * part, length); at += part) {
                   const int64_t column = tall ? 0 : at, columns = tall ? n : std::min(part, n - at);
                   const int64_t begin = tall ? at : 0, end = tall ? std::min(at + part, m) : m;
                   for (int64_t row = begin; row < end; row += step) {
                     const int64_t rows = std::min(step, end - row);
                     const MatrixView<T> to = c.from(row, column);
                     if (bias)
                       for (int64_t i = 0; i < rows; ++i)
                         start_row(to.data + i * to.row_stride, bias + column, columns, accumulate);
                     multiply<T>(to, a.from(row, 0), b.from(0, column), rows, columns, k, accumulate || bias);
                   }
                 }
               });
}

// The product of packed operands follows Goto and van de Geijn (2008), with other cache levels: a tile of
// `a`, at most `most_depth` long, stays in the first level while packed panels of `b` stream past it from the
// second. A tile's sums fill the registers. Each element of c is summed in one order, whatever thread does
// it.
constexpr int tile_rows = simd::vector_bytes == 64 ? 14 : 6, tile_vectors = 2;
constexpr int64_t most_depth = 384, packed_panels = 16, packed_elements = 16 * 32 * most_depth;
// Between rows of a packed tile, so that they meet in no cache set.
constexpr int64_t pitch = most_depth + 16;
constexpr int64_t tile_group = 8;  // tiles packed together, so that columns of `a` are read in long pieces

template <class T>
constexpr int64_t panel_width = int64_t{tile_vectors} * simd::lanes<T>;
// Of a tile that is packed by columns: whole vectors, since stores across cache lines are slow.
template <class T>
constexpr int64_t column_pitch = ((tile_rows - 1) / simd::lanes<T> + 1) * simd::lanes<T>;

// What the sums of a tile are added to: row i at data + i * stride.
template <class T>
struct Base {
  const T* data;
  int64_t stride;
};

// c [M, N vectors] = base + a @ b over `count` steps; b is a panel. Element (i, r) of the tile is
// a[i * a_stride + r] if it lies by rows, a[r * column_pitch + i] otherwise.
template <class T, int M, int N, bool by_rows>
void multiply_tile(T* c, int64_t c_stride, Base<T> base, const T* a, int64_t a_stride, const T* b,
                   int64_t count) {
  constexpr int lanes = simd::lanes<T>, close = 4;
  for (int i = 0; i < M; ++i)  // comes while the sums are made
    for (int j = 0; j < N; ++j) __builtin_prefetch(c + i * c_stride + j * lanes, 1);
  simd::Vector<T> sum[M][N] = {};
  // Few registers address all rows: every fourth has a pointer, and `close` offsets reach those between.
  const T* row[(M + close - 1) / close];
#pragma GCC unroll 16
  for (int i = 0; i < M; i += close) row[i / close] = a + i * a_stride;
#pragma GCC unroll 2
  for (int64_t r = 0; r < count; ++r) {
    simd::Vector<T> right[N];
#pragma GCC unroll 16
    for (int j = 0; j < N; ++j) right[j] = simd::load(b + (r * N + j) * lanes);
#pragma GCC unroll 16
    for (int i = 0; i < M; ++i) {
      const simd::Vector<T> left =
          simd::splat(by_rows ? row[i / close][i % close * a_stride + r] : a[r * column_pitch<T> + i]);
#pragma GCC unroll 16
      for (int j = 0; j < N; ++j) sum[i][j] += left * right[j];
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < M; ++i)
#pragma GCC unroll 16
    for (int j = 0; j < N; ++j)
      simd::store(c + i * c_stride + j * lanes,
                  simd::load(base.data + i * base.stride + j * lanes) + sum[i][j]);
}

// Kernels for 2, 4, ... tile_rows rows.
template <class T>
using TileFunction = void (*)(T*, int64_t, Base<T>, const T*, int64_t, const T*, int64_t);

template <class T, int N, bool by_rows>
constexpr auto tile_functions = []<size_t... I>(std::index_sequence<I...>) {
  return std::array<TileFunction<T>, sizeof...(I)>{
      multiply_tile<T, 2 * (static_cast<int>(I) + 1), N, by_rows>...};
}
(std::make_index_sequence<tile_rows / 2>{});

// The rows of a matrix shared out evenly, two by two, over as few tiles as hold them: kernels take an even
// number.
struct Tiles {
  int64_t m, pairs, count;
  explicit Tiles(int64_t rows)
      : m(rows), pairs((m + 1) / 2), count((pairs + tile_rows / 2 - 1) / (tile_rows / 2)) {}
  int64_t row(int64_t tile) const { return std::min(m, pairs * tile / count * 2); }
};

// Up to tile_group tiles of `a`, `count` columns each, as kernels read them.
template <class T>
class TileGroup {
 public:
  void set(MatrixView<const T> a, const Tiles& tiles, int64_t first, int64_t last, int64_t count) {
    std::array<int64_t, tile_group + 1> row;
    for (int64_t tile = first; tile <= last; ++tile) row[static_cast<size_t>(tile - first)] = tiles.row(tile);
    const auto size = static_cast<size_t>(last - first);
    if (a.column_stride == 1) {
      for (size_t t = 0; t < size; ++t) set_rows(t, a.from(row[t], 0), row[t + 1] - row[t], count);
      return;
    }
    for (size_t t = 0; t < size; ++t) data_[t] = packed(t);
    for (int64_t r = 0; r < count; ++r)
      for (size_t t = 0; t < size; ++t) {
        const T* from = a.data + row[t] + r * a.column_stride;
        T* to = packed(t) + r * column_pitch<T>;
        if (row[t] + column_pitch<T> <= tiles.m) {
          std::copy_n(from, column_pitch<T>, to);
        } else {
          const int64_t rows = row[t + 1] - row[t];
          std::copy_n(from, rows, to);
          if (rows % 2) to[rows] = 0;
        }
      }
  }
  const T* data(int64_t tile) const { return data_[static_cast<size_t>(tile)]; }
  int64_t stride(int64_t tile) const { return stride_[static_cast<size_t>(tile)]; }

 private:
  // Rows are read where they lie. They are copied if they would meet in one cache set, or if an odd last one
  // lacks the row of zeros that kernels want.
  void set_rows(size_t tile, MatrixView<const T> a, int64_t rows, int64_t count) {
    constexpr int64_t set_bytes = 4096;
    const bool meet = rows > 2 && a.row_stride * static_cast<int64_t>(sizeof(T)) % set_bytes == 0;
    if (!meet && rows % 2 == 0) {
      data_[tile] = a.data, stride_[tile] = a.row_stride;
      return;
    }
    T* to = packed(tile);
    for (int64_t i = 0; i < rows; ++i) std::copy_n(a.data + i * a.row_stride, count, to + i * pitch);
    if (rows % 2) std::fill_n(to + rows * pitch, count, T(0));
    data_[tile] = to, stride_[tile] = pitch;
  }
  static constexpr int64_t tile_elements = column_pitch<T> * pitch;
  T* packed(size_t tile) { return memory_ + static_cast<int64_t>(tile) * tile_elements; }

  alignas(64) T memory_[tile_group * tile_elements];
  std::array<const T*, tile_group> data_;
  std::array<int64_t, tile_group> stride_{};
};

// `count` rows of a panel: `columns` columns of b, filled up to `width` with zeros.
template <class T>
void pack_panel(T* panel, MatrixView<const T> b, int64_t count, int64_t columns, int64_t width) {
  if (columns < width) std::fill_n(panel, count * width, T(0));
  if (b.column_stride == 1 && columns == panel_width<T>)
    for (int64_t r = 0; r < count; ++r)
      std::copy_n(b.data + r * b.row_stride, panel_width<T>, panel + r * panel_width<T>);
  else if (b.column_stride == 1)
    for (int64_t r = 0; r < count; ++r) std::copy_n(b.data + r * b.row_stride, columns, panel + r * width);
  else
    simd::transpose(panel, width, b.data, b.column_stride, columns, count);
}

// One packed part of b: `k` rows and `n` columns, at most packed_panels panels; it fits the second level.
template <class T>
struct PackedPanels {
  Tensor memory;
  T* data;
  int64_t n, k, depth;    // depth: of the steps in which kernels take the rows
  int64_t panels, width;  // width: of all panels; the last may be narrower

  PackedPanels(int64_t columns, int64_t rows, int64_t step)
      : n(columns),
        k(rows),
        depth(step),
        panels((n + panel_width<T> - 1) / panel_width<T>),
        width((n + simd::lanes<T> - 1) / simd::lanes<T> * simd::lanes<T>) {
    memory = Tensor::empty({k * width}, dtype_of<T>);
    data = memory.mutable_data<T>();
  }
  int64_t width_of(int64_t panel) const { return std::min(panel_width<T>, width - panel * panel_width<T>); }
  int64_t columns_of(int64_t panel) const { return std::min(panel_width<T>, n - panel * panel_width<T>); }
  /// Rows [first, first + count) of a panel; first is a multiple of `depth`, count is `depth` or what is
  /// left.
  T* at(int64_t panel, int64_t first, int64_t count) const {
    return data + first * width + panel * panel_width<T> * count;
  }

  /// Threads share out the panels themselves if `whole`.
  void fill(MatrixView<const T> b, bool whole) {
    // A few rows of all panels at a time, so that long rows are read in one piece; columns are long pieces.
    const int64_t block = b.column_stride == 1 ? 16 : depth, blocks = (k + block - 1) / block;
    const auto pack = [&](int64_t first_block, int64_t last_block, int64_t first, int64_t last) {
      for (int64_t row = first_block * block; row < std::min(last_block * block, k); row += block)
        for (int64_t panel = first; panel < last; ++panel) {
          const int64_t step = row / depth * depth;
          pack_panel(at(panel, step, std::min(depth, k - step)) + (row - step) * width_of(panel),
                     b.from(row, panel * panel_width<T>), std::min(block, k - row), columns_of(panel),
                     width_of(panel));
        }
    };
    if (whole)
      parallel_for(0, panels, 1 + parallel_elements / (k * panel_width<T>),
                   [&](int64_t first, int64_t last) { pack(0, blocks, first, last); });
    else
      parallel_for(0, blocks, 1 + parallel_elements / (block * width),
                   [&](int64_t first, int64_t last) { pack(first, last, 0, panels); });
  }
};

// c [m, packed.n] (+)= a @ packed + bias. Threads share out panels if `by_panels`, else tiles and panels.
template <class T>
void multiply_packed(MatrixView<T> c, MatrixView<const T> a, const PackedPanels<T>& packed, const T* bias,
                     const Tiles& tiles, bool by_panels, bool accumulate) {
  static constexpr T zeros[panel_width<T>] = {};
  const int64_t panels = packed.panels;
  const bool by_rows = a.column_stride == 1;
  const auto part = [&](int64_t first_tile, int64_t last_tile, auto&& panels_of) {
    TileGroup<T> group;
    alignas(64) T edge[tile_rows * panel_width<T>];
    for (int64_t r = 0; r < packed.k; r += packed.depth) {
      const int64_t count = std::min(packed.depth, packed.k - r);
      for (int64_t tile = first_tile; tile < last_tile; ++tile) {
        const int64_t slot = (tile - first_tile) % tile_group;
        if (slot == 0) group.set(a.from(0, r), tiles, tile, std::min(tile + tile_group, last_tile), count);
        const int64_t row = tiles.row(tile), rows = tiles.row(tile + 1) - row;
        const auto kernel = static_cast<size_t>((rows + 1) / 2 - 1);
        const auto [first_panel, last_panel] = panels_of(tile);
        for (int64_t panel = first_panel; panel < last_panel; ++panel) {
          const int64_t column = panel * panel_width<T>, columns = packed.columns_of(panel);
          const int64_t width = packed.width_of(panel);
          const MatrixView<T> to = c.from(row, column);
          const bool whole = columns == width && rows % 2 == 0;
          Base<T> base{zeros, 0};
          if (accumulate || r > 0)
            base = {to.data, to.row_stride};
          else if (bias && whole)
            base = {bias + column, 0};

          const auto multiply_into =
              width == panel_width<T>
                  ? (by_rows ? tile_functions<T, 2, true> : tile_functions<T, 2, false>)[kernel]
                  : (by_rows ? tile_functions<T, 1, true> : tile_functions<T, 1, false>)[kernel];
          const auto multiply = [&](T* into, int64_t stride) {
            multiply_into(into, stride, base, group.data(slot), group.stride(slot),
                          packed.at(panel, r, count), count);
          };
          if (whole) {
            if (bias && r == 0 && accumulate)
              for (int64_t y = 0; y < rows; ++y) start_row(to.from(y, 0).data, bias + column, columns, true);
            multiply(to.data, to.row_stride);
            continue;
          }
          // The kernel reads and writes more than c holds.
          if (accumulate || bias || r > 0) {
            for (int64_t y = 0; y < rows; ++y) {
              if (bias && r == 0) start_row(to.from(y, 0).data, bias + column, columns, accumulate);
              std::copy_n(to.from(y, 0).data, columns, edge + y * width);
            }
            base = {edge, width};
          }
          multiply(edge, width);
          for (int64_t y = 0; y < rows; ++y) std::copy_n(edge + y * width, columns, to.from(y, 0).data);
        }
      }
    }
  };
  const int64_t tile_work = tile_rows * panel_width<T> * packed.k;
  if (by_panels)
    parallel_for(0, panels, parallel_work / (tiles.count * tile_work) + 1, [&](int64_t first, int64_t last) {
      part(0, tiles.count, [=](int64_t) { return std::pair(first, last); });
    });
  else
    parallel_for(0, tiles.count * panels, parallel_work / tile_work + 1, [&](int64_t first, int64_t last) {
      part(first / panels, (last - 1) / panels + 1, [=](int64_t tile) {
        return std::pair(std::max<int64_t>(0, first - tile * panels), std::min(panels, last - tile * panels));
      });
    });
}

template <class T>
void multiply_wide(MatrixView<T> c, MatrixView<const T> a, MatrixView<const T> b, const T* bias, int64_t m,
                   int64_t n, int64_t k, bool accumulate) {
  const Tiles tiles(m);
  const int64_t columns = std::min(n, packed_panels * panel_width<T>);
  // Steps of equal depth, a multiple of 16.
  const int64_t steps = (k + most_depth - 1) / most_depth, depth = ((k + steps - 1) / steps + 15) / 16 * 16;
  const int64_t rows = std::max<int64_t>(1, packed_elements / columns / depth) * depth;
  for (int64_t column = 0; column < n; column += columns)
    for (int64_t row = 0; row < k; row += rows) {
      PackedPanels<T> packed(std::min(columns, n - column), std::min(rows, k - row), depth);
      // Where `a` is small, a thread reads only what it packed itself: what others did lies in their caches.
      const bool by_panels = 2 * tiles.count <= 5 * packed.panels && packed.panels % num_threads() == 0;
      packed.fill(b.from(row, column), by_panels);
      multiply_packed(c.from(0, column), a.from(0, row), packed, bias && row == 0 ? bias + column : nullptr,
                      tiles, by_panels, accumulate || row > 0);
    }
}

template <class T>
void product_of(Tensor& c, const Tensor& a, const Tensor& b, const Tensor& bias, bool accumulate) {
  const int64_t m = c.size(-2), n = c.size(-1), k = a.size(-1);
  const Shape batch = c.shape().slice(0, c.dim() - 2);
  const int64_t batches = batch.numel();
  T* const c_data = c.mutable_data<T>();
  const T* const a_data = a.data<T>();
  const T* const b_data = b.data<T>();
  const T* const bias_data = bias.defined() ? bias.data<T>() : nullptr;
  const auto multiply_at = [&](int64_t index) {
    MatrixView<T> to{c_data, c.strides()[-2], 1};
    MatrixView<const T> left = matrix(a_data, a), right = matrix(b_data, b);
    for (int axis = batch.dim() - 1; axis >= 0; --axis) {
      const int64_t at = index % batch[axis];
      index /= batch[axis];
      to.data += at * c.strides()[axis];
      left.data += at * a.strides()[axis];
      right.data += at * b.strides()[axis];
    }
    if (m < few_rows || n < few_columns || k == 0)
      multiply_narrow(to, left, right, bias_data, m, n, k, accumulate);
    else
      multiply_wide(to, left, right, bias_data, m, n, k, accumulate);
  };
  // Threads share out the batch if its products are too small to be shared out themselves.
  const int64_t work = m * n * k;
  if (work >= 16 * parallel_work)
    for (int64_t i = 0; i < batches; ++i) multiply_at(i);
  else
    parallel_for(0, batches, parallel_work / (work + 1) + 1, [&](int64_t first, int64_t last) {
      for (int64_t i = first; i < last; ++i) multiply_at(i);
    });
}

// An operand that can be used in place has a unit stride along its rows or its columns.
Tensor usable(const Tensor& x) {
  const bool rows = x.strides()[-1] == 1 || x.size(-1) == 1,
             columns = x.strides()[-2] == 1 || x.size(-2) == 1;
  return rows || columns ? x : x.contiguous();
}

void product_cpu(Tensor& c, const Tensor& a, const Tensor& b, const ProductOptions& options) {
  if (c.numel() == 0) return;
  const DType wide = c.dtype() == f64 ? f64 : f32;
  if (c.dtype() != wide || c.strides()[-1] != 1) {  // 16-bit floats, and results without a unit stride
    const auto widened = [&](const Tensor& x) { return x.defined() ? x.to(wide) : x; };
    // All that is added is widened too, so that the sum is rounded once.
    Tensor result = Tensor::empty(c.shape(), wide);
    if (options.accumulate) result.copy_(c);
    product_cpu(
        result, a.to(wide), b.to(wide),
        {.accumulate = options.accumulate, .bias = widened(options.bias), .addend = widened(options.addend)});
    c.copy_(result);
    return;
  }
  if (wide == f64)
    product_of<double>(c, a, b, options.bias, options.accumulate);
  else
    product_of<float>(c, a, b, options.bias, options.accumulate);
  if (options.addend.defined()) add_into(c, options.addend);
}

const Kernel<void(Tensor&, const Tensor&, const Tensor&, const ProductOptions&)> product_kernel{
    "product", product_cpu, [](Tensor& c, const Tensor& a, const Tensor&, const ProductOptions&) {
      return 2.0 * static_cast<double>(c.numel()) * static_cast<double>(a.size(-1));
    }};

using GeluKernel = Kernel<void(Tensor&, Tensor&, const Tensor&, const Tensor&, const Tensor&, bool&)>;
const GeluKernel gelu_kernel{"product.gelu", nullptr};

}  // namespace

void product(Tensor& c, const Tensor& a, const Tensor& b, const ProductOptions& options) {
  check(c.dim() >= 2 && a.dim() >= 2 && b.dim() >= 2, Error::Kind::Shape, "[product] expected matrices, got ",
        a.shape(), " and ", b.shape());
  check(a.dtype() == c.dtype() && b.dtype() == c.dtype() && is_floating(c.dtype()), Error::Kind::DType,
        "[product] expected one floating dtype, got ", a.dtype(), " and ", b.dtype(), " into ", c.dtype());
  check(a.size(-1) == b.size(-2) && a.size(-2) == c.size(-2) && b.size(-1) == c.size(-1), Error::Kind::Shape,
        "[product] ", a.shape(), " times ", b.shape(), " does not give ", c.shape());
  check(!options.bias.defined() || options.bias.shape() == Shape{c.size(-1)}, Error::Kind::Shape,
        "[product] bias must be [", c.size(-1), "]");
  check(!options.addend.defined() || (options.addend.shape() == c.shape() && !options.accumulate),
        Error::Kind::Shape, "[product] addend must be ", c.shape(), ", without accumulate");
  // Leading axes of c, with the matrices' own last two.
  const auto spread = [&](const Tensor& x) {
    Shape shape = c.shape();
    shape[-2] = x.size(-2);
    shape[-1] = x.size(-1);
    return usable(x).expand(shape);
  };
  ProductOptions ready = options;
  if (ready.bias.defined()) ready.bias = ready.bias.contiguous();
  product_kernel(c.device(), c, spread(a), spread(b), ready);
}

bool product_gelu(Tensor& hidden, Tensor& input, const Tensor& a, const Tensor& b, const Tensor& bias) {
  bool done = false;
  if (hidden.device() != cpu)
    gelu_kernel(hidden.device(), hidden, input, a, b, bias.defined() ? bias.contiguous() : bias, done);
  return done;
}

}  // namespace torus
