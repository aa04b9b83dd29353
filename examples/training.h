// What a program that trains shows and obeys: a progress bar, a log, and Ctrl-C.
#pragma once

#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <chrono>
#include <cmath>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "torus/torus.h"

/// printf into a string.
template <class... Args>
std::string format(const char* pattern, Args... args) {
  char text[512];
  std::snprintf(text, sizeof text, pattern, args...);
  return text;
}

/// The shortest decimal that reads back as this number.
inline std::string to_text(double value) {
  char text[32];
  return {text, std::to_chars(text, text + sizeof text, value).ptr};
}

/// A file of lines, each a JSON object of numbers with all their digits.
class JsonLog {
 public:
  /// No file if `path` is empty. `append` keeps what is there.
  JsonLog(const std::string& path, bool append) : path_(path) {
    if (path.empty()) return;
    file_.open(path, append ? std::ios::app : std::ios::trunc);
    check_good();
  }

  void write(const std::vector<std::pair<std::string, double>>& entries) {
    if (path_.empty()) return;
    std::string line;
    for (const auto& [name, value] : entries)
      line +=
          (line.empty() ? "{\"" : ", \"") + name + "\": " + (std::isfinite(value) ? to_text(value) : "null");
    file_ << line << "}" << std::endl;
    check_good();
  }

 private:
  void check_good() const {
    torus::check(file_.good(), torus::Error::Kind::File, "[log] cannot write ", path_);
  }

  std::string path_;
  std::ofstream file_;
};

/// While alive, the first Ctrl-C (or SIGTERM) only makes requested() true; the second ends the program.
class Interrupt {
 public:
  Interrupt() {
    struct sigaction action = {};
    action.sa_handler = [](int) { request() = 1; };
    action.sa_flags = static_cast<int>(SA_RESETHAND);  // back to the default, so the second ends the program
    sigaction(SIGINT, &action, &old_int_);
    sigaction(SIGTERM, &action, &old_term_);
  }
  ~Interrupt() {
    sigaction(SIGINT, &old_int_, nullptr);
    sigaction(SIGTERM, &old_term_, nullptr);
  }
  Interrupt(const Interrupt&) = delete;
  Interrupt& operator=(const Interrupt&) = delete;

  static bool requested() { return request() != 0; }

 private:
  static volatile std::sig_atomic_t& request() {
    static volatile std::sig_atomic_t value = 0;
    return value;
  }

  struct sigaction old_int_ = {}, old_term_ = {};
};

/// Loss, tokens a second and time left: a bar on a terminal, otherwise about twenty lines.
class Progress {
 public:
  Progress(int64_t done, int64_t total, int64_t tokens_per_step)
      : done_(done), total_(total), tokens_per_step_(tokens_per_step) {}

  /// More steps were taken, with these losses.
  void steps(const std::vector<double>& losses) {
    const auto now = Clock::now();
    seconds_ += std::chrono::duration<double>(now - since_).count();
    since_ = now;
    const int64_t before = done_, interval = std::max<int64_t>(1, total_ / 20);
    for (double loss : losses) {
      ++done_;
      ++steps_;
      loss_ += (loss - loss_) / static_cast<double>(std::min<int64_t>(steps_, 50));
    }
    if (first_steps_ < 10) first_steps_ = steps_, first_seconds_ = seconds_;
    const bool last = done_ == total_;
    if (terminal_ ? last || seconds_ - shown_ > 0.1 : last || done_ / interval != before / interval) {
      shown_ = seconds_;
      std::printf(terminal_ ? "\r%s\033[K" : "%s\n", status().c_str());
      std::fflush(stdout);
    }
  }

  /// A line of its own. The time since the last step is not counted as training.
  void note(const std::string& line) {
    std::printf(terminal_ ? "\r%s\033[K\n" : "%s\n", line.c_str());
    std::fflush(stdout);
    since_ = Clock::now();
  }

