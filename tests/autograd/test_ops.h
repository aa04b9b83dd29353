// A few ops made of `record` and plain loops, so that the tape is tested apart from the ops of the library.
#pragma once

#include <cmath>

#include "torus/autograd/gradcheck.h"
#include "torus/autograd/tape.h"
#include "torus/core/random.h"

namespace torus::test {

/// f(a, b) for each element, broadcast.
template <class F>
Tensor map(const Tensor& a, const Tensor& b, F&& f) {
  const Shape shape = broadcast_shapes("map", a.shape(), b.shape());
  const std::vector<double> x = a.expand(shape).to_vector<double>(), y = b.expand(shape).to_vector<double>();
  Tensor result = Tensor::empty(shape, f64);
  double* to = result.mutable_data<double>();
  for (size_t i = 0; i < x.size(); ++i) to[i] = f(x[i], y[i]);
  return result.to(a.dtype());
}

inline Tensor times(const Tensor& a, const Tensor& b) {
  return map(a, b, [](double x, double y) { return x * y; });
}

/// Both inputs get the very gradient of the output: the engine must not let them share it.
inline Variable add(const Variable& a, const Variable& b) {
  const Tensor value = map(a.value(), b.value(), [](double x, double y) { return x + y; });
  return record("add", {a, b}, value, [](const OutputGrads& grads) {
    return std::vector<Tensor>{grads[0], grads[0]};
  });
}

/// a * b; its backward is off by the factor `planted`.
inline Variable mul(const Variable& a, const Variable& b, double planted = 1) {
  return record("mul", {a, b}, times(a.value(), b.value()),
                [a = Saved(a.value()), b = Saved(b.value()), planted](const OutputGrads& grads) {
                  std::vector<Tensor> result(2);
                  if (grads.wants(0))
                    result[0] = times(grads[0], times(b.get(), Tensor::scalar(planted, f64)));
                  if (grads.wants(1)) result[1] = times(grads[0], a.get());
                  return result;
                });
}

/// max(x, 0), which may declare its kink.
inline Variable relu(const Variable& x, bool declared = true) {
  if (declared) note_kink(x.value());
  return record("relu", {x}, map(x.value(), x.value(), [](double v, double) { return v > 0 ? v : 0; }),
                [x = Saved(x.value())](const OutputGrads& grads) -> std::vector<Tensor> {
                  return {map(grads[0], x.get(), [](double g, double v) { return v > 0 ? g : 0; })};
                });
}

inline Variable sum(const Variable& x) {
  return record("sum", {x}, sum_to(x.value(), {}),
                [shape = x.shape()](const OutputGrads& grads) -> std::vector<Tensor> {
                  return {grads[0].expand(shape)};
                });
}

/// x and x * x as two outputs of one node. The second's gradient may be absent, and so may the first's.
inline std::vector<Variable> powers(const Variable& x) {
  const Tensor outputs[] = {x.value().clone(), times(x.value(), x.value())};
  return record("powers", std::span(&x, 1), outputs,
                [x = Saved(x.value())](const OutputGrads& grads) -> std::vector<Tensor> {
                  Tensor result = Tensor::zeros(x.get().shape(), x.get().dtype());
                  if (grads[0].defined()) add_into(result, grads[0]);
                  if (grads[1].defined())
                    add_into(result, times(times(grads[1], x.get()), Tensor::scalar(2, f64)));
                  return {result};
                });
}

}  // namespace torus::test
