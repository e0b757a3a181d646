"use strict";
const root = document.documentElement;
const system = matchMedia("(prefers-color-scheme: dark)");
const toggle = document.getElementById("theme");
const shown = new Map();
const drawn = new Set();

const isDark = () => (root.dataset.theme ?? (system.matches ? "dark" : "light")) === "dark";

function themed() {
  const { color } = getComputedStyle(document.body);
  const grid = getComputedStyle(document.querySelector(".chart")).borderTopColor;
  const axis = { gridcolor: grid, zerolinecolor: grid, linecolor: grid };
  return {
    template: { layout: { xaxis: axis, yaxis: axis } },
    font: { color, family: "system-ui, sans-serif", size: 12 },
    hoverlabel: { namelength: -1, bgcolor: getComputedStyle(toggle).backgroundColor, font: { color }, bordercolor: grid },
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    showlegend: false,
    dragmode: false,
  };
}

const isShown = (trace) => shown.get(trace.legendgroup) ?? trace.visible !== "legendonly";

function entry(trace) {
  const button = document.createElement("button");
  const swatch = document.createElement("i");
  swatch.style.borderTopColor = trace.line?.color ?? trace.marker.color;
  swatch.style.borderTopStyle = { dot: "dotted", dash: "dashed", longdash: "dashed", dashdot: "dashed" }[trace.line?.dash] ?? "solid";
  swatch.style.setProperty("--dot", trace.mode === "lines" ? "transparent" : trace.marker.color);
  button.type = "button";
  button.append(swatch, trace.legendgroup);
  button.ariaPressed = isShown(trace);
  button.addEventListener("click", () => {
    shown.set(trace.legendgroup, !isShown(trace));
    drawAll();
  });
  const item = document.createElement("li");
  item.append(button);
  return item;
}

function draw(chart) {
  const view = chart.querySelector("input:checked, select")?.value ?? 0;
  const text = figures[chart.id][view];
  const { data, layout } = JSON.parse(text.replaceAll(document.body.dataset.ink, themeInk()));
  const named = data.filter((trace) => trace.legendgroup && trace.showlegend !== false);
  const legend = chart.querySelector(".legend");
  const focused = [...legend.children].findIndex((item) => item.contains(document.activeElement));
  legend.replaceChildren(...named.map(entry));
  legend.children[focused]?.firstChild.focus();
  for (const trace of data) trace.visible = isShown(trace);
  Plotly.react(chart.querySelector(".plot"), data, { ...layout, ...themed() }, { responsive: true, displayModeBar: false });
}

const themeInk = () => (isDark() ? "#e9e9ec" : "#1c1d21");

function paint() {
  toggle.textContent = isDark() ? "light" : "dark";
  toggle.ariaPressed = isDark();
}

function drawAll() {
  paint();
  drawn.forEach(draw);
}

function valueOf(row, column) {
  const { value } = row.children[column].dataset;
  return row.children[column].classList.contains("number") ? (value === "" ? NaN : Number(value)) : value;
}

function compare(a, b) {
  if (typeof a === "string") return a.localeCompare(b);
  return Number.isNaN(a) || Number.isNaN(b) ? 0 : a - b;
}

function sort(table, heading) {
  const column = heading.cellIndex;
  const order = heading.ariaSort === "ascending" ? "descending" : "ascending";
  const sign = order === "ascending" ? 1 : -1;
  for (const other of table.tHead.rows[0].cells) other.ariaSort = other === heading ? order : "none";
  const body = table.tBodies[0];
  const last = (row) => Number.isNaN(valueOf(row, column));
  const rows = [...body.rows].sort(
    (a, b) => last(a) - last(b) || sign * compare(valueOf(a, column), valueOf(b, column)),
  );
  body.append(...rows);
}

const verdict = document.getElementById("verdict");
for (const heading of verdict.tHead.rows[0].cells) {
  heading.querySelector("button").addEventListener("click", () => sort(verdict, heading));
}
document.getElementById("sheets")?.addEventListener("change", (event) => {
  document.querySelectorAll(".sheets").forEach((sheet, number) => { sheet.hidden = number !== Number(event.target.value); });
});

async function inflated(id) {
  const bytes = Uint8Array.from(atob(document.getElementById(id).textContent), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Response(stream).text();
}

let library;
let figures;

function loaded() {
  library ??= Promise.all([inflated("plotly"), inflated("figures")]).then(([source, texts]) => {
    const script = document.createElement("script");
    script.textContent = source;
    document.head.append(script);
    figures = JSON.parse(texts);
  });
  return library;
}

// A chart is drawn when it is scrolled to: the library that draws it takes longer to start than the page to read.
const seen = new IntersectionObserver((entries) => {
  for (const { target } of entries.filter((entry) => entry.isIntersecting)) {
    seen.unobserve(target);
    loaded().then(() => drawFirst(target));
  }
}, { rootMargin: "200px" });

function drawFirst(chart) {
  seen.unobserve(chart);
  drawn.add(chart);
  chart.classList.add("drawn");
  draw(chart);
}

// A print waits for nothing, so that the library is there soon after the page; before that, charts say to print once more.
addEventListener("load", () => (window.requestIdleCallback ?? setTimeout)(loaded));
window.addEventListener("beforeprint", () => {
  const waiting = [...document.querySelectorAll(".chart")].filter((chart) => !drawn.has(chart));
  if (window.Plotly) waiting.forEach(drawFirst);
  else loaded().then(() => waiting.forEach(drawFirst));
});

for (const chart of document.querySelectorAll(".chart")) {
  seen.observe(chart);
  chart.addEventListener("change", () => drawn.has(chart) && draw(chart));
  chart.querySelector(".save").addEventListener("click", () => {
    Plotly.downloadImage(chart.querySelector(".plot"), { format: "svg", filename: chart.id });
  });
}
toggle.addEventListener("click", () => {
  root.dataset.theme = isDark() ? "light" : "dark";
  drawAll();
});
system.addEventListener("change", drawAll);
paint();
