// Charts: specifications come with the page as data; colors come from its style, light or dark.
"use strict";

const charts = { views: new Map(), ready: new Map(), fill: new Map() };

charts.config = () => {
  const style = getComputedStyle(document.documentElement);
  const get = (name) => style.getPropertyValue(name).trim();
  const text = { labelColor: get("--soft"), titleColor: get("--soft"), labelFontSize: 11, titleFontSize: 11, titleFontWeight: 500 };
  return {
    background: "transparent",
    font: "system-ui, sans-serif",
    view: { stroke: get("--line") },
    axis: { ...text, gridColor: get("--line"), domainColor: get("--line"), tickColor: get("--line"), gridOpacity: 0.7 },
    legend: { ...text, orient: "bottom", columns: innerWidth < 600 ? 2 : 4, symbolOpacity: 1 },
    line: { strokeWidth: 2 },
    style: { guide: { color: get("--soft") }, caption: { color: get("--soft"), fontSize: 10 }, measured: { color: get("--c5") } },
    range: { category: [1, 4, 6, 3, 5, 2, 8, 7].map((n) => get(`--c${n}`)) },
  };
};

charts.draw = async (figure) => {
  const id = figure.dataset.chart;
  const place = document.getElementById(id);
  const spec = JSON.parse(document.getElementById(`${id}-spec`).textContent);
  const fill = charts.fill.get(id);
  if (fill) fill(spec);
  const kept = charts.views.get(id);
  if (kept) kept.finalize();
  const made = await vegaEmbed(place, spec, {
    mode: "vega-lite",
    actions: false,
    ast: true,
    expr: vegaInterpreter.expressionInterpreter,
    renderer: "canvas",
    defaultStyle: false,
    tooltip: { disableDefaultStyle: true },
    config: charts.config(),
  });
  const canvas = place.querySelector("canvas");
  if (canvas) for (const name of ["role", "aria-label", "aria-roledescription"]) canvas.removeAttribute(name);
  for (const name of ["aria-roledescription"]) place.removeAttribute(name);
  charts.views.set(id, made.view);
  place.dataset.drawn = "yes";
  const then = charts.ready.get(id);
  if (then) then(made.view);
};

charts.all = () => {
  for (const id of charts.views.keys()) if (!document.getElementById(id)) charts.views.delete(id);
  return Promise.all([...document.querySelectorAll("[data-chart]")].map(charts.draw));
};

document.addEventListener("theme", charts.all);
document.addEventListener("htmx:beforeSwap", () => {
  // htmx copies attributes of the old element with the same id; the security policy forbids a style among them
  for (const plot of document.querySelectorAll(".plot[style]")) plot.removeAttribute("style");
});
document.addEventListener("htmx:afterSettle", (event) => {
  const id = event.detail.target && event.detail.target.id;
  if (id === "answer") charts.all();
});
