// Refuses a processor that lacks what the library was compiled for, before any of its code runs. This file is
// compiled for the oldest processor, and uses nothing that could be shared with files that are not.
#include <cstdio>
#include <cstdlib>

namespace {

__attribute__((constructor(101))) void refuse_unsupported_processor() {
#if defined(__x86_64__)
  __builtin_cpu_init();
#define FEATURE(name)                                                                                       \
  if (!__builtin_cpu_supports(#name)) {                                                                     \
    std::fputs("torus: this build needs a processor with " #name                                            \
               "; build with -DTORUS_ARCH=x86-64-v3, or x86-64 for any processor\n",                        \
               stderr);                                                                                     \
    std::_Exit(1);                                                                                          \
  }
  TORUS_FEATURES
#endif
}

}  // namespace
