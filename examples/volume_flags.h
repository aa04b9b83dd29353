// Flags of how volumes are read, the same for every program.
#pragma once

#include <sstream>
#include <string>
#include <vector>

#include "flags.h"
#include "torus/data/volume.h"

struct VolumeFlags {
  std::string dataset, group, leave_out;
  int64_t encoding = 0;
  bool raw = false, trust = false;

  /// Those that decide which numbers are read.
  std::vector<Flag> flags() {
    return {
        {"dataset", "the path of a dataset in the file, read as it is stored", &dataset},
        {"group", "ISMRMRD: the group of the acquisition; otherwise the last", &group},
        {"leave-out", "ISMRMRD: leave out readouts with these flags, or none; otherwise 19,23,24,26,27,28,29",
         &leave_out},
        {"encoding", "ISMRMRD: the encoding space whose readouts make the volume (0)", &encoding}};
  }
  void add_switches(CLI::App& app) {
    app.get_option("--encoding")->check(at_least_0);
    app.add_flag("--raw", raw, "MINC2: stored numbers, not real values");
    app.add_flag("--trust", trust, "follow links to other files, and read sparse datasets");
  }

  torus::VolumeOptions options() const {
    torus::VolumeOptions result{.dataset = dataset, .raw = raw, .group = group, .encoding = encoding};
    result.trust = {trust, trust};
    if (leave_out.empty()) return result;
    result.leave_out.clear();
    if (leave_out == "none") return result;
    std::istringstream parts(leave_out);
    for (int flag = 0, next = ','; next == ','; next = parts.get()) {
      torus::check(parts >> flag && flag >= 1 && flag <= 64, torus::Error::Kind::Value,
                   "--leave-out: expected flags from 1 to 64, as 19,23, or none, got ", leave_out);
      result.leave_out.push_back(flag);
      torus::check(parts.peek() == EOF || parts.peek() == ',', torus::Error::Kind::Value,
                   "--leave-out: expected flags from 1 to 64, as 19,23, or none, got ", leave_out);
    }
    return result;
  }
};
