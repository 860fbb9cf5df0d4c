"use strict";
// Draws the tree: unpacks plotly and the entries, which are gzip and base64, and follows the reader's width
// and colour scheme. Texts of the data set reach plotly through `escaped`, and the rest of the page as textContent.

const byId = (id) => document.getElementById(id);
const whole = new Intl.NumberFormat("en-US");
const plural = (count, one, many) => `${whole.format(count)} ${count === 1 ? one : many}`;
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const MONO = "ui-monospace, 'DejaVu Sans Mono', Menlo, Consolas, monospace";
const SANS = "system-ui, 'Segoe UI', Roboto, 'Liberation Sans', sans-serif";
const LINE = 15; // pixels
const CHARACTER = 6.9; // pixels
const HOVER_LINES = 8;

async function unpacked(id) {
  const bytes = Uint8Array.from(atob(byId(id).textContent), (character) => character.charCodeAt(0));
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
}

function run(source) {
  const script = document.createElement("script");
  script.textContent = source;
  document.head.append(script);
}

// plotly reads tags and entities in a text.
const escaped = (text) => text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");

// Lines of at most `width` characters; the last one ends in an ellipsis if there is more.
function wrapped(text, width, most) {
  const lines = [""];
  for (const word of text.trim().split(/\s+/).flatMap((each) => each.match(new RegExp(`.{1,${width}}`, "gsu")) ?? [])) {
    const last = lines.at(-1);
    if (!last) lines[lines.length - 1] = word;
    else if (last.length + 1 + word.length <= width) lines[lines.length - 1] = `${last} ${word}`;
    else lines.push(word);
    if (lines.length > most) break;
  }
  if (most < 1) return "";
  if (lines.length > most) {
    lines.length = most;
    lines[most - 1] = `${lines[most - 1].slice(0, width - 1)}…`;
  }
  return lines.map(escaped).join("<br>");
}

// A colour between the stops, at 0 <= place <= 1.
function between(stops, place) {
  const at = Math.min(place * (stops.length - 1), stops.length - 1 - 1e-9);
  const parts = (hex) => [1, 3, 5].map((start) => parseInt(hex.slice(start, start + 2), 16));
  const [low, high] = [parts(stops[Math.floor(at)]), parts(stops[Math.floor(at) + 1])];
  return `rgb(${low.map((value, index) => Math.round(value + (high[index] - value) * (at % 1))).join(",")})`;
}

// Black or white, whichever is easier to read on an `rgb(...)`.
function inkOn(rgb) {
  const [red, green, blue] = rgb.match(/\d+/g).map((value) => (value / 255) ** 2.2);
  return 0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.18 ? "#000000" : "#ffffff";
}

const plain = (place) => ({
  width: place.clientWidth,
  height: place.clientHeight,
  paper_bgcolor: "rgba(0,0,0,0)",
  plot_bgcolor: "rgba(0,0,0,0)",
  font: { family: SANS, size: 12, color: colour("--ink") },
  hoverlabel: {
    align: "left", bgcolor: colour("--paper"), bordercolor: colour("--faint"),
    font: { family: SANS, size: 12, color: colour("--ink") },
  },
});
const OPTIONS = { displayModeBar: false, responsive: false, doubleClick: false };

// --- the tree -------------------------------------------------------------------------------------------------------

class Tree {
  constructor(entries) {
    this.place = byId("tree");
    this.entries = entries;
    this.level = 0;
    this.saved = entries.tokens.map((tokens, i) => (entries.branches[i] ? 0 : tokens * (entries.sequences[i] - 1)));
    this.depth = [];
    this.height = entries.parents.map(() => 1); // levels from this one down
    entries.parents.forEach((parent, i) => this.depth.push(parent < 0 ? 0 : this.depth[parent] + 1));
    const leaves = this.height.length - new Set(entries.parents.filter((parent) => parent >= 0)).size;
    this.place.style.maxHeight = `${5 + 4 * leaves}rem`;
    const most = Math.max(...this.saved);
    byId("most-saved").textContent = plural(most, "token saved", "tokens saved");
    byId("legend").hidden = !most;
    for (let i = entries.parents.length - 1; i > 0; i--) {
      const parent = entries.parents[i];
      this.height[parent] = Math.max(this.height[parent], this.height[i] + 1);
    }
  }

  name(i) {
    const { texts, tokens, branches, parents } = this.entries;
    if (branches[i]) return plural(branches[i], "more branch", "more branches");
    if (!tokens[i] && parents[i] < 0) return "all sequences";
    return texts[i].trim() ? texts[i] : `white space, ${plural(tokens[i], "token", "tokens")}`;
  }

