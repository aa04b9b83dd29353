// Errors: one class, a few kinds, one line each: "[op] what was expected, what came".
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>

namespace torus {

/// Every failure that Torus reports. `what()` is one line that names the operation, what it expected and what
/// it got; `kind()` says which part of the contract was broken.
class Error : public std::runtime_error {
 public:
  enum class Kind { Shape, DType, Device, Version, File, Memory, Value };

  Error(Kind kind, const std::string& message) : std::runtime_error(message), kind_(kind) {}
  Kind kind() const { return kind_; }

 private:
  Kind kind_;
};

/// Throws an Error whose message is the parts, printed one after another.
template <class... Parts>
[[noreturn]] void fail(Error::Kind kind, const Parts&... parts) {
  std::ostringstream message;
  (message << ... << parts);
  throw Error(kind, message.str());
}

/// Throws an Error made of the parts unless `condition` holds. The parts are only printed on failure.
template <class... Parts>
void check(bool condition, Error::Kind kind, const Parts&... parts) {
  if (!condition) [[unlikely]]
    fail(kind, parts...);
}

}  // namespace torus
