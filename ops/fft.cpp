#include <algorithm>
#include <cmath>
#include <complex>
#include <map>
#include <mutex>
#include <numbers>
#include <tuple>
#include <unsupported/Eigen/FFT>

#include "torus/core/parallel.h"
#include "torus/ops/elementwise.h"
#include "torus/ops/ops.h"

namespace torus {

namespace {

// One axis at a time: the lines of contiguous x [outer, n, inner, 2] along n, in double, into y. Centred:
// element n / 2 is the origin of both sides.
template <class T>
void transform_lines(T* y, const T* x, int64_t outer, int64_t n, int64_t inner, bool inverse) {
  using Complex = std::complex<double>;
  constexpr int64_t grain = 1 << 14;  // numbers
  const double scale = 1 / std::sqrt(static_cast<double>(n));
  parallel_for(0, outer * inner, std::max<int64_t>(1, grain / n), [&](int64_t first, int64_t last) {
    Eigen::FFT<double> transform;  // holds the factors of its length
    transform.SetFlag(Eigen::FFT<double>::Unscaled);
    std::vector<Complex> line(static_cast<size_t>(n)), result(static_cast<size_t>(n));
    for (int64_t l = first; l < last; ++l) {
      const int64_t start = 2 * (l / inner * n * inner + l % inner);
      for (int64_t i = 0; i < n; ++i) {
        const T* from = x + start + 2 * inner * ((i + n / 2) % n);
        line[static_cast<size_t>(i)] = {static_cast<double>(static_cast<Compute<T>>(from[0])),
                                        static_cast<double>(static_cast<Compute<T>>(from[1]))};
      }
      if (inverse)
        transform.inv(result.data(), line.data(), static_cast<Eigen::Index>(n));
      else
        transform.fwd(result.data(), line.data(), static_cast<Eigen::Index>(n));
      for (int64_t i = 0; i < n; ++i) {
        T* to = y + start + 2 * inner * ((i + n / 2) % n);
        to[0] = static_cast<T>(static_cast<Compute<T>>(scale * result[static_cast<size_t>(i)].real()));
        to[1] = static_cast<T>(static_cast<Compute<T>>(scale * result[static_cast<size_t>(i)].imag()));
      }
    }
  });
}

Tensor fft_cpu(const Tensor& x, const std::vector<int>& axes, bool inverse) {
  // 16-bit floats are rounded once, not after each axis.
  if (x.dtype() != f64 && x.dtype() != f32) return fft_cpu(x.to(f32), axes, inverse).to(x.dtype());
  Tensor y = x.contiguous();
  bool is_own = !x.is_contiguous();
  for (const int axis : axes) {
    const int64_t n = x.size(axis);
    if (n == 1 || x.numel() == 0) continue;
    Tensor result =
        is_own ? y : Tensor::empty(x.shape(), x.dtype());  // in place: a line is read before it is written
    int64_t outer = 1, inner = 1;
    for (int i = 0; i < x.dim() - 1; ++i)
      if (i != axis) (i < axis ? outer : inner) *= x.size(i);
    dispatch_floating(x.dtype(), "fft", [&](auto zero) {
      using T = decltype(zero);
      const T* from = y.data<T>();
      transform_lines(result.mutable_data<T>(), from, outer, n, inner, inverse);
    });
    y = result;
    is_own = true;
  }
  return is_own ? y : y.clone();
}

// The transform of n complex numbers as a matrix [2n, 2n], for row vectors of interleaved parts.
Tensor fft_matrix(int64_t n, bool inverse, DType dtype) {
  Tensor matrix = Tensor::empty({n, 2, n, 2}, f64);
  double* m = matrix.mutable_data<double>();
  const double scale = 1 / std::sqrt(static_cast<double>(n));
  for (int64_t i = 0; i < n; ++i)
    for (int64_t k = 0; k < n; ++k) {
      const int64_t turns = ((i - n / 2) * (k - n / 2) % n + n) % n;
      const double angle =
          (inverse ? 2 : -2) * std::numbers::pi * static_cast<double>(turns) / static_cast<double>(n);
      const double c = scale * std::cos(angle), s = scale * std::sin(angle);
      m[((i * 2 + 0) * n + k) * 2 + 0] = c;
      m[((i * 2 + 0) * n + k) * 2 + 1] = s;
      m[((i * 2 + 1) * n + k) * 2 + 0] = -s;
      m[((i * 2 + 1) * n + k) * 2 + 1] = c;
    }
  return matrix.reshape({2 * n, 2 * n}).to(dtype);
}

// On a device. Made once and kept, as a captured step cannot copy from the host, and never destroyed: the
// step reads it for as long as it lives, and device memory outlives any static of ours. Where a device would
// hold more than 1 GiB of them, further ones are made in each call.
Tensor fft_matrix_on(Device device, int64_t n, bool inverse, DType dtype) {
  constexpr int64_t most_bytes = int64_t{1} << 30;
  static auto* mutex = new std::mutex;
  static auto* made = new std::map<std::tuple<int, int64_t, bool, DType>, Tensor>;
  const std::lock_guard lock(*mutex);
  const std::tuple key{device.index, n, inverse, dtype};
  if (const auto found = made->find(key); found != made->end()) return found->second;
  const Tensor matrix = fft_matrix(n, inverse, dtype).to(device);
  const auto bytes_of = [](const Tensor& t) { return t.numel() * static_cast<int64_t>(size_of(t.dtype())); };
  int64_t bytes = bytes_of(matrix);
  for (const auto& [other, kept] : *made)
    if (std::get<0>(other) == device.index) bytes += bytes_of(kept);
  if (bytes <= most_bytes) made->emplace(key, matrix);
  return matrix;
}

// On other devices a matrix product an axis: O(n^2) a line, of what the matrix units do best, where a fast
// transform is O(n log n). At the lengths of images (some hundreds) either takes a small part of a step, and
// cuFFT would be another library of 200 MB.
Variable fft_by_matrices(const Variable& x, const std::vector<int>& axes, bool inverse) {
  const DType dtype = x.dtype() == f64 ? f64 : f32;
  Variable y = cast(x, dtype);
  for (const int axis : axes) {
    const int64_t n = x.size(axis);
    if (n == 1 || x.numel() == 0) continue;
    std::vector<int> order;  // the axis goes before the last; this order is its own inverse
    for (int i = 0; i < x.dim(); ++i) order.push_back(i);
    std::swap(order[static_cast<size_t>(axis)], order[static_cast<size_t>(x.dim() - 2)]);
    Variable rows = permute(y, order);
    const Shape shape = rows.shape();
    rows = matmul(reshape(rows, {x.numel() / (2 * n), 2 * n}), fft_matrix_on(x.device(), n, inverse, dtype));
    y = permute(reshape(rows, shape), order);
  }
  return cast(y, x.dtype());
}

}  // namespace

Variable fft(const Variable& x, const std::vector<int>& axes, bool inverse) {
  ProfileScope scope("fft", ScopeKind::forward);
  check_floating("fft", x);
  check(x.dim() >= 1 && x.size(-1) == 2, Error::Kind::Shape,
        "[fft] expected complex numbers, a last axis of 2, got ", x.shape());
  std::vector<int> along;
  for (int i = 0; i < static_cast<int>(axes.size()); ++i) {
    const int axis = checked_axis("fft", axes[static_cast<size_t>(i)], x.dim());
    check(axis != x.dim() - 1 && std::count(along.begin(), along.end(), axis) == 0, Error::Kind::Shape,
          "[fft] expected axes before the last of ", x.shape(), ", each once, got ", axis,
          " again or the last");
    along.push_back(axis);
  }
  if (axes.empty())
    for (int axis = 0; axis < x.dim() - 1; ++axis) along.push_back(axis);
  if (x.value().device() != cpu) {
    scope.show(x.value());
    return fft_by_matrices(x, along, inverse);
  }
  // Unitary: the gradient goes through the inverse.
  return record("fft", {x}, fft_cpu(x.value(), along, inverse),
                [along, inverse](const OutputGrads& grads) -> std::vector<Tensor> {
                  return {fft_cpu(grads[0], along, !inverse)};
                });
}

}  // namespace torus
