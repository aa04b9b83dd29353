#include "ops/op_table.h"

#include <algorithm>
#include <array>
#include <limits>
#include <string>
#include <tuple>
#include <utility>

namespace torus::testing {

namespace {

constexpr double infinity = std::numeric_limits<double>::infinity();

// ------------------------------------------------------------------------------------- references, plain
// loops

Arrays broadcast_map(const Arrays& in, const std::function<double(const std::vector<double>&)>& f) {
  Shape shape;
  for (int axis = 8; axis >= 1; --axis) {
    int64_t size = -1;
    for (const Array& a : in)
      if (axis <= a.shape.dim()) size = size < 0 || size == 1 ? a.shape[-axis] : size;
    if (size >= 0) shape.push_back(size);
  }
  Array y(shape);
  std::vector<double> x(in.size());
  for_each_index(shape, [&](const Index& i) {
    for (size_t k = 0; k < in.size(); ++k) x[k] = in[k].at(i);
    y.at(i) = f(x);
  });
  return {y};
}

auto unary(double (*f)(double)) {
  return [f](const Arrays& in) { return broadcast_map(in, [f](const auto& x) { return f(x[0]); }); };
}
auto binary(double (*f)(double, double)) {
  return [f](const Arrays& in) { return broadcast_map(in, [f](const auto& x) { return f(x[0], x[1]); }); };
}

// f(values along the axes, in order) for each index of the others; no axes means all.
auto reduction(std::vector<int> axes, bool keep, double (*f)(const std::vector<double>&)) {
  return [=](const Arrays& in) {
    const Array& x = in[0];
    Shape kept = x.shape, shape;
    for (int axis = 0; axis < kept.dim(); ++axis) {
      const bool gone = axes.empty() || std::count(axes.begin(), axes.end(), axis) ||
                        std::count(axes.begin(), axes.end(), axis - kept.dim());
      if (gone) kept[axis] = 1;
      if (!gone || keep) shape.push_back(kept[axis]);
    }
    const Array places(kept);
    std::vector<std::vector<double>> runs(places.values.size());
    for_each_index(x.shape, [&](const Index& i) { runs[places.place(i)].push_back(x.at(i)); });
    Array y(shape);
    for (size_t i = 0; i < runs.size(); ++i) y.values[i] = f(runs[i]);
    return Arrays{y};
  };
}

// Replaces each line of x along `axis` by f(line).
template <class F>
Arrays map_lines(const Array& x, int axis, F f) {
  const int at = axis < 0 ? axis + x.shape.dim() : axis;
  Array y(x.shape);
  for_each_index(x.shape, [&](Index i) {
    auto& j = i[static_cast<size_t>(at)];
    if (j != 0) return;
    std::vector<double> line;
    for (j = 0; j < x.shape[at]; ++j) line.push_back(x.at(i));
    line = f(line);
    for (j = 0; j < x.shape[at]; ++j) y.at(i) = line[static_cast<size_t>(j)];
  });
  return {y};
}

double log_sum_exp(const std::vector<double>& x) {
  const double top = *std::max_element(x.begin(), x.end());
  double sum = 0;
  for (double v : x) sum += std::exp(v - top);
  return top + std::log(sum);
}

std::vector<double> softmax_line(std::vector<double> x) {
  const double lse = log_sum_exp(x);
  for (double& v : x) v = std::exp(v - lse);
  return x;
}
std::vector<double> log_softmax_line(std::vector<double> x) {
  const double lse = log_sum_exp(x);
  for (double& v : x) v -= lse;
  return x;
}

double total(const std::vector<double>& x) {
  double sum = 0;
  for (double v : x) sum += v;
  return sum;
}
double average(const std::vector<double>& x) { return total(x) / static_cast<double>(x.size()); }
double largest(const std::vector<double>& x) { return *std::max_element(x.begin(), x.end()); }
double smallest(const std::vector<double>& x) { return *std::min_element(x.begin(), x.end()); }
double squares_about_mean(const std::vector<double>& x) {
  const double mean = average(x);
  double sum = 0;
  for (double v : x) sum += (v - mean) * (v - mean);
  return sum;
}
double variance(const std::vector<double>& x) {
  return squares_about_mean(x) / static_cast<double>(x.size() - 1);
}
double variance_of_all(const std::vector<double>& x) {
  return squares_about_mean(x) / static_cast<double>(x.size());
}
std::vector<double> running_sums(std::vector<double> x) {
  for (size_t i = 1; i < x.size(); ++i) x[i] += x[i - 1];
  return x;
}

double gelu_exact(double x) { return 0.5 * x * std::erfc(-x / std::sqrt(2.0)); }
double gelu_tanh(double x) {
  return 0.5 * x * (1 + std::tanh(std::sqrt(2 / std::acos(-1.0)) * (x + 0.044715 * x * x * x)));
}

Arrays matmul_reference(const Arrays& in) {
  const Array &a = in[0], &b = in[1];
  const int64_t depth = a.shape[-1];
  Shape shape;
  const int axes = std::max(a.shape.dim(), b.shape.dim());
  for (int axis = axes; axis > 2; --axis) {
    const int64_t of_a = axis <= a.shape.dim() ? a.shape[-axis] : 1;
    shape.push_back(of_a != 1 || axis > b.shape.dim() ? of_a : b.shape[-axis]);
  }
  shape.push_back(a.shape[-2]);
  shape.push_back(b.shape[-1]);
  Array y(shape);
  for_each_index(shape, [&](const Index& i) {
    Index row = i, column = i;
    double sum = 0;
    for (int64_t k = 0; k < depth; ++k) {
      row.back() = k;
      column[column.size() - 2] = k;
      sum += a.at(row) * b.at(column);
    }
    y.at(i) = sum;
  });
  return {y};
}

Array scaled(Array x, double by) {
  for (double& value : x.values) value *= by;
  return x;
}
Arrays plus(Array a, const Array& b) {
  for (size_t i = 0; i < a.values.size(); ++i) a.values[i] += b.values[i];
  return {a};
}

Arrays linear_reference(const Arrays& in) {
  const Array &x = in[0], &weight = in[1];
  Shape shape = x.shape;
  shape[-1] = weight.shape[0];
  Array y(shape);
  for_each_index(shape, [&](Index i) {
    const int64_t o = i.back();
    double sum = in.size() > 2 ? in[2].at({o}) : 0;
    Index at = i;
    for (int64_t k = 0; k < x.shape[-1]; ++k) {
      at.back() = k;
      sum += x.at(at) * weight.at({o, k});
    }
    y.at(i) = sum;
  });
  return {y};
}

Arrays layer_norm_reference(const Arrays& in) {
  return map_lines(in[0], -1, [&](std::vector<double> x) {
    const double mean = average(x);
    double variance = 0;
    for (double v : x) variance += (v - mean) * (v - mean) / static_cast<double>(x.size());
    for (size_t i = 0; i < x.size(); ++i) {
      x[i] = (x[i] - mean) / std::sqrt(variance + 1e-5) * in[1].values[i];
      if (in.size() > 2) x[i] += in[2].values[i];
    }
    return x;
  });
}

Arrays rms_norm_reference(const Arrays& in) {
  return map_lines(in[0], -1, [&](std::vector<double> x) {
    double square = 0;
    for (double v : x) square += v * v / static_cast<double>(x.size());
    for (size_t i = 0; i < x.size(); ++i) x[i] = x[i] / std::sqrt(square + 1e-6) * in[1].values[i];
    return x;
  });
}

// ------------------------------------------------------------------------------ arguments that are not
// Variables

// True at about a third of the places.
Tensor mask_of(const Shape& shape) {
  Tensor mask = Tensor::zeros(shape, boolean);
  for (int64_t i = 0; i < mask.numel(); i += 3) mask.mutable_data<bool>()[i] = true;
  return mask;
}
// Of the last axis alone.
Tensor mask_for(const Variable& x) { return mask_of(x.dim() ? Shape{x.size(-1)} : Shape{}); }

constexpr int64_t ignored = -1;
Tensor targets_for(const Shape& logits) {
  Tensor targets = indices_for(logits.slice(0, logits.dim() - 1), logits.back());
  for (int64_t i = 2; i < targets.numel(); i += 4) targets.mutable_data<int64_t>()[i] = ignored;
  return targets;
}

// With the weight of each class in the loss of a row.
Arrays cross_entropy_with(const Arrays& in, double of_target, double of_all) {
  const auto targets = targets_for(in[0].shape).to_vector<int64_t>();
  const auto width = static_cast<size_t>(in[0].shape.back());
  std::vector<double> losses;
  for (size_t row = 0; row < targets.size(); ++row) {
    if (targets[row] == ignored) continue;
    const auto first = in[0].values.begin() + static_cast<ptrdiff_t>(row * width);
    const std::vector<double> logits(first, first + static_cast<ptrdiff_t>(width));
    const double lse = log_sum_exp(logits);
    losses.push_back(of_target * (lse - logits[static_cast<size_t>(targets[row])]) +
                     of_all * (lse - average(logits)));
  }
  Array y{Shape{}};
  y.values[0] = losses.empty() ? 0 : average(losses);
  return {y};
}

Shape embedding_indices(const Shape& weight) { return {2, weight[0]}; }

Arrays embedding_reference(const Arrays& in) {
  const Shape shape = embedding_indices(in[0].shape);
  const auto indices = indices_for(shape, in[0].shape[0]).to_vector<int64_t>();
  return taken(in[0], {shape[0], shape[1], in[0].shape[1]}, [&](const Index& i) {
    return Index{indices[static_cast<size_t>(i[0] * shape[1] + i[1])], i[2]};
  });
}

constexpr double dropout_p = 0.3;
constexpr uint64_t dropout_seed = 11;
// Element i of a block of 256 takes word i / 64 of draw i % 64 of that block.
Arrays dropout_reference(const Arrays& in) {
  Array y = in[0];
  for (size_t i = 0; i < y.values.size(); ++i) {
    const auto words = philox({static_cast<uint32_t>(i / 256 * 64 + i % 64), 0, 0, 0}, dropout_seed);
    const bool drop = words[i / 64 % 4] < dropout_p * 0x1p32;
    y.values[i] = drop ? 0 : y.values[i] / (1 - dropout_p);
  }
  return {y};
}

}  // namespace

Tensor indices_for(const Shape& shape, int64_t bound) {
  Tensor result = Tensor::empty(shape, i64);
  for (int64_t i = 0; i < shape.numel(); ++i) result.mutable_data<int64_t>()[i] = (i * i + 3 * i + 1) % bound;
  return result;
}

std::vector<Row> op_table() {
  using Cases = std::vector<std::vector<Shape>>;
  const Cases one{{{3, 5}}, {{2, 3, 4}}, {{}}, {{1}}, {{0, 4}}};
  const std::vector<Shape> one_large{{150, 307}};
  const Cases two{{{3, 4}, {3, 4}}, {{2, 3, 4}, {4}}, {{3, 1}, {2, 3, 4}}, {{3, 1}, {1, 4}},
                  {{}, {2, 3}},     {{1}, {1}},       {{0, 3}, {1, 3}},    {{2, 1, 3}, {0, 1}}};
  const std::vector<Shape> two_large{{150, 307}, {307}};
  const Cases matrices{{{3, 4}, {4, 5}},    {{2, 3, 4}, {2, 4, 5}}, {{2, 1, 3, 4}, {3, 4, 2}},
                       {{2, 3, 4}, {4, 5}}, {{3, 4}, {2, 4, 5}},    {{1, 1}, {1, 1}},
                       {{0, 3}, {3, 2}},    {{2, 0}, {0, 3}},       {{2, 3}, {3, 0}},
                       {{0, 2, 3}, {3, 2}}};
  const Cases reduced{{{2, 3, 4}}, {{5, 1, 3}}, {{1, 1, 1}}, {{2, 70, 3}}};
  const Cases lines{{{4, 5}}, {{2, 3, 4}}, {{1, 1}}, {{3, 1}}, {{0, 4}}};

  std::vector<Row> rows;
  const auto add_row = [&](Row row) { rows.push_back(std::move(row)); };

  // Arithmetic.
  add_row({"add", [](auto& x) { return Variables{x[0] + x[1]}; },
           binary([](double a, double b) { return a + b; }), two, two_large});
  add_row({"sub", [](auto& x) { return Variables{x[0] - x[1]}; },
           binary([](double a, double b) { return a - b; }), two, two_large});
  add_row({"mul", [](auto& x) { return Variables{x[0] * x[1]}; },
           binary([](double a, double b) { return a * b; }), two, two_large});
  add_row({"div", [](auto& x) { return Variables{x[0] / x[1]}; },
           binary([](double a, double b) { return a / b; }), two, two_large, 0.5, 2});
  add_row(
      {"neg", [](auto& x) { return Variables{-x[0]}; }, unary([](double x) { return -x; }), one, one_large});
  add_row({"scalar_right",
           [](auto& x) {
             return Variables{x[0] + 1.5, x[0] - 1.5, x[0] * 1.5, x[0] / 1.5};
           },
           [](const Arrays& in) {
             Arrays result;
             for (auto f : {+[](double x) { return x + 1.5; }, +[](double x) { return x - 1.5; },
                            +[](double x) { return x * 1.5; }, +[](double x) { return x / 1.5; }})
               result.push_back(unary(f)(in)[0]);
             return result;
           },
           one, one_large});
  add_row({"scalar_left",
           [](auto& x) {
             return Variables{1.5 + x[0], 1.5 - x[0], 1.5 * x[0], 1.5 / x[0]};
           },
           [](const Arrays& in) {
             Arrays result;
             for (auto f : {+[](double x) { return 1.5 + x; }, +[](double x) { return 1.5 - x; },
                            +[](double x) { return 1.5 * x; }, +[](double x) { return 1.5 / x; }})
               result.push_back(unary(f)(in)[0]);
             return result;
           },
           one, one_large, 0.5, 2});

  constexpr std::array exponents{2.0, 3.0, -1.0, 0.5, -0.5, 1.7, 1.0, 0.0};
  add_row({"pow_scalar",
           [=](auto& x) {
             Variables result;
             for (double p : exponents) result.push_back(pow(x[0], p));
             return result;
           },
           [=](const Arrays& in) {
             Arrays result;
             for (double p : exponents)
               result.push_back(broadcast_map(in, [p](const auto& x) { return std::pow(x[0], p); })[0]);
             return result;
           },
           one, one_large, 0.4, 2});
  add_row({"pow_tensor", [](auto& x) { return Variables{pow(x[0], x[1])}; },
           binary([](double a, double b) { return std::pow(a, b); }), two, two_large, 0.4, 2});

  // Elementwise functions.
  add_row({"abs", [](auto& x) { return Variables{abs(x[0])}; },
           unary([](double x) { return x < 0 ? -x : x; }), one, one_large});
  add_row({"sigmoid", [](auto& x) { return Variables{sigmoid(x[0])}; },
           unary([](double x) { return 1 / (1 + std::exp(-x)); }), one, one_large, -6, 6});
  add_row(
      {"clamp",
       [](auto& x) {
         return Variables{clamp(x[0], -0.75, 1.125), clamp(x[0], 0.5, infinity), clamp(x[0], -infinity, 0.5)};
       },
       [](const Arrays& in) {
         Arrays result;
         for (auto f :
              {+[](double x) { return std::min(std::max(x, -0.75), 1.125); },
               +[](double x) { return std::max(x, 0.5); }, +[](double x) { return std::min(x, 0.5); }})
           result.push_back(unary(f)(in)[0]);
         return result;
       },
       one, one_large});
  add_row({"where",
           [](auto& x) {
             const Shape shape = broadcast_shapes("where", x[0].shape(), x[1].shape());
             const Device device = x[0].device();
             return Variables{where(mask_of(shape).to(device), x[0], x[1]),
                              where(mask_for(x[1]).to(device), x[0], x[1])};
           },
           [](const Arrays& in) {
             Arrays result;
             for (bool full : {true, false}) {
               Array y = broadcast_map(in, [](const auto& x) { return x[0]; })[0];
               const Shape last{in[1].shape.dim() ? in[1].shape.back() : 1};
               const Array choice(full ? mask_of(y.shape) : mask_of(last));
               for_each_index(y.shape, [&](const Index& i) {
                 if (choice.at(full || !i.empty() ? i : Index{0}) == 0) y.at(i) = in[1].at(i);
               });
               result.push_back(y);
             }
             return result;
           },
           two, two_large});
  add_row({"exp", [](auto& x) { return Variables{exp(x[0])}; }, unary(std::exp), one, one_large});
  add_row({"log", [](auto& x) { return Variables{log(x[0])}; }, unary(std::log), one, one_large, 0.2, 4});
  add_row({"sqrt", [](auto& x) { return Variables{sqrt(x[0])}; }, unary(std::sqrt), one, one_large, 0.2, 4});
  add_row({"tanh", [](auto& x) { return Variables{tanh(x[0])}; }, unary(std::tanh), one, one_large});
  add_row({"relu", [](auto& x) { return Variables{relu(x[0])}; },
           unary([](double x) { return x > 0 ? x : 0; }), one, one_large});
  add_row({"gelu_exact", [](auto& x) { return Variables{gelu(x[0])}; }, unary(gelu_exact), one, one_large, -6,
           6});
  add_row({"gelu_tanh", [](auto& x) { return Variables{gelu(x[0], Gelu::tanh)}; }, unary(gelu_tanh), one,
           one_large, -6, 6});
  add_row({"silu", [](auto& x) { return Variables{silu(x[0])}; },
           unary([](double x) { return x / (1 + std::exp(-x)); }), one, one_large, -6, 6});
  add_row({"masked_fill",
           [](auto& x) { return Variables{masked_fill(x[0], mask_for(x[0]).to(x[0].device()), 7)}; },
           [](const Arrays& in) {
             Array y = in[0];
             const int64_t width = y.shape.dim() ? y.shape.back() : 1;
             for (size_t i = 0; i < y.values.size(); ++i)
               if (static_cast<int64_t>(i) % width % 3 == 0) y.values[i] = 7;
             return Arrays{y};
           },
           one, one_large});
  add_row({"dropout",
           [](auto& x) {
             Generator generator(dropout_seed);
             return Variables{dropout(x[0], dropout_p, generator)};
           },
           dropout_reference, Cases{{{3, 5}}, {{2, 3, 100}}, {{}}, {{1}}, {{0, 4}}}, one_large});
  add_row({"dropout_residual",
           [](auto& x) {
             Generator generator(dropout_seed);
             return Variables{dropout(x[0], dropout_p, generator, x[1])};
           },
           [](const Arrays& in) { return plus(dropout_reference({in[0]})[0], in[1]); },
           Cases{{{3, 5}, {3, 5}}, {{2, 3, 100}, {2, 3, 100}}, {{}, {}}, {{1}, {1}}, {{0, 4}, {0, 4}}},
           {one_large[0], one_large[0]}});

  // Products.
  add_row({"matmul",
           [](auto& x) { return Variables{matmul(x[0], x[1])}; },
           matmul_reference,
           matrices,
           {{4, 70, 90}, {90, 60}}});
  add_row({"linear",
           [](auto& x) { return Variables{linear(x[0], x[1])}; },
           linear_reference,
           Cases{{{3, 4}, {5, 4}},
                 {{2, 3, 4}, {2, 4}},
                 {{4}, {3, 4}},
                 {{1, 1}, {1, 1}},
                 {{0, 3}, {2, 3}},
                 {{2, 0}, {3, 0}},
                 {{2, 3}, {0, 3}}},
           {{3, 90, 70}, {60, 70}}});
  add_row({"linear_bias",
           [](auto& x) { return Variables{linear(x[0], x[1], x[2])}; },
           linear_reference,
           Cases{{{3, 4}, {5, 4}, {5}},
                 {{2, 3, 4}, {2, 4}, {2}},
                 {{4}, {3, 4}, {3}},
                 {{1, 1}, {1, 1}, {1}},
                 {{0, 3}, {2, 3}, {2}},
                 {{2, 0}, {3, 0}, {3}},
                 {{2, 3}, {0, 3}, {0}}},
           {{3, 90, 70}, {60, 70}, {60}}});

  add_row({"linear_residual",
           [](auto& x) { return Variables{linear(x[0], x[1], x[2], x[3])}; },
           [](const Arrays& in) {
             return plus(linear_reference({in[0], in[1], in[2]})[0], in[3]);
           },
           Cases{{{3, 4}, {5, 4}, {5}, {3, 5}},
                 {{2, 3, 4}, {2, 4}, {2}, {2, 3, 2}},
                 {{4}, {3, 4}, {3}, {3}},
                 {{1, 1}, {1, 1}, {1}, {1, 1}},
                 {{0, 3}, {2, 3}, {2}, {0, 2}},
                 {{2, 0}, {3, 0}, {3}, {2, 3}}},
           {{3, 90, 70}, {60, 70}, {60}, {3, 90, 60}}});
  for (const Gelu form : {Gelu::exact, Gelu::tanh})
    add_row({form == Gelu::exact ? "mlp_exact" : "mlp_tanh",
             [form](auto& x) { return Variables{mlp(x[0], x[1], x[2], x[3], x[4], x[5], form)}; },
             [form](const Arrays& in) {
               Array hidden = linear_reference({in[0], in[1], in[2]})[0];
               for (double& value : hidden.values)
                 value = form == Gelu::exact ? gelu_exact(value) : gelu_tanh(value);
               return plus(linear_reference({hidden, in[3], in[4]})[0], in[5]);
             },
             Cases{{{3, 2}, {4, 2}, {4}, {3, 4}, {3}, {3, 3}},
                   {{2, 3, 4}, {8, 4}, {8}, {2, 8}, {2}, {2, 3, 2}},
                   {{4}, {3, 4}, {3}, {2, 3}, {2}, {2}},
                   {{0, 3}, {2, 3}, {2}, {1, 2}, {1}, {0, 1}}},
             {{3, 96, 64}, {128, 64}, {128}, {64, 128}, {64}, {3, 96, 64}}});
  // Ops that add into the gradient of a value that others use, too.
  add_row({"linear_of_used",
           [](auto& x) {
             const Variable y = x[0] * 2;
             return Variables{y - linear(linear(y, x[1]), x[1])};
           },
           [](const Arrays& in) {
             Array y = scaled(in[0], 2);
             return plus(y, scaled(linear_reference({linear_reference({y, in[1]})[0], in[1]})[0], -1));
           },
           Cases{{{3, 4}, {4, 4}}, {{2, 3, 2}, {2, 2}}, {{1, 1}, {1, 1}}, {{0, 3}, {3, 3}}},
           {{3, 90, 70}, {70, 70}}});

  // Reductions.
  const std::vector<Shape> reduced_large{{70, 30, 40}};
  for (const auto& [suffix, axes, keep] : std::vector<std::tuple<std::string, std::vector<int>, bool>>{
           {"all", {}, false}, {"last", {-1}, true}, {"first", {0}, false}, {"outer", {0, 2}, true}}) {
    Cases with_empty = reduced;
    with_empty.push_back({{0, 3, 2}});
    with_empty.push_back({{3, 2, 0}});
    add_row({"sum_" + suffix, [=](auto& x) { return Variables{sum(x[0], axes, keep)}; },
             reduction(axes, keep, total), with_empty, reduced_large});
    add_row({"mean_" + suffix, [=](auto& x) { return Variables{mean(x[0], axes, keep)}; },
             reduction(axes, keep, average), reduced, reduced_large});
    add_row({"var_" + suffix, [=](auto& x) { return Variables{var(x[0], axes, keep)}; },
             reduction(axes, keep, variance), Cases{{{2, 3, 4}}, {{5, 2, 3}}, {{2, 70, 3}}}, reduced_large});
    add_row({"var_of_all_" + suffix, [=](auto& x) { return Variables{var(x[0], axes, keep, 0)}; },
             reduction(axes, keep, variance_of_all), reduced, reduced_large});
  }
  for (const auto& [suffix, axis, keep] : std::vector<std::tuple<std::string, int, bool>>{
           {"first", 0, false}, {"middle", 1, true}, {"last", -1, false}}) {
    Cases with_empty = reduced;
    with_empty.push_back({axis == 0 ? Shape{3, 0, 2} : Shape{0, 3, 2}});
    add_row({"max_" + suffix, [=](auto& x) { return Variables{max(x[0], axis, keep)}; },
             reduction({axis}, keep, largest), with_empty, reduced_large});
    add_row({"min_" + suffix, [=](auto& x) { return Variables{min(x[0], axis, keep)}; },
             reduction({axis}, keep, smallest), with_empty, reduced_large});
    add_row({"logsumexp_" + suffix, [=](auto& x) { return Variables{logsumexp(x[0], axis, keep)}; },
             reduction({axis}, keep, log_sum_exp), with_empty, reduced_large});
  }

  // Along one axis.
  const std::vector<Shape> lines_large{{12, 110, 37}};
  for (const auto& [suffix, axis] :
       std::vector<std::pair<std::string, int>>{{"last", -1}, {"first", 0}, {"second", 1}}) {
    add_row({"softmax_" + suffix, [=](auto& x) { return Variables{softmax(x[0], axis)}; },
             [=](const Arrays& in) { return map_lines(in[0], axis, softmax_line); }, lines, lines_large});
    add_row({"log_softmax_" + suffix, [=](auto& x) { return Variables{log_softmax(x[0], axis)}; },
             [=](const Arrays& in) { return map_lines(in[0], axis, log_softmax_line); }, lines, lines_large});
    add_row({"cumsum_" + suffix, [=](auto& x) { return Variables{cumsum(x[0], axis)}; },
             [=](const Arrays& in) { return map_lines(in[0], axis, running_sums); }, lines, lines_large});
  }
  add_row({"layer_norm",
           [](auto& x) { return Variables{layer_norm(x[0], x[1])}; },
           layer_norm_reference,
           Cases{{{4, 6}, {6}}, {{2, 3, 5}, {5}}, {{7}, {7}}, {{1, 1}, {1}}, {{0, 4}, {4}}},
           {{12, 110, 37}, {37}}});
  add_row({"layer_norm_bias",
           [](auto& x) { return Variables{layer_norm(x[0], x[1], x[2])}; },
           layer_norm_reference,
           Cases{{{4, 6}, {6}, {6}},
                 {{2, 3, 5}, {5}, {5}},
                 {{7}, {7}, {7}},
                 {{1, 1}, {1}, {1}},
                 {{0, 4}, {4}, {4}}},
           {{12, 110, 37}, {37}, {37}}});
  add_row({"rms_norm",
           [](auto& x) { return Variables{rms_norm(x[0], x[1])}; },
           rms_norm_reference,
           Cases{{{4, 6}, {6}}, {{2, 3, 5}, {5}}, {{7}, {7}}, {{1, 1}, {1}}, {{0, 4}, {4}}},
           {{12, 110, 37}, {37}}});

  const auto norm_of_used = [&](const char* name, auto norm, auto reference, int weights) {
    Cases cases{{{4, 6}}, {{2, 3, 5}}, {{7}}, {{0, 4}}};
    std::vector<Shape> large{{12, 110, 37}};
    const auto complete = [&](std::vector<Shape>& shapes) {
      for (int i = 0; i < weights; ++i) shapes.push_back({shapes[0].back()});
    };
    for (auto& shapes : cases) complete(shapes);
    complete(large);
    add_row({name,
             [norm](auto& x) {
               Variables inputs = x;
               inputs[0] = x[0] * 2;
               return Variables{inputs[0] - norm(inputs)};
             },
             [reference](const Arrays& in) {
               Arrays inputs = in;
               inputs[0] = scaled(in[0], 2);
               return plus(inputs[0], scaled(reference(inputs)[0], -1));
             },
             cases, large});
  };
  norm_of_used(
      "layer_norm_of_used", [](const Variables& x) { return layer_norm(x[0], x[1], x[2]); },
      layer_norm_reference, 2);
  norm_of_used(
      "rms_norm_of_used", [](const Variables& x) { return rms_norm(x[0], x[1]); }, rms_norm_reference, 1);

  // Indices.
  add_row({"embedding_tied",
           [](auto& x) {
             const Tensor indices = indices_for(embedding_indices(x[0].shape()), x[0].size(0));
             return Variables{linear(embedding(x[0], indices.to(x[0].device())), x[0])};
           },
           [](const Arrays& in) {
             return linear_reference({embedding_reference(in)[0], in[0]});
           },
           Cases{{{5, 3}}, {{1, 1}}},
           {{300, 90}}});
  add_row({"embedding",
           [](auto& x) {
             const Tensor indices = indices_for(embedding_indices(x[0].shape()), x[0].size(0));
             return Variables{embedding(x[0], indices.to(x[0].device()))};
           },
           embedding_reference,
           Cases{{{5, 3}}, {{1, 1}}, {{4, 0}}},
           {{300, 90}}});
  add_row({"cross_entropy",
           [](auto& x) {
             return Variables{cross_entropy(x[0], targets_for(x[0].shape()).to(x[0].device()), ignored)};
           },
           [](const Arrays& in) { return cross_entropy_with(in, 1, 0); },
           Cases{{{5, 7}}, {{2, 3, 4}}, {{6}}, {{1, 1}}, {{0, 4}}},
           {{12, 110, 37}}});
  add_row({"cross_entropy_of_slice",
           [](auto& x) {
             const Variable part = slice(x[0], -1, 1, x[0].size(-1) - 1);
             return Variables{cross_entropy(part, targets_for(part.shape()).to(x[0].device()), ignored)};
           },
           [](const Arrays& in) {
             Shape shape = in[0].shape;
             shape[-1] -= 2;
             return cross_entropy_with({taken(in[0], shape,
                                              [](Index i) {
                                                ++i.back();
                                                return i;
                                              })[0]},
                                       1, 0);
           },
           Cases{{{5, 7}}, {{2, 3, 5}}, {{0, 4}}},
           {{12, 110, 37}}});
  add_row({"cross_entropy_smoothed",
           [](auto& x) {
             return Variables{cross_entropy(x[0], targets_for(x[0].shape()).to(x[0].device()), ignored, 0.2)};
           },
           [](const Arrays& in) { return cross_entropy_with(in, 0.8, 0.2); },
           Cases{{{5, 7}}, {{2, 3, 4}}, {{6}}, {{1, 1}}, {{0, 4}}},
           {{12, 110, 37}}});

  // Shapes.
  add_row({"reshape",
           [](auto& x) {
             return Variables{reshape(x[0], {x[0].size(-1), -1})};
           },
           [](const Arrays& in) {
             Array y = in[0];
             y.shape = {in[0].shape.back(), y.shape.numel() / in[0].shape.back()};
             return Arrays{y};
           },
           Cases{{{3, 4}}, {{2, 3, 4}}, {{1}}, {{0, 4}}}, one_large});
  add_row({"transpose", [](auto& x) { return Variables{transpose(x[0], 0, -1)}; },
           [](const Arrays& in) {
             Shape shape = in[0].shape;
             std::swap(shape[0], shape[-1]);
             return taken(in[0], shape, [](Index i) {
               std::swap(i.front(), i.back());
               return i;
             });
           },
           Cases{{{3, 4}}, {{2, 3, 4}}, {{1, 1}}, {{0, 4}}}, one_large});
  add_row({"permute",
           [](auto& x) {
             return Variables{permute(x[0], {2, 0, -2})};
           },
           [](const Arrays& in) {
             const Shape& s = in[0].shape;
             return taken(in[0], {s[2], s[0], s[1]}, [](const Index& i) { return Index{i[1], i[2], i[0]}; });
           },
           Cases{{{2, 3, 4}}, {{1, 1, 1}}, {{0, 2, 3}}}, lines_large});
  add_row({"slice", [](auto& x) { return Variables{slice(x[0], 1, 1, x[0].size(1), 2)}; },
           [](const Arrays& in) {
             Shape shape = in[0].shape;
             shape[1] = shape[1] / 2;
             return taken(in[0], shape, [](Index i) {
               i[1] = 1 + 2 * i[1];
               return i;
             });
           },
           Cases{{{3, 5}}, {{2, 4, 3}}, {{1, 1}}, {{0, 3}}}, one_large});
  add_row({"expand",
           [](auto& x) {
             return Variables{expand(x[0], {2, x[0].size(0), 4})};
           },
           [](const Arrays& in) {
             return taken(in[0], {2, in[0].shape[0], 4}, [](const Index& i) { return Index{i[1], i[2]}; });
           },
           Cases{{{3, 1}}, {{2, 4}}, {{1, 1}}, {{0, 1}}},
           {{5000, 4}}});
  add_row({"cat",
           [](auto& x) { return Variables{cat(x, 1)}; },
           [](const Arrays& in) {
             Shape shape = in[0].shape;
             shape[1] += in[1].shape[1] + in[2].shape[1];
             Array y(shape);
             for_each_index(shape, [&](const Index& i) {
               Index at = i;
               size_t part = 0;
               while (at[1] >= in[part].shape[1]) at[1] -= in[part++].shape[1];
               y.at(i) = in[part].at(at);
             });
             return Arrays{y};
           },
           Cases{{{2, 1, 3}, {2, 4, 3}, {2, 2, 3}},
                 {{2, 3}, {2, 0}, {2, 1}},
                 {{1, 1}, {1, 1}, {1, 1}},
                 {{0, 2}, {0, 1}, {0, 3}}},
           {{150, 107}, {150, 90}, {150, 110}}});
  add_row({"stack",
           [](auto& x) {
             return Variables{stack({x[0], x[1], x[0]}, 1), stack(x, -1)};
           },
           [](const Arrays& in) {
             Shape second = in[0].shape, last = second;
             second.insert(1, 3);
             last.push_back(2);
             Array y(second), z(last);
             for_each_index(second, [&](Index i) {
               const Array& part = in[i[1] == 1 ? 1 : 0];
               double& to = y.at(i);
               i.erase(i.begin() + 1);
               to = part.at(i);
             });
             for_each_index(last, [&](Index i) {
               const Array& part = in[static_cast<size_t>(i.back())];
               double& to = z.at(i);
               i.pop_back();
               to = part.at(i);
             });
             return Arrays{y, z};
           },
           Cases{{{2, 3}, {2, 3}}, {{2, 3, 2}, {2, 3, 2}}, {{4}, {4}}, {{1, 1}, {1, 1}}, {{0, 2}, {0, 2}}},
           {{150, 107}, {150, 107}}});
  add_row({"split",
           [](auto& x) {
             return split(x[0], {1, 0, x[0].size(-1) - 1}, -1);
           },
           [](const Arrays& in) {
             Arrays result;
             int64_t start = 0;
             for (int64_t size : {int64_t{1}, int64_t{0}, in[0].shape.back() - 1}) {
               Shape shape = in[0].shape;
               shape[-1] = size;
               result.push_back(taken(in[0], shape, [start](Index i) {
                 i.back() += start;
                 return i;
               })[0]);
               start += size;
             }
             return result;
           },
           Cases{{{3, 5}}, {{2, 2, 4}}, {{1, 1}}, {{0, 2}}}, one_large});
  add_row({"split_joined",
           [](auto& x) {
             const int64_t width = x[0].size(-1);
             const auto parts = split(x[0], {1, width - 1}, -1);
             return Variables{cat(parts, -1) - cat({parts[1], parts[0]}, -1)};
           },
           [](const Arrays& in) {
             const int64_t width = in[0].shape.back();
             return plus(in[0], scaled(taken(in[0], in[0].shape,
                                             [width](Index i) {
                                               i.back() = (i.back() + 1) % width;
                                               return i;
                                             })[0],
                                       -1));
           },
           Cases{{{3, 5}}, {{2, 2, 4}}, {{0, 2}}}, one_large});
  add_row({"cast", [](auto& x) { return Variables{cast(x[0], f64)}; }, [](const Arrays& in) { return in; },
           one, one_large});
  for (Row& row : rows_of_places()) rows.push_back(std::move(row));
  return rows;
}

}  // namespace torus::testing
