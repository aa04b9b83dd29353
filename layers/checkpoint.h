// Checkpoints: all that training continues from, in one HDF5 file.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "torus/core/random.h"
#include "torus/layers/gpt.h"
#include "torus/layers/optim.h"

namespace torus {

/// What a checkpoint holds. Weights and optimizer states are by parameter name; their tensors are handles, so
/// making a checkpoint copies nothing.
struct Checkpoint {
  std::optional<GPTConfig> model;               // of a GPT; for others `settings` says what was trained
  std::vector<int64_t> vocabulary;              // code points of token 0, 1, ...; empty for bytes
  std::map<std::string, std::string> settings;  // what else a run that goes on must share with this one
  int64_t step = 0;                             // steps taken
  int64_t loader_position = 0;                  // index of the next batch
  Generator::State generator;                   // of the dropout
  std::map<std::string, Tensor> weights;
  std::string optimizer_name = "adamw";
  std::map<std::string, Optimizer::State> optimizer;
  std::map<std::string, Tensor> averages;  // of an ExponentialMovingAverage; empty where there is none
};

/// A checkpoint of this model and optimizer, and of the default generator; the other members are the
/// caller's, `averages` too. Weights are those that the optimizer steps: masters, where there are any.
Checkpoint make_checkpoint(const GPT& model, const Optimizer& optimizer);
Checkpoint make_checkpoint(const Module& model, const Optimizer& optimizer);

/// Replaces the file at `path` as a whole: if anything fails, as on a full disk, what was there stays and the
/// error is thrown.
void save_checkpoint(const std::string& path, const Checkpoint& checkpoint);

/// Throws Error{File}, in one line that names the file, where it is missing, damaged, no checkpoint, or of a
/// newer format.
Checkpoint load_checkpoint(const std::string& path);

/// Sets the weights, of the model and of what the optimizer steps, the optimizer's state and the default
/// generator to those of the checkpoint. Throws Error{Value}, before it changes anything, where the
/// checkpoint is of another model or optimizer; another dtype is converted. The second form leaves optimizer
/// and generator: what a program needs that only evaluates.
void restore(const Checkpoint& checkpoint, GPT& model, Optimizer& optimizer);
void restore(const Checkpoint& checkpoint, Module& model, Optimizer& optimizer);
void restore(const Checkpoint& checkpoint, GPT& model);
void restore(const Checkpoint& checkpoint, Module& model);

}  // namespace torus
