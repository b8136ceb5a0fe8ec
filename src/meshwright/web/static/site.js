// The static site's search box and picker: both look in the index that the page carries.
"use strict";

const searchForm = document.getElementById("search");
const plansOf = JSON.parse(document.getElementById("plans").textContent);
const rootPath = searchForm.dataset.root;
const GOAL_WORDS = {
  pretrain: ["pretrain", "pretraining", "training", "train", "scratch"],
  sft: ["sft", "finetune", "finetuning", "fine", "tuning", "tune", "instruct", "full"],
  peft: ["peft", "lora", "qlora", "adapter", "adapters"],
};
// Two spellings are equal if they differ in case and punctuation only.
const plain = (text) => text.toLowerCase().replace(/[^a-z0-9]+/g, "");
const goalOf = (word) => Object.keys(GOAL_WORDS).find((goal) => GOAL_WORDS[goal].includes(word));
const clusterOf = (word) => /^(\d+)x(.+)$/.exec(word);
const gpuNames = new Set(plansOf.flatMap((one) => one.plans.map((plan) => plain(plan[0].replace(/^\d+x/, "")))));
const path = (id, plan) => `${rootPath}${id}/${plan[0]}/${plan[1]}/index.html`;

// Splits a query: the goal, the cluster, and the words that name the model.
function parts(text) {
  const asked = { goal: null, gpu: null, count: null, words: [] };
  const spaced = text.toLowerCase().replace(/[×*]/g, "x").replace(/\b(\d+)\s*x\s+/g, "$1x");
  const words = spaced.split(/[\s,/]+/).map(plain).filter(Boolean);
  words.forEach((word, at) => {
    const cluster = clusterOf(word);
    const known = cluster && [...gpuNames].some((name) => name.startsWith(cluster[2]));
    if (/^\d+$/.test(word) && gpuNames.has(words[at + 1])) asked.count = word; // 64 H100
    else if (goalOf(word)) asked.goal = goalOf(word);
    else if (known) [, asked.count, asked.gpu] = cluster;
    else if (gpuNames.has(word)) asked.gpu = word;
    else if (!["on", "with", "gpus", "gpu", "for", "a", "the", "x", "indexhtml"].includes(word)) asked.words.push(word);
  });
  return asked;
}
const pairs = (text) => new Set([...text].slice(1).map((letter, at) => text[at] + letter));
function likeness(a, b) {
  const [one, other] = [pairs(a), pairs(b)];
  const common = [...one].filter((pair) => other.has(pair)).length;
  return (2 * common) / Math.max(one.size + other.size, 1);
}
// Models in the order of how well they match; those with all words, or else the most similar.
function matching(words) {
  if (!words.length) return plansOf;
  const joined = words.join("");
  const all = plansOf.map((one) => {
    const names = [plain(one.id), plain(one.id.split("/").pop()), plain(one.name)];
    const every = words.every((word) => names.some((name) => name.includes(word)));
    const exact = names.some((name) => name === joined) ? 3 : names.some((name) => name.includes(joined)) ? 2 : 0;
    return { one, every, score: exact + Math.max(...names.map((name) => likeness(name, joined))) };
  });
  const found = all.filter((row) => row.every || row.score >= 2);
  const shown = found.length ? found : all.filter((row) => row.score > 0.5);
  return shown.sort((a, b) => b.score - a.score).slice(0, 8).map((row) => row.one);
}
function element(tag, attributes, ...content) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...content);
  return made;
}
function chip(id, plan) {
  const link = element("a", { href: path(id, plan) }, `${plan[1]} on ${plan[0]}`);
  if (!plan[2]) { link.className = "no"; link.title = "does not fit"; }
  return element("li", {}, link);
}
function command(model, gpus, goal) {
  const text = `meshwright recommend ${model} --gpus ${gpus} --goal ${goal}`;
  const code = element("pre", { tabindex: "0", "aria-label": "command line" }, element("code", {}, text));
  const copy = element("button", { type: "button", class: "copy", "data-copy": "text" }, "Copy", element("span", { class: "unseen" }, " command line"));
  return element("div", { class: "copyable" }, code, copy);
}
const searchBox = document.getElementById("f-search");
const foundBox = document.getElementById("found");
function search() {
  const asked = parts(searchBox.value);
  foundBox.hidden = !searchBox.value.trim();
  if (foundBox.hidden) return;
  const rows = [];
  const fits = (plan) => (!asked.goal || plan[1] === asked.goal)
    && (!asked.gpu || plain(plan[0].replace(/^\d+x/, "")).startsWith(asked.gpu))
    && (!asked.count || plan[0].startsWith(`${asked.count}x`));
  for (const one of matching(asked.words)) {
    const plans = one.plans.filter(fits);
    const title = element("h2", {}, element("a", { href: `${rootPath}${one.id}/index.html` }, one.id));
    rows.push(title, plans.length ? element("ul", { class: "chips" }, ...plans.map((plan) => chip(one.id, plan))) : element("p", { class: "small muted" }, "No page for these GPUs and this goal."));
    if (!plans.length) rows.push(command(one.id, `${asked.count || 8}x${(asked.gpu || "H100").toUpperCase()}`, asked.goal || "sft"));
  }
  if (!rows.length) {
    rows.push(element("p", {}, "No page for this model. Any model with a config.json, on your machine:"));
    rows.push(command("./config.json", `${asked.count || 8}x${(asked.gpu || "H100").toUpperCase()}`, asked.goal || "sft"));
  }
  foundBox.replaceChildren(...rows);
  announce(`${foundBox.querySelectorAll("li").length} plans`);
}
searchBox.addEventListener("input", search);
searchForm.addEventListener("submit", (event) => {
  event.preventDefault();
  search();
  const first = foundBox.querySelector(".chips a") || foundBox.querySelector("h2 a");
  if (first) location.href = first.href;
});

// The picker: a page if there is one, and the command otherwise.
const { model: modelField, gpu: gpuField, count: countField, goal: goalField } = searchForm.elements;
const pickedBox = document.getElementById("picked");
function pick(event) {
  const plans = plansOf.find((one) => one.id === modelField.value).plans;
  if (!event || event.target === modelField) { // a model's first page of this goal
    const first = plans.find((plan) => plan[1] === goalField.value) || plans[0];
    [, countField.value, gpuField.value] = clusterOf(first[0]);
    [, goalField.value] = first;
  }
  const [id, gpus, goal] = [modelField.value, `${countField.value}x${gpuField.value}`, goalField.value];
  const plan = plans.find((one) => one[0] === gpus && one[1] === goal);
  if (plan) {
    pickedBox.replaceChildren(element("a", { class: "open", href: path(id, plan) }, `Open: ${goal} on ${gpus}`));
  } else {
    const same = plans.filter((one) => one[1] === goal);
    pickedBox.replaceChildren(element("p", { class: "small muted" }, "Not a page here. Plan it on your machine:"), command(id, gpus, goal), element("ul", { class: "chips" }, ...same.map((one) => chip(id, one))));
  }
}
for (const field of [modelField, gpuField, countField, goalField]) field.addEventListener("input", pick);
pick();

// An address that is not a page, in any spelling: its words are searched.
if (searchForm.dataset.missing !== undefined) {
  searchBox.value = decodeURIComponent(location.pathname.slice(rootPath.length)).replace(/\/+/g, " ").trim();
  document.addEventListener("DOMContentLoaded", search); // when app.js is loaded too
}
