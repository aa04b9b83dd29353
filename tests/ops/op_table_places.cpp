#include <numeric>
#include <string>
#include <utility>

#include "ops/op_table.h"

namespace torus::testing {

namespace {

using Cases = std::vector<std::vector<Shape>>;
using Sizes = std::vector<int64_t>;

// x's shape with `count` places along the axis (none if there is nothing to name), and 1 along `single`.
Tensor places_for(const Shape& shape, int axis, int64_t count, int single = -1) {
  Shape places = shape;
  places[axis] = shape[axis] > 0 ? count : 0;
  if (single >= 0) places[single] = 1;
  return indices_for(places, shape[axis]);
}

// The index whose axis is replaced by what `places` holds there.
Index redirected(Index i, int axis, const Array& places) {
  i[static_cast<size_t>(axis)] = static_cast<int64_t>(places.at(i));
  return i;
}

Arrays gather_reference(const Array& x, int axis, const Tensor& places) {
  Shape shape = x.shape;
  shape[axis] = places.size(axis);
  const Array at(places);
  return taken(x, shape, [&](const Index& i) { return redirected(i, axis, at); });
}

// The index counted from `before` on along an axis, around it.
Index wrapped(Index i, size_t axis, int64_t before, int64_t length) {
  i[axis] = ((i[axis] - before) % length + length) % length;
  return i;
}

// Sums over every letter; `sizes` of all of them are found in the operands.
Arrays einsum_reference(const std::string& equation, const Arrays& in) {
  const size_t comma = equation.find(','), arrow = equation.find("->");
  const std::string terms[] = {equation.substr(0, comma), equation.substr(comma + 1, arrow - comma - 1),
                               equation.substr(arrow + 2)};
  std::string letters = terms[2];
  Shape all, shape;
  for (int term : {2, 0, 1})
    for (char letter : terms[term])
      if (letters.find(letter) == std::string::npos) letters.push_back(letter);
  for (char letter : letters) {
    const size_t term = terms[0].find(letter) == std::string::npos ? 1 : 0;
    all.push_back(in[term].shape[static_cast<int>(terms[term].find(letter))]);
  }
  const auto index = [&](const Index& i, const std::string& term) {
    Index result;
    for (char letter : term) result.push_back(i[letters.find(letter)]);
    return result;
  };
  Array y(all.slice(0, static_cast<int>(terms[2].size())));
  for_each_index(all, [&](const Index& i) {
    y.at(index(i, terms[2])) += in[0].at(index(i, terms[0])) * in[1].at(index(i, terms[1]));
  });
  return {y};
}

// Calls f(index in the grid x, index in the tokens) for every element of every patch.
template <class F>
void for_each_patch_element(const Shape& x, const Sizes& patch, const Sizes& stride, F f) {
  const int axes = x.dim() - 2;
  Shape count;
  for (int axis = 0; axis < axes; ++axis) {
    const auto a = static_cast<size_t>(axis);
    count.push_back((x[2 + axis] - patch[a]) / stride[a] + 1);
  }
  const Shape inside{std::span(patch)};
  for_each_index({x[0], x[1]}, [&](const Index& bc) {
    int64_t token = 0;
    for_each_index(count, [&](const Index& n) {
      int64_t element = bc[1] * inside.numel();
      for_each_index(inside, [&](const Index& p) {
        Index at = bc;
        for (size_t a = 0; a < n.size(); ++a) at.push_back(n[a] * stride[a] + p[a]);
        f(at, Index{bc[0], token, element++});
      });
      ++token;
    });
  });
}

Shape tokens_shape(const Shape& x, const Sizes& patch, const Sizes& stride) {
  Shape shape{x[0], 1, x[1]};
  for (size_t a = 0; a < patch.size(); ++a) {
    shape[1] *= (x[2 + static_cast<int>(a)] - patch[a]) / stride[a] + 1;
    shape[2] *= patch[a];
  }
  return shape;
}

Arrays fft_reference(const Array& x, std::vector<int> axes, bool inverse) {
  const int dim = x.shape.dim();
  if (axes.empty())
    for (int axis = 0; axis < dim - 1; ++axis) axes.push_back(axis);
  Array from = x;
  for (int axis : axes) {
    const auto at = static_cast<size_t>(axis < 0 ? axis + dim : axis);
    const int64_t n = x.shape[static_cast<int>(at)];
    Array to(x.shape);
    for_each_index(x.shape, [&](const Index& k) {
      Index i = k;
      double sum = 0;
      for (i[at] = 0; i[at] < n; ++i[at]) {
        const double angle = (inverse ? 2 : -2) * M_PI * static_cast<double>((k[at] - n / 2) * (i[at] - n / 2)) /
                             static_cast<double>(n);
        Index part = i;
        part.back() = 0;
        const double real = from.at(part);
        part.back() = 1;
        const double imaginary = from.at(part);
        sum += k.back() == 0 ? real * std::cos(angle) - imaginary * std::sin(angle)
                             : real * std::sin(angle) + imaginary * std::cos(angle);
      }
      to.at(k) = sum / std::sqrt(static_cast<double>(n));
    });
    from = to;
  }
  return {from};
}

Arrays rotary_reference(const Array& x, int64_t offset) {
  Array y = x;
  const int64_t pairs = x.shape.back() / 2;
  for_each_index(x.shape, [&](Index i) {
    const int64_t token = i[i.size() - 2] + offset, channel = i.back(), pair = channel % pairs;
    const double angle = static_cast<double>(token) /
                         std::pow(10000.0, 2.0 * static_cast<double>(pair) / static_cast<double>(2 * pairs));
    double& to = y.at(i);
    i.back() = pair;
    const double a = x.at(i);
    i.back() = pair + pairs;
    const double b = x.at(i);
    to = channel < pairs ? a * std::cos(angle) - b * std::sin(angle)
                         : b * std::cos(angle) + a * std::sin(angle);
  });
  return {y};
}

}  // namespace

std::vector<Row> rows_of_places() {
  std::vector<Row> rows;
  const auto add_row = [&](Row row) { rows.push_back(std::move(row)); };

  // By index.
  const Cases picked{{{3, 4}}, {{2, 5, 3}}, {{1, 1}}, {{0, 3}}, {{3, 0}}};
  for (const auto& [suffix, axis, single] : std::vector<std::tuple<std::string, int, int>>{
           {"first", 0, -1}, {"second", 1, -1}, {"shared", 1, 0}}) {
    add_row({"gather_" + suffix,
             [=](auto& x) {
               const Tensor places = places_for(x[0].shape(), axis, 6, single);
               return Variables{gather(x[0], axis, places.to(x[0].device()))};
             },
             [=](const Arrays& in) {
               return gather_reference(in[0], axis, places_for(in[0].shape, axis, 6, single));
             },
             picked,
             {{60, 70, 11}}});
    // The source has two elements more along the axis than x.
    add_row({"scatter_add_" + suffix,
             [=](auto& x) {
               const int64_t bound = x[0].size(axis);
               Shape shape = x[1].shape();
               if (single >= 0) shape[single] = 1;
               return Variables{scatter_add(x[0], axis, indices_for(shape, bound).to(x[0].device()), x[1])};
             },
             [=](const Arrays& in) {
               Array y = in[0];
               Shape shape = in[1].shape;
               if (single >= 0) shape[single] = 1;
               const Array places(indices_for(shape, y.shape[axis]));
               for_each_index(in[1].shape,
                              [&](const Index& i) { y.at(redirected(i, axis, places)) += in[1].at(i); });
               return Arrays{y};
             },
             axis == 0 ? Cases{{{3, 4}, {5, 4}}, {{2, 5, 3}, {4, 5, 3}}, {{1, 1}, {3, 1}}, {{2, 3}, {0, 3}}}
                       : Cases{{{3, 4}, {3, 6}}, {{2, 5, 3}, {2, 7, 3}}, {{1, 1}, {1, 3}}, {{0, 3}, {0, 5}}},
             axis == 0 ? std::vector<Shape>{{20, 50, 11}, {90, 50, 11}}
                       : std::vector<Shape>{{40, 20, 11}, {40, 90, 11}}});
  }
  for (const auto& [suffix, axis] : std::vector<std::pair<std::string, int>>{{"first", 0}, {"last", -1}}) {
    const auto places = [=](const Shape& shape) {
      return indices_for({shape[axis] > 0 ? 6 : 0}, shape[axis]);
    };
    add_row(
        {"index_select_" + suffix,
         [=](auto& x) { return Variables{index_select(x[0], axis, places(x[0].shape()).to(x[0].device()))}; },
         [=](const Arrays& in) {
           const int at = axis < 0 ? in[0].shape.dim() - 1 : 0;
           Shape shape = in[0].shape, of_places;
           for (int i = 0; i < shape.dim(); ++i) of_places.push_back(i == at ? places(shape).numel() : 1);
           return gather_reference(in[0], at, places(shape).reshape(of_places));
         },
         picked,
         {{60, 70, 11}}});
  }

  // Around and beyond the edges.
  const std::vector<Shape> moved_large{{30, 40, 50}};
  add_row({"pad_constant",
           [](auto& x) {
             return Variables{pad(x[0], {{1, 2}, {0, 3}}, {-1, 0}, Padding::constant, 0.5)};
           },
           [](const Arrays& in) {
             Shape shape = in[0].shape;
             shape[-1] += 3;
             shape[0] += 3;
             Array y(shape);
             for_each_index(shape, [&](Index i) {
               double& to = y.at(i);
               i.back() -= 1;
               const bool inside = i.back() >= 0 && i.back() < in[0].shape.back() && i[0] < in[0].shape[0];
               to = inside ? in[0].at(i) : 0.5;
             });
             return Arrays{y};
           },
           Cases{{{3, 4}}, {{2, 3, 4}}, {{1, 1}}, {{0, 4}}, {{2, 0}}}, moved_large});
  // Short axes are gone around more than once.
  add_row({"pad_circular",
           [](auto& x) {
             return Variables{pad(x[0], {{7, 2}, {1, 4}}, {-1, 0}, Padding::circular)};
           },
           [](const Arrays& in) {
             const Shape& x = in[0].shape;
             Shape shape = x;
             shape[-1] += 9;
             shape[0] += 5;
             return taken(in[0], shape, [&](const Index& i) {
               return wrapped(wrapped(i, i.size() - 1, 7, x.back()), 0, 1, x[0]);
             });
           },
           Cases{{{3, 4}}, {{2, 3, 4}}, {{1, 1}}, {{2, 0, 3}}}, moved_large});
  add_row({"roll",
           [](auto& x) {
             return Variables{roll(x[0], {2, -5}, {0, -1})};
           },
           [](const Arrays& in) {
             const Shape& x = in[0].shape;
             return taken(in[0], x, [&](const Index& i) {
               return wrapped(wrapped(i, i.size() - 1, -5, x.back()), 0, 2, x[0]);
             });
           },
           Cases{{{3, 4}}, {{2, 3, 4}}, {{1, 1}}, {{0, 4}}, {{2, 0, 3}}}, moved_large});

  // Patches.
  struct Folding {
    std::string suffix;
    Sizes patch, stride;
    std::vector<Shape> grids;
    Shape large;
  };
  const std::vector<Folding> foldings{
      {"1d", {2}, {2}, {{2, 3, 6}, {1, 1, 2}, {0, 2, 4}}, {4, 30, 200}},
      {"2d", {2, 3}, {2, 3}, {{2, 2, 4, 6}, {1, 1, 2, 3}, {2, 0, 2, 3}}, {2, 3, 60, 90}},
      {"3d", {2, 1, 3}, {2, 1, 3}, {{2, 2, 4, 2, 3}, {1, 1, 2, 1, 3}, {0, 1, 2, 1, 3}}, {2, 3, 20, 11, 30}},
      {"overlap", {3, 2}, {2, 1}, {{2, 2, 5, 4}, {1, 1, 3, 2}, {0, 1, 3, 2}}, {2, 3, 61, 40}},
      {"gaps", {2, 1}, {3, 2}, {{2, 2, 5, 3}, {1, 1, 2, 1}, {0, 1, 2, 1}}, {2, 3, 62, 41}}};
  for (const auto& [suffix, patch, stride, grids, large] : foldings) {
    Cases of_grids, of_tokens;
    for (const Shape& grid : grids) {
      of_grids.push_back({grid});
      of_tokens.push_back({tokens_shape(grid, patch, stride)});
    }
    add_row({"unfold_" + suffix,
             [=](auto& x) { return Variables{unfold(x[0], patch, stride)}; },
             [=](const Arrays& in) {
               Array y(tokens_shape(in[0].shape, patch, stride));
               for_each_patch_element(in[0].shape, patch, stride,
                                      [&](const Index& x, const Index& t) { y.at(t) = in[0].at(x); });
               return Arrays{y};
             },
             of_grids,
             {large}});
    // The grid of the case whose tokens have this shape.
    const auto grid_of = [=](const Shape& tokens) {
      for (const Shape& grid : grids)
        if (tokens_shape(grid, patch, stride) == tokens) return grid;
      return large;
    };
    add_row({"fold_" + suffix,
             [=](auto& x) {
               const Shape grid = grid_of(x[0].shape());
               return Variables{fold(x[0], Sizes(grid.begin() + 2, grid.end()), patch, stride)};
             },
             [=](const Arrays& in) {
               Array y(grid_of(in[0].shape));
               for_each_patch_element(y.shape, patch, stride,
                                      [&](const Index& x, const Index& t) { y.at(x) += in[0].at(t); });
               return Arrays{y};
             },
             of_tokens,
             {tokens_shape(large, patch, stride)}});
  }

  // Products named by letters.
  struct Sum {
    std::string name, equation;
    Cases cases;
    std::vector<Shape> large;
  };
  const std::vector<Sum> sums{
      {"scores",
       "bhqd,bhkd->bhqk",
       {{{2, 2, 3, 4}, {2, 2, 2, 4}}, {{1, 1, 1, 1}, {1, 1, 1, 1}}, {{2, 0, 3, 4}, {2, 0, 2, 4}}},
       {{2, 3, 30, 20}, {2, 3, 40, 20}}},
      {"turned",
       "abc,cbd->da",
       {{{2, 3, 4}, {4, 3, 2}}, {{1, 1, 1}, {1, 1, 1}}, {{2, 0, 3}, {3, 0, 4}}},
       {{20, 20, 10}, {10, 20, 30}}},
      {"many_rows",
       "bnc,cd->bnd",
       {{{2, 3, 4}, {4, 2}}, {{1, 1, 1}, {1, 1}}, {{2, 3, 0}, {0, 2}}},
       {{4, 30, 20}, {20, 40}}},
      {"outer", "i,jk->kij", {{{3}, {2, 4}}, {{1}, {1, 1}}, {{0}, {2, 3}}}, {{40}, {20, 30}}},
      {"dot", "ij,ji->", {{{3, 4}, {4, 3}}, {{1, 1}, {1, 1}}, {{0, 2}, {2, 0}}}, {{50, 60}, {60, 50}}},
      {"lone",
       "axb,byc->ac",
       {{{2, 3, 4}, {4, 2, 3}}, {{1, 1, 1}, {1, 1, 1}}, {{2, 0, 3}, {3, 2, 2}}},
       {{30, 3, 20}, {20, 2, 30}}},
      {"batched_last",
       "ijb,jkb->bik",
       {{{2, 3, 4}, {3, 2, 4}}, {{1, 1, 1}, {1, 1, 1}}, {{2, 3, 0}, {3, 2, 0}}},
       {{20, 30, 10}, {30, 20, 10}}}};
  for (const auto& [name, equation, cases, large] : sums)
    add_row({"einsum_" + name, [=](auto& x) { return Variables{einsum(equation, x[0], x[1])}; },
             [=](const Arrays& in) { return einsum_reference(equation, in); }, cases, large});

  // Complex numbers to frequencies and back.
  for (const auto& [name, axes, inverse] : std::vector<std::tuple<std::string, std::vector<int>, bool>>{
           {"fft", {}, false}, {"fft_inverse", {-2, 0}, true}})
    add_row({name, [axes = axes, inverse = inverse](auto& x) { return Variables{fft(x[0], axes, inverse)}; },
             [axes = axes, inverse = inverse](const Arrays& in) { return fft_reference(in[0], axes, inverse); },
             Cases{{{3, 4, 2}}, {{2, 3, 5, 2}}, {{1, 7, 2}}, {{1, 1, 2}}, {{0, 3, 2}}},
             {{34, 9, 60, 2}}});
  // Frequencies 1, 4, 7, ... are measured.
  add_row({"data_consistency",
           [](auto& x) {
             Tensor mask = Tensor::zeros({x[0].size(-2), 1});
             if (mask.numel() > 1) mask.slice(0, 1, mask.size(0), 3).fill_(1);
             return Variables{data_consistency(x[0], x[1], mask, {-2})};
           },
           [](const Arrays& in) {
             Array k = fft_reference(in[0], {-2}, false)[0];
             for_each_index(k.shape, [&](const Index& i) {
               if (i[i.size() - 2] % 3 == 1) k.at(i) = in[1].at(i);
             });
             return fft_reference(k, {-2}, true);
           },
           Cases{{{3, 4, 2}, {3, 4, 2}},
                 {{2, 3, 5, 2}, {2, 3, 5, 2}},
                 {{1, 1, 2}, {1, 1, 2}},
                 {{0, 3, 2}, {0, 3, 2}}},
           {{34, 9, 60, 2}, {34, 9, 60, 2}}});

  add_row({"rotary",
           [](auto& x) {
             const RotaryOptions options{.offset = 5, .dtype = f64};
             const Tensor codes = rotary_codes(x[0].size(-2), x[0].size(-1), options);
             return Variables{rotary(x[0], codes.to(x[0].device()))};
           },
           [](const Arrays& in) { return rotary_reference(in[0], 5); },
           Cases{{{2, 2, 3, 6}}, {{4, 8}}, {{1, 2}}, {{2, 0, 4}}, {{0, 3, 2}}},
           {{3, 4, 50, 34}}});
  return rows;
}

}  // namespace torus::testing