  counts(i) {
    const { tokens, sequences } = this.entries;
    const through = plural(sequences[i], "sequence", "sequences");
    return tokens[i] ? `${plural(tokens[i], "token", "tokens")}, ${through}` : through;
  }

  numbers(i) {
    const hidden = this.entries.branches[i];
    if (hidden) return `${plural(hidden, "branch", "branches")} not drawn: ${this.counts(i)}`;
    const saved = this.saved[i] ? `: computed once, which saves ${plural(this.saved[i], "token", "tokens")}` : "";
    return `${this.counts(i)}${saved}`;
  }

  // How many levels fit, and the texts that fit into their blocks.
  layout() {
    const width = this.place.clientWidth;
    const shown = Math.max(1, Math.min(width < 600 ? 3 : 5, this.height[this.level]));
    const rows = this.place.clientHeight - 70;
    const characters = Math.max(4, Math.floor((width / shown - 14) / CHARACTER));
    const unit = rows / this.entries.sequences[this.level];
    const text = this.entries.sequences.map((count, i) => {
      const lines = Math.floor((count * unit - 4) / LINE);
      if (lines < 4) return wrapped(this.name(i), characters, lines);
      const numbers = wrapped(this.counts(i), characters, 2);
      return `${wrapped(this.name(i), characters, lines - 2)}<br><b>${numbers}</b>`;
    });
    return { shown, text };
  }

  // What is saved spans orders of magnitude, so its colour is of its logarithm.
  shades() {
    const stops = colour("--saved").split(/,\s*/);
    const most = Math.log10(1 + Math.max(...this.saved));
    const grey = between([colour("--line"), colour("--line")], 0);
    return this.saved.map((saved, i) =>
      this.entries.branches[i] ? grey : between(stops, most ? Math.log10(1 + saved) / most : 0));
  }

  draw() {
    const { parents, sequences } = this.entries;
    const { shown, text } = this.layout();
    const shades = this.shades();
    const font = { family: MONO, size: 11, color: shades.map(inkOn) };
    const wide = this.place.clientWidth < 600 ? 34 : 70;
    const trace = {
      type: "icicle", branchvalues: "total", sort: false, maxdepth: shown, level: String(this.level), text,
      ids: parents.map((_, i) => String(i)),
      parents: parents.map((parent) => (parent < 0 ? "" : String(parent))),
      labels: parents.map((_, i) => wrapped(this.name(i), 22, 1)),
      values: sequences,
      hovertext: parents.map((_, i) => `<b>${this.numbers(i)}</b><br>${wrapped(this.name(i), wide, HOVER_LINES)}`),
      hoverinfo: "text", textinfo: "text", textposition: "top left",
      insidetextfont: font, outsidetextfont: font, pathbar: { thickness: 22, textfont: { family: SANS, size: 11 } },
      tiling: { orientation: "h", pad: 0 },
      marker: { colors: shades, line: { width: 0.5, color: colour("--paper") } },
    };
    return Plotly.react(this.place, [trace], { ...plain(this.place), margin: { l: 0, r: 0, t: 26, b: 4 } }, OPTIONS);
  }

  tell(i) {
    byId("run-numbers").textContent = this.numbers(i);
    byId("run-text").textContent = this.name(i);
  }

  async start() {
    await this.draw();
    this.tell(0);
    this.place.on("plotly_hover", (event) => this.tell(Number(event.points[0].id)));
    this.place.on("plotly_icicleclick", (event) => {
      this.tell(Number(event.points[0].id));
      if (event.nextLevel !== undefined) {
        this.level = Number(event.nextLevel) || 0;
        this.draw();
      }
      return false; // this class has drawn the level, with the texts that fit there
    });
  }
}

// --- the page -------------------------------------------------------------------------------------------------------

for (const button of document.querySelectorAll("[data-copy]")) {
  button.addEventListener("click", () => {
    getSelection().selectAllChildren(byId(button.dataset.copy)); // a page from the file system may lack the clipboard API
    button.textContent = document.execCommand("copy") ? "Copied" : "Press Ctrl+C";
    setTimeout(() => (button.textContent = "Copy"), 2000);
  });
}

async function main() {
  const entries = JSON.parse(await unpacked("entries"));
  run(await unpacked("plotly"));
  const tree = new Tree(entries);
  await tree.start();
  const again = () => tree.draw();
  let waiting;
  addEventListener("resize", () => { clearTimeout(waiting); waiting = setTimeout(again, 100); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", again);
  document.documentElement.dataset.drawn = "yes";
}

main().catch((error) => {
  byId("not-drawn").hidden = false;
  console.error(error);
});
