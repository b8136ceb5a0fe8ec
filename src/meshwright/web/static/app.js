// Shared by all pages: colors, copying, dropped files, tabs, and htmx hooks.
"use strict";

const root = document.documentElement;
const announce = (text) => { document.getElementById("status").textContent = text; };

// Colors: the system's, or those chosen here.
const darkSystem = matchMedia("(prefers-color-scheme: dark)");
const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : darkSystem.matches);
const toggle = document.getElementById("theme");
const showTheme = () => {
  toggle.setAttribute("aria-pressed", String(isDark()));
  document.dispatchEvent(new Event("theme"));
};
toggle.addEventListener("click", () => {
  root.dataset.theme = isDark() ? "light" : "dark";
  try { localStorage.setItem("theme", root.dataset.theme); } catch { /* kept for this page only */ }
  showTheme();
});
darkSystem.addEventListener("change", showTheme);
showTheme();

// On a phone the menu scrolls: the current page is in sight.
const menu = document.querySelector(".top ul");
const current = menu.querySelector("[aria-current]");
if (current && menu.scrollWidth > menu.clientWidth) menu.scrollLeft = current.offsetLeft - menu.offsetLeft - 60;

// Copying.
document.addEventListener("click", async (event) => {
  const button = event.target.closest("[data-copy]");
  if (!button) return;
  const shown = button.parentElement.querySelector("code").textContent;
  const text = button.dataset.copy === "url" ? new URL(shown, location.href).href : shown;
  const label = button.firstChild;
  try {
    await navigator.clipboard.writeText(text);
    label.textContent = "Copied";
    announce("Copied");
  } catch {
    getSelection().selectAllChildren(button.parentElement.querySelector("code"));
    label.textContent = "Press Ctrl+C";
    announce("Selected; press Control C to copy");
  }
  setTimeout(() => { label.textContent = "Copy"; }, 1600);
});

// Files: dropped on a form, or chosen.
const MAX_BYTES = Number(root.dataset.textBytes);
const plainName = (name) => name.replace(/[^A-Za-z0-9_. -]/g, "_").replace(/^[. -]+/, "").slice(-100) || "script.sh";
// A log that is too long is sent without its middle: its beginning says what runs, its end how it went.
async function shortened(file) {
  const [head, tail] = [0.2 * MAX_BYTES, 0.45 * MAX_BYTES].map(Math.floor);
  const start = await file.slice(0, head).text();
  const end = await file.slice(-tail).text();
  return start.slice(0, start.lastIndexOf("\n") + 1) + end.slice(end.indexOf("\n") + 1);
}
async function take(file, into, named, shorten) {
  if (file.size > MAX_BYTES && !shorten) {
    const advice = document.getElementById(into).form.dataset.tooLong || "Drop the config or script itself.";
    failed(`${file.name} has ${file.size.toLocaleString("en")} bytes; the limit is ${MAX_BYTES.toLocaleString("en")}. ${advice}`);
    return;
  }
  let text = file.size > MAX_BYTES ? await shortened(file) : await file.text();
  const area = document.getElementById(into);
  if (into === "f-config") {
    try { text = JSON.stringify(JSON.parse(text)); } catch { /* the response reports the error */ }
    const model = document.getElementById("f-model") || document.getElementById("f-target");
    if (model) model.value = "";
    live.typing = false;
  }
  area.value = text;
  const details = area.closest("details");
  if (details) details.open = true;
  if (named) document.getElementById(named).value = plainName(file.name);
  announce(`${file.name} read, ${file.size} bytes`);
  area.dispatchEvent(new Event("change", { bubbles: true }));
}
for (const name of ["dragover", "dragleave", "drop"]) {
  document.addEventListener(name, (event) => {
    const form = event.target.closest && event.target.closest("form[data-drop]");
    if (![...event.dataTransfer.types].includes("Files")) return; // words dragged into a field are the browser's own
    event.preventDefault(); // beside a form too: a browser would leave the page and show the file
    if (!form) return;
    form.classList.toggle("over", name === "dragover");
    const file = name === "drop" && event.dataTransfer.files[0];
    if (file) take(file, form.dataset.drop, form.dataset.name, "shorten" in form.dataset);
  });
}
document.addEventListener("change", (event) => {
  const input = event.target.closest("input[type=file][data-into]");
  if (input && input.files[0]) take(input.files[0], input.dataset.into, input.dataset.name, "shorten" in input.dataset);
});

