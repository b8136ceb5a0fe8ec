// A page without a server: its search hides the rows that do not match.
"use strict";

const form = document.querySelector("form[data-filter]");
if (form) {
  const rows = [...document.querySelectorAll("#results tbody tr")];
  const count = document.querySelector("#results [data-announce]");
  const filter = () => {
    const words = form.elements.query.value.toLowerCase().split(/\s+/).filter(Boolean);
    const exact = [...form.querySelectorAll("select")].map((one) => one.value).filter(Boolean);
    let shown = 0;
    for (const row of rows) {
      const text = row.textContent.toLowerCase();
      const cells = [...row.cells].map((cell) => cell.textContent.trim());
      row.hidden = !(words.every((word) => text.includes(word)) && exact.every((one) => cells.includes(one)));
      shown += row.hidden ? 0 : 1;
    }
    if (count) count.textContent = `${shown} of ${rows.length}`;
  };
  form.addEventListener("input", filter);
  form.addEventListener("submit", (event) => { event.preventDefault(); filter(); });
}
