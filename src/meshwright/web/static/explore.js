// Explore: filters over the layouts of the page, and a comparison of two.
"use strict";

const explore = { rows: [], marks: [], chosen: { a: null, b: null } };
const IN_SUMMARY = ["strategy", "tp", "pp", "vp", "cp", "ep", "pp_schedule", "micro_batch_size", "recompute", "offload", "sp"];
const PLAIN = ["false", "[]", "0", "1", "-1"]; // defaults, not shown
const SHOWN = 12;

explore.load = () => {
  const place = document.getElementById("layouts-data");
  if (!place) return false;
  const { common, columns, rows } = JSON.parse(place.textContent);
  explore.common = common;
  explore.marks = JSON.parse(document.getElementById("layouts-marks").textContent);
  explore.names = columns.filter((name) => name !== "total_gib" && name !== "step_s");
  explore.rows = rows.map((row, id) => {
    const one = { id };
    columns.forEach((name, at) => { one[name] = row[at]; });
    const all = { ...common, ...one };
    one.words = explore.words(all);
    one.ask = [...Object.keys(common), ...explore.names].map((name) => `${name}=${all[name]}`).join(" ");
    return one;
  });
  // A mark is a row if the layouts agree; the recommended plan may be faster than its row by its kernels.
  for (const mark of explore.marks) {
    const row = explore.rows.find((one) => explore.names.every((name) => !(name in mark.layout) || mark.layout[name] === one[name]));
    mark.ask = row ? row.ask : null;
  }
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
  const gib = explore.rows.map((row) => row.total_gib);
  const most = document.getElementById("most");
  most.min = Math.floor(Math.min(...gib));
  most.max = Math.ceil(Math.max(...gib));
  most.value = most.max;
  explore.restore();
  place.addEventListener("input", () => { explore.keep(); explore.show(); });
  document.getElementById("clear").addEventListener("click", () => {
    for (const one of document.querySelectorAll("[data-only]")) one.value = "";
    most.value = most.max;
    explore.keep();
    explore.show();
  });
};

// Filters are part of the link: only=tp:2,recompute:full, most=60, color=pp.
explore.restore = () => {
  const query = new URL(location.href).searchParams;
  for (const pair of (query.get("only") || "").split(",").filter(Boolean)) {
    const [name, value] = pair.split(":");
    const select = document.getElementById(`only-${name}`);
    if (select && [...select.options].some((one) => one.value === value)) select.value = value;
  }
  const [most, color] = [document.getElementById("most"), document.getElementById("color")];
  if (query.get("most")) most.value = query.get("most");
  if ([...color.options].some((one) => one.value === query.get("color"))) color.value = query.get("color");
};
explore.keep = () => {
  const here = new URL(location.href);
  const most = document.getElementById("most");
  const only = [...document.querySelectorAll("[data-only]")].filter((one) => one.value).map((one) => `${one.dataset.only}:${one.value}`);
  const kept = { only: only.join(","), most: most.value === most.max ? "" : most.value, color: document.getElementById("color").value.replace("frontier", "") };
  for (const [name, value] of Object.entries(kept)) value ? here.searchParams.set(name, value) : here.searchParams.delete(name);
  history.replaceState(history.state, "", here);
};

// The layouts than which no other is both smaller and faster.
explore.frontier = (rows) => {
  let best = Infinity;
  return [...rows].sort((a, b) => a.total_gib - b.total_gib || a.step_s - b.step_s).filter((row) => {
    const better = row.step_s < best;
    if (better) best = row.step_s;
    return better;
  });
};

explore.wanted = () => {
  const only = [...document.querySelectorAll("[data-only]")].filter((one) => one.value);
  const most = Number(document.getElementById("most").value);
  return explore.rows.filter((row) => row.total_gib <= most && only.every((one) => String(row[one.dataset.only]) === one.value));
};

explore.slot = (row) => (row.ask === explore.chosen.a ? "A" : row.ask === explore.chosen.b ? "B" : "");

explore.show = () => {
  const rows = explore.wanted();
  const frontier = explore.frontier(rows);
  document.getElementById("most-out").textContent = document.getElementById("most").value;
  document.getElementById("shown").textContent = `${rows.length.toLocaleString("en")} shown, ${frontier.length} on the frontier.`;
  explore.table(rows, frontier);
  const view = charts.views.get("layouts");
  if (view) view.data("frontier", explore.line(frontier)).data("layouts", explore.points(rows, frontier)).runAsync();
};

