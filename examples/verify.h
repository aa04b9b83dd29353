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
#include <fstream>
#include <string>
#include <vector>

struct VerifyLimits {
  int64_t memory = int64_t{4} << 30;  // bytes that the child may take besides what this process has
  int64_t seconds = 600;              // for the whole file
};

/// Tells the parent, from the child, of what is read: ">" and the name of a part before it is read, then "+",
/// or
/// "-" and what is wrong with it.
class VerifyReport {
 public:
  explicit VerifyReport(int out) : out_(out) {}

  /// Reads a part; false if it cannot be read.
  template <class Act>
  bool part(const std::string& name, const Act& act) const {
    say('>', name);
    try {
      act();
      say('+', "");
      return true;
    } catch (const std::bad_alloc&) {
      say('-', "'" + name + "' takes more memory than --memory allows");
    } catch (const std::exception& error) {
      say('-', error.what());
    }
    return false;
  }

 private:
  void say(char kind, const std::string& text) const {
    const std::string line = kind + torus::printable(text) + "\n";
    for (size_t done = 0; done < line.size();) {
      const ssize_t count = ::write(out_, line.data() + done, line.size() - done);
      if (count <= 0) _exit(1);
      done += static_cast<size_t>(count);
    }
  }
  int out_;
};

/// The parts of a file of HDF5 from `skip` on: its objects, and the header of its volume if it has a layout
/// that is known.
inline void read_parts(const std::string& path, const torus::VolumeOptions& options, size_t skip,
                       const VerifyReport& report) {
  std::vector<torus::Hdf5File::Entry> entries;
  auto layout = torus::VolumeLayout::dataset;
  if (!report.part("the list of objects", [&] {
        const auto file = torus::Hdf5File::open(path, options.trust);
        entries = file.walk();
        layout = torus::layout_of(file);
      }))
    return;
  entries.insert(entries.begin(), {"/", true});
  size_t at = 0;
  for (const auto& entry : entries) {
    if (at++ < skip) continue;
    report.part(entry.name, [&] {
      const auto file = torus::Hdf5File::open(path, options.trust);
      for (const std::string& attribute : file.attributes(entry.name))
        file.find_attribute(entry.name, attribute);
      if (!entry.is_group) file.open_dataset(entry.name).verify();
    });
  }
  if (at++ < skip || layout == torus::VolumeLayout::dataset) return;
  report.part("the header of the volume", [&] {
    const auto volume = torus::open_volume(path, options);
    const torus::Shape& shape = volume.shape();
    torus::Shape first = shape, count = shape;
    for (int axis = 0; axis < shape.dim(); ++axis) {
      first[axis] = shape[axis] / 2;
      count[axis] = std::min<int64_t>(1, shape[axis]);
    }
    volume.read(first, count);
  });
}

/// Bytes of address space that this process has.
inline int64_t mapped_bytes() {
  std::ifstream file("/proc/self/statm");
  int64_t pages = 0;
  file >> pages;
  return pages * ::sysconf(_SC_PAGESIZE);
}

/// Calls read(skip, report) in children with limits until one gets to the end: where a part ends the child,
/// the next begins after it. Prints a line for each part that cannot be read, and returns how many there are.
template <class Read>
int64_t verify_parts(const std::string& path, const VerifyLimits& limits, const Read& read) {
  using Clock = std::chrono::steady_clock;
  const auto deadline = Clock::now() + std::chrono::seconds(limits.seconds);
  const std::string shown = torus::printable(path);
  int64_t faults = 0, good = 0;
  for (size_t skip = 0;;) {
    int ends[2];
    torus::check(::pipe(ends) == 0, torus::Error::Kind::File, "[verify] no pipe: ", std::strerror(errno));
    std::fflush(stdout);
    const pid_t child = ::fork();
    torus::check(child >= 0, torus::Error::Kind::File, "[verify] cannot fork: ", std::strerror(errno));
    if (child == 0) {
      ::close(ends[0]);
      const auto bytes = static_cast<rlim_t>(mapped_bytes() + limits.memory);
      const rlimit memory{bytes, bytes}, core{0, 0};
      setrlimit(RLIMIT_AS, &memory);
      setrlimit(RLIMIT_CORE, &core);
      const int nowhere = ::open("/dev/null", O_WRONLY);
      ::dup2(nowhere, STDERR_FILENO);  // what an allocator says before it aborts
      read(skip, VerifyReport(ends[1]));
      _exit(0);
    }
    ::close(ends[1]);
    std::string pending, object;
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
          std::printf("%s%s\n", text.starts_with('[') ? "" : ("[verify] " + shown + ": ").c_str(),
                      text.c_str());
        }
      }
    }
    ::close(ends[0]);
    int status = 0;
    ::waitpid(child, &status, 0);
    if (WIFEXITED(status) && WEXITSTATUS(status) == 0 && !in_object) break;
    ++faults;
    if (out_of_time) {
      std::printf("[verify] %s: '%s' was not read within %lld s\n", shown.c_str(), object.c_str(),
                  static_cast<long long>(limits.seconds));
      break;
    }
    std::printf(
        "[verify] %s: '%s' crashes the HDF5 library, or takes more memory than --memory allows (%s)\n",
        shown.c_str(), object.c_str(),
        WIFSIGNALED(status) ? strsignal(WTERMSIG(status)) : "it ended the process");
    if (!listed) break;  // not even the list can be had
    ++skip;
  }
  if (faults == 0)
    std::printf("%s: all of %lld parts can be read\n", shown.c_str(), static_cast<long long>(good));
  return faults;
}

inline int64_t verify_file(const std::string& path, const torus::VolumeOptions& options,
                           const VerifyLimits& limits) {
  return verify_parts(path, limits, [&](size_t skip, const VerifyReport& report) {
    read_parts(path, options, skip, report);
  });
}
