// Reads all of a file in a child process with limits, so that what crashes or hangs the HDF5 library is one
// line.
#pragma once

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <torus/torus.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

struct VerifyLimits {
  int64_t memory = int64_t{4} << 30;  // bytes of address space
  int64_t seconds = 600;              // for the whole file
};

namespace verify_detail {

// In the child: each object from `skip` on, announced before it is read; "+" after it, or "-" and what is
// wrong.
inline void read_objects(const std::string& path, size_t skip, int out) {
  const auto say = [out](char kind, std::string text) {
    std::replace(text.begin(), text.end(), '\n', ' ');
    text = kind + text + "\n";
    for (size_t done = 0; done < text.size();) {
      const ssize_t count = ::write(out, text.data() + done, text.size() - done);
      if (count <= 0) _exit(1);
      done += static_cast<size_t>(count);
    }
  };
  const auto attempt = [&](const auto& act) {
    try {
      act();
      say('+', "");
      return true;
    } catch (const std::bad_alloc&) {
      say('-', "[verify] " + path + ": it takes more memory than the limit");
    } catch (const std::exception& error) {
      say('-', error.what());
    }
    return false;
  };
  std::vector<torus::Hdf5File::Entry> entries;
  say('>', "the list of objects");
  if (!attempt([&] {
        const auto file = torus::Hdf5File::open(path);
        entries = file.walk();
      }))
    return;
  size_t at = 0;
  for (const auto& entry : entries) {
    if (at++ < skip) continue;
    say('>', entry.name);
    attempt([&] {
      const auto file = torus::Hdf5File::open(path);
      for (const std::string& attribute : file.attributes(entry.name))
        file.find_attribute(entry.name, attribute);
      if (!entry.is_group) file.open_dataset(entry.name).verify();
    });
  }
  // Last, what open_volume makes of it; that it is no volume is no fault.
  if (at++ < skip) return;
  say('>', "the header of the volume");
  attempt([&] {
    const auto volume = torus::open_volume(path);
    const torus::Shape& shape = volume.shape();
    torus::Shape first = shape, count = shape;
    for (int axis = 0; axis < shape.dim(); ++axis) {
      first[axis] = shape[axis] / 2;
      count[axis] = std::min<int64_t>(1, shape[axis]);
    }
    volume.read(first, count);
  });
}

}  // namespace verify_detail

/// Prints a line for each object that cannot be read, and returns how many there are.
inline int64_t verify_file(const std::string& path, const VerifyLimits& limits) {
  using Clock = std::chrono::steady_clock;
  const auto deadline = Clock::now() + std::chrono::seconds(limits.seconds);
  int64_t faults = 0, good = 0;
  for (size_t skip = 0;;) {
    int ends[2];
    torus::check(::pipe(ends) == 0, torus::Error::Kind::File, "[verify] no pipe: ", std::strerror(errno));
    std::fflush(stdout);
    const pid_t child = ::fork();
    torus::check(child >= 0, torus::Error::Kind::File, "[verify] cannot fork: ", std::strerror(errno));
    if (child == 0) {
      ::close(ends[0]);
      const rlimit memory{static_cast<rlim_t>(limits.memory), static_cast<rlim_t>(limits.memory)}, core{0, 0};
      setrlimit(RLIMIT_AS, &memory);
      setrlimit(RLIMIT_CORE, &core);
      const int nowhere = ::open("/dev/null", O_WRONLY);
      ::dup2(nowhere, STDERR_FILENO);  // what an allocator says before it aborts
      verify_detail::read_objects(path, skip, ends[1]);
      _exit(0);
    }
    ::close(ends[1]);
    std::string pending, object, last_object;
    bool in_object = false, out_of_time = false, listed = false;
    for (;;) {
      const auto left =
          std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now()).count();
      pollfd wait{ends[0], POLLIN, 0};
      const int ready = left <= 0 ? 0 : ::poll(&wait, 1, static_cast<int>(std::min<int64_t>(left, 1000)));
      if (ready < 0 && errno == EINTR) continue;
      if (ready == 0) {
        if (left > 0) continue;
        out_of_time = true;
        ::kill(child, SIGKILL);
        break;
      }
      char buffer[4096];
      const ssize_t count = ::read(ends[0], buffer, sizeof buffer);
      if (count <= 0) break;
      pending.append(buffer, static_cast<size_t>(count));
      for (size_t end; (end = pending.find('\n')) != std::string::npos; pending.erase(0, end + 1)) {
        const std::string text = pending.substr(1, end - 1);
        if (pending[0] == '>') {
          object = text;
          in_object = true;
          continue;
        }
        in_object = false;
        if (listed) ++skip;
        listed = true;
        if (pending[0] == '+') {
          ++good;
        } else {
          ++faults;
          std::printf("%s\n", text.c_str());
        }
      }
    }
    ::close(ends[0]);
    int status = 0;
    ::waitpid(child, &status, 0);
    if (WIFEXITED(status) && WEXITSTATUS(status) == 0 && !in_object) break;
    ++faults;
    if (out_of_time) {
      std::printf("[verify] %s: '%s' was not read within %lld s\n", path.c_str(), object.c_str(),
                  static_cast<long long>(limits.seconds));
      break;
    }
    std::printf("[verify] %s: '%s' crashes the HDF5 library (%s)\n", path.c_str(), object.c_str(),
                WIFSIGNALED(status) ? strsignal(WTERMSIG(status)) : "it ended the process");
    if (!listed) break;  // not even the list can be had
    ++skip;
  }
  if (faults == 0)
    std::printf("%s: all of %lld parts can be read\n", path.c_str(), static_cast<long long>(good));
  return faults;
}