// A form that answers while it is filled in: chips set a field, and every change asks again.
const live = { timer: 0, typing: false };
live.ask = (form, typing) => {
  clearTimeout(live.timer);
  live.typing = typing;
  live.timer = setTimeout(() => form.requestSubmit(), typing ? 450 : 0);
};
document.addEventListener("click", (event) => {
  const chip = event.target.closest(".chip[data-field]");
  const form = chip && chip.closest("form[data-live]");
  if (!form || event.ctrlKey || event.metaKey || event.shiftKey) return;
  event.preventDefault();
  document.getElementById(chip.dataset.field).value = chip.dataset.value;
  if (chip.dataset.field === "f-model") document.getElementById("f-config").value = "";
  for (const other of chip.parentElement.children) other.toggleAttribute("aria-current", other === chip);
  live.ask(form, false);
});
document.addEventListener("input", (event) => {
  const form = event.target.closest("form[data-live]");
  if (form && event.target.matches("input[type=text], textarea")) live.ask(form, true);
});
document.addEventListener("change", (event) => {
  const form = event.target.closest("form[data-live]");
  if (form && !event.target.matches("input[type=file]")) live.ask(form, event.target.matches("input[type=text]"));
});
document.addEventListener("submit", (event) => {
  if (event.submitter) { clearTimeout(live.timer); live.typing = false; }
}, true);
document.addEventListener("htmx:beforeSwap", (event) => {
  const note = document.getElementById("typing");
  if (!note || event.detail.target.id !== "answer") return;
  const page = new DOMParser().parseFromString(event.detail.xhr.responseText, "text/html");
  const wrong = page.querySelector("#answer [role=alert]");
  const unfinished = Boolean(wrong) && live.typing; // half a name is not an error yet: the last answer stays
  note.hidden = !unfinished;
  note.textContent = unfinished ? wrong.querySelector("h2").textContent.trim() : "";
  if (unfinished) event.detail.shouldSwap = false;
});
document.addEventListener("click", (event) => {
  const link = event.target.closest("[data-open]");
  if (!link) return;
  event.preventDefault();
  const field = document.getElementById(link.dataset.open);
  if (field.closest("details")) field.closest("details").open = true;
  field.focus();
});

// Terms: one sentence where the term stands, on hover, focus or tap; the link leads to the glossary.
const meaning = document.getElementById("meaning");
let explained = null;
let leaving = 0;
function explainTerm(term) {
  clearTimeout(leaving);
  if (explained === term) return;
  explained = term;
  const more = document.createElement("a");
  more.href = term.getAttribute("href");
  more.textContent = "glossary";
  meaning.replaceChildren(document.createTextNode(`${term.dataset.meaning}. `), more);
  meaning.hidden = false;
  const at = term.getBoundingClientRect();
  const left = Math.max(8, Math.min(at.left, document.documentElement.clientWidth - meaning.offsetWidth - 8));
  const below = at.bottom + 6 + meaning.offsetHeight < innerHeight || at.top < meaning.offsetHeight + 6;
  meaning.style.left = `${left + scrollX}px`;
  meaning.style.top = `${(below ? at.bottom + 6 : at.top - meaning.offsetHeight - 6) + scrollY}px`;
}
const hideMeaning = () => { meaning.hidden = true; explained = null; };
document.addEventListener("pointerover", (event) => {
  const term = event.target.closest && event.target.closest("a.term");
  if (term) explainTerm(term);
  else if (event.target.closest && event.target.closest("#meaning")) clearTimeout(leaving);
  else if (explained) { clearTimeout(leaving); leaving = setTimeout(hideMeaning, 250); }
});
document.addEventListener("focusin", (event) => {
  const term = event.target.closest("a.term");
  if (term) explainTerm(term);
  else if (explained && !event.target.closest("#meaning")) hideMeaning();
});
document.addEventListener("click", (event) => {
  const term = event.target.closest("a.term");
  if (term && !(event.ctrlKey || event.metaKey)) { event.preventDefault(); explained = null; explainTerm(term); }
  else if (explained && !event.target.closest("#meaning")) hideMeaning();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && explained) hideMeaning();
  if (event.key === "Enter" && event.target.matches && event.target.matches("a.term")) location.href = event.target.href;
});

