#include "torus/data/xml.h"

#include <algorithm>

namespace torus {

namespace {

constexpr size_t deepest = 64, most = 100000;

std::string trimmed(std::string_view text) {
  constexpr std::string_view space = " \t\r\n";
  const size_t first = text.find_first_not_of(space);
  return first == std::string_view::npos
             ? ""
             : std::string(text.substr(first, text.find_last_not_of(space) - first + 1));
}

std::string decoded(std::string_view text) {
  constexpr std::pair<std::string_view, char> entities[] = {
      {"&lt;", '<'}, {"&gt;", '>'}, {"&amp;", '&'}, {"&quot;", '"'}, {"&apos;", '\''}};
  std::string result;
  while (!text.empty()) {
    const auto* found = std::find_if(std::begin(entities), std::end(entities),
                                     [&](const auto& entity) { return text.starts_with(entity.first); });
    result += found == std::end(entities) ? text[0] : found->second;
    text.remove_prefix(found == std::end(entities) ? 1 : found->first.size());
  }
  return result;
}

std::string local_name(std::string_view tag) {
  tag = tag.substr(0, tag.find_first_of(" \t\r\n/"));
  const size_t colon = tag.find(':');
  return std::string(colon == std::string_view::npos ? tag : tag.substr(colon + 1));
}

}  // namespace

const XmlElement* XmlElement::child(std::string_view child_name) const {
  const auto found = std::find_if(children.begin(), children.end(),
                                  [&](const XmlElement& c) { return c.name == child_name; });
  return found == children.end() ? nullptr : &*found;
}

std::string XmlElement::at(std::string_view path) const {
  const XmlElement* element = this;
  while (element && !path.empty()) {
    const size_t slash = path.find('/');
    element = element->child(path.substr(0, slash));
    path = slash == std::string_view::npos ? "" : path.substr(slash + 1);
  }
  return element ? element->text : "";
}

XmlElement parse_xml(std::string_view text) {
  std::vector<XmlElement> open(1);  // from the document down to the innermost that is not closed
  const auto close = [&open] {
    XmlElement done = std::move(open.back());
    open.pop_back();
    done.text = trimmed(done.text);
    open.back().children.push_back(std::move(done));
  };
  size_t count = 0;
  while (!text.empty()) {
    const size_t begin = text.find('<');
    open.back().text += decoded(text.substr(0, begin));
    if (begin == std::string_view::npos) break;
    text.remove_prefix(begin);
    const bool is_comment = text.starts_with("<!--"), is_data = text.starts_with("<![CDATA[");
    const std::string_view last = is_comment ? "-->" : is_data ? "]]>" : ">";
    const size_t end = text.find(last);
    if (end == std::string_view::npos) break;
    std::string_view tag = text.substr(1, end - 1);
    text.remove_prefix(end + last.size());
    if (is_data) open.back().text += tag.substr(8);
    if (is_comment || tag.starts_with('!') || tag.starts_with('?')) continue;
    if (tag.starts_with('/')) {
      const std::string name = local_name(tag.substr(1));
      // Closes the innermost of this name and what is in it; none: a stray tag.
      size_t depth = open.size();
      while (depth > 1 && open[depth - 1].name != name) --depth;
      while (depth > 1 && open.size() >= depth) close();
      continue;
    }
    const bool is_empty = tag.ends_with('/');
    if (++count > most || (open.size() > deepest && !is_empty)) break;
    open.emplace_back().name = local_name(tag);
    if (is_empty) close();
  }
  while (open.size() > 1) close();
  return open[0].children.empty() ? XmlElement{} : std::move(open[0].children[0]);
}

}  // namespace torus
