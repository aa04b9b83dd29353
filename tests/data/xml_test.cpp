#include "torus/data/xml.h"

#include <gtest/gtest.h>

namespace torus {
namespace {

TEST(Xml, ReadsWhatHeadersHold) {
  const XmlElement root = parse_xml(
      "\xEF\xBB\xBF<?xml version='1.0'?><!DOCTYPE x><!-- <a>no</a> --><m:header xmlns:m=\"u\" y='1'>\n"
      "  <m:a> 1 &lt; 2 &amp;&#65; </m:a><b/><b "
      "k='v'/><c><d><![CDATA[<raw>]]></d></c><a>second</a></m:header>");
  EXPECT_EQ(root.name, "header");
  EXPECT_EQ(root.children.size(), 5u);
  EXPECT_EQ(root.at("a"), "1 < 2 &&#65;");
  EXPECT_EQ(root.at("c/d"), "<raw>");
  EXPECT_EQ(root.at("c/none"), "");
  EXPECT_EQ(root.child("none"), nullptr);
}

TEST(Xml, TakesWhatIsBroken) {
  EXPECT_EQ(parse_xml("").name, "");
  EXPECT_EQ(parse_xml("no tags < at all").name, "");
  EXPECT_EQ(parse_xml("<a><b>1<c>2</a>").at("b/c"), "2");    // never closed
  EXPECT_EQ(parse_xml("<a></x><b>1</b></a>").at("b"), "1");  // never opened
  EXPECT_EQ(parse_xml("<a><b>1</b").at("b"), "1");
  std::string deep;
  for (int i = 0; i < 100000; ++i) deep += "<a>";
  EXPECT_EQ(parse_xml(deep).name, "a");
  std::string wide = "<a>";
  for (int i = 0; i < 200000; ++i) wide += "<b/>";
  EXPECT_LE(parse_xml(wide).children.size(), 100000u);
}

}  // namespace
}  // namespace torus
