#include "torus/ops/elementwise.h"
#include "torus/ops/ops.h"

namespace torus {

namespace {

// y = the sums of x up to each place along `axis`, or from there on. Sums in double: each may have many
// terms.
void cumsum_cpu(Tensor& y, const Tensor& x, int axis, bool backwards) {
  const int64_t length = x.size(axis);
  if (length == 0) return;
  Shape lines = x.shape();
  lines[axis] = 1;
  dispatch_floating(x.dtype(), "cumsum", [&](auto zero) {
    using T = decltype(zero);
    int64_t y_along = y.strides()[axis], x_along = x.strides()[axis];
    T* y_data = y.mutable_data<T>();
    const T* x_data = x.data<T>();
    if (backwards) {
      y_data += (length - 1) * y_along, y_along = -y_along;
      x_data += (length - 1) * x_along, x_along = -x_along;
    }
    for_each_run<2>(lines, {y.strides(), x.strides()}, elementwise_grain / length + 1,
                    [=](const auto& offset, const auto& step, int64_t count) {
                      constexpr int64_t together = 32;  // lines walked side by side
                      for (int64_t start = 0; start < count; start += together) {
                        T* to = y_data + offset[0] + start * step[0];
                        const T* from = x_data + offset[1] + start * step[1];
                        const int64_t width = std::min(together, count - start);
                        std::array<double, together> sum{};
                        for (int64_t i = 0; i < length; ++i)
                          for (int64_t j = 0; j < width; ++j) {
                            sum[static_cast<size_t>(j)] +=
                                static_cast<double>(static_cast<Compute<T>>(from[i * x_along + j * step[1]]));
                            to[i * y_along + j * step[0]] =
                                static_cast<T>(static_cast<Compute<T>>(sum[static_cast<size_t>(j)]));
                          }
                      }
                    });
  });
}

const Kernel<void(Tensor&, const Tensor&, int, bool)> cumsum_kernel{"cumsum", cumsum_cpu};

}  // namespace

Variable cumsum(const Variable& x, int axis) {
  const ProfileScope scope("cumsum", ScopeKind::forward);
  check_floating("cumsum", x);
  axis = checked_axis("cumsum", axis, x.dim());
  return record("cumsum", {x}, mapped(cumsum_kernel, x.value(), axis, false),
                [axis](const OutputGrads& grads) -> std::vector<Tensor> {
                  return {mapped(cumsum_kernel, grads[0], axis, true)};
                });
}

}  // namespace torus
