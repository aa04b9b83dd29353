// The table through which op code reaches the kernel of a device.
#pragma once

#include <ranges>
#include <string>
#include <type_traits>
#include <typeindex>

#include "torus/core/device.h"
#include "torus/core/profiler.h"
#include "torus/core/tensor.h"

namespace torus {

namespace detail {
using AnyFunction = void (*)();
void register_kernel(const char* name, DeviceKind kind, std::type_index signature, AnyFunction function);
/// Throws "[name] has no cuda kernel in this build" where none was registered.
AnyFunction find_kernel(const char* name, DeviceKind kind, std::type_index signature);
}  // namespace detail

/// One kernel of an op, by the name "op.part". The op's .cpp makes it with the CPU function; a .cu file adds
/// its launcher with `CudaKernel` of the same name and signature, so op code needs neither #ifdef nor stub.
/// The profiler times each call and counts the bytes of its tensors, also of those in a list of tensors or of
/// structs that give theirs by `tensors()`; `flops`, if given, counts the operations. `held_memory` names it
/// for tensors that it writes first.
template <class Signature>
class Kernel;

template <class... Args>
class Kernel<void(Args...)> {
 public:
  using Function = void (*)(Args...);
  using Flops = double (*)(Args...);
  constexpr Kernel(const char* name, Function cpu_function, Flops flops = nullptr)
      : name_(name), cpu_(cpu_function), flops_(flops) {}

  void operator()(Device device, Args... args) const {
    ProfileScope scope(name_, ScopeKind::kernel);
    if (scope) [[unlikely]] {
      (note(scope, args), ...);
      if (flops_) scope.add_flops(flops_(args...));
    }
    (name_written<Args>(args), ...);
    if (device.kind == DeviceKind::cpu) return cpu_(args...);
    const auto found = detail::find_kernel(name_, device.kind, typeid(void(Args...)));
    reinterpret_cast<Function>(found)(args...);
  }

 private:
  template <class Argument, class T>
  void name_written([[maybe_unused]] T& argument) const {
    if constexpr (std::is_same_v<Argument, Tensor&>)
      if (argument.defined()) argument.storage()->note_kernel(name_);
  }
  template <class T>
  static void note(ProfileScope& scope, const T& argument) {
    if constexpr (std::is_same_v<T, Tensor>)
      scope.add(argument);
    else if constexpr (requires { argument.tensors(); })
      note(scope, argument.tensors());
    else if constexpr (std::ranges::range<T>)
      for (const auto& item : argument) note(scope, item);
  }

  const char* name_;
  Function cpu_;
  Flops flops_;
};

/// Registers a launcher at start-up: `static const CudaKernel<void(...)> r{"layer_norm.forward", launch};`.
template <class Signature>
struct CudaKernel {
  CudaKernel(const char* name, Signature* launcher) {
    detail::register_kernel(name, DeviceKind::cuda, typeid(Signature),
                            reinterpret_cast<detail::AnyFunction>(launcher));
  }
};

}  // namespace torus
