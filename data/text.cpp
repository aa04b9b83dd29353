#include "torus/data/text.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iomanip>
#include <iterator>

#include "torus/core/random.h"
#include "torus/data/permutation.h"

namespace torus {

namespace {

constexpr int64_t code_point_limit = 0x110000;

bool is_surrogate(int64_t code_point) { return code_point >= 0xd800 && code_point < 0xe000; }

// The code point that begins at byte `at`, which moves past it; -1 where the bytes are not UTF-8.
int64_t next_code_point(const std::string& text, size_t& at) {
  const auto byte = [&](size_t i) { return i < text.size() ? static_cast<unsigned char>(text[i]) : 0; };
  const int lead = byte(at++);
  if (lead < 0x80) return lead;
  const int more = lead >= 0xf0 ? 3 : lead >= 0xe0 ? 2 : 1;
  if (lead < 0xc2 || lead > 0xf4) return -1;
  int64_t value = lead & (0x3f >> more);
  for (int i = 0; i < more; ++i) {
    const int next = byte(at++);
    if (next >> 6 != 2) return -1;
    value = value << 6 | (next & 0x3f);
  }
  constexpr int64_t least[] = {0, 0x80, 0x800, 0x10000};
  return value < least[more] || value >= code_point_limit || is_surrogate(value) ? -1 : value;
}

void append_utf8(std::string& text, int64_t code_point) {
  const auto tail = [&](int shift) { text += static_cast<char>(0x80 | (code_point >> shift & 0x3f)); };
  if (code_point < 0x80) {
    text += static_cast<char>(code_point);
  } else if (code_point < 0x800) {
    text += static_cast<char>(0xc0 | code_point >> 6);
    tail(0);
  } else if (code_point < 0x10000) {
    text += static_cast<char>(0xe0 | code_point >> 12);
    tail(6);
    tail(0);
  } else {
    text += static_cast<char>(0xf0 | code_point >> 18);
    tail(12);
    tail(6);
    tail(0);
  }
}

// Calls f(code point, first byte) for each character.
template <class F>
void for_each_character(const std::string& text, F&& f) {
  for (size_t at = 0; at < text.size();) {
    const size_t first = at;
    const int64_t code_point = next_code_point(text, at);
    check(code_point >= 0, Error::Kind::Value, "[vocabulary] byte ", first,
          " of the text is not UTF-8; a vocabulary of bytes takes any text");
    f(code_point, first);
  }
}

void check_tokens(const char* op, const Tensor& tokens, int64_t least, const char* why) {
  check(tokens.dim() == 1 && !is_floating(tokens.dtype()), Error::Kind::Shape, "[", op,
        "] expected one axis of integers, got ", tokens.dtype(), " ", tokens.shape());
  check(tokens.numel() >= least, Error::Kind::Value, "[", op, "] the text has ", tokens.numel(), " tokens, ",
        why, " needs at least ", least);
}

// Row `row` of a batch from the tokens that begin at `start`.
void fill_row(Batch& batch, int64_t row, const Tensor& tokens, int64_t start) {
  const int64_t length = batch.inputs.size(1);
  batch.inputs.select(0, row).copy_(tokens.slice(0, start, start + length));
  batch.targets.select(0, row).copy_(tokens.slice(0, start + 1, start + 1 + length));
}

Batch empty_batch(int64_t rows, int64_t length) {
  return {Tensor::empty({rows, length}, i64), Tensor::empty({rows, length}, i64)};
}

}  // namespace

std::string read_text(const std::string& path) {
  std::error_code ignored;
  check(!std::filesystem::is_directory(path, ignored), Error::Kind::File, "[text] ", path, ": is a folder");
  errno = 0;
  std::ifstream file(path, std::ios::binary);
  check(file.is_open(), Error::Kind::File, "[text] ", path, ": ", std::strerror(errno));
  std::string text(std::istreambuf_iterator<char>(file), {});
  check(!file.bad(), Error::Kind::File, "[text] ", path, ": cannot be read");
  check(!text.empty(), Error::Kind::File, "[text] ", path, ": is empty");
  return text;
}

// ------------------------------------------------------------------------------------------------ vocabulary

Vocabulary Vocabulary::bytes() { return {}; }

Vocabulary Vocabulary::characters(const std::string& text) {
  check(!text.empty(), Error::Kind::Value, "[vocabulary] the text is empty");
  std::vector<bool> seen(code_point_limit);
  for_each_character(text, [&](int64_t code_point, size_t) { seen[static_cast<size_t>(code_point)] = true; });
  Vocabulary result;
  for (int64_t i = 0; i < code_point_limit; ++i)
    if (seen[static_cast<size_t>(i)]) result.code_points_.push_back(i);
  return result;
}

Vocabulary Vocabulary::from_code_points(std::vector<int64_t> code_points) {
  for (size_t i = 0; i < code_points.size(); ++i) {
    const int64_t value = code_points[i];
    check(value >= 0 && value < code_point_limit && !is_surrogate(value) &&
              (i == 0 || code_points[i - 1] < value),
          Error::Kind::Value, "[vocabulary] expected code points in ascending order, got ", value, " at ", i);
  }
  Vocabulary result;
  result.code_points_ = std::move(code_points);
  return result;
}

Tensor Vocabulary::encode(const std::string& text) const {
  std::vector<int32_t> tokens;
  if (code_points_.empty()) {
    for (char c : text) tokens.push_back(static_cast<unsigned char>(c));
  } else {
    for_each_character(text, [&](int64_t code_point, size_t at) {
      const auto found = std::lower_bound(code_points_.begin(), code_points_.end(), code_point);
      if (found == code_points_.end() || *found != code_point) {
        std::string shown;
        if (code_point >= 0x20 && code_point != 0x7f) append_utf8(shown, code_point);
        fail(Error::Kind::Value, "[encode] the character '", shown, "' (U+", std::hex, std::uppercase,
             std::setfill('0'), std::setw(4), code_point, std::dec, ") at byte ", at,
             " is not one of the vocabulary's ", size());
      }
      tokens.push_back(static_cast<int32_t>(found - code_points_.begin()));
    });
  }
  return Tensor::from(tokens, {static_cast<int64_t>(tokens.size())});
}

std::string Vocabulary::decode(const Tensor& tokens) const {
  check(!is_floating(tokens.dtype()), Error::Kind::DType, "[decode] expected integers, got ", tokens.dtype());
  std::string text;
  for (int64_t token : tokens.to_vector<int64_t>()) {
    check(token >= 0 && token < size(), Error::Kind::Value, "[decode] token must be in [0, ", size(),
          "), got ", token);
    if (code_points_.empty())
      text += static_cast<char>(token);
    else
      append_utf8(text, code_points_[static_cast<size_t>(token)]);
  }
  return text;
}

// --------------------------------------------------------------------------------------------------- windows

HeldOut split_held_out(const Tensor& tokens) {
  check_tokens("split_held_out", tokens, 0, "a split");
  const int64_t count = tokens.numel(), train = count - count / 10;
  return {tokens.slice(0, 0, train), tokens.slice(0, train, count)};
}

Tensor read_tokens(const std::string& path) {
  const std::string bytes = read_text(path);
  size_t first = 0, count = bytes.size() / 2;
  check(bytes.size() % 2 == 0, Error::Kind::File, "[tokens] ", path, " has an odd number of bytes, ",
        bytes.size(), ": it does not hold 16-bit tokens");
  int32_t header[3] = {};
  constexpr size_t header_bytes = 256 * sizeof(int32_t);
  if (bytes.size() >= header_bytes) std::memcpy(header, bytes.data(), sizeof header);
  if (header[0] == 20240520) {
    check(header[1] == 1, Error::Kind::File, "[tokens] ", path, " has a header of version ", header[1],
          "; expected 1");
    first = header_bytes;
    count = static_cast<size_t>(static_cast<uint32_t>(header[2]));
    check(bytes.size() - first == 2 * count, Error::Kind::File, "[tokens] ", path, " should hold ", count,
          " tokens by its header, got ", (bytes.size() - first) / 2);
  }
  check(count > 0, Error::Kind::File, "[tokens] ", path, " holds no tokens");
  Tensor tokens = Tensor::empty({static_cast<int64_t>(count)}, i32);
  int32_t* const to = tokens.mutable_data<int32_t>();
  for (size_t i = 0; i < count; ++i) {
    uint16_t token;
    std::memcpy(&token, bytes.data() + first + 2 * i, sizeof token);
    to[i] = token;
  }
  return tokens;
}

TextWindows::TextWindows(const Tensor& tokens, int64_t batch_size, int64_t length, uint64_t seed)
    : tokens_(tokens), batch_size_(batch_size), length_(length), seed_(seed) {
  check(batch_size >= 1 && length >= 1, Error::Kind::Value,
        "[windows] expected a batch and a length of at least 1, got ", batch_size, " and ", length);
  check_tokens("windows", tokens, length + 1, "a window");
  // One window fewer than fit, if there are two, so that the start of the tiling has room to move.
  per_epoch_ = std::max<int64_t>(1, (tokens.numel() - 1) / length - 1);
}

Batch TextWindows::batch(int64_t index) const {
  check(index >= 0, Error::Kind::Value, "[windows] index must be at least 0, got ", index);
  Batch batch = empty_batch(batch_size_, length_);
  for (int64_t row = 0; row < batch_size_; ++row) {
    const int64_t window = index * batch_size_ + row;
    const auto epoch = static_cast<uint64_t>(window / per_epoch_);
    Generator generator;
    generator.set_state({seed_, epoch});
    const int64_t start = generator.below(tokens_.numel() - per_epoch_ * length_);
    const Permutation order(per_epoch_, seed_, epoch);
    fill_row(batch, row, tokens_, start + order(window % per_epoch_) * length_);
  }
  return batch;
}

EvaluationWindows::EvaluationWindows(const Tensor& tokens, int64_t batch_size, int64_t length)
    : tokens_(tokens), batch_size_(batch_size), length_(length) {
  check(batch_size >= 1 && length >= 1, Error::Kind::Value,
        "[evaluation] expected a batch and a length of at least 1, got ", batch_size, " and ", length);
  check_tokens("evaluation", tokens, 2, "an evaluation");
}

int64_t EvaluationWindows::batches() const {
  const int64_t targets = tokens_.numel() - 1, whole = targets / length_;
  return (whole + batch_size_ - 1) / batch_size_ + (targets % length_ != 0);
}

Batch EvaluationWindows::batch(int64_t index) const {
  check(index >= 0 && index < batches(), Error::Kind::Value, "[evaluation] index must be in [0, ", batches(),
        "), got ", index);
  const int64_t targets = tokens_.numel() - 1, whole = targets / length_, first = index * batch_size_;
  // What is left after the whole windows is a batch of its own.
  const bool rest = first >= whole;
  const int64_t rows = rest ? 1 : std::min(batch_size_, whole - first);
  Batch batch = empty_batch(rows, rest ? targets % length_ : length_);
  for (int64_t row = 0; row < rows; ++row)
    fill_row(batch, row, tokens_, rest ? whole * length_ : (first + row) * length_);
  return batch;
}

}  // namespace torus
