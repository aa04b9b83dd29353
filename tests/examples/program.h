// Runs a program of examples/ as a user does.
#pragma once

#include <sys/wait.h>

#include <cstdio>
#include <string>

namespace torus {

struct ProgramOutcome {
  int status;
  std::string text;  // output and errors
};

/// "mask --grid 5x5".
inline ProgramOutcome run_program(const std::string& command) {
  FILE* pipe = popen((std::string(TORUS_EXAMPLES_DIR "/") + command + " 2>&1").c_str(), "r");
  std::string text;
  char buffer[4096];
  for (size_t count; (count = fread(buffer, 1, sizeof buffer, pipe)) > 0;) text.append(buffer, count);
  const int status = pclose(pipe);
  return {WIFEXITED(status) ? WEXITSTATUS(status) : -1, text};
}

inline bool has(const ProgramOutcome& outcome, const std::string& part) {
  return outcome.text.find(part) != std::string::npos;
}

}  // namespace torus