// Tabs: one in reach of the tab key, the others by arrows.
function choose(tab, focus) {
  for (const other of tab.parentElement.querySelectorAll("[role=tab]")) {
    const on = other === tab;
    other.setAttribute("aria-selected", String(on));
    other.tabIndex = on ? 0 : -1;
    document.getElementById(other.getAttribute("aria-controls")).hidden = !on;
  }
  if (focus) tab.focus();
  shown(document.getElementById(tab.getAttribute("aria-controls")));
}
function shown(panel) {
  for (const lazy of panel.querySelectorAll("[hx-trigger='shown once']")) htmx.trigger(lazy, "shown");
}
document.addEventListener("click", (event) => {
  const tab = event.target.closest("[role=tab]");
  if (tab) choose(tab, false);
});
const MOVES = { ArrowRight: 1, ArrowLeft: -1, Home: -Infinity, End: Infinity };
document.addEventListener("keydown", (event) => {
  const tab = event.target.closest && event.target.closest("[role=tab]");
  if (!tab || !(event.key in MOVES)) return;
  event.preventDefault();
  const all = [...tab.parentElement.querySelectorAll("[role=tab]")];
  const move = MOVES[event.key];
  const at = Number.isFinite(move) ? (all.indexOf(tab) + move + all.length) % all.length : move < 0 ? 0 : all.length - 1;
  choose(all[at], true);
});
document.addEventListener("DOMContentLoaded", () => ready(document));
function ready(where) {
  for (const panel of where.querySelectorAll("[data-tabs] [role=tabpanel]:not([hidden])")) shown(panel);
  const announced = where.querySelector("[data-announce]");
  if (announced) announce(announced.dataset.announce);
}

// A search of seconds: what is computed, and for how long already.
document.addEventListener("htmx:beforeRequest", (event) => {
  const form = event.target.closest("form[data-progress]");
  const place = form && event.target === form && document.getElementById("answer");
  if (!place) return;
  const line = document.createElement("p");
  line.className = "progress";
  const bar = document.createElement("progress");
  bar.setAttribute("aria-label", "Computing");
  const text = document.createElement("span");
  const start = Date.now();
  let stage = "";
  const show = () => { text.textContent = `Computing ${form.dataset.progress}: ${stage ? `${stage}, ` : ""}${Math.round((Date.now() - start) / 1000)} s`; };
  show();
  const asked = new URLSearchParams([...new FormData(form)].filter(([, value]) => value !== ""));
  const timer = setInterval(() => {
    if (!line.isConnected) { clearInterval(timer); return; }
    show();
    if (form.dataset.stages && !asked.get("config")) readStage(`${form.dataset.stages}?${asked}`);
  }, 500);
  const readStage = async (address) => {
    try {
      stage = (await (await fetch(address)).json()).stage || stage;
    } catch { return; } // the line goes on with the time alone
    show();
    const done = /(\d+) of (\d+)/.exec(stage);
    if (done) { bar.max = Number(done[2]); bar.value = Number(done[1]); }
  };
  line.append(bar, " ", text);
  place.prepend(line);
  announce("Computing");
});

// htmx: a config that is too long for an address is posted; empty fields stay out of it.
document.addEventListener("htmx:configRequest", (event) => {
  const { parameters } = event.detail;
  if (event.detail.verb !== "get") return;
  for (const name of [...Object.keys(parameters)]) if (parameters[name] === "") delete parameters[name];
  if ((parameters.config || "").length > 8000) event.detail.verb = "post";
});
document.addEventListener("htmx:beforeRequest", (event) => {
  const target = event.detail.target;
  if (target && target.tagName !== "DATALIST") target.setAttribute("aria-busy", "true");
});
document.addEventListener("htmx:afterRequest", (event) => {
  const target = event.detail.target;
  if (target) target.removeAttribute("aria-busy");
});
document.addEventListener("htmx:afterSettle", (event) => {
  const id = event.detail.target && event.detail.target.id;
  ready((id && document.getElementById(id)) || event.detail.target);
});
function failed(text) {
  const place = document.getElementById("answer") || document.getElementById("results");
  const box = document.createElement("section");
  box.className = "box error";
  box.setAttribute("role", "alert");
  box.textContent = text;
  place.replaceChildren(box);
  announce(text);
}
document.addEventListener("htmx:responseError", (event) => {
  let text = "The request failed.";
  try {
    const { error } = JSON.parse(event.detail.xhr.responseText);
    text = `${error.message}. ${(error.fix || []).join("; ")}`;
  } catch { /* not one of ours */ }
  failed(text);
});
document.addEventListener("htmx:sendError", () => failed("The server does not respond. Is it still running?"));
