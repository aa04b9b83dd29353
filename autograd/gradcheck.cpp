#include "torus/autograd/gradcheck.h"

#include <cmath>
#include <limits>
#include <ostream>

#include "torus/autograd/tape.h"
#include "torus/core/random.h"

namespace torus {

namespace {

// A hash of every branch that kinked ops took during one call; null while no gradcheck listens.
thread_local uint64_t* branches = nullptr;

struct Evaluation {
  std::vector<Tensor> outputs;
  uint64_t branches = 0;
};

class Checker {
 public:
  Checker(const GradcheckFunction& function, const std::vector<Tensor>& inputs, const GradcheckOptions& options)
      : function_(function), options_(options) {
    for (size_t i = 0; i < inputs.size(); ++i) {
      check(inputs[i].dtype() == f64, Error::Kind::DType, "[gradcheck] input ", i, " must be f64, got ",
            inputs[i].dtype(), "; finite differences in less say nothing");
      inputs_.push_back(inputs[i].device() == cpu ? inputs[i].clone() : inputs[i].to(cpu));
      device_ = inputs[i].device();
    }
  }

  GradcheckReport run() {
    const Generator::State before = default_generator().state();
    try {
      base_ = evaluate(inputs_);
      if (options_.mode == GradcheckOptions::Mode::full) full();
      else projection();
    } catch (...) {
      default_generator().set_state(before);
      throw;
    }
    default_generator().set_state(before);
    // Empty tensors pass: they have no derivative that could be wrong.
    report_.passed = worst_ <= 1 && (report_.checked > 0 || report_.skipped == 0) && !inputs_.empty() &&
                     !base_.outputs.empty();
    std::ostringstream text;
    text << "{.mode = " << (options_.mode == GradcheckOptions::Mode::full ? "full" : "projection")
         << ", .eps = " << options_.eps << ", .tolerance = " << options_.tolerance << ", .seed = " << options_.seed
         << "}";
    report_.reproduce = text.str();
    return report_;
  }

 private:
  // On the device of the check; inputs are kept on the host, where they are changed.
  std::vector<Variable> there(const std::vector<Tensor>& inputs, bool requires_grad) const {
    std::vector<Variable> result;
    for (const Tensor& input : inputs) result.emplace_back(input.to(device_), requires_grad);
    return result;
  }

  Evaluation evaluate(const std::vector<Tensor>& inputs) {
    const NoGrad no_grad;
    manual_seed(options_.seed);
    Evaluation result;
    branches = &result.branches;
    std::vector<Variable> outputs;
    try {
      outputs = function_(there(inputs, false));
    } catch (...) {
      branches = nullptr;
      throw;
    }
    branches = nullptr;
    for (const Variable& output : outputs) {
      check(output.dtype() == f64, Error::Kind::DType, "[gradcheck] the function must stay in f64, got an output of ",
            output.dtype());
      // A view of an input would change with it.
      result.outputs.push_back(device_ == cpu ? output.value().clone() : output.value().to(cpu));
    }
    return result;
  }

  // Gradients of <seeds, outputs> for every input.
  std::vector<Tensor> analytic(const std::vector<Tensor>& seeds) {
    manual_seed(options_.seed);
    Tape tape;
    const std::vector<Variable> leaves = there(inputs_, true);
    const auto outputs = function_(leaves);
    std::vector<Tensor> used;
    for (size_t i = 0; i < outputs.size(); ++i)  // none of a constant, nor of an output left out
      used.push_back(outputs[i].requires_grad() && seeds[i].defined() ? seeds[i].to(device_) : Tensor());
    tape.backward(outputs, used);
    std::vector<Tensor> grads;
    for (size_t i = 0; i < leaves.size(); ++i) {
      const Tensor& grad = leaves[i].grad();
      grads.push_back(grad.defined() ? grad.to(cpu).contiguous() : Tensor::zeros(inputs_[i].shape(), f64));
    }
    return grads;
  }

  void compare(double analytic, double numeric, double scale, int64_t input, int64_t input_index, int64_t output,
               int64_t output_index) {
    ++report_.checked;
    double excess = std::abs(analytic - numeric) / (options_.tolerance * (scale + std::abs(numeric)));
    if (std::isnan(excess)) excess = std::numeric_limits<double>::infinity();
    if (excess <= worst_ && report_.checked > 1) return;
    worst_ = excess;
    report_.input = input, report_.input_index = input_index;
    report_.output = output, report_.output_index = output_index;
    report_.analytic = analytic, report_.numeric = numeric;
  }

