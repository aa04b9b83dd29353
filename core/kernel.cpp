#include "torus/core/kernel.h"

#include <map>
#include <mutex>
#include <utility>

#include "torus/core/error.h"

namespace torus::detail {

namespace {
struct Entry {
  std::type_index signature;
  AnyFunction function;
};
struct Table {
  std::mutex mutex;
  std::map<std::pair<std::string, DeviceKind>, Entry> entries;
};
Table& table() {
  static Table instance;
  return instance;
}
}  // namespace

void register_kernel(const char* name, DeviceKind kind, std::type_index signature, AnyFunction function) {
  std::lock_guard lock(table().mutex);
  const bool added = table().entries.insert({{name, kind}, {signature, function}}).second;
  check(added, Error::Kind::Device, "[", name, "] registered twice for ", torus::name(kind));
}

AnyFunction find_kernel(const char* name, DeviceKind kind, std::type_index signature) {
  std::lock_guard lock(table().mutex);
  const auto found = table().entries.find({name, kind});
  check(found != table().entries.end(), Error::Kind::Device, "[", name, "] has no ", torus::name(kind),
        " kernel in this build");
  check(found->second.signature == signature, Error::Kind::Device, "[", name, "] the ", torus::name(kind),
        " kernel was registered with another signature");
  return found->second.function;
}

}  // namespace torus::detail
