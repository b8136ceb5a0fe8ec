// Explore: filters over the layouts of the page, and a comparison of two.
"use strict";

const explore = { rows: [], chosen: { a: null, b: null } };
const FILTERS = ["strategy", "tp", "pp", "cp", "ep", "micro_batch_size", "recompute", "pp_schedule", "offload"];
const IN_SUMMARY = ["strategy", "tp", "pp", "vp", "cp", "ep", "pp_schedule", "micro_batch_size", "recompute", "offload", "sp"];
const PLAIN = ["false", "[]", "0", "1", "-1"]; // defaults, not shown
const SHOWN = 12;

explore.load = () => {
  const place = document.getElementById("layouts-data");
  if (!place) return false;
  const { common, columns, rows } = JSON.parse(place.textContent);
  explore.common = common;
  explore.names = columns.filter((name) => name !== "total_gib" && name !== "step_s");
  explore.rows = rows.map((row, id) => {
    const one = { id };
    columns.forEach((name, at) => { one[name] = row[at]; });
    const all = { ...common, ...one };
    one.words = explore.words(all);
    one.ask = [...Object.keys(common), ...explore.names].map((name) => `${name}=${all[name]}`).join(" ");
    return one;
  });
  return true;
};

explore.words = (l) => {
  const degrees = ["tp", "pp", "vp", "cp", "ep"].filter((name) => Number(l[name]) > 1).map((name) => `${name} ${l[name]}`);
  const rest = [Number(l.pp) > 1 ? l.pp_schedule : "", `micro batch ${l.micro_batch_size}`, `recompute ${l.recompute}`, l.offload !== "none" ? `offload ${l.offload}` : ""];
  const more = explore.names.filter((name) => !IN_SUMMARY.includes(name) && !PLAIN.includes(l[name])).map((name) => `${name} ${l[name]}`);
  return [l.strategy, ...degrees, ...rest.filter(Boolean), ...more].join(" · ");
};

explore.controls = () => {
  const place = document.getElementById("filters");
  const varied = FILTERS.filter((name) => explore.names.includes(name));
  const color = document.getElementById("color");
  color.replaceChildren(...varied.map((name) => new Option(name, name)));
  color.value = varied.includes("recompute") ? "recompute" : varied[0] || "";
  const before = color.closest(".field");
  for (const name of varied) {
    const field = document.createElement("div");
    field.className = "field";
    const label = document.createElement("label");
    label.htmlFor = `only-${name}`;
    label.textContent = name;
    const select = document.createElement("select");
    select.id = `only-${name}`;
    select.dataset.only = name;
    const values = [...new Set(explore.rows.map((row) => row[name]))].sort((a, b) => Number(a) - Number(b) || String(a).localeCompare(b));
    select.append(new Option("any", ""), ...values.map((value) => new Option(value, value)));
    field.append(label, select);
    place.insertBefore(field, before);
  }
  const gib = explore.rows.map((row) => row.total_gib);
  const most = document.getElementById("most");
  most.min = Math.floor(Math.min(...gib));
  most.max = Math.ceil(Math.max(...gib));
  most.value = most.max;
  place.addEventListener("input", explore.show);
};

explore.wanted = () => {
  const only = [...document.querySelectorAll("[data-only]")].filter((one) => one.value);
  const most = Number(document.getElementById("most").value);
  return explore.rows.filter((row) => row.total_gib <= most && only.every((one) => String(row[one.dataset.only]) === one.value));
};

explore.slot = (row) => (row.ask === explore.chosen.a ? "A" : row.ask === explore.chosen.b ? "B" : "");

explore.show = () => {
  const rows = explore.wanted();
  const by = document.getElementById("color").value;
  document.getElementById("most-out").textContent = document.getElementById("most").value;
  document.getElementById("shown").textContent = `${rows.length.toLocaleString("en")} shown.`;
  explore.table(rows.slice(0, SHOWN));
  const view = charts.views.get("layouts");
  if (view) view.data("layouts", explore.points(rows, by)).runAsync();
};

explore.points = (rows, by) => rows.map((row) => {
  const slot = explore.slot(row);
  return { ...row, color: `${by} ${row[by]}`, slot, size: slot ? 240 : 44 };
});

explore.table = (rows) => {
  const body = document.querySelector("#layouts-table tbody");
  body.replaceChildren(...rows.map((row) => {
    const line = document.createElement("tr");
    const name = document.createElement("th");
    name.scope = "row";
    name.textContent = row.words;
    const cells = [row.total_gib.toFixed(1), row.step_s >= 1 ? row.step_s.toFixed(2) : row.step_s.toPrecision(3)].map((text, at) => {
      const cell = document.createElement("td");
      cell.className = "right";
      const data = document.createElement("data");
      data.value = String(at ? row.step_s : row.total_gib);
      data.textContent = text;
      cell.append(data);
      return cell;
    });
    const last = document.createElement("td");
    const taken = explore.slot(row);
    const button = document.createElement("button");
    button.type = "button";
    button.dataset.row = row.id;
    button.setAttribute("aria-pressed", String(Boolean(taken)));
    button.textContent = taken || "choose";
    button.setAttribute("aria-label", `${taken || "choose"}: ${row.words}`);
    last.append(button);
    line.append(name, ...cells, last);
    return line;
  }));
};

explore.choose = (row) => {
  const { chosen } = explore;
  if (chosen.a === row.ask) chosen.a = chosen.b, chosen.b = null;
  else if (chosen.b === row.ask) chosen.b = null;
  else if (!chosen.a) chosen.a = row.ask;
  else chosen.b = row.ask;
  const focused = document.activeElement && document.activeElement.dataset && document.activeElement.dataset.row;
  explore.show();
  if (focused) { const again = document.querySelector(`[data-row="${focused}"]`); if (again) again.focus(); }
  explore.compare();
};

explore.compare = () => {
  const { a, b } = explore.chosen;
  const here = new URL(location.href);
  for (const [name, value] of Object.entries({ a, b })) value ? here.searchParams.set(name, value) : here.searchParams.delete(name);
  if (here.search.length < 28000) history.replaceState(history.state, "", here);
  const values = {};
  if (a) values.a = a;
  if (b) values.b = b;
  htmx.ajax("GET", "/explore/compare", { target: "#compare", swap: "innerHTML", source: "#request", values });
};

explore.start = () => {
  if (!explore.load()) return;
  const section = document.getElementById("explore");
  explore.chosen = { a: section.dataset.a || null, b: section.dataset.b || null };
  if (!document.querySelector("[data-only]")) explore.controls();
  document.getElementById("layouts-table").addEventListener("click", (event) => {
    const button = event.target.closest("[data-row]");
    if (button) explore.choose(explore.rows[Number(button.dataset.row)]);
  });
  explore.show();
  if (explore.chosen.a || explore.chosen.b) explore.compare();
};

charts.ready.set("layouts", (view) => {
  view.addEventListener("click", (event, item) => {
    if (item && item.datum && item.datum.id !== undefined) explore.choose(explore.rows[item.datum.id]);
  });
});
charts.fill.set("layouts", (spec) => {
  if (explore.load() && !document.querySelector("[data-only]")) explore.controls();
  spec.data.values = explore.points(explore.wanted(), document.getElementById("color").value);
});
document.addEventListener("DOMContentLoaded", explore.start);
document.addEventListener("htmx:afterSettle", (event) => {
  const id = event.detail.target && event.detail.target.id;
  if (id === "answer") explore.start();
  if (id === "compare") for (const end of document.querySelectorAll("[data-end]")) end.scrollLeft = end.scrollWidth;
});
