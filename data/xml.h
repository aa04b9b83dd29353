// The little of XML that headers of scanners need.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace torus {

/// An element: its name without namespace, the text directly in it, and the elements in it.
struct XmlElement {
  std::string name, text;
  std::vector<XmlElement> children;

  /// The first child of a name; nullptr if there is none.
  const XmlElement* child(std::string_view child_name) const;
  /// The text at a path of names, "matrixSize/x"; empty if there is none.
  std::string at(std::string_view path) const;
};

/// Reads a document without checking it against anything: attributes, comments and declarations are skipped,
/// what is not closed ends where its parent does, and unknown entities stay as they are. Elements nested more
/// than 64 deep, or more than 100 000 of them, are left out. Returns the root; without a name if there is
/// none.
XmlElement parse_xml(std::string_view text);

}  // namespace torus