  void full() {
    // One backward an output element gives the rows of the Jacobian.
    std::vector<std::vector<std::vector<Tensor>>> rows;  // [output][output element][input]
    for (size_t o = 0; o < base_.outputs.size(); ++o) {
      auto& of_output = rows.emplace_back();
      for (int64_t j = 0; j < base_.outputs[o].numel(); ++j) {
        std::vector<Tensor> seeds(base_.outputs.size());
        seeds[o] = Tensor::zeros(base_.outputs[o].shape(), f64);
        seeds[o].mutable_data<double>()[j] = 1;
        of_output.push_back(analytic(seeds));
      }
    }
    for (size_t i = 0; i < inputs_.size(); ++i)
      for (int64_t k = 0; k < inputs_[i].numel(); ++k) {
        std::vector<Tensor> moved = inputs_;
        moved[i] = inputs_[i].clone();
        const double at = inputs_[i].data<double>()[k], step = options_.eps * std::max(1.0, std::abs(at));
        moved[i].mutable_data<double>()[k] = at + step;
        const Evaluation up = evaluate(moved);
        moved[i].mutable_data<double>()[k] = at - step;
        const Evaluation down = evaluate(moved);
        const bool kink = up.branches != base_.branches || down.branches != base_.branches;
        for (size_t o = 0; o < base_.outputs.size(); ++o)
          for (int64_t j = 0; j < base_.outputs[o].numel(); ++j) {
            const double high = up.outputs[o].data<double>()[j], low = down.outputs[o].data<double>()[j];
            if (kink || (std::isinf(high) && high == low)) {
              ++report_.skipped;
              continue;
            }
            compare(rows[o][static_cast<size_t>(j)][i].data<double>()[k], (high - low) / (2 * step), 1,
                    static_cast<int64_t>(i), k, static_cast<int64_t>(o), j);
          }
      }
  }

  static double dot(const Tensor& a, const Tensor& b) {
    double sum = 0;
    for (int64_t i = 0; i < a.numel(); ++i)
      if (b.data<double>()[i] != 0) sum += a.data<double>()[i] * b.data<double>()[i];
    return sum;
  }

  void projection() {
    constexpr int draws = 20;
    Generator directions(options_.seed + 1);
    std::vector<Tensor> seeds;
    for (const Tensor& output : base_.outputs) {
      Tensor seed = randn(output.shape(), 0, 1, f64, directions);
      for (int64_t j = 0; j < output.numel(); ++j)  // an infinite output has no derivative to compare
        if (std::isinf(output.data<double>()[j])) {
          seed.mutable_data<double>()[j] = 0;
          ++report_.skipped;
        }
      seeds.push_back(seed);
    }
    const std::vector<Tensor> grads = analytic(seeds);
    double step = options_.eps;
    for (int draw = 0; draw < draws; ++draw, step /= 2) {
      std::vector<Tensor> up = inputs_, down = inputs_, direction;
      double slope = 0, size = 0;
      for (size_t i = 0; i < inputs_.size(); ++i) {
        direction.push_back(randn(inputs_[i].shape(), 0, 1, f64, directions));
        up[i] = inputs_[i].clone();
        down[i] = inputs_[i].clone();
        for (int64_t k = 0; k < inputs_[i].numel(); ++k) {
          up[i].mutable_data<double>()[k] += step * direction[i].data<double>()[k];
          down[i].mutable_data<double>()[k] -= step * direction[i].data<double>()[k];
          size += std::abs(grads[i].data<double>()[k] * direction[i].data<double>()[k]);
        }
        slope += dot(grads[i], direction[i]);
      }
      const Evaluation high = evaluate(up), low = evaluate(down);
      if (high.branches != base_.branches || low.branches != base_.branches) {
        ++report_.skipped;
        continue;
      }
      double numeric = 0;
      for (size_t o = 0; o < seeds.size(); ++o)
        numeric += dot(high.outputs[o], seeds[o]) - dot(low.outputs[o], seeds[o]);
      // Terms of both signs cancel, so the error is judged by the size of the terms.
      compare(slope, numeric / (2 * step), 1 + size / 10, -1, -1, -1, -1);
      return;
    }
    fail(Error::Kind::Value, "[gradcheck] every one of ", draws, " random steps crossed a kink; use the full mode");
  }

  const GradcheckFunction& function_;
  GradcheckOptions options_;
  std::vector<Tensor> inputs_;
  Device device_;
  Evaluation base_;
  GradcheckReport report_;
  double worst_ = 0;
};

}  // namespace

GradcheckReport gradcheck(const GradcheckFunction& function, const std::vector<Tensor>& inputs,
                          const GradcheckOptions& options) {
  return Checker(function, inputs, options).run();
}

std::ostream& operator<<(std::ostream& out, const GradcheckReport& report) {
  out << (report.passed ? "gradcheck passed" : "gradcheck FAILED") << ": " << report.checked
      << " derivatives compared, " << report.skipped << " skipped; worst";
  if (report.input >= 0)
    out << " d output " << report.output << '[' << report.output_index << "] / d input " << report.input << '['
        << report.input_index << ']';
  return out << ": analytic " << report.analytic << ", numeric " << report.numeric << "; options "
             << report.reproduce;
}

bool kinks_wanted() { return branches != nullptr; }

void note_kink(const Tensor& side) {
  if (!branches) return;
  uint64_t hash = *branches ^ 0xcbf29ce484222325;  // FNV-1a over the signs
  const Tensor flat = side.to(cpu).to(f64).contiguous();
  for (int64_t i = 0; i < flat.numel(); ++i)
    hash = (hash ^ static_cast<uint64_t>(flat.data<double>()[i] > 0)) * 0x100000001b3;
  *branches = hash;
}

}  // namespace torus