  /// Of training, without what came in between.
  double seconds() const { return seconds_ + std::chrono::duration<double>(Clock::now() - since_).count(); }
  /// The same without the first steps, ten or a few more, in which all is allocated and chosen; of all steps
  /// where there are no others.
  double tokens_per_second() const {
    const double seconds = left_out() > 0 ? seconds_ - first_seconds_ : seconds_;
    return static_cast<double>((steps_ - left_out()) * tokens_per_step_) / seconds;
  }
  /// How many steps that leaves out.
  int64_t left_out() const { return steps_ > first_steps_ ? first_steps_ : 0; }

 private:
  using Clock = std::chrono::steady_clock;

  std::string status() const {
    std::string bar;
    if (terminal_) {
      bar = std::string(static_cast<size_t>(24 * done_ / std::max<int64_t>(1, total_)), '#');
      bar = " [" + bar + std::string(24 - bar.size(), ' ') + "]";
    }
    const auto left =
        std::lround(static_cast<double>((total_ - done_) * tokens_per_step_) / tokens_per_second());
    char text[160];
    std::snprintf(text, sizeof text, "step %ld/%ld%s  loss %.*f  %.1f k tok/s  %ld:%02ld left", long(done_),
                  long(total_), bar.c_str(), loss_ < 0.1 ? 5 : 3, loss_, tokens_per_second() / 1000,
                  left / 60, left % 60);
    return text;
  }

  int64_t done_, total_, tokens_per_step_, steps_ = 0, first_steps_ = 0;
  bool terminal_ = isatty(STDOUT_FILENO) == 1;
  double loss_ = 0;  // running mean
  double seconds_ = 0, first_seconds_ = 0, shown_ = 0;
  Clock::time_point since_ = Clock::now();
};

/// Takes steps. On a CUDA device they are captured and replayed, and nobody waits for their losses.
class Trainer {
 public:
  /// `loss` reads its batch from tensors that stay where they are. `scale`: of the loss, null for none.
  Trainer(torus::Module& model, torus::Optimizer& optimizer, torus::Device device,
          std::function<torus::Variable()> loss, torus::LossScale* scale = nullptr)
      : optimizer_(optimizer),
        scale_(scale),
        last_(torus::Tensor::zeros({2}, torus::f64, device)),
        recent_(torus::Tensor::zeros({device == torus::cpu ? 1 : 16, 2}, torus::f64, device)),
        step_(device, [this, &model, loss = std::move(loss)] {
          torus::Tape tape;
          const torus::Variable value = loss();
          if (!scale_) {
            tape.backward(value);
          } else {
            tape.backward(value, {.seed = scale_->tensor().to(value.dtype())});
          }
          const torus::Tensor norm = grad_norm(model.parameters());
          optimizer_.step(
              {.grad_norm = norm, .max_norm = 1, .loss_scale = scale_ ? scale_->tensor() : torus::Tensor()});
          if (scale_) scale_->update(norm);
          optimizer_.zero_grad();
          last_.select(0, 0).copy_(value.value());
          last_.select(0, 1).copy_(scale_ ? scale_->tensor() : norm);
        }) {}

  void step(double lr) {
    optimizer_.set_lr(lr);
    step_();
    recent_.select(0, taken_++).copy_(last_);
  }
  /// No further step before `losses`.
  bool full() const { return taken_ == recent_.size(0); }
  /// Of the steps since they were last asked for. Waits for the device.
  std::vector<double> losses() {
    const std::vector<double> numbers = recent_.to_vector<double>();
    std::vector<double> result;
    const auto taken = static_cast<size_t>(std::exchange(taken_, 0));
    for (size_t i = 0; i < taken; ++i) {
      // Steps whose scaled gradient overflows are skipped, and the scale falls, but not for ever.
      const double norm_or_scale = numbers[2 * i + 1];
      torus::check(scale_ ? norm_or_scale > 0x1p-24 : std::isfinite(norm_or_scale), torus::Error::Kind::Value,
                   "the gradient is not finite; try a lower --lr");
      result.push_back(numbers[2 * i]);
    }
    return result;
  }

 private:
  torus::Optimizer& optimizer_;
  torus::LossScale* scale_;
  torus::Tensor last_, recent_;  // loss, and norm or scale
  torus::CapturedStep step_;
  int64_t taken_ = 0;  // steps in recent_
};