explore.points = (rows, frontier) => {
  const by = document.getElementById("color").value;
  const best = new Set(frontier.map((row) => row.id));
  return rows.map((row) => {
    const [slot, on] = [explore.slot(row), best.has(row.id)];
    const color = by === "frontier" ? (on ? "on the frontier" : "other layouts") : `${by} ${row[by]}`;
    return { ...row, color, slot, size: slot ? 240 : on ? 90 : 36, opacity: slot || on ? 0.95 : by === "frontier" ? 0.3 : 0.6 };
  });
};

const element = (tag, text, name) => {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  if (name) made.className = name;
  return made;
};

// One table: the fastest of those shown; with "frontier only", those on the frontier.
explore.table = (rows, frontier) => {
  const table = document.getElementById("layouts-table");
  const only = document.getElementById("frontier-only").checked;
  const best = new Set(frontier.map((row) => row.id));
  const section = document.getElementById("explore").dataset;
  const marked = new Set(explore.marks.map((one) => one.ask));
  const first = rows.filter((row) => marked.has(row.ask)); // whatever its place, the recommended plan is in the table
  const shown = only ? [...frontier].reverse() : [...first, ...rows.slice(0, SHOWN).filter((row) => !marked.has(row.ask))];
  table.querySelector("tbody").replaceChildren(...shown.map((row) => {
    const line = document.createElement("tr");
    const name = element("th", row.words);
    name.scope = "row";
    const label = explore.marks.find((one) => one.ask === row.ask);
    if (label) name.append(" ", element("span", label.label, "tag good"));
    else if (best.has(row.id)) name.append(" ", element("span", "frontier", "tag"));
    const tokens = Number(section.tokensStep) / row.step_s;
    const mfu = (100 * Number(section.mfuStep)) / row.step_s;
    const figures = [
      [row.total_gib, row.total_gib.toFixed(1)],
      [row.step_s, row.step_s >= 1 ? row.step_s.toFixed(2) : row.step_s.toPrecision(3)],
      [tokens, Math.round(tokens).toLocaleString("en")],
      [mfu / 100, `${mfu.toFixed(1)} %`],
    ].map(([value, text]) => {
      const cell = element("td", undefined, "right");
      const data = element("data", text);
      data.value = String(value);
      cell.append(data);
      return cell;
    });
    const last = document.createElement("td");
    const taken = explore.slot(row);
    const button = element("button", taken || "compare");
    button.type = "button";
    button.dataset.row = row.id;
    button.setAttribute("aria-pressed", String(Boolean(taken)));
    button.setAttribute("aria-label", `${taken || "compare"}: ${row.words}`);
    last.append(button);
    if (section.plan) {
      const open = element("a", "plan", "button");
      const overrides = row.ask.split(" ").map((one) => `layout.${one}`).join(" ");
      open.href = `/?${section.plan}&${new URLSearchParams({ overrides: `${section.overrides} ${overrides}`.trim() })}`;
      open.setAttribute("aria-label", `plan with ${row.words}`);
      last.append(" ", open);
    }
    line.append(name, ...figures, last);
    return line;
  }));
};

explore.ready = () => {
  const place = document.getElementById("filters");
  if (place.dataset.ready) return;
  place.dataset.ready = "yes";
  explore.controls();
};

explore.line = (frontier) => frontier.map(({ total_gib, step_s }) => ({ total_gib, step_s })); // not to be clicked

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
  explore.ready();
  document.getElementById("layouts-table").addEventListener("click", (event) => {
    const button = event.target.closest("[data-row]");
    if (button) explore.choose(explore.rows[Number(button.dataset.row)]);
  });
  explore.show();
  if (explore.chosen.a || explore.chosen.b) explore.compare();
};

charts.ready.set("layouts", (view) => {
  view.addEventListener("click", (event, item) => {
    if (!item || !item.datum) return;
    const row = item.datum.label ? explore.rows.find((one) => item.datum.words === (explore.marks.find((mark) => mark.ask === one.ask) || {}).words) : explore.rows[item.datum.id];
    if (row) explore.choose(row);
  });
});
charts.fill.set("layouts", (spec) => {
  if (explore.load()) explore.ready();
  const rows = explore.wanted();
  const frontier = explore.frontier(rows);
  for (const layer of spec.layer) {
    if (layer.data.name === "layouts") layer.data.values = explore.points(rows, frontier);
    if (layer.data.name === "frontier") layer.data.values = explore.line(frontier);
  }
  if (innerWidth < 600) spec.height = 300;
});
document.addEventListener("DOMContentLoaded", explore.start);
document.addEventListener("htmx:afterSettle", (event) => {
  const id = event.detail.target && event.detail.target.id;
  if (id === "answer") explore.start();
  if (id === "compare") for (const end of document.querySelectorAll("[data-end]")) end.scrollLeft = end.scrollWidth;
});
