// The data of the page, elements, and figures as the command line writes them.
"use strict";

const report = JSON.parse(document.getElementById("report-data").textContent);
const timeline = report.facts && report.facts.timeline;
const NAMESPACE = "http://www.w3.org/2000/svg";

function svg(name, attributes, parent) {
  const made = document.createElementNS(NAMESPACE, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (parent) parent.append(made);
  return made;
}

function html(name, attributes, parent, text) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  if (parent) parent.append(made);
  return made;
}

// -- figures, as the command line writes them

function threeDigits(value) {
  return value < 10 ? value.toFixed(2) : value < 100 ? value.toFixed(1) : value.toFixed(0);
}

function bytes(size) {
  for (const [unit, scale] of [["TiB", 2 ** 40], ["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]])
    if (size >= scale) return `${threeDigits(size / scale)} ${unit}`;
  return `${size.toFixed(0)} B`;
}

function seconds(time) {
  for (const [unit, scale] of [["s", 1], ["ms", 1e-3], ["µs", 1e-6]]) if (time >= scale) return `${threeDigits(time / scale)} ${unit}`;
  return time <= 0 ? "0 s" : `${(time / 1e-9).toFixed(0)} ns`;
}
